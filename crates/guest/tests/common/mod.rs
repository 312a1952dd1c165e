//! A `hearth-guest --agent-fd` process and short ways to run commands in it.

// Each test binary uses its own part.
#![allow(dead_code)]

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hearth_core::agent::{ExecExit, ExecRequest};
use hearth_vmm::agent::{AgentClient, AgentClientError, ExecEvent, ExecOutput};
use tokio::net::UnixStream;
use tokio::time::Instant;

/// An agent process.
pub(crate) struct Agent {
    child: Child,
}

impl Agent {
    /// Starts one; the stream is the host's end.
    pub(crate) fn spawn() -> (Self, UnixStream) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = theirs.as_raw_fd();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth-guest"));
        command.args(["--agent-fd", "9"]);
        // SAFETY: only dup2, which is async-signal-safe; the copy is not close-on-exec.
        unsafe {
            command.pre_exec(move || match libc::dup2(fd, 9) {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let child = command.spawn().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Self { child }, UnixStream::from_std(ours).unwrap())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory in KiB.
    pub(crate) fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Waits for its end.
    pub(crate) async fn wait(mut self) -> std::process::ExitStatus {
        for _ in 0..1000 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.child.kill().unwrap();
        panic!("the agent did not end");
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self) {
        // SAFETY: a plain system call on a child we have not waited for.
        unsafe { libc::kill(self.pid().cast_signed(), libc::SIGTERM) };
    }
}

/// An agent and a client.
pub(crate) struct Rig {
    pub(crate) agent: Agent,
    pub(crate) client: AgentClient,
}

impl Rig {
    pub(crate) async fn start() -> Self {
        let (agent, stream) = Agent::spawn();
        let client = AgentClient::connect(stream, in_secs(10)).await.unwrap();
        Self { agent, client }
    }

    /// Closes the connection and expects the agent to end cleanly.
    pub(crate) async fn end(self) {
        self.client.close(Duration::from_secs(5)).await.unwrap();
        assert_eq!(self.agent.wait().await.code(), Some(0));
    }
}

pub(crate) fn in_secs(n: u64) -> Instant {
    Instant::now() + Duration::from_secs(n)
}

/// A request with an id of its own.
pub(crate) fn request(argv: &[&str]) -> ExecRequest {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    ExecRequest {
        id: format!("e{}", NEXT.fetch_add(1, Ordering::Relaxed)),
        argv: argv.iter().map(|s| (*s).to_owned()).collect(),
        ..ExecRequest::default()
    }
}

/// All of a command.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) exit: ExecExit,
}

/// A shell line that must start.
pub(crate) async fn run(rig: &Rig, script: &str) -> Done {
    collect(rig, request(&["sh", "-c", script])).await.unwrap()
}

/// A command without input.
pub(crate) async fn collect(rig: &Rig, request: ExecRequest) -> Result<Done, AgentClientError> {
    let exec = rig.client.exec(request).await?;
    events(exec.output).await
}

/// All events of a command.
pub(crate) async fn events(mut output: ExecOutput) -> Result<Done, AgentClientError> {
    let mut done =
        Done { stdout: Vec::new(), stderr: Vec::new(), exit: ExecExit { code: None, signal: None } };
    while let Some(event) = output.next().await? {
        match event {
            ExecEvent::Started(started) => assert!(started.pid > 0),
            ExecEvent::Stdout(bytes) => done.stdout.extend_from_slice(&bytes),
            ExecEvent::Stderr(bytes) => done.stderr.extend_from_slice(&bytes),
            ExecEvent::Exit(exit) => done.exit = exit,
        }
    }
    Ok(done)
}
