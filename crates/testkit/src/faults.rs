//! Failures to order: the nth call of a verb on a kind goes wrong in a given way.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::host::ErrorClass;
use hearth_core::resource::Kind;

/// What a host is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verb {
    /// `census`.
    Census,
    /// `ensure`.
    Ensure,
    /// `release`.
    Release,
    /// `reset_slot`, counted under [`Kind::Netns`].
    Reset,
    /// `spawn`, counted under [`Kind::Process`].
    Spawn,
}

impl Verb {
    /// The word for it, as in `HostError::verb`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Census => "census",
            Verb::Ensure => "ensure",
            Verb::Release => "release",
            Verb::Reset => "reset",
            Verb::Spawn => "spawn",
        }
    }
}

/// How a call goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Nothing happens, and an error of this class comes back.
    Error(ErrorClass),
    /// Waits for as long as the call allows (`release`; others: not at all), then fails with
    /// [`ErrorClass::Deadline`]; nothing happened.
    Deadline,
    /// The effect happens by half, then an error of this class: the resource is there and not whole. For
    /// `spawn` the process runs, but nobody is told its pid.
    HalfDone(ErrorClass),
    /// The effect happens whole, and yet an error of this class comes back.
    DoneButError(ErrorClass),
    /// `census` only: the scan sees nothing of ours and says so in `incomplete`.
    Incomplete,
    /// Takes this long and then succeeds.
    Slow(Duration),
    /// Panics in the caller's thread.
    Panic,
}

#[derive(Debug)]
struct Order {
    verb: Verb,
    kind: Kind,
    from: u64,
    until: u64,
    fault: Fault,
}

/// The faults ordered and the calls counted.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    orders: Vec<Order>,
    counts: BTreeMap<(Verb, Kind), u64>,
}

impl Faults {
    /// From the `nth` call on from now (1 is the next), `times` calls in a row.
    pub(crate) fn order(&mut self, verb: Verb, kind: Kind, nth: u64, times: u64, fault: Fault) {
        let from = self.count(verb, kind) + nth.max(1);
        self.orders.push(Order { verb, kind, from, until: from.saturating_add(times), fault });
    }

    /// Counts a call and says how it goes wrong.
    pub(crate) fn strike(&mut self, verb: Verb, kind: Kind) -> Option<Fault> {
        let n = self.counts.entry((verb, kind)).or_default();
        *n += 1;
        let n = *n;
        self.orders
            .iter()
            .find(|o| o.verb == verb && o.kind == kind && (o.from..o.until).contains(&n))
            .map(|o| o.fault.clone())
    }

    pub(crate) fn count(&self, verb: Verb, kind: Kind) -> u64 {
        self.counts.get(&(verb, kind)).copied().unwrap_or(0)
    }

    pub(crate) fn clear(&mut self) {
        self.orders.clear();
    }
}
