//! What is counted of a remote disk. Counters only.

use std::sync::atomic::{AtomicU64, Ordering};

use hearth_core::block::RemoteStats;

/// The counters of one disk.
#[derive(Debug, Default)]
pub(super) struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    fetches: AtomicU64,
    fetched_bytes: AtomicU64,
    retries: AtomicU64,
    damaged: AtomicU64,
    evicted: AtomicU64,
    uncached: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Counters {
    pub(super) fn hit(&self) {
        add(&self.hits, 1);
    }

    pub(super) fn missed(&self) {
        add(&self.misses, 1);
    }

    pub(super) fn fetched(&self, bytes: u64) {
        add(&self.fetches, 1);
        add(&self.fetched_bytes, bytes);
    }

    pub(super) fn retried(&self) {
        add(&self.retries, 1);
    }

    pub(super) fn damaged(&self) {
        add(&self.damaged, 1);
    }

    pub(super) fn evicted(&self, chunks: u64) {
        add(&self.evicted, chunks);
    }

    pub(super) fn uncached(&self) {
        add(&self.uncached, 1);
    }

    pub(super) fn stats(&self) -> RemoteStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RemoteStats {
            hits: read(&self.hits),
            misses: read(&self.misses),
            fetches: read(&self.fetches),
            fetched_bytes: read(&self.fetched_bytes),
            retries: read(&self.retries),
            damaged: read(&self.damaged),
            evicted: read(&self.evicted),
            uncached: read(&self.uncached),
        }
    }
}
