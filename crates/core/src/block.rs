//! The disks of a sandbox as its shim serves them: what it is told, how fast they may be, and what it counts.
//! [docs/block.md](../../../docs/block.md) has the whole.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// File name of the writable disk's base in a sandbox's state directory.
pub const BASE_FILE: &str = "disk.base";
/// File name of what the guest wrote above it.
pub const OVERLAY_FILE: &str = "disk.overlay";

/// What the shim is told about the disks it serves; without it the VMM opens the files itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSpec {
    /// Image below the writable disk. It is never written, and other sandboxes may share it.
    pub base: PathBuf,
    /// The root disk, where it is an object of a store and no file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<RemoteRootfs>,
    /// How fast all disks together may be.
    #[serde(default)]
    pub rate: DiskRate,
    /// Faults on purpose, as in `test.failpoints`; only places that begin with `block.`.
    #[serde(default)]
    pub failpoints: String,
    /// The writable disk is to be `/dev/nbd<index>`, for a VMM that takes files and block devices only. Of the other disks
    /// it opens the files itself.
    #[serde(default)]
    pub nbd: Option<u32>,
}

/// A disk that is an object of a store: which, and in which version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteDisk {
    /// Where it is. It has no credentials in it: those come from the environment.
    pub url: String,
    /// Size.
    pub bytes: u64,
    /// The store's mark of the version (etag), or when it was changed last.
    pub mark: String,
}

/// A root disk that is an object of a store, and the node's cache of such objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRootfs {
    /// The object.
    pub disk: RemoteDisk,
    /// Directory of the cache, which all sandboxes share.
    pub cache: PathBuf,
    /// Size of the cache, MiB.
    pub cache_mib: u64,
}

/// How fast the disks of one sandbox may be, all of them together. 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRate {
    /// Bytes read and written, MiB per second.
    #[serde(default)]
    pub mib_per_second: u64,
    /// Requests per second.
    #[serde(default)]
    pub iops: u64,
    /// After a pause, what this much time would have allowed may come at once, milliseconds; 0: 1,000.
    #[serde(default)]
    pub burst_ms: u64,
}

impl DiskRate {
    /// Most MiB per second that can be asked for: more is no limit on any disk.
    pub const MIB_PER_SECOND: std::ops::RangeInclusive<u64> = 0..=1024 * 1024;
    /// Most requests per second that can be asked for.
    pub const IOPS: std::ops::RangeInclusive<u64> = 0..=100_000_000;
    /// Longest time that may be saved up, milliseconds.
    pub const BURST_MS: std::ops::RangeInclusive<u64> = 0..=60_000;
    /// What may be saved up if nothing is said, milliseconds.
    pub const DEFAULT_BURST_MS: u64 = 1000;

    /// Each value that is 0 is taken from `other`.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let or = |mine, theirs| if mine == 0 { theirs } else { mine };
        Self {
            mib_per_second: or(self.mib_per_second, other.mib_per_second),
            iops: or(self.iops, other.iops),
            burst_ms: or(self.burst_ms, other.burst_ms),
        }
    }

    /// What may be saved up, milliseconds.
    #[must_use]
    pub fn burst(&self) -> u64 {
        if self.burst_ms == 0 { Self::DEFAULT_BURST_MS } else { self.burst_ms }
    }
}

/// Upper bounds of the latency buckets, microseconds; one more bucket has all that took longer.
pub const LATENCY_BUCKETS_MICROS: [u64; 15] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    10_000_000,
];

/// What was counted of one kind of request to one disk, since its shim started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStats {
    /// Requests that were answered, with an error too.
    pub requests: u64,
    /// Bytes of those that went well.
    pub bytes: u64,
    /// Those answered with an error that is none of the next.
    pub errors: u64,
    /// Those that were given up: by the end of the VM, or because nobody waited for them any more.
    pub cancelled: u64,
    /// Time from request to answer, all together, microseconds. Waits for the rate limit are not in it.
    pub micros: u64,
    /// Requests by that time, as in [`LATENCY_BUCKETS_MICROS`]; each is in one bucket only.
    pub buckets: Vec<u64>,
}

/// What was counted of a disk that is an object of a store, since its shim started. A chunk is part of such an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoteStats {
    /// Reads of chunks that were there: in the node's cache, or still in memory.
    pub hits: u64,
    /// Reads that had to wait for a chunk, whoever fetched it.
    pub misses: u64,
    /// Chunks that were fetched for this disk.
    pub fetches: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Tries that failed and were made again.
    pub retries: u64,
    /// Chunks of the cache that were not what was written, and were fetched again.
    pub damaged: u64,
    /// Chunks that were removed from the cache to make room for this disk's.
    pub evicted: u64,
    /// Chunks that were fetched and could not be kept: no room, or a cache that does not work.
    pub uncached: u64,
}

/// What was counted of one disk, since its shim started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStats {
    /// `rootfs` or `overlay`.
    pub disk: String,
    /// Requests at work now.
    pub in_flight: u64,
    /// Requests that had to wait for the rate limit.
    pub limited: u64,
    /// How long they waited for it, all together, microseconds.
    pub limited_micros: u64,
    /// Reads.
    pub read: OperationStats,
    /// Writes.
    pub write: OperationStats,
    /// Flushes.
    pub flush: OperationStats,
    /// Discards.
    pub discard: OperationStats,
    /// Zeroes.
    pub zeroes: OperationStats,
    /// Of the object below it, where that is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteStats>,
}

impl DiskStats {
    /// Each kind of request with its word.
    pub fn operations(&self) -> [(&'static str, &OperationStats); 5] {
        [
            ("read", &self.read),
            ("write", &self.write),
            ("flush", &self.flush),
            ("discard", &self.discard),
            ("zeroes", &self.zeroes),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_is_taken_from_the_node() {
        let node = DiskRate { mib_per_second: 100, iops: 2000, burst_ms: 0 };
        let own = DiskRate { mib_per_second: 4, ..DiskRate::default() };
        let both = own.or(node);
        assert_eq!(both, DiskRate { mib_per_second: 4, iops: 2000, burst_ms: 0 });
        assert_eq!(both.burst(), 1000);
        assert_eq!(serde_json::from_str::<DiskRate>("{}").unwrap(), DiskRate::default());
    }
}
