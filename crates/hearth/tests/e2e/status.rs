//! The node's status as seen from outside: the start, a blocked engine, a state directory that is gone.

use std::fs;
use std::time::{Duration, Instant};

use hearth_api::v1;
use hearth_api::v1::node_service_client::NodeServiceClient;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_types::StatusExt as _;

use crate::http::{channel, get, get_with, wait_for, wait_for_port};
use crate::node::{Node, Wish, cannot, text};

fn own_state(test: &'static str) -> Wish {
    Wish { test, own_state: true, ..Wish::default() }
}

async fn serving(channel: &tonic::transport::Channel, service: &str) -> ServingStatus {
    let request = HealthCheckRequest { service: service.into() };
    let answer = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
    answer.status()
}

#[test]
fn health_goes_from_503_to_200_once() {
    if cannot("health_goes_from_503_to_200_once", false) {
        return;
    }
    let mut node = Node::new(&own_state("failpoints = \"start=delay(1500)\""));
    node.spawn_daemon();
    let end = Instant::now() + Duration::from_secs(60);
    let mut seen = Vec::new();
    let mut ready = 0;
    // On for a while after the flip: it must not flip back.
    while ready < 50 {
        assert!(Instant::now() < end, "never ready: {seen:?}\n{}", node.log_text());
        if let Some(answer) = get_with(&node, "/health", "") {
            let status = answer.json()["status"].as_str().unwrap().to_owned();
            assert_eq!(get(&node, "/health/live").code, 200);
            ready += u32::from(answer.code == 200);
            if seen.last() != Some(&(answer.code, status.clone())) {
                seen.push((answer.code, status));
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(seen, [(503, "starting".to_owned()), (200, "healthy".to_owned())]);
    node.end_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_answers_while_starting() {
    if cannot("everything_answers_while_starting", false) {
        return;
    }
    let mut node = Node::new(&own_state("failpoints = \"start=delay(4000)\""));
    node.spawn_daemon();
    wait_for_port(&node);
    let channel = channel(&node).await;

    for service in ["", "hearth.v1.SandboxService", "hearth.v1.NodeService"] {
        assert_eq!(serving(&channel, service).await, ServingStatus::NotServing, "{service}");
    }
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(channel.clone());
    let mut answers = reflection.server_reflection_info(tokio_stream::once(ask)).await.unwrap().into_inner();
    let answer = answers.message().await.unwrap().unwrap().message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
    let names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
    for name in ["hearth.v1.SandboxService", "hearth.v1.NodeService", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|n| n == name), "{name} is not in {names:?}");
    }

    // Refused with a hint when to ask again, and never "not found" or an empty list.
    let mut sandboxes = SandboxServiceClient::new(channel.clone());
    let create = v1::CreateRequest { template: "busybox".into(), ..Default::default() };
    let mut stream = sandboxes.create(create).await.unwrap().into_inner();
    let refused = stream.message().await.unwrap_err();
    let listed = sandboxes.list(v1::ListRequest::default()).await.unwrap_err();
    let got = sandboxes.get(v1::GetRequest { sandbox: "x".into(), ..Default::default() }).await.unwrap_err();
    for status in [refused, listed, got] {
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(status.get_details_retry_info().unwrap().retry_delay.is_some(), "{status}");
        assert!(status.message().contains("starting"), "{status}");
    }

    let mut nodes = NodeServiceClient::new(channel.clone());
    let now = nodes.info(v1::InfoRequest {}).await.unwrap().into_inner().node.unwrap();
    assert_eq!((now.status.as_str(), now.phase.as_str()), ("starting", "starting"));
    assert!(now.work.is_none() && !now.drained);
    let metrics = get(&node, "/metrics");
    assert_eq!(metrics.code, 200);
    assert!(metrics.body.contains("hearth_status{status=\"starting\"} 1"), "{}", metrics.body);
    assert!(!metrics.body.contains("hearth_leaked{"), "unknown is not 0: {}", metrics.body);

    // A watch sees the start to its end, and a drain that was asked for meanwhile holds.
    let mut watch = nodes.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(first.status, "starting");
    let mut drain = nodes.drain(v1::DrainRequest { wait: false }).await.unwrap().into_inner();
    let told = drain.message().await.unwrap().unwrap();
    assert_eq!((told.status.as_str(), told.desired.as_str()), ("starting", "draining"));
    assert!(!told.drained, "what is not known is not drained");
    assert!(drain.message().await.unwrap().is_none());
    let mut seen = vec![];
    while seen.last().is_none_or(|s| s == "starting") {
        let next = tokio::time::timeout(Duration::from_secs(60), watch.message()).await;
        seen.push(next.expect("the watch is silent").unwrap().unwrap().status);
    }
    assert_eq!(seen.last().unwrap(), "draining");
    assert_eq!(get(&node, "/health").code, 200);
    assert_eq!(serving(&channel, "").await, ServingStatus::NotServing);
    nodes.undrain(v1::UndrainRequest {}).await.unwrap();
    wait_for(&node, "healthy");
    let end = Instant::now() + Duration::from_secs(10);
    while serving(&channel, "hearth.v1.SandboxService").await != ServingStatus::Serving {
        assert!(Instant::now() < end, "healthy and not serving");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // The watch ends with the daemon, and is told why before.
    tokio::task::block_in_place(|| node.stop_daemon());
    let mut last = String::new();
    while let Ok(Some(status)) = watch.message().await {
        last = status.reason;
    }
    assert!(last.contains("SIGTERM"), "{last}");
    node.check_clean();
}

#[test]
fn a_blocked_engine_is_told_and_heals() {
    if cannot("a_blocked_engine_is_told_and_heals", true) {
        return;
    }
    let node = Node::start(&Wish {
        test: "process_vmm = true\nfailpoints = \"record=block(12000)\"",
        ..Wish::default()
    });
    let args = ["create", "busybox", "--name", "b", "--vmm", "process", "--disk", "16"];
    let mut create = node.command(&args).stdout(std::process::Stdio::null()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let mut reasons = Vec::new();
    // Blocked, told, and healed: health and liveness answer all the time.
    loop {
        let (answer, live) = (get(&node, "/health"), get(&node, "/health/live"));
        assert_eq!(live.code, 200);
        match answer.json()["status"].as_str().unwrap() {
            "healthy" if !reasons.is_empty() => break,
            "healthy" => assert_eq!(answer.code, 200),
            "unhealthy" => {
                assert_eq!(answer.code, 503);
                assert_eq!(get(&node, "/metrics").code, 200);
                reasons.push(answer.json()["reason"].as_str().unwrap().to_owned());
            }
            other => panic!("{other}"),
        }
        assert!(Instant::now() < end, "{reasons:?}\n{}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(reasons.iter().all(|r| r.contains("the engine's loop has not run for")), "{reasons:?}");
    assert!(create.wait().unwrap().success(), "{}", node.log_text());
    node.end_clean();
}

#[test]
fn a_state_directory_that_cannot_be_written_is_told_and_heals() {
    if cannot("a_state_directory_that_cannot_be_written_is_told_and_heals", false) {
        return;
    }
    let node = Node::start(&own_state(""));
    node.ok(&["node", "drain"]);
    wait_for(&node, "draining");
    let (dir, away) = (node.state.join(&node.instance), node.state.join("away"));
    let had = dir.exists();
    if had {
        fs::rename(&dir, &away).unwrap();
    }
    fs::write(&dir, "").unwrap();
    let answer = wait_for(&node, "unhealthy");
    assert_eq!(answer.code, 503);
    let reason = answer.json()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("state directory") && reason.contains(dir.to_str().unwrap()), "{reason}");
    let out = node.cli(&["node", "status"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stdout).contains("cannot be written"), "{}", text(&out.stdout));
    // What is desired holds meanwhile, and is back afterwards.
    assert_eq!(full_status(&node)["desired"], "draining");
    fs::remove_file(&dir).unwrap();
    if had {
        fs::rename(&away, &dir).unwrap();
    }
    assert_eq!(wait_for(&node, "draining").code, 200);
    node.end_clean();
}

#[test]
fn slots_that_cannot_be_made_are_told_and_heal() {
    if cannot("slots_that_cannot_be_made_are_told_and_heal", true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", prefix_len: 29, ..Wish::default() });
    // The first of three slots is ready; somebody else's links have the names of the others.
    let end = Instant::now() + Duration::from_secs(30);
    while full_status(&node)["slots"]["ready"] != 1 {
        assert!(Instant::now() < end, "no slot is ready: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
    node.host("ip", &["link", "add", "hxv2", "type", "veth", "peer", "name", "hxv3"]);
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    let answer = wait_for(&node, "unhealthy");
    let reason = answer.json()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("slots cannot be made") && reason.contains("hxv"), "{reason}");
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    // What is not ours was left alone; the pair goes as one.
    node.host("ip", &["link", "del", "hxv2"]);
    assert_eq!(wait_for(&node, "healthy").code, 200);
    node.end_clean();
}

fn full_status(node: &Node) -> serde_json::Value {
    serde_json::from_slice(&node.cli(&["node", "status", "--json"]).stdout).unwrap()
}

#[test]
fn a_start_that_fails_ends_the_daemon_with_the_reason() {
    if cannot("a_start_that_fails_ends_the_daemon_with_the_reason", false) {
        return;
    }
    let node = Node::new(&Wish {
        test: "failpoints = \"start=error\"\n[shutdown]\nmode = \"drain\"",
        own_state: true,
        ..Wish::default()
    });
    let mut command = node.netns.command("timeout");
    command.args(["--kill-after=5", "60"]).arg(crate::node::hearth()).args(["serve", "--config"]);
    let out = command.arg(node.config()).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("cannot start: failpoint"), "{}", text(&out.stderr));
    node.check_clean();
}
