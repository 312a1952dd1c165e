//! The list of configuration keys. Flag `--network-cidr`, variable `HEARTH_NETWORK_CIDR` and the TOML key
//! `cidr` in `[network]` are one entry here: a key added to it has all three.

use super::value::{ConfigValue, Given};
use super::{
    BackupConfig, BlockConfig, EventsConfig, ExitsConfig, LogConfig, LogFormat, NetworkConfig, ReclaimConfig,
    ReconcileConfig, ShutdownConfig, StatsConfig,
};
use super::{Config, FirecrackerDisk, ReclaimMode, ReconcileAction, ShutdownMode, VmmChoice};

/// One configuration key.
pub(crate) struct Key {
    /// Section and name, `network.cidr`.
    pub(crate) name: &'static str,
    /// What stands for the value in help.
    pub(crate) placeholder: &'static str,
    /// One line of help.
    pub(crate) help: &'static str,
    pub(super) set: fn(&mut Config, Given<'_>) -> Result<(), String>,
    pub(super) get: fn(&Config) -> Option<toml::Value>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl Key {
    /// The section, empty for the top level.
    pub(crate) fn section(&self) -> &'static str {
        self.name.split_once('.').map_or("", |(section, _)| section)
    }

    /// The name inside the section.
    pub(crate) fn leaf(&self) -> &'static str {
        self.name.split_once('.').map_or(self.name, |(_, leaf)| leaf)
    }

    /// The flag without its dashes: `network-cidr`.
    pub(crate) fn flag(&self) -> String {
        self.name.replace(['.', '_'], "-")
    }

    /// Whether help and listings leave it out while it is not set.
    pub(crate) fn hidden(&self) -> bool {
        self.section() == "test"
    }

    /// The environment variable: `HEARTH_NETWORK_CIDR`.
    pub(crate) fn variable(&self) -> String {
        format!("HEARTH_{}", self.name.replace('.', "_").to_ascii_uppercase())
    }
}

macro_rules! key {
    ($name:literal, $placeholder:literal, $($field:ident).+, $help:literal) => {
        Key {
            name: $name,
            placeholder: $placeholder,
            help: $help,
            set: |config, given| {
                config.$($field).+ = ConfigValue::read(given)?;
                Ok(())
            },
            get: |config| config.$($field).+.write(),
        }
    };
}

/// All keys, in the order they are shown.
pub(crate) static KEYS: &[Key] = &[
    key!("instance", "NAME", instance, "Name of this daemon; tags every host resource it makes"),
    key!("listen", "ADDR:PORT", listen, "Address for gRPC and HTTP; not loopback only with a token"),
    key!("state_dir", "DIR", state_dir, "Records, disks, templates, kernels"),
    key!("run_dir", "DIR", run_dir, "Sockets, FIFOs, logs"),
    key!("vmm", "VMM", vmm, "auto, firecracker or qemu, for sandboxes that do not say"),
    key!("firecracker", "FILE", firecracker, "Firecracker's program, if not in PATH"),
    key!("qemu", "FILE", qemu, "QEMU's program, if not in PATH"),
    key!("guest", "FILE", guest, "The guest agent, if not the one that came with hearth"),
    key!("token", "SECRET", token, "What clients must send; better in the file or HEARTH_TOKEN than here"),
    key!("takeover_seconds", "N", takeover_seconds, "How long to wait for a former daemon's lock and port"),
    key!("network.veth_prefix", "PREFIX", network.veth_prefix, "First part of host link names"),
    key!("network.cidr", "CIDR", network.cidr, "IPv4 network of the slots, two addresses each"),
    key!("network.slot_pool", "N", network.slot_pool, "Prepared slots kept ready"),
    key!("network.dns", "IP,…", network.dns, "Name servers of guests"),
    key!(
        "disk.mib_per_second",
        "N",
        disk.mib_per_second,
        "Most that the disks of a sandbox move, MiB/s; 0: no limit"
    ),
    key!("disk.iops", "N", disk.iops, "Most requests per second to the disks of a sandbox; 0: no limit"),
    key!("disk.burst_ms", "N", disk.burst_ms, "Time whose share may come at once after a pause; 0: 1,000"),
    key!(
        "disk.firecracker",
        "HOW",
        firecracker_disk,
        "Writable disks of Firecracker: file, nbd (a device, served by the shim), or auto"
    ),
    key!(
        "disk.nbd_devices",
        "N",
        nbd_devices,
        "Most devices that such disks take; 0: all that the kernel has"
    ),
    key!("block.cache_mib", "N", block.cache_mib, "Size of the cache of remote disks, MiB"),
    key!("reclaim.mode", "MODE", reclaim.mode, "background, blocking or off: when leftovers are released"),
    key!("reclaim.parallelism", "N", reclaim.parallelism, "Releases at once of what is no slot"),
    key!(
        "reclaim.budget_seconds",
        "N",
        reclaim.budget_seconds,
        "Blocking mode: ready at the latest, from the start; 0: no limit"
    ),
    key!(
        "reclaim.budget_count",
        "N",
        reclaim.budget_count,
        "Blocking mode: ready after so many leftovers; 0: no limit"
    ),
    key!(
        "reclaim.grace_seconds",
        "N",
        reclaim.grace_seconds,
        "From SIGTERM to SIGKILL, for processes left in a slot"
    ),
    key!("backup.keep", "N", backup.keep, "Backups of the host's firewall rules to keep; 0: make none"),
    key!("reconcile.interval_seconds", "N", reconcile.interval_seconds, "Time between reconcile passes"),
    key!("reconcile.action", "ACTION", reconcile.action, "clean or report"),
    key!(
        "reconcile.min_age_seconds",
        "N",
        reconcile.min_age_seconds,
        "From the first sighting of a leak to its release"
    ),
    key!(
        "reconcile.max_share_percent",
        "N",
        reconcile.max_share_percent,
        "Share of what is seen that one pass may release"
    ),
    key!(
        "stats.interval_seconds",
        "N",
        stats.interval_seconds,
        "Between two samples of a sandbox's use; 0: none"
    ),
    key!(
        "exits.keep_seconds",
        "N",
        exits.keep_seconds,
        "How long it is kept how a sandbox ended; 0: not at all"
    ),
    key!("exits.keep_count", "N", exits.keep_count, "How many ends are kept at most; the oldest go first"),
    key!("shutdown.mode", "MODE", shutdown.mode, "detach, drain or kill: sandboxes when the daemon stops"),
    key!("shutdown.drain_seconds", "N", shutdown.drain_seconds, "How long drain waits"),
    key!(
        "events.keep_mib",
        "N",
        events.keep_mib,
        "MiB of the journal to keep; 0: a few events in memory alone"
    ),
    key!("webhook.url", "URL", webhook.url, "Where events are posted, http:// or https://"),
    key!(
        "webhook.secret_file",
        "FILE",
        webhook.secret_file,
        "File with the secret that signs what is posted"
    ),
    key!(
        "webhook.ca_file",
        "FILE",
        webhook.ca_file,
        "PEM file with the certificates that are trusted, instead of the host's"
    ),
    key!(
        "webhook.give_up_seconds",
        "N",
        webhook.give_up_seconds,
        "How long events are posted again that are answered with 4xx, but for 408, 425 and 429"
    ),
    key!(
        "otlp.endpoint",
        "URL",
        otlp.endpoint,
        "Collector for traces, OTLP over gRPC, such as http://127.0.0.1:4317"
    ),
    key!(
        "otlp.ca_file",
        "FILE",
        otlp.ca_file,
        "PEM file with the certificates that are trusted, instead of the host's"
    ),
    key!("log.format", "FORMAT", log.format, "Form of log lines: human or json"),
    key!("log.file", "FILE", log.file, "Where log lines go, if not to stderr"),
    key!(
        "log.file_mib",
        "N",
        log.file_mib,
        "Size at which the log file is turned over, MiB; one older part is kept"
    ),
    key!(
        "metrics.per_sandbox",
        "BOOL",
        metrics.per_sandbox,
        "Series of its own in /metrics for each sandbox"
    ),
    key!("test.failpoints", "PLACE=FAULT,…", failpoints, "Faults on purpose"),
    key!("test.process_vmm", "BOOL", process_vmm, "Allow the VMM `process`, which isolates nothing"),
];

impl Default for Config {
    /// The documented defaults.
    fn default() -> Self {
        Self {
            instance: "default".parse().expect("the default instance is a name"),
            listen: std::net::SocketAddr::from(([127, 0, 0, 1], 5008)),
            state_dir: "/var/lib/hearth".into(),
            run_dir: "/run/hearth".into(),
            vmm: VmmChoice::Auto,
            firecracker: None,
            qemu: None,
            guest: None,
            token: None,
            takeover_seconds: 0,
            network: NetworkConfig {
                veth_prefix: "hth".parse().expect("the default prefix is a prefix"),
                cidr: "10.12.0.0/16".parse().expect("the default network is a network"),
                slot_pool: 8,
                dns: vec![[1, 1, 1, 1].into(), [8, 8, 8, 8].into()],
            },
            disk: Default::default(),
            firecracker_disk: FirecrackerDisk::Auto,
            nbd_devices: 0,
            block: BlockConfig { cache_mib: 4096 },
            reclaim: ReclaimConfig {
                mode: ReclaimMode::Background,
                parallelism: 16,
                budget_seconds: 0,
                budget_count: 0,
                grace_seconds: 15,
            },
            backup: BackupConfig { keep: 20 },
            reconcile: ReconcileConfig {
                interval_seconds: 30,
                action: ReconcileAction::Clean,
                min_age_seconds: 20,
                max_share_percent: 20,
            },
            stats: StatsConfig { interval_seconds: 10 },
            exits: ExitsConfig { keep_seconds: 3600, keep_count: 1000 },
            shutdown: ShutdownConfig { mode: ShutdownMode::Detach, drain_seconds: 600 },
            events: EventsConfig { keep_mib: 32 },
            webhook: Default::default(),
            otlp: Default::default(),
            log: LogConfig { format: LogFormat::Human, file: None, file_mib: 64 },
            metrics: Default::default(),
            failpoints: Default::default(),
            process_vmm: false,
        }
    }
}
