//! Release of what an earlier run left and no record names, and of slots whose removal failed with nobody to
//! own them. A bounded number at once; what fails is tried again with back-off as long as the engine runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use hearth_core::host::Host;
use hearth_core::network::SlotIndex;
use hearth_core::plan::Plan;
use hearth_core::resource::{Kind, Resource};

use crate::blocking::on_host;
use crate::config::{Reclaim, ReclaimMode};
use crate::engine::Engine;
use crate::error::chain;

/// Back-off between two rounds over what could not be released.
const RETRY: std::ops::RangeInclusive<Duration> = Duration::from_secs(5)..=Duration::from_secs(300);

/// How far the release of leftovers is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReclaimProgress {
    /// Where it is.
    pub state: ReclaimState,
    /// Leftovers found at start.
    pub total: u64,
    /// Released since.
    pub done: u64,
    /// Failed in the first round; tried again.
    pub failed: u64,
    /// When the release began.
    pub began: Option<Instant>,
    /// The same by kind. A slot counts as one `netns`.
    pub kinds: BTreeMap<Kind, KindProgress>,
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
        }
    }
}

/// One thing to release.
#[derive(Debug, Clone)]
enum Leftover {
    Resource(Resource),
    Slot(SlotIndex),
}

impl<H: Host> Engine<H> {
    /// Begins with the leftovers of the plan, as configured. In `blocking` mode this returns when the first
    /// round is over or its budget is spent; the rest goes on.
    pub(crate) async fn begin_reclaim(self: &Arc<Self>, plan: &Plan) {
        // Processes before what they hold.
        let cgroups = plan.leaked_cgroups.iter().map(|name| Resource::Cgroup { name: name.clone() });
        let directories =
            plan.leaked_directories.iter().map(|path| Resource::Directory { path: path.clone() });
        let resources: Vec<Leftover> = cgroups.chain(directories).map(Leftover::Resource).collect();
        let slots: Vec<Leftover> = plan.leaked_slots.iter().copied().map(Leftover::Slot).collect();
        let total = (resources.len() + slots.len()) as u64;
        let mut kinds: BTreeMap<Kind, KindProgress> = BTreeMap::new();
        for leftover in resources.iter().chain(&slots) {
            kinds.entry(leftover.kind()).or_default().leaked += 1;
        }
        let settings = self.context.config.reclaim.clone();
        if total > 0 {
            tracing::info!(
                slots = plan.leaked_slots.len(),
                cgroups = plan.leaked_cgroups.len(),
                directories = plan.leaked_directories.len(),
                mode = settings.mode.as_str(),
                "leftovers of an earlier run"
            );
        }
        if settings.mode == ReclaimMode::Off {
            for leftover in resources.iter().chain(&slots) {
                tracing::warn!("left alone since reclaim.mode is off: {}", leftover.words());
            }
            self.reclaim.send_modify(|p| (p.state, p.total, p.kinds) = (ReclaimState::Off, total, kinds));
            return;
        }
        self.reclaim.send_modify(|p| {
            (p.state, p.total, p.kinds) = (ReclaimState::Running, total, kinds);
            p.began = Some(Instant::now());
        });
        let engine = Arc::clone(self);
        let parallelism = settings.parallelism;
        self.tasks.spawn(async move { engine.run_reclaim(resources, slots, parallelism).await });
        if settings.mode == ReclaimMode::Blocking {
            self.wait_for_reclaim(&settings).await;
        }
    }

    async fn wait_for_reclaim(&self, settings: &Reclaim) {
        let mut progress = self.reclaim.subscribe();
        let enough = progress.wait_for(|p| {
            p.state == ReclaimState::Done || settings.budget_count.is_some_and(|n| p.done + p.failed >= n)
        });
        match settings.budget {
            // The sender lives as long as the engine; its end ends the wait as well.
            None => drop(enough.await),
            Some(budget) => {
                if tokio::time::timeout(budget, enough).await.is_err() {
                    tracing::info!(seconds = budget.as_secs(), "reclaim budget spent, the rest goes on");
                }
            }
        }
    }

    async fn run_reclaim(
        self: Arc<Self>,
        resources: Vec<Leftover>,
        slots: Vec<Leftover>,
        parallelism: usize,
    ) {
        let mut failed = self.round(resources, parallelism).await;
        failed.extend(self.round(slots, parallelism).await);
        self.reclaim.send_modify(|p| p.state = ReclaimState::Done);
        let mut wait = *RETRY.start();
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.stop.cancelled() => return,
            }
            failed.extend(self.context.pool.take_unowned().into_iter().map(Leftover::Slot));
            if failed.is_empty() {
                wait = *RETRY.start();
                continue;
            }
            let before = failed.len();
            failed = self.round(failed.into(), parallelism).await;
            wait = if failed.len() < before { *RETRY.start() } else { (wait * 2).min(*RETRY.end()) };
        }
    }

    /// Releases each once; what failed comes back.
    async fn round(&self, leftovers: Vec<Leftover>, parallelism: usize) -> VecDeque<Leftover> {
        let releases = futures::stream::iter(leftovers).map(|leftover| async move {
            if self.stop.is_cancelled() {
                // The next start finds it.
                return None;
            }
            let released = match leftover.clone() {
                Leftover::Slot(slot) => self.context.pool.release(slot).await,
                Leftover::Resource(resource) => {
                    let within = self.context.config.release_deadline;
                    let released = on_host(&self.context.host, move |host| host.release(&resource, within));
                    released.await.map_err(|e| chain(&e))
                }
            };
            let first_round = self.reclaim.borrow().state == ReclaimState::Running;
            match released {
                Ok(()) => {
                    self.reclaim.send_modify(|p| {
                        p.done += u64::from(p.done < p.total);
                        let kind = p.kinds.entry(leftover.kind()).or_default();
                        kind.leaked = kind.leaked.saturating_sub(1);
                        kind.reclaimed += 1;
                        kind.stuck = kind.stuck.min(kind.leaked);
                    });
                    None
                }
                Err(why) => {
                    self.reclaim.send_modify(|p| {
                        p.failed += u64::from(first_round);
                        let kind = p.kinds.entry(leftover.kind()).or_default();
                        kind.failures += 1;
                        kind.stuck = (kind.stuck + u64::from(first_round)).min(kind.leaked);
                    });
                    if first_round {
                        tracing::warn!("leftover {} stays and is tried again: {why}", leftover.words());
                    }
                    Some(leftover)
                }
            }
        });
        releases.buffer_unordered(parallelism.max(1)).filter_map(std::future::ready).collect().await
    }
}

impl Leftover {
    fn kind(&self) -> Kind {
        match self {
            Leftover::Slot(_) => Kind::Netns,
            Leftover::Resource(resource) => resource.kind(),
        }
    }

    fn words(&self) -> String {
        match self {
            Leftover::Slot(slot) => format!("slot {slot}"),
            Leftover::Resource(resource) => resource.to_string(),
        }
    }
}
