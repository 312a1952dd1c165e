//! Events posted to an address that is away, answers badly, and takes them at last.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc;
use std::time::Duration;

use hmac::{Hmac, Mac as _};
use serde_json::Value;
use sha2::Sha256;

use crate::http;
use crate::node::{Node, Wish, cannot};
use crate::telemetry::{metric, wait_for_metric};

const SECRET: &str = "a secret of this test";

/// One request as it came.
pub struct Posted {
    signature: String,
    pub body: Vec<u8>,
}

pub fn read_request(stream: &mut BufReader<impl Read>) -> Option<Posted> {
    let mut line = String::new();
    stream.read_line(&mut line).ok().filter(|n| *n > 0)?;
    assert!(line.starts_with("POST /hook HTTP/1.1"), "{line}");
    let (mut length, mut signature) = (0, String::new());
    loop {
        line.clear();
        stream.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().expect("a length"),
            "hearth-signature" => signature = value.to_owned(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(Posted { signature, body })
}

/// Listens inside the node's namespace, and answers each request with a status; what got one of 2xx comes out.
fn listen(
    node: &Node,
    mut answer: impl FnMut(&Posted) -> &'static str + Send + 'static,
) -> mpsc::Receiver<Posted> {
    let bound = hearth_host::net::netns::enter(&node.netns.path(), || {
        Ok(TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 9000))))
    });
    let listener = bound.expect("the namespace").expect("a listener");
    let (send, posted) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut stream = BufReader::new(stream);
            while let Some(request) = read_request(&mut stream) {
                let status = answer(&request);
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                if stream.get_mut().write_all(answer.as_bytes()).is_err() {
                    break;
                }
                if status.starts_with('2') && send.send(request).is_err() {
                    return;
                }
            }
        }
    });
    posted
}

fn check_signature(posted: &Posted) {
    let (t, v1) = posted.signature.split_once(",v1=").expect("two parts");
    let seconds = t.strip_prefix("t=").expect("a time");
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).expect("a key");
    mac.update(format!("{seconds}.").as_bytes());
    mac.update(&posted.body);
    let expected: String = mac.finalize().into_bytes().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(v1, expected);
}

#[test]
fn a_webhook_gets_each_event_in_order_though_it_and_the_daemon_were_down() {
    if cannot("a_webhook_gets_each_event_in_order_though_it_and_the_daemon_were_down", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    let secret = node.dir.path().join("secret");
    std::fs::write(&secret, format!("{SECRET}\n")).unwrap();
    node.set_test(&format!(
        "process_vmm = true\n[webhook]\nurl = \"http://127.0.0.1:9000/hook\"\nsecret_file = {secret:?}"
    ));
    node.start_daemon();
    let life = |node: &Node, name: &str| {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
        node.ok(&["rm", name]);
    };
    life(&node, "first");
    wait_for_metric(&node, "hearth_webhook_failures_total", |n| n > 0.0);
    assert_eq!(http::get(&node, "/health").json()["status"], "healthy");
    let mut refused = 0;
    let posted = listen(&node, move |_| {
        refused += 1;
        if refused <= 2 { "500 Not Now" } else { "204 No Content" }
    });
    let mut seen: Vec<Value> = vec![];
    let until = |seen: &mut Vec<Value>, name: &str| {
        while !seen.iter().any(|e| e["kind"] == "sandbox-deleted" && e["name"] == name) {
            let posted = posted.recv_timeout(Duration::from_secs(90)).expect("a request");
            check_signature(&posted);
            let body: Value = serde_json::from_slice(&posted.body).expect("JSON");
            assert_eq!(body["missed"], 0, "{body}");
            seen.extend(body["events"].as_array().expect("events").iter().cloned());
        }
    };
    until(&mut seen, "first");
    life(&node, "second");
    node.kill_daemon();
    node.start_daemon();
    life(&node, "third");
    until(&mut seen, "third");
    // At least once: what was posted when the daemon died may come again, and then all that followed.
    let mut numbers: Vec<u64> = seen.iter().map(|e| e["seq"].as_u64().expect("a number")).collect();
    let first = numbers[0];
    numbers.dedup();
    let mut next = first;
    for n in &numbers {
        assert!(*n <= next, "{next} was left out: {numbers:?}");
        next = next.max(n + 1);
    }
    for name in ["first", "second", "third"] {
        let kinds = crate::events::kinds_of(&seen, name);
        assert!(kinds.iter().any(|k| k == "sandbox-running"), "{name}: {kinds:?}");
    }
    assert_eq!(metric(&node, "hearth_webhook_missed_total"), 0.0);
    node.end_clean();
}

#[test]
fn events_that_a_webhook_refuses_for_good_are_given_up_and_no_others() {
    if cannot("events_that_a_webhook_refuses_for_good_are_given_up_and_no_others", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    let secret = node.dir.path().join("secret");
    std::fs::write(&secret, SECRET).unwrap();
    node.set_test(&format!(
        "process_vmm = true\n[webhook]\nurl = \"http://127.0.0.1:9000/hook\"\nsecret_file = {secret:?}\n\
         give_up_seconds = 1"
    ));
    // What has the name of one sandbox in it is more than it can swallow.
    let posted = listen(&node, |request| {
        let indigestible = String::from_utf8_lossy(&request.body).contains("\"bad\"");
        if indigestible { "400 Bad Request" } else { "204 No Content" }
    });
    node.start_daemon();
    for name in ["before", "bad", "after"] {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
        node.ok(&["rm", name]);
    }
    let mut seen: Vec<Value> = vec![];
    while !seen.iter().any(|e| e["kind"] == "sandbox-deleted" && e["name"] == "after") {
        let posted = posted.recv_timeout(Duration::from_secs(90)).expect("a request");
        let body: Value = serde_json::from_slice(&posted.body).expect("JSON");
        seen.extend(body["events"].as_array().expect("events").iter().cloned());
    }
    let of = |name: &str| seen.iter().filter(|e| e["name"] == name).count();
    assert_eq!((of("before"), of("bad"), of("after")), (of("before"), 0, of("before")));
    // Its creation, that it ran, and both parts of its end.
    wait_for_metric(&node, "hearth_webhook_dropped_total", |n| n >= 4.0);
    let dropped = metric(&node, "hearth_webhook_dropped_total");
    let told = metric(&node, "hearth_events_total");
    wait_for_metric(&node, "hearth_webhook_delivered_total", |n| n + dropped + 8.0 >= told);
    let said = |words: &str| node.log_text().lines().filter(|l| l.contains(words)).count();
    assert!(said("dropping events that it has refused") >= 1, "{}", node.log_text());
    assert!(said("dropping events") <= 1 + said("events are taken again"), "{}", node.log_text());
    node.end_clean();
}
