//! How fast slots may be removed. The kernel removes what is due together under its lock for network links, about
//! 1 ms a slot, and works for it on one core; a creation that needs either waits. So while anybody creates a few
//! go from time to time, and many when nobody did for a while: each namespace that dies is looked for in all
//! that live on (`unhash_nsid`), so that thousands go fastest together. Among 10,000 the longest of 50 creations took 200 ms
//! while sixteen went at once and 100 ms while four did: a few are fewer there. Sizes and times follow from that number
//! alone: a throttle that followed measured latency collapsed.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::host::Pace;

/// On their way while somebody creates or may begin at any moment, at most.
const FEW: usize = 16;
/// Looks at others by those that go at once: ten go among 4,000, four among 10,000.
const LOOKS: usize = 40_000;
/// On their way else. The first creation after a calm waits for what is.
const MANY: usize = 4096;
/// After a creation the next one is likely.
const BUSY: Duration = Duration::from_millis(500);
/// From when on creations are possible until the first slot goes: the first creation meets a host at rest.
const CALM: Duration = Duration::from_millis(300);
/// From a few to the next few while somebody creates: the kernel is done with the former for most of it. The release
/// never stands still.
const YIELD: Duration = Duration::from_millis(400);
/// A few go at first where nobody can create yet: whoever waits for the end sees that something happens.
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
    /// When slots were let go first, and last.
    first: Option<Instant>,
    let_go: Option<Instant>,
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

    /// How many slots may be removed now, if so many are there.
    pub(crate) fn pace(&self, there: usize) -> Pace {
        let mut state = self.state();
        let now = Instant::now();
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let last = if state.creating > 0 { Some(Duration::ZERO) } else { since(state.last) };
        let pace = match since(state.possible) {
            None => alone(few(there), since(state.first)),
            Some(possible) => pace(few(there), possible, last, since(state.let_go)),
        };
        if matches!(pace, Pace::AtMost(_)) {
            state.first = state.first.or(Some(now));
            state.let_go = Some(now);
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

/// How many a few are where so many are there.
fn few(there: usize) -> usize {
    (LOOKS / there.max(1)).clamp(1, FEW)
}

/// The rule while nobody can create, by the time since the first went.
fn alone(few: usize, first: Option<Duration>) -> Pace {
    Pace::AtMost(if first.is_none_or(|t| t < ALONE) { few } else { MANY })
}

/// The rule once creations are possible, by the time since then, since the last one (zero while one is under way), and
/// since slots were let go; `None` if there was none.
fn pace(few: usize, possible: Duration, last: Option<Duration>, let_go: Option<Duration>) -> Pace {
    if last.is_some_and(|t| t < BUSY) {
        return if let_go.unwrap_or(possible) < YIELD { Pace::Wait(SOON) } else { Pace::AtMost(few) };
    }
    if possible < CALM { Pace::Wait(SOON) } else { Pace::AtMost(MANY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn after(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn many_go_when_nobody_creates() {
        for (since, expected) in [(0.0, Pace::Wait(SOON)), (0.2, Pace::Wait(SOON)), (0.3, Pace::AtMost(MANY))]
        {
            assert_eq!(pace(FEW, after(since), None, Some(NOW)), expected, "{since} s after ready");
        }
        assert_eq!(pace(FEW, after(99.0), Some(after(0.6)), Some(NOW)), Pace::AtMost(MANY));
        // Nobody can yet.
        for (since, most) in [(None, FEW), (Some(0.4), FEW), (Some(0.5), MANY)] {
            assert_eq!(alone(FEW, since.map(after)), Pace::AtMost(most));
        }
    }

    #[test]
    fn the_more_there_are_the_fewer_go_at_once() {
        for (there, expected) in [(0, 16), (2_500, 16), (4_000, 10), (10_000, 4), (30_000, 1), (100_000, 1)] {
            assert_eq!(few(there), expected, "{there}");
        }
        assert_eq!(Demand::default().pace(10_000), Pace::AtMost(4));
    }

    #[test]
    fn while_somebody_creates_a_few_go_from_time_to_time() {
        let demand = Demand::default();
        assert_eq!(demand.pace(100), Pace::AtMost(FEW));
        demand.begin();
        let one = demand.creating();
        let two = demand.creating();
        assert_eq!(demand.pace(100), Pace::Wait(SOON));
        drop(one);
        drop(two);
        assert_eq!(demand.pace(100), Pace::Wait(SOON), "the next one is likely");
        assert_eq!(pace(FEW, after(9.0), Some(NOW), Some(YIELD)), Pace::AtMost(FEW));
        assert_eq!(pace(FEW, after(9.0), Some(NOW), None), Pace::AtMost(FEW));
        assert_eq!(pace(FEW, NOW, Some(NOW), None), Pace::Wait(SOON), "just ready");
    }
}
