//! The start: census, plan, and what the plan asks for. The port is bound before any of this; requests are
//! refused with a reason until the plan exists.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use hearth_core::event::EventKind;
use hearth_core::host::{Census, Host};
use hearth_core::id::SandboxId;
use hearth_core::lifecycle::SlotState;
use hearth_core::plan::{Observed, Plan, Seen, plan};
use hearth_core::process::Liveness;
use hearth_core::record::Record;
use hearth_core::resource::{Kind, Resource};
use hearth_core::spec::DEFAULT_DISK_MIB;
use hearth_core::steps::Place;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::blocking::{blocking, on_host};
use crate::config::ReclaimMode;
use crate::engine::{Engine, Phase, now_ms, panic_text};
use crate::error::{EngineError, chain};
use crate::events::Events;
use crate::images::Job;
use crate::reclaim::Looked;
use crate::sandbox::Begin;

/// What is scanned at start. What lives inside a namespace goes with it and needs no scan of its own.
const SCANNED: [Scan; 3] = [Scan::Slots, Scan::Kind(Kind::Cgroup), Scan::Kind(Kind::Directory)];

/// One scan.
#[derive(Debug, Clone, Copy)]
enum Scan {
    /// Namespaces and links at once, by names.
    Slots,
    /// One kind.
    Kind(Kind),
}

impl std::fmt::Display for Scan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scan::Slots => f.write_str("slots"),
            Scan::Kind(kind) => write!(f, "kind {kind}"),
        }
    }
}

/// How long one scan may take.
const CENSUS: Duration = Duration::from_secs(60);
/// How often ends that are kept are looked at.
const FORGET: Duration = Duration::from_secs(10);
/// How long the start waits for the first blank disk.
const BLANK: Duration = Duration::from_millis(400);
/// Back-off between two tries of a scan.
const CENSUS_RETRY: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(5);

impl<H: Host> Engine<H> {
    /// Finds out what is there, adopts what lives, and begins to serve; leftovers are released in the
    /// background.
    ///
    /// # Errors
    /// If the host firewall cannot be made, the records cannot be listed, or something on the host is in the way.
    /// The phase is then `Failed`.
    pub async fn start(self: &Arc<Self>) -> Result<(), EngineError> {
        let start = self.context.faults.around(Place::Start, EngineError::Failed, self.try_start());
        // A start that panicked must not look as if it went on.
        let started = AssertUnwindSafe(start).catch_unwind().await.unwrap_or_else(|panic| {
            Err(EngineError::Failed(format!("the start panicked: {}", panic_text(panic.as_ref()))))
        });
        if let Err(e) = &started {
            self.phase.send_replace(Phase::Failed(e.to_string()));
        }
        started
    }

    async fn try_start(self: &Arc<Self>) -> Result<(), EngineError> {
        let start = tokio::time::Instant::now();
        self.phase.send_replace(Phase::Starting("taking the census".into()));
        let context = Arc::clone(&self.context);
        if let Err(e) = blocking(move || context.blanks.sweep()).await {
            tracing::warn!("{}", chain(&e));
        }
        let context = Arc::clone(&self.context);
        if let Err(e) = blocking(move || context.exits.load(now_ms())).await {
            tracing::warn!("how earlier sandboxes ended cannot be read: {e}");
        }
        let blank = self.make_blank();
        let records = self.context.records.clone();
        let loaded = blocking(move || records.load());
        let scans = SCANNED.map(|scan| self.whole_census(scan));
        let conflict = on_host(&self.context.host, |host| host.conflict());
        let prepared = on_host(&self.context.host, |host| host.prepare_spawn());
        let (loaded, conflict, scans, ()) =
            futures::join!(loaded, conflict, futures::future::join_all(scans), prepared);
        match conflict {
            Ok(None) => {}
            Ok(Some(why)) => return Err(EngineError::Failed(why)),
            // Each `ensure` looks again, at one thing at a time.
            Err(e) => tracing::warn!("cannot look for conflicts on this host: {}", chain(&e)),
        }
        let loaded = loaded.map_err(|e| {
            EngineError::Failed(format!("records cannot be listed, so nothing can be decided: {e}"))
        })?;
        for path in &loaded.foreign {
            tracing::info!("not ours and left alone: {}", path.display());
        }
        let mut seen = BTreeSet::new();
        let mut looked = BTreeMap::<Kind, Looked>::new();
        for (scan, census) in SCANNED.iter().zip(scans) {
            let census = census?;
            let kind = match scan {
                Scan::Slots => Kind::Netns,
                Scan::Kind(kind) => *kind,
            };
            looked.entry(kind).or_default().foreign += census.foreign.len() as u64;
            self.note(*scan, census, &mut seen);
        }
        seen.extend(loaded.without.iter().cloned().map(Seen::Directory));
        for (id, why) in &loaded.unreadable {
            tracing::error!(sandbox = %id, "its record cannot be used and is kept as it is: {why}");
        }
        self.context.books.note_unknown(loaded.unreadable.clone());

        let observed = self.observe(loaded.records).await;
        let unreadable = loaded.unreadable.keys().cloned().collect();
        let plan = plan(&observed, &seen, &unreadable, self.context.host.boot_id());
        for thing in &seen {
            let (kind, nameless) = match thing {
                Seen::Slot(slot) => (Kind::Netns, plan.leaked_slots.contains(slot)),
                Seen::Cgroup(name) => (Kind::Cgroup, plan.leaked_cgroups.contains(name)),
                Seen::Directory(path) => (Kind::Directory, plan.leaked_directories.contains(path)),
            };
            let looked = looked.entry(kind).or_default();
            *(if nameless { &mut looked.nameless } else { &mut looked.named }) += 1;
        }
        self.reclaim.send_modify(|p| p.census = looked);
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
        self.context.nbds.begin(&self.context.host, devices(&plan, &by_id)).await;
        self.apply(&plan, by_id);
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.context.pool.fill(engine.stop.clone()).await });
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            engine.context.nbds.watch(&engine.context.host, engine.stop.clone()).await;
        });
        let wait_for_it = self.context.config.reclaim.mode == ReclaimMode::Blocking;
        if wait_for_it {
            self.phase.send_replace(Phase::Starting("releasing leftovers".into()));
            self.begin_reclaim(&plan, start).await;
        }
        // Made beside the census, and nearly always there by now.
        drop(tokio::time::timeout(BLANK, blank).await);
        self.context.demand.begin();
        if !wait_for_it {
            self.begin_reclaim(&plan, start).await;
        }
        self.phase.send_replace(Phase::Ready);
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.run_reconcile().await });
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.forget_exits().await });
        let engine = Arc::clone(self);
        self.tasks.spawn(async move { engine.sum_usage().await });
        Ok(())
    }

    /// Forgets how sandboxes ended, in time, also on a node where nothing ends any more.
    async fn forget_exits(&self) {
        while self.stop.run_until_cancelled(tokio::time::sleep(FORGET)).await.is_some() {
            let context = Arc::clone(&self.context);
            blocking(move || context.exits.prune(now_ms())).await;
        }
    }

    /// Makes the blank disk most creations copy, so that the first one need not wait for it.
    fn make_blank(&self) -> JoinHandle<()> {
        let (context, stop) = (Arc::clone(&self.context), self.stop.clone());
        self.tasks.spawn(async move {
            let ended = Arc::new(AtomicBool::new(false));
            let told = Arc::clone(&ended);
            let made = blocking(move || context.blanks.get(DEFAULT_DISK_MIB, &Job::quiet(&told)));
            tokio::pin!(made);
            let made = tokio::select! {
                made = &mut made => made,
                () = stop.cancelled() => {
                    ended.store(true, Ordering::Relaxed);
                    made.await
                }
            };
            if let Err(e) = made {
                // A creation will try again, and tell.
                tracing::debug!("no blank disk yet: {}", chain(&e));
            }
        })
    }

    /// A census with nothing missing: a number that was not seen counts as free, so a scan cut short would
    /// free what is in use (law 4). Tried until it succeeds, with the reason in sight: an end of the daemon would
    /// only repeat the same scan under a supervisor.
    async fn whole_census(&self, scan: Scan) -> Result<Census, EngineError> {
        let mut wait = *CENSUS_RETRY.start();
        loop {
            let census = on_host(&self.context.host, move |host| match scan {
                Scan::Slots => host.census_slots(),
                Scan::Kind(kind) => host.census(kind),
            });
            let why = match tokio::time::timeout(CENSUS, census).await {
                Ok(Ok(census)) if census.incomplete.is_empty() => return Ok(census),
                Ok(Ok(census)) => some_of(&census.incomplete),
                Ok(Err(e)) => chain(&e),
                Err(_) => format!("not done after {} s", CENSUS.as_secs()),
            };
            let why = format!("the census of {scan} is incomplete and taken again: {why}");
            if wait == *CENSUS_RETRY.start() {
                tracing::warn!("{why}");
            }
            self.phase.send_replace(Phase::Starting(why));
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(*CENSUS_RETRY.end()),
                () = self.stop.cancelled() => {
                    return Err(EngineError::Failed("the daemon ends before the census is whole".into()));
                }
            }
        }
    }

    fn note(&self, scan: Scan, census: Census, seen: &mut BTreeSet<Seen>) {
        // One line however many there are: another instance may have thousands.
        if let Some((name, why)) = census.foreign.first_key_value() {
            tracing::info!(%scan, count = census.foreign.len(), name, "not ours and left alone, such as this: {why}");
            if matches!(scan, Scan::Slots) {
                let event = Events::now(EventKind::SlotForeign).because(why.as_str());
                let event = event.with("count", census.foreign.len()).with("such_as", name);
                self.context.events.tell(event);
            }
        }
        for (name, why) in &census.foreign {
            let layout = &self.context.config.layout;
            if let Some(slot) = layout.slot_of_netns(name).or_else(|| layout.slot_of_veth(name)) {
                self.context.pool.mark(slot, SlotState::Foreign(why.clone()));
            }
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

    fn apply(&self, plan: &Plan, mut records: BTreeMap<SandboxId, Record>) {
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
            begin(record, Begin::Found);
        }
        // What is kept may live, so its slot is its own before any record that is released.
        claimed.extend(plan.keep.keys().filter_map(|id| records.get(id)?.slot));
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
        for id in plan.keep.keys() {
            let Some(record) = records.remove(id) else { continue };
            begin(record, Begin::Found);
        }
    }
}

/// The network block devices that records name, each with its sandbox. Of two that name one, whoever may live has it.
fn devices(plan: &Plan, records: &BTreeMap<SandboxId, Record>) -> BTreeMap<u32, SandboxId> {
    let mut named = BTreeMap::new();
    for id in plan.adopt.iter().chain(plan.keep.keys()).chain(plan.release.keys()) {
        for resource in records.get(id).into_iter().flat_map(|record| &record.resources) {
            if let Resource::Nbd { index, sandbox } = resource {
                named.entry(*index).or_insert_with(|| sandbox.clone());
            }
        }
    }
    named
}

/// The first few reasons: a scan of thousands can be cut as often.
pub(crate) fn some_of(reasons: &[String]) -> String {
    const NAMED: usize = 3;
    let more = reasons.len().saturating_sub(NAMED);
    let mut text = reasons.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}
