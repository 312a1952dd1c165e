//! The virtio-serial port of the host (qemu). The kernel gives such a port three habits that matter: while
//! the host's end is closed a read returns 0 at once and a write EAGAIN, poll then reports HUP for as long, and
//! only one process may hold it open.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hearth_core::agent::SERIAL_PORT;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::{dev, say, session};

/// Pause between two looks while something is expected any moment, and later.
const SOON: Duration = Duration::from_millis(5);
const LATER: Duration = Duration::from_millis(250);
/// How long "any moment" lasts.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves the port for ever, if there is one.
pub(crate) async fn serve(agent: &Arc<Agent>) {
    let start = Instant::now();
    let path = loop {
        match find() {
            Some(path) => break path,
            // Where the host uses vsock there is none; a port does not come later than this.
            None if start.elapsed() > PATIENCE => return,
            None => sleep(SOON).await,
        }
    };
    loop {
        if let Err(e) = serve_open(&path, agent).await {
            say!("port {}: {e}", path.display());
        }
        sleep(LATER).await;
    }
}

fn find() -> Option<PathBuf> {
    for entry in std::fs::read_dir("/sys/class/virtio-ports").ok()?.flatten() {
        let name = std::fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim_end() == SERIAL_PORT {
            let path = PathBuf::from("/dev").join(entry.file_name());
            if !path.exists() {
                // No devtmpfs: the node is ours to make.
                dev::make_nodes();
            }
            return Some(path);
        }
    }
    None
}

/// Keeps the port open and serves one host after the other.
async fn serve_open(path: &PathBuf, agent: &Arc<Agent>) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let mut fd: OwnedFd = rustix::fs::open(path, flags, Mode::empty())?;
    loop {
        host_connected(&fd).await?;
        // Registered anew for each host: a HUP once seen stays with the registration.
        let both = Interest::READABLE | Interest::WRITABLE;
        // SAFETY: an OwnedFd gives the same open descriptor each time.
        let mut port = Port { fd: unsafe { AsyncFd::register_with_interest(fd, both)? } };
        session::serve(&mut port, agent).await;
        fd = port.fd.into_inner();
    }
}

/// Waits until the host opened its end. There is no event to wait for that does not also fire now.
async fn host_connected(fd: &OwnedFd) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)];
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec::default()))?;
        if !fds[0].revents().contains(PollFlags::HUP) {
            return Ok(());
        }
        sleep(if start.elapsed() < PATIENCE { SOON } else { LATER / 5 }).await;
    }
}

/// The open port while one host is connected.
#[derive(Debug)]
struct Port {
    fd: AsyncFd<OwnedFd>,
}

impl AsyncRead for Port {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.fd.poll_read_ready(cx))?;
            match rustix::io::read(self.fd.get_ref(), buf.initialize_unfilled()) {
                // 0: the host closed.
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(rustix::io::Errno::INTR) => {}
                // A readiness of "closed" cannot be cleared: without this the loop would spin. The host may
                // be another one by now; the caller starts over.
                Err(rustix::io::Errno::AGAIN) if guard.ready().is_read_closed() => {
                    return Poll::Ready(Ok(()));
                }
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }
}

impl AsyncWrite for Port {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.fd.poll_write_ready(cx))?;
            match rustix::io::write(self.fd.get_ref(), buf) {
                Ok(n) => return Poll::Ready(Ok(n)),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) if guard.ready().is_write_closed() => {
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
