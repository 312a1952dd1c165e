//! When a VMM is asked for metrics, and when its silence is a fault.
//!
//! ```text
//!            answered                    error                 pidfd silent for CONFIRM
//!   Well ──────────────► Well     Well ─────────► Suspect ─────────────────────────────► Failing   (said once)
//!                                                    │ exit: nothing is said                │ answered
//!                                                    ▼                                      ▼
//!                                                  ended                                  Well     (said once)
//! ```
//!
//! A plain value without a clock: the machine's owner tells it the time and does what it says. An error alone proves
//! nothing, since a dying VMM resets its connections up to half a second before its pidfd tells (measured: 564 ms at
//! most in 550 kills); only one that outlives the pidfd's silence is reported.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use hearth_core::id::SandboxId;
use tokio::time::Instant;

/// How long the pidfd is awaited after an error.
pub const CONFIRM: Duration = Duration::from_secs(2);
/// Longest time between two tries of a VMM that fails.
const LONGEST_BACKOFF: Duration = Duration::from_secs(300);
/// Shortest interval: below, asking costs more than it tells.
const SHORTEST: Duration = Duration::from_millis(10);

/// What is to be done next, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// Nothing, ever.
    Never,
    /// Ask the VMM.
    Flush(Instant),
    /// If no exit was seen by then, call [`Flusher::confirmed`].
    Confirm(Instant),
}

#[derive(Debug)]
enum Health {
    Well,
    Suspect { error: String, until: Instant },
    Failing { tries: u32 },
}

/// The state of one VMM's flushes.
#[derive(Debug)]
pub struct Flusher {
    /// None: switched off.
    interval: Option<Duration>,
    due: Instant,
    health: Health,
}

impl Flusher {
    /// Flushes every `interval`; zero: never. The first comes within one, at a point that the id chooses: thousands
    /// of sandboxes made or adopted at once do not ask at once.
    #[must_use]
    pub fn new(interval: Duration, id: &SandboxId, now: Instant) -> Self {
        let interval = (!interval.is_zero()).then(|| interval.max(SHORTEST));
        let mut hash = DefaultHasher::new();
        id.as_str().hash(&mut hash);
        // 16 bits choose the point.
        let share = u32::try_from(hash.finish() % (1 << 16)).unwrap_or(0);
        let first = interval.unwrap_or_default() / (1 << 16) * share;
        Self { interval, due: now + first, health: Health::Well }
    }

    /// What to do next.
    #[must_use]
    pub fn turn(&self) -> Turn {
        match (self.interval, &self.health) {
            (None, _) => Turn::Never,
            (_, Health::Suspect { until, .. }) => Turn::Confirm(*until),
            _ => Turn::Flush(self.due),
        }
    }

    /// Whether the VMM answers as far as is known.
    #[must_use]
    pub fn is_well(&self) -> bool {
        matches!(self.health, Health::Well)
    }

    /// Asks soon, for somebody who waits for fresh numbers; not of a VMM that fails.
    pub fn hurry(&mut self, now: Instant) {
        if self.is_well() {
            self.due = self.due.min(now);
        }
    }

    /// The VMM was not asked, or the call was given up for something else to be done.
    pub fn postponed(&mut self, now: Instant) {
        self.due = now + self.interval.unwrap_or_default();
    }

    /// The VMM answered.
    pub fn succeeded(&mut self, now: Instant) {
        if let Health::Failing { tries } = self.health {
            tracing::info!(failed_tries = tries, "the VMM gives metrics again");
        }
        self.health = Health::Well;
        self.due = now + self.interval.unwrap_or_default();
    }

    /// The call failed. Nothing is said yet.
    pub fn failed(&mut self, error: String, now: Instant) {
        self.health = match self.health {
            Health::Failing { tries } => {
                tracing::debug!(error, "metrics, again");
                let tries = tries.saturating_add(1);
                self.due = now + self.backoff(tries);
                Health::Failing { tries }
            }
            Health::Well | Health::Suspect { .. } => Health::Suspect { error, until: now + CONFIRM },
        };
    }

    /// The VMM lives on after an error: a fault.
    pub fn confirmed(&mut self, now: Instant) {
        if let Health::Suspect { error, .. } = &self.health {
            tracing::warn!(error, "the VMM lives and gives no metrics; trying again, less and less often");
            self.health = Health::Failing { tries: 1 };
            self.due = now + self.backoff(1);
        }
    }

    fn backoff(&self, tries: u32) -> Duration {
        let interval = self.interval.unwrap_or_default();
        interval.saturating_mul(1 << tries.min(16)).min(LONGEST_BACKOFF.max(interval))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    fn id(n: u32) -> SandboxId {
        let mut bytes = [0; SandboxId::LEN];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        SandboxId::from_random(bytes)
    }

    fn due(flusher: &Flusher) -> Instant {
        match flusher.turn() {
            Turn::Flush(at) => at,
            other => panic!("no flush: {other:?}"),
        }
    }

    #[test]
    fn a_thousand_sandboxes_are_spread_over_the_interval() {
        let now = Instant::now();
        let mut tenths = [0u32; 10];
        for n in 0..1000 {
            let first = due(&Flusher::new(INTERVAL, &id(n), now)) - now;
            assert!(first < INTERVAL);
            tenths[usize::try_from(first.as_secs()).unwrap()] += 1;
        }
        assert!(tenths.iter().all(|n| (50..=150).contains(n)), "{tenths:?}");
        let again = due(&Flusher::new(INTERVAL, &id(7), now));
        assert_eq!(again, due(&Flusher::new(INTERVAL, &id(7), now)), "an adopted one keeps its point");
    }

    #[test]
    fn an_error_waits_for_the_exit_and_nothing_is_asked_meanwhile() {
        let now = Instant::now();
        let mut flusher = Flusher::new(INTERVAL, &id(1), now);
        flusher.failed("reset".into(), now);
        assert_eq!(flusher.turn(), Turn::Confirm(now + CONFIRM));
        flusher.hurry(now);
        assert_eq!(flusher.turn(), Turn::Confirm(now + CONFIRM), "whoever hurries changes nothing");
    }

    #[test]
    fn a_fault_backs_off_to_a_limit_and_an_answer_ends_it() {
        let start = Instant::now();
        let mut now = start;
        let mut flusher = Flusher::new(INTERVAL, &id(1), now);
        flusher.failed("500".into(), now);
        now += CONFIRM;
        flusher.confirmed(now);
        let mut waits = vec![due(&flusher) - now];
        for _ in 0..20 {
            now = due(&flusher);
            flusher.failed("500".into(), now);
            waits.push(due(&flusher) - now);
        }
        assert!(waits.is_sorted() && waits[0] == INTERVAL * 2, "{waits:?}");
        assert_eq!(waits.last(), Some(&LONGEST_BACKOFF));
        flusher.succeeded(now);
        assert_eq!((due(&flusher), flusher.is_well()), (now + INTERVAL, true));
    }

    #[test]
    fn an_interval_of_zero_is_never() {
        let now = Instant::now();
        let mut flusher = Flusher::new(Duration::ZERO, &id(1), now);
        flusher.hurry(now);
        assert_eq!(flusher.turn(), Turn::Never);
    }
}
