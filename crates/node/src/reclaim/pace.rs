//! How fast slots may be removed. The kernel removes what is due together under its lock for network links, about
//! 1 ms a slot, and works for it on one core; a creation that needs either waits. So while anybody creates a small batch
//! goes from time to time, and batches grow when nobody did for a while. All sizes and times are fixed: a throttle that
//! followed measured latency collapsed.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::host::Pace;

/// Between creations, and while there are some.
const SMALL: usize = 32;
const MIDDLE: usize = 128;
const LARGE: usize = 512;
/// Without a creation for this long batches grow, and after three times as long again.
const CALM: Duration = Duration::from_secs(1);
/// From one batch to the next while creations are under way, so that the release never stands still.
const YIELD: Duration = Duration::from_millis(250);
/// Until the question is asked again.
const SOON: Duration = Duration::from_millis(5);

/// Who wants slots, and since when nobody does.
#[derive(Debug, Default)]
pub(crate) struct Demand(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    creating: usize,
    /// End of the last creation, or the moment from which they are possible.
    last: Option<Instant>,
    /// When a batch was last let go.
    batch: Option<Instant>,
}

/// A creation under way.
#[derive(Debug)]
pub(crate) struct Creating<'a>(&'a Demand);

impl Demand {
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        state.last = Some(Instant::now());
    }

    /// Creations are possible from now on.
    pub(crate) fn begin(&self) {
        self.change(|_| ());
    }

    /// Notes a creation until the value is dropped.
    pub(crate) fn creating(&self) -> Creating<'_> {
        self.change(|state| state.creating += 1);
        Creating(self)
    }

    /// How many slots may be removed now.
    pub(crate) fn pace(&self) -> Pace {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let pace = pace(state.creating > 0, since(state.last), since(state.batch));
        if matches!(pace, Pace::Batch(_)) {
            state.batch = Some(now);
        }
        pace
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.creating = state.creating.saturating_sub(1));
    }
}

/// The rule. `calm` is the time since somebody could or did create, `None` if nobody can yet; `batch` the time since
/// the last batch.
fn pace(creating: bool, calm: Option<Duration>, batch: Option<Duration>) -> Pace {
    match calm {
        _ if creating && batch.is_some_and(|t| t < YIELD) => Pace::Wait(SOON),
        _ if creating => Pace::Batch(SMALL),
        Some(calm) if calm < CALM => Pace::Batch(SMALL),
        Some(calm) if calm < 3 * CALM => Pace::Batch(MIDDLE),
        _ => Pace::Batch(LARGE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_when_nobody_creates() {
        let after = |s| pace(false, Some(Duration::from_secs_f64(s)), Some(Duration::ZERO));
        assert_eq!([0.0, 0.9].map(after), [Pace::Batch(SMALL); 2]);
        assert_eq!([1.0, 2.9].map(after), [Pace::Batch(MIDDLE); 2]);
        assert_eq!([3.0, 99.0].map(after), [Pace::Batch(LARGE); 2]);
        assert_eq!(pace(false, None, None), Pace::Batch(LARGE));
    }

    #[test]
    fn while_somebody_creates_a_small_batch_goes_from_time_to_time() {
        let demand = Demand::default();
        let one = demand.creating();
        let two = demand.creating();
        assert_eq!(demand.pace(), Pace::Batch(SMALL));
        assert_eq!(demand.pace(), Pace::Wait(SOON));
        drop(one);
        assert_eq!(demand.pace(), Pace::Wait(SOON));
        assert_eq!(pace(true, Some(Duration::ZERO), Some(YIELD)), Pace::Batch(SMALL));
        drop(two);
        // The last one ended just now.
        assert_eq!(demand.pace(), Pace::Batch(SMALL));
    }
}
