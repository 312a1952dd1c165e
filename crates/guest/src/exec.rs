//! One command: start it, move its bytes, tell how it ended. One task serves one stream, both directions,
//! because a yamux stream keeps one waker for both.
//!
//! **End.** `Exit` is sent once the command ended and its pipes are at their end. A process it left behind may
//! hold them open: then once they were quiet for [`QUIET`]. What the command itself wrote is always sent.
//!
//! **Host gone** (stream reset or closed, broken frame, connection lost): the command goes on. Its stdin ends and
//! its output is read and discarded, so that it does not hang on a full pipe. The stream is dropped at once and
//! counts no more; the command counts until it ends.
//!
//! Memory of one command: two output chunks and one frame of input, besides the stream's window; without a host
//! 8 KiB.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_core::agent::{
    AgentError, AgentErrorKind, ExecExit, ExecRequest, FRAME_HEAD, FrameKind, Started, TtySize,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use crate::agent::{Agent, fail};
use crate::frame::{self, OUTPUT_CHUNK};
use crate::ignore;
use crate::places::Place;
use crate::reaper::Running;
use crate::spawn::{self, Plan, Stage};
use crate::users::{self, Ids};

/// How long the output of a command that ended must be quiet while somebody holds its pipes.
const QUIET: Duration = Duration::from_millis(200);
/// A host that leaves while its input is not taken does not show in what is read: between two looks for that.
const LOOK: Duration = Duration::from_secs(2);
/// Bytes discarded at once.
const DISCARD: usize = 4096;
/// As in most distributions and container runtimes.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a command over its stream; ends when the command has ended. The place is the stream's.
pub(crate) async fn serve<R, W>(agent: &Agent, mut from: R, mut to: W, place: Place, request: ExecRequest)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let admitted = agent.attached.take().zip(agent.commands.take());
    let started = match &admitted {
        Some(_) => start(agent, &request).await,
        None => Err(fail(
            AgentErrorKind::Failed,
            "too many commands run in this guest; end some of them (those whose caller left still run)"
                .to_owned(),
        )),
    };
    let (child, (attached, _command)) = match (started, admitted) {
        (Ok(child), Some(places)) => (child, places),
        (Err(e), _) => {
            // The host may be gone, and is then not interested.
            ignore(frame::write_json(&mut to, FrameKind::Error, &e).await);
            ignore(to.shutdown().await);
            return;
        }
        (Ok(_), None) => return,
    };
    let Child { pid, stdin, mut output } = child;
    let stuck = AtomicBool::new(false);
    let input = async {
        // Ends at StdinEnd, at a broken frame or with the stream; each ends the command's stdin.
        if feed(&mut from, stdin, request.tty.is_some(), &stuck).await.is_ok() {
            // Frames that come later are of no use, but unread they would hide the end of the stream.
            let mut rest = Vec::new();
            while let Ok(Some(_)) = frame::read(&mut from, &mut rest).await {}
        }
    };
    let served = async {
        frame::write_json(&mut to, FrameKind::Started, &Started { pid: pid.cast_unsigned() }).await?;
        let exit = output.relay(&mut to, &stuck).await?;
        frame::write_json(&mut to, FrameKind::Exit, &exit).await
    };
    let gone = tokio::select! {
        () = input => true,
        outcome = served => outcome.is_err(),
    };
    if !gone {
        // Fails if the host left just now.
        ignore(to.shutdown().await);
        return;
    }
    drop((from, to, place, attached));
    output.discard().await;
}

struct Child {
    pid: i32,
    stdin: Option<Stdin>,
    output: Output,
}

/// What a command writes, and its end. Its futures may be dropped and others be made.
struct Output {
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    exit: oneshot::Receiver<ExecExit>,
    ended: Option<ExecExit>,
}

struct Stdin {
    to: pipe::Sender,
    /// Our end of the terminal, for the end-of-file character.
    tty: Option<Arc<OwnedFd>>,
}

/// Moves input to the command's stdin; `stuck` says whether the command does not take it.
async fn feed<R>(from: &mut R, mut stdin: Option<Stdin>, tty: bool, stuck: &AtomicBool) -> io::Result<()>
where
    R: AsyncRead + Unpin,
{
    let mut payload = Vec::new();
    let mut line_open = false;
    while let Some(kind) = frame::read(from, &mut payload).await? {
        match kind {
            FrameKind::Stdin => {
                if let Some(s) = &mut stdin {
                    line_open = payload.last().map_or(line_open, |b| *b != b'\n');
                    // The command closed its stdin: what still comes is dropped, so that the host's writer
                    // does not hang.
                    stuck.store(true, Ordering::Relaxed);
                    if s.to.write_all(&payload).await.is_err() {
                        stdin = None;
                    }
                    stuck.store(false, Ordering::Relaxed);
                }
            }
            FrameKind::StdinEnd => break,
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} frame"))),
        }
    }
    if tty && let Some(s) = &mut stdin {
        // The terminal may refuse; the host is there all the same.
        ignore(s.end_of_file(line_open).await);
    }
    Ok(())
}

impl Stdin {
    /// A terminal has no end; in line mode its end-of-file character is one. It ends the line first if one
    /// was begun.
    async fn end_of_file(&mut self, line_open: bool) -> io::Result<()> {
        use rustix::termios::{LocalModes, SpecialCodeIndex, tcgetattr};
        let Some(tty) = &self.tty else { return Ok(()) };
        let settings = tcgetattr(tty)?;
        if settings.local_modes.contains(LocalModes::ICANON) {
            let eof = settings.special_codes[SpecialCodeIndex::VEOF];
            let twice = [eof; 2];
            self.to.write_all(if line_open { &twice } else { &twice[..1] }).await?;
        }
        Ok(())
    }
}

impl Output {
    /// Sends output until the end of the command as this module defines it; fails once the host is gone.
    async fn relay<W>(&mut self, to: &mut W, stuck: &AtomicBool) -> io::Result<ExecExit>
    where
        W: AsyncWrite + Unpin,
    {
        let mut out = vec![0; FRAME_HEAD + OUTPUT_CHUNK];
        let mut err = if self.stderr.is_some() { vec![0; FRAME_HEAD + OUTPUT_CHUNK] } else { Vec::new() };
        loop {
            match self.next(&mut out[FRAME_HEAD..], err.get_mut(FRAME_HEAD..).unwrap_or_default()).await {
                Next::Stdout(n) => {
                    frame::write_in_place(to, FrameKind::Stdout, &mut out[..FRAME_HEAD + n]).await?;
                }
                Next::Stderr(n) => {
                    frame::write_in_place(to, FrameKind::Stderr, &mut err[..FRAME_HEAD + n]).await?;
                }
                // A write of nothing fails if the stream was reset.
                Next::Quiet if stuck.load(Ordering::Relaxed) => drop(to.write(&[]).await?),
                Next::Quiet => {}
                Next::End(exit) => return Ok(exit),
            }
        }
    }

    /// Reads output until the end.
    async fn discard(&mut self) {
        let (mut out, mut err) = (vec![0; DISCARD], vec![0; DISCARD]);
        while !matches!(self.next(&mut out, &mut err).await, Next::End(_)) {}
    }

    async fn next(&mut self, out: &mut [u8], err: &mut [u8]) -> Next {
        loop {
            if let (None, None, Some(exit)) = (&self.stdout, &self.stderr, self.ended) {
                return Next::End(exit);
            }
            let quiet = if self.ended.is_some() { QUIET } else { LOOK };
            tokio::select! {
                n = read(&mut self.stdout, out), if self.stdout.is_some() => match n {
                    0 => self.stdout = None,
                    n => return Next::Stdout(n),
                },
                n = read(&mut self.stderr, err), if self.stderr.is_some() => match n {
                    0 => self.stderr = None,
                    n => return Next::Stderr(n),
                },
                // The reaper never drops the sender unsent; if it did, the status would be unknown.
                e = &mut self.exit, if self.ended.is_none() => {
                    self.ended = Some(e.unwrap_or(ExecExit { code: None, signal: None }));
                }
                () = tokio::time::sleep(quiet) => {
                    if self.ended.is_none() {
                        return Next::Quiet;
                    }
                    (self.stdout, self.stderr) = (None, None);
                }
            }
        }
    }
}

/// What a command did.
enum Next {
    /// It wrote as many bytes.
    Stdout(usize),
    /// Likewise.
    Stderr(usize),
    /// Nothing for [`LOOK`].
    Quiet,
    /// It ended, and so did its output.
    End(ExecExit),
}

/// Reads; 0 is the end, which a terminal shows as EIO.
async fn read(from: &mut Option<pipe::Receiver>, buffer: &mut [u8]) -> usize {
    match from {
        Some(from) => from.read(buffer).await.unwrap_or(0),
        None => 0,
    }
}

async fn start(agent: &Agent, request: &ExecRequest) -> Result<Child, AgentError> {
    if agent.reaper.running(&request.id).is_some() {
        return Err(fail(
            AgentErrorKind::Invalid,
            format!("a command with id {:?} runs already", request.id),
        ));
    }
    let plan = plan(agent, request)?;
    let broken =
        |e: io::Error| fail(AgentErrorKind::Failed, format!("cannot start {:?}: {e}", request.argv[0]));
    // `theirs` closes at the end of the inner block: the command must hold the only other ends.
    let (forked, exit, stdin, stdout, stderr) = match request.tty {
        Some(size) => {
            let (ours, theirs) = spawn::open_terminal().map_err(broken)?;
            set_size(&ours, size).map_err(broken)?;
            own_terminal(&theirs, plan.ids.as_ref());
            rustix::io::ioctl_fionbio(&ours, true).map_err(|e| broken(e.into()))?;
            let (reader, writer) = (ours.try_clone().map_err(broken)?, ours.try_clone().map_err(broken)?);
            let reader = pipe::Receiver::from_owned_fd_unchecked(reader).map_err(broken)?;
            let writer = pipe::Sender::from_owned_fd_unchecked(writer).map_err(broken)?;
            let tty = Arc::new(ours);
            let forked = spawn::fork(&plan, [theirs.as_fd(); 3]).map_err(broken)?;
            let running = Running { pid: forked.pid, tty: Some(Arc::clone(&tty)) };
            let exit = agent.reaper.register(&request.id, running);
            (forked, exit, Some(Stdin { to: writer, tty: Some(tty) }), reader, None)
        }
        None => {
            let (stdin, theirs_in) = if request.stdin {
                let (theirs, ours) = pipe().map_err(broken)?;
                (Some(pipe::Sender::from_owned_fd(ours).map_err(broken)?), theirs)
            } else {
                (None, spawn::null().map_err(broken)?)
            };
            let (out, theirs_out) = pipe().map_err(broken)?;
            let (err, theirs_err) = pipe().map_err(broken)?;
            let out = pipe::Receiver::from_owned_fd(out).map_err(broken)?;
            let err = pipe::Receiver::from_owned_fd(err).map_err(broken)?;
            let stdio = [theirs_in.as_fd(), theirs_out.as_fd(), theirs_err.as_fd()];
            let forked = spawn::fork(&plan, stdio).map_err(broken)?;
            let exit = agent.reaper.register(&request.id, Running { pid: forked.pid, tty: None });
            (forked, exit, stdin.map(|to| Stdin { to, tty: None }), out, Some(err))
        }
    };
    let mut report = pipe::Receiver::from_owned_fd(forked.report).map_err(broken)?;
    let mut bytes = [0; spawn::REPORT];
    match report.read_exact(&mut bytes).await {
        // Closed by a successful exec.
        Err(_) => {
            let output = Output { stdout: Some(stdout), stderr, exit, ended: None };
            Ok(Child { pid: forked.pid, stdin, output })
        }
        Ok(_) => {
            let (stage, error) = spawn::parse_report(bytes);
            Err(explain(request, &plan, stage, &error))
        }
    }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Sets a terminal's size.
pub(crate) fn set_size(tty: &OwnedFd, size: TtySize) -> io::Result<()> {
    let size = rustix::termios::Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(tty, size)?)
}

/// Lets the user open its terminal by name. Works without it: the descriptors are open.
fn own_terminal(tty: &OwnedFd, ids: Option<&Ids>) {
    use rustix::fs::{Gid, Mode, Uid, fchmod, fchown};
    if let Some(ids) = ids {
        ignore(fchown(tty, Some(Uid::from_raw(ids.uid)), Some(Gid::from_raw(ids.gid))));
        ignore(fchmod(tty, Mode::from_raw_mode(0o620)));
    }
}

fn plan(agent: &Agent, request: &ExecRequest) -> Result<Plan, AgentError> {
    let program = request
        .argv
        .first()
        .filter(|p| !p.is_empty())
        .ok_or_else(|| fail(AgentErrorKind::Invalid, "no program named".to_owned()))?;
    let ids = users::resolve(&request.user)?;
    let env = environment(agent, request, &ids);
    let path = env.iter().find(|(k, _)| k == "PATH").map_or(DEFAULT_PATH, |(_, v)| v.as_str());
    let candidates = spawn::candidates(program, path);
    let mut strings = Vec::with_capacity(env.len());
    for (key, value) in &env {
        if key.is_empty() || key.contains('=') {
            return Err(fail(AgentErrorKind::Invalid, format!("{key:?} is not a name for a variable")));
        }
        strings.push(format!("{key}={value}"));
    }
    // Without root's rights (only in tests) every command runs as the agent does.
    let unchanged = !rustix::process::geteuid().is_root() && request.user.is_empty();
    let optional = request.workdir.is_empty();
    Ok(Plan {
        argv: c_strings("argument", &request.argv)?,
        env: c_strings("variable", &strings)?,
        candidates: c_strings("program", &candidates)?,
        workdir: c_string("working directory", if optional { &ids.home } else { &request.workdir })?,
        workdir_optional: optional,
        ids: (!unchanged).then_some(ids),
        tty: request.tty.is_some(),
        dies_with_agent: !agent.is_init,
    })
}

/// Defaults as `docker exec` has them, then the guest's, then the request's; the last of a name counts.
fn environment(agent: &Agent, request: &ExecRequest, ids: &Ids) -> Vec<(String, String)> {
    let mut env = vec![("PATH".to_owned(), DEFAULT_PATH.to_owned()), ("HOME".to_owned(), ids.home.clone())];
    if let Some(name) = &ids.name {
        env.push(("USER".to_owned(), name.clone()));
    }
    if request.tty.is_some() {
        env.push(("TERM".to_owned(), "xterm".to_owned()));
    }
    for (key, value) in agent.env().into_iter().chain(request.env.iter().cloned()) {
        match env.iter_mut().find(|(k, _)| *k == key) {
            Some(entry) => entry.1 = value,
            None => env.push((key, value)),
        }
    }
    env
}

fn c_string(what: &str, s: &str) -> Result<CString, AgentError> {
    CString::new(s).map_err(|_| fail(AgentErrorKind::Invalid, format!("zero byte in {what} {s:?}")))
}

fn c_strings(what: &str, list: &[String]) -> Result<Vec<CString>, AgentError> {
    list.iter().map(|s| c_string(what, s)).collect()
}

/// The failed step of the child in words.
fn explain(request: &ExecRequest, plan: &Plan, stage: Stage, error: &io::Error) -> AgentError {
    use AgentErrorKind::{Failed, Invalid, NotExecutable, NotFound};
    let program = request.argv.first().map_or("", String::as_str);
    let raw = error.raw_os_error().unwrap_or(0);
    match stage {
        Stage::Setup => fail(Failed, format!("cannot prepare the process for {program:?}: {error}")),
        Stage::User => fail(Failed, format!("cannot become user {:?}: {error}", request.user)),
        Stage::Workdir => {
            let kind = match raw {
                libc::ENOENT | libc::ENOTDIR => NotFound,
                libc::EACCES => NotExecutable,
                _ => Failed,
            };
            fail(kind, format!("cannot enter the working directory {:?}: {error}", request.workdir))
        }
        Stage::Exec => match raw {
            libc::ENOENT if program.contains('/') && plan.exists(program) => {
                fail(NotFound, format!("{program:?} is there, but the interpreter or loader it names is not"))
            }
            libc::ENOENT if program.contains('/') => {
                fail(NotFound, format!("no program {program:?} in the guest"))
            }
            libc::ENOENT => fail(NotFound, format!("no program {program:?} in the guest's PATH")),
            libc::E2BIG => fail(Invalid, format!("arguments and environment of {program:?} are too long")),
            _ => fail(NotExecutable, format!("cannot run {program:?}: {error}")),
        },
    }
}

impl Plan {
    fn exists(&self, program: &str) -> bool {
        let dir = self.workdir.to_string_lossy();
        std::fs::symlink_metadata(std::path::Path::new(dir.as_ref()).join(program)).is_ok()
    }
}
