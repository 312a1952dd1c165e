//! The journal: in order, over restarts, over a full disk, to whoever is slow.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Wish, cannot, text};

const PROCESS: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 1,
    prefix_len: 24,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// All that are kept, or those after a number.
pub fn events(node: &Node, args: &[&str]) -> Vec<Value> {
    let out = node.ok(&[&["--json", "events"], args].concat());
    out.lines().map(|line| serde_json::from_str(line).expect("an object per line")).collect()
}

fn seq(event: &Value) -> u64 {
    event["seq"].as_u64().expect("a number")
}

pub fn kinds_of(events: &[Value], name: &str) -> Vec<String> {
    let about = events.iter().filter(|e| e["name"] == name);
    about.map(|e| e["kind"].as_str().expect("a kind").to_owned()).collect()
}

fn life(node: &Node, name: &str) {
    node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
    node.ok(&["rm", name]);
}

/// A client that follows, and what it has seen.
struct Follower {
    child: Child,
    lines: std::sync::mpsc::Receiver<Value>,
}

impl Follower {
    fn after(node: &Node, seq: u64) -> Self {
        let since = seq.to_string();
        let args = ["--json", "events", "--follow", "--since", &since];
        let mut child = node.command(&args).stdout(Stdio::piped()).spawn().expect("hearth events");
        let out = BufReader::new(child.stdout.take().expect("its output"));
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line).expect("an object per line");
                if send.send(event).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    /// Takes what comes until `last` says that this was it.
    fn until(&self, last: impl Fn(&Value) -> bool) -> Vec<Value> {
        let mut seen = vec![];
        loop {
            let event = self.lines.recv_timeout(Duration::from_secs(60)).expect("the event waited for");
            seen.push(event);
            if seen.last().is_some_and(&last) {
                return seen;
            }
        }
    }

    /// What was on its way when the daemon died.
    fn rest(mut self) -> Vec<Value> {
        let status = self.child.wait().expect("its end");
        assert!(!status.success(), "a stream that broke off is no success");
        self.lines.iter().collect()
    }
}

#[test]
fn a_watcher_resumes_over_kill_9_without_gap_or_duplicate() {
    if cannot("a_watcher_resumes_over_kill_9_without_gap_or_duplicate", true) {
        return;
    }
    let mut node = Node::start(&PROCESS);
    let mut seen: Vec<Value> = vec![];
    for round in 0..3 {
        let follower = Follower::after(&node, seen.last().map_or(0, seq));
        let (name, stays) = (format!("a{round}"), format!("b{round}"));
        life(&node, &name);
        let mut now = follower.until(|e| e["kind"] == "sandbox-deleted" && e["name"] == name.as_str());
        node.ok(&["create", "busybox", "--name", &stays, "--vmm", "process", "--disk", "16"]);
        node.kill_daemon();
        now.extend(follower.rest());
        seen.extend(now);
        node.start_daemon();
    }
    let follower = Follower::after(&node, seen.last().map_or(0, seq));
    node.ok(&["rm", "b2"]);
    seen.extend(follower.until(|e| e["kind"] == "sandbox-deleted" && e["name"] == "b2"));
    let mut child = follower.child;
    child.kill().expect("its end");
    child.wait().expect("its end");

    let numbers: Vec<u64> = seen.iter().map(seq).collect();
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, expected, "{seen:#?}");
    assert_eq!(seen.iter().filter(|e| e["kind"] == "daemon-started").count(), 4);
    let life = ["sandbox-creating", "sandbox-running", "sandbox-deleting", "sandbox-deleted"];
    assert_eq!(kinds_of(&seen, "a1"), life);
    let adopted =
        ["sandbox-creating", "sandbox-running", "sandbox-adopted", "sandbox-deleting", "sandbox-deleted"];
    assert_eq!(kinds_of(&seen, "b2"), adopted);
    // A number that never was is an error that says so, not silence.
    let ahead = node.cli(&["events", "--since", "1000000"]);
    assert!(text(&ahead.stderr).contains("event 1000000 is not of this journal"), "{}", text(&ahead.stderr));
    assert_eq!(ahead.status.code(), Some(1));
    node.end_clean();
}

#[test]
fn every_change_of_state_is_told_with_reason_and_evidence() {
    if cannot("every_change_of_state_is_told_with_reason_and_evidence", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process", "--disk", "16"]);
    let shim = node.inspect("g")["shim_pid"].to_string();
    node.host("kill", &["-9", &shim]);
    let end = Instant::now() + Duration::from_secs(20);
    while !node.list().as_array().unwrap().is_empty() {
        assert!(Instant::now() < end, "{}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
    node.ok(&["node", "drain"]);
    assert!(!node.cli(&["create", "busybox", "--name", "no", "--vmm", "process"]).status.success());
    node.ok(&["node", "undrain"]);
    // The front looks at the status a few times a second.
    let all = loop {
        let all = events(&node, &[]);
        let healthy = all.iter().filter(|e| e["evidence"]["status"] == "healthy").count();
        if healthy == 2 {
            break all;
        }
        assert!(Instant::now() < end + Duration::from_secs(20), "{all:#?}");
        std::thread::sleep(Duration::from_millis(50));
    };
    let of = |kind: &str| all.iter().filter(|e| e["kind"] == kind).cloned().collect::<Vec<_>>();
    let exited = &of("sandbox-exited")[0];
    assert_eq!(exited["evidence"]["reason"], "vmm-failed", "{exited}");
    assert!(exited["reason"].as_str().unwrap().contains("its shim died"), "{exited}");
    let running = &of("sandbox-running")[0];
    assert_eq!(running["evidence"]["shim_pid"], shim);
    assert_eq!(of("sandbox-creating")[0]["evidence"]["template"], "busybox");
    let desired: Vec<_> = of("desired-changed").iter().map(|e| e["evidence"]["desired"].clone()).collect();
    assert_eq!(desired, ["draining", "active"]);
    let statuses: Vec<_> = of("status-changed").iter().map(|e| e["evidence"]["status"].clone()).collect();
    assert_eq!(statuses, ["healthy", "draining", "healthy"]);
    node.end_clean();
}
