//! What the engine asks of a host: three verbs per kind of resource. `hearth-host` answers with the kernel,
//! `hearth-testkit` with a fake; one conformance suite holds for both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::id::SandboxId;
use crate::network::SlotIndex;
use crate::process::{Liveness, ProcessIdentity};
use crate::resource::{Kind, Resource};
use crate::stuck::Holder;

/// A host resource could not be seen, made or released.
#[derive(Debug, thiserror::Error)]
#[error("{verb} {what}: {why}")]
pub struct HostError {
    /// `census`, `ensure`, `release`, `reset`, `spawn`.
    pub verb: &'static str,
    /// Which resource, in words.
    pub what: String,
    /// What went wrong, and what to do where that is known.
    pub why: String,
    /// How a caller may react.
    pub class: ErrorClass,
    /// The cause from the kernel.
    #[source]
    pub source: Option<std::io::Error>,
}

/// How a caller may react to a [`HostError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Held by something of ours that may end soon; the next try may succeed.
    Busy,
    /// The thing in this place is not ours (law 3): never touched.
    Foreign,
    /// The deadline passed.
    Deadline,
    /// The request itself is wrong or the host lacks something; the same call will fail again.
    Refused,
    /// Anything else.
    Failed,
}

/// What a scan of one kind saw.
#[derive(Debug, Clone, Default)]
pub struct Census {
    /// Ours by the full name grammar.
    pub ours: Vec<Sighting>,
    /// Near our grammar but not ours: name and reason. Reported, never changed.
    pub foreign: BTreeMap<String, String>,
    /// Why the scan is incomplete. While this is not empty, absence from `ours` proves nothing (law 4).
    pub incomplete: Vec<String>,
}

/// One resource seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// What, ready for `release`.
    pub resource: Resource,
    /// Kernel facts in words, as evidence for an operator.
    pub facts: String,
}

/// What was seen of one index of the kernel's NBD client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdSeen {
    /// Proven to be nobody's: no task, size 0, nothing in flight, no holders.
    Quiet,
    /// Anything else.
    Unquiet {
        /// Whose it is, if its backend identifier is the id of a sandbox.
        owner: Option<SandboxId>,
        /// Kernel facts in words.
        facts: String,
    },
}

/// A program to start in a cgroup of its own, in its own session, without a terminal and with no descriptor
/// but the three standard ones.
#[derive(Debug)]
pub struct SpawnSpec {
    /// Absolute path.
    pub program: PathBuf,
    /// Arguments without the program's name.
    pub args: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    /// Cgroup (last part of the path) it is born in.
    pub cgroup: String,
    /// File that stdout and stderr are appended to.
    pub log: PathBuf,
}

/// A process just started.
#[derive(Debug)]
pub struct Spawned {
    /// To be recorded.
    pub identity: ProcessIdentity,
    /// Readable when the process ended (pidfd_open(2)).
    pub pidfd: OwnedFd,
}

/// How a release of many slots may go on. The kernel removes what is due together under its lock for network
/// links, about 1 ms a slot: many at once are fast and keep creations waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// So many slots may be on their way at once, at least one.
    AtMost(usize),
    /// None now; ask again after so long.
    Wait(Duration),
    /// No more: slots not begun stay as they are.
    End,
}

/// How [`Host::release_slots`] goes about it.
pub struct SlotRelease<'a> {
    /// Longest time from the first touch of a slot to the sight of its absence.
    pub within: Duration,
    /// Time a process of ours inside gets between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Cgroups whose processes are not ended: those of sandboxes that have a record.
    pub spared: &'a BTreeSet<String>,
    /// Asked before each few slots.
    pub pace: &'a (dyn Fn() -> Pace + Sync),
}

impl std::fmt::Debug for SlotRelease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlotRelease").field("within", &self.within).field("grace", &self.grace).finish()
    }
}

/// Told of each slot once: gone, or why not.
pub type SlotSeen<'a> = dyn FnMut(SlotIndex, Result<(), HostError>) + 'a;

/// The host's kernel resources of one instance. Calls block for as long as their deadline: run them on a
/// thread that may wait. Every call may be repeated.
pub trait Host: Send + Sync + 'static {
    /// Lists the resources of one kind that carry this instance's tag. One scan, cost independent of other
    /// kinds. Kinds that only live inside a namespace (tap, sandbox firewall) are listed by entering those
    /// of this instance.
    ///
    /// # Errors
    /// Only if nothing at all could be seen; a partial result has `incomplete` set.
    fn census(&self, kind: Kind) -> Result<Census, HostError>;

    /// Makes the resource, or completes one left half made. Success means it is there and whole.
    ///
    /// # Errors
    /// [`ErrorClass::Foreign`] if the name is taken by something not ours.
    fn ensure(&self, resource: &Resource) -> Result<(), HostError>;

    /// Removes the resource and waits until its absence was seen. "Already gone" is success. A directory
    /// goes with its contents, a cgroup with its processes (`cgroup.kill`), a namespace with links, tap and
    /// rules inside.
    ///
    /// # Errors
    /// [`ErrorClass::Busy`] or [`ErrorClass::Deadline`] if it is still there after `within`.
    fn release(&self, resource: &Resource, within: Duration) -> Result<(), HostError>;

    /// Lists namespaces and links of slots by one look at the names of both. Only a link whose slot has no namespace
    /// is looked at closely; one beside a namespace of ours is taken for that slot's, which its release proves.
    /// For finding out which numbers are taken, in a time that thousands of leftovers do not spoil.
    ///
    /// # Errors
    /// As for [`Self::census`].
    fn census_slots(&self) -> Result<Census, HostError>;

    /// Removes whole slots, as many at once as the order says, and tells of each when its absence was seen.
    /// Never stops at an error. Any part of a slot may be missing. A process of ours inside is ended; a slot
    /// with another's process inside is [`ErrorClass::Foreign`] and stays as it is.
    fn release_slots(&self, slots: &[SlotIndex], order: &SlotRelease<'_>, seen: &mut SlotSeen<'_>);

    /// Puts a used slot back into the state `ensure` of its parts leaves it in: fresh rules, no connection
    /// tracked, no neighbour learnt. The caller has seen every process of the former owner gone.
    ///
    /// # Errors
    /// If the slot is not whole; release it then.
    fn reset_slot(&self, slot: SlotIndex) -> Result<(), HostError>;

    /// What on this host stands in the way of this instance's names and addresses, in words with what to do;
    /// nothing if nothing does.
    ///
    /// # Errors
    /// If it cannot be looked at.
    fn conflict(&self) -> Result<Option<String>, HostError>;

    /// How many indexes the kernel's NBD client has (`nbds_max`).
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] where there is no such client, or this process cannot reach it; else if it cannot be asked.
    fn nbd_limit(&self) -> Result<u32, HostError>;

    /// Looks at one index of it; never opens the device.
    ///
    /// # Errors
    /// If there is no such index, or a fact cannot be read: then it is not quiet.
    fn look_at_nbd(&self, index: u32) -> Result<NbdSeen, HostError>;

    /// Bytes that an unprivileged writer may still use on the file system of `dir`.
    ///
    /// # Errors
    /// If it cannot be asked.
    fn free_bytes(&self, dir: &Path) -> Result<u64, HostError>;

    /// Makes `to` a copy of `from` that takes space only where `from` does. Nothing is left of it on an error.
    ///
    /// # Errors
    /// If `to` exists or cannot be written.
    fn copy_sparse(&self, from: &File, to: &Path) -> Result<(), HostError>;

    /// Does what the first [`spawn`](Self::spawn) would have to do first, so that it need not; harmless at any time.
    fn prepare_spawn(&self) {}

    /// Starts a program inside an existing cgroup (`clone3` with `CLONE_INTO_CGROUP`).
    ///
    /// # Errors
    /// If the cgroup is absent or the program cannot be executed.
    fn spawn(&self, spec: &SpawnSpec) -> Result<Spawned, HostError>;

    /// Who keeps a resource from going, as far as that can be seen; the first few. For an operator: nothing
    /// is decided by it.
    fn holders(&self, resource: &Resource) -> Vec<Holder>;

    /// Whether a recorded process still runs, and in its cgroup if one is recorded.
    fn liveness(&self, process: &ProcessIdentity) -> Liveness;

    /// A pidfd of a recorded process, proven to be the same one after opening.
    ///
    /// # Errors
    /// If it is gone or not the same.
    fn open_process(&self, process: &ProcessIdentity) -> Result<OwnedFd, HostError>;

    /// This boot's id.
    fn boot_id(&self) -> &str;
}
