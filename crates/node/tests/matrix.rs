//! The crash matrix on the fake host: every place of a life, every way it can go wrong there, then released
//! twice or restarted twice. A daemon is an engine on a runtime of its own; its death ends that runtime
//! where it stands. Afterwards nothing of any kind is left, or the sandbox is well.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Bench, create};
use hearth_core::host::{ErrorClass, Host as _};
use hearth_core::id::SandboxId;
use hearth_core::lifecycle::SandboxState;
use hearth_core::network::SlotIndex;
use hearth_core::record::RECORD_FILE;
use hearth_core::resource::{Kind, Resource};
use hearth_core::steps::{Place, ReleaseStep, Step};
use hearth_node::{Engine, EngineError, Failpoints, Kill9};
use hearth_testkit::fake_host::{FakeHost, Fault, Verb};
use hearth_testkit::matrix::{Blow, Cell, Then};
use tokio_util::sync::CancellationToken;

/// Longest time for anything that is waited for.
const BOUND: Duration = Duration::from_secs(10);
/// The sandbox of every cell.
const NAME: &str = "c";

/// A host for one life with all that a life can own.
fn bench() -> Bench {
    Bench::sized("10.12.0.0/24", 0).with_devices(2)
}

/// How a cell failed.
#[derive(Debug)]
struct Failure {
    why: String,
    /// Kinds of which something is left.
    left: BTreeSet<Kind>,
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self { why, left: BTreeSet::new() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.why)?;
        let kinds: Vec<&str> = self.left.iter().map(|k| k.as_str()).collect();
        if kinds.is_empty() { Ok(()) } else { write!(f, "; left behind: {}", kinds.join(", ")) }
    }
}

struct Daemon {
    runtime: tokio::runtime::Runtime,
    engine: Arc<Engine<FakeHost>>,
    dead: CancellationToken,
}

impl Daemon {
    fn new(bench: &Bench, failpoints: &str) -> Self {
        let pairs = failpoints.split(',').filter_map(|p| p.split_once('='));
        let mut config = bench.config(Failpoints::parse(pairs).unwrap());
        let dead = CancellationToken::new();
        let kill = dead.clone();
        config.kill9 = Kill9::new(move || kill.cancel());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { runtime, engine: Engine::new(Arc::clone(&bench.host), config), dead }
    }

    fn ready(bench: &Bench) -> Self {
        let daemon = Self::new(bench, "");
        daemon.runtime.block_on(daemon.engine.start()).unwrap();
        daemon
    }

    /// `None` if the daemon died meanwhile.
    fn ask<T>(&self, work: impl Future<Output = T>) -> Result<Option<T>, Failure> {
        let work = async {
            tokio::select! {
                biased;
                () = self.dead.cancelled() => None,
                done = work => Some(done),
            }
        };
        self.runtime
            .block_on(async { tokio::time::timeout(BOUND, work).await })
            .map_err(|_| Failure::from(format!("no end within {} s", BOUND.as_secs())))
    }

    /// As `kill -9`: every task ends where it stands.
    fn kill(self) {
        drop(self.engine);
        self.runtime.shutdown_timeout(BOUND);
    }
}

fn wait_for(what: &str, seen: impl FnMut() -> bool) -> Result<(), Failure> {
    wait_within(BOUND, what, seen)
}

fn wait_within(bound: Duration, what: &str, mut seen: impl FnMut() -> bool) -> Result<(), Failure> {
    let end = Instant::now() + bound;
    while !seen() {
        if Instant::now() > end {
            return Err(format!("not within {} s: {what}", bound.as_secs()).into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// The kinds of what is there. A directory is the record's if that lies in it.
fn left(bench: &Bench) -> BTreeSet<Kind> {
    let kind = |resource: Resource| match resource {
        Resource::Directory { path } if path.join(RECORD_FILE).exists() => Kind::Record,
        other => other.kind(),
    };
    bench.leftovers().into_iter().map(kind).collect()
}

/// Nothing is left, soon.
fn check_clean(bench: &Bench) -> Result<(), Failure> {
    check_clean_within(bench, BOUND)
}

fn check_clean_within(bench: &Bench, bound: Duration) -> Result<(), Failure> {
    wait_within(bound, "a clean slate", || left(bench).is_empty())
        .map_err(|_| Failure { why: "the slate is not clean".into(), left: left(bench) })
}

/// Lets a life come to the cell's place and be hit there.
fn drive(bench: &Bench, cell: &Cell) -> Result<Daemon, Failure> {
    if cell.place == Place::Start {
        let former = Daemon::ready(bench);
        former.ask(create(&former.engine, NAME))?.unwrap().map_err(|e| e.to_string())?;
        former.kill();
    }
    let daemon = Daemon::new(bench, &cell.failpoints());
    let kill_shim = async {
        if cell.blow != Blow::KillShim {
            return;
        }
        loop {
            if let Some(process) = bench.host.running().first() {
                return process.kill();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let life = async {
        daemon.engine.start().await?;
        match cell.place {
            Place::Start => Ok(()),
            Place::Release(_) => {
                create(&daemon.engine, NAME).await?;
                if cell.blow == Blow::KillShim {
                    for process in bench.host.running() {
                        process.kill();
                    }
                }
                daemon.engine.delete(NAME).await
            }
            _ => create(&daemon.engine, NAME).await.map(|_| ()),
        }
    };
    let ended = if matches!(cell.place, Place::Release(_)) {
        daemon.ask(life)?
    } else {
        daemon.ask(async { tokio::join!(life, kill_shim).0 })?
    };
    if ended.is_none() != cell.blow.kills_daemon() {
        return Err(format!("the place was not passed: {ended:?}").into());
    }
    let must_fail = matches!(cell.place, Place::Start | Place::Create(_) | Place::Spawn)
        && !matches!(cell.blow, Blow::Delay | Blow::KillShim);
    if must_fail && matches!(ended, Some(Ok(()))) {
        return Err("the fault was not felt".to_owned().into());
    }
    let useless = cell.place == Place::Start && must_fail;
    if ended.is_none() || useless {
        daemon.kill();
        return Ok(Daemon::ready(bench));
    }
    Ok(daemon)
}

fn run(cell: &Cell, bench: &Bench) -> Result<(), Failure> {
    run_within(cell, bench, BOUND)
}

/// `bound`: for the clean slate at the end.
fn run_within(cell: &Cell, bench: &Bench, bound: Duration) -> Result<(), Failure> {
    let mut daemon = drive(bench, cell)?;
    if cell.then == Then::RestartTwice {
        for _ in 0..2 {
            daemon.kill();
            daemon = Daemon::ready(bench);
        }
    }
    if cell.survives() {
        wait_for("the sandbox is well", || daemon.engine.shim(NAME).is_ok())?;
    }
    if cell.survives() || cell.then == Then::ReleaseTwice {
        for _ in 0..2 {
            match daemon.ask(daemon.engine.delete(NAME))?.unwrap() {
                // The task of a delete may have been hit: the release goes on without this caller.
                Ok(()) | Err(EngineError::NotFound(_) | EngineError::Closed(_)) => {}
                Err(e) => return Err(format!("a second release failed: {e}").into()),
            }
        }
    }
    wait_for("no sandbox is left", || daemon.engine.list().is_ok_and(|all| all.is_empty()))?;
    let clean = check_clean_within(bench, bound);
    daemon.kill();
    clean
}

/// Runs all of them on a few threads, each on a host of its own, and tells those that failed.
fn run_all<T: Sync + fmt::Display>(cells: &[T], run: impl Fn(&T, &Bench) -> Result<(), Failure> + Sync) {
    let next = AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let bench = bench();
                    if let Err(e) = run(cell, &bench) {
                        failed.lock().unwrap().push(format!("{cell}: {e}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of {} cells:\n{}", failed.len(), cells.len(), failed.join("\n"));
}

#[test]
fn every_cell_ends_with_a_clean_slate_or_a_sandbox_that_is_well() {
    // Commands are begun by the front, not by the engine.
    let cells: Vec<Cell> = Cell::all().into_iter().filter(|c| c.place != Place::Exec).collect();
    assert!(cells.len() > 180, "{}", cells.len());
    run_all(&cells, run);
    hearth_testkit::report(&format!("crash matrix on the fake host: {} cells", cells.len()));
}

/// A creation that fails at a step, and a release of what it made that goes wrong as well.
struct Unwind {
    step: Step,
    release: ReleaseStep,
    fault: &'static str,
}

impl fmt::Display for Unwind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=error-after,{}={}@1", self.step, Place::Release(self.release), self.fault)
    }
}

fn run_unwind(unwind: &Unwind, bench: &Bench) -> Result<(), Failure> {
    let mut daemon = Daemon::new(bench, &unwind.to_string());
    let life = async {
        daemon.engine.start().await?;
        create(&daemon.engine, NAME).await.map(|_| ())
    };
    if let Some(Ok(())) = daemon.ask(life)? {
        return Err("the creation did not fail".to_owned().into());
    }
    if daemon.dead.is_cancelled() {
        daemon.kill();
        daemon = Daemon::ready(bench);
    }
    if daemon.engine.get(NAME).is_ok() {
        // Its next try need not be waited for. What it answers depends on how far the release is.
        drop(daemon.ask(daemon.engine.delete(NAME))?);
    }
    wait_for("no sandbox is left", || daemon.engine.list().is_ok_and(|all| all.is_empty()))?;
    let clean = check_clean(bench);
    daemon.kill();
    clean
}

#[test]
fn a_failed_creation_whose_release_goes_wrong_leaves_nothing() {
    let mut cells = vec![];
    for step in Step::ALL {
        for release in ReleaseStep::ALL {
            for fault in ["error", "error-after", "panic", "panic-after", "kill9", "kill9-after"] {
                cells.push(Unwind { step, release, fault });
            }
        }
    }
    run_all(&cells, run_unwind);
    hearth_testkit::report(&format!("failed creations with a failed release: {} cells", cells.len()));
}

/// Of a life with this kind's release broken, the matrix reports this kind and no other.
fn reports_only(kind: Kind) {
    let bench = bench();
    bench.host.pretend(kind);
    let cell = Cell { place: Place::Create(Step::Boot), blow: Blow::ErrorAfter, then: Then::ReleaseTwice };
    // What stays for good need not be waited for long.
    let failure =
        run_within(&cell, &bench, Duration::from_secs(1)).expect_err("a broken release was not seen");
    assert_eq!(failure.left, BTreeSet::from([kind]), "{failure}");
    assert!(failure.to_string().ends_with(&format!("left behind: {kind}")), "{failure}");
    bench.host.heal();
    for process in bench.host.running() {
        process.kill();
    }
}

/// A life that owns one thing more: its record says so, as one of another version may.
fn owning(bench: &Bench, what: impl FnOnce(&SandboxId, &Path) -> Resource) -> Resource {
    let daemon = Daemon::ready(bench);
    let mut record = daemon.ask(create(&daemon.engine, NAME)).unwrap().unwrap().unwrap().record;
    daemon.kill();
    let run_dir = bench.config(Failpoints::default()).run_dir.join("sandboxes").join(record.id.as_str());
    let resource = what(&record.id, &run_dir);
    record.intend(resource.clone());
    let file = bench.tmp.path().join("state/t/sandboxes").join(record.id.as_str()).join(RECORD_FILE);
    std::fs::write(&file, serde_json::to_vec(&record).unwrap()).unwrap();
    bench.host.plant(resource.clone());
    resource
}

fn mounted(bench: &Bench) -> Resource {
    owning(bench, |_, run_dir| Resource::Mount { path: run_dir.join("memory") })
}

#[test]
fn a_device_in_a_record_is_released_only_after_its_processes() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    owning(&bench, |id, _| Resource::Nbd { index: 3, sandbox: id.clone() });
    bench.host.fail_always(Verb::Release, Kind::Process, Fault::Error(ErrorClass::Busy));
    let daemon = Daemon::ready(&bench);
    let error = daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap_err();
    assert!(matches!(error, EngineError::Stuck { .. }), "{error}");
    // Its server may live, and a disconnect could hang with the whole host's netlink.
    assert_eq!(bench.host.count(Verb::Release, Kind::Nbd), 0);
    bench.host.heal();
    daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap();
    assert!(bench.host.count(Verb::Release, Kind::Nbd) > 0);
    check_clean(&bench).unwrap();
    daemon.kill();
}

#[test]
fn a_broken_release_of_a_mount_is_named() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let mount = mounted(&bench);
    bench.host.pretend(Kind::Mount);
    let daemon = Daemon::ready(&bench);
    // What is mounted in its directory keeps that as well.
    let error = daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap_err();
    assert!(matches!(error, EngineError::Stuck { .. }), "{error}");
    assert_eq!(left(&bench), BTreeSet::from([Kind::Mount, Kind::Directory, Kind::Record]));
    bench.host.heal();
    bench.host.release(&mount, BOUND).unwrap();
    daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap();
    check_clean(&bench).unwrap();
    daemon.kill();
}

#[test]
fn a_mount_in_a_record_is_released_before_its_directory() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    mounted(&bench);
    let daemon = Daemon::ready(&bench);
    daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap();
    check_clean(&bench).unwrap();
    daemon.kill();
}

macro_rules! broken_releases {
    ($($test:ident: $kind:ident),+ $(,)?) => {
        $(#[test]
        fn $test() {
            reports_only(Kind::$kind);
        })+
        /// Every kind that has a test above.
        const BROKEN: &[Kind] = &[$(Kind::$kind),+];
    };
}

broken_releases! {
    a_broken_release_of_a_record_is_named: Record,
    a_broken_release_of_a_directory_is_named: Directory,
    a_broken_release_of_a_cgroup_is_named: Cgroup,
    a_broken_release_of_a_process_is_named: Process,
    a_broken_release_of_a_netns_is_named: Netns,
    a_broken_release_of_a_veth_is_named: Veth,
    a_broken_release_of_a_tap_is_named: Tap,
    a_broken_release_of_a_sandbox_firewall_is_named: SandboxFirewall,
    a_broken_release_of_an_nbd_is_named: Nbd,
}

#[test]
fn every_kind_that_a_life_owns_has_such_a_test() {
    let bench = bench();
    let daemon = Daemon::ready(&bench);
    daemon.ask(create(&daemon.engine, NAME)).unwrap().unwrap().unwrap();
    let owned = left(&bench);
    daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap();
    daemon.kill();
    assert_eq!(owned, BROKEN.iter().copied().collect());
    // The other kinds: one constant table, told by the conformance suite, and mounts, which no life has yet.
    let others = Kind::ALL.into_iter().filter(|k| !BROKEN.contains(k)).collect::<Vec<_>>();
    assert_eq!(others, [Kind::HostFirewall, Kind::Mount]);
}

#[test]
fn a_task_that_panics_again_and_again_is_stuck_and_harms_nobody() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let daemon = Daemon::new(&bench, "release.slot=panic");
    daemon.ask(daemon.engine.start()).unwrap().unwrap().unwrap();
    daemon.ask(create(&daemon.engine, NAME)).unwrap().unwrap().unwrap();
    let error = daemon.ask(daemon.engine.delete(NAME)).unwrap().unwrap().unwrap_err();
    assert!(matches!(error, EngineError::Closed(_)), "{error}");
    let stuck = || {
        let view = daemon.engine.get(NAME).unwrap();
        view.state == SandboxState::Stuck
            && view.record.stuck.is_some_and(|why| why.to_string().contains("panicked"))
    };
    wait_for("it is stuck", stuck).unwrap();
    daemon.ask(create(&daemon.engine, "other")).unwrap().unwrap().unwrap();
    assert!(daemon.engine.shim("other").is_ok());
    daemon.kill();
    let daemon = Daemon::ready(&bench);
    wait_for("it is gone", || daemon.engine.get(NAME).is_err()).unwrap();
    daemon.ask(daemon.engine.delete("other")).unwrap().unwrap().unwrap();
    check_clean(&bench).unwrap();
    daemon.kill();
}

#[test]
fn a_slot_given_back_is_not_released_again_after_a_panic() {
    // Three slots in all, so that the one given back is soon another's.
    let bench = Bench::sized("10.12.0.0/29", 0);
    let daemon = Daemon::new(&bench, "boot=kill9");
    let life = async {
        daemon.engine.start().await.unwrap();
        create(&daemon.engine, NAME).await.map(|_| ())
    };
    assert!(daemon.ask(life).unwrap().is_none());
    daemon.kill();
    // The release that the start begins gives the slot back, waits, and panics when the record is gone.
    let daemon = Daemon::new(&bench, "release.directory=delay(1500)@1+panic-after@1");
    daemon.ask(daemon.engine.start()).unwrap().unwrap().unwrap();
    let mut slots = BTreeSet::new();
    for name in ["x", "y", "z"] {
        let made = || {
            let made = daemon.ask(create(&daemon.engine, name)).unwrap().unwrap();
            slots.extend(made.as_ref().ok().and_then(|view| view.record.slot));
            made.is_ok()
        };
        wait_for("a free slot", made).unwrap();
    }
    let all: BTreeSet<SlotIndex> = (1..=3).map(|n| SlotIndex::new(n).unwrap()).collect();
    assert_eq!(slots, all);
    wait_for("the first one is gone", || daemon.engine.get(NAME).is_err()).unwrap();
    for slot in slots {
        assert!(bench.leftovers().contains(&Resource::Netns { slot }), "slot {slot} was taken away");
    }
    for name in ["x", "y", "z"] {
        daemon.ask(daemon.engine.delete(name)).unwrap().unwrap().unwrap();
    }
    check_clean(&bench).unwrap();
    daemon.kill();
}
