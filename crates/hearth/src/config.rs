//! The daemon's configuration: its values and what must hold between them. Reading it from defaults, file,
//! environment and flags is in [`layers`]; the list of keys, from which flags, environment names and
//! `--print-config` follow, is in [`keys`].

pub(crate) mod keys;
pub(crate) mod layers;
mod observe;
mod value;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use hearth_core::block::DiskRate;
use hearth_core::id::{InstanceName, VethPrefix};
use hearth_core::network::{Cidr, SlotLayout};
use hearth_core::spec::VmmKind;
use hearth_host::backup::Backups;
use hearth_node::Failpoints;

pub(crate) use observe::{EventsConfig, LogConfig, LogFormat, MetricsConfig, OtlpConfig, Url, WebhookConfig};

/// Everything a daemon is told.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// Name of this daemon and tag of every host resource it makes.
    pub(crate) instance: InstanceName,
    /// Where gRPC and HTTP are served.
    pub(crate) listen: SocketAddr,
    /// Records, disks, templates, kernels. Shared by instances; see [`Config::instance_state_dir`].
    pub(crate) state_dir: PathBuf,
    /// Sockets, FIFOs, logs. Shared by instances; see [`Config::instance_run_dir`].
    pub(crate) run_dir: PathBuf,
    /// What runs a sandbox that does not ask for a VMM.
    pub(crate) vmm: VmmChoice,
    /// Firecracker's program; `None`: looked for in PATH.
    pub(crate) firecracker: Option<PathBuf>,
    /// QEMU's program; `None`: looked for in PATH.
    pub(crate) qemu: Option<PathBuf>,
    /// The guest agent; `None`: the embedded one, or the one beside this binary.
    pub(crate) guest: Option<PathBuf>,
    /// What clients must send as `authorization: Bearer …`.
    pub(crate) token: Option<String>,
    /// How long the start waits for whoever holds the lock or the port; 0: not at all.
    pub(crate) takeover_seconds: u64,
    /// Slots and addresses.
    pub(crate) network: NetworkConfig,
    /// How fast the disks of a sandbox may be that does not say.
    pub(crate) disk: DiskRate,
    /// How Firecracker is given its writable disk.
    pub(crate) firecracker_disk: FirecrackerDisk,
    /// Most indexes of the kernel's NBD client that are used; 0: all there are.
    pub(crate) nbd_devices: u32,
    /// The cache of remote disks.
    pub(crate) block: BlockConfig,
    /// What happens to leftovers at start.
    pub(crate) reclaim: ReclaimConfig,
    /// Copies of the host's firewall rules.
    pub(crate) backup: BackupConfig,
    /// The loop that runs from then on.
    pub(crate) reconcile: ReconcileConfig,
    /// Samples of what sandboxes use.
    pub(crate) stats: StatsConfig,
    /// What is remembered of sandboxes that are gone.
    pub(crate) exits: ExitsConfig,
    /// What happens to sandboxes when the daemon stops.
    pub(crate) shutdown: ShutdownConfig,
    /// The journal of what happens.
    pub(crate) events: EventsConfig,
    /// Events posted to somebody.
    pub(crate) webhook: WebhookConfig,
    /// Traces sent to a collector.
    pub(crate) otlp: OtlpConfig,
    /// The daemon's own log.
    pub(crate) log: LogConfig,
    /// What `/metrics` shows.
    pub(crate) metrics: MetricsConfig,
    /// Faults on purpose, for tests.
    pub(crate) failpoints: Failpoints,
    /// Whether sandboxes may run without a VMM, for tests.
    pub(crate) process_vmm: bool,
}

impl fmt::Debug for Config {
    /// What `--print-config` shows: the token stays hidden.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(keys::KEYS.iter().map(|key| (key.name, (key.get)(self)))).finish()
    }
}

/// `[network]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NetworkConfig {
    /// First part of host veth names.
    pub(crate) veth_prefix: VethPrefix,
    /// One /31 per slot.
    pub(crate) cidr: Cidr,
    /// Prepared slots kept ready.
    pub(crate) slot_pool: usize,
    /// Name servers of guests.
    pub(crate) dns: Vec<Ipv4Addr>,
}

/// `[reclaim]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReclaimConfig {
    /// Whether ready waits for it.
    pub(crate) mode: ReclaimMode,
    /// Releases at once.
    pub(crate) parallelism: u32,
    /// Time that `blocking` may take; 0: no budget.
    pub(crate) budget_seconds: u64,
    /// Leftovers that `blocking` may release; 0: no budget.
    pub(crate) budget_count: u64,
    /// Least age of a leftover.
    pub(crate) grace_seconds: u64,
}

/// `[block]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockConfig {
    /// Size of the cache of remote disks, MiB.
    pub(crate) cache_mib: u64,
}

impl BlockConfig {
    /// What it may be: a smaller one would only carry chunks in and out, a larger one is no limit on any disk.
    pub(crate) const CACHE_MIB: std::ops::RangeInclusive<u64> =
        hearth_vmm::block::LEAST_CACHE >> 20..=1 << 30;
}

/// `[backup]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackupConfig {
    /// How many are kept; 0: none are made.
    pub(crate) keep: usize,
}

/// `[reconcile]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReconcileConfig {
    /// Time between two passes.
    pub(crate) interval_seconds: u64,
    /// Whether a pass may remove.
    pub(crate) action: ReconcileAction,
    /// Least time from the first sighting of a leak to its release.
    pub(crate) min_age_seconds: u64,
    /// Most that one pass may release, in percent of the objects seen.
    pub(crate) max_share_percent: u32,
}

/// `[stats]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StatsConfig {
    /// Between two samples of one sandbox; 0: none are taken.
    pub(crate) interval_seconds: u64,
}

/// `[exits]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExitsConfig {
    /// How long it is kept how a sandbox ended; 0: not at all.
    pub(crate) keep_seconds: u64,
    /// How many ends are kept at most.
    pub(crate) keep_count: usize,
}

/// `[shutdown]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShutdownConfig {
    /// What happens to running sandboxes.
    pub(crate) mode: ShutdownMode,
    /// How long `drain` waits for them.
    pub(crate) drain_seconds: u64,
}

/// Which VMM runs a sandbox that does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VmmChoice {
    /// Firecracker where KVM runs an ordinary guest, else qemu.
    Auto,
    /// Always this one.
    Only(VmmKind),
}

impl FromStr for VmmChoice {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(VmmChoice::Auto),
            _ => s
                .parse()
                .map(VmmChoice::Only)
                .map_err(|_| format!("{s:?} is none of auto, firecracker, qemu")),
        }
    }
}

impl fmt::Display for VmmChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VmmChoice::Auto => f.pad("auto"),
            VmmChoice::Only(kind) => kind.fmt(f),
        }
    }
}

/// A closed set of words as an enum.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name {
            $($(#[$vdoc])* $variant),+
        }

        impl FromStr for $name {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                match s {
                    $($word => Ok($name::$variant),)+
                    _ => Err(format!("{s:?} is none of {}", [$($word),+].join(", "))),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $($name::$variant => $word),+ })
            }
        }
    };
}

words!(
    /// How Firecracker is given its writable disk.
    FirecrackerDisk {
        /// As `nbd` where the kernel has such a client, else as `file`.
        Auto = "auto",
        /// A file that it opens itself.
        File = "file",
        /// A device of the kernel's NBD client, served by the sandbox's shim.
        Nbd = "nbd",
    }
);

words!(
    /// Whether ready waits for the release of leftovers.
    ReclaimMode {
        /// Ready at once, leftovers released meanwhile.
        Background = "background",
        /// Ready afterwards, or when a budget is used up.
        Blocking = "blocking",
        /// Leftovers are only reported.
        Off = "off",
    }
);

words!(
    /// What a reconcile pass may do.
    ReconcileAction {
        /// Release what leaked.
        Clean = "clean",
        /// Only report it.
        Report = "report",
    }
);

words!(
    /// What happens to running sandboxes when the daemon stops.
    ShutdownMode {
        /// They run on; the next daemon adopts them.
        Detach = "detach",
        /// They are waited for.
        Drain = "drain",
        /// They are deleted.
        Kill = "kill",
    }
);

/// Bytes of the longest path below an instance's run directory: `/sandboxes/<id>/` and a socket name.
const LONGEST_BELOW_RUN: usize = "/sandboxes/".len() + 16 + 1 + 16;
/// A Unix socket address holds 108 bytes, the closing NUL included.
const SOCKET_PATH_MAX: usize = 107;

impl Config {
    /// Records and disks of this instance.
    pub(crate) fn instance_state_dir(&self) -> PathBuf {
        self.state_dir.join(self.instance.as_str())
    }

    /// Sockets and logs of this instance.
    pub(crate) fn instance_run_dir(&self) -> PathBuf {
        self.run_dir.join(self.instance.as_str())
    }

    /// Where the host's firewall rules are saved, if they are.
    pub(crate) fn backups(&self) -> Option<Backups> {
        let (dir, instance) = (self.state_dir.join("backups"), self.instance.to_string());
        (self.backup.keep > 0).then_some(Backups { dir, keep: self.backup.keep, instance })
    }

    /// Names and addresses of this instance's slots.
    pub(crate) fn slot_layout(&self) -> SlotLayout {
        SlotLayout {
            instance: self.instance.clone(),
            veth_prefix: self.network.veth_prefix.clone(),
            cidr: self.network.cidr,
        }
    }

    /// What must hold between keys; each key alone was checked when it was read. Names the first key at
    /// fault and says what is wrong.
    fn check(&self) -> Result<(), (&'static str, String)> {
        if !is_loopback(self.listen.ip()) && self.token.is_none() {
            return Err((
                "listen",
                format!(
                    "{} is not a loopback address and no token is set, so anyone who reaches it could run code; \
                     set a token (HEARTH_TOKEN) or listen on 127.0.0.1",
                    self.listen
                ),
            ));
        }
        for (key, dir) in [("state_dir", &self.state_dir), ("run_dir", &self.run_dir)] {
            if !dir.is_absolute() {
                return Err((key, format!("{dir:?} is not absolute; write the whole path")));
            }
        }
        let run = self.instance_run_dir();
        let longest = run.as_os_str().len() + LONGEST_BELOW_RUN;
        if longest > SOCKET_PATH_MAX {
            let over = longest - SOCKET_PATH_MAX;
            return Err((
                "run_dir",
                format!("sockets below {run:?} would have paths {over} bytes too long; choose a shorter one"),
            ));
        }
        let capacity = self.network.cidr.slot_capacity();
        if capacity == 0 {
            return Err((
                "network.cidr",
                format!("{} has no room for a slot; use /29 or larger", self.network.cidr),
            ));
        }
        if self.network.slot_pool > usize::try_from(capacity).unwrap_or(usize::MAX) {
            return Err((
                "network.slot_pool",
                format!(
                    "{} is more than the {capacity} slots of {}",
                    self.network.slot_pool, self.network.cidr
                ),
            ));
        }
        for (key, value) in [
            ("reclaim.parallelism", u64::from(self.reclaim.parallelism)),
            ("reconcile.interval_seconds", self.reconcile.interval_seconds),
        ] {
            if value == 0 {
                return Err((key, "0 is not allowed; use 1 or more".into()));
            }
        }
        for (key, value, range) in [
            ("disk.mib_per_second", self.disk.mib_per_second, DiskRate::MIB_PER_SECOND),
            ("disk.iops", self.disk.iops, DiskRate::IOPS),
            ("disk.burst_ms", self.disk.burst_ms, DiskRate::BURST_MS),
        ] {
            if !range.contains(&value) {
                return Err((key, format!("{value} is not from {} to {}", range.start(), range.end())));
            }
        }
        let cache = self.block.cache_mib;
        if !BlockConfig::CACHE_MIB.contains(&cache) {
            let (least, most) = (BlockConfig::CACHE_MIB.start(), BlockConfig::CACHE_MIB.end());
            return Err(("block.cache_mib", format!("{cache} is not from {least} to {most}")));
        }
        let share = self.reconcile.max_share_percent;
        if !(1..=100).contains(&share) {
            return Err(("reconcile.max_share_percent", format!("{share} is not from 1 to 100")));
        }
        observe::check(self)
    }
}

/// `::ffff:127.0.0.1` is loopback too.
fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
