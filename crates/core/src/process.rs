//! Identity of a process: a pid alone is a number the kernel hands out again.

use serde::{Deserialize, Serialize};

/// What proves that a pid is still the process we started (law 3).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Process id in the host's pid namespace.
    pub pid: u32,
    /// Clock ticks after boot, field 22 of `/proc/<pid>/stat` (proc_pid_stat(5)).
    pub start_time: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot it was started in.
    pub boot_id: String,
    /// Last part of the path of the cgroup it is in or below, among those of the instance. `None`: it is in
    /// none of ours, and the three facts above have to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

/// What became of a recorded process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Liveness {
    /// The same process still runs.
    Alive,
    /// It ended (or is a zombie), or its pid now belongs to another process, which a wrong start time or
    /// another cgroup tells, or the host was booted since.
    Gone,
    /// The facts could not be read; unknown is not gone (law 4).
    Unknown(String),
}
