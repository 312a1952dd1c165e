//! The byte stream of one VM, buffered so that a yamux frame's head and body become one write (on
//! virtio-serial each write is an exit of the VM), and watched so that the driver knows when it is blocked.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, BufReader, BufWriter, ReadBuf};

/// One write of the guest's virtio-serial driver at most; a yamux frame is made to fit it.
pub(super) const CHUNK: usize = 32 * 1024;

/// The buffered transport.
pub(super) type Transport<S> = BufReader<BufWriter<Watched<S>>>;

/// Whether the last write to the transport could not go on.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocked(Arc<AtomicBool>);

impl Blocked {
    pub(super) fn get(&self) -> bool {
        // Written and read by the driver's task only; an atomic because the task may move between threads.
        self.0.load(Ordering::Relaxed)
    }
}

/// Wraps a stream.
pub(super) fn wrap<S: AsyncRead + AsyncWrite + Unpin>(stream: S) -> (Transport<S>, Blocked) {
    let blocked = Blocked::default();
    let watched = Watched { stream, blocked: blocked.clone() };
    (BufReader::with_capacity(2 * CHUNK, BufWriter::with_capacity(CHUNK, watched)), blocked)
}

/// A stream that notes whether writing is blocked.
#[derive(Debug)]
pub(super) struct Watched<S> {
    stream: S,
    blocked: Blocked,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.blocked.0.store(done.is_pending(), Ordering::Relaxed);
        done
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
