//! How fast slots may be removed. The kernel removes what is due together under its lock for network links, about
//! 1 ms a slot, and works for it on one core; a creation that needs either waits. So while anybody creates a small batch
//! goes from time to time, and batches grow when nobody did for a while. All sizes and times are fixed: a throttle that
//! followed measured latency collapsed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::host::Pace;

/// While somebody creates or may begin at any moment.
const SMALL: usize = 16;
const MIDDLE: usize = 256;
const LARGE: usize = 512;
/// After a creation the next one is likely.
const BUSY: Duration = Duration::from_millis(500);
/// Without a creation for this long batches grow, and after three times as long again.
const CALM: Duration = Duration::from_millis(500);
/// From one batch to the next while somebody creates: the kernel is done with the former for most of it. The release
/// never stands still.
const YIELD: Duration = Duration::from_millis(400);
/// Until the question is asked again.
const SOON: Duration = Duration::from_millis(5);

/// Who wants slots, and since when nobody does.
#[derive(Debug, Default)]
pub(crate) struct Demand(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    creating: usize,
    /// From when on creations are possible.
    possible: Option<Instant>,
    /// End of the last one.
    last: Option<Instant>,
    /// When a batch was last let go.
    batch: Option<Instant>,
}

/// A creation under way.
#[derive(Debug)]
pub(crate) struct Creating<'a>(&'a Demand);

impl Demand {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creations are possible from now on.
    pub(crate) fn begin(&self) {
        self.state().possible = Some(Instant::now());
    }

    /// Notes a creation until the value is dropped.
    pub(crate) fn creating(&self) -> Creating<'_> {
        self.state().creating += 1;
        Creating(self)
    }

    /// How many slots may be removed now.
    pub(crate) fn pace(&self) -> Pace {
        let mut state = self.state();
        let now = Instant::now();
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let last = if state.creating > 0 { Some(Duration::ZERO) } else { since(state.last) };
        let pace = pace(since(state.possible), last, since(state.batch));
        if matches!(pace, Pace::Batch(_)) {
            state.batch = Some(now);
        }
        pace
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.creating = state.creating.saturating_sub(1);
        state.last = Some(Instant::now());
    }
}

/// The rule, by the time since creations are possible, since the last one (zero while one is under way), and since
/// the last batch; `None` if there was none.
fn pace(possible: Option<Duration>, last: Option<Duration>, batch: Option<Duration>) -> Pace {
    if last.is_some_and(|t| t < BUSY) {
        return if batch.is_some_and(|t| t < YIELD) { Pace::Wait(SOON) } else { Pace::Batch(SMALL) };
    }
    match possible.map(|p| last.map_or(p, |l| l.min(p))) {
        Some(calm) if calm < CALM => Pace::Batch(SMALL),
        Some(calm) if calm < 3 * CALM => Pace::Batch(MIDDLE),
        _ => Pace::Batch(LARGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Option<Duration> = Some(Duration::ZERO);

    fn after(seconds: f64) -> Option<Duration> {
        Some(Duration::from_secs_f64(seconds))
    }

    #[test]
    fn batches_grow_when_nobody_creates() {
        for (since, batch) in [(0.0, SMALL), (0.4, SMALL), (0.5, MIDDLE), (1.4, MIDDLE), (1.5, LARGE)] {
            assert_eq!(pace(after(since), None, NOW), Pace::Batch(batch), "{since} s after ready");
            let later = after(since + BUSY.as_secs_f64());
            assert!(matches!(pace(after(99.0), later, NOW), Pace::Batch(n) if n >= batch), "{since}");
        }
        assert_eq!(pace(after(99.0), after(0.6), NOW), Pace::Batch(MIDDLE));
        assert_eq!(pace(after(99.0), after(99.0), NOW), Pace::Batch(LARGE));
        // Nobody can yet.
        assert_eq!(pace(None, None, NOW), Pace::Batch(LARGE));
    }

    #[test]
    fn while_somebody_creates_a_small_batch_goes_from_time_to_time() {
        let demand = Demand::default();
        demand.begin();
        let one = demand.creating();
        let two = demand.creating();
        assert_eq!(demand.pace(), Pace::Batch(SMALL));
        assert_eq!(demand.pace(), Pace::Wait(SOON));
        drop(one);
        drop(two);
        assert_eq!(demand.pace(), Pace::Wait(SOON), "the next one is likely");
        assert_eq!(pace(after(9.0), NOW, Some(YIELD)), Pace::Batch(SMALL));
    }
}
