//! Creation of a sandbox as data: an ordered list of steps. Release is the same list backwards and accepts
//! any prefix, half a step included.

use serde::{Deserialize, Serialize};

/// One step of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// State directory and first record.
    Record,
    /// Run directory for sockets and logs.
    RunDirectory,
    /// Writable disk.
    Disk,
    /// Network slot from the pool.
    Slot,
    /// Control group.
    Cgroup,
    /// Shim process, connected.
    Shim,
    /// VMM started, guest ready.
    Boot,
}

impl Step {
    /// All steps in order of creation.
    pub const ALL: [Step; 7] =
        [Step::Record, Step::RunDirectory, Step::Disk, Step::Slot, Step::Cgroup, Step::Shim, Step::Boot];

    /// The word for it, as in failpoint names and progress lines.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Record => "record",
            Step::RunDirectory => "run-directory",
            Step::Disk => "disk",
            Step::Slot => "slot",
            Step::Cgroup => "cgroup",
            Step::Shim => "shim",
            Step::Boot => "boot",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for Step {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Step::ALL
            .into_iter()
            .find(|step| step.as_str() == s)
            .ok_or_else(|| format!("no creation step is called {s:?}"))
    }
}
