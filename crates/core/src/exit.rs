//! How a VMM ended and why. Written once by the shim, which alone may wait for it; kept by the daemon for a while
//! after everything else of the sandbox is gone.

use serde::{Deserialize, Serialize};

use crate::block::DiskStats;
use crate::id::{SandboxId, SandboxName, TemplateName};
use crate::spec::VmmKind;
use crate::usage::{CgroupCounters, Usage};

/// File name of the exit record in a sandbox's state directory.
pub const EXIT_RECORD_FILE: &str = "exit.json";

/// `exit.json`: how the VMM ended and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitRecord {
    /// Version of this file's form.
    pub schema: u32,
    /// Why it ended.
    pub reason: ExitReason,
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal number, if one ended it.
    pub signal: Option<i32>,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Words for an operator: the last error lines of the VMM, say.
    pub detail: String,
    /// From the VMM's start to its end, milliseconds; absent if it never started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_ms: Option<u64>,
    /// CPU time in all, microseconds: of the cgroup after the end, or as last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us: Option<u64>,
    /// The last sample before the end. What the VMM told in its last moment is in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Box<Usage>>,
    /// The cgroup's counters after the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<Box<CgroupCounters>>,
    /// Processes that the guest's kernel killed since the guest had no memory left, as its console told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_oom_kills: Option<u64>,
    /// What was counted of each disk until it was closed; empty where the VMM opens the files itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskStats>,
}

impl ExitRecord {
    /// Version written by this build.
    pub const SCHEMA: u32 = 1;

    /// A record that says why and when, and nothing of a process.
    #[must_use]
    pub fn new(reason: ExitReason, at_ms: u64, detail: impl Into<String>) -> Self {
        Self {
            schema: Self::SCHEMA,
            reason,
            code: None,
            signal: None,
            at_ms,
            detail: detail.into(),
            wall_ms: None,
            cpu_us: None,
            usage: None,
            cgroup: None,
            guest_oom_kills: None,
            disks: vec![],
        }
    }

    /// How it ended in one line: `killed, signal 9: …`.
    #[must_use]
    pub fn words(&self) -> String {
        let mut words = self.reason.as_str().to_owned();
        // What was asked for is told by the reason alone: a stop ends in a signal of ours.
        if matches!(self.reason, ExitReason::VmmFailed | ExitReason::Killed | ExitReason::Unknown) {
            let how = self.signal.map(|n| format!(", signal {n}"));
            words.extend(how.or_else(|| self.code.map(|n| format!(", exit code {n}"))));
        }
        if !self.detail.is_empty() {
            words.push_str(": ");
            words.push_str(&self.detail);
        }
        words
    }
}

/// Why a VMM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitReason {
    /// The guest shut down or its init ended.
    GuestShutdown,
    /// The guest's kernel panicked; told by its console.
    GuestPanic,
    /// The guest's kernel panicked since it had no memory left; told by its console.
    GuestOom,
    /// A user asked for it.
    Stopped,
    /// The daemon ended it by a rule of its own: a creation that failed, or a shutdown that deletes.
    Policy,
    /// The end time came.
    EndTime,
    /// The host's kernel killed the VMM since memory ran out, in its cgroup or on the host.
    VmmOom,
    /// Somebody else's signal ended the VMM.
    Killed,
    /// The VMM crashed, gave up, or never started.
    VmmFailed,
    /// What serves its disks failed.
    BlockFailed,
    /// What serves its memory failed.
    MemoryFailed,
    /// A reason that only a newer build knows.
    #[serde(other)]
    Unknown,
}

impl ExitReason {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::GuestShutdown,
        Self::GuestPanic,
        Self::GuestOom,
        Self::Stopped,
        Self::Policy,
        Self::EndTime,
        Self::VmmOom,
        Self::Killed,
        Self::VmmFailed,
        Self::BlockFailed,
        Self::MemoryFailed,
        Self::Unknown,
    ];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ExitReason::GuestShutdown => "guest-shutdown",
            ExitReason::GuestPanic => "guest-panic",
            ExitReason::GuestOom => "guest-oom",
            ExitReason::Stopped => "stopped",
            ExitReason::Policy => "policy",
            ExitReason::EndTime => "end-time",
            ExitReason::VmmOom => "vmm-oom",
            ExitReason::Killed => "killed",
            ExitReason::VmmFailed => "vmm-failed",
            ExitReason::BlockFailed => "block-failed",
            ExitReason::MemoryFailed => "memory-failed",
            ExitReason::Unknown => "unknown",
        }
    }
}

/// A sandbox that is gone, and how it ended: what the daemon keeps for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptExit {
    /// Version of this file's form.
    pub schema: u32,
    /// Which life.
    pub id: SandboxId,
    /// What the user called it.
    pub name: SandboxName,
    /// What it was made from.
    pub template: TemplateName,
    /// What ran it.
    pub vmm: VmmKind,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Memory, MiB.
    pub memory_mib: u64,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    /// How it ended.
    pub exit: ExitRecord,
}

impl KeptExit {
    /// Version written by this build.
    pub const SCHEMA: u32 = 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_tell_the_signal_of_a_failure_and_not_that_of_a_stop() {
        let record = |reason, code, signal, detail: &str| ExitRecord {
            code,
            signal,
            ..ExitRecord::new(reason, 1, detail)
        };
        assert_eq!(record(ExitReason::Killed, None, Some(9), "").words(), "killed, signal 9");
        let words = record(ExitReason::VmmFailed, Some(1), None, "no tap").words();
        assert_eq!(words, "vmm-failed, exit code 1: no tap");
        assert_eq!(record(ExitReason::Stopped, None, Some(9), "").words(), "stopped");
    }

    #[test]
    fn a_record_of_the_former_form_is_read() {
        let former = r#"{
            "schema": 1, "reason": "vmm-failed", "code": null, "signal": 9, "at_ms": 1760000000000, "detail": "x"
        }"#;
        let read: ExitRecord = serde_json::from_str(former).unwrap();
        let expected =
            ExitRecord { signal: Some(9), ..ExitRecord::new(ExitReason::VmmFailed, 1_760_000_000_000, "x") };
        assert_eq!(read, expected);
    }

    #[test]
    fn a_record_of_a_newer_form_is_read_as_far_as_it_is_known() {
        let newer = r#"{
            "schema": 2, "reason": "struck-by-lightning", "code": 7, "signal": null, "at_ms": 1, "detail": "",
            "usage": {"at_ms": 1, "volts": 9000}, "weather": "bad"
        }"#;
        let read: ExitRecord = serde_json::from_str(newer).unwrap();
        assert_eq!(read.reason, ExitReason::Unknown);
        assert_eq!(read.words(), "unknown, exit code 7");
        assert_eq!(read.usage.as_deref(), Some(&Usage { at_ms: 1, ..Usage::default() }));
    }

    #[test]
    fn each_reason_is_written_as_its_word() {
        for reason in ExitReason::ALL {
            assert_eq!(serde_json::to_string(&reason).unwrap(), format!("\"{}\"", reason.as_str()));
        }
    }
}
