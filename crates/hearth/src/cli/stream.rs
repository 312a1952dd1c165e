//! One command in a sandbox: streams its bytes, passes signals and window sizes on, and says how it ended.
//! `run` and `exec` share it.
//!
//! ```text
//! Running ──exit──► Exit
//!    │ signal n, or nobody reads our output
//!    ▼
//! Stopping ──exit──► Exit, or BrokenPipe / OutputFailed
//!    │ second signal, or no end in time
//!    ▼
//! killed (SIGKILL sent) ──exit, or no end in 2 s──► Interrupted / BrokenPipe / OutputFailed
//! ```

use std::io::{ErrorKind, IsTerminal};
use std::time::Duration;

use hearth_api::v1::exec_output::Output;
use hearth_api::v1::{ExecExit, ExecInput, ExecStart, ResizeExecRequest, SignalExecRequest, exec_input};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::client::{Client, Sandboxes};
use super::error::CliError;
use super::out;
use super::signals::{self, Signals};
use super::stdio::{self, Chunk, Target, Writer};
use super::terminal::{self, RawMode};

/// After the first signal.
const UNTIL_KILL: Duration = Duration::from_secs(5);
/// After SIGPIPE, and after SIGKILL.
const UNTIL_GIVEN_UP: Duration = Duration::from_secs(2);
/// Kept of each stream when output is captured.
const CAPTURE: usize = 8 << 20;

/// How to run a command.
#[derive(Debug)]
pub(super) struct Plan {
    /// The command. `tty` and `stdin` are filled in here.
    pub(super) start: ExecStart,
    /// Give it a terminal.
    pub(super) tty: bool,
    /// Forward stdin even if it is a terminal.
    pub(super) interactive: bool,
    /// Keep the output instead of writing it.
    pub(super) capture: bool,
}

/// How it ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// By itself.
    Exit(ExecExit),
    /// We had to kill it after this signal to us.
    Interrupted(i32),
    /// Nobody reads our output.
    BrokenPipe,
    /// Our output could not be written for another reason.
    OutputFailed(String),
}

/// Output kept in memory.
#[derive(Debug, Default)]
pub(super) struct Captured {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    /// Whether there was more.
    pub(super) truncated: bool,
}

/// Why the command is being stopped.
#[derive(Debug)]
enum Cause {
    Signal(i32),
    BrokenPipe,
    OutputFailed(String),
}

#[derive(Debug)]
struct Stopping {
    cause: Cause,
    deadline: Instant,
    killed: bool,
}

enum Event {
    Message(Result<Option<Option<Output>>, Status>),
    Room(Result<(), ()>),
    Written(std::io::Result<()>),
    Signal(i32),
    Resized,
    Deadline,
}

/// Runs the command to its end.
pub(super) async fn run(
    client: &Client,
    plan: Plan,
    signals: &mut Signals,
) -> Result<(Ended, Captured), CliError> {
    let stdin_is_terminal = std::io::stdin().is_terminal();
    let forward = plan.interactive || plan.tty || !stdin_is_terminal;
    let mut start = plan.start;
    start.stdin = forward;
    start.tty = plan.tty.then(terminal::size);
    let what = format!("cannot run {:?} in {}", start.argv.first().map_or("", String::as_str), start.sandbox);
    let sandbox = start.sandbox.clone();

    let (input, requests) = mpsc::channel(4);
    let first = ExecInput { input: Some(exec_input::Input::Start(start)) };
    input.send(first).await.map_err(|_| CliError::failed(&what, "the connection ended"))?;
    let mut sandboxes = client.sandboxes();
    let call = sandboxes.exec(ReceiverStream::new(requests));
    let stream = tokio::select! {
        answer = call => answer.map_err(|s| CliError::from_status(&what, &s))?.into_inner(),
        number = signals.next() => return Ok((Ended::Interrupted(number), Captured::default())),
    };
    let output = match plan.capture {
        true => None,
        false => Some(Writer::start()?),
    };
    let (chunks, written) = output.map(|w| (w.chunks, w.done)).unzip();
    let mut session = Session {
        what,
        sandbox,
        sandboxes: client.sandboxes(),
        exec_id: None,
        stream,
        // The request stream stays open until the command has ended, whatever stdin does.
        input: Some(input),
        forward,
        chunks,
        pending: None,
        captured: Captured::default(),
        stopping: None,
        quiet: plan.capture,
        calls: JoinSet::new(),
    };
    // Not before the command is on its way: until then Ctrl-C is a signal.
    let raw = if plan.tty && stdin_is_terminal { Some(RawMode::enter()?) } else { None };
    let resized = if plan.tty { signal(SignalKind::window_change()).ok() } else { None };
    let ended = session.drive(signals, written, resized).await;
    drop(raw);
    Ok((ended?, session.captured))
}

struct Session {
    what: String,
    sandbox: String,
    sandboxes: Sandboxes,
    exec_id: Option<String>,
    stream: Streaming<hearth_api::v1::ExecOutput>,
    input: Option<mpsc::Sender<ExecInput>>,
    forward: bool,
    chunks: Option<mpsc::Sender<Chunk>>,
    /// Received and not yet taken by the writer; while there is one, nothing more is received.
    pending: Option<Chunk>,
    captured: Captured,
    stopping: Option<Stopping>,
    /// Say nothing on stderr.
    quiet: bool,
    /// Signals and sizes on their way to the daemon.
    calls: JoinSet<()>,
}

impl Session {
    async fn drive(
        &mut self,
        signals: &mut Signals,
        mut written: Option<tokio::sync::oneshot::Receiver<std::io::Result<()>>>,
        mut resized: Option<Signal>,
    ) -> Result<Ended, CliError> {
        let mut exit: Option<ExecExit> = None;
        loop {
            if exit.is_some() && self.pending.is_none() {
                // The writer ends when it has written the rest.
                self.chunks = None;
                if let Some(done) = exit.take_if(|_| written.is_none()) {
                    return Ok(self.ended(done));
                }
            }
            let deadline = self.stopping.as_ref().map(|s| s.deadline);
            let event = tokio::select! {
                m = self.stream.message(), if exit.is_none() && self.pending.is_none() => {
                    Event::Message(m.map(|m| m.map(|m| m.output)))
                }
                room = room(self.chunks.as_ref()), if self.pending.is_some() => Event::Room(room),
                result = wait(&mut written), if written.is_some() => Event::Written(result),
                number = signals.next() => Event::Signal(number),
                () = next_resize(&mut resized) => Event::Resized,
                () = sleep_until(deadline) => Event::Deadline,
                Some(_) = self.calls.join_next() => continue,
            };
            match event {
                Event::Message(Ok(Some(Some(Output::Exit(e))))) => exit = Some(e),
                Event::Message(Ok(Some(Some(Output::Started(s))))) => self.started(s.exec_id)?,
                Event::Message(Ok(Some(Some(Output::Stdout(data))))) => self.receive(Target::Stdout, data),
                Event::Message(Ok(Some(Some(Output::Stderr(data))))) => self.receive(Target::Stderr, data),
                // Something a newer daemon says.
                Event::Message(Ok(Some(None))) => {}
                Event::Message(Ok(None)) if self.stopping.is_some() => return Ok(self.stopped()),
                Event::Message(Ok(None)) => {
                    return Err(CliError::failed(
                        &self.what,
                        "the daemon ended the stream before the command ended",
                    ));
                }
                Event::Message(Err(_)) if self.stopping.is_some() => return Ok(self.stopped()),
                Event::Message(Err(status)) => return Err(CliError::from_status(&self.what, &status)),
                Event::Room(Ok(())) => self.pass_on(),
                // The writer ended; `written` says why.
                Event::Room(Err(())) => self.pending = None,
                Event::Written(result) => {
                    written = None;
                    self.chunks = None;
                    self.pending = None;
                    if let Err(e) = result {
                        self.output_failed(&e);
                    }
                }
                // All has been said; what is left is our own output.
                Event::Signal(number) if exit.is_some() => return Ok(Ended::Interrupted(number)),
                Event::Signal(number) => self.interrupt(number),
                Event::Resized => self.resize(),
                Event::Deadline if self.stopping.as_ref().is_some_and(|s| s.killed) => {
                    return Ok(self.stopped());
                }
                Event::Deadline => self.kill(),
            }
        }
    }

    fn started(&mut self, exec_id: String) -> Result<(), CliError> {
        self.exec_id = Some(exec_id);
        // Not earlier: a command that cannot start eats no input.
        if let Some(input) = self.input.as_ref().filter(|_| self.forward) {
            stdio::forward_stdin(input.clone())
                .map_err(|e| CliError::failed("cannot read stdin", e.to_string()))?;
        }
        match &self.stopping {
            Some(Stopping { killed: true, .. }) => self.signal(9),
            Some(Stopping { cause: Cause::Signal(number), .. }) => self.signal(*number),
            _ => {}
        }
        Ok(())
    }

    fn receive(&mut self, to: Target, data: Vec<u8>) {
        if self.chunks.is_some() {
            self.pending = Some(Chunk { to, data });
        } else if self.stopping.is_none() {
            let kept = match to {
                Target::Stdout => &mut self.captured.stdout,
                Target::Stderr => &mut self.captured.stderr,
            };
            let room = CAPTURE.saturating_sub(kept.len()).min(data.len());
            kept.extend_from_slice(&data[..room]);
            self.captured.truncated |= room < data.len();
        }
    }

    fn pass_on(&mut self) {
        if let (Some(chunk), Some(chunks)) = (self.pending.take(), &self.chunks) {
            // There is room and we are the only sender; a writer that ended meanwhile reports itself.
            drop(chunks.try_send(chunk));
        }
    }

    fn interrupt(&mut self, number: i32) {
        match &self.stopping {
            Some(s) if s.killed => {}
            Some(_) => self.kill(),
            None => {
                self.signal(number);
                self.stop(Cause::Signal(number), UNTIL_KILL);
            }
        }
    }

    fn output_failed(&mut self, error: &std::io::Error) {
        if self.stopping.is_some() {
            return;
        }
        self.signal(13);
        let cause = match error.kind() {
            ErrorKind::BrokenPipe => Cause::BrokenPipe,
            _ => Cause::OutputFailed(error.to_string()),
        };
        self.stop(cause, UNTIL_GIVEN_UP);
    }

    fn stop(&mut self, cause: Cause, patience: Duration) {
        self.stopping = Some(Stopping { cause, deadline: Instant::now() + patience, killed: false });
    }

    fn kill(&mut self) {
        self.signal(9);
        if let Some(s) = &mut self.stopping {
            if let (Cause::Signal(number), false) = (&s.cause, self.quiet) {
                out::note(&format!("{} did not end the command; killing it", signals::name(*number)));
            }
            s.killed = true;
            s.deadline = Instant::now() + UNTIL_GIVEN_UP;
        }
    }

    /// What an exit means, given what we did before.
    fn ended(&mut self, exit: ExecExit) -> Ended {
        match self.stopping.as_ref().map(|s| (&s.cause, s.killed)) {
            None | Some((Cause::Signal(_), false)) => Ended::Exit(exit),
            Some(_) => self.stopped(),
        }
    }

    fn stopped(&mut self) -> Ended {
        match self.stopping.take().map(|s| s.cause) {
            Some(Cause::Signal(number)) => Ended::Interrupted(number),
            Some(Cause::OutputFailed(why)) => Ended::OutputFailed(why),
            Some(Cause::BrokenPipe) | None => Ended::BrokenPipe,
        }
    }

    fn signal(&mut self, signal: i32) {
        // Without an id yet, `started` catches up.
        let Some(exec_id) = self.exec_id.clone() else { return };
        let request = SignalExecRequest { sandbox: self.sandbox.clone(), exec_id, signal };
        let mut sandboxes = self.sandboxes.clone();
        self.calls.spawn(async move {
            // That the command ended meanwhile is no news; anything else ends the stream as well.
            drop(sandboxes.signal_exec(request).await);
        });
    }

    fn resize(&mut self) {
        let Some(exec_id) = self.exec_id.clone() else { return };
        let size = Some(terminal::size());
        let request = ResizeExecRequest { sandbox: self.sandbox.clone(), exec_id, size };
        let mut sandboxes = self.sandboxes.clone();
        self.calls.spawn(async move {
            drop(sandboxes.resize_exec(request).await);
        });
    }
}

/// Resolves when the writer has room.
async fn room(chunks: Option<&mpsc::Sender<Chunk>>) -> Result<(), ()> {
    chunks.ok_or(())?.reserve().await.map(drop).map_err(drop)
}

async fn wait(
    written: &mut Option<tokio::sync::oneshot::Receiver<std::io::Result<()>>>,
) -> std::io::Result<()> {
    match written {
        Some(done) => {
            done.await.unwrap_or_else(|_| Err(std::io::Error::other("the writing thread panicked")))
        }
        None => std::future::pending().await,
    }
}

async fn next_resize(resized: &mut Option<Signal>) {
    match resized {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
