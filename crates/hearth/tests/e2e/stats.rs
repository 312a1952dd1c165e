//! `hearth stats`: what sandboxes use.

use std::io::BufRead as _;
use std::process::Stdio;

use crate::node::{Node, Wish, cannot, text};

#[test]
fn stats_show_what_a_sandbox_uses_and_watch_shows_it_again() {
    if cannot("stats_show_what_a_sandbox_uses_and_watch_shows_it_again", true) {
        return;
    }
    let node = Node::start(&Wish::default());
    assert_eq!(node.ok(&["stats"]).lines().count(), 1, "a header and nobody");
    node.ok(&["create", "busybox", "--name", "g", "--memory", "192"]);
    let stats = || {
        let all: serde_json::Value = serde_json::from_str(&node.ok(&["stats", "g", "--json"])).unwrap();
        all[0]["usage"].clone()
    };
    let before = stats();
    // Written and flushed inside, so that it reaches the disk; and packets to the gateway.
    node.ok(&[
        "exec",
        "g",
        "--",
        "sh",
        "-c",
        "dd if=/dev/zero of=/root/x bs=1M count=8; sync; ping -c 3 -W 2 169.254.0.22 || true",
    ]);
    let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let after = loop {
        let now = stats();
        let grown = |counter: &str| {
            let read = |v: &serde_json::Value| v.pointer(counter).and_then(serde_json::Value::as_u64);
            read(&now).unwrap_or(0).saturating_sub(read(&before).unwrap_or(0))
        };
        // The VMM is asked within its interval.
        if grown("/disk/written_bytes") >= 8 << 20 {
            assert!(grown("/cpu_us") > 0 && grown("/net/sent_packets") >= 3, "{before} {now}");
            assert!(grown("/net/received_bytes") > 0, "{before} {now}");
            break now;
        }
        assert!(std::time::Instant::now() < end, "{before} {now}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    assert!(after["memory_bytes"].as_u64() > Some(10 << 20), "{after}");
    assert_eq!(after["vmm_missed"], 0);

    let mut watch = node
        .command(&["stats", "--watch", "--interval", "1", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(watch.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let look: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(look[0]["name"], "g");
    }
    let pid = watch.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert!(watch.wait().unwrap().success(), "an interrupt is how it is meant to end");

    let missing = node.cli(&["stats", "nobody"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("nobody"));
    node.end_clean();
}
