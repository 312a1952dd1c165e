//! Our own stdin, stdout and stderr as byte streams. Each side has a thread of its own: a read or write that
//! blocks for ever (an open pipe nobody writes, a stopped reader) must hold up neither the command nor the
//! end of the process, so these threads are never joined; they end with the process.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use hearth_api::v1::ExecInput;
use hearth_api::v1::StdinEnd;
use hearth_api::v1::exec_input::Input;
use tokio::sync::{mpsc, oneshot};

const READ: usize = 64 * 1024;
/// Chunks between the network and a slow reader.
const QUEUE: usize = 8;

/// Reads stdin to its end into `to`. A failed read is an end: a background process may not read its
/// terminal, for one.
pub(super) fn forward_stdin(to: mpsc::Sender<ExecInput>) -> std::io::Result<()> {
    // Past Rust's own buffer, which would split every read at 8 KiB.
    let mut stdin = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let read = move || {
        let mut buf = vec![0; READ];
        loop {
            let input = match stdin.read(&mut buf) {
                Ok(0) => Input::StdinEnd(StdinEnd {}),
                Ok(n) => Input::Stdin(buf[..n].to_vec()),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Err(_) => Input::StdinEnd(StdinEnd {}),
            };
            let end = matches!(input, Input::StdinEnd(_));
            if to.blocking_send(ExecInput { input: Some(input) }).is_err() || end {
                return;
            }
        }
    };
    std::thread::Builder::new().name("stdin".into()).spawn(read)?;
    Ok(())
}

/// Where a chunk of output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    Stdout,
    Stderr,
}

/// One chunk of output.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) to: Target,
    pub(super) data: Vec<u8>,
}

/// A thread that writes chunks in order.
#[derive(Debug)]
pub(super) struct Writer {
    /// Full while the reader is slow; that holds the command up in turn.
    pub(super) chunks: mpsc::Sender<Chunk>,
    /// Resolves when all is written after `chunks` was dropped, or at the first error.
    pub(super) done: oneshot::Receiver<std::io::Result<()>>,
}

impl Writer {
    /// Starts it.
    pub(super) fn start() -> std::io::Result<Self> {
        let stdout = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
        let stderr = File::from(std::io::stderr().as_fd().try_clone_to_owned()?);
        let (chunks, mut rx) = mpsc::channel::<Chunk>(QUEUE);
        let (ended, done) = oneshot::channel();
        let write = move || {
            let mut result = Ok(());
            while let Some(chunk) = rx.blocking_recv() {
                let mut file = match chunk.to {
                    Target::Stdout => &stdout,
                    Target::Stderr => &stderr,
                };
                result = write_all(&mut file, &chunk.data);
                if result.is_err() {
                    break;
                }
            }
            // If nobody waits any more, nobody needs to know.
            drop(ended.send(result));
        };
        std::thread::Builder::new().name("stdout".into()).spawn(write)?;
        Ok(Self { chunks, done })
    }
}

/// `write_all` that also takes a descriptor which somebody else has made non-blocking.
fn write_all(file: &mut impl Write, mut data: &[u8]) -> std::io::Result<()> {
    while !data.is_empty() {
        match file.write(data) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => data = &data[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Stdin whose reads end soon after the stop flag is set, whatever the other side of the pipe does.
pub(super) struct StoppableStdin {
    chunks: std::sync::mpsc::Receiver<std::io::Result<Vec<u8>>>,
    rest: Vec<u8>,
    at: usize,
    stop: Arc<AtomicBool>,
}

impl StoppableStdin {
    /// Starts reading.
    pub(super) fn start(stop: Arc<AtomicBool>) -> Self {
        let (to, chunks) = std::sync::mpsc::sync_channel(4);
        // Never joined: its read may block for ever. It ends with the process.
        std::thread::spawn(move || {
            let mut stdin = std::io::stdin().lock();
            loop {
                let mut buf = vec![0; 256 * 1024];
                let chunk = stdin.read(&mut buf).map(|n| {
                    buf.truncate(n);
                    buf
                });
                let last = !chunk.as_ref().is_ok_and(|c| !c.is_empty());
                if to.send(chunk).is_err() || last {
                    return;
                }
            }
        });
        Self { chunks, rest: Vec::new(), at: 0, stop }
    }
}

impl Read for StoppableStdin {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        while self.at == self.rest.len() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(std::io::Error::other("stopped"));
            }
            match self.chunks.recv_timeout(Duration::from_millis(100)) {
                Ok(chunk) => (self.rest, self.at) = (chunk?, 0),
                Err(RecvTimeoutError::Timeout) => continue,
                // The end was delivered before.
                Err(RecvTimeoutError::Disconnected) => return Ok(0),
            }
            if self.rest.is_empty() {
                return Ok(0);
            }
        }
        let n = buf.len().min(self.rest.len() - self.at);
        buf[..n].copy_from_slice(&self.rest[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}
