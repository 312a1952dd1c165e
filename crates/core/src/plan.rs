//! The plan: what a start (and every later round) does with what the census saw. Pure, so that it can be
//! printed, compared and tested.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::SandboxId;
use crate::network::SlotIndex;
use crate::process::Liveness;
use crate::record::Record;

/// What is known of one record when the plan is made.
#[derive(Debug, Clone)]
pub struct Observed {
    /// As on disk.
    pub record: Record,
    /// Of its shim; `Gone` if none was recorded.
    pub shim: Liveness,
}

/// What to do. Every sandbox of the input is in exactly one of the first three lists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Alive: connect again.
    pub adopt: Vec<SandboxId>,
    /// Half made, half released, or ended while nobody looked: release, with the reason.
    pub release: BTreeMap<SandboxId, String>,
    /// Cannot be decided now: kept, reported, slot kept out of the pool.
    pub keep: BTreeMap<SandboxId, String>,
    /// Slots seen that no record names.
    pub leaked_slots: BTreeSet<SlotIndex>,
    /// Cgroups seen that no record names.
    pub leaked_cgroups: BTreeSet<String>,
    /// Directories seen that no record names.
    pub leaked_directories: BTreeSet<std::path::PathBuf>,
    /// Slots owned by a record that stays.
    pub slots_in_use: BTreeSet<SlotIndex>,
}

/// Makes the plan.
///
/// `unreadable` are sandbox directories whose record could not be used: while there is one, nothing at all is
/// called leaked, since anything might be its own (law 4). Call this only with every record listed.
#[must_use]
pub fn plan(
    observed: &[Observed],
    seen: &BTreeSet<Seen>,
    unreadable: &BTreeSet<String>,
    boot_id: &str,
) -> Plan {
    let mut plan = Plan::default();
    for o in observed {
        let record = &o.record;
        let id = record.id.clone();
        if record.boot_id != boot_id {
            plan.release.insert(id, "the host was booted since it was created".into());
            continue;
        }
        match (&o.shim, record.state) {
            (Liveness::Unknown(why), _) => {
                plan.keep.insert(id, format!("its shim cannot be judged: {why}"));
                plan.slots_in_use.extend(record.slot);
            }
            (Liveness::Alive, crate::lifecycle::SandboxState::Running) => {
                plan.adopt.push(id);
                plan.slots_in_use.extend(record.slot);
            }
            (Liveness::Alive, state) => {
                plan.release.insert(id, format!("it was {state} when the daemon stopped"));
                plan.slots_in_use.extend(record.slot);
            }
            (Liveness::Gone, _) => {
                plan.release.insert(id, "its shim is gone".into());
                plan.slots_in_use.extend(record.slot);
            }
        }
    }
    if !unreadable.is_empty() {
        // A slot says nothing about its owner, so one unreadable record shields all slots.
        return plan;
    }
    let known: BTreeSet<&str> = observed.iter().map(|o| o.record.id.as_str()).collect();
    let named: BTreeSet<SlotIndex> = observed.iter().filter_map(|o| o.record.slot).collect();
    for resource in seen {
        match resource {
            Seen::Slot(n) if !named.contains(n) => {
                plan.leaked_slots.insert(*n);
            }
            Seen::Cgroup(name) if !known.contains(name.as_str()) => {
                plan.leaked_cgroups.insert(name.clone());
            }
            Seen::Directory(path)
                if !path.file_name().and_then(|f| f.to_str()).is_some_and(|f| known.contains(f)) =>
            {
                plan.leaked_directories.insert(path.clone());
            }
            _ => {}
        }
    }
    plan
}

/// What a census saw, reduced to what has an owner of its own.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seen {
    /// Any part of a slot.
    Slot(SlotIndex),
    /// A cgroup, by sandbox id.
    Cgroup(String),
    /// A sandbox's run directory.
    Directory(std::path::PathBuf),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifecycle::SandboxState;
    use crate::spec::{SandboxSpec, VmmKind};

    const BOOT: &str = "this-boot";

    fn observed(id: &str, state: SandboxState, slot: u32, shim: Liveness) -> Observed {
        let record = Record {
            schema: Record::SCHEMA,
            id: id.parse().unwrap(),
            name: id.parse().unwrap(),
            spec: SandboxSpec {
                template: "base".parse().unwrap(),
                cpus: 1,
                memory_mib: 128,
                disk_mib: 64,
                timeout_seconds: None,
                net: true,
                vmm: VmmKind::Qemu,
                env: vec![],
                disk_rate: Default::default(),
            },
            state,
            created_at_ms: 1,
            ends_at_ms: None,
            boot_id: BOOT.into(),
            slot: SlotIndex::new(slot),
            shim: None,
            resources: vec![],
            stuck: None,
        };
        Observed { record, shim }
    }

    fn slot(n: u32) -> SlotIndex {
        SlotIndex::new(n).unwrap()
    }

    fn everything() -> BTreeSet<Seen> {
        let directory = |id: &str| Seen::Directory(format!("/run/hearth/default/sandboxes/{id}").into());
        (1..=5)
            .map(|n| Seen::Slot(slot(n)))
            .chain(["alivexxxxxxxxxxx", "nobodyxxxxxxxxxx"].map(|id| Seen::Cgroup(id.into())))
            .chain(["alivexxxxxxxxxxx", "nobodyxxxxxxxxxx"].map(directory))
            .collect()
    }

    fn sandboxes() -> Vec<Observed> {
        vec![
            observed("alivexxxxxxxxxxx", SandboxState::Running, 1, Liveness::Alive),
            observed("halfxxxxxxxxxxxx", SandboxState::Creating, 2, Liveness::Alive),
            observed("deadxxxxxxxxxxxx", SandboxState::Running, 3, Liveness::Gone),
            observed("darkxxxxxxxxxxxx", SandboxState::Running, 4, Liveness::Unknown("EACCES".into())),
        ]
    }

    #[test]
    fn each_sandbox_is_adopted_released_or_kept_and_the_rest_is_leaked() {
        let plan = plan(&sandboxes(), &everything(), &BTreeSet::new(), BOOT);
        assert_eq!(plan.adopt, ["alivexxxxxxxxxxx".parse().unwrap()]);
        let released: Vec<&str> = plan.release.keys().map(SandboxId::as_str).collect();
        assert_eq!(released, ["deadxxxxxxxxxxxx", "halfxxxxxxxxxxxx"]);
        assert!(plan.keep[&"darkxxxxxxxxxxxx".parse().unwrap()].contains("EACCES"));
        assert_eq!(plan.slots_in_use, [1, 2, 3, 4].map(slot).into());
        assert_eq!(plan.leaked_slots, [slot(5)].into());
        assert_eq!(plan.leaked_cgroups, ["nobodyxxxxxxxxxx".to_owned()].into());
        assert_eq!(plan.leaked_directories.len(), 1);
    }

    #[test]
    fn with_a_record_unknown_nothing_is_leaked() {
        let unreadable = ["torn".to_owned()].into();
        let plan = plan(&sandboxes(), &everything(), &unreadable, BOOT);
        assert!(plan.leaked_slots.is_empty());
        assert!(plan.leaked_cgroups.is_empty());
        assert!(plan.leaked_directories.is_empty());
        // What is known is acted upon all the same.
        assert_eq!(plan.adopt.len(), 1);
    }

    #[test]
    fn nothing_of_another_boot_is_followed_by_its_number() {
        let plan = plan(&sandboxes(), &everything(), &BTreeSet::new(), "next-boot");
        assert!(plan.adopt.is_empty());
        assert!(plan.keep.is_empty());
        assert_eq!(plan.release.len(), 4);
        assert!(plan.slots_in_use.is_empty());
    }

    #[test]
    fn a_sandbox_stuck_before_is_released_again() {
        let stuck = vec![observed("stuckxxxxxxxxxxx", SandboxState::Stuck, 1, Liveness::Gone)];
        let plan = plan(&stuck, &BTreeSet::new(), &BTreeSet::new(), BOOT);
        assert_eq!(plan.release.len(), 1);
        assert_eq!(plan.slots_in_use, [slot(1)].into());
    }
}
