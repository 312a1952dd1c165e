//! How far the release of leftovers is: one value that everybody may read.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hearth_core::resource::Kind;

/// How far the release of leftovers is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReclaimProgress {
    /// Where it is.
    pub state: ReclaimState,
    /// Leftovers found: at start, and by later reconcile passes that release them.
    pub total: u64,
    /// Released since.
    pub done: u64,
    /// Failed at the first try; tried again.
    pub failed: u64,
    /// When the release began.
    pub began: Option<Instant>,
    /// The same by kind. A slot counts as one `netns`.
    pub kinds: BTreeMap<Kind, KindProgress>,
    /// What the census of the start looked at, by kind; empty until it is done. A slot counts as one `netns`.
    pub census: BTreeMap<Kind, Looked>,
}

/// What a census saw of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looked {
    /// Ours, and a record names it or may name it.
    pub named: u64,
    /// Ours, and no record names it: a leftover.
    pub nameless: u64,
    /// Near our names and not ours: left alone.
    pub foreign: u64,
}

/// The leftovers of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KindProgress {
    /// There now, without an owner. The only good value is 0.
    pub leaked: u64,
    /// Of these, tried without success; tried again.
    pub stuck: u64,
    /// Released since the start of the daemon.
    pub reclaimed: u64,
    /// Tries without success since the start of the daemon.
    pub failures: u64,
}

impl ReclaimProgress {
    /// How long the rest of the first round will take at the rate so far; `None` while there is no rate or no
    /// round.
    #[must_use]
    pub fn estimate(&self) -> Option<Duration> {
        let tried = self.done + self.failed;
        if self.state != ReclaimState::Running || tried == 0 {
            return None;
        }
        let rest = self.total.saturating_sub(tried);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let share = rest as f64 / tried as f64;
        Duration::try_from_secs_f64(self.began?.elapsed().as_secs_f64() * share).ok()
    }
}

/// Where the release of leftovers is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimState {
    /// The census is not done.
    Scanning,
    /// Leftovers are being released.
    Running,
    /// The first round is over.
    Done,
    /// Leftovers are only reported.
    Off,
}

impl ReclaimState {
    /// The word for it, as in `/health`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ReclaimState::Scanning => "scanning",
            ReclaimState::Running => "running",
            ReclaimState::Done => "done",
            ReclaimState::Off => "off",
        }
    }
}

impl Default for ReclaimProgress {
    fn default() -> Self {
        Self {
            state: ReclaimState::Scanning,
            total: 0,
            done: 0,
            failed: 0,
            began: None,
            kinds: BTreeMap::new(),
            census: BTreeMap::new(),
        }
    }
}

impl ReclaimProgress {
    /// Leftovers that nobody has tried to release yet; none where they are only reported.
    #[must_use]
    pub fn pending(&self) -> u64 {
        if self.state == ReclaimState::Off {
            return 0;
        }
        self.kinds.values().map(|k| k.leaked.saturating_sub(k.stuck)).sum()
    }

    /// Leftovers were found and are being released, or only reported.
    pub(crate) fn found(&mut self, state: ReclaimState, found: impl Iterator<Item = Kind>) {
        self.more(found);
        self.state = state;
        self.began = (state == ReclaimState::Running).then(Instant::now);
    }

    /// More leftovers to be released.
    pub(crate) fn more(&mut self, found: impl Iterator<Item = Kind>) {
        for kind in found {
            self.total += 1;
            self.kinds.entry(kind).or_default().leaked += 1;
        }
    }

    /// One is gone.
    pub(crate) fn gone(&mut self, kind: Kind) {
        self.done += u64::from(self.done < self.total);
        let kind = self.kinds.entry(kind).or_default();
        kind.leaked = kind.leaked.saturating_sub(1);
        kind.reclaimed += 1;
        kind.stuck = kind.stuck.min(kind.leaked);
    }

    /// One did not go, at the `first` try or again.
    pub(crate) fn stays(&mut self, kind: Kind, first: bool) {
        self.failed += u64::from(first);
        let kind = self.kinds.entry(kind).or_default();
        kind.failures += 1;
        kind.stuck = (kind.stuck + u64::from(first)).min(kind.leaked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_and_what_stays_is_counted_by_kind() {
        let mut p = ReclaimProgress::default();
        p.found(ReclaimState::Running, [Kind::Netns, Kind::Netns, Kind::Netns, Kind::Cgroup].into_iter());
        p.gone(Kind::Cgroup);
        p.gone(Kind::Netns);
        p.stays(Kind::Netns, true);
        assert_eq!((p.total, p.done, p.failed, p.pending()), (4, 2, 1, 1));
        assert!(p.estimate().is_some());
        let netns = p.kinds[&Kind::Netns];
        assert_eq!((netns.leaked, netns.stuck, netns.reclaimed, netns.failures), (2, 1, 1, 1));
        p.gone(Kind::Netns);
        p.state = ReclaimState::Done;
        assert_eq!(p.estimate(), None);
        // Later rounds count tries, and no leftover twice.
        p.stays(Kind::Netns, false);
        let netns = p.kinds[&Kind::Netns];
        assert_eq!((p.failed, netns.leaked, netns.stuck, netns.failures), (1, 1, 1, 2));
        assert_eq!(p.pending(), 0);
        p.gone(Kind::Netns);
        let netns = p.kinds[&Kind::Netns];
        assert_eq!((p.done, netns.leaked, netns.stuck, netns.reclaimed), (4, 0, 0, 3));
        // Found by a later pass.
        p.more([Kind::Cgroup].into_iter());
        assert_eq!((p.total, p.done, p.kinds[&Kind::Cgroup].leaked), (5, 4, 1));
        assert_eq!(p.pending(), 1);
        p.gone(Kind::Cgroup);
        assert_eq!((p.total, p.done, p.kinds[&Kind::Cgroup].leaked), (5, 5, 0));
    }
}
