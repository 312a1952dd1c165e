//! Ten thousand forced exits, a few hundred in an ordinary run.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use hearth_core::exit::ExitReason;
use hearth_core::process::Liveness;
use hearth_core::shim::{METRICS_FIFO, ShimSpec};
use hearth_core::spec::VmmKind;
use hearth_host::process::Signal;
use hearth_vmm::machine::Machine;
use tokio::task::LocalSet;

use crate::common::flat::{Then, elf, firecracker};
use crate::common::{Place, identity};
use crate::double::{MODE, program};
use crate::ear::{LIFE, Life, listen};

/// Set to the number of lives: 10000 for the whole claim.
const LIVES: &str = "HEARTH_TEST_EXITS";
/// At the same time; the host has few processors.
const AT_ONCE: usize = 8;
/// Between two flushes.
const INTERVAL_MS: u64 = 10;
/// The longest life, microseconds after it runs.
const LONGEST_US: u64 = 20_000;

#[derive(Default)]
struct Seen {
    lives: u32,
    in_flight: u32,
    with_sample: u32,
}

/// How many lives this run is to have.
fn lives(usual: u32) -> u32 {
    std::env::var(LIVES).map_or(usual, |n| n.parse().expect("a number"))
}

/// Directories in memory: each life syncs its record.
fn place() -> Place {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        return Place::new();
    }
    let dir = tempfile::Builder::new().prefix("hearth-vmm-").tempdir_in(shm).unwrap();
    std::fs::create_dir(dir.path().join("run")).unwrap();
    std::fs::create_dir(dir.path().join("state")).unwrap();
    Place { dir }
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn random(below: u64) -> u64 {
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom").unwrap(), &mut bytes).unwrap();
    u64::from_le_bytes(bytes) % below
}

/// One life, killed at a random microsecond; every second one with a flush in flight.
async fn life(n: u32, place: &Place, spec: ShimSpec, told: &mut Seen) {
    let in_flight = n.is_multiple_of(2);
    let mode = place.run().join(MODE);
    if in_flight {
        std::fs::write(&mode, "slow").unwrap();
    } else {
        drop(std::fs::remove_file(&mode));
    }
    // The id chooses the moment of the first flush.
    let id = format!("a{:0>15}", base30(random(30u64.pow(10)))).parse().unwrap();
    let (machine, handle) = Machine::new(ShimSpec { id, stats_interval_ms: INTERVAL_MS, ..spec });
    let life = Rc::new(Life::default());
    let owner = tokio::task::spawn_local(LIFE.scope(Rc::clone(&life), machine.run()));
    let vmm = identity(handle.boot().await.unwrap());
    let pidfd = hearth_host::process::open(&vmm).unwrap();
    if in_flight {
        while life.begun.get() == 0 {
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(Duration::from_micros(random(2000))).await;
    } else {
        tokio::time::sleep(Duration::from_micros(random(LONGEST_US))).await;
    }
    hearth_host::process::signal(std::os::fd::AsFd::as_fd(&pidfd), Signal::KILL).unwrap();
    // Every other pair: this very thread waits for the kernel's word before the machine is polled again, so whatever
    // it begins from here on is begun after the exit. The rest see sockets reset before the pidfd tells.
    if n % 4 < 2 {
        while !matches!(hearth_host::process::liveness(&vmm), Liveness::Gone) {
            std::thread::yield_now();
        }
        life.dead.set(true);
    }
    let record = owner.await.unwrap();
    assert_eq!((record.reason, record.signal), (ExitReason::Killed, Some(9)), "{record:?}");
    assert_eq!(life.begun_after.get(), 0, "requests begun after the exit in life {n}");
    let usage = record.usage.expect("a last sample");
    assert!(usage.memory_bytes > Some(0) && usage.cpu_us.is_some(), "{usage:?}");
    assert!(!place.run().join(METRICS_FIFO).exists());
    told.lives += 1;
    told.in_flight += u32::from(in_flight && life.begun.get() > 0);
    told.with_sample += u32::from(usage.vmm.is_some_and(|v| v.samples > 0));
}

fn base30(mut n: u64) -> String {
    const LETTERS: &[u8] = b"abcdefghijkmnpqrstuvwxyz234567";
    let mut text = String::new();
    while n > 0 {
        text.push(char::from(LETTERS[usize::try_from(n % 30).unwrap()]));
        n /= 30;
    }
    text
}

/// Runs so many lives, `AT_ONCE` at a time, and holds them against what they may leave.
fn run(lives: u32, vmm: &dyn Fn(&Place) -> (PathBuf, PathBuf)) -> Seen {
    let _alone = crate::ALONE.blocking_lock();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (said, _listening) = listen();
    let mut all = Seen::default();
    // What is made once and stays: the runtime's and the first spawn's descriptors.
    let places: Vec<Place> = (0..AT_ONCE).map(|_| place()).collect();
    let mut before = None;
    let round = |from: u32, to: u32| {
        let local = LocalSet::new();
        let tasks: Vec<_> = places
            .iter()
            .enumerate()
            .map(|(i, place)| {
                let (program, kernel) = vmm(place);
                let spec = ShimSpec { kernel, ..place.spec(VmmKind::Firecracker, &program) };
                async move {
                    let mut seen = Seen::default();
                    for n in (from..to).skip(i).step_by(AT_ONCE) {
                        life(n, place, spec.clone(), &mut seen).await;
                    }
                    seen
                }
            })
            .collect();
        local.block_on(&runtime, futures::future::join_all(tasks))
    };
    for (from, to) in [(0, 8.min(lives)), (8.min(lives), lives)] {
        for seen in round(from, to) {
            all.lives += seen.lives;
            all.in_flight += seen.in_flight;
            all.with_sample += seen.with_sample;
        }
        let now = (fds(), runtime.metrics().num_alive_tasks());
        assert_eq!(*before.get_or_insert(now), now, "descriptors and tasks");
    }
    for place in &places {
        drop(std::fs::remove_file(place.run().join(MODE)));
        place.assert_only_logs_are_left();
    }
    assert_eq!(said.loud(), Vec::<String>::new(), "nothing is said of an exit");
    all
}

#[test]
fn forced_exits_are_silent_and_leave_nothing() {
    let lives = lives(200);
    let start = std::time::Instant::now();
    let seen = run(lives, &|place| (program(place.dir.path()), "/nonexistent/kernel".into()));
    assert_eq!(seen.lives, lives);
    assert_eq!(seen.in_flight, lives / 2, "with a flush in flight");
    // A flush was announced in these before its answer was held back.
    assert!(seen.with_sample >= lives / 4, "{} lives had a sample", seen.with_sample);
    hearth_testkit::report(&format!(
        "{lives} forced exits of the VMM double in {:.0?}: {} with a flush in flight, {} with a last line of metrics",
        start.elapsed(),
        seen.in_flight,
        seen.with_sample
    ));
}

#[test]
fn the_same_on_a_real_firecracker() {
    let Some(firecracker) = firecracker() else { return };
    let lives = lives(40).min(500);
    let start = std::time::Instant::now();
    let seen = run(lives, &|place| {
        let kernel = place.dir.path().join("flat.elf");
        std::fs::write(&kernel, elf(&Then::Halt)).unwrap();
        (firecracker.clone(), kernel)
    });
    assert_eq!(seen.lives, lives);
    hearth_testkit::report(&format!(
        "{lives} forced exits of a real Firecracker in {:.0?}: {} after a flush began, {} with a last line of metrics",
        start.elapsed(),
        seen.in_flight,
        seen.with_sample
    ));
}
