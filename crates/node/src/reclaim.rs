//! Release of what nobody names: left by an earlier run, or found by a reconcile pass; and of slots whose removal
//! failed with nobody to own them. What fails is tried again with back-off as long as the engine runs.

mod hands;
mod pace;
mod progress;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_core::event::EventKind;
use hearth_core::host::{Host, Pace};
use hearth_core::network::SlotIndex;
use hearth_core::plan::Plan;
use hearth_core::resource::{Kind, Resource};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::blocking::on_host;
use crate::config::{Reclaim, ReclaimMode};
use crate::engine::Engine;
use crate::error::chain;
use crate::events::Events;
use crate::trace::{self, TraceContext};

pub(crate) use hands::Hands;
pub(crate) use pace::Demand;
pub use progress::{KindProgress, Looked, ReclaimProgress, ReclaimState};

/// Back-off between two rounds over what could not be released.
const RETRY: std::ops::RangeInclusive<Duration> = Duration::from_secs(5)..=Duration::from_secs(300);
/// Leftovers named one by one in the log; the rest are counted.
const NAMED: usize = 8;

/// What is to be released.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Processes before what they hold.
    pub(crate) resources: Vec<Resource>,
    /// Slots that the pool counts as leaked, or as not gone.
    pub(crate) slots: Vec<SlotIndex>,
}

/// What is still there after a try, and why.
#[derive(Debug, Default)]
pub(crate) struct Failed {
    pub(crate) resources: Vec<(Resource, String)>,
    pub(crate) slots: Vec<(SlotIndex, String)>,
}

impl From<Failed> for Leftovers {
    fn from(failed: Failed) -> Self {
        Self {
            resources: failed.resources.into_iter().map(|(resource, _)| resource).collect(),
            slots: failed.slots.into_iter().map(|(slot, _)| slot).collect(),
        }
    }
}

impl Leftovers {
    fn of(plan: &Plan) -> Self {
        let cgroups = plan.leaked_cgroups.iter().map(|name| Resource::Cgroup { name: name.clone() });
        let directories =
            plan.leaked_directories.iter().map(|path| Resource::Directory { path: path.clone() });
        Self {
            resources: cgroups.chain(directories).collect(),
            slots: plan.leaked_slots.iter().copied().collect(),
        }
    }

    fn len(&self) -> usize {
        self.resources.len() + self.slots.len()
    }

    fn extend(&mut self, more: Self) {
        self.resources.extend(more.resources);
        self.slots.extend(more.slots);
    }

    pub(crate) fn kinds(&self) -> impl Iterator<Item = Kind> {
        let resources = self.resources.iter().map(Resource::kind);
        resources.chain(self.slots.iter().map(|_| Kind::Netns))
    }

    /// A few by name, the rest as a number.
    fn words(&self) -> String {
        let resources = self.resources.iter().map(ToString::to_string);
        let mut words: Vec<String> =
            resources.chain(self.slots.iter().map(|s| format!("slot {s}"))).take(NAMED).collect();
        if self.len() > NAMED {
            words.push(format!("{} more", self.len() - NAMED));
        }
        words.join(", ")
    }
}

impl<H: Host> Engine<H> {
    /// Begins with the leftovers of the plan, as configured. In `blocking` mode this returns when the first
    /// round is over or its budget is spent; the rest goes on.
    pub(crate) async fn begin_reclaim(self: &Arc<Self>, plan: &Plan, start: Instant) {
        let leftovers = Leftovers::of(plan);
        let settings = self.context.config.reclaim.clone();
        if leftovers.len() > 0 {
            tracing::info!(
                slots = leftovers.slots.len(),
                cgroups = plan.leaked_cgroups.len(),
                directories = plan.leaked_directories.len(),
                mode = settings.mode.as_str(),
                "leftovers of an earlier run"
            );
            let event = Events::now(EventKind::ReclaimBegan).because(leftovers.words());
            let event = event.with("mode", settings.mode.as_str()).with("slots", leftovers.slots.len());
            let event = event.with("cgroups", plan.leaked_cgroups.len());
            self.context.events.tell(event.with("directories", plan.leaked_directories.len()));
        }
        self.context.hands.take_in(&leftovers.resources);
        let engine = Arc::clone(self);
        if settings.mode == ReclaimMode::Off {
            if leftovers.len() > 0 {
                tracing::warn!("left alone since reclaim.mode is off: {}", leftovers.words());
            }
            self.reclaim.send_modify(|p| p.found(ReclaimState::Off, leftovers.kinds()));
            // What this daemon itself could not take back is tried again all the same.
            self.tasks.spawn(async move { engine.try_again(Leftovers::default()).await });
            return;
        }
        self.reclaim.send_modify(|p| p.found(ReclaimState::Running, leftovers.kinds()));
        self.tasks.spawn(async move { engine.run_reclaim(leftovers).await });
        if settings.mode == ReclaimMode::Blocking {
            self.wait_for_reclaim(&settings, start).await;
        }
    }

    async fn wait_for_reclaim(&self, settings: &Reclaim, start: Instant) {
        let mut progress = self.reclaim.subscribe();
        let enough = progress.wait_for(|p| {
            p.state == ReclaimState::Done || settings.budget_count.is_some_and(|n| p.done + p.failed >= n)
        });
        match settings.budget {
            // The sender lives as long as the engine; its end ends the wait as well.
            None => drop(enough.await),
            Some(budget) => {
                if tokio::time::timeout_at(start + budget, enough).await.is_err() {
                    tracing::info!(seconds = budget.as_secs(), "reclaim budget spent, the rest goes on");
                }
            }
        }
    }

    async fn run_reclaim(self: Arc<Self>, leftovers: Leftovers) {
        let (began, found) = (std::time::Instant::now(), leftovers.len());
        let failed: Leftovers = self.round(leftovers, true).await.into();
        self.reclaim.send_modify(|p| p.state = ReclaimState::Done);
        if found > 0 {
            let event = Events::now(EventKind::ReclaimEnded).because(failed.words());
            let event = event.with("released", found - failed.len()).with("failed", failed.len());
            self.context.events.tell(event.with("took_ms", began.elapsed().as_millis()));
        }
        if failed.len() > 0 {
            tracing::warn!("leftovers that stay and are tried again: {}", failed.words());
        }
        self.try_again(failed).await;
    }

    /// Tries what failed again until the engine ends.
    async fn try_again(&self, mut failed: Leftovers) {
        let mut wait = *RETRY.start();
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.cancelled() => return,
            }
            failed.extend(self.context.hands.take_failed());
            let unowned = Leftovers { resources: vec![], slots: self.context.pool.take_unowned() };
            self.reclaim.send_modify(|p| p.more(unowned.kinds()));
            failed.extend(unowned);
            if failed.len() == 0 {
                wait = *RETRY.start();
                continue;
            }
            let before = failed.len();
            failed = self.round(failed, false).await.into();
            wait = if failed.len() < before { *RETRY.start() } else { (wait * 2).min(*RETRY.end()) };
        }
    }

    /// Tries each once; what failed comes back. What is not begun when the engine ends is found by the next start.
    pub(crate) async fn round(&self, leftovers: Leftovers, first: bool) -> Failed {
        let within = self.context.config.release_deadline;
        let span = trace::begin("reclaim", &TraceContext::new());
        trace::count(&span, "hearth.leftovers", leftovers.len());
        let parent = &span;
        let resources = futures::stream::iter(leftovers.resources).map(|resource| async move {
            if self.stop.is_cancelled() {
                return None;
            }
            let what = resource.clone();
            let released = trace::within(format!("reclaim.{}", resource.kind()), parent, async |_| {
                let released = on_host(&self.context.host, move |host| host.release(&what, within)).await;
                released.map_err(|e| chain(&e))
            });
            let released = released.await;
            note(&self.reclaim, &self.context.events, resource.kind(), &resource, &released, first);
            match released {
                Ok(()) => {
                    self.context.hands.let_go(&resource);
                    None
                }
                Err(why) => Some((resource, why)),
            }
        });
        let at_once = self.context.config.reclaim.parallelism.max(1);
        let resources = resources.buffer_unordered(at_once).filter_map(std::future::ready).collect().await;
        let slots = trace::begin("reclaim.slots", &span);
        trace::count(&slots, "hearth.leftovers", leftovers.slots.len());
        Failed { resources, slots: self.round_of_slots(leftovers.slots, first).await }
    }

    /// All slots in one call, at the pace that demand allows.
    async fn round_of_slots(&self, slots: Vec<SlotIndex>, first: bool) -> Vec<(SlotIndex, String)> {
        if slots.is_empty() {
            return vec![];
        }
        let (context, stop, progress) = (Arc::clone(&self.context), self.stop.clone(), self.reclaim.clone());
        let spared: BTreeSet<String> = self.context.books.all().iter().map(|h| h.id.to_string()).collect();
        let released = on_host(&self.context.host, move |_| {
            let mut left = Vec::new();
            let pace = || match stop.is_cancelled() {
                true => Pace::End,
                false => context.demand.pace(context.pool.there()),
            };
            context.pool.release_many(&slots, &spared, &pace, &mut |slot, released| {
                note(&progress, &context.events, Kind::Netns, &format_args!("slot {slot}"), &released, first);
                left.extend(released.err().map(|why| (slot, why)));
            });
            left
        });
        released.await
    }
}

/// Counts one try. Only the first few failures of the first round are told one by one.
fn note(
    progress: &watch::Sender<ReclaimProgress>,
    events: &Events,
    kind: Kind,
    what: &dyn std::fmt::Display,
    released: &Result<(), String>,
    first: bool,
) {
    let Err(why) = released else {
        progress.send_modify(|p| p.gone(kind));
        return;
    };
    progress.send_modify(|p| p.stays(kind, first));
    if first {
        let event = Events::now(EventKind::LeftoverStuck).because(why.as_str());
        events.tell(event.with("kind", kind).with("what", what));
    }
    let (state, failures) = {
        let p = progress.borrow();
        (p.state, p.failed)
    };
    if first && state == ReclaimState::Running && failures <= NAMED as u64 {
        tracing::warn!("leftover {what} stays and is tried again: {why}");
    } else {
        tracing::debug!("leftover {what} stays: {why}");
    }
}
