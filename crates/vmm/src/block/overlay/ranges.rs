//! Ranges of blocks that one writer at a time may change. Readers do not ask. Who comes first is served first among those
//! that overlap; others are not held up.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The lock. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Ranges(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    next: u64,
    held: Vec<Entry>,
    waiting: VecDeque<(Entry, oneshot::Sender<()>)>,
}

#[derive(Clone)]
struct Entry {
    id: u64,
    blocks: Range<u64>,
}

/// A locked range, or a place in the queue for it; dropping it gives it up.
pub(super) struct Locked {
    ranges: Ranges,
    id: u64,
}

impl Ranges {
    /// Waits for a range. Dropped while it waits, it leaves the queue.
    pub(super) async fn lock(&self, blocks: Range<u64>) -> Locked {
        let (locked, granted) = {
            let mut inner = self.inner();
            inner.next += 1;
            let entry = Entry { id: inner.next, blocks };
            let locked = Locked { ranges: self.clone(), id: entry.id };
            if inner.is_free(&entry.blocks, inner.waiting.len()) {
                inner.held.push(entry);
                return locked;
            }
            let (tx, rx) = oneshot::channel();
            inner.waiting.push_back((entry, tx));
            (locked, rx)
        };
        // The sender stays in the queue until it is used: only our own drop takes it out.
        drop(granted.await);
        locked
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Whether nobody has blocks of it, nor do the first `ahead` of the queue want some.
    fn is_free(&self, blocks: &Range<u64>, ahead: usize) -> bool {
        let apart = |other: &Range<u64>| other.end <= blocks.start || blocks.end <= other.start;
        self.held.iter().all(|e| apart(&e.blocks))
            && self.waiting.iter().take(ahead).all(|(e, _)| apart(&e.blocks))
    }

    fn grant(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            if !self.is_free(&self.waiting[at].0.blocks, at) {
                at += 1;
            } else if let Some((entry, tx)) = self.waiting.remove(at) {
                self.held.push(entry);
                // If it has just been dropped, its drop waits for our lock, and takes the entry out of `held`.
                tx.send(()).ok();
            }
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let mut inner = self.ranges.inner();
        inner.held.retain(|e| e.id != self.id);
        inner.waiting.retain(|(e, _)| e.id != self.id);
        inner.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[tokio::test]
    async fn those_that_overlap_wait_in_order_and_others_do_not() {
        let ranges = Ranges::default();
        let first = ranges.lock(0..10).await;
        let mut second = Box::pin(ranges.lock(5..15));
        let mut third = Box::pin(ranges.lock(12..20));
        assert!(futures::poll!(&mut second).is_pending());
        assert!(futures::poll!(&mut third).is_pending(), "it must not overtake");
        let apart = ranges.lock(20..30).now_or_never().expect("nobody wants these");
        drop(first);
        let second = second.now_or_never().expect("free now");
        assert!(futures::poll!(&mut third).is_pending());
        drop((second, apart));
        assert!(third.now_or_never().is_some());
        assert!(ranges.inner().held.is_empty());
    }

    #[tokio::test]
    async fn who_gives_up_holds_up_nobody() {
        let ranges = Ranges::default();
        let first = ranges.lock(0..10).await;
        let mut second = Box::pin(ranges.lock(5..15));
        let mut third = Box::pin(ranges.lock(12..20));
        assert!(futures::poll!(&mut second).is_pending() && futures::poll!(&mut third).is_pending());
        drop(second);
        let third = third.now_or_never().expect("only the one that left was in its way");
        // Granted, and dropped before it was looked at.
        let mut fourth = Box::pin(ranges.lock(0..5));
        assert!(futures::poll!(&mut fourth).is_pending());
        drop(first);
        drop(fourth);
        drop(third);
        assert!(ranges.inner().held.is_empty() && ranges.inner().waiting.is_empty());
    }
}
