//! Drain, undrain and standby: who is admitted, who is refused, and when a node is drained.

use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_api::v1;
use hearth_api::v1::create_progress::Progress;
use hearth_api::v1::node_service_client::NodeServiceClient;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::http::{channel, get, get_with, wait_for};
use crate::node::{Node, Wish, cannot, text};

const PROCESS: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 1,
    prefix_len: 24,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

fn create(name: &str) -> [&str; 8] {
    ["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]
}

fn said(node: &Node, args: &[&str], code: i32) -> String {
    let out = node.cli(args);
    assert_eq!(out.status.code(), Some(code), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
    text(&out.stdout) + &text(&out.stderr)
}

#[test]
fn drain_standby_and_the_ways_back() {
    if cannot("drain_standby_and_the_ways_back", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));

    assert!(node.ok(&["node", "standby"]).contains("standby"));
    assert_eq!(get(&node, "/health").code, 200);
    let refused = said(&node, &create("b"), 1);
    assert!(refused.contains("standby") && refused.contains("hearth node activate"), "{refused}");
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");

    // A drain holds against all but undrain, which brings back the standby.
    assert!(node.ok(&["node", "drain"]).contains("draining"));
    for ask in ["standby", "activate"] {
        let refused = said(&node, &["node", ask], 1);
        assert!(refused.contains("hearth node undrain"), "{refused}");
    }
    let refused = said(&node, &create("b"), 1);
    assert!(refused.contains("draining") && refused.contains("hearth node undrain"), "{refused}");
    let left = said(&node, &["node", "drain", "--wait", "--timeout", "1s"], 1);
    assert!(left.contains("sandboxes left: 1 live"), "{left}");
    assert!(node.ok(&["node", "undrain"]).contains("standby"));
    assert!(node.ok(&["node", "activate"]).contains("healthy"));
    node.ok(&create("b"));

    // Drained when the last is gone, and not before.
    let wait = ["node", "drain", "--wait", "--timeout", "120s", "--json"];
    let waiting = node.command(&wait).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&node, "draining");
    node.ok(&["rm", "a"]);
    assert_eq!(status(&node)["drained"], false);
    assert_eq!(status(&node)["sandboxes"]["live"], 1);
    node.ok(&["rm", "b"]);
    let out = waiting.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let last: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((&last["drained"], &last["desired"]), (&true.into(), &"draining".into()));
    assert!(node.ok(&["node", "status"]).contains("draining"));
    node.end_clean();
}

fn status(node: &Node) -> serde_json::Value {
    serde_json::from_str(&node.ok(&["node", "status", "--json"])).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn none_is_admitted_after_a_drain_answered() {
    if cannot("none_is_admitted_after_a_drain_answered", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    let channel = channel(&node).await;
    let (mut nodes, sandboxes) =
        (NodeServiceClient::new(channel.clone()), SandboxServiceClient::new(channel.clone()));
    let (mut made, mut turned_away) = (0, 0);
    for round in 0..3 {
        let mut creates = tokio::task::JoinSet::new();
        for i in 0..16 {
            let mut sandboxes = sandboxes.clone();
            let name = format!("r{round}-{i}");
            creates.spawn(async move {
                // Spread over some time, so that the drain falls between them.
                tokio::time::sleep(Duration::from_millis(i * 15)).await;
                let request = v1::CreateRequest {
                    name: name.clone(),
                    template: "busybox".into(),
                    vmm: "process".into(),
                    disk_mib: 16,
                    ..Default::default()
                };
                let mut stream = sandboxes.create(request).await.unwrap().into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(m)) if matches!(m.progress, Some(Progress::Sandbox(_))) => {
                            return (name, Ok(()));
                        }
                        Ok(Some(_)) => {}
                        Ok(None) => panic!("{name}: no last message"),
                        Err(status) => return (name, Err(status)),
                    }
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(30);
        while nodes.info(v1::InfoRequest {}).await.unwrap().into_inner().node.unwrap().work.unwrap()
            == v1::Work::default()
        {
            assert!(Instant::now() < end, "no create was admitted");
        }
        let mut drain = nodes.drain(v1::DrainRequest { wait: false }).await.unwrap().into_inner();
        drain.message().await.unwrap().unwrap();
        let admitted =
            sandboxes.clone().list(v1::ListRequest::default()).await.unwrap().into_inner().sandboxes;
        let admitted: Vec<String> = admitted.into_iter().map(|s| s.name).collect();
        for (name, created) in creates.join_all().await {
            match created {
                Ok(()) => {
                    made += 1;
                    assert!(admitted.contains(&name), "{name} came in after the drain had answered");
                }
                Err(status) => {
                    turned_away += 1;
                    assert_eq!(status.code(), Code::Unavailable, "{status}");
                    assert_eq!(status.get_details_error_info().unwrap().reason, "DRAINING");
                    assert!(status.message().contains("hearth node undrain"), "{status}");
                    assert!(!admitted.contains(&name), "{name} was admitted and refused");
                }
            }
        }
        let there = sandboxes.clone().list(v1::ListRequest::default()).await.unwrap().into_inner().sandboxes;
        assert_eq!(there.len(), admitted.len());
        node.ok(&["rm", "--all"]);
        let mut drained = nodes.drain(v1::DrainRequest { wait: true }).await.unwrap().into_inner();
        let mut last = None;
        while let Some(status) = drained.message().await.unwrap() {
            last = Some(status);
        }
        assert!(last.unwrap().drained);
        let now = nodes.undrain(v1::UndrainRequest {}).await.unwrap().into_inner();
        assert_eq!(now.status, "healthy");
    }
    assert!(made > 0 && turned_away > 0, "no race: {made} made, {turned_away} refused");
    node.end_clean();
}

#[test]
fn a_daemon_told_to_drain_at_its_end_waits_for_the_last_sandbox() {
    if cannot("a_daemon_told_to_drain_at_its_end_waits_for_the_last_sandbox", true) {
        return;
    }
    let mut node = Node::start(&Wish {
        test: "process_vmm = true\n[shutdown]\nmode = \"drain\"\ndrain_seconds = 120",
        ..PROCESS
    });
    node.ok(&create("a"));
    let pid = node.daemon_pid().to_string();
    assert!(std::process::Command::new("kill").arg(&pid).status().unwrap().success());
    let answer = wait_for(&node, "draining");
    assert!(answer.json()["reason"].as_str().unwrap().contains("SIGTERM"), "{answer:?}");
    // It drains for good, and goes on serving what is there.
    let refused = said(&node, &["node", "undrain"], 1);
    assert!(refused.contains("shutting down"), "{refused}");
    let refused = said(&node, &create("b"), 1);
    assert!(refused.contains("shutting down"), "{refused}");
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    node.ok(&["rm", "a"]);
    node.wait_daemon();
    node.check_clean();
}

#[test]
fn a_drain_at_the_end_is_bounded_and_costs_no_sandbox() {
    if cannot("a_drain_at_the_end_is_bounded_and_costs_no_sandbox", true) {
        return;
    }
    let mut node = Node::start(&Wish {
        test: "process_vmm = true\n[shutdown]\nmode = \"drain\"\ndrain_seconds = 1",
        ..PROCESS
    });
    node.ok(&create("a"));
    let before = node.inspect("a");
    node.stop_daemon();
    assert!(node.log_text().contains("not drained"), "{}", node.log_text());
    node.start_daemon();
    assert_eq!(before["shim_pid"], node.inspect("a")["shim_pid"]);
    // A new daemon is active: what was desired of the former one ended with it.
    node.ok(&create("b"));
    node.end_clean();
}

#[test]
fn metrics_tell_the_truth_and_need_the_token() {
    if cannot("metrics_tell_the_truth_and_need_the_token", true) {
        return;
    }
    // The command line of the test reads the token from the same variable.
    let mut node = Node::start(&Wish { env: &[("HEARTH_TOKEN", "s3cret")], ..PROCESS });
    for headers in ["", "Authorization: Bearer wrong1\r\n"] {
        let answer = get_with(&node, "/metrics", headers).unwrap();
        assert_eq!(answer.code, 401, "{answer:?}");
        assert!(answer.head.contains("www-authenticate: bearer"), "{}", answer.head);
        assert!(!answer.body.contains("hearth_"), "{}", answer.body);
    }
    assert_eq!(get(&node, "/health").code, 200);
    assert_eq!(value(&node, "hearth_status{status=\"healthy\"}"), 1);
    assert_eq!(value(&node, "hearth_status{status=\"draining\"}"), 0);
    assert_eq!(value(&node, "hearth_sandboxes{state=\"running\"}"), 0);
    for kind in ["netns", "cgroup", "directory"] {
        for name in ["leaked", "stuck", "reclaimed_total", "reclaim_failures_total"] {
            assert_eq!(value(&node, &format!("hearth_{name}{{kind=\"{kind}\"}}")), 0, "{name} {kind}");
        }
    }
    assert_eq!(value(&node, &format!("hearth_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))), 1);
    node.ok(&create("a"));
    assert_eq!(value(&node, "hearth_sandboxes{state=\"running\"}"), 1);
    assert_eq!(value(&node, "hearth_slots{state=\"assigned\"}"), 1);
    node.ok(&["node", "drain"]);
    assert_eq!(value(&node, "hearth_status{status=\"healthy\"}"), 0);
    assert_eq!(value(&node, "hearth_status{status=\"draining\"}"), 1);

    // The prepared slot of a killed daemon is a leftover of the next.
    wait_for_value(&node, "hearth_slots{state=\"ready\"}", 1);
    node.kill_daemon();
    node.start_daemon();
    wait_for_value(&node, "hearth_reclaimed_total{kind=\"netns\"}", 1);
    assert_eq!(value(&node, "hearth_leaked{kind=\"netns\"}"), 0);
    assert_eq!(value(&node, "hearth_sandboxes{state=\"running\"}"), 1);
    node.end_clean();
}

/// A metric of a node whose token is `s3cret`.
fn value(node: &Node, line: &str) -> u64 {
    let answer = get_with(node, "/metrics", "Authorization: Bearer s3cret\r\n").unwrap();
    assert_eq!(answer.code, 200);
    let found = answer.body.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or_else(|| panic!("no {line} in {}", answer.body))
}

fn wait_for_value(node: &Node, line: &str, wanted: u64) {
    let end = Instant::now() + Duration::from_secs(30);
    while value(node, line) != wanted {
        assert!(Instant::now() < end, "{line} is not {wanted}: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}
