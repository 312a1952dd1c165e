//! Client of the guest agent's protocol (`hearth_core::agent`), as the shim uses it.
//!
//! [`AgentClient::connect`] takes the byte stream of one VM, shakes hands with the agent and starts one task,
//! the driver, that alone polls the yamux connection; it belongs to the client and ends with it or with the
//! transport. Handles are clones; each request and each command has its own stream, so none waits for
//! another. It must not decide anything about a sandbox and must not log: callers get errors.
//!
//! The guest is not trusted: lengths are checked before anything is allocated, every stream has a fixed
//! window, and a broken frame ends its own stream only. The bound on memory counts what a frame costs beside its
//! bytes: yamux keeps each DATA frame that was not read as an allocation of its own (32 bytes in its queue, 32 on
//! the heap), so a guest that sends one byte per frame to a command whose caller does not read makes a window of
//! 256 KiB cost 16 MiB. Only the host opens streams, so that is 16 MiB per stalled caller, and 1 GiB when all 56
//! commands and 8 requests stall at once; it is memory of this sandbox's shim, in this sandbox's cgroup. Reading
//! ahead into a buffer of ours would not lower it: yamux gives the window back as it is read.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_core::agent::{ExecRequest, FrameKind, GuestConfig, MAX_STREAMS, Request, Response};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::compat::FuturesAsyncReadCompatExt;

mod driver;
mod error;
mod exec;
mod frame;
mod handshake;
mod transport;

pub use error::AgentClientError;
pub use exec::{Exec, ExecEvent, ExecInput, ExecOutput};

use driver::Command;

/// How long a small request (signal, resize) may take, emulated guests under load included.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long `configure` may take; the agent waits for the network card in it.
pub const CONFIGURE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long `shutdown` may take; the agent ends all processes and syncs disks in it.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the agent may take to say whether a command started; a program may come from a slow disk.
pub const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Streams kept for small requests, so that a signal gets through however many commands run.
const CALL_STREAMS: usize = 8;
/// Commands at once on one agent.
pub const MAX_EXECS: usize = MAX_STREAMS - CALL_STREAMS;

/// A connection to one guest agent. Clones share it; it ends when [`AgentClient::close`] is called, when the
/// last clone is dropped, or when the transport ends.
#[derive(Debug, Clone)]
pub struct AgentClient {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    commands: mpsc::Sender<Command>,
    closed: watch::Receiver<Option<String>>,
    /// Holds the driver. Dropping it aborts the driver, which drops the transport and every stream.
    driver: Mutex<JoinSet<()>>,
    calls: Arc<Semaphore>,
    execs: Arc<Semaphore>,
}

impl AgentClient {
    /// Shakes hands over `stream` and starts the driver. The hello is repeated while the guest boots and
    /// bytes left by an earlier session are skipped, until `deadline`.
    ///
    /// # Errors
    /// The handshake timed out, or the transport failed or ended.
    pub async fn connect<S>(stream: S, deadline: Instant) -> Result<Self, AgentClientError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (mut transport, blocked) = transport::wrap(stream);
        handshake::shake(&mut transport, deadline).await?;
        let (commands, inbox) = mpsc::channel(1);
        let (closed_tx, closed) = watch::channel(None);
        let mut tasks = JoinSet::new();
        tasks.spawn(driver::drive(transport, blocked, inbox, closed_tx));
        Ok(Self {
            shared: Arc::new(Shared {
                commands,
                closed,
                driver: Mutex::new(tasks),
                calls: Arc::new(Semaphore::new(CALL_STREAMS)),
                execs: Arc::new(Semaphore::new(MAX_EXECS)),
            }),
        })
    }

    /// First request after boot: hostname, network, environment, clock.
    ///
    /// # Errors
    /// The agent refused, did not answer in [`CONFIGURE_TIMEOUT`], or is gone.
    pub async fn configure(&self, config: GuestConfig) -> Result<(), AgentClientError> {
        self.call("configure", &Request::Configure(config), CONFIGURE_TIMEOUT).await
    }

    /// Answered at once by a living guest.
    ///
    /// # Errors
    /// No answer within `limit`, or the agent is gone.
    pub async fn ping(&self, limit: Duration) -> Result<(), AgentClientError> {
        self.call("ping", &Request::Ping, limit).await
    }

    /// Signals a command's process group. Passes a stdin that nobody reads.
    ///
    /// # Errors
    /// No such command runs, or the agent did not answer in [`CALL_TIMEOUT`], or is gone.
    pub async fn signal(&self, exec: &str, signal: i32) -> Result<(), AgentClientError> {
        self.call("signal", &Request::Signal { exec: exec.to_owned(), signal }, CALL_TIMEOUT).await
    }

    /// Sets the size of a command's terminal.
    ///
    /// # Errors
    /// No such command runs, it has no terminal, or the agent did not answer in [`CALL_TIMEOUT`], or is gone.
    pub async fn resize(&self, exec: &str, rows: u16, cols: u16) -> Result<(), AgentClientError> {
        self.call("resize", &Request::Resize { exec: exec.to_owned(), rows, cols }, CALL_TIMEOUT).await
    }

    /// Ends all processes of the guest, syncs its disks and powers it off. Success means that the agent
    /// agreed or that the connection ended while it worked; proof of the end is the VMM's exit.
    ///
    /// # Errors
    /// The agent refused, or did not answer in [`SHUTDOWN_TIMEOUT`], or was gone before.
    pub async fn shutdown(&self) -> Result<(), AgentClientError> {
        if let Some(reason) = self.close_reason() {
            return Err(AgentClientError::Closed { reason });
        }
        match self.call("shutdown", &Request::Shutdown, SHUTDOWN_TIMEOUT).await {
            Err(AgentClientError::Closed { .. }) => Ok(()),
            other => other,
        }
    }

    /// Starts a command. [`ExecOutput::next`] tells whether it started, within [`START_TIMEOUT`]. Waits for a free stream when
    /// [`MAX_EXECS`] commands run, at most [`CALL_TIMEOUT`].
    ///
    /// # Errors
    /// The request is too large, too many commands run, or the agent is gone.
    pub async fn exec(&self, request: ExecRequest) -> Result<Exec, AgentClientError> {
        let frame = frame::encode_json(FrameKind::Request, &Request::Exec(request))?;
        let permit = timeout(CALL_TIMEOUT, Arc::clone(&self.shared.execs).acquire_owned())
            .await
            .map_err(|_| AgentClientError::Busy { limit: MAX_EXECS })?
            .map_err(|_| self.closed_error())?;
        let (exec, pump) = exec::new(frame, permit, self.shared.closed.clone());
        let (reply, begun) = oneshot::channel();
        self.ask(Command::Exec(pump, reply), begun, "exec", CALL_TIMEOUT).await?;
        Ok(exec)
    }

    /// Completes when the connection has ended, with the reason.
    pub async fn closed(&self) -> String {
        let mut closed = self.shared.closed.clone();
        // The sender is dropped without a value only if the driver panicked or was aborted.
        match closed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => driver_lost(),
        }
    }

    /// Closes the connection for all clones and waits for the driver, at most `limit`.
    ///
    /// # Errors
    /// The driver did not end in time; it was aborted and the transport is closed all the same.
    pub async fn close(&self, limit: Duration) -> Result<(), AgentClientError> {
        let mut tasks = {
            let mut held = self.shared.driver.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            std::mem::take(&mut *held)
        };
        // A full inbox or a blocked transport must not keep us: the abort below closes as well.
        let asked = self.shared.commands.send_timeout(Command::Close, limit).await.is_ok();
        let joined =
            asked && timeout(limit, async { while tasks.join_next().await.is_some() {} }).await.is_ok();
        tasks.shutdown().await;
        if joined || self.close_reason().is_some() {
            return Ok(());
        }
        Err(AgentClientError::Timeout { call: "close", after: limit })
    }

    fn close_reason(&self) -> Option<String> {
        let reason = self.shared.closed.borrow().clone();
        reason.or_else(|| self.shared.commands.is_closed().then(driver_lost))
    }

    fn closed_error(&self) -> AgentClientError {
        AgentClientError::Closed { reason: self.close_reason().unwrap_or_else(driver_lost) }
    }

    /// Sends a command and waits for its answer, at most `limit`.
    async fn ask<T>(
        &self,
        command: Command,
        answer: oneshot::Receiver<T>,
        call: &'static str,
        limit: Duration,
    ) -> Result<T, AgentClientError> {
        let asked = async {
            self.shared.commands.send(command).await.ok()?;
            tokio::select! {
                biased;
                answer = answer => answer.ok(),
                // What is sent while the driver's end drops the queue stays in it as long as there is a sender.
                () = self.shared.commands.closed() => None,
            }
        };
        match timeout(limit, asked).await {
            Ok(answer) => answer.ok_or_else(|| self.closed_error()),
            Err(_) => Err(AgentClientError::Timeout { call, after: limit }),
        }
    }

    /// One request, one response, on a stream of its own. A timeout drops the stream, which resets it.
    async fn call(
        &self,
        call: &'static str,
        request: &Request,
        limit: Duration,
    ) -> Result<(), AgentClientError> {
        let bytes = frame::encode_json(FrameKind::Request, request)?;
        let work = async {
            let _permit = self.shared.calls.acquire().await.map_err(|_| self.closed_error())?;
            let (reply, opened) = oneshot::channel();
            let stream = self.ask(Command::Open(reply), opened, call, limit).await?;
            let mut stream = stream.compat();
            stream.write_all(&bytes).await.map_err(|_| self.closed_error())?;
            let Some((kind, payload)) = frame::read(&mut stream).await.map_err(|e| self.stream_error(e))?
            else {
                return Err(self.closed_error());
            };
            if kind != FrameKind::Response {
                return Err(AgentClientError::Protocol { what: format!("{kind:?} in answer to {call}") });
            }
            match frame::decode_json::<Response>(&payload)? {
                Response::Done => Ok(()),
                Response::Failed(e) => Err(AgentClientError::Agent(e)),
            }
        };
        timeout(limit, work).await.unwrap_or(Err(AgentClientError::Timeout { call, after: limit }))
    }

    /// An I/O error of a stream is the connection's end; a frame error is the agent's fault.
    fn stream_error(&self, e: frame::FrameError) -> AgentClientError {
        match e {
            frame::FrameError::Io => self.closed_error(),
            frame::FrameError::Broken(what) => AgentClientError::Protocol { what },
        }
    }
}

fn driver_lost() -> String {
    "the stream was reset or its driver ended".to_owned()
}
