//! Slots whose namespaces lost their names, until the kernel tells that their links are gone.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use hearth_core::network::SlotIndex;

use crate::net::links::NameOf;
use crate::net::netlink::NetlinkError;
use crate::net::netns::NsId;
use crate::net::rtnl::LinkEvents;

/// Without an event for this long the links are looked for. The kernel takes a large batch longer than this before the
/// first of its links goes.
const QUIET: Duration = Duration::from_millis(300);
/// When none goes for this long, something holds those that are left.
const STALLED: Duration = Duration::from_secs(1);
/// What the kernel may take for each of those that die together: of thousands none goes until all are prepared: 13 s were
/// seen for 4,096 among 10,000.
const EACH: Duration = Duration::from_millis(10);
/// Many links go at a thousand a second. Waking for each would disturb the kernel's worker, which waits for all
/// processors once a tap (`synchronize_net` in tun_detach_all).
const MANY: usize = 64;
/// Time between two looks at the events then.
const GATHER: Duration = Duration::from_millis(10);

/// A slot whose namespace has lost its name.
#[derive(Debug)]
pub(super) struct Dying {
    pub(super) slot: SlotIndex,
    /// Name of the host's end.
    pub(super) name: String,
    pub(super) ids: Vec<NsId>,
    pub(super) peer_nsid: Option<i32>,
    until: Instant,
    /// The kernel is believed to be at it.
    pending: bool,
}

/// What became of one.
#[derive(Debug)]
pub(super) enum Fate {
    Gone,
    /// It is still there, and its time is over.
    Late,
    /// Its time is over, and nobody knows.
    Unknown(io::Error),
}

/// All of one release.
#[derive(Debug)]
pub(super) struct Deaths {
    events: LinkEvents,
    names: NameOf,
    /// Longest time without any that goes.
    within: Duration,
    /// By the index of the host's end.
    dying: HashMap<u32, Dying>,
    /// How many of them the kernel is believed to be at.
    pending: usize,
    /// When something was last added or went.
    progress: Instant,
    /// When something last went.
    went: Instant,
    looked: Instant,
}

impl Deaths {
    /// Hears of every link that goes from now on.
    pub(super) fn open(within: Duration) -> Result<Self, NetlinkError> {
        let events = LinkEvents::open()?;
        let names = NameOf::open().map_err(NetlinkError::Socket)?;
        let now = Instant::now();
        let dying = HashMap::new();
        Ok(Self { events, names, within, dying, pending: 0, progress: now, went: now, looked: now })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.dying.is_empty()
    }

    /// How many are on their way, without those that something holds.
    pub(super) fn pending(&mut self) -> usize {
        if self.pending > 0 && self.progress.elapsed() > STALLED {
            self.pending = 0;
            self.dying.values_mut().for_each(|d| d.pending = false);
        }
        self.pending
    }

    fn take(&mut self, index: u32) -> Option<Dying> {
        let dying = self.dying.remove(&index)?;
        self.pending -= usize::from(dying.pending);
        Some(dying)
    }

    /// Waits for one more, of so many that are on their way together.
    pub(super) fn add(
        &mut self,
        together: usize,
        index: u32,
        name: &str,
        slot: SlotIndex,
        ids: Vec<NsId>,
        peer_nsid: Option<i32>,
    ) {
        self.progress = Instant::now();
        let turn = EACH * u32::try_from(together).unwrap_or(u32::MAX);
        let until = self.progress + self.within + turn;
        let dying = Dying { slot, name: name.to_owned(), ids, peer_nsid, until, pending: true };
        self.pending += usize::from(self.dying.insert(index, dying).is_none_or(|former| !former.pending));
    }

    /// Waits for about `pause` at most; those whose fate is known are no longer among the dying.
    pub(super) fn wait(&mut self, pause: Duration) -> Vec<(Dying, Fate)> {
        let mut fates = Vec::new();
        let mut gone = Vec::new();
        if self.dying.len() > MANY {
            std::thread::sleep(GATHER.min(pause));
        }
        let heard = self.events.gone(Instant::now() + pause, |index| gone.push(index));
        for index in gone {
            let Some(dying) = self.take(index) else { continue };
            self.went = Instant::now();
            self.progress = self.went;
            fates.push((dying, Fate::Gone));
        }
        let now = Instant::now();
        // The kernel takes them in order, and thousands take it longer than one may: as long as some go the others
        // are only waiting for their turn.
        let turn = self.went + self.within;
        for dying in self.dying.values_mut() {
            dying.until = dying.until.max(turn);
        }
        // A link that went before it was waited for, or whose event was lost, is looked for by its index. The kernel
        // takes all of a batch from its list before the first event: nobody can find them any more, and whoever wants
        // their names waits for the batch.
        let quiet = self.progress.elapsed() > QUIET && self.looked.elapsed() > QUIET;
        let look = quiet || !matches!(heard, Ok(true));
        let due = |d: &Dying| look || now >= d.until;
        let due: Vec<u32> = self.dying.iter().filter(|(_, d)| due(d)).map(|(i, _)| *i).collect();
        if look {
            self.looked = now;
        }
        for index in due {
            let name = self.names.link(index);
            let Some(dying) = self.dying.get(&index) else { continue };
            let fate = match name {
                Ok(Some(name)) if name == dying.name && now < dying.until => continue,
                Ok(Some(name)) if name == dying.name => Fate::Late,
                Ok(_) => Fate::Gone,
                Err(_) if now < dying.until => continue,
                Err(e) => Fate::Unknown(e),
            };
            fates.extend(self.take(index).map(|dying| (dying, fate)));
        }
        if let Err(e) = heard {
            // Looking by index goes on; only slower.
            tracing::debug!("link events: {e}");
            std::thread::sleep(pause);
        }
        fates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_many_has_as_much_time_as_the_last() {
        for (together, expected) in [(1, 2), (1000, 0)] {
            let mut deaths = Deaths::open(Duration::ZERO).unwrap();
            // The loopback link, which stays, and one that is not there.
            for (index, name) in [(1, "lo"), (i32::MAX.unsigned_abs(), "none")] {
                deaths.add(together, index, name, SlotIndex::new(1).unwrap(), vec![], None);
            }
            std::thread::sleep(EACH + Duration::from_millis(5));
            let fates = deaths.wait(Duration::from_millis(1));
            assert_eq!(fates.len(), expected, "{together} together: {fates:?}");
            let late = fates.iter().filter(|(_, fate)| matches!(fate, Fate::Late)).count();
            assert_eq!(late, expected / 2, "{fates:?}");
        }
    }
}
