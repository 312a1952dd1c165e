//! The agent's protocol end to end: a real `hearth-guest --agent-fd` over a socket pair, driven by the client
//! that the shim uses. Needs root only for the tests that change the user; without it they are skipped.

// One pre_exec and one kill in the common part.
#![allow(unsafe_code)]
// Helpers outside of test functions fail the test in the same way.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::{Rig, collect, events, request, run};
use hearth_core::agent::{AgentErrorKind, ExecExit, ExecRequest, GuestConfig, TtySize};
use hearth_vmm::agent::{AgentClientError, ExecEvent};

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

#[tokio::test]
async fn exit_codes_and_signals() {
    let rig = Rig::start().await;
    assert_eq!(run(&rig, "exit 7").await.exit, ExecExit { code: Some(7), signal: None });
    let killed = run(&rig, "kill -9 $$").await.exit;
    assert_eq!((killed.signal, killed.status()), (Some(9), 137));
    rig.end().await;
}

#[tokio::test]
async fn streams_are_separate_and_carry_any_byte() {
    let rig = Rig::start().await;
    let done = run(&rig, r"printf '\377\376\0x'; printf 'e\200' >&2").await;
    assert_eq!(done.stdout, b"\xff\xfe\0x");
    assert_eq!(done.stderr, b"e\x80");
    rig.end().await;
}

#[tokio::test]
async fn environment_workdir_and_defaults() {
    let rig = Rig::start().await;
    let env = vec![("FROM_GUEST".to_owned(), "g".to_owned()), ("BOTH".to_owned(), "g".to_owned())];
    rig.client.configure(GuestConfig { env, ..GuestConfig::default() }).await.unwrap();
    let mut req = request(&["sh", "-c", "echo $FROM_GUEST $BOTH $HERE; pwd; echo ${TERM-none}"]);
    req.env = vec![("BOTH".to_owned(), "r".to_owned()), ("HERE".to_owned(), "h".to_owned())];
    req.workdir = "/usr".to_owned();
    let done = collect(&rig, req).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "g r h\n/usr\nnone\n");
    let done = run(&rig, "echo $HOME:$PATH; pwd; id -u").await;
    if is_root() {
        let expected = "/root:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n/root\n0\n";
        assert_eq!(String::from_utf8_lossy(&done.stdout), expected);
    }
    rig.end().await;
}

#[tokio::test]
async fn users_by_name_and_number() {
    if !is_root() {
        hearth_testkit::skip("users_by_name_and_number", "needs root to change the user");
        return;
    }
    let rig = Rig::start().await;
    for (user, expected) in
        [("daemon", "1 1 1"), ("1234:99", "1234 99 99"), ("daemon:mail", "1 8 8"), ("55", "55 0 0")]
    {
        let mut req = request(&["sh", "-c", "echo $(id -u) $(id -g) $(id -G)"]);
        req.user = user.to_owned();
        let done = collect(&rig, req).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), expected, "{user}");
    }
    rig.end().await;
}

#[tokio::test]
async fn what_cannot_start_says_why() {
    let rig = Rig::start().await;
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "no shebang\n").unwrap();
    let script = script.to_str().unwrap().to_owned();
    let expect = async |req: ExecRequest, kind: AgentErrorKind, word: &str| {
        let Err(AgentClientError::Agent(e)) = collect(&rig, req).await.map(|_| ()) else {
            panic!("{word}: it started")
        };
        assert_eq!(e.kind, kind, "{e}");
        assert!(e.message.contains(word), "{e}");
    };
    use AgentErrorKind::{Invalid, NotExecutable, NotFound};
    expect(request(&["no-such-program"]), NotFound, "no-such-program").await;
    expect(request(&["/no/such/program"]), NotFound, "/no/such/program").await;
    expect(request(&[&script]), NotExecutable, "script").await;
    expect(request(&["/usr"]), NotExecutable, "/usr").await;
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    expect(request(&[&script]), NotExecutable, "script").await;
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    expect(request(&[&script]), NotFound, "interpreter").await;
    expect(request(&[]), Invalid, "program").await;
    expect(request(&["sh", "a\0b"]), Invalid, "zero byte").await;
    let mut req = request(&["true"]);
    req.workdir = "/no/such/dir".to_owned();
    expect(req, NotFound, "/no/such/dir").await;
    let mut req = request(&["true"]);
    req.user = "nobody-here".to_owned();
    expect(req, NotFound, "nobody-here").await;
    // None of it left anything behind.
    assert_eq!(run(&rig, "exit 0").await.exit.code, Some(0));
    rig.end().await;
}

#[tokio::test]
async fn a_terminal_has_a_size_that_changes() {
    let rig = Rig::start().await;
    let script =
        "stty size; tty >&2; trap 'stty size; exit 3' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut req = request(&["sh", "-c", script]);
    req.tty = Some(TtySize { rows: 30, cols: 100 });
    let id = req.id.clone();
    let mut exec = rig.client.exec(req).await.unwrap();
    let mut seen = String::new();
    let exit = loop {
        match exec.output.next().await.unwrap().unwrap() {
            ExecEvent::Stdout(b) => seen.push_str(&String::from_utf8_lossy(&b)),
            ExecEvent::Stderr(_) => panic!("a terminal has no stderr"),
            ExecEvent::Started(_) => {}
            ExecEvent::Exit(e) => break e,
        }
        if seen.ends_with("ready\r\n") {
            rig.client.resize(&id, 41, 77).await.unwrap();
        }
    };
    assert!(seen.starts_with("30 100\r\n/dev/pts/"), "{seen:?}");
    assert!(seen.ends_with("41 77\r\n"), "{seen:?}");
    assert_eq!(exit.code, Some(3));
    rig.end().await;
}

#[tokio::test]
async fn the_end_of_input_reaches_pipes_and_terminals() {
    let rig = Rig::start().await;
    for tty in [None, Some(TtySize { rows: 24, cols: 80 })] {
        let mut req = request(&["sh", "-c", "cat >/dev/null; exit 4"]);
        req.stdin = true;
        req.tty = tty;
        let exec = rig.client.exec(req).await.unwrap();
        exec.input.write(Bytes::from_static(b"half a line")).await.unwrap();
        exec.input.end();
        assert_eq!(events(exec.output).await.unwrap().exit.code, Some(4), "{tty:?}");
    }
    // Without stdin the command reads nothing at once.
    assert_eq!(collect(&rig, request(&["cat"])).await.unwrap().exit.code, Some(0));
    rig.end().await;
}

#[tokio::test]
async fn a_signal_passes_a_stdin_nobody_reads() {
    let rig = Rig::start().await;
    let mut req = request(&["sleep", "1000"]);
    req.stdin = true;
    let id = req.id.clone();
    let exec = rig.client.exec(req).await.unwrap();
    let input = exec.input;
    let stuffing = async {
        loop {
            if input.write(Bytes::from(vec![0; 60_000])).await.is_err() {
                return;
            }
        }
    };
    let killing = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        rig.client.signal(&id, 15).await.unwrap();
        events(exec.output).await.unwrap().exit
    };
    let ((), exit) = tokio::time::timeout(Duration::from_secs(10), async { tokio::join!(stuffing, killing) })
        .await
        .unwrap();
    assert_eq!(exit.signal, Some(15));
    let gone = rig.client.signal(&id, 15).await.unwrap_err();
    assert!(matches!(gone, AgentClientError::Agent(e) if e.kind == AgentErrorKind::NoSuchExec));
    rig.end().await;
}

#[tokio::test]
async fn twenty_at_once_through_two_handles() {
    let rig = Rig::start().await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..24u8 {
        let client = rig.client.clone();
        tasks.spawn(async move {
            let mut req = request(&["sh", "-c", "cat; sleep 0.3; exit $0", &n.to_string()]);
            req.stdin = true;
            let exec = client.exec(req).await.unwrap();
            let data = vec![n; 300_000];
            exec.input.write(Bytes::from(data.clone())).await.unwrap();
            exec.input.end();
            let done = events(exec.output).await.unwrap();
            assert_eq!(done.exit.code, Some(i32::from(n)));
            assert!(done.stdout == data);
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    rig.end().await;
}

#[tokio::test]
async fn a_dropped_command_goes_on_and_disturbs_nobody() {
    let rig = Rig::start().await;
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    let script = format!("cat >/dev/null; yes | head -c 5000000; touch {}", mark.display());
    let mut req = request(&["sh", "-c", &script]);
    req.stdin = true;
    let mut dropped = rig.client.exec(req).await.unwrap();
    assert!(matches!(dropped.output.next().await, Ok(Some(ExecEvent::Started(_)))));
    drop(dropped);
    assert_eq!(run(&rig, "echo fine").await.stdout, b"fine\n");
    // Its stdin ended and its output was taken, so it reaches its last line.
    for _ in 0..500 {
        if mark.exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(mark.exists());
    rig.end().await;
}

#[tokio::test]
async fn a_background_process_does_not_hold_the_exit() {
    let rig = Rig::start().await;
    let start = std::time::Instant::now();
    let done = run(&rig, "sleep 30 & echo out; exit 5").await;
    assert_eq!((done.exit.code, done.stdout.as_slice()), (Some(5), &b"out\n"[..]));
    assert!(start.elapsed() < Duration::from_secs(25));
    // Ending the agent ends the sleep as well.
    let out = run(&rig, "pgrep -P 1,$PPID -x sleep || true").await;
    rig.end().await;
    for pid in String::from_utf8_lossy(&out.stdout).split_whitespace() {
        assert!(!std::path::Path::new("/proc").join(pid).exists(), "sleep {pid} is left");
    }
}

#[tokio::test]
async fn shutdown_and_the_closed_future() {
    let rig = Rig::start().await;
    rig.client.ping(Duration::from_secs(5)).await.unwrap();
    rig.client.shutdown().await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), rig.client.closed()).await.unwrap();
    assert!(matches!(rig.client.ping(Duration::from_secs(5)).await, Err(AgentClientError::Closed { .. })));
    assert!(matches!(rig.client.exec(request(&["true"])).await, Err(AgentClientError::Closed { .. })));
    rig.end().await;
}
