//! Chunks that a disk has at hand: a few opened ones of the cache, and fewer in memory where there is no cache to keep them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::chunk::CachedChunk;

/// Opened chunks, with their checksums.
const OPEN: usize = 64;
/// Chunks in memory.
const IN_MEMORY: usize = 4;
/// A chunk is opened anew after this time, which tells the cache that it is in use.
const FRESH: Duration = Duration::from_secs(60);

/// Where the bytes of a chunk are.
#[derive(Debug, Clone)]
pub(super) enum Source {
    Memory(Bytes),
    File(Arc<CachedChunk>),
}

/// Those that were used last.
#[derive(Debug, Default)]
pub(super) struct AtHand(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    chunks: HashMap<u64, (Source, u64)>,
    clock: u64,
}

impl AtHand {
    pub(super) fn get(&self, number: u64) -> Option<Source> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.clock += 1;
        let now = state.clock;
        let (source, used) = state.chunks.get_mut(&number)?;
        if let Source::File(chunk) = source
            && Instant::now() - chunk.opened > FRESH
        {
            state.chunks.remove(&number);
            return None;
        }
        *used = now;
        Some(source.clone())
    }

    pub(super) fn put(&self, number: u64, source: Source) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.clock += 1;
        let (now, memory) = (state.clock, matches!(source, Source::Memory(_)));
        state.chunks.insert(number, (source, now));
        let alike = |(source, _): &(Source, u64)| matches!(source, Source::Memory(_)) == memory;
        let count = state.chunks.values().filter(|chunk| alike(chunk)).count();
        if count > if memory { IN_MEMORY } else { OPEN } {
            let oldest =
                state.chunks.iter().filter(|(_, chunk)| alike(chunk)).min_by_key(|(_, (_, used))| *used);
            if let Some(number) = oldest.map(|(number, _)| *number) {
                state.chunks.remove(&number);
            }
        }
    }

    pub(super) fn forget(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).chunks.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_used_last_is_at_hand() {
        let at_hand = AtHand::default();
        for number in 0..10 {
            at_hand.put(number, Source::Memory(Bytes::new()));
            assert!(at_hand.get(0).is_some());
        }
        let there: Vec<u64> = (0..10).filter(|number| at_hand.get(*number).is_some()).collect();
        assert_eq!(there, [0, 7, 8, 9]);
        at_hand.forget(0);
        assert!(at_hand.get(0).is_none());
    }
}
