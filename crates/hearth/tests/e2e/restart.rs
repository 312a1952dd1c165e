//! The daemon dies; guests do not.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::node::{Node, Wish, cannot, text};

#[test]
fn a_killed_daemon_costs_no_guest() {
    if cannot("a_killed_daemon_costs_no_guest", true) {
        return;
    }
    let mut node = Node::start(&Wish::default());
    node.ok(&["create", "busybox", "--name", "g"]);
    let before = node.inspect("g");
    let count = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.1; done";
    let start = format!("({count}) </dev/null >/dev/null 2>&1 & echo started");
    assert_eq!(node.ok(&["exec", "g", "--", "sh", "-c", &start]), "started\n");
    node.kill_daemon();
    std::thread::sleep(Duration::from_millis(500));
    let unreachable = node.cli(&["ls"]);
    assert_eq!(unreachable.status.code(), Some(3));
    assert!(text(&unreachable.stderr).contains("hearth serve"), "{}", text(&unreachable.stderr));
    node.start_daemon();
    let after = node.inspect("g");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    let read = || -> u64 { node.ok(&["exec", "g", "--", "cat", "/tmp/count"]).trim().parse().unwrap() };
    let one = read();
    std::thread::sleep(Duration::from_secs(1));
    assert!(read() > one, "the guest stood still");
    node.end_clean();
}

#[test]
fn a_second_daemon_names_the_first() {
    if cannot("a_second_daemon_names_the_first", false) {
        return;
    }
    let node = Node::start(&Wish { own_state: true, ..Wish::default() });
    let begun = Instant::now();
    let out = node.command(&["serve", "--config"]).arg(node.config()).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(begun.elapsed() < Duration::from_secs(20));
    let pid = node.daemon_pid().to_string();
    assert!(text(&out.stderr).contains(&pid), "{}", text(&out.stderr));
    // Another instance on the same port is told who has it.
    let run = node.dir.path().join("r2");
    let out = node
        .command(&["serve", "--instance", "other", "--state-dir"])
        .arg(node.dir.path().join("s2"))
        .arg("--run-dir")
        .arg(&run)
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains(&pid) && text(&out.stderr).contains("in use"),
        "{}",
        text(&out.stderr)
    );
    node.end_clean();
}

#[test]
fn nobody_acts_under_anothers_name_or_links() {
    if cannot("nobody_acts_under_anothers_name_or_links", true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    let other = |instance: &str, prefix: &str| {
        let dirs = ["s3", "r3"].map(|d| node.dir.path().join(d).to_str().unwrap().to_owned());
        let args = ["serve", "--instance", instance, "--state-dir", &dirs[0], "--run-dir", &dirs[1]];
        let more = ["--listen", "127.0.0.1:6001", "--veth-prefix", prefix, "--cidr", "10.78.0.0/24"];
        let mut command = node.netns.command("timeout");
        command.args(["--kill-after=5", "30"]).arg(crate::node::hearth()).args([&args[..], &more].concat());
        let out = command.stdin(std::process::Stdio::null()).output().unwrap();
        (out.status.code(), text(&out.stderr))
    };
    // The same instance with directories of its own would take everything here for leaked.
    let (code, said) = other(&node.instance, "hxw");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(&node.daemon_pid().to_string()), "{said}");
    // Another instance with the same prefix would take these links for its own.
    let (code, said) = other("other", "hxv");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("veth_prefix"), "{said}");
    assert_eq!(node.ok(&["exec", "g", "--", "echo", "alive"]), "alive\n");
    node.end_clean();
}

#[test]
fn a_killed_shim_takes_its_guest_with_it() {
    if cannot("a_killed_shim_takes_its_guest_with_it", true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    let shim = node.inspect("g")["shim_pid"].to_string();
    let children = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    let vmm = children.split_whitespace().next().unwrap().to_owned();
    assert!(Command::new("kill").args(["-9", &shim]).status().unwrap().success());
    let end = Instant::now() + Duration::from_secs(10);
    while std::fs::read_link(format!("/proc/{vmm}/exe")).is_ok()
        || !node.list().as_array().unwrap().is_empty()
    {
        assert!(Instant::now() < end, "{}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
    node.end_clean();
}
