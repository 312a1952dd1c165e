//! A daemon starts while another process still holds its lock or its port.

use std::fs;
use std::time::{Duration, Instant};

use crate::node::{Node, Wish, busybox, cannot, text};
use crate::running::{Running, serve, wait_until_ready};

/// A stranger on the port, once it listens; `None` says why it cannot be.
fn stranger(node: &Node, test: &str) -> Option<Running> {
    let Some(busybox) = busybox() else {
        hearth_testkit::skip(test, "no busybox to listen with");
        return None;
    };
    let mut command = node.netns.command(busybox);
    command.args(["nc", "-ll", "-p", "5008", "-e", "/bin/true"]);
    let stranger = Running::start(command, node.dir.path().join("stranger.log"));
    stranger.wait_for("no listener", || node.host("ss", &["-Hltn"]).contains(":5008 "));
    Some(stranger)
}

#[test]
fn a_second_daemon_is_refused_within_a_second() {
    let test = "a_second_daemon_is_refused_within_a_second";
    if cannot(test, false) {
        return;
    }
    let node = Node::start(&Wish { own_state: true, ..Wish::default() });
    let refuse = |_| {
        let begun = Instant::now();
        let out = node.cli(&["serve"]);
        let took = begun.elapsed();
        assert_eq!(out.status.code(), Some(1));
        let said = text(&out.stderr);
        assert!(said.contains(&format!("pid {}", node.daemon_pid())), "{said}");
        took
    };
    // The best of several: a wait in the code would be in each, noise of the machine is not.
    let best = (0..5).map(refuse).min().unwrap();
    assert!(best < Duration::from_secs(1), "{best:?}");
    hearth_testkit::report(&format!("a second daemon is refused after {} ms", best.as_millis()));
    node.end_clean();
}

#[test]
fn a_port_that_becomes_free_is_taken() {
    let test = "a_port_that_becomes_free_is_taken";
    if cannot(test, false) {
        return;
    }
    let node = Node::new(&Wish { own_state: true, ..Wish::default() });
    let Some(mut stranger) = stranger(&node, test) else { return };
    let pid = format!("pid {}", stranger.child.id());
    let mut daemon = serve(&node, "daemon.log", &["--takeover-seconds", "120"], &[]);
    daemon.wait_for_log(&["waiting", "in use by", &pid]);
    assert!(daemon.child.try_wait().unwrap().is_none(), "{}", daemon.log_text());
    stranger.terminate();
    wait_until_ready(&node, &daemon);
    assert!(daemon.terminate().success(), "{}", daemon.log_text());
    node.check_clean();
}

#[test]
fn the_wait_for_a_port_is_bounded_and_ends_at_a_signal() {
    let test = "the_wait_for_a_port_is_bounded_and_ends_at_a_signal";
    if cannot(test, false) {
        return;
    }
    let node = Node::new(&Wish { own_state: true, ..Wish::default() });
    let Some(mut stranger) = stranger(&node, test) else { return };
    let pid = format!("pid {}", stranger.child.id());
    let begun = Instant::now();
    let out = node.cli(&["serve", "--takeover-seconds", "2"]);
    let took = begun.elapsed();
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains(&pid) && said.contains("waited 2 s"), "{said}");
    assert!(took >= Duration::from_secs(2), "{took:?}");
    assert!(took < Duration::from_secs(60), "{took:?}");
    let mut waiting = serve(&node, "waiting.log", &["--takeover-seconds", "3600"], &[]);
    waiting.wait_for_log(&["waiting", &pid]);
    assert!(waiting.terminate().success(), "{}", waiting.log_text());
    stranger.terminate();
    fs::remove_file(&stranger.log).unwrap();
    fs::remove_file(&waiting.log).unwrap();
    node.check_clean();
}

#[test]
fn the_next_daemon_takes_over_when_the_first_ends() {
    let test = "the_next_daemon_takes_over_when_the_first_ends";
    if cannot(test, true) {
        return;
    }
    let mut node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    let shim = node.inspect("g")["shim_pid"].clone();
    let first = format!("pid {}", node.daemon_pid());
    let mut next = serve(&node, "next.log", &["--takeover-seconds", "120"], &[]);
    next.wait_for_log(&["waiting", &first]);
    node.stop_daemon();
    wait_until_ready(&node, &next);
    assert_eq!(node.inspect("g")["shim_pid"], shim);
    assert_eq!(node.ok(&["exec", "g", "--", "echo", "alive"]), "alive\n");
    node.ok(&["rm", "g"]);
    assert!(next.terminate().success(), "{}", next.log_text());
    fs::remove_file(&next.log).unwrap();
    node.check_clean();
}
