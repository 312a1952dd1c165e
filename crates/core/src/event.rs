//! What happened on a node, as a value: one entry of the journal, of a stream to a client, of a webhook's body.

use std::collections::BTreeMap;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::record::Record;

/// One event. Numbers rise by one; where one is left out, an event was lost, and whoever reads is told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number, from 1, unique for the life of an instance's state directory.
    #[serde(default)]
    pub seq: u64,
    /// When it happened, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// What happened: a word of [`EventKind`], or one of a newer daemon's.
    pub kind: String,
    /// Id of the sandbox it is about; empty if about none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// That sandbox's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Why, in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Facts by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub evidence: BTreeMap<String, String>,
}

impl Event {
    /// An event without a number, which the journal gives.
    #[must_use]
    pub fn new(kind: EventKind, at_ms: u64) -> Self {
        Self {
            seq: 0,
            at_ms,
            kind: kind.as_str().to_owned(),
            sandbox: String::new(),
            name: String::new(),
            reason: String::new(),
            evidence: BTreeMap::new(),
        }
    }

    /// About this sandbox.
    #[must_use]
    pub fn about(self, record: &Record) -> Self {
        Self { sandbox: record.id.to_string(), name: record.name.to_string(), ..self }
    }

    /// Why it happened.
    #[must_use]
    pub fn because(self, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    /// With one more fact.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Display) -> Self {
        self.evidence.insert(name.to_owned(), value.to_string());
        self
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)?) => {
        /// What can happen.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum EventKind {
            $($(#[$doc])* $variant),+
        }

        impl EventKind {
            /// All of them.
            pub const ALL: &[EventKind] = &[$(EventKind::$variant),+];

            /// The word for it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(EventKind::$variant => $word),+ }
            }
        }
    };
}

kinds! {
    /// A daemon took the instance.
    DaemonStarted = "daemon-started",
    /// The daemon ends on purpose.
    DaemonEnding = "daemon-ending",
    /// The node's status is another.
    StatusChanged = "status-changed",
    /// The operator wants something else of the node.
    DesiredChanged = "desired-changed",
    /// A sandbox was asked for and admitted.
    SandboxCreating = "sandbox-creating",
    /// A creation ended early; what was made is released.
    SandboxCreateFailed = "sandbox-create-failed",
    /// A created sandbox's guest runs.
    SandboxRunning = "sandbox-running",
    /// A sandbox that ran on without a daemon is looked after again.
    SandboxAdopted = "sandbox-adopted",
    /// A VM ended by itself.
    SandboxExited = "sandbox-exited",
    /// What a sandbox owns is being released.
    SandboxDeleting = "sandbox-deleting",
    /// A release did not finish, or it cannot be told whether a VM lives.
    SandboxStuck = "sandbox-stuck",
    /// Nothing of a sandbox is left.
    SandboxDeleted = "sandbox-deleted",
    /// A slot could not be removed.
    SlotStuck = "slot-stuck",
    /// Slots whose names are taken by something that is not ours.
    SlotForeign = "slot-foreign",
    /// Leftovers of an earlier run were found.
    ReclaimBegan = "reclaim-began",
    /// Each leftover was tried once.
    ReclaimEnded = "reclaim-ended",
    /// A leftover did not go; it is tried again.
    LeftoverStuck = "leftover-stuck",
    /// A reconcile pass saw for the first time something that is not as the books say.
    FindingSeen = "finding-seen",
    /// A reconcile pass released what leaked.
    FindingReleased = "finding-released",
    /// A finding stays, and why.
    FindingStays = "finding-stays",
    /// A reconcile pass ended in another way than the one before.
    ReconcileChanged = "reconcile-changed",
    /// The host firewall was not whole.
    HostFirewall = "host-firewall",
}
