//! What a pass looks at: the scans of a start, with the books before and after them; and the host firewall, which has
//! no owner to ask and is made whole at once.

use hearth_core::event::EventKind;
use hearth_core::host::{Census, Host};
use hearth_core::lifecycle::{SandboxState, SlotState};
use hearth_core::reconcile::{Named, Scene};
use hearth_core::resource::{Kind, Resource};

use super::Kept;
use crate::blocking::{blocking, on_host};
use crate::config::ReconcileAction;
use crate::engine::Engine;
use crate::error::chain;
use crate::events::Events;
use crate::records::Loaded;
use crate::start::some_of;

/// What is scanned: as at start, but each link is looked at closely, since a pass also tells what vanished.
const SCANNED: [Kind; 4] = [Kind::Netns, Kind::Veth, Kind::Cgroup, Kind::Directory];

/// A whole look.
pub(super) struct Look {
    pub(super) scene: Scene,
    pub(super) before: Named,
    pub(super) after: Named,
    pub(super) firewall: Firewall,
}

/// The instance's constant rules on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Firewall {
    Absent,
    /// Kernel facts.
    There(String),
    Unknown(String),
}

impl Firewall {
    fn words(&self) -> &str {
        match self {
            Firewall::Absent => "absent",
            Firewall::There(facts) => facts,
            Firewall::Unknown(why) => why,
        }
    }
}

impl<H: Host> Engine<H> {
    /// Looks at everything.
    ///
    /// # Errors
    /// Why the look is not whole: nothing may be decided by it (law 4).
    pub(super) async fn look(&self) -> Result<Look, String> {
        let before = self.named();
        let (records, known) = (self.context.records.clone(), before.sandboxes.clone());
        let loaded = blocking(move || records.load_except(&known));
        let scans = futures::future::join_all(SCANNED.map(|kind| self.scan(kind)));
        // A scan that hangs hangs the loop, which shows; with a time limit each pass would add a hung thread.
        let (loaded, scans, firewall) = tokio::select! {
            all = async { futures::join!(loaded, scans, self.look_at_firewall()) } => all,
            () = self.stop.cancelled() => return Err("the daemon ends".into()),
        };
        let mut after = self.named();
        let loaded = loaded.map_err(|e| format!("records cannot be listed: {e}"))?;
        take_in_records(&loaded, &mut after)?;
        let mut scene = Scene::default();
        for scan in scans {
            take_in(&mut scene, scan?);
        }
        Ok(Look { scene, before, after, firewall })
    }

    async fn scan(&self, kind: Kind) -> Result<Census, String> {
        let why = match on_host(&self.context.host, move |host| host.census(kind)).await {
            Ok(census) if census.incomplete.is_empty() => return Ok(census),
            Ok(census) => some_of(&census.incomplete),
            Err(e) => chain(&e),
        };
        Err(format!("the census of kind {kind} is incomplete: {why}"))
    }

    /// What the books name now.
    fn named(&self) -> Named {
        let mut named = Named {
            slots: self.context.pool.states(),
            in_hand: self.context.hands.resources(),
            ..Named::default()
        };
        for view in self.context.books.views() {
            let view = view.borrow();
            named.sandboxes.insert(view.record.id.to_string());
            if view.state == SandboxState::Running
                && let Some(slot) = view.record.slot
            {
                named.running.insert(slot, view.record.id.clone());
            }
        }
        named
    }

    async fn look_at_firewall(&self) -> Firewall {
        match on_host(&self.context.host, |host| host.census(Kind::HostFirewall)).await {
            Ok(census) if !census.incomplete.is_empty() => Firewall::Unknown(some_of(&census.incomplete)),
            Ok(census) => match census.ours.into_iter().next() {
                Some(sighting) => Firewall::There(sighting.facts),
                None => Firewall::Absent,
            },
            Err(e) => Firewall::Unknown(chain(&e)),
        }
    }

    /// Makes the host firewall whole, and tells if it was not. To make it is to look closer than a scan does: other
    /// firewalls may have come meanwhile.
    ///
    /// # Errors
    /// Why it cannot be made.
    pub(super) async fn keep_firewall(&self, kept: &mut Kept, before: &Firewall) -> Result<(), String> {
        if self.context.config.reconcile.action == ReconcileAction::Report {
            let gone = *before == Firewall::Absent;
            if gone && !std::mem::replace(&mut kept.firewall_told, gone) {
                self.count_firewall();
                let event = Events::now(EventKind::HostFirewall).because("it is gone, and left so");
                self.context.events.tell(event);
                tracing::warn!("the host firewall is gone; left alone since reconcile.action is report");
            }
            kept.firewall_told = gone;
            return Ok(());
        }
        let made = on_host(&self.context.host, |host| host.ensure(&Resource::HostFirewall)).await;
        made.map_err(|e| format!("the host firewall cannot be made: {}", chain(&e)))?;
        let after = self.look_at_firewall().await;
        match (before, &after) {
            (Firewall::Unknown(why), _) | (_, Firewall::Unknown(why)) => {
                tracing::debug!("cannot see the host firewall: {why}");
            }
            (before, after) if before != after => {
                self.count_firewall();
                let (kind, before, after) = (Kind::HostFirewall, before.words(), after.words());
                let event =
                    Events::now(EventKind::HostFirewall).because("it was not whole, and is made again");
                self.context.events.tell(event.with("before", before).with("after", after));
                tracing::warn!(%kind, before, after, "the host firewall was not whole, and is made again");
            }
            _ => {}
        }
        Ok(())
    }

    fn count_firewall(&self) {
        let kind = Kind::HostFirewall.as_str();
        self.reconciler.report.send_modify(|r| *r.findings.entry(kind).or_default() += 1);
    }
}

/// A record that the books do not have names what it names all the same; one that cannot be used may name anything.
fn take_in_records(loaded: &Loaded, named: &mut Named) -> Result<(), String> {
    let unusable: Vec<String> = loaded
        .unreadable
        .iter()
        .filter(|(id, _)| !named.sandboxes.contains(*id))
        .map(|(_, why)| why.clone())
        .collect();
    if !unusable.is_empty() {
        let why = some_of(&unusable);
        return Err(format!("with a record that cannot be used anything may be its own: {why}"));
    }
    for record in &loaded.records {
        if !named.sandboxes.insert(record.id.to_string()) {
            continue;
        }
        tracing::debug!(sandbox = %record.id, "a record that came meanwhile; it is left to the next start");
        if let Some(slot) = record.slot {
            named.slots.entry(slot).or_insert(SlotState::Assigned);
        }
    }
    Ok(())
}

/// Takes the sightings of one scan in.
fn take_in(scene: &mut Scene, census: Census) {
    for sighting in census.ours {
        let facts = sighting.facts;
        match sighting.resource {
            Resource::Netns { slot } => drop(scene.netns.insert(slot, facts)),
            Resource::Veth { slot } => drop(scene.veths.insert(slot, facts)),
            Resource::Cgroup { name } => drop(scene.cgroups.insert(name, facts)),
            Resource::Directory { path } => drop(scene.directories.insert(path, facts)),
            _ => {}
        }
    }
}
