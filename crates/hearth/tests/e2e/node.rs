//! A host of its own with a daemon on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hearth_testkit::clean_slate::{Inventory, Scope};
use hearth_testkit::netns::Throwaway;

/// Variables that concern tests only; the product would remark on them.
const OF_TESTS: [&str; 6] = [
    "HEARTH_BIN",
    "HEARTH_TEST_STATE",
    "HEARTH_TEST_BUSYBOX",
    "HEARTH_SKIP_LOG",
    "HEARTH_SKIP_DIR",
    "HEARTH_REPORT",
];

/// What a test wants of its host.
pub struct Wish {
    /// Lines of the configuration's `[test]` table.
    pub test: &'static str,
    /// Prepared slots.
    pub slot_pool: u32,
    /// Length of the CIDR's prefix.
    pub prefix_len: u8,
    /// Environment of the daemon.
    pub env: &'static [(&'static str, &'static str)],
    /// Seconds for which it is kept how sandboxes ended; else nothing is left of them.
    pub keep_exits: u32,
    /// Uses an empty state directory instead of the prepared one.
    pub own_state: bool,
}

impl Default for Wish {
    fn default() -> Self {
        Self { test: "", slot_pool: 1, prefix_len: 24, env: &[], keep_exits: 0, own_state: false }
    }
}

/// A host of its own.
pub struct Node {
    pub netns: Throwaway,
    pub dir: tempfile::TempDir,
    pub instance: String,
    pub state: PathBuf,
    config: PathBuf,
    daemon: Option<Child>,
    before: Inventory,
    scope: Scope,
    own_state: bool,
    env: &'static [(&'static str, &'static str)],
}

/// Why a test of this group cannot run here, if so. Says it as well.
pub fn cannot(test: &str, needs_templates: bool) -> bool {
    let root =
        fs::metadata("/proc/self").map(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0).unwrap_or(false);
    if !root {
        hearth_testkit::skip(test, "needs root");
        return true;
    }
    if needs_templates && prepared_state().is_none() {
        hearth_testkit::skip(test, "HEARTH_TEST_STATE is not set: run scripts/test");
        return true;
    }
    if needs_templates && !in_path("qemu-system-x86_64") {
        hearth_testkit::skip(test, "qemu-system-x86_64 is not in PATH");
        return true;
    }
    false
}

fn prepared_state() -> Option<PathBuf> {
    std::env::var_os("HEARTH_TEST_STATE").map(PathBuf::from)
}

pub fn in_path(program: &str) -> bool {
    std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|d| d.join(program).is_file())
}

/// The binary under test: a release build if the environment names one.
pub fn hearth() -> PathBuf {
    std::env::var_os("HEARTH_BIN").map_or_else(|| env!("CARGO_BIN_EXE_hearth").into(), PathBuf::from)
}

impl Node {
    pub fn start(wish: &Wish) -> Self {
        let node = Self::new(wish);
        node.with_daemon()
    }

    /// Everything but the daemon.
    pub fn new(wish: &Wish) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        // No such name is part of another: inventories are narrowed by it.
        let instance = format!("e{}x{n}e", std::process::id());
        // Short: a socket's path has at most 107 bytes.
        let dir = tempfile::Builder::new().prefix("hx").tempdir_in("/tmp").unwrap();
        let state = match (wish.own_state, prepared_state()) {
            (false, Some(state)) => state,
            _ => dir.path().join("s"),
        };
        let scope = Scope {
            dirs: vec![state.join(&instance), dir.path().join("r")],
            ..Scope::instance(&instance, "")
        };
        let before = Inventory::take(&scope).unwrap();
        let netns = Throwaway::new("host").unwrap();
        let config = dir.path().join("hearth.toml");
        let text = format!(
            "instance = {instance:?}\nstate_dir = {state:?}\nrun_dir = {run:?}\n\
             [network]\ncidr = \"10.77.0.0/{len}\"\nslot_pool = {pool}\nveth_prefix = \"hxv\"\n[exits]\nkeep_seconds = {keep}\n[stats]\ninterval_seconds = 1\n[test]\n{test}\n",
            run = dir.path().join("r"),
            test = wish.test,
            len = wish.prefix_len,
            pool = wish.slot_pool,
            keep = wish.keep_exits,
        );
        fs::write(&config, text).unwrap();
        let node = Self {
            netns,
            dir,
            instance,
            state,
            config,
            daemon: None,
            before,
            scope,
            own_state: wish.own_state,
            env: wish.env,
        };
        node.host("ip", &["link", "set", "lo", "up"]);
        node
    }

    pub fn with_daemon(mut self) -> Self {
        self.start_daemon();
        self
    }

    pub fn start_daemon(&mut self) {
        self.spawn_daemon();
        self.wait_ready();
    }

    /// Starts the daemon and waits for nothing.
    pub fn spawn_daemon(&mut self) {
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log()).unwrap();
        let child = self
            .program()
            .args(["serve", "--config"])
            .arg(&self.config)
            .envs(self.env.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.daemon = Some(child);
    }

    pub fn wait_ready(&mut self) {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let ready = self.cli(&["ls"]);
            if ready.status.success() {
                return;
            }
            let exited = self.daemon.as_mut().unwrap().try_wait().unwrap();
            assert!(exited.is_none(), "the daemon ended: {}", self.log_text());
            assert!(Instant::now() < end, "not ready: {}\n{}", text(&ready.stderr), self.log_text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn log(&self) -> PathBuf {
        self.dir.path().join("daemon.log")
    }

    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    pub fn config(&self) -> &Path {
        &self.config
    }

    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// Other lines of the `[test]` table for the next start.
    pub fn set_test(&self, test: &str) {
        let text = fs::read_to_string(&self.config).unwrap();
        let (before, _) = text.split_once("[test]\n").unwrap();
        fs::write(&self.config, format!("{before}[test]\n{test}\n")).unwrap();
    }

    /// How the daemon ended by itself; `None` while it runs.
    pub fn daemon_ended(&mut self) -> Option<ExitStatus> {
        let status = self.daemon.as_mut()?.try_wait().unwrap()?;
        self.daemon = None;
        Some(status)
    }

    pub fn has_daemon(&self) -> bool {
        self.daemon.is_some()
    }

    pub fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// SIGTERM, as a supervisor does.
    pub fn stop_daemon(&mut self) {
        let Some(daemon) = self.daemon.take() else { return };
        let pid = daemon.id().to_string();
        assert!(Command::new("kill").arg(&pid).status().unwrap().success());
        self.daemon = Some(daemon);
        self.wait_daemon();
    }

    /// Waits for a daemon that was told to end.
    pub fn wait_daemon(&mut self) {
        let Some(mut daemon) = self.daemon.take() else { return };
        let end = Instant::now() + Duration::from_secs(60);
        while daemon.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the daemon does not end: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The product on this host, without the variables that only concern its tests.
    fn program(&self) -> Command {
        let mut command = self.netns.command(hearth());
        for variable in OF_TESTS {
            command.env_remove(variable);
        }
        command
    }

    /// A client command on this host.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = self.program();
        command.args(args).env("HEARTH_CONFIG", &self.config).stdin(Stdio::null());
        // What the daemon is told by a variable, such as its token, its clients are told as well.
        command.envs(self.env.iter().copied());
        command
    }

    pub fn cli(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// A client command that must work; its stdout.
    pub fn ok(&self, args: &[&str]) -> String {
        let out = self.cli(args);
        assert!(
            out.status.success(),
            "hearth {args:?}: {}\n{}\n{}",
            out.status,
            text(&out.stderr),
            self.log_text()
        );
        text(&out.stdout)
    }

    /// A program on this host that must work; its stdout.
    pub fn host(&self, program: &str, args: &[&str]) -> String {
        let out = self.netns.command(program).args(args).output().unwrap();
        assert!(out.status.success(), "{program} {args:?}: {}", text(&out.stderr));
        text(&out.stdout)
    }

    pub fn list(&self) -> serde_json::Value {
        serde_json::from_str(&self.ok(&["ls", "--json"])).unwrap()
    }

    pub fn inspect(&self, name: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&["inspect", name])).unwrap()
    }

    /// One life, so that the directories that stay with the instance are there. Needs the VMM `process`.
    pub fn warm_up(&self) {
        self.ok(&["create", "busybox", "--name", "warm-up", "--vmm", "process", "--disk", "16"]);
        self.ok(&["rm", "warm-up"]);
    }

    /// Everything of this instance, in words: what a clean slate is compared by.
    pub fn inventory(&self) -> String {
        let seen = Inventory::take(&self.scope).unwrap();
        let mut lines: Vec<String> = seen.lines().map(str::to_owned).collect();
        lines.push(self.host("ip", &["-o", "link"]));
        lines.push(self.host("nft", &["list", "ruleset"]));
        // A zombie has neither command line nor program, so the list above misses what was not reaped. A program that
        // a reconcile pass runs ends soon.
        if let Some(daemon) = &self.daemon {
            let end = Instant::now() + Duration::from_secs(10);
            while !children(daemon.id()).is_empty() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(20));
            }
            lines.push(format!("children of the daemon: {}", children_in_words(daemon.id())));
        }
        lines.join("\n")
    }

    /// Deletes all, stops the daemon, and checks that nothing is left.
    pub fn end_clean(mut self) {
        let deleted = self.cli(&["rm", "--all"]);
        assert!(deleted.status.success(), "{}", text(&deleted.stderr));
        // What an earlier daemon left goes in the background, and a daemon's end does not wait for it.
        let end = Instant::now() + Duration::from_secs(60);
        let status = || serde_json::from_str::<serde_json::Value>(&self.ok(&["--json", "node", "status"]));
        while status().unwrap()["reclaim"]["state"] == "running" {
            assert!(Instant::now() < end, "the reclaim does not end: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.stop_daemon();
        self.check_clean();
    }

    pub fn check_clean(&self) {
        if !self.own_state {
            let left = self.state.join(&self.instance).join("sandboxes");
            let left = fs::read_dir(left).map(|d| d.count()).unwrap_or(0);
            assert_eq!(left, 0, "sandbox directories left");
            remove_empty(&self.state.join(&self.instance));
        }
        remove_empty(&self.dir.path().join("s").join(&self.instance));
        remove_empty(&self.dir.path().join("r"));
        let after = Inventory::take(&self.scope).unwrap();
        let diff = self.before.diff(&after);
        let left: Vec<&String> = diff.appeared.iter().filter(|l| !l.contains("daemon.log")).collect();
        assert!(left.is_empty(), "left behind: {left:#?}\n{}", self.log_text());
    }
}

/// Events outlive the sandboxes they tell of.
fn is_journal(name: &std::ffi::OsStr) -> bool {
    name.to_str().is_some_and(|n| n.starts_with("events-") || n == "webhook.json")
}

/// The instance's own directories and lock stay with the instance; a test's instance ends here.
fn remove_empty(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            remove_empty(&path);
        } else if path.file_name().is_some_and(|n| {
            dir.ends_with("exits")
                || n == "lock"
                || n == "sysctl.json"
                || n == "host-firewall.json"
                || is_journal(n)
        }) {
            fs::remove_file(path).unwrap();
        }
    }
    // Anything else in it shows in the inventory.
    drop(fs::remove_dir(dir));
}

impl Drop for Node {
    fn drop(&mut self) {
        // After a failed assertion: take away what the test made, by the product's own means.
        if let Some(mut daemon) = self.daemon.take() {
            drop(self.cli(&["rm", "--all"]));
            drop(Command::new("kill").arg(daemon.id().to_string()).status());
            drop(daemon.wait());
        }
    }
}

/// Pids of the children of a process, zombies too.
pub fn children(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .filter_map(|task| fs::read_to_string(task.unwrap().path().join("children")).ok())
        .collect::<Vec<String>>()
        .concat()
}

/// Each child's pid, name and state, and where in the kernel it waits.
pub fn children_in_words(pid: u32) -> String {
    let read = |pid: &str, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let words = |pid: &str| {
        let stat = read(pid, "stat");
        let stat = stat.split(' ').take(3).collect::<Vec<_>>().join(" ");
        format!("{stat} {} {}", read(pid, "wchan"), read(pid, "cmdline").replace('\0', " "))
    };
    children(pid).split_whitespace().map(words).collect::<Vec<_>>().join(", ")
}

/// A static busybox: the one the environment names, or the host's.
pub fn busybox() -> Option<PathBuf> {
    let named = std::env::var_os("HEARTH_TEST_BUSYBOX").map(PathBuf::from);
    named.or_else(|| in_path("busybox").then(|| PathBuf::from("busybox")))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Resident set of a process, KiB, at its highest so far. The kernel counts in batches per processor, so that it may even
/// fall a little.
pub fn peak_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
