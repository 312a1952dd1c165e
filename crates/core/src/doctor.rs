//! What `hearth doctor` says of a host: each thing on it, whose it is, and why that is believed. Pure: what was seen
//! and what is claimed come from outside; [`judge`] puts the two together, [`settle`] keeps what two looks saw.

mod judge;
mod limits;
mod settle;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::layout::Parent;
use crate::process::ProcessIdentity;
use crate::resource::Kind;
use crate::stuck::Holder;

pub use judge::{Booked, BookedSlot, Books, Claims, Daemon, Recorded, Scene, judge};
pub use limits::{Limit, Room};
pub use settle::{Look, settle};

/// Version of the form in which a diagnosis is printed; it grows when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// The kinds of things a host can have: those of [`Kind`], and what other orchestrators leave besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ItemKind {
    /// `record.json` of a sandbox.
    Record,
    /// A directory of a sandbox.
    Directory,
    /// A control group.
    Cgroup,
    /// A process.
    Process,
    /// A Unix socket's file.
    Socket,
    /// A FIFO.
    Fifo,
    /// Another file.
    File,
    /// A mount.
    Mount,
    /// A connected network block device.
    Nbd,
    /// A firewall rule of the host that names one slot.
    Rule,
    /// The instance's constant rules on the host.
    HostFirewall,
    /// The nftables table inside a slot's namespace.
    SandboxFirewall,
    /// The guest's tap inside a slot's namespace.
    Tap,
    /// The host's end of a slot's link.
    Veth,
    /// A network namespace bound in `/run/netns`.
    Netns,
}

impl ItemKind {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            ItemKind::Record => "record",
            ItemKind::Directory => "directory",
            ItemKind::Cgroup => "cgroup",
            ItemKind::Process => "process",
            ItemKind::Socket => "socket",
            ItemKind::Fifo => "fifo",
            ItemKind::File => "file",
            ItemKind::Mount => "mount",
            ItemKind::Nbd => "nbd",
            ItemKind::Rule => "rule",
            ItemKind::HostFirewall => "host-firewall",
            ItemKind::SandboxFirewall => "sandbox-firewall",
            ItemKind::Tap => "tap",
            ItemKind::Veth => "veth",
            ItemKind::Netns => "netns",
        }
    }
}

impl fmt::Display for ItemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl From<Kind> for ItemKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Record => ItemKind::Record,
            Kind::Directory => ItemKind::Directory,
            Kind::Cgroup => ItemKind::Cgroup,
            Kind::Process => ItemKind::Process,
            Kind::Netns => ItemKind::Netns,
            Kind::Veth => ItemKind::Veth,
            Kind::Tap => ItemKind::Tap,
            Kind::SandboxFirewall => ItemKind::SandboxFirewall,
            Kind::HostFirewall => ItemKind::HostFirewall,
            Kind::Mount => ItemKind::Mount,
            Kind::Nbd => ItemKind::Nbd,
        }
    }
}

/// What is thought of a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Somebody has it.
    Live,
    /// There, and proven to be nobody's.
    Leaked,
    /// Its release does not finish.
    Stuck,
    /// Not ours, however it is called. Reported, never changed.
    Foreign,
    /// It cannot be told whose it is.
    Unknown,
}

impl State {
    /// All, in the order of columns.
    pub const ALL: [State; 5] = [State::Live, State::Leaked, State::Stuck, State::Foreign, State::Unknown];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            State::Live => "live",
            State::Leaked => "leaked",
            State::Stuck => "stuck",
            State::Foreign => "foreign",
            State::Unknown => "unknown",
        }
    }

    /// Whether an operator should look at it.
    #[must_use]
    pub fn is_finding(self) -> bool {
        matches!(self, State::Leaked | State::Stuck | State::Unknown)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What proves that a name still stands for the thing that was seen.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "by", rename_all = "kebab-case")]
pub enum Identity {
    /// Device and inode of a file, a directory, a cgroup or a namespace.
    Inode {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A process.
    Process(ProcessIdentity),
    /// A link's index in the namespace that was looked at.
    Link {
        /// `ifindex`.
        index: u32,
    },
    /// A rule, as the program that lists it writes it.
    Rule {
        /// Program it was listed by: `iptables-nft`, `iptables-legacy` or `nft`.
        backend: String,
        /// Its table.
        table: String,
    },
    /// The backend that a block device was connected with.
    Device {
        /// Identifier of the backend, empty if it has none.
        backend: String,
        /// The connecting task.
        task: u32,
    },
    /// Nothing but its name.
    Name,
}

/// One thing as it was seen, before anybody says whose it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thing {
    /// Its kind.
    pub kind: ItemKind,
    /// What it is called: a path, a link's name, a pid.
    pub name: String,
    /// The sandbox that its name or place speaks of.
    pub sandbox: Option<String>,
    /// The slot that its name or place speaks of.
    pub slot: Option<u32>,
    /// Kernel facts in words.
    pub facts: Vec<String>,
    /// Since when it is there, milliseconds since the Unix epoch, where that can be seen.
    pub since_ms: Option<u64>,
    /// What proves that it is still the same.
    pub identity: Identity,
    /// Of a process: the tasks in a sleep that no signal ends.
    pub tasks: Vec<Holder>,
    /// Of a process: it was killed and does not go.
    pub undead: bool,
    /// Why it is not ours, if it is not.
    pub foreign: Option<String>,
    /// Of a process, where that was looked at.
    pub parent: Option<Parent>,
    /// Processes that have it open.
    pub holders: Vec<u32>,
    /// Of a VMM: somebody is connected to its API socket.
    pub connected: bool,
}

impl Thing {
    /// A thing known by its name alone.
    #[must_use]
    pub fn new(kind: ItemKind, name: impl Into<String>) -> Self {
        Self {
            kind,
            name: name.into(),
            sandbox: None,
            slot: None,
            facts: Vec::new(),
            since_ms: None,
            identity: Identity::Name,
            tasks: Vec::new(),
            undead: false,
            foreign: None,
            parent: None,
            holders: Vec::new(),
            connected: false,
        }
    }
}

/// Whose a thing is, as far as that is known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Id of the sandbox.
    pub sandbox: Option<String>,
    /// Number of the slot.
    pub slot: Option<u32>,
    /// The process that it is, or the shim of the sandbox.
    pub pid: Option<u32>,
    /// That process's start, in clock ticks after boot.
    pub start_time: Option<u64>,
}

/// One thing with what is thought of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Its kind.
    pub kind: ItemKind,
    /// What it is called.
    pub name: String,
    /// What is thought of it.
    pub state: State,
    /// Whose it is.
    pub owner: Owner,
    /// Why that is believed: the reason first, then kernel facts.
    pub evidence: Vec<String>,
    /// Since when it is there, milliseconds since the Unix epoch, where that can be seen.
    pub since_ms: Option<u64>,
    /// What proves that it is still the same.
    pub identity: Identity,
    /// Tasks in a sleep that no signal ends, and those that hold what is stuck.
    pub tasks: Vec<Holder>,
}

/// Where record, kernel and daemon do not say the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Disagreement {
    /// About what.
    pub what: String,
    /// What the record says; empty if there is none, or it says nothing.
    pub record: String,
    /// What the kernel shows.
    pub kernel: String,
    /// What the daemon says; empty if it was not asked or says nothing.
    pub daemon: String,
}
