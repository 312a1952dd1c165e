//! Traps: what goes wrong around a sandbox without its daemon's doing, on a real host with the VMM `process`.
//! Here the processes; below the network, the records and disks, and crowds.

mod crowd;
mod network;
mod records;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_host::cgroup::Cgroups;
use hearth_host::process::identity_of;

pub use crowd::create_all;

use crate::node::{Node, Wish, cannot, children, text};

/// No prepared slots: one that is given back is removed.
pub const PROCESS: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 0,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// Arguments that make a sandbox.
pub fn create(name: &str) -> [&str; 8] {
    ["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]
}

pub fn until(node: &Node, what: &str, mut good: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !good() {
        assert!(Instant::now() < end, "never {what}: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs and is no zombie.
pub fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

pub fn signal(which: &str, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    assert!(Command::new("kill").arg(which).args(&pids).status().unwrap().success(), "kill {which} {pids:?}");
}

pub fn shim_pid(node: &Node, name: &str) -> u32 {
    u32::try_from(node.inspect(name)["shim_pid"].as_u64().unwrap()).unwrap()
}

/// The one child of the shim.
pub fn vmm_pid(node: &Node, name: &str) -> u32 {
    children(shim_pid(node, name)).trim().parse().unwrap()
}

/// The processes in a sandbox's cgroup.
fn pids(node: &Node, id: &str) -> Vec<u32> {
    Cgroups::locate(&node.instance.parse().unwrap()).unwrap().pids(id).unwrap()
}

pub fn id(node: &Node, name: &str) -> String {
    node.inspect(name)["id"].as_str().unwrap().to_owned()
}

pub fn slot(node: &Node, name: &str) -> SlotIndex {
    let slot = node.inspect(name)["slot"].as_u64().unwrap();
    SlotIndex::new(u32::try_from(slot).unwrap()).unwrap()
}

/// The layout that the harness configures.
pub fn layout(node: &Node) -> SlotLayout {
    SlotLayout {
        instance: node.instance.parse().unwrap(),
        veth_prefix: "hxv".parse().unwrap(),
        cidr: "10.77.0.0/20".parse().unwrap(),
    }
}

pub fn record_path(node: &Node, id: &str) -> PathBuf {
    node.state.join(&node.instance).join("sandboxes").join(id).join("record.json")
}

/// A command that must fail with exit code 1; what it said.
pub fn refused(node: &Node, args: &[&str]) -> String {
    let out = node.cli(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stderr)
}

/// A process of the test that hearth must not touch.
pub struct Stranger(Child);

impl Stranger {
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn assert_alive(&mut self) {
        assert_eq!(self.0.try_wait().unwrap(), None, "a stranger was ended");
    }

    pub fn end(mut self) {
        self.assert_alive();
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // Ended before, unless an assertion failed.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn a_vm_whose_wrapper_alone_is_killed_ends_and_is_released() {
    if cannot("a_vm_whose_wrapper_alone_is_killed_ends_and_is_released", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));
    let (shim, vmm) = (shim_pid(&node, "a"), vmm_pid(&node, "a"));
    assert_ne!(shim, vmm);
    signal("-KILL", &[shim]);
    until(&node, "gone from the list", || node.list().as_array().unwrap().is_empty());
    assert!(!alive(vmm), "gone was said of a VM that runs");
    let how = refused(&node, &["inspect", "a"]);
    assert!(how.contains("has ended") && how.contains("shim died"), "{how}");
    node.end_clean();
}

#[test]
fn a_vm_that_is_deaf_to_sigterm_is_killed() {
    if cannot("a_vm_that_is_deaf_to_sigterm_is_killed", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));
    // In a session of its own and deaf, as a daemon inside a wrapper would be.
    let deaf = "trap '' TERM; setsid sleep 600 </dev/null >/dev/null 2>&1 &";
    node.ok(&["exec", "a", "--", "sh", "-c", deaf]);
    let (id, vmm) = (id(&node, "a"), vmm_pid(&node, "a"));
    until(&node, "three processes", || pids(&node, &id).len() >= 3);
    let all = pids(&node, &id);
    // Stopped, it obeys nothing but SIGKILL.
    signal("-STOP", &[vmm]);
    node.ok(&["rm", "a"]);
    let left: Vec<&u32> = all.iter().filter(|pid| alive(**pid)).collect();
    assert!(left.is_empty(), "of {all:?} still there: {left:?}");
    node.end_clean();
}

#[test]
fn a_pid_that_came_round_is_never_taken_for_the_shim() {
    if cannot("a_pid_that_came_round_is_never_taken_for_the_shim", true) {
        return;
    }
    let mut node = Node::start(&PROCESS);
    for name in ["number", "all", "alive"] {
        node.ok(&create(name));
    }
    // A program of the same name; not with the instance in its path, which the harness would count as ours.
    let programs = tempfile::tempdir().unwrap();
    let twin = programs.path().join("hearth");
    fs::copy("/bin/sleep", &twin).unwrap();
    let mut stranger = Stranger::start(Command::new(&twin).arg("600"));
    let before = node.inspect("alive");
    let ids: Vec<String> = ["number", "all"].iter().map(|name| id(&node, name)).collect();
    let shims = [shim_pid(&node, "number"), shim_pid(&node, "all")];
    node.kill_daemon();
    signal("-KILL", &shims);
    // The first got the stranger's number, the second every number: only the cgroup tells that one.
    let identity = identity_of(stranger.pid()).unwrap();
    for (id, whole) in ids.iter().zip([false, true]) {
        let path = record_path(&node, id);
        let mut record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let edit = |process: &mut serde_json::Value| {
            process["pid"] = identity.pid.into();
            if whole {
                process["start_time"] = identity.start_time.into();
            }
        };
        edit(&mut record["shim"]);
        let resources = record["resources"].as_array_mut().unwrap();
        let process = resources.iter_mut().find(|r| r["kind"] == "process").unwrap();
        edit(&mut process["process"]);
        fs::write(&path, record.to_string()).unwrap();
    }
    node.start_daemon();
    until(&node, "only the living one", || node.list().as_array().unwrap().len() == 1);
    stranger.assert_alive();
    let after = node.inspect("alive");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    assert_eq!(node.ok(&["exec", "alive", "--", "echo", "works"]), "works\n");
    node.ok(&["rm", "alive"]);
    stranger.assert_alive();
    stranger.end();
    node.end_clean();
}

#[test]
fn a_decoy_and_a_foreign_firecracker_are_not_ours() {
    if cannot("a_decoy_and_a_foreign_firecracker_are_not_ours", true) {
        return;
    }
    let mut node = Node::start(&PROCESS);
    node.ok(&create("a"));
    node.ok(&create("b"));
    let id = id(&node, "a");
    let run_dir = node.dir.path().join("r").join(&node.instance).join("sandboxes").join(&id);
    // It has the shim's name and, among others, its arguments.
    let decoy = format!("exec -a hearth sh -c 'sleep 600; :' shim --dir {}", run_dir.display());
    let programs = tempfile::tempdir().unwrap();
    let firecracker = programs.path().join("firecracker");
    fs::copy("/bin/sleep", &firecracker).unwrap();
    let mut strangers = [
        Stranger::start(Command::new("bash").args(["-c", &decoy])),
        Stranger::start(Command::new(&firecracker).arg("600")),
    ];
    // With a record that points at its shim, with one whose shim died unseen, and at a delete.
    node.kill_daemon();
    let shim = fs::read_to_string(record_path(&node, &id)).unwrap();
    let shim: serde_json::Value = serde_json::from_str(&shim).unwrap();
    signal("-KILL", &[u32::try_from(shim["shim"]["pid"].as_u64().unwrap()).unwrap()]);
    node.start_daemon();
    until(&node, "released", || node.list().as_array().unwrap().len() == 1);
    node.ok(&["rm", "b"]);
    strangers.iter_mut().for_each(Stranger::assert_alive);
    let [decoy, firecracker] = strangers;
    let sleep: u32 = children(decoy.pid()).trim().parse().unwrap();
    decoy.end();
    signal("-KILL", &[sleep]);
    firecracker.end();
    node.end_clean();
}
