//! The agent: what it knows, and its answers to requests. Sessions come and go; commands belong to the agent
//! and outlive the session that started them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::agent::{AgentError, AgentErrorKind, FrameKind, MAX_STREAMS, Request, Response, TtySize};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tokio_util::compat::FuturesAsyncReadCompatExt;
use tokio_util::task::TaskTracker;

use crate::places::{Place, Places};
use crate::reaper::Reaper;
use crate::{configure, exec, frame, ignore, port, power, say, session, spawn, vsock};

/// How long tasks may take to end after their commands were killed.
const END: Duration = Duration::from_secs(2);

/// Streams at once. The host keeps to [`MAX_STREAMS`]; what it dropped counts until its task noticed. Less than
/// what yamux takes (see `session`), which ends the connection at its own limit.
const STREAMS: usize = 3 * MAX_STREAMS;
/// Commands at once with a host that listens: whatever they do, [`MAX_STREAMS`] are left for small requests.
const ATTACHED: usize = 2 * MAX_STREAMS;
/// Commands at once, those whose host has left included. Each takes up to three descriptors and 8 KiB.
const COMMANDS: usize = 1024;

/// The agent of this machine, or in tests of this process.
#[derive(Debug)]
pub(crate) struct Agent {
    /// Pid 1 of a guest: it may configure and power off the machine.
    pub(crate) is_init: bool,
    pub(crate) reaper: Reaper,
    /// Owner of every stream's task.
    pub(crate) tasks: TaskTracker,
    /// Commands whose host listens.
    pub(crate) attached: Places,
    /// All commands.
    pub(crate) commands: Places,
    streams: Places,
    env: Mutex<Vec<(String, String)>>,
    /// A test agent was asked to shut down.
    stop: Notify,
}

/// An error for the host.
pub(crate) fn fail(kind: AgentErrorKind, message: String) -> AgentError {
    AgentError { kind, message }
}

impl Agent {
    fn new(is_init: bool) -> Arc<Self> {
        Arc::new(Self {
            is_init,
            reaper: Reaper::default(),
            tasks: TaskTracker::new(),
            attached: Places::new(ATTACHED),
            commands: Places::new(COMMANDS),
            streams: Places::new(STREAMS),
            env: Mutex::default(),
            stop: Notify::new(),
        })
    }

    /// Environment of every command.
    pub(crate) fn env(&self) -> Vec<(String, String)> {
        self.env.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves a stream the host opened, in a task of its own. One too many is dropped, which resets it.
    pub(crate) fn accept(self: &Arc<Self>, stream: yamux::Stream) {
        let Some(place) = self.streams.take() else { return };
        let agent = Arc::clone(self);
        self.tasks.spawn(async move {
            let (from, to) = tokio::io::split(stream.compat());
            // A broken stream concerns nobody else.
            ignore(agent.serve(from, to, place).await);
        });
    }

    async fn serve<R, W>(&self, mut from: R, mut to: W, place: Place) -> io::Result<()>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        let mut payload = Vec::new();
        let request = match frame::read(&mut from, &mut payload).await? {
            None => return Ok(()),
            Some(FrameKind::Request) => serde_json::from_slice(&payload)
                .map_err(|e| fail(AgentErrorKind::Invalid, format!("the request does not parse: {e}"))),
            Some(other) => Err(fail(AgentErrorKind::Invalid, format!("{other:?} is no request"))),
        };
        drop(payload);
        let outcome = match request {
            Ok(Request::Exec(exec)) => {
                exec::serve(self, from, to, place, exec).await;
                return Ok(());
            }
            Ok(Request::Shutdown) => return self.shut_down(to).await,
            Ok(request) => self.answer(request).await,
            Err(e) => Err(e),
        };
        respond(&mut to, outcome).await
    }

    async fn answer(&self, request: Request) -> Result<(), AgentError> {
        match request {
            Request::Ping | Request::Exec(_) | Request::Shutdown => Ok(()),
            Request::Configure(config) => {
                if self.is_init {
                    configure::apply(&config).await?;
                }
                *self.env.lock().unwrap_or_else(PoisonError::into_inner) = config.env;
                Ok(())
            }
            Request::Signal { exec, signal } => self.signal(&exec, signal),
            Request::Resize { exec, rows, cols } => {
                let running = self.reaper.running(&exec).ok_or_else(|| no_such(&exec))?;
                let tty = running.tty.ok_or_else(|| {
                    fail(AgentErrorKind::Invalid, format!("command {exec:?} has no terminal"))
                })?;
                exec::set_size(&tty, TtySize { rows, cols })
                    .map_err(|e| fail(AgentErrorKind::Failed, format!("cannot resize the terminal: {e}")))
            }
        }
    }

    fn signal(&self, exec: &str, signal: i32) -> Result<(), AgentError> {
        if !(1..=64).contains(&signal) {
            return Err(fail(AgentErrorKind::Invalid, format!("{signal} is not a signal")));
        }
        let running = self.reaper.running(exec).ok_or_else(|| no_such(exec))?;
        match power::kill(-running.pid, signal) {
            Ok(()) => Ok(()),
            // Forked just now and not yet the leader of its group.
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {
                power::kill(running.pid, signal).map_err(|_| no_such(exec))
            }
            Err(e) => Err(fail(AgentErrorKind::Failed, format!("cannot signal command {exec:?}: {e}"))),
        }
    }

    /// The answer goes out after the disks are safe and before the machine is off.
    async fn shut_down<W: AsyncWrite + Unpin>(&self, mut to: W) -> io::Result<()> {
        if self.is_init {
            power::quiesce().await;
        }
        let answered = respond(&mut to, Ok(())).await;
        if self.is_init {
            // The session's task must run once to write the answer out; the host needs no more than that.
            tokio::time::sleep(Duration::from_millis(20)).await;
            power::off();
        }
        self.stop.notify_one();
        answered
    }
}

async fn respond<W>(to: &mut W, outcome: Result<(), AgentError>) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let response = match outcome {
        Ok(()) => Response::Done,
        Err(e) => Response::Failed(e),
    };
    frame::write_json(to, FrameKind::Response, &response).await?;
    to.shutdown().await
}

fn no_such(exec: &str) -> AgentError {
    fail(AgentErrorKind::NoSuchExec, format!("no command with id {exec:?} runs"))
}

/// Takes ended children for ever. Signals merge, hence "all that have ended" each time.
async fn reap(agent: &Agent, mut sigchld: Signal) {
    loop {
        agent.reaper.reap();
        sigchld.recv().await;
    }
}

/// Pid 1 after boot: serves whichever transport the host uses. Does not return.
pub(crate) async fn serve_guest() -> io::Result<()> {
    let agent = Agent::new(true);
    spawn::raise_own_limit();
    // The handler stands before the first child is forked.
    let sigchld = signal(SignalKind::child())?;
    tokio::join!(reap(&agent, sigchld), port::serve(&agent), vsock::serve(&agent));
    Ok(())
}

/// Test mode: serves one connected socket until it closes, a shutdown request or SIGTERM; then kills every
/// process that descends from a command.
pub(crate) async fn serve_socket(socket: OwnedFd) -> io::Result<()> {
    let agent = Agent::new(false);
    spawn::raise_own_limit();
    let sigchld = signal(SignalKind::child())?;
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    power::adopt_orphans();
    let socket = std::os::unix::net::UnixStream::from(socket);
    socket.set_nonblocking(true)?;
    let socket = tokio::net::UnixStream::from_std(socket)?;
    tokio::select! {
        () = reap(&agent, sigchld) => {}
        () = session::serve(socket, &agent) => {}
        () = agent.stop.notified() => tokio::time::sleep(Duration::from_millis(20)).await,
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    power::kill_descendants(&agent.reaper);
    agent.tasks.close();
    if tokio::time::timeout(END, agent.tasks.wait()).await.is_err() {
        say!("tasks did not end within {END:?}");
    }
    Ok(())
}
