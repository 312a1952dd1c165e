//! A range as it comes from the store: whoever needs only a part of it has that before the rest is here.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use tokio::sync::watch;

/// What has come so far, from the range's begin.
#[derive(Debug)]
pub(super) struct Arrival {
    data: Mutex<BytesMut>,
    /// Bytes in `data`. It changes only under the lock of that.
    come: watch::Sender<usize>,
    /// Whether what comes may be used before all of it is here.
    early: bool,
}

impl Arrival {
    pub(super) fn new(early: bool) -> Self {
        Self { data: Mutex::default(), come: watch::Sender::new(0), early }
    }

    fn data(&self) -> MutexGuard<'_, BytesMut> {
        // Each change is whole.
        self.data.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what an earlier try brought.
    pub(super) fn restart(&self) {
        let mut data = self.data();
        data.clear();
        self.come.send_replace(0);
    }

    /// Adds a piece of a range of `of` bytes, and says how many have come.
    pub(super) fn push(&self, piece: &[u8], of: usize) -> usize {
        let mut data = self.data();
        if data.is_empty() {
            data.reserve(of);
        }
        data.extend_from_slice(piece);
        if self.early {
            self.come.send_replace(data.len());
        }
        data.len()
    }

    /// All that has come; nothing is left.
    pub(super) fn take(&self) -> Bytes {
        let mut data = self.data();
        self.come.send_replace(0);
        std::mem::take(&mut *data).freeze()
    }

    /// Waits until a part is here, for ever if it does not come.
    pub(super) async fn part(&self, at: usize, len: usize) -> Bytes {
        let mut come = self.come.subscribe();
        loop {
            // What it returns has a lock, which is let go before the next is taken.
            drop(come.wait_for(|come| *come >= at + len).await);
            // Another try may have begun since.
            if let Some(part) = self.data().get(at..at + len) {
                return Bytes::copy_from_slice(part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_is_there_before_the_rest_and_only_where_it_may() {
        let arrival = Arrival::new(true);
        let mut part = Box::pin(arrival.part(2, 3));
        assert!(futures::poll!(&mut part).is_pending());
        assert_eq!(arrival.push(b"abcd", 8), 4);
        assert!(futures::poll!(&mut part).is_pending());
        // The try fails, and the next one brings more.
        arrival.restart();
        assert!(futures::poll!(&mut part).is_pending());
        assert_eq!(arrival.push(b"abcdef", 8), 6);
        assert_eq!(part.await, "cde");
        assert_eq!(arrival.take(), "abcdef");
        assert!(futures::poll!(Box::pin(arrival.part(0, 1))).is_pending());

        let late = Arrival::new(false);
        late.push(b"abcd", 4);
        assert!(futures::poll!(Box::pin(late.part(0, 1))).is_pending());
        assert_eq!(late.take(), "abcd");
    }
}
