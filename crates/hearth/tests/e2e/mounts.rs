//! The mounts of a VMM, on a host whose mounts are shared as systemd shares them.

use std::fs;
use std::process::Command;

use crate::node::{Node, cannot};
use crate::running::{Running, wait_until_ready};
use crate::traps::{PROCESS, create, shim_pid, vmm_pid};

#[test]
fn a_vmm_has_the_mounts_of_the_host_but_no_named_namespaces() {
    if cannot("a_vmm_has_the_mounts_of_the_host_but_no_named_namespaces", true) {
        return;
    }
    let node = Node::new(&PROCESS);
    let serve = node.command(&["serve"]);
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-c",
        "mount --make-rshared / && exec \"$@\"",
        "sh",
    ]);
    command.arg(serve.get_program()).args(serve.get_args());
    for (name, value) in serve.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let mut daemon = Running::start(command, node.dir.path().join("shared.log"));
    wait_until_ready(&node, &daemon);
    node.ok(&create("a"));
    let points = |pid: u32| {
        let table = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        table.lines().map(|l| l.split(' ').nth(4).unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (shim, vmm) = (points(shim_pid(&node, "a")), points(vmm_pid(&node, "a")));
    let named = |point: &&String| point.starts_with("/run/netns");
    // The shim is where the daemon is: there the slot has its name.
    assert!(shim.iter().any(|p| p.contains(&node.instance)), "{shim:?}");
    let rest: Vec<&String> = shim.iter().filter(|p| !named(p)).collect();
    assert_eq!(vmm.iter().collect::<Vec<_>>(), rest);
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    node.ok(&["rm", "a"]);
    assert!(daemon.terminate().success());
    node.check_clean();
}
