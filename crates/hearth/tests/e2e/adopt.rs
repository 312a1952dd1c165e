//! A restart with many living sandboxes: all are taken over at once, and nobody inside notices.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_api::v1::SignalExecRequest;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use tokio::task::JoinSet;
use tonic::Code;

use crate::http::{channel, get_with};
use crate::node::{Node, Wish, cannot};
use crate::traps::{PROCESS, create_all, until};

/// Sandboxes of the test; more where the environment says so.
fn how_many() -> usize {
    std::env::var("HEARTH_TEST_ADOPT").ok().and_then(|n| n.parse().ok()).unwrap_or(40)
}

/// Times from the start of the daemon's process.
struct Start {
    listens: Duration,
    ready: Duration,
    /// Every shim has answered a call through the daemon.
    answered: Duration,
}

/// Starts a daemon and asks for something in each guest as soon as it says that it is ready; no call is repeated.
async fn start(node: &mut Node, ids: &[String]) -> Start {
    let begun = Instant::now();
    node.spawn_daemon();
    let until = |path: &'static str| {
        while get_with(node, path, "").is_none_or(|answer| answer.code != 200) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{path}: {}", node.log_text());
            std::thread::sleep(Duration::from_millis(2));
        }
        begun.elapsed()
    };
    let (listens, ready) = (until("/health/live"), until("/health"));
    let client = SandboxServiceClient::new(channel(node).await);
    let mut calls = JoinSet::new();
    for id in ids {
        let (mut client, sandbox) = (client.clone(), id.clone());
        // The guest's agent says that there is no such command: the way to it and back is whole.
        let exec_id = "none".to_owned();
        calls.spawn(
            async move { client.signal_exec(SignalExecRequest { sandbox, exec_id, signal: 1 }).await },
        );
    }
    for answer in calls.join_all().await {
        let status = answer.unwrap_err();
        assert_eq!(status.code(), Code::NotFound, "{status:?}\n{}", node.log_text());
    }
    Start { listens, ready, answered: begun.elapsed() }
}

/// Milliseconds since the epoch, as a command in the guest wrote them.
fn beats(file: &Path) -> Vec<u64> {
    // The last line may be half written.
    let text = fs::read_to_string(file).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    whole.lines().map(|l| l.parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_takes_over_every_sandbox_and_no_guest_notices() {
    if cannot("a_restart_takes_over_every_sandbox_and_no_guest_notices", true) {
        return;
    }
    let mut node = Node::start(&Wish { slot_pool: 2, ..PROCESS });
    let names: Vec<String> = (0..how_many()).map(|n| format!("s{n}")).collect();
    create_all(&node, &names);
    let list = |node: &Node| {
        let mut list = node.list();
        list.as_array_mut().unwrap().sort_by_key(|s| s["id"].to_string());
        list
    };
    let keys = |list: &serde_json::Value| -> Vec<String> {
        let one =
            |s: &serde_json::Value| format!("{} {} {} {}", s["id"], s["shim_pid"], s["slot"], s["state"]);
        list.as_array().unwrap().iter().map(one).collect()
    };
    let before = list(&node);
    assert_eq!(before.as_array().unwrap().len(), names.len());
    let ids: Vec<String> =
        before.as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap().to_owned()).collect();
    let file = node.dir.path().join("beats");
    let count = format!("while :; do date +%s%3N; sleep 0.02; done > {}", file.display());
    node.ok(&["exec", "s0", "--", "sh", "-c", &format!("({count}) </dev/null >/dev/null 2>&1 &")]);
    until(&node, "counting", || beats(&file).len() > 10);

    for killed in [true, false] {
        let at_end = beats(&file).len();
        if killed {
            node.kill_daemon();
        } else {
            node.stop_daemon();
        }
        until(&node, "counting without a daemon", || beats(&file).len() > at_end + 20);
        let start = start(&mut node, &ids).await;
        assert_eq!(keys(&before), keys(&list(&node)), "{}", node.log_text());
        let seen = beats(&file);
        let gap = seen.windows(2).skip(at_end.saturating_sub(2)).map(|w| w[1] - w[0]).max().unwrap();
        hearth_testkit::report(&format!(
            "{} sandboxes taken over after {}: listens {} ms, ready {} ms, every guest answered {} ms after the start; \
             longest gap of a counter in a guest {gap} ms",
            names.len(),
            if killed { "kill -9" } else { "a stop" },
            start.listens.as_millis(),
            start.ready.as_millis(),
            start.answered.as_millis(),
        ));
        for name in ["s0", names.last().unwrap()] {
            assert_eq!(node.ok(&["exec", name, "--", "echo", "works"]), "works\n");
        }
    }
    assert!(!node.log_text().contains("cannot reach its shim"), "{}", node.log_text());
    fs::remove_file(&file).unwrap_or_default();
    node.end_clean();
}
