//! One command in the guest: what the caller holds, and the task that serves its stream.
//!
//! The task is needed because a yamux stream keeps one waker for both directions: reader and writer must be
//! polled by the same task, while callers want to use them from two. Its queues hold a few chunks, so a caller
//! that does not read stops the command's output, and a command that does not read stops the caller's writes.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use hearth_core::agent::{AgentError, ExecExit, FrameKind, MAX_FRAME, Started};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::timeout;
use tokio_util::compat::FuturesAsyncReadCompatExt;
use yamux::Stream;

use super::frame::{self, FrameError};
use super::{AgentClientError, START_TIMEOUT};

/// Chunks under way in each direction besides those in the stream's window.
const QUEUE: usize = 2;

/// A command. Dropping the output (or both) resets its stream: the command goes on in the guest with its
/// stdin ended and its output discarded. Other commands do not notice.
#[derive(Debug)]
pub struct Exec {
    /// Its stdin.
    pub input: ExecInput,
    /// Its output and its end.
    pub output: ExecOutput,
}

/// Stdin of a command. Dropping it ends stdin, as with a pipe.
#[derive(Debug)]
pub struct ExecInput {
    chunks: mpsc::Sender<Bytes>,
}

/// What a command wrote and how it ended.
#[derive(Debug)]
pub struct ExecOutput {
    events: mpsc::Receiver<Result<ExecEvent, AgentClientError>>,
    closed: watch::Receiver<Option<String>>,
    over: bool,
}

/// Something a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// It runs: always the first event.
    Started(Started),
    /// It wrote to stdout or its terminal.
    Stdout(Bytes),
    /// It wrote to stderr.
    Stderr(Bytes),
    /// It ended: always the last event.
    Exit(ExecExit),
}

impl ExecInput {
    /// Writes to the command's stdin; waits while the command does not read.
    ///
    /// # Errors
    /// The command ended or the connection is gone.
    pub async fn write(&self, mut data: Bytes) -> Result<(), AgentClientError> {
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(MAX_FRAME));
            self.chunks.send(chunk).await.map_err(|_| AgentClientError::InputClosed)?;
        }
        Ok(())
    }

    /// Ends the command's stdin. What was written before still arrives.
    pub fn end(self) {}
}

impl ExecOutput {
    /// The next event; `None` after [`ExecEvent::Exit`] or an error was returned. Cancel-safe.
    ///
    /// # Errors
    /// [`AgentClientError::Agent`] if the command could not be started; [`AgentClientError::Timeout`] if the
    /// agent did not say so in [`START_TIMEOUT`], after which the command may still start, as one whose caller
    /// has left; otherwise the connection is gone.
    pub async fn next(&mut self) -> Result<Option<ExecEvent>, AgentClientError> {
        if self.over {
            return Ok(None);
        }
        let event = self.events.recv().await.unwrap_or_else(|| {
            let reason = self.closed.borrow().clone();
            let reason = reason.unwrap_or_else(|| "the command's stream was reset".to_owned());
            Err(AgentClientError::Closed { reason })
        });
        self.over = matches!(event, Ok(ExecEvent::Exit(_)) | Err(_));
        event.map(Some)
    }
}

/// The other ends of an [`Exec`], and the request that opens it.
#[derive(Debug)]
pub(super) struct Pump {
    request: Vec<u8>,
    chunks: mpsc::Receiver<Bytes>,
    events: mpsc::Sender<Result<ExecEvent, AgentClientError>>,
    _permit: OwnedSemaphorePermit,
}

/// A command's two sides.
pub(super) fn new(
    request: Vec<u8>,
    permit: OwnedSemaphorePermit,
    closed: watch::Receiver<Option<String>>,
) -> (Exec, Pump) {
    let (chunks_tx, chunks) = mpsc::channel(QUEUE);
    let (events, events_rx) = mpsc::channel(QUEUE);
    let exec = Exec {
        input: ExecInput { chunks: chunks_tx },
        output: ExecOutput { events: events_rx, closed, over: false },
    };
    (exec, Pump { request, chunks, events, _permit: permit })
}

impl Pump {
    /// Serves the stream until the command ended or the caller dropped the output. The stream is dropped
    /// without being closed: closing first would leave an agent that still writes without a reset.
    pub(super) async fn run(mut self, stream: Stream) {
        let (mut from, mut to) = tokio::io::split(stream.compat());
        let input = async {
            // A failed write means that the stream is over; the reader below says how it ended.
            if feed(&self.request, &mut self.chunks, &mut to).await.is_err() {
                self.chunks.close();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = self.events.closed() => {}
            () = input => {}
            () = relay(&mut from, &self.events, START_TIMEOUT) => {}
        }
    }
}

/// The request, then stdin, then its end.
async fn feed(
    request: &[u8],
    chunks: &mut mpsc::Receiver<Bytes>,
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    to.write_all(request).await?;
    while let Some(chunk) = chunks.recv().await {
        let frame = frame::encode(FrameKind::Stdin, &chunk).map_err(io::Error::other)?;
        to.write_all(&frame).await?;
    }
    let end = frame::encode(FrameKind::StdinEnd, &[]).map_err(io::Error::other)?;
    to.write_all(&end).await
}

/// Frames from the agent as events, up to the last; the first is due after `limit`. An end of the stream without
/// a last one shows as the end of the events.
async fn relay(
    from: &mut (impl AsyncRead + Unpin),
    events: &mpsc::Sender<Result<ExecEvent, AgentClientError>>,
    limit: Duration,
) {
    let mut started = false;
    loop {
        let read = if started {
            frame::read(from).await
        } else {
            let late = AgentClientError::Timeout { call: "exec", after: limit };
            match timeout(limit, frame::read(from)).await {
                Ok(read) => read,
                // Nobody listens any more: fine.
                Err(_) => return drop(events.send(Err(late)).await),
            }
        };
        let event = match read {
            Ok(Some((kind @ (FrameKind::Stdout | FrameKind::Stderr | FrameKind::Exit), _))) if !started => {
                Err(AgentClientError::Protocol { what: format!("{kind:?} of a command that did not start") })
            }
            Ok(Some((kind, payload))) => event(kind, payload),
            Ok(None) | Err(FrameError::Io) => return,
            Err(FrameError::Broken(what)) => Err(AgentClientError::Protocol { what }),
        };
        started = true;
        let last = matches!(event, Ok(ExecEvent::Exit(_)) | Err(_));
        if events.send(event).await.is_err() || last {
            return;
        }
    }
}

fn event(kind: FrameKind, payload: Bytes) -> Result<ExecEvent, AgentClientError> {
    match kind {
        FrameKind::Stdout => Ok(ExecEvent::Stdout(payload)),
        FrameKind::Stderr => Ok(ExecEvent::Stderr(payload)),
        FrameKind::Started => frame::decode_json(&payload).map(ExecEvent::Started),
        FrameKind::Exit => frame::decode_json(&payload).map(ExecEvent::Exit),
        FrameKind::Error => {
            Err(frame::decode_json::<AgentError>(&payload).map_or_else(|e| e, AgentClientError::Agent))
        }
        FrameKind::Request | FrameKind::Response | FrameKind::Stdin | FrameKind::StdinEnd => {
            Err(AgentClientError::Protocol { what: format!("{kind:?} for a command") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a caller gets from an agent that wrote `frames` and then fell silent.
    async fn relayed(frames: &[u8]) -> Vec<Result<ExecEvent, AgentClientError>> {
        let (mut ours, mut theirs) = tokio::io::duplex(4096);
        theirs.write_all(frames).await.unwrap();
        let (events, mut seen) = mpsc::channel(8);
        // More than the limit for the start, and no limit for what follows it.
        let relay = relay(&mut ours, &events, Duration::from_millis(50));
        drop(timeout(Duration::from_millis(500), relay).await);
        drop(events);
        let mut all = Vec::new();
        while let Some(event) = seen.recv().await {
            all.push(event);
        }
        all
    }

    #[tokio::test]
    async fn an_agent_that_does_not_say_whether_it_started_is_waited_for_in_bounds() {
        let seen = relayed(b"").await;
        assert!(matches!(seen[..], [Err(AgentClientError::Timeout { call: "exec", .. })]), "{seen:?}");
        // A frame begun and never ended is no answer.
        let seen = relayed(b"\x07\xff\0\0\0").await;
        assert!(matches!(seen[..], [Err(AgentClientError::Timeout { .. })]), "{seen:?}");
    }

    #[tokio::test]
    async fn a_started_command_may_be_silent() {
        let started = frame::encode_json(FrameKind::Started, &Started { pid: 7 }).unwrap();
        let seen = relayed(&started).await;
        assert!(matches!(seen[..], [Ok(ExecEvent::Started(Started { pid: 7 }))]), "{seen:?}");
    }

    #[tokio::test]
    async fn output_before_the_start_breaks_the_protocol() {
        let seen = relayed(&frame::encode(FrameKind::Stdout, b"x").unwrap()).await;
        assert!(matches!(seen[..], [Err(AgentClientError::Protocol { .. })]), "{seen:?}");
    }
}
