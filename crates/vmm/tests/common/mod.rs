//! What the tests of the back ends share: a spec in a directory of its own, a machine that runs, and the
//! proof that nothing is left.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its own part of this file")]

pub mod flat;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::exit::{EXIT_RECORD_FILE, ExitRecord};
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::shim::{CONSOLE_LOG, SHIM_PROTOCOL, ShimSpec};
use hearth_core::spec::VmmKind;
use hearth_vmm::machine::{Machine, MachineHandle};
use tempfile::TempDir;
use tokio::task::JoinSet;

/// Says that the test of this thread could not run, and why.
pub fn skipped(why: &str) {
    hearth_testkit::skip(std::thread::current().name().unwrap_or("test"), why);
}

/// The first of these programs that is there: the one an environment variable names, then those in PATH.
pub fn program(variable: &str, name: &str) -> Option<PathBuf> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    named.into_iter().chain(std::env::split_paths(&path).map(|d| d.join(name))).find(|p| p.is_file())
}

/// The guest agent: `$HEARTH_GUEST`, or beside this test's own program.
pub fn guest() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("HEARTH_GUEST") {
        return Some(PathBuf::from(named));
    }
    let own = std::env::current_exe().ok()?;
    own.ancestors().skip(1).take(2).map(|d| d.join("hearth-guest")).find(|p| p.is_file())
}

/// A sandbox's two directories.
pub struct Place {
    pub dir: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("hearth-vmm-").tempdir().unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        std::fs::create_dir(dir.path().join("state")).unwrap();
        Self { dir }
    }

    pub fn run(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn spec(&self, vmm: VmmKind, program: &Path) -> ShimSpec {
        ShimSpec {
            protocol: SHIM_PROTOCOL,
            instance: "test".parse().unwrap(),
            id: "abcdefghijkmnpqr".parse().unwrap(),
            name: "box".parse().unwrap(),
            vmm,
            program: program.to_owned(),
            kernel: "/nonexistent/kernel".into(),
            initramfs: None,
            rootfs: None,
            overlay: None,
            block: None,
            drive_rate: Default::default(),
            cpus: 1,
            memory_mib: 128,
            netns: None,
            net: None,
            agent: false,
            env: vec![],
            ends_at_ms: None,
            run_dir: self.run(),
            state_dir: self.state(),
            console_cap_bytes: 1 << 20,
            stats_interval_ms: 0,
        }
    }

    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.run().join(CONSOLE_LOG)).unwrap_or_default()).into_owned()
    }

    /// The exit record on disk.
    pub fn record(&self) -> ExitRecord {
        serde_json::from_slice(&std::fs::read(self.state().join(EXIT_RECORD_FILE)).unwrap()).unwrap()
    }

    /// Nothing but logs in the run directory, nothing but the record in the state directory.
    pub fn assert_only_logs_are_left(&self) {
        let names = |dir: PathBuf| -> Vec<String> {
            let all = std::fs::read_dir(dir).unwrap();
            all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
        };
        let stray: Vec<String> = names(self.run()).into_iter().filter(|n| !n.contains(".log")).collect();
        assert!(stray.is_empty(), "left in the run directory: {stray:?}");
        assert_eq!(names(self.state()), [EXIT_RECORD_FILE]);
    }
}

/// A machine whose owner task runs on this test's thread.
pub struct Running {
    pub handle: MachineHandle,
    owner: JoinSet<ExitRecord>,
}

impl Running {
    pub fn new(spec: ShimSpec) -> Self {
        let (machine, handle) = Machine::new(spec);
        let mut owner = JoinSet::new();
        owner.spawn(machine.run());
        Self { handle, owner }
    }

    /// The record the owner ends with.
    pub async fn ended(mut self) -> ExitRecord {
        let ended = tokio::time::timeout(Duration::from_secs(30), self.owner.join_next()).await;
        ended.expect("the machine ends").expect("it has an owner").expect("it did not panic")
    }
}

/// The identity of a child of this process.
pub fn identity(pid: u32) -> ProcessIdentity {
    hearth_host::process::identity_of(pid).unwrap()
}

/// Waits until the process is gone.
pub async fn assert_gone(process: &ProcessIdentity) {
    until("the process is gone", || matches!(hearth_host::process::liveness(process), Liveness::Gone)).await;
}

/// Polls a condition; a test must not wait for less than what it asserts.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
