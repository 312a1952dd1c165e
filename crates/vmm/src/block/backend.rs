//! What a disk can do, and the terms of every call: [`Limit`]. No I/O here.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use hearth_core::block::RemoteStats;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// What a call of a [`Backend`] gives.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, BlockError>>;

/// Something that must stay as it is while the kernel may still work on a request, after the request was given up
/// too: a locked range, say. Whoever runs the system call keeps a clone until it has returned.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// The terms of a call: until when, and what ends it before.
#[derive(Clone)]
pub struct Limit {
    /// Ends the call with [`BlockError::Stopped`].
    pub stop: CancellationToken,
    /// Ends the call with [`BlockError::Deadline`].
    pub deadline: Instant,
    hold: Option<Hold>,
}

impl Limit {
    /// Until `deadline` or `stop`, whichever comes first.
    #[must_use]
    pub fn new(stop: CancellationToken, deadline: Instant) -> Self {
        Self { stop, deadline, hold: None }
    }

    /// For that long from now, with nothing else that stops it.
    #[must_use]
    pub fn within(time: Duration) -> Self {
        Self::new(CancellationToken::new(), Instant::now() + time)
    }

    /// The same terms; `more` is held besides what is held already.
    #[must_use]
    pub fn holding(&self, more: Hold) -> Self {
        let hold: Hold = match &self.hold {
            Some(held) => Arc::new((held.clone(), more)),
            None => more,
        };
        Self { hold: Some(hold), ..self.clone() }
    }

    /// The same terms, but until `deadline` at the latest.
    #[must_use]
    pub fn no_later_than(&self, deadline: Instant) -> Self {
        Self { deadline: self.deadline.min(deadline), ..self.clone() }
    }

    /// What a system call on behalf of this call must keep until it has returned.
    #[must_use]
    pub fn hold(&self) -> Option<Hold> {
        self.hold.clone()
    }

    /// Waits for `work` under these terms; past them it is dropped.
    ///
    /// # Errors
    /// [`BlockError::Stopped`], [`BlockError::Deadline`].
    pub async fn bound<T>(&self, work: impl Future<Output = T>) -> Result<T, BlockError> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = self.stop.cancelled() => Err(BlockError::Stopped),
            () = tokio::time::sleep_until(self.deadline) => Err(BlockError::Deadline),
        }
    }

    /// Like [`Limit::bound`] for work that may fail by itself.
    ///
    /// # Errors
    /// Those of the work besides.
    pub async fn run<T>(&self, work: impl Future<Output = Result<T, BlockError>>) -> Result<T, BlockError> {
        self.bound(work).await?
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// How zeroes may be made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Zeroes {
    /// The range must stay, or become, allocated.
    pub keep_allocated: bool,
    /// Fail with [`BlockError::NotFast`] rather than write zeroes out.
    pub fast: bool,
}

/// What a range is, for BLOCK_STATUS and copies that leave holes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Bytes that must be read.
    Data,
    /// Takes no room and reads as zeroes.
    Hole,
}

/// A range of one kind, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Never 0.
    pub len: u64,
    /// What it is.
    pub kind: ExtentKind,
}

/// Appends an extent; one more of the same kind makes the last longer.
pub(crate) fn push_extent(extents: &mut Vec<Extent>, len: u64, kind: ExtentKind) {
    match extents.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.kind == kind => last.len += len,
        _ => extents.push(Extent { len, kind }),
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The disk is being stopped.
    #[error("the disk is being stopped")]
    Stopped,
    /// No answer in time.
    #[error("no answer within the deadline")]
    Deadline,
    /// Outside the disk.
    #[error("{len} bytes at {at} are not within the disk of {size} bytes")]
    Range {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Of the disk.
        size: u64,
    },
    /// The disk cannot be written.
    #[error("the disk is read-only")]
    ReadOnly,
    /// Zeroes would have to be written out.
    #[error("zeroes cannot be made without writing them")]
    NotFast,
    /// The kernel's answer.
    #[error("{doing} {file}: {source}")]
    Io {
        /// The verb.
        doing: &'static str,
        /// The file.
        file: Arc<str>,
        /// The cause.
        source: io::Error,
    },
    /// An earlier sync failed, so what was written before may be lost, and a later sync would not tell.
    #[error("an earlier sync of {file} failed: what was written since the one before may be lost")]
    Lost {
        /// The file.
        file: Arc<str>,
    },
}

/// A disk. Reads and writes may overlap and end in any order; a flush covers the writes that had ended when it began.
///
/// Of each call: it ends by `limit`, or is dropped; either cancels it. What the kernel already has goes on to its end,
/// with the buffer and [`Limit::hold`] kept until then.
pub trait Backend: Send + Sync + 'static {
    /// Bytes; never changes.
    fn size(&self) -> u64;

    /// Whether everything but reads fails.
    fn read_only(&self) -> bool;

    /// Appends `len` bytes from `at` to `buf`, which has the room, and gives it back.
    fn read_at<'a>(&'a self, at: u64, len: usize, buf: BytesMut, limit: &'a Limit) -> Answer<'a, BytesMut>;

    /// Writes; durable only after a flush.
    fn write_at<'a>(&'a self, at: u64, data: Bytes, limit: &'a Limit) -> Answer<'a, ()>;

    /// Makes all writes, discards and zeroes durable that had ended when it began.
    fn flush<'a>(&'a self, limit: &'a Limit) -> Answer<'a, ()>;

    /// The content is no longer needed: a hint, and what is read afterwards is undefined unless the backend says more.
    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()>;

    /// Makes a range read as zeroes.
    fn write_zeroes<'a>(&'a self, at: u64, len: u64, how: Zeroes, limit: &'a Limit) -> Answer<'a, ()>;

    /// What there is in a range, in order and without gaps; it may end early, after `most` extents, but not before one.
    fn extents<'a>(&'a self, at: u64, len: u64, most: usize, limit: &'a Limit) -> Answer<'a, Vec<Extent>>;

    /// Waits up to `within` for all that the kernel still works on, and says how many requests it did not give back: they
    /// keep what they hold, for good, rather than have it freed under them. Calls after it fail.
    fn close(&self, within: Duration) -> BoxFuture<'_, usize>;

    /// What was counted of the object of a store that it is or lies above.
    fn remote_stats(&self) -> Option<RemoteStats> {
        None
    }
}

/// Checks that a range lies within a disk.
///
/// # Errors
/// [`BlockError::Range`].
pub(crate) fn check_range(at: u64, len: u64, size: u64) -> Result<(), BlockError> {
    match at.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(BlockError::Range { at, len, size }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stop_and_deadline_end_a_wait_and_what_is_done_wins() {
        let limit = Limit::within(Duration::from_millis(1));
        assert!(matches!(limit.bound(std::future::pending::<()>()).await, Err(BlockError::Deadline)));
        let limit = Limit::within(Duration::from_secs(600));
        limit.stop.cancel();
        assert!(matches!(limit.bound(std::future::pending::<()>()).await, Err(BlockError::Stopped)));
        assert_eq!(limit.bound(async { 5 }).await.unwrap(), 5);
    }

    #[test]
    fn what_is_held_twice_is_let_go_with_the_last() {
        let (a, b): (Arc<u8>, Arc<u8>) = (Arc::new(1), Arc::new(2));
        let limit = Limit::within(Duration::ZERO).holding(a.clone()).holding(b.clone());
        let hold = limit.hold();
        drop(limit);
        assert_eq!((Arc::strong_count(&a), Arc::strong_count(&b)), (2, 2));
        drop(hold);
        assert_eq!((Arc::strong_count(&a), Arc::strong_count(&b)), (1, 1));
    }

    #[test]
    fn a_range_that_wraps_round_is_outside() {
        assert!(check_range(u64::MAX, 2, 10).is_err() && check_range(8, 3, 10).is_err());
        assert!(check_range(8, 2, 10).is_ok() && check_range(10, 0, 10).is_ok());
    }
}
