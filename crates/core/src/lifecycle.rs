//! A sandbox's life:
//!
//! ```text
//! Creating ──► Running ──► Deleting ──► gone
//!     │           │            ▲
//!     └───────────┴────────────┘        any state may go to Stuck when a release does not finish,
//!                                        and leaves it when a later try does
//! ```

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SandboxState {
    /// Steps of creation are under way.
    Creating,
    /// The guest runs and takes commands.
    Running,
    /// The VM ended by itself; what it owned is being released.
    Exited,
    /// Everything it owned is being released.
    Deleting,
    /// A release did not finish; retried with back-off.
    Stuck,
}

impl SandboxState {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            SandboxState::Creating => "creating",
            SandboxState::Running => "running",
            SandboxState::Exited => "exited",
            SandboxState::Deleting => "deleting",
            SandboxState::Stuck => "stuck",
        }
    }
}

impl std::fmt::Display for SandboxState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// State of a network slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SlotState {
    /// Nothing exists under this number.
    Free,
    /// Being made.
    Building,
    /// Whole and waiting in the pool.
    Ready,
    /// Owned by a sandbox.
    Assigned,
    /// Given back, being put into its first state.
    Resetting,
    /// Being removed.
    Releasing,
    /// Found at start without an owner; to be released.
    Leaked,
    /// Something not ours has its name.
    Foreign(String),
    /// A release did not finish.
    Stuck(String),
}

impl SlotState {
    /// The word for it, as in `hearth_slots{state}`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            SlotState::Free => "free",
            SlotState::Building => "building",
            SlotState::Ready => "ready",
            SlotState::Assigned => "assigned",
            SlotState::Resetting => "resetting",
            SlotState::Releasing => "releasing",
            SlotState::Leaked => "leaked",
            SlotState::Foreign(_) => "foreign",
            SlotState::Stuck(_) => "stuck",
        }
    }
}
