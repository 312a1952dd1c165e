//! A look at everything of one instance, for `hearth doctor`: every scan by itself, on a thread of its own and with a
//! time limit, so that one that hangs or is not allowed hides only what it alone could see. Opens nothing for
//! writing and changes nothing.

mod cgroups;
mod nbd;
pub mod other;
mod procs;
mod slots;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hearth_core::doctor::{Identity, ItemKind, Scene, Thing};
use hearth_core::host::{Census, HostError};
use hearth_core::resource::Resource;

use crate::directory::Directories;
use crate::kernel_host::HostConfig;
use crate::mount::Mounts;
use crate::net;

/// What was seen, and what was not.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// What was seen.
    pub scene: Scene,
    /// What could not be seen, and why.
    pub unseen: Vec<String>,
}

/// What one scan saw.
#[derive(Debug, Default)]
struct Scan {
    things: Vec<Thing>,
    unseen: Vec<String>,
}

/// A scan, and the kinds it is the only one to see.
struct Job {
    kinds: &'static [ItemKind],
    run: Box<dyn FnOnce() -> Scan + Send>,
}

/// Looks at everything of an instance, in parallel, for at most `within`.
#[must_use]
pub fn take(config: &HostConfig, within: Duration) -> Survey {
    type Run = fn(&HostConfig) -> Scan;
    const JOBS: [(&[ItemKind], Run); 9] = [
        (&[ItemKind::Netns], slots::namespaces),
        (&[ItemKind::Veth], slots::links),
        (&[ItemKind::Tap], slots::taps),
        (&[ItemKind::SandboxFirewall], slots::firewalls),
        (&[ItemKind::HostFirewall], host_firewall),
        (&[ItemKind::Cgroup, ItemKind::Process], cgroups::scan),
        (&[ItemKind::Directory], directories),
        (&[ItemKind::Mount], mounts),
        (&[ItemKind::Nbd], |_| nbd::scan(nbd::Of::Instance)),
    ];
    let job = |(kinds, run): (&'static [ItemKind], Run)| {
        let config = config.clone();
        Job { kinds, run: Box::new(move || run(&config)) }
    };
    in_parallel(JOBS.map(job).into(), within)
}

fn in_parallel(jobs: Vec<Job>, within: Duration) -> Survey {
    let deadline = Instant::now() + within;
    let (send, receive) = mpsc::channel();
    let mut survey = Survey::default();
    let mut open: BTreeMap<usize, &'static [ItemKind]> = BTreeMap::new();
    for (n, Job { kinds, run }) in jobs.into_iter().enumerate() {
        let send = send.clone();
        // Nobody listens any more if the time is over.
        let run = move || drop(send.send((n, run())));
        // Not joined: one that hangs in the kernel could not be.
        match std::thread::Builder::new().name(format!("scan-{}", kinds[0])).spawn(run) {
            Ok(_) => drop(open.insert(n, kinds)),
            Err(e) => survey.unseen.push(format!("{}: no thread for the scan: {e}", words(kinds))),
        }
    }
    drop(send);
    while !open.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((n, scan)) = receive.recv_timeout(left) else { break };
        if let Some(kinds) = open.remove(&n).filter(|_| scan.unseen.is_empty()) {
            survey.scene.whole.extend(kinds);
        }
        survey.scene.things.extend(scan.things);
        survey.unseen.extend(scan.unseen);
    }
    for kinds in open.into_values() {
        survey.unseen.push(format!("{}: the scan is not done after {within:?}", words(kinds)));
    }
    survey.unseen.sort();
    survey
}

fn words(kinds: &[ItemKind]) -> String {
    kinds.iter().map(|k| k.as_str()).collect::<Vec<_>>().join(", ")
}

/// Turns a census into things: `each` adds what is known besides, and gives nothing for what is gone by now.
fn of_census(
    kind: ItemKind,
    census: Result<Census, HostError>,
    each: impl Fn(&Resource, Thing) -> Option<Thing>,
) -> Scan {
    let mut scan = Scan::default();
    match census {
        Err(e) => scan.unseen.push(e.to_string()),
        Ok(census) => {
            for sighting in census.ours {
                let thing = Thing::new(kind, sighting.resource.to_string());
                let thing = Thing { facts: vec![sighting.facts], ..thing };
                scan.things.extend(each(&sighting.resource, thing));
            }
            for (name, why) in census.foreign {
                scan.things.push(Thing { foreign: Some(why), ..Thing::new(kind, name) });
            }
            scan.unseen.extend(in_few_words(kind, census.incomplete));
        }
    }
    scan
}

/// One line however many there are: without root each of thousands of slots is one.
fn in_few_words(kind: ItemKind, reasons: Vec<String>) -> Option<String> {
    let more = match reasons.len() {
        0 | 1 => String::new(),
        n => format!("; and {} more like this", n - 1),
    };
    reasons.into_iter().next().map(|first| format!("{kind}: {first}{more}"))
}

/// Adds what tells a file from another that has its name; nothing if it is gone.
fn with_inode(thing: Thing, path: &Path) -> Option<Thing> {
    let meta = fs::symlink_metadata(path).ok()?;
    let identity = Identity::Inode { device: meta.dev(), inode: meta.ino() };
    // The time of the last change of a directory's own inode is the earliest that every file system has.
    let nanos = u64::try_from(meta.ctime_nsec()).unwrap_or_default();
    let since_ms =
        u64::try_from(meta.ctime()).ok().map(|s| s.saturating_mul(1000).saturating_add(nanos / 1_000_000));
    Some(Thing { identity, since_ms, ..thing })
}

/// What is in a directory; nothing if there is none.
fn list(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Nothing for what went while it was looked at.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(e)
            if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::ENODEV | libc::ENXIO)) =>
        {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

fn host_firewall(config: &HostConfig) -> Scan {
    of_census(ItemKind::HostFirewall, net::host_firewall::census(&config.layout), |_, thing| {
        Some(Thing { name: format!("inet {}", config.layout.host_table()), ..thing })
    })
}

fn directories(config: &HostConfig) -> Scan {
    let census = Directories::new(config.state_dir.clone(), config.run_dir.clone()).census();
    of_census(ItemKind::Directory, census, |resource, thing| {
        let Resource::Directory { path } = resource else { return None };
        let sandbox = path.file_name()?.to_str().map(str::to_owned);
        with_inode(Thing { name: path.display().to_string(), sandbox, ..thing }, path)
    })
}

fn mounts(config: &HostConfig) -> Scan {
    let census = Mounts::new(&config.layout.instance, config.run_dir.clone()).census();
    of_census(ItemKind::Mount, census, |resource, thing| {
        let Resource::Mount { path } = resource else { return None };
        let below = path.strip_prefix(config.run_dir.join("sandboxes")).ok();
        let sandbox = below.and_then(|p| Some(p.components().next()?.as_os_str().to_str()?.to_owned()));
        Some(Thing { name: path.display().to_string(), sandbox, ..thing })
    })
}

/// How many network block devices are connected.
///
/// # Errors
/// If sysfs cannot be read.
pub fn nbd_connected() -> io::Result<u64> {
    nbd::connected(Path::new("/sys/block")).map(|found| found.len() as u64)
}
