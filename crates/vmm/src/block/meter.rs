//! What is counted of a disk. Counters only: nothing here waits or decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_core::block::{DiskStats, LATENCY_BUCKETS_MICROS, OperationStats};
use tokio::time::Instant;

use super::backend::BlockError;

/// Kinds of requests that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    Zeroes,
}

/// The counters of one disk.
#[derive(Debug, Default)]
pub(super) struct Meter {
    in_flight: AtomicU64,
    limited: AtomicU64,
    limited_micros: AtomicU64,
    operations: [Counters; 5],
}

#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    cancelled: AtomicU64,
    micros: AtomicU64,
    buckets: [AtomicU64; LATENCY_BUCKETS_MICROS.len() + 1],
}

/// A request at work. Dropped before its end it counts as cancelled.
#[derive(Debug)]
pub(super) struct Request {
    meter: Arc<Meter>,
    operation: Operation,
    begun: Instant,
    ended: bool,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Meter {
    pub(super) fn begin(self: &Arc<Self>, operation: Operation) -> Request {
        add(&self.in_flight, 1);
        Request { meter: self.clone(), operation, begun: Instant::now(), ended: false }
    }

    pub(super) fn stats(&self, disk: &str) -> DiskStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let of = |operation: Operation| {
            let counters = &self.operations[operation as usize];
            OperationStats {
                requests: read(&counters.requests),
                bytes: read(&counters.bytes),
                errors: read(&counters.errors),
                cancelled: read(&counters.cancelled),
                micros: read(&counters.micros),
                buckets: counters.buckets.iter().map(read).collect(),
            }
        };
        DiskStats {
            disk: disk.to_owned(),
            in_flight: read(&self.in_flight),
            limited: read(&self.limited),
            limited_micros: read(&self.limited_micros),
            read: of(Operation::Read),
            write: of(Operation::Write),
            flush: of(Operation::Flush),
            discard: of(Operation::Discard),
            zeroes: of(Operation::Zeroes),
            remote: None,
        }
    }
}

impl Request {
    /// It waited for the rate limit, which is no time of the disk's.
    pub(super) fn waited(&mut self, time: Duration) {
        if !time.is_zero() {
            add(&self.meter.limited, 1);
            add(&self.meter.limited_micros, micros(time));
        }
        self.begun = Instant::now();
    }

    pub(super) fn end<T>(mut self, bytes: u64, outcome: &Result<T, BlockError>) {
        // Given up is what the drop counts.
        if matches!(outcome, Err(BlockError::Stopped)) {
            return;
        }
        self.ended = true;
        let counters = &self.meter.operations[self.operation as usize];
        let took = micros(self.begun.elapsed());
        add(&counters.requests, 1);
        add(&counters.micros, took);
        add(&counters.buckets[LATENCY_BUCKETS_MICROS.partition_point(|bound| *bound < took)], 1);
        match outcome {
            Ok(_) => add(&counters.bytes, bytes),
            Err(_) => add(&counters.errors, 1),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.meter.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.ended {
            add(&self.meter.operations[self.operation as usize].cancelled, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_request_is_counted_once_in_the_bucket_of_its_time() {
        let meter = Arc::new(Meter::default());
        let mut slow = meter.begin(Operation::Write);
        let fast = meter.begin(Operation::Write);
        assert_eq!(meter.stats("d").in_flight, 2);
        fast.end(4096, &Ok(()));
        tokio::time::sleep(Duration::from_millis(70)).await;
        slow.waited(Duration::from_millis(70));
        tokio::time::sleep(Duration::from_millis(1)).await;
        slow.end(10, &Err::<(), _>(BlockError::Deadline));
        drop(meter.begin(Operation::Read));
        meter.begin(Operation::Read).end(1, &Err::<(), _>(BlockError::Stopped));
        let stats = meter.stats("d");
        let write = &stats.write;
        assert_eq!((write.requests, write.bytes, write.errors, write.cancelled), (2, 4096, 1, 0));
        let bucket = |bound| LATENCY_BUCKETS_MICROS.iter().position(|b| *b == bound).unwrap();
        assert_eq!(
            (write.buckets[0], write.buckets[bucket(1000)], write.buckets.iter().sum::<u64>()),
            (1, 1, 2)
        );
        assert_eq!((stats.limited, stats.limited_micros), (1, 70_000));
        assert_eq!((stats.read.cancelled, stats.read.requests, stats.in_flight), (2, 0, 0));
    }
}
