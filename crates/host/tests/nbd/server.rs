//! A server in its transmission phase over a socket pair, as good or as bad as a test wants it.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

const REQUEST: usize = 28;
const REPLY_MAGIC: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;

/// What it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Manner {
    /// Answers.
    Good,
    /// Takes requests and never answers.
    Mute,
    /// Takes nothing more from its socket, as one that was stopped.
    Stopped,
}

/// A server with a disk in memory.
pub(crate) struct TestServer {
    manner: Arc<AtomicU8>,
    /// Shut to end it.
    stream: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    /// A server, and the end for the kernel.
    pub(crate) fn new(size: u64, manner: Manner) -> (Self, UnixStream) {
        let disk = Arc::new(Mutex::new(vec![0; usize::try_from(size).expect("size")]));
        let (ours, theirs) = UnixStream::pair().expect("socket pair");
        let manner = Arc::new(AtomicU8::new(manner as u8));
        let (stream, told) = (ours.try_clone().expect("clone"), manner.clone());
        let thread = std::thread::spawn(move || {
            // A socket that ends is how every one of them ends.
            drop(serve(ours, &disk, &told));
        });
        (Self { manner, stream, thread: Some(thread) }, theirs)
    }

    pub(crate) fn be(&self, manner: Manner) {
        self.manner.store(manner as u8, Ordering::SeqCst);
    }

    /// As its process would end: the socket closes.
    pub(crate) fn die(&self) {
        self.stream.shutdown(Shutdown::Both).expect("shut the server's end");
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        drop(self.stream.shutdown(Shutdown::Both));
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn serve(mut stream: UnixStream, disk: &Mutex<Vec<u8>>, manner: &AtomicU8) -> std::io::Result<()> {
    let is = |what: Manner| manner.load(Ordering::SeqCst) == what as u8;
    loop {
        let mut head = [0; REQUEST];
        stream.read_exact(&mut head)?;
        let number = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let kind = u16::from_be_bytes([head[6], head[7]]);
        let (cookie, at) = (number(8), number(16) as usize);
        let len = u32::from_be_bytes(head[24..28].try_into().expect("four bytes")) as usize;
        if kind == DISCONNECT {
            return Ok(());
        }
        if is(Manner::Stopped) {
            // Until its end is shut, without a byte more taken.
            while stream.take_error()?.is_none() && !hung_up(&stream) {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            return Ok(());
        }
        if kind == WRITE {
            let mut data = vec![0; len];
            stream.read_exact(&mut data)?;
            disk.lock().expect("disk")[at..at + len].copy_from_slice(&data);
        }
        if is(Manner::Mute) {
            continue;
        }
        let mut reply = REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend(0_u32.to_be_bytes());
        reply.extend(cookie.to_be_bytes());
        if kind == READ {
            reply.extend(&disk.lock().expect("disk")[at..at + len]);
        }
        stream.write_all(&reply)?;
    }
}

/// Whether the connection is over, whatever lies unread in it.
fn hung_up(stream: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec::default())).expect("poll");
    fds[0].revents().contains(PollFlags::HUP)
}
