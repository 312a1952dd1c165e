//! What a sandbox has used: counters since its VMM was started, and amounts at one moment. What could not be read
//! is absent, never 0. Fields are only ever added, with a default: exit records on disk hold these.

use serde::{Deserialize, Serialize};

/// A disk as its user sees it, all disks of the guest together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskCounters {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Read requests; 0 where only bytes are counted.
    pub reads: u64,
    /// Write requests; 0 where only bytes are counted.
    pub writes: u64,
}

/// A network card as the guest sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetCounters {
    /// Bytes that came to the guest.
    pub received_bytes: u64,
    /// Bytes that the guest sent.
    pub sent_bytes: u64,
    /// Packets that came to the guest.
    pub received_packets: u64,
    /// Packets that the guest sent.
    pub sent_packets: u64,
}

/// What the VMM itself told, added up since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmmSample {
    /// When it was told last, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Disks of the guest.
    pub disk: DiskCounters,
    /// Cards of the guest, if the VMM counts them.
    pub net: Option<NetCounters>,
    /// Samples that came.
    pub samples: u64,
    /// Samples that were announced and did not come, or could not be read: the counters lack them.
    pub missed: u64,
}

/// Use of one sandbox at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// CPU time since the start, microseconds: of the sandbox's cgroup, shim included, or where it has none of the
    /// VMM's process.
    pub cpu_us: Option<u64>,
    /// Memory of the host in use now, bytes: of the cgroup where it has the memory controller, else of the VMM.
    pub memory_bytes: Option<u64>,
    /// The VMM's largest resident set so far, bytes.
    pub memory_peak_bytes: Option<u64>,
    /// Disk, told by the VMM where it counts, else by the kernel of the VMM's process.
    pub disk: Option<DiskCounters>,
    /// Network, counted on the slot's tap.
    pub net: Option<NetCounters>,
    /// What the VMM told.
    pub vmm: Option<VmmSample>,
}

/// Counters of a sandbox's cgroup; each is absent where the host has no controller for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CgroupCounters {
    /// CPU time, microseconds (`cpu.stat`, present without a controller).
    pub cpu_us: Option<u64>,
    /// Memory now, bytes (`memory.current`).
    pub memory_bytes: Option<u64>,
    /// Largest so far, bytes (`memory.peak`, Linux 5.19).
    pub memory_peak_bytes: Option<u64>,
    /// Processes ended by any kind of OOM killer (`memory.events`).
    pub oom_kills: Option<u64>,
    /// Bytes read from devices (`io.stat`).
    pub read_bytes: Option<u64>,
    /// Bytes written to devices (`io.stat`).
    pub written_bytes: Option<u64>,
}
