//! How fast slots may be removed. The kernel removes what is due together under its lock for network links, about
//! 1 ms a slot, and works for it on one core; a creation that needs either waits. So while anybody creates a small batch
//! goes from time to time, and batches grow when nobody did for a while: each namespace that dies is looked for in all
//! that live on (`unhash_nsid`), so that thousands go fastest together. All sizes and times are fixed: a throttle that
//! followed measured latency collapsed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::host::Pace;

/// While somebody creates or may begin at any moment.
const SMALL: usize = 16;
const MIDDLE: usize = 512;
/// The first creation after a calm may wait for one of these: 2 to 4 s among 4,000 that live, much longer among 10,000.
const LARGE: usize = 2048;
/// After a creation the next one is likely.
const BUSY: Duration = Duration::from_millis(500);
/// From when on creations are possible until the first batch: the first creation meets a host at rest. Three times as
/// long without any, and batches grow again.
const CALM: Duration = Duration::from_millis(300);
/// From one batch to the next while somebody creates: the kernel is done with the former for most of it. The release
/// never stands still.
const YIELD: Duration = Duration::from_millis(400);
/// Small batches go at first where nobody can create yet.
const ALONE: Duration = Duration::from_millis(500);
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
    /// When the first batch was let go, and the last one.
    first: Option<Instant>,
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
        let pace = match since(state.possible) {
            None => alone(since(state.first)),
            Some(possible) => pace(possible, last, since(state.batch)),
        };
        if matches!(pace, Pace::Batch(_)) {
            state.first = state.first.or(Some(now));
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

/// The rule while nobody can create, by the time since the first batch. Small ones first: whoever waits for the end
/// sees that something happens.
fn alone(first: Option<Duration>) -> Pace {
    Pace::Batch(if first.is_none_or(|t| t < ALONE) { SMALL } else { LARGE })
}

/// The rule once creations are possible, by the time since then, since the last one (zero while one is under way), and
/// since the last batch; `None` if there was none.
fn pace(possible: Duration, last: Option<Duration>, batch: Option<Duration>) -> Pace {
    if last.is_some_and(|t| t < BUSY) {
        return if batch.unwrap_or(possible) < YIELD { Pace::Wait(SOON) } else { Pace::Batch(SMALL) };
    }
    match last.map_or(possible, |l| l.min(possible)) {
        calm if calm < CALM => Pace::Wait(SOON),
        calm if calm < 3 * CALM => Pace::Batch(MIDDLE),
        _ => Pace::Batch(LARGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn after(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn batches_grow_when_nobody_creates() {
        let cases = [(0.0, None), (0.2, None), (0.3, Some(MIDDLE)), (0.8, Some(MIDDLE)), (0.9, Some(LARGE))];
        for (since, batch) in cases {
            let expected = batch.map_or(Pace::Wait(SOON), Pace::Batch);
            assert_eq!(pace(after(since), None, Some(NOW)), expected, "{since} s after ready");
        }
        assert_eq!(pace(after(99.0), Some(after(0.6)), Some(NOW)), Pace::Batch(MIDDLE));
        assert_eq!(pace(after(99.0), Some(after(99.0)), Some(NOW)), Pace::Batch(LARGE));
        // Nobody can yet.
        for (since, batch) in [(None, SMALL), (Some(0.4), SMALL), (Some(0.5), LARGE)] {
            assert_eq!(alone(since.map(after)), Pace::Batch(batch));
        }
    }

    #[test]
    fn while_somebody_creates_a_small_batch_goes_from_time_to_time() {
        let demand = Demand::default();
        assert_eq!(demand.pace(), Pace::Batch(SMALL));
        demand.begin();
        let one = demand.creating();
        let two = demand.creating();
        assert_eq!(demand.pace(), Pace::Wait(SOON));
        drop(one);
        drop(two);
        assert_eq!(demand.pace(), Pace::Wait(SOON), "the next one is likely");
        assert_eq!(pace(after(9.0), Some(NOW), Some(YIELD)), Pace::Batch(SMALL));
        assert_eq!(pace(after(9.0), Some(NOW), None), Pace::Batch(SMALL));
        assert_eq!(pace(NOW, Some(NOW), None), Pace::Wait(SOON), "just ready");
    }
}
