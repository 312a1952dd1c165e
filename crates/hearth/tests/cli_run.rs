//! `run`, `exec` and `rm` against a daemon of plasticine: what the client does with what a daemon says.

#![allow(clippy::unwrap_used, reason = "in a test a failed step is the failure of the test")]

#[path = "cli_fake/mod.rs"]
mod cli_fake;

use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cli_fake::{Daemon, Script};

fn client(daemon: &Daemon, args: &[&str]) -> Command {
    program(daemon, env!("CARGO_BIN_EXE_hearth"), args)
}

fn program(daemon: &Daemon, program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HEARTH_")) {
        command.env_remove(name);
    }
    command.args(args).env("HEARTH_ADDR", daemon.addr()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn hearth(daemon: &Daemon, args: &[&str]) -> Output {
    client(daemon, args).output().unwrap()
}

fn run(script: Script) -> (Output, Vec<String>) {
    let daemon = Daemon::start(script);
    let output = hearth(&daemon, &["run", "base", "--", "cmd"]);
    (output, daemon.calls())
}

/// Sends a signal with the program, since only `crates/host` may make system calls.
fn kill(signal: &str, child: &Child) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Waits until the fake daemon has seen a call that begins so.
fn wait_for(daemon: &Daemon, call: &str) {
    let begin = Instant::now();
    while !daemon.calls().iter().any(|c| c.starts_with(call)) {
        assert!(begin.elapsed() < Duration::from_secs(20), "no {call:?} in {:?}", daemon.calls());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn code_within(child: &mut Child, seconds: u64) -> i32 {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code().unwrap();
        }
        assert!(begin.elapsed() < Duration::from_secs(seconds), "still running");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_commands_code_is_ours_and_the_sandbox_goes() {
    let (output, calls) = run(Script::new().exit(7));
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(output.stderr.is_empty(), "silent without a terminal: {output:?}");
    assert_eq!(calls.last().map(String::as_str), Some("delete id0"), "{calls:?}");
}

#[test]
fn a_killed_command_is_128_and_the_signal() {
    let (output, _) = run(Script::new().killed(9));
    assert_eq!(output.status.code(), Some(137));
}

#[test]
fn output_passes_byte_by_byte() {
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let (output, _) = run(Script::new().stdout(&bytes).stderr(b"\xff\xfe").exit(0));
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout == bytes, "{} bytes", output.stdout.len());
    assert_eq!(output.stderr, b"\xff\xfe");
}

#[test]
fn stdin_is_forwarded_to_its_end() {
    let daemon = Daemon::start(Script::new().echo());
    let mut child = client(&daemon, &["run", "base", "--", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    let sent: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
    let mut stdin = child.stdin.take().unwrap();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&copy));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_stdin_that_never_ends_holds_nothing_up() {
    let daemon = Daemon::start(Script::new().stdout(b"done\n").exit(3));
    let mut child = client(&daemon, &["run", "base", "--", "cmd"]).stdin(Stdio::piped()).spawn().unwrap();
    // Open, and nobody writes.
    let held = child.stdin.take();
    assert_eq!(code_within(&mut child, 10), 3);
    drop(held);
}

#[test]
fn the_first_interrupt_goes_to_the_command() {
    let daemon = Daemon::start(Script::new().stdout(b"up\n").until_signal());
    let mut child = client(&daemon, &["run", "base", "--", "cmd"]).spawn().unwrap();
    wait_for(&daemon, "started");
    kill("-INT", &child);
    // The fake command dies of it.
    assert_eq!(code_within(&mut child, 4), 130);
    let calls = daemon.calls();
    assert!(calls.contains(&"signal 2".to_owned()) && !calls.contains(&"signal 9".to_owned()), "{calls:?}");
    assert!(calls.contains(&"delete id0".to_owned()), "{calls:?}");
}

#[test]
fn the_second_interrupt_kills_the_command() {
    let daemon = Daemon::start(Script::new().ignore_signals());
    let mut child = client(&daemon, &["run", "base", "--", "cmd"]).spawn().unwrap();
    wait_for(&daemon, "started");
    kill("-INT", &child);
    wait_for(&daemon, "signal 2");
    kill("-INT", &child);
    assert_eq!(code_within(&mut child, 5), 130);
    let calls = daemon.calls();
    let at = |call: &str| calls.iter().position(|c| c == call).unwrap_or_else(|| panic!("{call}: {calls:?}"));
    assert!(at("signal 2") < at("signal 9") && at("signal 9") < at("delete id0"), "{calls:?}");
}

#[test]
fn a_command_that_ignores_one_interrupt_is_killed_after_five_seconds() {
    let daemon = Daemon::start(Script::new().ignore_signals());
    let mut child = client(&daemon, &["run", "base", "--", "cmd"]).spawn().unwrap();
    wait_for(&daemon, "started");
    kill("-TERM", &child);
    assert_eq!(code_within(&mut child, 12), 143);
    let calls = daemon.calls();
    assert!(calls.contains(&"signal 15".to_owned()) && calls.contains(&"signal 9".to_owned()), "{calls:?}");
}

#[test]
fn an_interrupt_during_the_create_waits_until_all_is_gone() {
    let daemon = Daemon::start(Script::new().slow_create());
    let mut child = client(&daemon, &["run", "--name", "web", "base", "--", "cmd"]).spawn().unwrap();
    wait_for(&daemon, "create web");
    kill("-INT", &child);
    assert_eq!(code_within(&mut child, 10), 130);
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(text.contains("stopped by Ctrl-C; nothing was left"), "{text}");
    let calls = daemon.calls();
    // The fake knows the sandbox for a few more calls.
    assert!(calls.iter().filter(|c| *c == "get web").count() >= 3, "{calls:?}");
    assert!(!calls.iter().any(|c| c.starts_with("exec")), "{calls:?}");
}

#[test]
fn nobody_reading_stops_the_command_and_is_141() {
    let daemon = Daemon::start(Script::new().endless());
    let mut child = client(&daemon, &["run", "base", "--", "yes"]).spawn().unwrap();
    let mut first = [0; 2];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    // The reading end is closed here.
    assert_eq!(code_within(&mut child, 10), 141);
    let calls = daemon.calls();
    assert!(calls.contains(&"signal 13".to_owned()) && calls.contains(&"delete id0".to_owned()), "{calls:?}");
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "");
}

#[test]
fn a_daemon_that_starts_is_waited_for() {
    let daemon = Daemon::start(Script::new().starting(3).exit(0));
    let output = hearth(&daemon, &["run", "base", "--", "cmd"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.matches("the daemon is not ready yet (scanning)").count(), 1, "{text}");
}

#[test]
fn statuses_of_the_daemon_become_exit_codes() {
    for (code, want) in [
        (tonic::Code::InvalidArgument, 2),
        (tonic::Code::NotFound, 1),
        (tonic::Code::AlreadyExists, 1),
        (tonic::Code::FailedPrecondition, 1),
        (tonic::Code::ResourceExhausted, 1),
        (tonic::Code::Unavailable, 1),
    ] {
        let daemon = Daemon::start(Script::new().refuse(code, "no slot is free"));
        let output = hearth(&daemon, &["run", "base", "--", "cmd"]);
        assert_eq!(output.status.code(), Some(want), "{code:?}: {output:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.starts_with("hearth: cannot create a sandbox from \"base\": no slot is free"), "{text}");
    }
}

#[test]
fn json_is_one_object_with_output_code_and_steps() {
    let daemon = Daemon::start(Script::new().stdout(b"a\xff\n").stderr(b"b").exit(4));
    let output = hearth(&daemon, &["run", "--json", "base", "--", "cmd"]);
    assert_eq!(output.status.code(), Some(4));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["exit_code"], 4);
    assert_eq!(object["stdout"], "a\u{fffd}\n");
    assert_eq!(object["stderr"], "b");
    assert_eq!(object["sandbox"]["id"], "id0");
    assert_eq!(object["steps"]["boot"], 1.5);
    assert!(output.stderr.is_empty());
}

#[test]
fn keep_keeps_and_says_the_name() {
    let daemon = Daemon::start(Script::new().exit(0));
    let output = hearth(&daemon, &["run", "--keep", "--name", "web", "base", "--", "cmd"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("hearth rm web"));
    assert!(!daemon.calls().iter().any(|c| c.starts_with("delete")));
}

#[test]
fn verbose_tells_each_step_once() {
    let daemon = Daemon::start(Script::new().exit(0));
    let output = hearth(&daemon, &["run", "-v", "base", "--", "cmd"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    for step in ["hearth: record (1/2): ", "hearth: boot (2/2): ", "hearth: command: ", "hearth: delete: "] {
        assert_eq!(text.matches(step).count(), 1, "{step}: {text}");
    }
}

#[test]
fn exec_leaves_the_sandbox_and_passes_its_own_environment() {
    let daemon = Daemon::start(Script::new().exit(5));
    let output = hearth(&daemon, &["exec", "--env", "A=b=c", "web", "--", "cmd", "-x"]);
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    let calls = daemon.calls();
    assert!(calls.contains(&"exec web [\"cmd\", \"-x\"] {\"A\": \"b=c\"}".to_owned()), "{calls:?}");
    assert!(!calls.iter().any(|c| c.starts_with("delete")));
}

#[test]
fn rm_tries_all_and_reports_each() {
    let daemon = Daemon::start(Script::new());
    let output = hearth(&daemon, &["rm", "a", "missing", "b"]);
    assert_eq!(output.status.code(), Some(1));
    let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["a", "b"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot delete sandbox \"missing\""));
}

#[test]
fn ls_prints_a_table_or_an_array() {
    let daemon = Daemon::start(Script::new());
    let table = hearth(&daemon, &["ls"]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(text.starts_with("NAME") && text.contains("id0") && !text.contains('\u{1b}'), "{text}");
    let json = hearth(&daemon, &["ls", "--json"]);
    let array: Vec<serde_json::Value> = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(array[0]["name"], "web");
    let logs = hearth(&daemon, &["logs", "web"]);
    assert_eq!(logs.stdout, b"con\xffsole");
}

/// Needs script(1), which is on every Debian and Ubuntu.
#[test]
fn a_terminal_is_passed_on_and_given_back() {
    let daemon = Daemon::start(Script::new().stdout(b"raw\r\n").exit(0));
    let hearth = env!("CARGO_BIN_EXE_hearth");
    let line = format!("stty rows 33 cols 101; {hearth} run --tty base -- cmd; echo code=$?; stty -a");
    let output = program(&daemon, "script", &["-qec", &line, "/dev/null"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("raw\r\n") && text.contains("code=0"), "{text}");
    assert!(text.contains(" icanon") && !text.contains("-icanon") && !text.contains("-opost"), "{text}");
    let calls = daemon.calls();
    assert!(calls.contains(&"tty 33x101".to_owned()), "{calls:?}");
}
