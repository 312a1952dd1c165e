//! How a VMM ended. Written once by the shim, which alone may wait for it.

use serde::{Deserialize, Serialize};

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
}

impl ExitRecord {
    /// Version written by this build.
    pub const SCHEMA: u32 = 1;

    /// How it ended in one line: `vmm-failed, signal 9: …`.
    #[must_use]
    pub fn words(&self) -> String {
        let mut words = self.reason.as_str().to_owned();
        // What was asked for is told by the reason alone: a stop ends in a signal of ours.
        if self.reason == ExitReason::VmmFailed {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitReason {
    /// The guest shut down or its init ended.
    GuestShutdown,
    /// Asked to stop by the daemon or a user.
    Stopped,
    /// The end time came.
    EndTime,
    /// The VMM crashed, was killed from outside, or never started.
    VmmFailed,
}

impl ExitReason {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ExitReason::GuestShutdown => "guest-shutdown",
            ExitReason::Stopped => "stopped",
            ExitReason::EndTime => "end-time",
            ExitReason::VmmFailed => "vmm-failed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_tell_the_signal_of_a_failure_and_not_that_of_a_stop() {
        let record = |reason, code, signal, detail: &str| ExitRecord {
            schema: ExitRecord::SCHEMA,
            reason,
            code,
            signal,
            at_ms: 1,
            detail: detail.into(),
        };
        let words = record(ExitReason::VmmFailed, None, Some(9), "").words();
        assert_eq!(words, "vmm-failed, signal 9");
        let words = record(ExitReason::VmmFailed, Some(1), None, "no tap").words();
        assert_eq!(words, "vmm-failed, exit code 1: no tap");
        assert_eq!(record(ExitReason::Stopped, None, Some(9), "").words(), "stopped");
    }
}
