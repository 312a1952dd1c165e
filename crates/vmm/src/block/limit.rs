//! How fast the disks of a sandbox may be: a token bucket for bytes and one for requests. A request that comes too early is
//! told when it may begin, in the order in which they came; whoever waits can stop.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hearth_core::block::DiskRate;
use tokio::time::Instant;

/// The limit of all disks of one sandbox.
#[derive(Debug)]
pub struct RateLimiter {
    buckets: Mutex<Buckets>,
}

#[derive(Debug)]
struct Buckets {
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

/// What was let through is kept as the time at which it would all be paid for. It may lie as far ahead as the burst is long.
#[derive(Debug)]
struct Bucket {
    /// Units a second; never 0.
    rate: u64,
    burst: Duration,
    paid: Instant,
}

impl Bucket {
    fn new(rate: u64, burst: Duration) -> Option<Self> {
        (rate > 0).then(|| Self { rate, burst, paid: Instant::now() })
    }

    /// When a request of this cost may begin. One that is larger than the burst begins as well, and the next ones pay for it.
    fn reserve(&mut self, now: Instant, cost: u64) -> Instant {
        let paid = self.paid.max(now);
        let nanos = u128::from(cost) * 1_000_000_000 / u128::from(self.rate);
        self.paid = paid + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        paid.checked_sub(self.burst).map_or(now, |begin| begin.max(now))
    }
}

impl RateLimiter {
    /// `None` if nothing is limited.
    #[must_use]
    pub fn new(rate: DiskRate) -> Option<Self> {
        let burst = Duration::from_millis(rate.burst());
        let bytes = Bucket::new(rate.mib_per_second.saturating_mul(1 << 20), burst);
        let requests = Bucket::new(rate.iops, burst);
        let limits = bytes.is_some() || requests.is_some();
        limits.then(|| Self { buckets: Mutex::new(Buckets { bytes, requests }) })
    }

    /// Waits until a request of so many bytes may begin, and says how long that was. Dropped, the wait ends, and what it was to
    /// wait for counts as done.
    pub async fn wait(&self, bytes: u64) -> Duration {
        let now = Instant::now();
        let begin = {
            // Each number in it is whole at any time.
            let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            let by_bytes = buckets.bytes.as_mut().map_or(now, |b| b.reserve(now, bytes));
            let by_requests = buckets.requests.as_mut().map_or(now, |b| b.reserve(now, 1));
            by_bytes.max(by_requests)
        };
        if begin > now {
            tokio::time::sleep_until(begin).await;
        }
        begin - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::join_all;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn limiter(mib_per_second: u64, iops: u64, burst_ms: u64) -> RateLimiter {
        RateLimiter::new(DiskRate { mib_per_second, iops, burst_ms }).unwrap()
    }

    #[test]
    fn no_limit_is_no_limiter() {
        assert!(RateLimiter::new(DiskRate { burst_ms: 5, ..DiskRate::default() }).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_beyond_the_burst_take_their_time() {
        let limiter = limiter(4, 0, 500);
        let begun = Instant::now();
        // 2 MiB may come at once; the request that ends the burst is let through whole.
        for _ in 0..3 {
            assert_eq!(limiter.wait(MIB).await, Duration::ZERO);
        }
        for _ in 0..13 {
            limiter.wait(MIB).await;
        }
        // 15 MiB came before the last began, 2 of them were free.
        assert_eq!(begun.elapsed().as_millis(), 13 * 250);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_used_is_saved_up_to_the_burst_and_no_further() {
        let limiter = limiter(0, 100, 100);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let begun = Instant::now();
        join_all((0..111).map(|_| limiter.wait(0))).await;
        assert_eq!(begun.elapsed().as_millis(), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn the_tighter_of_both_counts_and_a_wait_can_be_dropped() {
        let limiter = limiter(1, 1000, 1);
        limiter.wait(10 * MIB).await;
        let given_up = tokio::time::timeout(Duration::from_secs(1), limiter.wait(1));
        assert!(given_up.await.is_err());
    }

    proptest! {
        #[test]
        fn never_more_than_the_rate_and_the_burst_allow(
            mib in 1u64..50, burst_ms in 1u64..3000,
            requests in prop::collection::vec((0u64..2_000, 0u64..4 * MIB), 1..60),
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            runtime.block_on(async {
                let limiter = limiter(mib, 0, burst_ms);
                let begun = Instant::now();
                let (mut let_through, mut last) = (0u64, 0);
                for (pause_ms, bytes) in requests {
                    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                    limiter.wait(bytes).await;
                    let allowed = mib as f64 * MIB as f64
                        * (begun.elapsed().as_secs_f64() + burst_ms as f64 / 1e3 + 0.002);
                    // The last one before may have begun with little of it paid for.
                    prop_assert!((let_through - last) as f64 <= allowed, "{let_through} of {allowed}");
                    let_through += bytes;
                    last = bytes;
                }
                Ok(())
            })?;
        }
    }
}
