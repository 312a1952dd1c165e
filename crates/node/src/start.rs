//! The start: census, plan, and what the plan asks for. The port is bound before any of this; requests are
//! refused with a reason until the plan exists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt as _;
use hearth_core::host::{Census, Host};
use hearth_core::lifecycle::SlotState;
use hearth_core::plan::{Observed, Plan, Seen, plan};
use hearth_core::process::Liveness;
use hearth_core::record::Record;
use hearth_core::resource::{Kind, Resource};
use tokio_util::sync::CancellationToken;

use crate::blocking::{blocking, on_host};
use crate::engine::{Engine, Phase};
use crate::error::{EngineError, chain};
use crate::records::Loaded;
use crate::sandbox::Begin;

/// Kinds scanned at start. What lives inside a namespace goes with it and needs no scan of its own.
const SCANNED: [Kind; 4] = [Kind::Netns, Kind::Veth, Kind::Cgroup, Kind::Directory];
/// Leftovers released at the same time.
const RELEASERS: usize = 4;

impl<H: Host> Engine<H> {
    /// Finds out what is there, adopts what lives, and begins to serve; leftovers are released in the
    /// background.
    ///
    /// # Errors
    /// If the host firewall cannot be made or the records cannot be listed. The phase is then `Failed`.
    pub async fn start(self: &Arc<Self>) -> Result<(), EngineError> {
        let started = self.try_start().await;
        if let Err(e) = &started {
            self.phase.send_replace(Phase::Failed(e.to_string()));
        }
        started
    }

    async fn try_start(self: &Arc<Self>) -> Result<(), EngineError> {
        self.phase.send_replace(Phase::Starting("taking the census".into()));
        let records = self.context.records.clone();
        let loaded = blocking(move || records.load());
        let scans = SCANNED.map(|kind| on_host(&self.context.host, move |host| host.census(kind)));
        let (loaded, scans) = futures::join!(loaded, futures::future::join_all(scans));
        let all_records_known = loaded.is_ok();
        let loaded = loaded.unwrap_or_else(|e| {
            tracing::error!("records cannot be listed: {e}; nothing is released until they can");
            Loaded::default()
        });
        let mut seen = BTreeSet::new();
        for (kind, scan) in SCANNED.iter().zip(scans) {
            match scan {
                Ok(census) => self.note(*kind, census, &mut seen),
                Err(e) => tracing::warn!(%kind, "census failed: {}", chain(&e)),
            }
        }
        seen.extend(loaded.without.iter().cloned().map(Seen::Directory));
        for (id, why) in &loaded.unreadable {
            tracing::error!(sandbox = %id, "its record cannot be used and is kept as it is: {why}");
        }

        let observed = self.observe(loaded.records).await;
        let unreadable = loaded.unreadable.keys().cloned().collect();
        let plan = plan(&observed, &seen, &unreadable, all_records_known, self.context.host.boot_id());
        // A slot seen but neither in use nor called leaked may belong to a record that cannot be read.
        for slot in seen.iter().filter_map(|s| if let Seen::Slot(n) = s { Some(*n) } else { None }) {
            self.context.pool.mark(slot, SlotState::Stuck("its owner is not known".into()));
        }
        for slot in &plan.leaked_slots {
            self.context.pool.mark(*slot, SlotState::Leaked);
        }
        for slot in &plan.slots_in_use {
            self.context.pool.mark(*slot, SlotState::Assigned);
        }
        self.phase.send_replace(Phase::Starting("making the host firewall".into()));
        on_host(&self.context.host, |host| host.ensure(&Resource::HostFirewall)).await?;

        let by_id: BTreeMap<_, _> = observed.into_iter().map(|o| (o.record.id.clone(), o.record)).collect();
        self.apply(&plan, by_id);
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.context.pool.fill(engine.stop.clone()).await });
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.release_leftovers(plan).await });
        self.phase.send_replace(Phase::Ready);
        Ok(())
    }

    fn note(&self, kind: Kind, census: Census, seen: &mut BTreeSet<Seen>) {
        for (name, why) in &census.foreign {
            tracing::info!(%kind, name, "not ours and left alone: {why}");
            if let Some(slot) = self
                .context
                .config
                .layout
                .slot_of_netns(name)
                .or_else(|| self.context.config.layout.slot_of_veth(name))
            {
                self.context.pool.mark(slot, SlotState::Foreign(why.clone()));
            }
        }
        for why in &census.incomplete {
            // What was seen is real all the same; absence proves nothing, and nothing here relies on it.
            tracing::warn!(%kind, "census is incomplete: {why}");
        }
        for sighting in census.ours {
            match sighting.resource {
                Resource::Netns { slot } | Resource::Veth { slot } => seen.insert(Seen::Slot(slot)),
                Resource::Cgroup { name } => seen.insert(Seen::Cgroup(name)),
                // Directories below the state directory have records, read above.
                Resource::Directory { path } if path.starts_with(&self.context.config.run_dir) => {
                    seen.insert(Seen::Directory(path))
                }
                _ => false,
            };
        }
    }

    async fn observe(&self, records: Vec<Record>) -> Vec<Observed> {
        on_host(&self.context.host, move |host| {
            let judge = |record: Record| {
                let shim = record.shim.as_ref().map_or(Liveness::Gone, |process| host.liveness(process));
                Observed { record, shim }
            };
            records.into_iter().map(judge).collect()
        })
        .await
    }

    fn apply(&self, plan: &Plan, mut records: BTreeMap<hearth_core::id::SandboxId, Record>) {
        let mut claimed = BTreeSet::new();
        let begin = |record: Record, begin: Begin| {
            let (sandbox, handle) = self.sandbox(record, None, CancellationToken::new(), None);
            self.context.books.enter_found(handle);
            self.spawn(sandbox, begin);
        };
        for id in &plan.adopt {
            let Some(record) = records.remove(id) else { continue };
            tracing::info!(sandbox = %id, name = %record.name, "found running, taking it over");
            claimed.extend(record.slot);
            begin(record, Begin::Adopt);
        }
        for (id, why) in &plan.release {
            let Some(mut record) = records.remove(id) else { continue };
            // Two records name one slot only if a crash came between giving it back and writing that down;
            // the first owner then owns nothing of it.
            if record.slot.is_some_and(|slot| !claimed.insert(slot)) {
                record.slot = None;
                record.resources.retain(|r| {
                    !matches!(r.kind(), Kind::Netns | Kind::Veth | Kind::Tap | Kind::SandboxFirewall)
                });
            }
            begin(record, Begin::Release(why.clone()));
        }
        for (id, why) in &plan.keep {
            tracing::error!(sandbox = %id, "kept as it is: {why}");
        }
    }

    /// Releases what no record names. Bounded; ends early when the engine does, since the next start finds
    /// the rest.
    async fn release_leftovers(&self, plan: Plan) {
        let total = plan.leaked_slots.len() + plan.leaked_cgroups.len() + plan.leaked_directories.len();
        if total == 0 {
            return;
        }
        tracing::info!(
            slots = plan.leaked_slots.len(),
            cgroups = plan.leaked_cgroups.len(),
            directories = plan.leaked_directories.len(),
            "releasing leftovers of an earlier run"
        );
        // Processes before what they hold.
        let cgroups = plan.leaked_cgroups.into_iter().map(|name| Resource::Cgroup { name });
        let directories = plan.leaked_directories.into_iter().map(|path| Resource::Directory { path });
        for resource in cgroups.chain(directories) {
            if self.stop.is_cancelled() {
                return;
            }
            let within = self.context.config.release_deadline;
            let shown = resource.to_string();
            let released = on_host(&self.context.host, move |host| host.release(&resource, within)).await;
            if let Err(e) = released {
                tracing::warn!("leftover {shown} stays: {}", chain(&e));
            }
        }
        let slots = futures::stream::iter(plan.leaked_slots).map(|slot| async move {
            if self.stop.is_cancelled() {
                return;
            }
            if let Err(why) = self.context.pool.release(slot).await {
                tracing::warn!(%slot, "leftover slot stays: {why}");
            }
        });
        slots.buffer_unordered(RELEASERS).collect::<()>().await;
        tracing::info!("leftovers are done");
    }
}
