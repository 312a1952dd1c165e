//! A disk with something before and after each call of another: faults on purpose, and what tests want to see or break.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use hearth_core::block::RemoteStats;

use super::backend::{Answer, Backend, BlockError, Extent, Limit, Zeroes};

/// Which call of a [`Backend`] it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`Backend::read_at`].
    Read,
    /// [`Backend::write_at`].
    Write,
    /// [`Backend::flush`].
    Flush,
    /// [`Backend::discard`].
    Discard,
    /// [`Backend::write_zeroes`].
    Zeroes,
    /// [`Backend::extents`].
    Extents,
}

/// What is done around the calls. An error of it is the call's.
pub trait Around: Send + Sync + 'static {
    /// Before the disk is asked; on an error it is not. The value is given to `after` of the same call.
    fn before<'a>(&'a self, call: Call, limit: &'a Limit) -> Answer<'a, u64>;

    /// After the disk has done it.
    fn after<'a>(&'a self, _call: Call, _given: u64, _limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The disk.
pub struct Wrapped<A> {
    disk: Arc<dyn Backend>,
    around: A,
}

impl<A: Around> Wrapped<A> {
    /// All of `disk`, with `around` around each call.
    #[must_use]
    pub fn new(disk: Arc<dyn Backend>, around: A) -> Self {
        Self { disk, around }
    }

    async fn pass<T>(
        &self,
        call: Call,
        limit: &Limit,
        work: impl Future<Output = Result<T, BlockError>>,
    ) -> Result<T, BlockError> {
        let given = self.around.before(call, limit).await?;
        let done = work.await?;
        self.around.after(call, given, limit).await?;
        Ok(done)
    }
}

impl<A: Around> Backend for Wrapped<A> {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_only(&self) -> bool {
        self.disk.read_only()
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, buf: BytesMut, limit: &'a Limit) -> Answer<'a, BytesMut> {
        Box::pin(self.pass(Call::Read, limit, self.disk.read_at(at, len, buf, limit)))
    }

    fn write_at<'a>(&'a self, at: u64, data: Bytes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.pass(Call::Write, limit, self.disk.write_at(at, data, limit)))
    }

    fn flush<'a>(&'a self, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.pass(Call::Flush, limit, self.disk.flush(limit)))
    }

    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.pass(Call::Discard, limit, self.disk.discard(at, len, limit)))
    }

    fn write_zeroes<'a>(&'a self, at: u64, len: u64, how: Zeroes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.pass(Call::Zeroes, limit, self.disk.write_zeroes(at, len, how, limit)))
    }

    fn extents<'a>(&'a self, at: u64, len: u64, most: usize, limit: &'a Limit) -> Answer<'a, Vec<Extent>> {
        Box::pin(self.pass(Call::Extents, limit, self.disk.extents(at, len, most, limit)))
    }

    fn close(&self, within: Duration) -> BoxFuture<'_, usize> {
        self.disk.close(within)
    }

    fn remote_stats(&self) -> Option<RemoteStats> {
        self.disk.remote_stats()
    }
}
