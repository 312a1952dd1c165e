//! What the engine is given. Parsed and checked by the binary; the engine takes it as it is.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use hearth_core::block::DiskRate;
use hearth_core::failpoint::Failpoints;
use hearth_core::network::SlotLayout;
use hearth_core::spec::VmmKind;

use crate::events::JournalConfig;
use crate::exits::KeepExits;
use crate::failpoint::Kill9;

/// Settings of one engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Names and addresses of this instance's slots.
    pub layout: SlotLayout,
    /// State directory shared by all instances: templates, kernels.
    pub store_dir: PathBuf,
    /// `<state>/<instance>`: records, disks.
    pub state_dir: PathBuf,
    /// `<run>/<instance>`: sockets, logs.
    pub run_dir: PathBuf,
    /// Slots kept ready.
    pub slot_pool: usize,
    /// Name servers of guests.
    pub dns: Vec<Ipv4Addr>,
    /// How fast the disks of a sandbox may be that does not say.
    pub disk_rate: DiskRate,
    /// How Firecracker is given its writable disk.
    pub firecracker_disk: FirecrackerDisk,
    /// Most indexes of the kernel's NBD client that are used; 0: all there are.
    pub nbd_devices: u32,
    /// Size of the cache of remote disks, which all instances of this state directory share, MiB.
    pub chunk_cache_mib: u64,
    /// This binary, to run as shim.
    pub shim_program: PathBuf,
    /// The guest agent's binary, packed into initramfs images.
    pub guest_program: PathBuf,
    /// Which VMMs there are.
    pub vmms: Vmms,
    /// Faults on purpose, for tests.
    pub failpoints: Failpoints,
    /// What `kill9` among them does.
    pub kill9: Kill9,
    /// What happens to leftovers at start.
    pub reclaim: Reclaim,
    /// The loop that looks for leaks from then on.
    pub reconcile: Reconcile,
    /// How long the release of one resource may take before the sandbox counts as stuck.
    pub release_deadline: Duration,
    /// How long a guest may take from start to ready.
    pub boot_deadline: Duration,
    /// Size at which a console log is turned over, bytes.
    pub console_cap_bytes: u64,
    /// Where events are kept; `None`: in memory alone.
    pub journal: Option<JournalConfig>,
    /// Time between two samples of what a sandbox uses; zero: none are taken.
    pub stats_interval: Duration,
    /// How long it is remembered how sandboxes ended.
    pub exits: KeepExits,
}

/// How Firecracker is given its writable disk: it takes files and block devices only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirecrackerDisk {
    /// As `Nbd` where the kernel has such a client, else as `File`.
    Auto,
    /// A file that it opens itself.
    File,
    /// A device of the kernel's NBD client, served by the shim.
    Nbd,
}

/// What happens to leftovers of an earlier run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reclaim {
    /// Whether ready waits for it.
    pub mode: ReclaimMode,
    /// Releases at once of what is no slot.
    pub parallelism: usize,
    /// Time a process of ours in a slot gets between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// How long `blocking` may put off ready, counted from the start; `None`: to the end.
    pub budget: Option<Duration>,
    /// For how many leftovers `blocking` waits; `None`: for all.
    pub budget_count: Option<u64>,
}

/// Whether ready waits for the release of leftovers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReclaimMode {
    /// Ready at once, leftovers released meanwhile.
    Background,
    /// Ready afterwards, or when a budget is spent.
    Blocking,
    /// Leftovers are reported and stay.
    Off,
}

impl ReclaimMode {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ReclaimMode::Background => "background",
            ReclaimMode::Blocking => "blocking",
            ReclaimMode::Off => "off",
        }
    }
}

/// The loop that looks for leaks while the daemon lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reconcile {
    /// Time between two passes.
    pub interval: Duration,
    /// What a pass may do.
    pub action: ReconcileAction,
    /// Least time from the first sighting of a leak to its release.
    pub min_age: Duration,
    /// Most that one pass may release, in percent of the objects seen; a few are always allowed.
    pub max_share_percent: u32,
    /// How long beyond three intervals the loop may not get on before it counts as stopped.
    pub patience: Duration,
}

/// What a reconcile pass may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReconcileAction {
    /// Release what leaked.
    Clean,
    /// Only report it.
    Report,
}

/// The VMMs this node can run.
#[derive(Debug, Clone)]
pub struct Vmms {
    /// What `auto` stands for here.
    pub auto: VmmKind,
    /// Why.
    pub auto_reason: String,
    /// Programs by kind, or why a kind cannot be used.
    pub programs: BTreeMap<&'static str, Result<PathBuf, String>>,
    /// Whether KVM runs an ordinary guest here; if not, why.
    pub kvm: Result<(), String>,
}

impl Vmms {
    /// The program of a kind.
    ///
    /// # Errors
    /// Why it cannot be used here and what to do.
    pub fn program(&self, kind: VmmKind) -> Result<PathBuf, String> {
        match self.programs.get(kind.as_str()) {
            Some(found) => found.clone(),
            None => Err(format!("{kind} is not enabled on this node")),
        }
    }
}
