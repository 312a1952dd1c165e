//! Commands whose caller has left: they run on, cost nobody a stream, and are too many only at a cap of their own.

// One pre_exec and one kill in the common part.
#![allow(unsafe_code)]
// Helpers outside of test functions fail the test in the same way.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{Rig, in_secs, request, run};
use hearth_core::agent::AgentErrorKind;
use hearth_vmm::agent::{AgentClientError, ExecEvent};
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(10);

/// Starts a command and leaves it; its id.
async fn abandon(rig: &Rig) -> Result<String, AgentClientError> {
    let request = request(&["sleep", "1000"]);
    let id = request.id.clone();
    let mut exec = rig.client.exec(request).await?;
    match exec.output.next().await? {
        Some(ExecEvent::Started(_)) => Ok(id),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_thousand_are_kept_and_then_one_more_is_refused_but_nothing_else() {
    let rig = Rig::start().await;
    let mut ids = Vec::new();
    let refused = loop {
        match abandon(&rig).await {
            Ok(id) => ids.push(id),
            Err(e) => break e,
        }
        assert!(ids.len() <= 1024, "there is no cap");
    };
    let AgentClientError::Agent(e) = &refused else { panic!("after {}: {refused:?}", ids.len()) };
    assert_eq!(e.kind, AgentErrorKind::Failed, "{e}");
    assert!(e.message.contains("too many commands run in this guest"), "{e}");
    assert_eq!(ids.len(), 1024);
    rig.client.ping(LIMIT).await.unwrap();
    rig.client.signal(&ids[0], 9).await.unwrap();
    // The one that ended makes room, and a new one has the usual limit of open files.
    let deadline = in_secs(10);
    let done = loop {
        let request = request(&["sh", "-c", "ulimit -n"]);
        match common::collect(&rig, request).await {
            Ok(done) => break done,
            Err(AgentClientError::Agent(_)) => assert!(tokio::time::Instant::now() < deadline),
            Err(e) => panic!("{e:?}"),
        }
    };
    let ours = std::process::Command::new("sh").args(["-c", "ulimit -n"]).output().unwrap();
    assert_eq!(done.stdout, ours.stdout);
    rig.client.shutdown().await.unwrap();
    rig.end().await;
}

#[tokio::test]
async fn a_burst_of_dropped_requests_ends_no_session() {
    let rig = Rig::start().await;
    for _ in 0..400 {
        drop(rig.client.exec(request(&["true"])).await.unwrap());
    }
    rig.client.ping(LIMIT).await.unwrap();
    assert_eq!(run(&rig, "echo fine").await.stdout, b"fine\n");
    rig.end().await;
}

/// What was sent and not read hides that the host has left.
#[tokio::test]
async fn those_that_do_not_take_their_input_are_noticed_too() {
    let rig = Rig::start().await;
    for _ in 0..140 {
        let mut request = request(&["sleep", "1000"]);
        request.stdin = true;
        let mut exec = rig.client.exec(request).await.unwrap();
        match exec.output.next().await {
            Ok(Some(ExecEvent::Started(_))) => {}
            // 128 within two seconds: until the agent has looked, they count as callers.
            Err(AgentClientError::Agent(_)) => break,
            other => panic!("{other:?}"),
        }
        // More than its pipe takes.
        for _ in 0..3 {
            if timeout(LIMIT, exec.input.write(Bytes::from(vec![0; 60_000]))).await.is_err() {
                break;
            }
        }
        // Two chunks wait in the client; the rest is under way or there.
        drop(exec);
    }
    let deadline = in_secs(10);
    loop {
        let request = request(&["true"]);
        match common::collect(&rig, request).await {
            Ok(done) => break assert_eq!(done.exit.code, Some(0)),
            Err(e) => assert!(tokio::time::Instant::now() < deadline, "{e:?}"),
        }
    }
    rig.end().await;
}
