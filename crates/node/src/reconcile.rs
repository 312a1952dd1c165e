//! The reconcile loop: every so often, and on demand, a pass that observes, plans and applies, so that what leaks
//! under a living daemon goes without a restart. It decides nothing by itself: the plan and its guards are pure
//! (`hearth_core::reconcile`), what it releases goes the way of all leftovers (`reclaim`), and whether a thing is
//! nobody's is decided by the pool and the books, under their own locks, at the moment of action.

mod look;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use hearth_core::event::{Event, EventKind};
use hearth_core::host::Host;
use hearth_core::id::SandboxId;
use hearth_core::network::SlotIndex;
use hearth_core::reconcile::{Finding, Guards, Memory, Suspect, findings, id_of};
use hearth_core::resource::{Kind, Resource};
use tokio::sync::watch;

use crate::config::{Reconcile, ReconcileAction};
use crate::engine::{Engine, panic_text};
use crate::error::EngineError;
use crate::events::Events;
use crate::reclaim::{KindProgress, Leftovers};

use look::Firewall;
pub use report::{Found, Outcome, Pass, PassResult, ReconcileReport};

/// New findings told one by one at each pass; the rest are counted. All are in the log at level debug.
const NAMED: usize = 8;

/// What is kept between passes.
#[derive(Debug)]
pub(crate) struct Reconciler {
    /// Where the clock of the passes begins.
    origin: Instant,
    /// Held for a whole pass, so that there is one at a time.
    kept: tokio::sync::Mutex<Kept>,
    report: watch::Sender<ReconcileReport>,
    /// When the loop last got on; `None` while it does not run.
    beat: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
struct Kept {
    memory: Memory,
    result: PassResult,
    /// In report mode: that the host firewall is gone was told.
    firewall_told: bool,
}

impl Reconciler {
    pub(crate) fn new() -> Self {
        Self {
            origin: Instant::now(),
            kept: tokio::sync::Mutex::default(),
            report: watch::Sender::new(ReconcileReport::default()),
            beat: Mutex::default(),
        }
    }

    fn beat(&self, at: Option<Instant>) {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    /// The loop got on, if it runs.
    fn got_on(&self) {
        if let Some(at) = self.beat.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *at = Instant::now();
        }
    }
}

/// Why a loop that last got on this long ago counts as stopped; nothing if it does not.
fn overdue(age: Duration, config: &Reconcile) -> Option<String> {
    let limit = config.interval.saturating_mul(3).saturating_add(config.patience);
    (age > limit).then(|| format!("the reconcile loop has not run for {} s", age.as_secs()))
}

impl<H: Host> Engine<H> {
    /// Passes at the interval until the engine ends.
    pub(crate) async fn run_reconcile(&self) {
        let every = self.context.config.reconcile.interval;
        let mut next = tokio::time::interval_at(tokio::time::Instant::now() + every, every);
        next.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.reconciler.beat(Some(Instant::now()));
        loop {
            tokio::select! {
                _ = next.tick() => {}
                () = self.stop.cancelled() => break,
            }
            self.pass(false).await;
        }
        self.reconciler.beat(None);
    }

    /// One pass now, after one that is under way. `dry_run` changes and counts nothing, and is no sighting.
    ///
    /// # Errors
    /// If the node does not know yet what there is.
    pub async fn reconcile(&self, dry_run: bool) -> Result<Pass, EngineError> {
        self.ready()?;
        Ok(self.pass(dry_run).await)
    }

    /// What the passes so far did.
    #[must_use]
    pub fn reconcile_report(&self) -> ReconcileReport {
        self.reconciler.report.borrow().clone()
    }

    /// Why the loop counts as stopped; nothing if it runs or is not to.
    #[must_use]
    pub fn reconcile_stopped(&self) -> Option<String> {
        let last = *self.reconciler.beat.lock().unwrap_or_else(PoisonError::into_inner);
        overdue(last?.elapsed(), &self.context.config.reconcile)
    }

    /// Leftovers by kind: those under release, and those that passes see and have not acted upon.
    #[must_use]
    pub fn leftovers(&self) -> BTreeMap<Kind, KindProgress> {
        let mut kinds = self.reclaim.borrow().kinds.clone();
        for (kind, seen) in &self.reconciler.report.borrow().leaked {
            kinds.entry(*kind).or_default().leaked += seen;
        }
        kinds
    }

    async fn pass(&self, dry_run: bool) -> Pass {
        let mut kept = self.reconciler.kept.lock().await;
        let begun = Instant::now();
        self.reconciler.got_on();
        // A pass that panics is one that failed: the loop goes on.
        let whole = AssertUnwindSafe(self.look_and_act(&mut kept, dry_run)).catch_unwind().await;
        let mut pass = whole.unwrap_or_else(|panic| Pass {
            result: PassResult::Failed,
            reason: format!("the pass panicked: {}", panic_text(panic.as_ref())),
            ..Pass::default()
        });
        pass.took = begun.elapsed();
        if !dry_run {
            self.count(&mut kept, &pass);
        }
        pass
    }

    async fn look_and_act(&self, kept: &mut Kept, dry_run: bool) -> Pass {
        let looked = self.look().await;
        self.reconciler.got_on();
        match looked {
            Err(why) => Pass { result: PassResult::Incomplete, reason: why, ..Pass::default() },
            Ok(look) => {
                let found = findings(&look.scene, &look.before, &look.after);
                let objects = look.scene.objects();
                let seen = Seen { found, objects, firewall: look.firewall };
                if dry_run { self.plan_only(kept, seen) } else { self.act(kept, seen).await }
            }
        }
    }

    fn guards(&self) -> Guards {
        let config = &self.context.config.reconcile;
        Guards { min_age: config.min_age, max_share_percent: config.max_share_percent }
    }

    fn plan_only(&self, kept: &Kept, seen: Seen) -> Pass {
        let mut memory = kept.memory.clone();
        let now = self.reconciler.origin.elapsed();
        let judged = memory.judge(seen.found, seen.objects, now, &self.guards());
        let mut pass = Pass { objects: seen.objects, ..Pass::default() };
        let due = judged.due.unwrap_or_else(|too_many| {
            (pass.result, pass.reason) = (PassResult::Capped, too_many.to_string());
            BTreeSet::new()
        });
        let outcome = |finding: &Finding| match due.contains(finding) {
            true if finding.can_be_released() => Outcome::Due,
            true => Outcome::Reported,
            false => Outcome::Waiting,
        };
        pass.findings = memory.suspects.iter().map(|(f, s)| Found::new(f, s, now, outcome(f))).collect();
        if seen.firewall == Firewall::Absent {
            pass.reason = joined(&pass.reason, "the host firewall is gone");
        }
        pass
    }

    async fn act(&self, kept: &mut Kept, seen: Seen) -> Pass {
        let now = self.reconciler.origin.elapsed();
        let judged = kept.memory.judge(seen.found, seen.objects, now, &self.guards());
        let mut pass = Pass { objects: seen.objects, ..Pass::default() };
        tell_new(&judged.new, &kept.memory, &self.context.events);
        self.reconciler.report.send_modify(|r| {
            for finding in &judged.new {
                *r.findings.entry(if finding.is_leaked() { "leaked" } else { "gone" }).or_default() += 1;
            }
        });
        let report_only = self.context.config.reconcile.action == ReconcileAction::Report;
        let outcomes = match judged.due {
            Err(too_many) => {
                (pass.result, pass.reason) = (PassResult::Capped, too_many.to_string());
                BTreeMap::new()
            }
            Ok(due) if report_only => due.into_iter().map(|f| (f, Outcome::Reported)).collect(),
            Ok(due) => self.release_due(due).await,
        };
        for (finding, suspect) in &mut kept.memory.suspects {
            let outcome = outcomes.get(finding).cloned().unwrap_or(Outcome::Waiting);
            let found = Found::new(finding, suspect, now, outcome);
            tell(&found, suspect, &self.context.events);
            if matches!(found.outcome, Outcome::Failed(_)) {
                pass.result = PassResult::Failed;
            }
            pass.findings.push(found);
        }
        // What was claimed is the release's own now, and what could not be is somebody's.
        let acted = |f: &Finding| {
            matches!(outcomes.get(f), Some(Outcome::Released | Outcome::Failed(_) | Outcome::Spared))
        };
        kept.memory.suspects.retain(|finding, _| !acted(finding));
        if let Err(why) = self.keep_firewall(kept, &seen.firewall).await {
            pass.result = pass.result.max(PassResult::Failed);
            pass.reason = joined(&pass.reason, &why);
        }
        pass
    }

    /// Claims and releases what is due.
    async fn release_due(&self, due: BTreeSet<Finding>) -> BTreeMap<Finding, Outcome> {
        if due.is_empty() {
            return BTreeMap::new();
        }
        let context = &self.context;
        let numbers = |of: fn(&Finding) -> Option<SlotIndex>| -> BTreeSet<SlotIndex> {
            due.iter().filter_map(of).collect()
        };
        let free = numbers(|f| if let Finding::Slot(n) = f { Some(*n) } else { None });
        let prepared = numbers(|f| if let Finding::Prepared(n) = f { Some(*n) } else { None });
        let mut slots = if free.is_empty() { free } else { context.pool.claim_free(&free) };
        if !prepared.is_empty() {
            slots.extend(context.pool.claim_ready(&prepared));
        }
        let claimed = |id: Option<&str>| {
            id.and_then(|id| id.parse::<SandboxId>().ok()).is_some_and(|id| context.books.claim(&id))
        };
        let resources: Vec<Resource> = due
            .iter()
            .filter_map(|finding| match finding {
                Finding::Cgroup(name) if claimed(Some(name)) => Some(Resource::Cgroup { name: name.clone() }),
                Finding::Directory(path) if claimed(id_of(path)) => {
                    Some(Resource::Directory { path: path.clone() })
                }
                _ => None,
            })
            .collect();
        context.hands.take_in(&resources);
        let leftovers = Leftovers { resources: resources.clone(), slots: slots.iter().copied().collect() };
        self.reclaim.send_modify(|p| p.more(leftovers.kinds()));
        let failed = self.watched_round(leftovers).await;
        let whys: BTreeMap<Finding, String> = failed
            .resources
            .iter()
            .filter_map(|(resource, why)| Some((finding_of(resource)?, why.clone())))
            .collect();
        let slot_whys: BTreeMap<SlotIndex, String> = failed.slots.iter().cloned().collect();
        context.hands.leave(failed.into());
        let claimed: BTreeSet<Finding> = resources.iter().filter_map(finding_of).collect();
        let stopped = self.stop.is_cancelled();
        let outcome = |finding: &Finding| {
            let (mine, why) = match finding {
                Finding::Running(..) => return Outcome::Reported,
                Finding::Slot(n) | Finding::Prepared(n) => (slots.contains(n), slot_whys.get(n)),
                other => (claimed.contains(other), whys.get(other)),
            };
            match (mine, why) {
                (false, _) => Outcome::Spared,
                (true, Some(why)) => Outcome::Failed(why.clone()),
                // It may not have been begun; the next start finds it.
                (true, None) if stopped => Outcome::Waiting,
                (true, None) => Outcome::Released,
            }
        };
        due.iter().map(|finding| (finding.clone(), outcome(finding))).collect()
    }

    /// A round that counts as getting on as long as something is decided.
    async fn watched_round(&self, leftovers: Leftovers) -> crate::reclaim::Failed {
        let mut progress = self.reclaim.subscribe();
        let round = self.round(leftovers, true);
        tokio::pin!(round);
        loop {
            tokio::select! {
                failed = &mut round => return failed,
                Ok(()) = progress.changed() => self.reconciler.got_on(),
            }
        }
    }

    /// Counts a pass, and tells when its result is another than that of the last one.
    fn count(&self, kept: &mut Kept, pass: &Pass) {
        self.reconciler.report.send_modify(|r| {
            *r.passes.entry(pass.result).or_default() += 1;
            r.last = Some((crate::engine::now_ms(), pass.took));
            r.leaked.clear();
            for finding in kept.memory.suspects.keys().filter(|f| f.is_leaked()) {
                *r.leaked.entry(finding.kind()).or_default() += 1;
            }
        });
        let former = std::mem::replace(&mut kept.result, pass.result);
        if former != pass.result {
            let event = Events::now(EventKind::ReconcileChanged).because(pass.reason.as_str());
            let event = event.with("result", pass.result.as_str()).with("former", former.as_str());
            self.context.events.tell(event);
        }
        match pass.result {
            PassResult::Ok if former == PassResult::Ok => {}
            PassResult::Ok => tracing::info!("reconcile: the last pass ended well again"),
            // Each failure was told with its finding.
            PassResult::Failed if pass.reason.is_empty() => {}
            result if result != former => {
                tracing::warn!(result = result.as_str(), "reconcile: {}", pass.reason)
            }
            result => tracing::debug!(result = result.as_str(), "reconcile: {}", pass.reason),
        }
    }
}

/// What a whole look saw.
struct Seen {
    found: BTreeMap<Finding, String>,
    objects: usize,
    firewall: Firewall,
}

fn finding_of(resource: &Resource) -> Option<Finding> {
    match resource {
        Resource::Cgroup { name } => Some(Finding::Cgroup(name.clone())),
        Resource::Directory { path } => Some(Finding::Directory(path.clone())),
        _ => None,
    }
}

fn joined(first: &str, second: &str) -> String {
    if first.is_empty() { second.to_owned() } else { format!("{first}; {second}") }
}

fn event_of(kind: EventKind, finding: &Finding, facts: &str) -> Event {
    Events::now(kind).with("kind", finding.kind()).with("finding", finding).with("facts", facts)
}

fn tell_new(new: &BTreeSet<Finding>, memory: &Memory, events: &Events) {
    for (i, finding) in new.iter().enumerate() {
        let Some(Suspect { facts, .. }) = memory.suspects.get(finding) else { continue };
        let what = if finding.is_leaked() { "seen without an owner" } else { "not whole any more" };
        events.tell(event_of(EventKind::FindingSeen, finding, facts).because(what));
        match i < NAMED {
            true => tracing::info!(kind = %finding.kind(), %finding, evidence = %facts, "{what}"),
            false => tracing::debug!(kind = %finding.kind(), %finding, evidence = %facts, "{what}"),
        }
    }
    if let Some(more) = new.len().checked_sub(NAMED).filter(|n| *n > 0) {
        tracing::info!("and {more} more findings like these");
    }
}

/// One event per action, and one per finding that stays.
fn tell(found: &Found, suspect: &mut Suspect, events: &Events) {
    let Found { finding, facts, sightings, age, outcome } = found;
    let (kind, seconds, again) = (finding.kind(), age.as_secs(), std::mem::replace(&mut suspect.told, true));
    let told = |kind, why: &str| events.tell(event_of(kind, finding, facts).because(why));
    match outcome {
        Outcome::Released => told(EventKind::FindingReleased, "seen often and long enough"),
        Outcome::Failed(why) => told(EventKind::FindingStays, why),
        Outcome::Spared => told(EventKind::FindingStays, "it has an owner now"),
        Outcome::Reported if !again => told(EventKind::FindingStays, "it is only reported"),
        Outcome::Waiting | Outcome::Due | Outcome::Reported => {}
    }
    macro_rules! event {
        ($level:ident, $($text:tt)+) => {
            tracing::$level!(%kind, %finding, sightings, seconds, evidence = %facts, $($text)+)
        };
    }
    match outcome {
        Outcome::Waiting | Outcome::Due => suspect.told = again,
        Outcome::Released if finding.is_leaked() => event!(info, "leaked, and released"),
        Outcome::Released => event!(warn, "not whole, and released"),
        Outcome::Failed(why) => event!(warn, "stays and is tried again: {why}"),
        Outcome::Spared => event!(info, "has an owner now and is left alone"),
        Outcome::Reported if again => {}
        Outcome::Reported if finding.can_be_released() => {
            event!(warn, "left alone since reconcile.action is report");
        }
        Outcome::Reported => event!(warn, "not whole; the sandbox is left as it is"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_overdue_after_three_intervals_and_some_patience() {
        let config = Reconcile {
            interval: Duration::from_secs(30),
            action: ReconcileAction::Clean,
            min_age: Duration::ZERO,
            max_share_percent: 20,
            patience: Duration::from_secs(60),
        };
        assert_eq!(overdue(Duration::from_secs(150), &config), None);
        assert_eq!(
            overdue(Duration::from_secs(151), &config).as_deref(),
            Some("the reconcile loop has not run for 151 s")
        );
    }
}
