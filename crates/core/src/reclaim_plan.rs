//! The plan of a reclaim by hand: what would be removed, in which order, and by what each thing is known again. Pure:
//! made of a diagnosis, and held against a later one before anything is done.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::doctor::{Identity, Item, ItemKind, State};

/// Version of the plan's form.
pub const SCHEMA: u32 = 1;

/// Where a plan holds: what it names stands for nothing elsewhere, nor after a reboot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Here {
    /// The host's boot.
    pub boot_id: String,
    /// Inode of the network namespace.
    pub network: u64,
    /// Inode of the mount namespace.
    pub mounts: u64,
}

/// What would be removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimPlan {
    /// See [`SCHEMA`].
    pub schema: u32,
    /// Whose things.
    pub layout: String,
    /// Of which instance; empty for another orchestrator.
    pub instance: String,
    /// Milliseconds since the Unix epoch.
    pub made_at_ms: u64,
    /// Where it holds.
    pub here: Here,
    /// In order.
    pub actions: Vec<Action>,
    /// What could not be seen; nothing is done while there is something.
    pub unseen: Vec<String>,
}

/// One thing to remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// From 1.
    pub number: usize,
    /// Its kind.
    pub kind: ItemKind,
    /// What it is called.
    pub name: String,
    /// Its slot.
    pub slot: Option<u32>,
    /// Its sandbox.
    pub sandbox: Option<String>,
    /// What is done, and what that changes.
    pub does: String,
    /// By what it is known again.
    pub identity: Identity,
    /// Since when it is there, in milliseconds of Unix time; a plan of an earlier version does not say.
    #[serde(default)]
    pub since_ms: Option<u64>,
    /// Why it is believed to be nobody's.
    pub evidence: Vec<String>,
    /// What goes with it.
    pub goes_with: Vec<String>,
}

/// The order of action: processes before what they hold, the namespace last as the anchor of its slot.
const ORDER: [ItemKind; 9] = [
    ItemKind::Process,
    ItemKind::Socket,
    ItemKind::Fifo,
    ItemKind::File,
    ItemKind::Directory,
    ItemKind::Cgroup,
    ItemKind::Rule,
    ItemKind::Veth,
    ItemKind::Netns,
];

/// What of a diagnosis can be removed. Only what is proven to be leaked; what a record names is left to the daemon,
/// whose next start releases it.
#[must_use]
pub fn actions(items: &[Item]) -> Vec<Action> {
    let recorded: BTreeSet<&str> =
        items.iter().filter(|i| i.kind == ItemKind::Record).map(|i| i.name.as_str()).collect();
    let candidate = |i: &&Item| {
        i.state == State::Leaked && !i.owner.sandbox.as_deref().is_some_and(|id| recorded.contains(id))
    };
    let leaked: Vec<&Item> = items.iter().filter(candidate).collect();
    let of_kind = |kind: ItemKind| leaked.iter().filter(move |i| i.kind == kind).copied();
    let anchored: BTreeSet<u32> = of_kind(ItemKind::Netns).filter_map(|i| i.owner.slot).collect();
    let mut with: HashMap<u32, Vec<String>> = HashMap::new();
    for item in &leaked {
        if matches!(item.kind, ItemKind::Veth | ItemKind::Tap | ItemKind::SandboxFirewall)
            && let Some(slot) = item.owner.slot
        {
            with.entry(slot).or_default().push(format!("{} {}", item.kind, item.name));
        }
    }
    let mut actions = Vec::new();
    for kind in ORDER {
        for item in of_kind(kind) {
            let goes_with = match (kind, item.owner.slot) {
                (ItemKind::Veth, Some(slot)) if anchored.contains(&slot) => continue,
                (ItemKind::Netns, Some(slot)) => with.remove(&slot).unwrap_or_default(),
                _ => Vec::new(),
            };
            actions.push(Action {
                number: actions.len() + 1,
                kind,
                name: item.name.clone(),
                slot: item.owner.slot,
                sandbox: item.owner.sandbox.clone(),
                does: does(kind).to_owned(),
                identity: item.identity.clone(),
                since_ms: item.since_ms,
                evidence: item.evidence.clone(),
                goes_with,
            });
        }
    }
    actions
}

fn does(kind: ItemKind) -> &'static str {
    match kind {
        ItemKind::Process => "SIGTERM, after the grace SIGKILL, and wait for its end",
        ItemKind::Socket | ItemKind::Fifo | ItemKind::File => "unlink",
        ItemKind::Directory => "remove it with its contents",
        ItemKind::Cgroup => "remove it when it is empty; what is left in one of our own is killed first",
        ItemKind::Rule => "delete it, with all others of its table in one transaction",
        ItemKind::Veth => "delete the link",
        _ => "unmount and unlink its name, and wait until its link is gone",
    }
}

/// Whether an action may be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The thing is the one that was planned, and still nobody's.
    Due,
    /// It is not there any more.
    Gone,
    /// It must not be touched: why.
    Refused(String),
}

/// Holds an action against a later diagnosis.
#[must_use]
pub fn verify(action: &Action, now: &HashMap<(ItemKind, &str), &Item>) -> Verdict {
    let Some(item) = now.get(&(action.kind, action.name.as_str())) else { return Verdict::Gone };
    if item.identity != action.identity {
        let why = format!(
            "another thing has its name now: {} instead of {}",
            words(&item.identity),
            words(&action.identity)
        );
        return Verdict::Refused(why);
    }
    // A file system, and the kernel for namespaces, gives the number of an inode that went to the next one.
    if reuses_inodes(action.kind)
        && let (Some(then), Some(now)) = (action.since_ms, item.since_ms)
        && then != now
    {
        return Verdict::Refused(format!(
            "another thing has its name now, and its inode number: it is {} ms younger",
            now.saturating_sub(then)
        ));
    }
    match item.state {
        State::Leaked => Verdict::Due,
        other => Verdict::Refused(format!("it is {other} now: {}", item.evidence.join("; "))),
    }
}

/// Kinds whose time is that of their inode and stays as it is. That of a directory changes with its contents, and that
/// of a cgroup's inode whenever the kernel makes it anew in memory; numbers of cgroups do not come again.
fn reuses_inodes(kind: ItemKind) -> bool {
    matches!(kind, ItemKind::Socket | ItemKind::Fifo | ItemKind::File | ItemKind::Netns)
}

/// Why a whole plan does not hold here; nothing if it does.
#[must_use]
pub fn elsewhere(plan: &Here, now: &Here) -> Option<&'static str> {
    if plan.boot_id != now.boot_id {
        return Some(
            "the plan is older than the last boot of this host; what it names is gone. Make a new one",
        );
    }
    if plan.network != now.network {
        return Some("the plan was made in another network namespace; run this where it was made");
    }
    (plan.mounts != now.mounts)
        .then_some("the plan was made in another mount namespace; run this where it was made")
}

/// An identity for a person.
#[must_use]
pub fn words(identity: &Identity) -> String {
    match identity {
        Identity::Inode { inode, .. } => format!("inode {inode}"),
        Identity::Process(p) => format!("pid {} of tick {}", p.pid, p.start_time),
        Identity::Link { index } => format!("link index {index}"),
        Identity::Rule { backend, table } => format!("{backend} table {table}"),
        Identity::Device { backend, task } => format!("backend {backend:?}, task {task}"),
        Identity::Name => "its name alone".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Owner;

    fn item(kind: ItemKind, name: &str, state: State, slot: Option<u32>, inode: u64) -> Item {
        Item {
            kind,
            name: name.into(),
            state,
            owner: Owner { slot, ..Owner::default() },
            evidence: vec!["why".into()],
            since_ms: None,
            identity: Identity::Inode { device: 1, inode },
            tasks: vec![],
        }
    }

    fn of(items: &[Item]) -> HashMap<(ItemKind, &str), &Item> {
        items.iter().map(|i| ((i.kind, i.name.as_str()), i)).collect()
    }

    #[test]
    fn an_inode_number_that_came_again_is_told_by_its_time() {
        for (kind, refused) in [
            (ItemKind::Socket, true),
            (ItemKind::Fifo, true),
            (ItemKind::Netns, true),
            // Its time changes with what is in it.
            (ItemKind::Directory, false),
            (ItemKind::Cgroup, false),
        ] {
            let then = Item { since_ms: Some(5_000), ..item(kind, "a", State::Leaked, Some(1), 7) };
            let planned = actions(std::slice::from_ref(&then));
            assert_eq!(verify(&planned[0], &of(std::slice::from_ref(&then))), Verdict::Due);
            let next = [Item { since_ms: Some(5_012), ..then.clone() }];
            let verdict = verify(&planned[0], &of(&next));
            assert_eq!(
                matches!(&verdict, Verdict::Refused(why) if why.contains("12 ms younger")),
                refused,
                "{verdict:?}"
            );
            // What does not say is known by the rest.
            assert_eq!(verify(&Action { since_ms: None, ..planned[0].clone() }, &of(&next)), Verdict::Due);
        }
    }

    #[test]
    fn only_what_leaked_is_planned_and_processes_come_before_what_they_hold() {
        let mut recorded = item(ItemKind::Cgroup, "cg-of-record", State::Leaked, None, 9);
        recorded.owner.sandbox = Some("r".into());
        let items = [
            item(ItemKind::Netns, "ns-1", State::Leaked, Some(1), 1),
            item(ItemKind::Veth, "veth-1", State::Leaked, Some(1), 2),
            item(ItemKind::Tap, "tap", State::Leaked, Some(1), 3),
            item(ItemKind::Veth, "veth-2", State::Leaked, Some(2), 4),
            item(ItemKind::Process, "77", State::Leaked, None, 5),
            item(ItemKind::Netns, "ns-3", State::Live, Some(3), 6),
            item(ItemKind::Nbd, "/dev/nbd0", State::Leaked, None, 7),
            item(ItemKind::Record, "r", State::Leaked, None, 8),
            recorded,
        ];
        let planned = actions(&items);
        let names: Vec<&str> = planned.iter().map(|a| a.name.as_str()).collect();
        assert_eq!(names, ["77", "veth-2", "ns-1"]);
        assert_eq!(planned[2].goes_with, ["veth veth-1", "tap tap"]);
        assert_eq!((planned[0].number, planned[2].number), (1, 3));
    }

    #[test]
    fn what_is_not_the_planned_thing_any_more_is_refused() {
        let was = [item(ItemKind::Netns, "ns-1", State::Leaked, Some(1), 1)];
        let action = &actions(&was)[0];
        assert_eq!(verify(action, &of(&was)), Verdict::Due);
        assert_eq!(verify(action, &of(&[])), Verdict::Gone);
        let reused = [item(ItemKind::Netns, "ns-1", State::Leaked, Some(1), 2)];
        assert_eq!(
            verify(action, &of(&reused)),
            Verdict::Refused("another thing has its name now: inode 2 instead of inode 1".into())
        );
        let taken = [item(ItemKind::Netns, "ns-1", State::Live, Some(1), 1)];
        assert_eq!(verify(action, &of(&taken)), Verdict::Refused("it is live now: why".into()));
    }

    #[test]
    fn a_plan_of_another_boot_or_place_does_not_hold() {
        let here = Here { boot_id: "b".into(), network: 1, mounts: 2 };
        assert_eq!(elsewhere(&here, &here), None);
        assert!(elsewhere(&here, &Here { boot_id: "c".into(), ..here.clone() }).unwrap().contains("boot"));
        assert!(elsewhere(&here, &Here { network: 9, ..here.clone() }).unwrap().contains("network"));
        assert!(elsewhere(&here, &Here { mounts: 9, ..here.clone() }).unwrap().contains("mount"));
    }
}
