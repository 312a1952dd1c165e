//! What a shim is told: `spec.json` in the sandbox's run directory, written by the daemon before the shim is
//! started. Together with the socket next to it this is the whole interface of a shim; a shim one version
//! older or newer must understand it, so fields are only ever added, with a default.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::block::{BlockSpec, DiskRate};
use crate::id::{InstanceName, SandboxId, SandboxName};
use crate::spec::VmmKind;

/// File name of the spec in a sandbox's run directory.
pub const SHIM_SPEC_FILE: &str = "spec.json";
/// Unix socket of the shim in a sandbox's run directory.
pub const SHIM_SOCKET: &str = "shim.sock";
/// Guest console in a sandbox's run directory; the older part is in the same name with `.1` added.
pub const CONSOLE_LOG: &str = "console.log";
/// FIFO in a sandbox's run directory to which a VMM writes its metrics.
pub const METRICS_FIFO: &str = "metrics.fifo";
/// The VMM's own messages in a sandbox's run directory.
pub const VMM_LOG: &str = "vmm.log";
/// The shim's own messages in a sandbox's run directory.
pub const SHIM_LOG: &str = "shim.log";
/// Version of the shim protocol; the daemon also speaks the one before.
pub const SHIM_PROTOCOL: u32 = 1;

/// Whether this build understands a shim of protocol `theirs`: its own version and the one before.
///
/// # Errors
/// In words, with what to do.
pub fn check_protocol(theirs: u32) -> Result<(), String> {
    spoken(theirs, SHIM_PROTOCOL)
}

fn spoken(theirs: u32, ours: u32) -> Result<(), String> {
    let (which, todo) = if theirs > ours {
        ("newer", "start the newer hearth again")
    } else if theirs.saturating_add(1) < ours {
        ("older", "delete the sandbox, or start the hearth that made it")
    } else {
        return Ok(());
    };
    Err(format!(
        "its shim speaks the {which} protocol {theirs}, this daemon {ours} and the one before; \
         its VM goes on, to reach it {todo}"
    ))
}

/// Everything a shim needs to run one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShimSpec {
    /// [`SHIM_PROTOCOL`] of the writer.
    pub protocol: u32,
    /// Whose.
    pub instance: InstanceName,
    /// Which life.
    pub id: SandboxId,
    /// Hostname of the guest.
    pub name: SandboxName,
    /// Which VMM.
    pub vmm: VmmKind,
    /// Its program, absolute.
    pub program: PathBuf,
    /// ELF kernel.
    pub kernel: PathBuf,
    /// Initramfs; none for a kernel that runs alone.
    pub initramfs: Option<PathBuf>,
    /// Read-only root disk (ext4), first disk of the guest.
    pub rootfs: Option<PathBuf>,
    /// Writable disk (ext4), second disk of the guest. With `block` the file of an overlay, which the shim makes.
    pub overlay: Option<PathBuf>,
    /// The disks go through the shim's block server; absent, the VMM opens their files itself.
    #[serde(default)]
    pub block: Option<BlockSpec>,
    /// How fast each disk may be whose file the VMM opens itself, where the VMM can limit that.
    #[serde(default)]
    pub drive_rate: DiskRate,
    /// Virtual CPUs.
    pub cpus: u32,
    /// MiB.
    pub memory_mib: u64,
    /// Network namespace file the VMM runs in; `None` only in tests without a slot.
    pub netns: Option<PathBuf>,
    /// Network card on the slot's tap, if the guest has one.
    pub net: Option<GuestNetSpec>,
    /// Whether the guest runs the agent; without it the VM counts as ready once it runs.
    pub agent: bool,
    /// Environment of every command.
    pub env: Vec<(String, String)>,
    /// Hard end, milliseconds since the Unix epoch.
    pub ends_at_ms: Option<u64>,
    /// `<run>/sandboxes/<id>`: sockets, logs.
    pub run_dir: PathBuf,
    /// `<state>/sandboxes/<id>`: exit record.
    pub state_dir: PathBuf,
    /// Size at which the console log is turned over, bytes. Two such parts are kept.
    pub console_cap_bytes: u64,
    /// Time between two samples of what the sandbox uses, milliseconds; 0: none are taken.
    #[serde(default = "stats_interval_ms")]
    pub stats_interval_ms: u64,
}

/// Of a shim started by a daemon that does not say.
fn stats_interval_ms() -> u64 {
    10_000
}

/// The guest's network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetSpec {
    /// Tap in the namespace.
    pub tap: String,
    /// MAC address.
    pub mac: String,
    /// Name servers for the guest's resolv.conf.
    pub dns: Vec<std::net::Ipv4Addr>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_one_version_older_is_understood_and_no_other() {
        assert_eq!(spoken(5, 5), Ok(()));
        assert_eq!(spoken(4, 5), Ok(()));
        assert!(spoken(3, 5).unwrap_err().contains("older protocol 3"));
        assert!(spoken(6, 5).unwrap_err().contains("newer protocol 6"));
        assert_eq!(check_protocol(SHIM_PROTOCOL), Ok(()));
    }
}
