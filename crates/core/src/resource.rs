//! Kinds of host resources and the values that name one. A value is what a record holds before the kernel
//! is asked for the thing (law 1), and all that `release` needs.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::id::SandboxId;
use crate::network::SlotIndex;
use crate::process::ProcessIdentity;

/// The kinds of host resources (docs/resources.md has a row for each). The same word is used in logs, metric labels and tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// `record.json` of a sandbox.
    Record,
    /// A directory of a sandbox with all in it (sockets, logs, disks).
    Directory,
    /// A control group and every process in it.
    Cgroup,
    /// A process started by us.
    Process,
    /// A network namespace bound in `/run/netns`.
    Netns,
    /// A veth pair: host end in the daemon's namespace, `uplink` inside the slot's.
    Veth,
    /// The guest's tap inside the slot's namespace.
    Tap,
    /// The nftables table inside the slot's namespace.
    SandboxFirewall,
    /// The instance's constant nftables table and its rules in foreign FORWARD chains.
    HostFirewall,
    /// A mount.
    Mount,
    /// A network block device connected by the kernel.
    Nbd,
}

impl Kind {
    /// All kinds, in the order in which a sandbox comes to own them.
    pub const ALL: [Kind; 11] = [
        Kind::Record,
        Kind::Directory,
        Kind::HostFirewall,
        Kind::Netns,
        Kind::Veth,
        Kind::Tap,
        Kind::SandboxFirewall,
        Kind::Mount,
        Kind::Cgroup,
        Kind::Process,
        Kind::Nbd,
    ];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Record => "record",
            Kind::Directory => "directory",
            Kind::Cgroup => "cgroup",
            Kind::Process => "process",
            Kind::Netns => "netns",
            Kind::Veth => "veth",
            Kind::Tap => "tap",
            Kind::SandboxFirewall => "sandbox-firewall",
            Kind::HostFirewall => "host-firewall",
            Kind::Mount => "mount",
            Kind::Nbd => "nbd",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One host resource, by name. Paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Resource {
    /// A directory below the instance's state or run directory.
    Directory {
        /// Where.
        path: PathBuf,
    },
    /// A control group below the instance's own.
    Cgroup {
        /// Last part of its path: a sandbox id.
        name: String,
    },
    /// A process.
    Process {
        /// Which.
        process: ProcessIdentity,
    },
    /// The slot's namespace.
    Netns {
        /// Which slot.
        slot: SlotIndex,
    },
    /// The slot's veth pair with addresses and routes of both ends.
    Veth {
        /// Which slot.
        slot: SlotIndex,
    },
    /// The slot's tap with its address.
    Tap {
        /// Which slot.
        slot: SlotIndex,
    },
    /// The slot's firewall and NAT table.
    SandboxFirewall {
        /// Which slot.
        slot: SlotIndex,
    },
    /// The instance's host table.
    HostFirewall,
    /// A tmpfs mount at `path`, below the instance's run directory.
    Mount {
        /// Where.
        path: PathBuf,
    },
    /// A network block device. The number comes round; the backend identifier says whose it is.
    Nbd {
        /// The number in `/dev/nbd<index>`.
        index: u32,
        /// Its backend identifier.
        sandbox: SandboxId,
    },
}

impl Resource {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Resource::Directory { .. } => Kind::Directory,
            Resource::Cgroup { .. } => Kind::Cgroup,
            Resource::Process { .. } => Kind::Process,
            Resource::Netns { .. } => Kind::Netns,
            Resource::Veth { .. } => Kind::Veth,
            Resource::Tap { .. } => Kind::Tap,
            Resource::SandboxFirewall { .. } => Kind::SandboxFirewall,
            Resource::HostFirewall => Kind::HostFirewall,
            Resource::Mount { .. } => Kind::Mount,
            Resource::Nbd { .. } => Kind::Nbd,
        }
    }

    /// What a slot is made of, in the order of creation; release goes the other way.
    #[must_use]
    pub fn of_slot(slot: SlotIndex) -> [Resource; 4] {
        [
            Resource::Netns { slot },
            Resource::Veth { slot },
            Resource::Tap { slot },
            Resource::SandboxFirewall { slot },
        ]
    }
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Directory { path } | Resource::Mount { path } => {
                write!(f, "{} {}", self.kind(), path.display())
            }
            Resource::Cgroup { name } => write!(f, "cgroup {name}"),
            Resource::Process { process } => write!(f, "process {}", process.pid),
            Resource::Netns { slot }
            | Resource::Veth { slot }
            | Resource::Tap { slot }
            | Resource::SandboxFirewall { slot } => write!(f, "{} of slot {slot}", self.kind()),
            Resource::HostFirewall => f.write_str("host-firewall"),
            Resource::Nbd { index, sandbox } => write!(f, "nbd{index} of {sandbox}"),
        }
    }
}
