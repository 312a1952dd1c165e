//! What passes tell: one value per pass for who asked, and one for all passes for metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_core::reconcile::{Finding, Suspect};
use hearth_core::resource::Kind;

/// How a pass ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum PassResult {
    /// All was seen, and what was due is released, or reported where only that is wanted.
    #[default]
    Ok,
    /// Something could not be released or made; it is tried again.
    Failed,
    /// Too much was due; nothing was changed.
    Capped,
    /// Something could not be seen; nothing was changed.
    Incomplete,
}

impl PassResult {
    /// All of them.
    pub const ALL: [PassResult; 4] =
        [PassResult::Ok, PassResult::Failed, PassResult::Capped, PassResult::Incomplete];

    /// The word for it, as in `hearth_reconcile_passes_total{result}`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            PassResult::Ok => "ok",
            PassResult::Failed => "failed",
            PassResult::Capped => "capped",
            PassResult::Incomplete => "incomplete",
        }
    }
}

/// What became of a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Not seen often or long enough, or there is too much of it.
    Waiting,
    /// The next pass releases it, if it is seen then.
    Due,
    /// Nothing is done about it: so it is configured, or a running sandbox has it.
    Reported,
    /// Gone.
    Released,
    /// Somebody's by the time of the action.
    Spared,
    /// Could not be released, and why; tried again.
    Failed(String),
}

impl Outcome {
    /// The word for it.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Outcome::Waiting => "waiting",
            Outcome::Due => "due",
            Outcome::Reported => "reported",
            Outcome::Released => "released",
            Outcome::Spared => "spared",
            Outcome::Failed(_) => "failed",
        }
    }
}

/// One finding of a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What.
    pub finding: Finding,
    /// Kernel facts in words.
    pub facts: String,
    /// Whole passes in a row that saw it.
    pub sightings: u32,
    /// Since the first of them.
    pub age: Duration,
    /// What became of it.
    pub outcome: Outcome,
}

impl Found {
    pub(super) fn new(finding: &Finding, suspect: &Suspect, now: Duration, outcome: Outcome) -> Self {
        Self {
            finding: finding.clone(),
            facts: suspect.facts.clone(),
            sightings: suspect.sightings,
            age: now.saturating_sub(suspect.first),
            outcome,
        }
    }
}

/// One pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pass {
    /// How it ended.
    pub result: PassResult,
    /// Why not well; and what else there is to say.
    pub reason: String,
    /// Slots, cgroups and directories seen.
    pub objects: usize,
    /// What is not as the books say.
    pub findings: Vec<Found>,
    /// From its begin to its end.
    pub took: Duration,
}

/// All passes since the start of the daemon; dry runs do not count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReconcileReport {
    /// By result.
    pub passes: BTreeMap<PassResult, u64>,
    /// Findings by what they are: `leaked`, `gone` (a part of a slot that has an owner), `host-firewall`.
    pub findings: BTreeMap<&'static str, u64>,
    /// Leaked as the last whole pass saw it, without what is under release.
    pub leaked: BTreeMap<Kind, u64>,
    /// The last pass: its end in milliseconds since the Unix epoch, and how long it took.
    pub last: Option<(u64, Duration)>,
}
