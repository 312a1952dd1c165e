//! The hard end of a sandbox by the wall clock. The shim enforces it whether or not a daemon runs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The wall clock may be stepped while we sleep on the monotonic one: look again at least this often.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// When a sandbox must end, if ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndTime(Option<u64>);

impl EndTime {
    /// From [`ShimSpec::ends_at_ms`](hearth_core::shim::ShimSpec::ends_at_ms).
    #[must_use]
    pub fn at_ms(ends_at_ms: Option<u64>) -> Self {
        Self(ends_at_ms)
    }

    /// Time left at this moment of the wall clock; `None` if there is no end.
    #[must_use]
    pub fn left(self, now_ms: u64) -> Option<Duration> {
        self.0.map(|end| Duration::from_millis(end.saturating_sub(now_ms)))
    }

    /// How long to sleep before the next look; `None` when the end has come.
    fn nap(self, now_ms: u64) -> Option<Duration> {
        match self.left(now_ms) {
            Some(left) if left.is_zero() => None,
            Some(left) => Some(left.min(LOOK_AGAIN)),
            None => Some(LOOK_AGAIN),
        }
    }

    /// Returns when the end has come; never without one. May be dropped and called again.
    pub async fn reached(self) {
        if self.0.is_none() {
            return std::future::pending().await;
        }
        while let Some(nap) = self.nap(now_ms()) {
            tokio::time::sleep(nap).await;
        }
    }
}

/// Milliseconds since the Unix epoch; 0 for a clock before it.
#[must_use]
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_looked_at_again_so_that_a_clock_step_counts() {
        let end = EndTime::at_ms(Some(100_000));
        assert_eq!(end.nap(99_999), Some(Duration::from_millis(1)));
        assert_eq!(end.nap(0), Some(LOOK_AGAIN));
        assert_eq!(end.nap(100_000), None);
        assert_eq!(end.nap(u64::MAX), None, "a step far ahead is the end too");
        assert_eq!(EndTime::at_ms(None).left(7), None);
    }

    #[tokio::test]
    async fn a_past_end_is_reached_at_once_and_none_never() {
        EndTime::at_ms(Some(1)).reached().await;
        let never = EndTime::at_ms(None).reached();
        assert!(tokio::time::timeout(Duration::from_millis(20), never).await.is_err());
    }
}
