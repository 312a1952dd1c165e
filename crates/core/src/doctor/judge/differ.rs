//! Where record, kernel and daemon do not say the same, of what all of them should know: sandboxes that run, and
//! slots that are prepared.

use std::collections::BTreeSet;

use super::{Bench, Recorded, Scene};
use crate::doctor::{Disagreement, ItemKind};
use crate::lifecycle::SandboxState;
use crate::process::Liveness;

impl Bench<'_> {
    pub(super) fn disagreements(&self, scene: &Scene) -> Vec<Disagreement> {
        let seen: BTreeSet<(ItemKind, u32)> = scene
            .things
            .iter()
            .filter(|t| t.foreign.is_none())
            .filter_map(|t| Some((t.kind, t.slot?)))
            .collect();
        let named: BTreeSet<(ItemKind, &str)> = scene
            .things
            .iter()
            .filter(|t| t.foreign.is_none())
            .filter_map(|t| Some((t.kind, t.sandbox.as_deref()?)))
            .collect();
        let absent_of_slot = |slot: u32| {
            let kinds = [ItemKind::Netns, ItemKind::Veth].into_iter();
            kinds.filter(move |k| scene.whole.contains(k)).filter(|k| !seen.contains(&(*k, slot))).collect()
        };
        let mut found = Vec::new();
        for (id, r) in self.lasting() {
            let booked = self.booked(id);
            let daemon = booked.map(|b| b.state.clone()).unwrap_or_default();
            let what = format!("sandbox {} ({id})", r.name);
            let mut absent: Vec<ItemKind> = r.slot.map(absent_of_slot).unwrap_or_default();
            if scene.whole.contains(&ItemKind::Cgroup) && !named.contains(&(ItemKind::Cgroup, id)) {
                absent.push(ItemKind::Cgroup);
            }
            let mut kernel: Vec<String> = absent.iter().map(|k| format!("{k} is gone")).collect();
            if let (Liveness::Gone, Some(shim)) = (&r.alive, &r.shim) {
                kernel.push(format!("shim {} is gone", shim.pid));
            }
            if !kernel.is_empty() {
                let record = format!("running, slot {}", r.slot.map_or("none".into(), |s| s.to_string()));
                found.push(Disagreement { what, record, kernel: kernel.join(", "), daemon });
            } else if self.has_books() && booked.is_none() {
                let daemon = "does not know it".into();
                found.push(Disagreement { what, record: "running".into(), kernel: String::new(), daemon });
            }
        }
        let (Some(before), Some(after)) = (&self.before.books, &self.after.books) else { return found };
        for (slot, _) in after.slots.iter().filter(|(_, s)| s.state == "ready") {
            let absent = absent_of_slot(*slot);
            if before.slots.get(slot).is_some_and(|s| s.state == "ready") && !absent.is_empty() {
                found.push(Disagreement {
                    what: format!("slot {slot}"),
                    record: String::new(),
                    kernel: absent.iter().map(|k| format!("{k} is gone")).collect::<Vec<_>>().join(", "),
                    daemon: "ready".into(),
                });
            }
        }
        let both = after.sandboxes.iter().filter(|(id, b)| {
            b.state == "running" && before.sandboxes.get(*id).is_some_and(|b| b.state == "running")
        });
        if self.before.records.is_some() && self.after.records.is_some() {
            for (id, b) in both.filter(|(id, _)| self.record(id).is_none()) {
                found.push(Disagreement {
                    what: format!("sandbox {} ({id})", b.name),
                    record: "there is none that can be used".into(),
                    kernel: String::new(),
                    daemon: b.state.clone(),
                });
            }
        }
        found
    }

    /// Records that say running before and after.
    fn lasting(&self) -> impl Iterator<Item = (&str, &Recorded)> {
        let running = |r: &&Recorded| r.state == SandboxState::Running && r.this_boot;
        self.after.records.iter().flatten().filter_map(move |(id, r)| {
            let both = running(&r) && self.before.record(id).as_ref().is_some_and(running);
            both.then_some((id.as_str(), r))
        })
    }
}
