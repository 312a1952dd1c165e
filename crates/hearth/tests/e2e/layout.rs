//! A host that another orchestrator left dirty: what doctor says of it, and what stays untouched when it is cleaned.
//! Runs in a network namespace of its own, with slot numbers that no orchestrator on this machine has.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use hearth_testkit::netns::Throwaway;
use serde_json::Value;

use crate::node::{cannot, hearth, in_path, text};

/// A dirty host.
pub struct Dirty {
    pub netns: Throwaway,
    pub dir: tempfile::TempDir,
    pub layout: PathBuf,
    instance: String,
    first: u32,
}

/// Why these tests cannot run here.
pub fn tools_missing(test: &str) -> bool {
    if cannot(test, false) {
        return true;
    }
    for program in ["ip", "iptables", "iptables-save", "iptables-restore", "mkfifo"] {
        if !in_path(program) {
            hearth_testkit::skip(test, &format!("{program} is not in PATH"));
            return true;
        }
    }
    if !xtask().is_file() {
        hearth_testkit::skip(test, "xtask is not built: cargo build -p xtask");
        return true;
    }
    false
}

/// Built beside the tests by whoever runs all of the workspace.
fn xtask() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_hearth")).with_file_name("xtask")
}

impl Dirty {
    pub fn make(slots: u32, processes: u32) -> Self {
        let dir = tempfile::Builder::new().prefix("hxl").tempdir_in("/tmp").unwrap();
        let netns = Throwaway::new("e2b").unwrap();
        // Names in /run/netns and cgroups are the whole machine's: numbers and names of its own for each host.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let instance = format!("l{pid}n{n}");
        let first = 101 + (pid + n) % 15 * 2_100;
        let layout = dir.path().join("e2b.toml");
        let (_, built_in) = hearth_core::layout::BUILT_IN[0];
        let files = format!("directories = [{:?}]", dir.path());
        let own = |text: String, name: &str| {
            text.replace(&format!("\"{name}-{{sandbox}}"), &format!("\"{name}-i{instance}x{{sandbox}}"))
        };
        let text = ["fc", "uffd", "fc-metrics", "sbx"].into_iter().fold(built_in.to_owned(), own);
        let text = text
            .replace("directories = [\"/tmp\", \"/orchestrator/sandbox\"]", &files)
            .replace("first = 1\nlast = 32766", &format!("first = {first}\nlast = {}", first + slots + 50));
        assert!(text.contains(&files) && text.contains(&format!("first = {first}")));
        assert_eq!(text.matches(&format!("-i{instance}x{{sandbox}}")).count(), 4, "{text}");
        fs::write(&layout, text).unwrap();
        let dirty = Self { netns, dir, layout, instance, first };
        dirty.host("ip", &["link", "set", "lo", "up"]);
        // Foreign rules before and between.
        dirty.host("iptables", &["-A", "FORWARD", "-i", "eth7", "-j", "DROP"]);
        dirty.host("iptables", &["-t", "nat", "-A", "POSTROUTING", "-s", "10.11.0.0/16", "-j", "MASQUERADE"]);
        let (n, k) = (slots.to_string(), processes.to_string());
        dirty.dirty_host(&["--slots", &n, "--processes", &k, "--rules"]);
        dirty
    }

    fn dirty_host(&self, args: &[&str]) {
        let mut command = self.netns.command(xtask());
        command.args(["dirty-host", "--layout", "e2b", "--instance", &self.instance]);
        command.args(["--from", &self.first.to_string(), "--dir"]).arg(self.dir.path());
        let out = command.args(args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", text(&out.stderr));
    }

    pub fn host(&self, program: &str, args: &[&str]) -> String {
        let out = self.netns.command(program).args(args).output().unwrap();
        assert!(out.status.success(), "{program} {args:?}: {}", text(&out.stderr));
        text(&out.stdout)
    }

    /// A command for this layout.
    pub fn hearth(&self, args: &[&str]) -> Output {
        self.plain(&[args, &["--layout", self.layout.to_str().unwrap()]].concat())
    }

    pub fn plain(&self, args: &[&str]) -> Output {
        let mut command = self.netns.command(hearth());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("HEARTH_") {
                command.env_remove(name);
            }
        }
        let run = self.dir.path().join("r");
        command.env("HEARTH_RUN_DIR", run).env("HEARTH_STATE_DIR", self.dir.path().join("s"));
        command.args(args).stdin(std::process::Stdio::null()).output().unwrap()
    }

    pub fn json(&self, args: &[&str]) -> Value {
        let out = self.hearth(args);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
    }

    /// A file with the name of one of its sandboxes.
    pub fn file(&self, kind: &str, rest: &str) -> PathBuf {
        self.dir.path().join(format!("{kind}-i{}x{rest}", self.instance))
    }

    /// The address of a slot in a rule.
    pub fn address(&self, n: u32) -> String {
        let slot = self.slot(n);
        format!("10.11.{}.{}/32", slot >> 8, slot & 255)
    }

    pub fn slot(&self, n: u32) -> u32 {
        self.first + n
    }

    pub fn rules(&self) -> Vec<String> {
        let saved = self.host("iptables-save", &[]);
        saved.lines().filter(|l| !l.starts_with('#')).map(without_counters).collect()
    }

    /// Takes away whatever is left.
    pub fn clean(&self) {
        self.dirty_host(&["--clean"]);
    }
}

impl Drop for Dirty {
    fn drop(&mut self) {
        // After a failed assertion as well.
        let mut command = self.netns.command(xtask());
        command.args(["dirty-host", "--layout", "e2b", "--clean", "--instance", &self.instance]);
        drop(command.output());
    }
}

/// A chain's line ends with counters, which traffic changes.
fn without_counters(line: &str) -> String {
    match line.split_once(" [") {
        Some((chain, _)) if line.starts_with(':') => chain.to_owned(),
        _ => line.to_owned(),
    }
}

/// "kind name" of the items in one state.
pub fn in_state(diagnosis: &Value, state: &str) -> Vec<String> {
    let items = diagnosis["items"].as_array().unwrap().iter().filter(|i| i["state"] == state);
    items.map(|i| format!("{} {}", i["kind"].as_str().unwrap(), i["name"].as_str().unwrap())).collect()
}

#[test]
fn doctor_tells_orphans_from_what_somebody_has() {
    if tools_missing("doctor_tells_orphans_from_what_somebody_has") {
        return;
    }
    let dirty = Dirty::make(6, 3);
    // A stranger inside a slot, a decoy with a VMM's arguments, a socket that somebody holds, a link and a rule that
    // only look like it.
    let inside = format!("ns-{}", dirty.slot(5));
    let mut stranger = Command::new("nsenter")
        .args([&format!("--net=/run/netns/{inside}"), "sleep", "600"])
        .spawn()
        .unwrap();
    let held = dirty.file("fc", "held-rnd.sock");
    let listener = UnixListener::bind(&held).unwrap();
    let client = UnixStream::connect(&held).unwrap();
    let last = dirty.slot(50);
    dirty.host("ip", &["link", "add", &format!("veth-{last}"), "type", "veth", "peer", "name", "other"]);
    let drop_rule = ["-A", "FORWARD", "-i", &format!("veth-{}", dirty.slot(0)), "-j", "DROP"];
    dirty.host("iptables", &drop_rule);
    fs::write(dirty.file("uffd", "a-b.sock"), "a file").unwrap();

    let before = dirty.rules();
    let diagnosis = dirty.json(&["doctor", "--json"]);
    assert_eq!(before, dirty.rules());
    let (leaked, live, foreign) =
        (in_state(&diagnosis, "leaked"), in_state(&diagnosis, "live"), in_state(&diagnosis, "foreign"));
    let count =
        |all: &[String], kind: &str| all.iter().filter(|i| i.starts_with(&format!("{kind} "))).count();
    assert_eq!(count(&leaked, "netns"), 5, "{diagnosis:#}");
    assert_eq!(count(&leaked, "process"), 3, "{diagnosis:#}");
    let files = ["cgroup", "socket", "fifo"].map(|kind| count(&leaked, kind));
    assert_eq!(files, [3, 6, 3], "{leaked:#?}");
    assert_eq!(count(&leaked, "rule"), 5 * 6, "{diagnosis:#}");
    assert!(foreign.contains(&format!("netns {inside}")), "{foreign:#?}");
    assert!(foreign.contains(&format!("process {}", stranger.id())), "{foreign:#?}");
    assert!(foreign.contains(&format!("veth veth-{last}")), "{foreign:#?}");
    assert!(foreign.iter().any(|i| i.contains("xa-b.sock")), "{foreign:#?}");
    assert!(live.contains(&format!("socket {}", held.display())), "{live:#?}");
    let said = diagnosis.to_string();
    assert!(!said.contains("-j DROP"), "a rule that mentions a slot by accident is taken for its own");
    drop((listener, client));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    dirty.host("ip", &["link", "del", &format!("veth-{last}")]);
    dirty.clean();
}
