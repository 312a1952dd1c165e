//! The plan of a reconcile pass: what is on the host and named by nobody, what is named and gone, and the guards
//! between a finding and an action. Pure: scans and time come from outside.
//!
//! The books are looked at before and after the scans. They name a thing before it is made and until its absence was
//! seen, so what neither look names was nobody's while it was scanned, or came and went in between. The latter does
//! not last to a second pass.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::id::SandboxId;
use crate::lifecycle::SlotState;
use crate::network::SlotIndex;
use crate::resource::{Kind, Resource};

/// A pass may always act on this many, however little there is: a share of little is nothing.
pub const FLOOR: usize = 10;
/// Whole passes in a row that have to see a thing before it is acted upon.
const SIGHTINGS: u32 = 2;

/// What whole scans saw, each with kernel facts in words.
#[derive(Debug, Clone, Default)]
pub struct Scene {
    /// Namespaces of slots.
    pub netns: BTreeMap<SlotIndex, String>,
    /// Host links of slots.
    pub veths: BTreeMap<SlotIndex, String>,
    /// Cgroups, by sandbox id.
    pub cgroups: BTreeMap<String, String>,
    /// Directories of sandboxes, named by their id.
    pub directories: BTreeMap<PathBuf, String>,
}

/// What the daemon's books name at one moment.
#[derive(Debug, Clone, Default)]
pub struct Named {
    /// Slots in any state but free.
    pub slots: BTreeMap<SlotIndex, SlotState>,
    /// Sandboxes in any state, by id.
    pub sandboxes: BTreeSet<String>,
    /// Slots of running sandboxes.
    pub running: BTreeMap<SlotIndex, SandboxId>,
    /// What a release of leftovers has in its hands.
    pub in_hand: HashSet<Resource>,
}

/// One thing that is not as the books say, in the order of action: processes before what they hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// A cgroup of no sandbox.
    Cgroup(String),
    /// A directory of no sandbox.
    Directory(PathBuf),
    /// Any part of a slot whose number is free.
    Slot(SlotIndex),
    /// A prepared slot of which a part is gone.
    Prepared(SlotIndex),
    /// A slot of a running sandbox of which a part is gone. Reported; the VM is not ended for it.
    Running(SlotIndex, SandboxId),
}

impl Finding {
    /// The kind it is counted under. A slot counts as one `netns`.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Finding::Cgroup(_) => Kind::Cgroup,
            Finding::Directory(_) => Kind::Directory,
            Finding::Slot(_) | Finding::Prepared(_) | Finding::Running(..) => Kind::Netns,
        }
    }

    /// Whether it is there without an owner; otherwise it has one, and a part of it is gone.
    #[must_use]
    pub fn is_leaked(&self) -> bool {
        matches!(self, Finding::Cgroup(_) | Finding::Directory(_) | Finding::Slot(_))
    }

    /// Whether a pass can do something about it.
    #[must_use]
    pub fn can_be_released(&self) -> bool {
        !matches!(self, Finding::Running(..))
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Cgroup(name) => write!(f, "cgroup {name}"),
            Finding::Directory(path) => write!(f, "directory {}", path.display()),
            Finding::Slot(slot) => write!(f, "slot {slot}"),
            Finding::Prepared(slot) => write!(f, "prepared slot {slot}"),
            Finding::Running(slot, id) => write!(f, "slot {slot} of running sandbox {id}"),
        }
    }
}

impl Scene {
    /// How many objects there are; a slot is one.
    #[must_use]
    pub fn objects(&self) -> usize {
        let slots: BTreeSet<_> = self.netns.keys().chain(self.veths.keys()).collect();
        slots.len() + self.cgroups.len() + self.directories.len()
    }

    fn facts_of(&self, slot: SlotIndex) -> Option<String> {
        match (self.netns.get(&slot), self.veths.get(&slot)) {
            (None, None) => None,
            (Some(facts), None) | (None, Some(facts)) => Some(facts.clone()),
            (Some(netns), Some(veth)) => Some(format!("{netns}; {veth}")),
        }
    }

    /// Which parts of a slot that has an owner are gone.
    fn gone(&self, slot: SlotIndex) -> Option<&'static str> {
        match (self.netns.contains_key(&slot), self.veths.contains_key(&slot)) {
            (true, true) => None,
            (false, true) => Some("its namespace is gone or is not ours any more"),
            (true, false) => Some("its link is gone or is not ours any more"),
            (false, false) => Some("its namespace and its link are gone or are not ours any more"),
        }
    }
}

impl Named {
    fn sandbox(&self, name: &str) -> bool {
        self.sandboxes.contains(name)
    }
}

/// What is not as the books say, with facts. Every scan of `scene` must have been whole, and every record known.
#[must_use]
pub fn findings(scene: &Scene, before: &Named, after: &Named) -> BTreeMap<Finding, String> {
    let mut found = BTreeMap::new();
    let nobodys = |id: &str| !before.sandbox(id) && !after.sandbox(id);
    let held = |resource: &Resource| before.in_hand.contains(resource) || after.in_hand.contains(resource);
    for (name, facts) in &scene.cgroups {
        if nobodys(name) && !held(&Resource::Cgroup { name: name.clone() }) {
            found.insert(Finding::Cgroup(name.clone()), facts.clone());
        }
    }
    for (path, facts) in &scene.directories {
        if id_of(path).is_some_and(nobodys) && !held(&Resource::Directory { path: path.clone() }) {
            found.insert(Finding::Directory(path.clone()), facts.clone());
        }
    }
    for slot in scene.netns.keys().chain(scene.veths.keys()) {
        if !before.slots.contains_key(slot)
            && !after.slots.contains_key(slot)
            && let Some(facts) = scene.facts_of(*slot)
        {
            found.insert(Finding::Slot(*slot), facts);
        }
    }
    let ready = |named: &Named, slot| matches!(named.slots.get(slot), Some(SlotState::Ready));
    for slot in before.slots.keys().filter(|slot| ready(before, slot) && ready(after, slot)) {
        if let Some(why) = scene.gone(*slot) {
            found.insert(Finding::Prepared(*slot), why.to_owned());
        }
    }
    for (slot, id) in before.running.iter().filter(|(slot, id)| after.running.get(slot) == Some(id)) {
        if let Some(why) = scene.gone(*slot) {
            found.insert(Finding::Running(*slot, id.clone()), why.to_owned());
        }
    }
    found
}

/// The sandbox id that a directory is named by.
#[must_use]
pub fn id_of(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()
}

/// What has to hold before a finding is acted upon, besides a second sighting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guards {
    /// Least time from the first sighting.
    pub min_age: Duration,
    /// Most that one pass may act on, in percent of the objects seen; never less than [`FLOOR`].
    pub max_share_percent: u32,
}

impl Guards {
    /// On how many a pass that saw `objects` may act.
    #[must_use]
    pub fn allowed(&self, objects: usize) -> usize {
        let share = usize::try_from(self.max_share_percent).unwrap_or(usize::MAX);
        FLOOR.max(objects.saturating_mul(share) / 100)
    }
}

/// What the passes so far know of one finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspect {
    /// As last seen.
    pub facts: String,
    /// When it was first seen, on the clock of the passes.
    pub first: Duration,
    /// How many whole passes in a row saw it.
    pub sightings: u32,
    /// Its report as more than a suspicion was made.
    pub told: bool,
}

/// What is remembered from one whole pass to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// All findings of the last whole pass.
    pub suspects: BTreeMap<Finding, Suspect>,
}

/// What a whole pass makes of its findings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Seen for the first time.
    pub new: BTreeSet<Finding>,
    /// Seen often and long enough; nothing of it may be acted upon if there is too much of it.
    pub due: Result<BTreeSet<Finding>, TooMany>,
}

/// More than one pass may act on: rather the scan is wrong than the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMany {
    /// Due.
    pub wanted: usize,
    /// On how many a pass may act.
    pub allowed: usize,
    /// Objects seen.
    pub objects: usize,
}

impl fmt::Display for TooMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, allowed, objects } = self;
        write!(
            f,
            "{wanted} of {objects} objects seem leaked, a pass may act on {allowed}; nothing is changed"
        )
    }
}

impl Memory {
    /// Takes in the findings of a whole pass over `objects` at the time `now`. What was not found again is forgotten.
    pub fn judge(
        &mut self,
        found: BTreeMap<Finding, String>,
        objects: usize,
        now: Duration,
        guards: &Guards,
    ) -> Judged {
        let mut former = std::mem::take(&mut self.suspects);
        let mut new = BTreeSet::new();
        for (finding, facts) in found {
            let known = former.remove(&finding).filter(|s| same(&finding, &s.facts, &facts));
            let suspect = match known {
                Some(s) => Suspect { facts, sightings: s.sightings.saturating_add(1), ..s },
                None => {
                    new.insert(finding.clone());
                    Suspect { facts, first: now, sightings: 1, told: false }
                }
            };
            self.suspects.insert(finding, suspect);
        }
        let settled = |s: &Suspect| s.sightings >= SIGHTINGS && now.saturating_sub(s.first) >= guards.min_age;
        let due: BTreeSet<Finding> =
            self.suspects.iter().filter(|(_, s)| settled(s)).map(|(f, _)| f.clone()).collect();
        let wanted = due.iter().filter(|f| f.can_be_released()).count();
        let allowed = guards.allowed(objects);
        let due = if wanted > allowed { Err(TooMany { wanted, allowed, objects }) } else { Ok(due) };
        Judged { new, due }
    }
}

/// A number may be used again, a sandbox id never is: other facts of a slot are another slot.
fn same(finding: &Finding, before: &str, now: &str) -> bool {
    !matches!(finding, Finding::Slot(_)) || before == now
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(n: u32) -> SlotIndex {
        SlotIndex::new(n).unwrap()
    }

    fn id(c: char) -> String {
        c.to_string().repeat(16)
    }

    fn directory(c: char) -> PathBuf {
        Path::new("/run/hearth/default/sandboxes").join(id(c))
    }

    /// Whole slots, and a cgroup and a directory per letter.
    fn scene(slots: std::ops::Range<u32>, sandboxes: &str) -> Scene {
        Scene {
            netns: slots.clone().map(|n| (slot(n), format!("inode {n}"))).collect(),
            veths: slots.map(|n| (slot(n), format!("index {n}"))).collect(),
            cgroups: sandboxes.chars().map(|c| (id(c), "empty".into())).collect(),
            directories: sandboxes.chars().map(|c| (directory(c), "directory".into())).collect(),
        }
    }

    fn named(slots: &[(u32, SlotState)], sandboxes: &str) -> Named {
        Named {
            slots: slots.iter().map(|(n, state)| (slot(*n), state.clone())).collect(),
            sandboxes: sandboxes.chars().map(id).collect(),
            ..Named::default()
        }
    }

    fn keys(found: &BTreeMap<Finding, String>) -> Vec<Finding> {
        found.keys().cloned().collect()
    }

    #[test]
    fn what_either_look_names_is_somebodys() {
        let states = [
            SlotState::Building,
            SlotState::Ready,
            SlotState::Assigned,
            SlotState::Resetting,
            SlotState::Releasing,
            SlotState::Leaked,
            SlotState::Foreign("a file".into()),
            SlotState::Stuck("busy".into()),
        ];
        let scene = scene(1..10, "ab");
        let leaked_nine = [Finding::Slot(slot(9))];
        let all: Vec<(u32, SlotState)> = (1..).zip(states).collect();
        let nothing = Named::default();
        for (before, after) in [
            (named(&all, "ab"), nothing.clone()),
            (nothing.clone(), named(&all, "ab")),
            (named(&all[..4], "a"), named(&all[4..], "b")),
        ] {
            assert_eq!(keys(&findings(&scene, &before, &after)), leaked_nine);
        }
        let found = findings(&scene, &nothing, &nothing);
        assert_eq!(found.len(), 9 + 2 + 2);
        assert_eq!(found[&Finding::Slot(slot(3))], "inode 3; index 3");
        let first = [Finding::Cgroup(id('a')), Finding::Cgroup(id('b')), Finding::Directory(directory('a'))];
        assert_eq!(keys(&found)[..3], first, "processes go before what they hold");
    }

    #[test]
    fn half_a_slot_is_a_slot() {
        let mut scene = scene(1..3, "");
        scene.netns.remove(&slot(1));
        scene.veths.remove(&slot(2));
        let nothing = Named::default();
        assert_eq!(
            keys(&findings(&scene, &nothing, &nothing)),
            [1, 2].map(|n| Finding::Slot(slot(n))).to_vec()
        );
        assert_eq!(scene.objects(), 2);
    }

    #[test]
    fn what_another_release_has_in_hand_is_left_to_it() {
        let in_hand =
            HashSet::from([Resource::Cgroup { name: id('a') }, Resource::Directory { path: directory('b') }]);
        let busy = Named { in_hand, ..Named::default() };
        let found = findings(&scene(1..1, "ab"), &busy, &Named::default());
        assert_eq!(keys(&found), [Finding::Cgroup(id('b')), Finding::Directory(directory('a'))]);
    }

    #[test]
    fn what_is_named_and_gone_is_found_only_while_it_stays_the_same_owners() {
        let mut seen = scene(1..5, "");
        seen.netns.remove(&slot(1));
        seen.veths.remove(&slot(2));
        seen.netns.remove(&slot(3));
        let ready = named(
            &[(1, SlotState::Ready), (2, SlotState::Assigned), (3, SlotState::Ready), (4, SlotState::Ready)],
            "",
        );
        let mut before = ready.clone();
        before.running.insert(slot(2), id('r').parse().unwrap());
        let mut after = before.clone();
        after.slots.insert(slot(3), SlotState::Assigned);
        let found = findings(&seen, &before, &after);
        assert_eq!(
            keys(&found),
            [Finding::Prepared(slot(1)), Finding::Running(slot(2), id('r').parse().unwrap())]
        );
        after.running.insert(slot(2), id('s').parse().unwrap());
        assert_eq!(keys(&findings(&seen, &before, &after)), [Finding::Prepared(slot(1))]);
    }

    const GUARDS: Guards = Guards { min_age: Duration::from_secs(20), max_share_percent: 20 };

    fn pass(memory: &mut Memory, found: &[(Finding, &str)], at: u64) -> Judged {
        let found = found.iter().map(|(f, facts)| (f.clone(), (*facts).to_owned())).collect();
        memory.judge(found, 20, Duration::from_secs(at), &GUARDS)
    }

    #[test]
    fn a_finding_is_due_when_seen_twice_in_a_row_and_old_enough() {
        let leaked = Finding::Slot(slot(1));
        let due = |judged: Judged| !judged.due.unwrap().is_empty();
        // Times of the passes, and whether it is seen: the last pass tells whether it is due.
        let table: [(&[(u64, bool)], bool); 6] = [
            (&[(0, true)], false),
            (&[(0, true), (30, true)], true),
            (&[(0, true), (10, true)], false),
            (&[(0, true), (10, true), (21, true)], true),
            (&[(0, true), (30, false), (60, true)], false),
            (&[(0, true), (30, false), (60, true), (90, true)], true),
        ];
        for (passes, expected) in table {
            let mut memory = Memory::default();
            let mut last = false;
            for (at, seen) in passes {
                let found = [(leaked.clone(), "inode 1")];
                last = due(pass(&mut memory, if *seen { &found } else { &[] }, *at));
            }
            assert_eq!(last, expected, "{passes:?}");
        }
    }

    #[test]
    fn another_namespace_under_the_same_number_is_another_finding() {
        let mut memory = Memory::default();
        let leaked = Finding::Slot(slot(1));
        assert_eq!(pass(&mut memory, &[(leaked.clone(), "inode 1")], 0).new.len(), 1);
        let judged = pass(&mut memory, &[(leaked.clone(), "inode 2")], 30);
        assert_eq!((judged.new.len(), judged.due), (1, Ok(BTreeSet::new())));
        // A cgroup is the same one when its processes end.
        let cgroup = Finding::Cgroup(id('a'));
        pass(&mut memory, &[(cgroup.clone(), "has processes")], 60);
        assert_eq!(pass(&mut memory, &[(cgroup.clone(), "empty")], 90).due, Ok([cgroup].into()));
    }

    #[test]
    fn more_than_the_share_is_too_many_and_a_few_are_always_allowed() {
        for (objects, share, allowed) in
            [(0, 20, 10), (50, 20, 10), (100, 20, 20), (1000, 1, 10), (7, 100, 10)]
        {
            let guards = Guards { max_share_percent: share, ..GUARDS };
            assert_eq!(guards.allowed(objects), allowed, "{share} % of {objects}");
        }
        let some =
            |n: u32| -> Vec<(Finding, &str)> { (1..=n).map(|i| (Finding::Slot(slot(i)), "x")).collect() };
        let mut memory = Memory::default();
        pass(&mut memory, &some(11), 0);
        let judged = pass(&mut memory, &some(11), 30);
        assert_eq!(judged.due, Err(TooMany { wanted: 11, allowed: 10, objects: 20 }));
        // One that went by itself, and the rest are few enough.
        assert_eq!(pass(&mut memory, &some(10), 60).due.unwrap().len(), 10);
        // What cannot be acted upon counts for nothing.
        let mut lost = some(10);
        lost.push((Finding::Running(slot(50), id('r').parse().unwrap()), "gone"));
        pass(&mut memory, &lost, 90);
        assert_eq!(pass(&mut memory, &lost, 120).due.unwrap().len(), 11);
    }
}
