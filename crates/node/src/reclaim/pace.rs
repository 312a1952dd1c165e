//! How fast slots may be removed. The kernel removes a batch of namespaces under its lock for network links, about
//! 1 ms a slot; a creation that needs the lock waits for the batch. So batches are small while anybody creates, and
//! grow when nobody did for a while. The sizes are fixed: a throttle that followed measured latency collapsed.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// While sandboxes are being created, or were just now.
const SMALL: usize = 32;
const MIDDLE: usize = 128;
const LARGE: usize = 512;
/// Without a creation for this long batches grow, and after twice as long again.
const CALM: Duration = Duration::from_secs(1);

/// Who wants slots, and since when nobody does.
#[derive(Debug, Default)]
pub(crate) struct Demand(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    creating: usize,
    /// End of the last creation, or the moment from which they are possible.
    last: Option<Instant>,
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

    /// How many slots may be removed at once.
    pub(crate) fn batch(&self) -> usize {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.creating > 0 { SMALL } else { batch_after(state.last.map(|at| at.elapsed())) }
    }
}

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.creating = state.creating.saturating_sub(1));
    }
}

/// The batch when nobody creates: `None` if nobody can yet.
fn batch_after(calm: Option<Duration>) -> usize {
    match calm {
        Some(calm) if calm < CALM => SMALL,
        Some(calm) if calm < 3 * CALM => MIDDLE,
        _ => LARGE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_small_while_somebody_creates_and_grow_afterwards() {
        let demand = Demand::default();
        assert_eq!(demand.batch(), LARGE);
        let one = demand.creating();
        let two = demand.creating();
        assert_eq!(demand.batch(), SMALL);
        drop(one);
        assert_eq!(demand.batch(), SMALL);
        drop(two);
        let seconds = |s| batch_after(Some(Duration::from_secs_f64(s)));
        assert_eq!(
            [0.0, 0.9, 1.0, 2.9, 3.0, 99.0].map(seconds),
            [SMALL, SMALL, MIDDLE, MIDDLE, LARGE, LARGE]
        );
    }
}
