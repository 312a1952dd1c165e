//! Bulk, bounded memory, and bytes that are not the protocol.

// One pre_exec and one kill in the common part.
#![allow(unsafe_code)]
// Helpers outside of test functions fail the test in the same way.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Agent, Rig, collect, events, in_secs, request, run};
use hearth_core::agent::{FRAME_HEAD, FrameKind, HELLO, MAX_FRAME, WELCOME};
use hearth_vmm::agent::{AgentClient, ExecEvent};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::compat::{FuturesAsyncReadCompatExt, TokioAsyncReadCompatExt};

fn random(len: usize) -> Bytes {
    let mut bytes = vec![0; len];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    Bytes::from(bytes)
}

#[tokio::test]
async fn sixty_four_mib_through_cat_come_back_equal() {
    let rig = Rig::start().await;
    let data = random(64 << 20);
    let mut req = request(&["cat"]);
    req.stdin = true;
    let exec = rig.client.exec(req).await.unwrap();
    let before = rig.agent.rss_kib();
    let start = Instant::now();
    let feed = async {
        exec.input.write(data.clone()).await.unwrap();
        exec.input.end();
    };
    let ((), done) = tokio::join!(feed, events(exec.output));
    let done = done.unwrap();
    eprintln!("64 MiB through cat: {:.0} MiB/s", 64.0 / start.elapsed().as_secs_f64());
    assert!(done.stdout == data);
    assert_eq!(done.exit.code, Some(0));
    let grown = rig.agent.rss_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "the agent grew by {grown} KiB");
    rig.end().await;
}

#[tokio::test]
async fn a_quarter_gib_of_output_does_not_grow_the_agent() {
    let rig = Rig::start().await;
    let before = rig.agent.rss_kib();
    let mut exec = rig.client.exec(request(&["head", "-c", "268435456", "/dev/zero"])).await.unwrap();
    let (mut total, mut peak) = (0u64, before);
    let start = Instant::now();
    while let Some(event) = exec.output.next().await.unwrap() {
        if let ExecEvent::Stdout(bytes) = event {
            let old = total;
            total += bytes.len() as u64;
            // A reader that stops must stop the command, not fill the agent.
            if old < 64 << 20 && total >= 64 << 20 {
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            if old >> 24 != total >> 24 {
                peak = peak.max(rig.agent.rss_kib());
            }
        }
    }
    assert_eq!(total, 256 << 20);
    eprintln!(
        "256 MiB out: {:.0} MiB/s, agent {before} KiB, at most {peak} KiB",
        256.0 / start.elapsed().as_secs_f64()
    );
    assert!(peak - before < 16 << 10, "the agent grew from {before} to {peak} KiB");
    rig.end().await;
}

#[tokio::test]
async fn a_new_session_on_the_same_bytes_is_found() {
    let (agent, stream) = Agent::spawn();
    let stream = stream.into_std().unwrap();
    let again = || {
        let copy = stream.try_clone().unwrap();
        copy.set_nonblocking(true).unwrap();
        tokio::net::UnixStream::from_std(copy).unwrap()
    };
    let mut raw = again();
    raw.write_all(b"garbage HEARTH>HEARTH>0 \0\0\xff").await.unwrap();
    let first = AgentClient::connect(again(), in_secs(10)).await.unwrap();
    first.ping(Duration::from_secs(5)).await.unwrap();
    let mut held = first.exec(request(&["sleep", "1000"])).await.unwrap();
    assert!(matches!(held.output.next().await, Ok(Some(ExecEvent::Started(_)))));
    // The host dies without a goodbye, its bytes half read, and comes back.
    drop((first, held));
    tokio::time::sleep(Duration::from_millis(50)).await;
    raw.write_all(b"more garbage").await.unwrap();
    let second = AgentClient::connect(again(), in_secs(10)).await.unwrap();
    second.ping(Duration::from_secs(5)).await.unwrap();
    let rig = Rig { agent, client: second };
    assert_eq!(run(&rig, "exit 3").await.exit.code, Some(3));
    drop((stream, raw));
    rig.end().await;
}

/// A hand-made host that sends what the client never would.
#[tokio::test]
async fn malformed_frames_end_their_stream_only() {
    let (agent, mut socket) = Agent::spawn();
    let hello = [HELLO.as_slice(), b"12345678"].concat();
    socket.write_all(&[hello.clone(), hello.clone(), hello].concat()).await.unwrap();
    let mut welcome = [0; 16];
    socket.read_exact(&mut welcome).await.unwrap();
    assert_eq!(welcome, [WELCOME.as_slice(), b"12345678"].concat()[..]);
    let mut connection =
        yamux::Connection::new(socket.compat(), yamux::Config::default(), yamux::Mode::Client);
    let long = u32::try_from(MAX_FRAME + 1).unwrap().to_le_bytes();
    let bad: [&[u8]; 7] = [
        b"\x00\0\0\0\0",
        b"\xff\x05\0\0\0hello",
        &[&[FrameKind::Request as u8], long.as_slice()].concat(),
        b"\x01\x03\0\0\0{}x",
        b"\x01\x02\0\0\0",
        b"\x03\x01\0\0\0x",
        b"\x01\x15\0\0\0{\"request\":\"unheard\"}",
    ];
    for (n, bytes) in bad.into_iter().enumerate() {
        let stream = drive(&mut connection, |c, cx| c.poll_new_outbound(cx).map(Result::unwrap)).await;
        let mut stream = stream.compat();
        let mut answer = Vec::new();
        let talk = async {
            stream.write_all(bytes).await.unwrap();
            if n == 4 {
                return;
            }
            stream.read_to_end(&mut answer).await.unwrap();
        };
        with(&mut connection, talk).await;
        if !answer.is_empty() {
            assert_eq!(answer[0], FrameKind::Response as u8, "{n}");
            assert!(String::from_utf8_lossy(&answer[FRAME_HEAD..]).contains("invalid"), "{n}");
        }
    }
    let stream = drive(&mut connection, |c, cx| c.poll_new_outbound(cx).map(Result::unwrap)).await;
    let mut stream = stream.compat();
    let mut answer = Vec::new();
    let talk = async {
        stream.write_all(b"\x01\x12\0\0\0{\"request\":\"ping\"}").await.unwrap();
        stream.read_to_end(&mut answer).await.unwrap();
    };
    with(&mut connection, talk).await;
    assert_eq!(answer, b"\x02\x06\0\0\0\"done\"");
    drop(connection);
    assert_eq!(agent.wait().await.code(), Some(0));
}

type Connection = yamux::Connection<tokio_util::compat::Compat<tokio::net::UnixStream>>;

async fn drive<T>(
    connection: &mut Connection,
    mut ask: impl FnMut(&mut Connection, &mut std::task::Context<'_>) -> std::task::Poll<T>,
) -> T {
    std::future::poll_fn(|cx| ask(connection, cx)).await
}

/// Runs `work` while the connection is polled.
async fn with(connection: &mut Connection, work: impl Future<Output = ()>) {
    tokio::select! {
        () = work => {}
        _ = drive(connection, yamux::Connection::poll_next_inbound) => panic!("the agent ended the session"),
    }
}

#[tokio::test]
async fn sigterm_ends_it_with_all_that_descends_from_it() {
    let rig = Rig::start().await;
    let script = "setsid sleep 1000 & (setsid sh -c 'sleep 1000 & echo $!; echo $$; wait' &) ; wait";
    let mut exec = rig.client.exec(request(&["sh", "-c", script])).await.unwrap();
    let mut pids = String::new();
    while pids.lines().count() < 2 {
        if let Some(ExecEvent::Stdout(b)) = exec.output.next().await.unwrap() {
            pids.push_str(&String::from_utf8_lossy(&b));
        }
    }
    rig.agent.terminate();
    assert_eq!(rig.agent.wait().await.code(), Some(0));
    for pid in pids.split_whitespace() {
        assert!(!std::path::Path::new("/proc").join(pid).exists(), "{pid} is left");
    }
}

#[tokio::test]
async fn a_client_without_an_agent_gives_up_in_time() {
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    let start = Instant::now();
    let deadline = tokio::time::Instant::now() + Duration::from_millis(350);
    let error = AgentClient::connect(ours, deadline).await.unwrap_err();
    assert!(error.to_string().contains("did not answer"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(20));
    drop(theirs);
    let (ours, theirs) = tokio::net::UnixStream::pair().unwrap();
    drop(theirs);
    assert!(AgentClient::connect(ours, in_secs(10)).await.is_err());
}

#[tokio::test]
async fn many_small_commands_one_after_the_other() {
    let rig = Rig::start().await;
    let start = Instant::now();
    for n in 0..200 {
        let done = collect(&rig, request(&["sh", "-c", "echo $0; exit 1", &n.to_string()])).await.unwrap();
        assert_eq!((done.exit.code, done.stdout), (Some(1), format!("{n}\n").into_bytes()));
    }
    eprintln!("one command: {:.1} ms", start.elapsed().as_secs_f64() * 1000.0 / 200.0);
    rig.end().await;
}
