//! A look at a host that runs another orchestrator, by its layout. Who has what is told by parents, open files and
//! namespaces; nothing here is ours, so nothing is taken for its own by a name alone.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_core::doctor::{Identity, ItemKind, Thing};
use hearth_core::layout::{Layout, Parent};
use hearth_core::network::NETNS_DIR;
use hearth_core::process::ProcessIdentity;

use super::procs::{self, OpenFiles, Proc};
use super::{Job, Scan, Survey, in_parallel, list, nbd, unless_gone, with_inode};
use crate::net;
use crate::process;

/// Daemons of an orchestrator that run, by pid and program.
pub type Daemons = Vec<(u32, String)>;

/// Looks at everything of a layout, in parallel, for at most `within`; with the orchestrator's daemons that run.
///
/// # Errors
/// If the processes cannot be listed: then nothing can be said of anything.
pub fn take(layout: &Layout, within: Duration) -> io::Result<(Survey, Daemons)> {
    let all = procs::all()?;
    let is_daemon = |p: &Proc| layout.processes.daemons.iter().any(|d| d == p.program() || *d == p.seen.comm);
    let mut daemons: Daemons =
        all.iter().filter(|(_, p)| is_daemon(p)).map(|(pid, p)| (*pid, p.program().to_owned())).collect();
    daemons.sort();
    let shared = Arc::new(Shared { layout: layout.clone(), procs: all });
    let job = |kinds, run: fn(&Shared) -> Scan| {
        let shared = Arc::clone(&shared);
        Job { kinds, run: Box::new(move || run(&shared)) }
    };
    let jobs = vec![
        job(&[ItemKind::Netns, ItemKind::Veth], slots),
        job(&[ItemKind::Process, ItemKind::Socket, ItemKind::Fifo], processes_and_files),
        job(&[ItemKind::Cgroup], cgroups),
        job(&[ItemKind::Rule], rules),
        job(&[ItemKind::Nbd], |_| nbd::scan(nbd::Of::Nameless)),
    ];
    Ok((in_parallel(jobs, within), daemons))
}

struct Shared {
    layout: Layout,
    procs: HashMap<u32, Proc>,
}

/// Device and inode of each slot's namespace, for names that stand for one.
type Namespaces = HashMap<u32, (u64, u64)>;

fn namespaces(layout: &Layout) -> io::Result<(Namespaces, Vec<Thing>)> {
    let (mut ids, mut things) = (HashMap::new(), Vec::new());
    let Some(base) = unless_gone(fs::symlink_metadata(NETNS_DIR))? else { return Ok((ids, things)) };
    for entry in list(Path::new(NETNS_DIR))? {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(slot) = layout.slot_of(&layout.slots.netns, &name) else { continue };
        let Some(meta) = unless_gone(fs::symlink_metadata(entry.path()))? else { continue };
        let thing = Thing { slot: Some(slot), ..Thing::new(ItemKind::Netns, name) };
        if !meta.is_file() || meta.dev() == base.dev() {
            let foreign = Some("no namespace is bound there".to_owned());
            things.push(Thing { foreign, ..thing });
            continue;
        }
        ids.insert(slot, (meta.dev(), meta.ino()));
        let facts = vec![format!("namespace inode {}", meta.ino())];
        things.extend(with_inode(Thing { facts, ..thing }, &entry.path()));
    }
    Ok((ids, things))
}

fn slots(shared: &Shared) -> Scan {
    let layout = &shared.layout;
    let mut scan = Scan::default();
    match namespaces(layout) {
        Ok((_, things)) => scan.things = things,
        Err(e) => scan.unseen.push(format!("netns: {NETNS_DIR}: {e}")),
    }
    // A link is a slot's own if its other end lies in the slot's namespace; it goes with that.
    let prefix = layout.slots.veth.to_string();
    let prefix = prefix.split('{').next().unwrap_or_default();
    let ends = net::links::ends(prefix, |name| {
        let slot = layout.slot_of(&layout.slots.veth, name)?;
        let file = fs::File::open(Path::new(NETNS_DIR).join(netns_name(layout, slot))).ok();
        Some((slot, file))
    });
    match ends {
        Ok(ends) => scan.things.extend(ends.into_iter().map(|end| {
            let thing = Thing { slot: Some(end.slot), ..Thing::new(ItemKind::Veth, end.name) };
            let identity = Identity::Link { index: end.index };
            let foreign = (!end.inside).then(|| "its other end is not in that slot's namespace".to_owned());
            Thing { identity, foreign, facts: vec![format!("link index {}", end.index)], ..thing }
        })),
        Err(e) => scan.unseen.push(e.to_string()),
    }
    scan
}

/// The name of a slot's namespace. The pattern has one placeholder for its number.
pub fn netns_name(layout: &Layout, slot: u32) -> String {
    layout.slots.netns.to_string().replace("{n}", &slot.to_string())
}

fn rules(shared: &Shared) -> Scan {
    let (found, unseen) = net::rules::census(&shared.layout);
    let thing = |rule: net::rules::SlotRule| Thing {
        slot: Some(rule.slot),
        facts: vec![format!("listed by {}", rule.backend.as_str())],
        identity: Identity::Rule { backend: rule.backend.as_str().into(), table: rule.table },
        ..Thing::new(ItemKind::Rule, rule.text)
    };
    Scan { things: found.into_iter().map(thing).collect(), unseen }
}

/// The cgroup above all sandboxes, where there is one.
pub fn cgroup_parent(layout: &Layout) -> io::Result<Option<PathBuf>> {
    let Some(cgroups) = &layout.cgroups else { return Ok(None) };
    Ok(crate::cgroup::mount_point()?.map(|mount| mount.join(&cgroups.parent)))
}

fn cgroups(shared: &Shared) -> Scan {
    let mut scan = Scan::default();
    let list = || -> io::Result<Vec<Thing>> {
        let (Some(cgroups), Some(parent)) = (&shared.layout.cgroups, cgroup_parent(&shared.layout)?) else {
            return Ok(vec![]);
        };
        let mut found = Vec::new();
        for entry in list(&parent)? {
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            let sandbox = cgroups.name.read(&name).and_then(|said| said.sandbox);
            let foreign = sandbox.is_none().then(|| "its name is none of a sandbox".to_owned());
            let thing = Thing::new(ItemKind::Cgroup, entry.path().display().to_string());
            found.extend(with_inode(Thing { sandbox, foreign, ..thing }, &entry.path()));
        }
        Ok(found)
    };
    match list() {
        Ok(things) => scan.things = things,
        Err(e) => scan.unseen.push(format!("cgroup: {e}")),
    }
    scan
}

fn processes_and_files(shared: &Shared) -> Scan {
    let Shared { layout, procs } = shared;
    let mut scan = Scan::default();
    let open = procs::open_files(procs, &layout.files.directories);
    if open.hidden > 0 {
        scan.unseen.push(format!("process: open files of {} processes are hidden; run as root", open.hidden));
    }
    let slots: HashMap<(u64, u64), u32> = match namespaces(layout) {
        Ok((ids, _)) => ids.into_iter().map(|(slot, id)| (id, slot)).collect(),
        Err(e) => {
            scan.unseen.push(format!("process: {NETNS_DIR}: {e}"));
            HashMap::new()
        }
    };
    for (pid, proc) in procs {
        scan.things.extend(of_process(layout, *pid, proc, procs, &slots, &open));
    }
    for directory in &layout.files.directories {
        match files(layout, directory, &open) {
            Ok(found) => scan.things.extend(found),
            Err(e) => scan.unseen.push(format!("socket: {}: {e}", directory.display())),
        }
    }
    scan
}

/// A process of this orchestrator, or one that keeps something of it.
fn of_process(
    layout: &Layout,
    pid: u32,
    proc: &Proc,
    procs: &HashMap<u32, Proc>,
    slots: &HashMap<(u64, u64), u32>,
    open: &OpenFiles,
) -> Option<Thing> {
    let slot = proc.netns.and_then(|id| slots.get(&id)).copied();
    let by_cgroup = proc.cgroup.as_deref().and_then(|path| sandbox_of_cgroup(layout, path));
    let socket = layout.processes.vmm.iter().filter(|v| v.program == proc.program()).find_map(|vmm| {
        let at = proc.words.iter().position(|w| w.as_os_str() == vmm.socket.as_str())?;
        proc.words.get(at + 1)
    });
    let by_socket = socket.and_then(|path| sandbox_of_socket(layout, path));
    let mut facts = vec![format!("{} (parent {})", proc.program(), proc.seen.parent)];
    let foreign = match (&by_cgroup, &by_socket, slot, socket) {
        (Some(cgroup), Some(socket), ..) if cgroup != socket => {
            Some(format!("it is in the cgroup of {cgroup} and its API socket is that of {socket}"))
        }
        (Some(_), ..) | (None, Some(_), Some(_), _) => None,
        (None, Some(_), None, _) => {
            Some("it has the arguments of a VMM, but is in no cgroup and no slot of it".to_owned())
        }
        (None, None, Some(slot), _) => Some(format!("it is inside slot {slot}, and no VMM of a sandbox")),
        (None, None, None, Some(path)) => {
            Some(format!("a VMM whose API socket {} is none of a sandbox", path.display()))
        }
        (None, None, None, None) => return None,
    };
    let connected = socket.is_some_and(|path| open.connected.contains(path));
    if connected {
        facts.push("somebody is connected to its API socket".into());
    }
    let boot_id = process::boot_id().ok()?.to_owned();
    let asleep: Vec<_> = process::tasks(pid).into_iter().filter(|t| t.state == 'D').collect();
    let identity = ProcessIdentity { pid, start_time: proc.seen.start_time, boot_id, cgroup: None };
    Some(Thing {
        sandbox: by_cgroup.or(by_socket),
        slot,
        facts,
        since_ms: process::started_ms(proc.seen.start_time),
        undead: !asleep.is_empty() && process::is_killed(pid),
        tasks: asleep,
        identity: Identity::Process(identity),
        foreign,
        parent: Some(parent_of(layout, proc.seen.parent, procs)),
        connected,
        ..Thing::new(ItemKind::Process, pid.to_string())
    })
}

fn parent_of(layout: &Layout, parent: u32, procs: &HashMap<u32, Proc>) -> Parent {
    let named = |names: &[String], p: &Proc| names.iter().any(|n| n == p.program() || *n == p.seen.comm);
    match procs.get(&parent) {
        _ if parent <= 1 => Parent::Init,
        Some(p) if named(&layout.processes.daemons, p) => Parent::Daemon(parent, p.program().to_owned()),
        Some(p) if named(&layout.processes.reapers, p) => Parent::Reaper(parent, p.program().to_owned()),
        Some(p) => Parent::Other(parent, p.program().to_owned()),
        None => Parent::Other(parent, "not seen".to_owned()),
    }
}

fn sandbox_of_cgroup(layout: &Layout, path: &str) -> Option<String> {
    let cgroups = layout.cgroups.as_ref()?;
    let parts: Vec<&str> = path.strip_suffix(" (deleted)").unwrap_or(path).split('/').collect();
    let parent: Vec<&str> = cgroups.parent.to_str()?.split('/').collect();
    // By its last parts, since a cgroup namespace hides or changes the first.
    let windows = parts.windows(parent.len() + 1).find(|w| w[..parent.len()] == parent[..])?;
    cgroups.name.read(windows.last()?)?.sandbox
}

fn sandbox_of_socket(layout: &Layout, path: &Path) -> Option<String> {
    let directory = path.parent()?;
    layout.files.directories.iter().any(|d| d == directory).then_some(())?;
    let name = path.file_name()?.to_str()?;
    layout.files.sockets.iter().find_map(|pattern| pattern.read(name)?.sandbox)
}

fn files(layout: &Layout, directory: &Path, open: &OpenFiles) -> io::Result<Vec<Thing>> {
    let mut found = Vec::new();
    for entry in list(directory)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        let of =
            |patterns: &[hearth_core::layout::Pattern]| patterns.iter().find_map(|p| p.read(&name)?.sandbox);
        let (kind, sandbox) = match (of(&layout.files.sockets), of(&layout.files.fifos)) {
            (Some(sandbox), _) => (ItemKind::Socket, sandbox),
            (None, Some(sandbox)) => (ItemKind::Fifo, sandbox),
            (None, None) => continue,
        };
        let path = entry.path();
        let Some(meta) = unless_gone(fs::symlink_metadata(&path))? else { continue };
        let fits = match kind {
            ItemKind::Socket => meta.file_type().is_socket(),
            _ => meta.file_type().is_fifo(),
        };
        let thing = Thing {
            sandbox: Some(sandbox),
            holders: open.holders.get(&path).cloned().unwrap_or_default(),
            foreign: (!fits).then(|| format!("it has the name of a {kind} and is none")),
            ..Thing::new(kind, path.display().to_string())
        };
        found.extend(with_inode(thing, &path));
    }
    Ok(found)
}
