//! Numbers from samples. Durations become milliseconds or seconds here and nowhere else.

use std::time::Duration;

/// Milliseconds.
pub(crate) fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1000.0
}

/// The smallest sample that at least `percent` of the samples do not exceed (nearest rank); `None` of none.
pub(crate) fn percentile(samples: &[Duration], percent: u32) -> Option<Duration> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent as usize).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// How often an answer went from not ready to ready, and back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flips {
    /// 503 (or anything else) → 200.
    pub(crate) to_ready: u32,
    /// 200 → 503 (or anything else).
    pub(crate) back: u32,
}

/// Counts the changes in a sequence of HTTP status codes. A first answer of 200 is a change too: before it there was
/// no daemon.
pub(crate) fn flips(codes: impl IntoIterator<Item = u16>) -> Flips {
    let mut flips = Flips::default();
    let mut ready = false;
    for code in codes {
        let now = code == 200;
        flips.to_ready += u32::from(now && !ready);
        flips.back += u32::from(ready && !now);
        ready = now;
    }
    flips
}

/// How often a count that may only rise fell.
pub(crate) fn falls(counts: impl IntoIterator<Item = u64>) -> u32 {
    let mut last = 0;
    let mut falls = 0;
    for count in counts {
        falls += u32::from(count < last);
        last = count;
    }
    falls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(list: &[u64]) -> Vec<Duration> {
        list.iter().map(|n| Duration::from_millis(*n)).collect()
    }

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let fifty: Vec<u64> = (1..=50).rev().collect();
        let fifty = millis(&fifty);
        assert_eq!(percentile(&fifty, 50), Some(Duration::from_millis(25)));
        assert_eq!(percentile(&fifty, 99), Some(Duration::from_millis(50)));
        assert_eq!(percentile(&fifty, 100), Some(Duration::from_millis(50)));
        assert_eq!(percentile(&millis(&[7]), 1), Some(Duration::from_millis(7)));
        assert_eq!(percentile(&millis(&[3, 1, 2]), 50), Some(Duration::from_millis(2)));
        assert_eq!(percentile(&[], 50), None);
    }

    #[test]
    fn flips_are_counted_both_ways() {
        assert_eq!(flips([]), Flips::default());
        assert_eq!(flips([503, 503, 200, 200]), Flips { to_ready: 1, back: 0 });
        assert_eq!(flips([200, 200]), Flips { to_ready: 1, back: 0 });
        assert_eq!(flips([503, 200, 503, 503, 200]), Flips { to_ready: 2, back: 1 });
        assert_eq!(flips([503, 503]), Flips::default());
    }

    #[test]
    fn a_count_that_falls_is_seen() {
        assert_eq!(falls([0, 1, 1, 5]), 0);
        assert_eq!(falls([0, 5, 4, 6, 5]), 2);
    }
}
