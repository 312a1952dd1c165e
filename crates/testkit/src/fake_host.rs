//! A [`Host`](hearth_core::host::Host) without a kernel, for tests of the engine: the same semantics (a namespace takes its links with
//! it, a cgroup its processes), failures to order, and a log of calls. Directories are real, below the two
//! directories given, since the engine writes files into them; nothing else touches the machine.
//!
//! One value may outlive several engines: that is how a restart of the daemon is played. A reboot is a new
//! value with another boot id over the same state directory.

mod answers;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::host::{Census, ErrorClass, HostError, Sighting, SpawnSpec};
use hearth_core::id::SandboxId;
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::record::RECORD_FILE;
use hearth_core::resource::{Kind, Resource};

pub use crate::fake_process::{End, ProcessHandle};
use crate::faults::Faults;
pub use crate::faults::{Fault, Verb};

/// Called for each spawn, with a handle of the new process; an error fails the spawn. Start a thread here to
/// play the process: it ends when [`ProcessHandle::wait`] says so.
pub type OnSpawn = dyn Fn(&SpawnSpec, ProcessHandle) -> Result<(), String> + Send + Sync;

/// One call as it came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// What was asked.
    pub verb: Verb,
    /// Of which kind.
    pub kind: Kind,
    /// Of which thing, in words.
    pub what: String,
}

/// The fake host.
pub struct FakeHost {
    layout: SlotLayout,
    state_dir: PathBuf,
    run_dir: PathBuf,
    boot_id: String,
    inner: Mutex<Inner>,
    on_spawn: Mutex<Option<Arc<OnSpawn>>>,
}

#[derive(Default)]
struct Inner {
    /// Everything but directories and processes; the value says whether it is whole.
    things: HashMap<Resource, bool>,
    half_directories: Vec<PathBuf>,
    processes: BTreeMap<u32, (ProcessHandle, String)>,
    foreign: HashMap<Resource, String>,
    unknown: BTreeMap<u32, String>,
    conflict: Option<String>,
    faults: Faults,
    pretended: BTreeSet<Kind>,
    calls: Vec<Call>,
    resets: BTreeMap<SlotIndex, u32>,
    spawned: u32,
    nbd_limit: Option<u32>,
}

impl Inner {
    fn take_away(&mut self, resource: &Resource) {
        if !self.pretended.contains(&resource.kind()) {
            self.things.remove(resource);
        }
    }
}

/// Above every pid Linux can hand out (PID_MAX_LIMIT is 2^22), so that no mistake of a test hits a process.
const FIRST_PID: u32 = 5_000_000;

impl FakeHost {
    /// An empty host. Both directories are the instance's own and should be temporary.
    #[must_use]
    pub fn new(layout: SlotLayout, state_dir: PathBuf, run_dir: PathBuf) -> Self {
        Self {
            layout,
            state_dir,
            run_dir,
            boot_id: "fake-boot-1".into(),
            inner: Mutex::default(),
            on_spawn: Mutex::default(),
        }
    }

    /// Its layout.
    #[must_use]
    pub fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Another boot than the default one.
    #[must_use]
    pub fn with_boot_id(mut self, boot_id: &str) -> Self {
        boot_id.clone_into(&mut self.boot_id);
        self
    }

    /// What happens at each spawn from now on; the default is a process that runs until killed.
    pub fn on_spawn(
        &self,
        f: impl Fn(&SpawnSpec, ProcessHandle) -> Result<(), String> + Send + Sync + 'static,
    ) {
        *self.on_spawn.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(f));
    }

    /// Orders a failure of the `nth` such call from now (1: the next).
    pub fn fail(&self, verb: Verb, kind: Kind, nth: u64, fault: Fault) {
        self.lock().faults.order(verb, kind, nth, 1, fault);
    }

    /// Orders a failure of every such call until [`FakeHost::heal`].
    pub fn fail_always(&self, verb: Verb, kind: Kind, fault: Fault) {
        self.lock().faults.order(verb, kind, 1, u64::MAX, fault);
    }

    /// From now on a release of this kind claims success and the thing stays, also where it would have gone
    /// along with something else, until [`FakeHost::heal`]. A directory is emptied and stays; of a record
    /// everything goes but the file itself and the directory it lies in.
    pub fn pretend(&self, kind: Kind) {
        self.lock().pretended.insert(kind);
    }

    /// Takes back all ordered failures.
    pub fn heal(&self) {
        let mut inner = self.lock();
        inner.faults.clear();
        inner.pretended.clear();
    }

    /// The calls so far, in order.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    /// How many calls of a verb on a kind came in.
    #[must_use]
    pub fn count(&self, verb: Verb, kind: Kind) -> u64 {
        self.lock().faults.count(verb, kind)
    }

    /// How often a slot was reset.
    #[must_use]
    pub fn resets(&self, slot: SlotIndex) -> u32 {
        self.lock().resets.get(&slot).copied().unwrap_or(0)
    }

    /// Puts something foreign in the place of `resource`.
    pub fn plant_foreign(&self, resource: Resource, why: &str) {
        self.lock().foreign.insert(resource, why.to_owned());
    }

    /// Makes a resource without a call: a leftover of a former life.
    pub fn plant(&self, resource: Resource) {
        if let Resource::Directory { path } = &resource {
            fs::create_dir_all(path).expect("plant a directory");
        } else {
            self.lock().things.insert(resource, true);
        }
    }

    /// Takes a resource away without a call, and nothing with it: somebody else's doing.
    pub fn vanish(&self, resource: &Resource) {
        self.lock().things.remove(resource);
    }

    /// From now on the kernel has an NBD client with so many indexes.
    pub fn load_nbd(&self, limit: u32) {
        self.lock().nbd_limit = Some(limit);
    }

    /// From now on something on the host stands in this instance's way.
    pub fn plant_conflict(&self, why: &str) {
        self.lock().conflict = Some(why.to_owned());
    }

    /// From now on nobody can say whether the process with this pid lives; `None`: they can again.
    pub fn blind(&self, pid: u32, why: Option<&str>) {
        match why {
            Some(why) => self.lock().unknown.insert(pid, why.to_owned()),
            None => self.lock().unknown.remove(&pid),
        };
    }

    /// The processes that run.
    #[must_use]
    pub fn running(&self) -> Vec<ProcessHandle> {
        self.lock().processes.values().filter(|(p, _)| p.ended().is_none()).map(|(p, _)| p.clone()).collect()
    }

    /// All that exists: empty on a clean slate.
    #[must_use]
    pub fn leftovers(&self) -> Vec<Resource> {
        let mut all: Vec<Resource> = self.lock().things.keys().cloned().collect();
        all.extend(self.running().into_iter().map(|p| Resource::Process { process: p.identity().clone() }));
        all.extend(self.directories().ours.into_iter().map(|s| s.resource));
        all.sort_by_key(ToString::to_string);
        all
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs and counts the call, carries out a fault that comes before the effect and gives back one that
    /// comes with it.
    fn begin(
        &self,
        verb: Verb,
        kind: Kind,
        what: &str,
        within: Duration,
    ) -> Result<Option<Fault>, HostError> {
        let fault = {
            let mut inner = self.lock();
            inner.calls.push(Call { verb, kind, what: what.to_owned() });
            inner.faults.strike(verb, kind)
        };
        match fault {
            Some(Fault::Error(class)) => Err(error(verb, what, class, "ordered by the test")),
            Some(Fault::Deadline) => {
                std::thread::sleep(within);
                Err(error(verb, what, ErrorClass::Deadline, "ordered by the test"))
            }
            Some(Fault::Slow(time)) => {
                std::thread::sleep(time);
                Ok(None)
            }
            Some(Fault::Panic) => panic!("ordered by the test: {} {what}", verb.as_str()),
            other => Ok(other),
        }
    }

    /// As the kernel host judges it: strictly below one of the two, by components.
    fn check_path(&self, verb: Verb, resource: &Resource, path: &Path) -> Result<(), HostError> {
        let plain = path.components().skip(1).all(|c| matches!(c, Component::Normal(_)));
        let mut bases = vec![&self.run_dir];
        if resource.kind() == Kind::Directory {
            bases.push(&self.state_dir);
        }
        let below = bases.iter().any(|base| path.starts_with(base) && path != base.as_path());
        if path.is_absolute() && plain && below {
            return Ok(());
        }
        Err(error(verb, &resource.to_string(), ErrorClass::Refused, "not below the instance's directories"))
    }

    fn check(&self, verb: Verb, inner: &Inner, resource: &Resource) -> Result<(), HostError> {
        if let Some(why) = inner.foreign.get(resource) {
            return Err(error(verb, &resource.to_string(), ErrorClass::Foreign, why));
        }
        match resource {
            Resource::Directory { path } | Resource::Mount { path } => self.check_path(verb, resource, path),
            Resource::Cgroup { name } => name
                .parse::<SandboxId>()
                .map(|_| ())
                .map_err(|e| error(verb, &resource.to_string(), ErrorClass::Refused, &e.to_string())),
            _ => Ok(()),
        }
    }

    fn directories(&self) -> Census {
        let mut census = Census::default();
        for base in [self.run_dir.join("sandboxes"), self.state_dir.join("sandboxes")] {
            let Ok(entries) = fs::read_dir(&base) else { continue };
            for path in entries.flatten().map(|e| e.path()) {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let foreign = if name.parse::<SandboxId>().is_err() {
                    Some("its name is no sandbox id")
                } else if !fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir()) {
                    Some("it is not a directory")
                } else {
                    None
                };
                match foreign {
                    Some(why) => drop(census.foreign.insert(path.display().to_string(), why.into())),
                    None => census
                        .ours
                        .push(Sighting { resource: Resource::Directory { path }, facts: "directory".into() }),
                }
            }
        }
        census
    }

    fn remove(&self, inner: &mut Inner, resource: &Resource) -> Result<(), HostError> {
        match resource {
            Resource::Directory { path } => {
                let inside = |r: &Resource| matches!(r, Resource::Mount { path: m } if m.starts_with(path));
                if inner.things.keys().any(inside) {
                    let why = "something is mounted in it";
                    return Err(error(Verb::Release, &resource.to_string(), ErrorClass::Busy, why));
                }
                match fs::symlink_metadata(path) {
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                    Ok(m) if m.is_dir() => remove_directory(path, &inner.pretended).map_err(|e| {
                        error(Verb::Release, &resource.to_string(), ErrorClass::Failed, &e.to_string())
                    })?,
                    _ => {
                        let why = "not a directory";
                        return Err(error(Verb::Release, &resource.to_string(), ErrorClass::Foreign, why));
                    }
                }
                inner.half_directories.retain(|p| p != path);
            }
            Resource::Process { process } => {
                if let Some((p, _)) = inner.processes.get(&process.pid)
                    && p.identity() == process
                    && !inner.pretended.contains(&Kind::Process)
                {
                    p.kill();
                }
            }
            Resource::Cgroup { name } => {
                if !inner.pretended.contains(&Kind::Process) {
                    for (process, _) in inner.processes.values().filter(|(_, c)| c == name) {
                        process.kill();
                    }
                }
                inner.take_away(resource);
            }
            Resource::Netns { slot } => {
                for part in Resource::of_slot(*slot) {
                    inner.take_away(&part);
                }
            }
            _ => inner.take_away(resource),
        }
        Ok(())
    }
}

fn remove_directory(path: &Path, pretended: &BTreeSet<Kind>) -> std::io::Result<()> {
    let kept = pretended.contains(&Kind::Record).then(|| fs::read(path.join(RECORD_FILE)).ok()).flatten();
    fs::remove_dir_all(path)?;
    if kept.is_some() || pretended.contains(&Kind::Directory) {
        fs::create_dir(path)?;
    }
    kept.map_or(Ok(()), |record| fs::write(path.join(RECORD_FILE), record))
}

/// The error of a fault that lets the effect happen.
fn after(verb: Verb, what: &str, fault: Option<Fault>) -> Result<(), HostError> {
    match fault {
        Some(Fault::HalfDone(class) | Fault::DoneButError(class)) => {
            Err(error(verb, what, class, "ordered by the test, after the effect"))
        }
        _ => Ok(()),
    }
}

fn error(verb: Verb, what: &str, class: ErrorClass, why: &str) -> HostError {
    HostError { verb: verb.as_str(), what: what.to_owned(), why: why.to_owned(), class, source: None }
}
