//! What a user asks for, checked before anything is made.

use serde::{Deserialize, Serialize};

use crate::block::DiskRate;
use crate::id::TemplateName;

/// One MiB in bytes.
pub const MIB: u64 = 1024 * 1024;

/// Virtual CPUs a sandbox may have (Firecracker's own limit is 32).
pub const CPUS: std::ops::RangeInclusive<u32> = 1..=32;
/// Guest memory in MiB. Below 64 MiB a stock distribution kernel does not reach init.
pub const MEMORY_MIB: std::ops::RangeInclusive<u64> = 64..=1024 * 1024;
/// Size of the writable disk in MiB.
pub const DISK_MIB: std::ops::RangeInclusive<u64> = 16..=16 * 1024 * 1024;
/// Size of the writable disk if none is asked for, MiB.
pub const DEFAULT_DISK_MIB: u64 = 512;
/// Longest life of a sandbox in seconds: 30 days.
pub const TIMEOUT_SECONDS: std::ops::RangeInclusive<u64> = 1..=30 * 24 * 3600;

/// Bytes of all variables of a sandbox together: they reach the guest in one frame.
pub const ENV_BYTES: usize = 32 * 1024;

/// Which VMM runs a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmKind {
    /// Firecracker on KVM.
    Firecracker,
    /// QEMU, on KVM where the CPU has it, else plain emulation.
    Qemu,
    /// No machine at all: the guest agent as a plain process on the host. For hearth's own tests of
    /// everything around a VMM; isolates nothing.
    Process,
}

impl VmmKind {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            VmmKind::Firecracker => "firecracker",
            VmmKind::Qemu => "qemu",
            VmmKind::Process => "process",
        }
    }
}

impl std::fmt::Display for VmmKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for VmmKind {
    type Err = SpecError;
    fn from_str(s: &str) -> Result<Self, SpecError> {
        match s {
            "firecracker" => Ok(VmmKind::Firecracker),
            "qemu" => Ok(VmmKind::Qemu),
            "process" => Ok(VmmKind::Process),
            _ => Err(SpecError { field: "vmm", why: format!("{s:?} is none of auto, firecracker, qemu") }),
        }
    }
}

/// A sandbox as asked for, every default filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Template it starts from.
    pub template: TemplateName,
    /// Virtual CPUs.
    pub cpus: u32,
    /// Guest memory, MiB.
    pub memory_mib: u64,
    /// Writable disk, MiB.
    pub disk_mib: u64,
    /// Life in seconds from creation; `None` for no end.
    pub timeout_seconds: Option<u64>,
    /// Whether the guest has a network card.
    pub net: bool,
    /// Which VMM.
    pub vmm: VmmKind,
    /// Environment of every command.
    pub env: Vec<(String, String)>,
    /// How fast its disks may be.
    #[serde(default)]
    pub disk_rate: DiskRate,
}

/// A value outside what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct SpecError {
    /// The option.
    pub field: &'static str,
    /// What is wrong and what is allowed.
    pub why: String,
}

fn within<T: PartialOrd + std::fmt::Display>(
    field: &'static str,
    value: T,
    range: &std::ops::RangeInclusive<T>,
    unit: &str,
) -> Result<(), SpecError> {
    if range.contains(&value) {
        return Ok(());
    }
    let why = format!("{value}{unit} is outside {}{unit} to {}{unit}", range.start(), range.end());
    Err(SpecError { field, why })
}

impl SandboxSpec {
    /// Checks every number.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), SpecError> {
        within("cpus", self.cpus, &CPUS, "")?;
        within("memory", self.memory_mib, &MEMORY_MIB, " MiB")?;
        within("disk", self.disk_mib, &DISK_MIB, " MiB")?;
        if let Some(t) = self.timeout_seconds {
            within("timeout", t, &TIMEOUT_SECONDS, " s")?;
        }
        let rate = &self.disk_rate;
        within("disk bandwidth", rate.mib_per_second, &DiskRate::MIB_PER_SECOND, " MiB/s")?;
        within("disk iops", rate.iops, &DiskRate::IOPS, "")?;
        within("disk burst", rate.burst_ms, &DiskRate::BURST_MS, " ms")?;
        for (key, value) in &self.env {
            if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
                return Err(SpecError {
                    field: "env",
                    why: format!("{key:?} is not a variable name, or its value has a NUL byte"),
                });
            }
        }
        let bytes: usize = self.env.iter().map(|(key, value)| key.len() + value.len() + 2).sum();
        if bytes > ENV_BYTES {
            return Err(SpecError {
                field: "env",
                why: format!("{bytes} bytes are more than {ENV_BYTES}; put large values into a file"),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> SandboxSpec {
        SandboxSpec {
            template: "base".parse().unwrap(),
            cpus: 1,
            memory_mib: 256,
            disk_mib: 512,
            timeout_seconds: None,
            net: true,
            vmm: VmmKind::Qemu,
            env: vec![],
            disk_rate: DiskRate::default(),
        }
    }

    #[test]
    fn numbers_out_of_range_name_the_field_and_the_range() {
        assert_eq!(spec().validate(), Ok(()));
        let err = SandboxSpec { cpus: 0, ..spec() }.validate().unwrap_err();
        assert_eq!(err.to_string(), "cpus: 0 is outside 1 to 32");
        assert!(SandboxSpec { cpus: 10_000, ..spec() }.validate().is_err());
        let err = SandboxSpec { memory_mib: 3, ..spec() }.validate().unwrap_err();
        assert_eq!(err.to_string(), "memory: 3 MiB is outside 64 MiB to 1048576 MiB");
        assert!(SandboxSpec { timeout_seconds: Some(0), ..spec() }.validate().is_err());
        let disk_rate = DiskRate { mib_per_second: 4, ..DiskRate::default() };
        assert_eq!(SandboxSpec { disk_rate, ..spec() }.validate(), Ok(()));
        let disk_rate = DiskRate { burst_ms: 60_001, ..DiskRate::default() };
        assert!(SandboxSpec { disk_rate, ..spec() }.validate().is_err());
        assert!(SandboxSpec { env: vec![("A=B".into(), String::new())], ..spec() }.validate().is_err());
        assert!(SandboxSpec { env: vec![("A".into(), "x".repeat(40_000))], ..spec() }.validate().is_err());
    }
}
