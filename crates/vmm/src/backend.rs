//! What the shim asks of any VMM, and how each is started.
//!
//! A VMM is started by [`launch`], which returns at once with a process to watch; the slow rest is
//! [`Vmm::boot`], a future that may be dropped at any point because the process is owned by the caller, who
//! kills and reaps it. How a VMM ended is told by its pidfd alone: sockets close earlier or later.
//!
//! **Call [`launch`] on the main thread only** (from the future given to `block_on`, or any task of a
//! current-thread runtime that runs there): `PR_SET_PDEATHSIG` follows the thread that started the VMM, so one
//! started from a pool dies with that pool's thread, and one started from main dies with the shim.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::future::BoxFuture;
use hearth_core::process::ProcessIdentity;
use hearth_core::shim::{ShimSpec, VMM_LOG};
use hearth_core::spec::VmmKind;
use hearth_core::usage::DiskCounters;
use hearth_host::process::{self, Ended, Mounts, Signal, SpawnError, SpawnOptions};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, Interest};
use tokio::net::UnixStream;

pub use crate::disks::DisksError;
use crate::firecracker::{self, ApiError};
use crate::plain;
use crate::qemu::{self, QmpError};

/// Open files of a VMM. A shim's own limit may be huge, and Firecracker's start grows with it.
const NOFILE: u64 = 2048;
/// Longest path of a unix socket (`sun_path` less its NUL byte, unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;

/// A VMM could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// It was not started.
    #[error("the VMM was not started")]
    Spawn(#[from] SpawnError),
    /// A file it needs.
    #[error("{what} {}", path.display())]
    File {
        /// Doing what.
        what: &'static str,
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// A descriptor for it could not be made or watched.
    #[error("descriptor for the {what}")]
    Descriptor {
        /// Its use.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Unix socket paths are short.
    #[error(
        "the socket path {} has {} bytes, at most {MAX_SOCKET_PATH} are possible: choose a shorter run directory",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Firecracker would make one of its own, connected to nothing.
    #[error("the namespace has no interface {tap}")]
    NoTap {
        /// Its name.
        tap: String,
    },
    /// Firecracker's API.
    #[error("the Firecracker API")]
    Api(#[from] ApiError),
    /// QEMU's monitor.
    #[error("the QEMU monitor")]
    Qmp(#[from] QmpError),
    /// A signal to the process.
    #[error("signal to the VMM")]
    Signal(#[source] io::Error),
    /// Its disks.
    #[error(transparent)]
    Disks(#[from] DisksError),
}

impl VmmError {
    pub(crate) fn file(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::File { what, path: path.to_owned(), source }
    }
}

/// Something a VMM tells by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmmEvent {
    /// The guest powered off or reset its machine; the VMM is about to exit.
    GuestStopped {
        /// In the VMM's words.
        reason: String,
    },
}

/// How a VMM that was asked for metrics answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    /// It counts nothing.
    Nothing,
    /// With its counters since the start.
    Counters(DiskCounters),
    /// It writes a line to its FIFO.
    Announced,
}

/// A started virtual machine monitor.
///
/// Every call has its own deadline, and may be dropped.
pub trait Vmm: Send {
    /// Configures the machine, starts it, and connects to the guest agent if there is one to be. Waits for
    /// a guest that boots: the caller sets the deadline.
    fn boot(&mut self) -> BoxFuture<'_, Result<Option<AgentStream>, VmmError>>;

    /// Stops the virtual CPUs.
    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>>;

    /// Lets them go on.
    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>>;

    /// Presses the power button, for guests without an agent. A guest may ignore it.
    fn request_stop(&mut self) -> BoxFuture<'_, Result<(), VmmError>>;

    /// Asks for metrics.
    fn flush(&mut self) -> BoxFuture<'_, Result<Flushed, VmmError>> {
        Box::pin(std::future::ready(Ok(Flushed::Nothing)))
    }

    /// The next thing it tells by itself; never, for most.
    fn event(&mut self) -> BoxFuture<'_, VmmEvent> {
        Box::pin(std::future::pending())
    }

    /// Files to remove once the process was reaped.
    fn leftovers(&self) -> Vec<PathBuf> {
        Vec::new()
    }
}

/// Byte stream to the guest agent.
pub type AgentStream = UnixStream;
/// What the guest prints.
pub type ConsoleSource = Box<dyn AsyncRead + Send + Unpin>;

/// A VMM that was just started.
pub struct Launched {
    /// To watch, kill and reap.
    pub process: VmmProcess,
    /// To talk to.
    pub vmm: Box<dyn Vmm>,
    /// To be read all the time.
    pub console: Option<ConsoleSource>,
    /// The FIFO to which it writes metrics, if it does; made already.
    pub metrics: Option<PathBuf>,
}

/// Starts the VMM of `spec`; on the main thread only (see the head of this file). On an error nothing is left
/// running. `disks` are its ends of the disks that are served to it, in the order in which the guest sees them; only QEMU
/// takes them.
///
/// # Errors
/// Says which part was missing or refused.
pub fn launch(spec: &ShimSpec, disks: Vec<OwnedFd>) -> Result<Launched, VmmError> {
    match spec.vmm {
        VmmKind::Firecracker => firecracker::launch(spec),
        VmmKind::Qemu => qemu::launch(spec, disks),
        VmmKind::Process => plain::launch(spec),
    }
}

/// The process of a VMM; a child of this one.
#[derive(Debug)]
pub struct VmmProcess {
    identity: ProcessIdentity,
    pidfd: AsyncFd<OwnedFd>,
    ended: Option<Ended>,
}

impl VmmProcess {
    /// Who it is.
    #[must_use]
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// Waits for its end and reaps it. May be dropped and called again.
    ///
    /// # Errors
    /// If the pidfd cannot be polled.
    pub async fn ended(&mut self) -> io::Result<Ended> {
        loop {
            if let Some(ended) = self.ended {
                return Ok(ended);
            }
            let mut ready = self.pidfd.readable().await?;
            match process::wait(ready.get_inner().as_fd(), Duration::ZERO)? {
                Some(ended) => self.ended = Some(ended),
                None => ready.clear_ready(),
            }
        }
    }

    /// Its pidfd once more, valid after its end too.
    pub(crate) fn pidfd(&self) -> io::Result<OwnedFd> {
        self.pidfd.get_ref().try_clone()
    }

    /// Whether it has ended by now, asked of the kernel: what the runtime knows may be older. Reaps it.
    ///
    /// # Errors
    /// If the pidfd cannot be waited for.
    pub fn has_ended(&mut self) -> io::Result<bool> {
        if self.ended.is_none() {
            self.ended = process::wait(self.pidfd.get_ref().as_fd(), Duration::ZERO)?;
        }
        Ok(self.ended.is_some())
    }

    /// Ends and reaps a process that was started and cannot be used: dropped, it would live on.
    pub(crate) fn abandon(self) {
        end_now(self.pid(), self.pidfd.get_ref());
    }

    /// Sends a signal; a process that ended is success.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        process::signal(self.pidfd.get_ref().as_fd(), signal)
    }
}

/// Starts a VMM the common way: in the slot's network namespace, with its own mount namespace, session and
/// limits, stdin `/dev/null`, stdout and stderr appended to `vmm.log`, `fds` numbered from 3, and killed by the
/// kernel when this thread ends. It is born in the shim's cgroup.
pub(crate) fn start(
    spec: &ShimSpec,
    args: Vec<std::ffi::OsString>,
    fds: Vec<OwnedFd>,
) -> Result<VmmProcess, VmmError> {
    let null = Path::new("/dev/null");
    let stdin = File::open(null).map_err(|e| VmmError::file("open", null, e))?;
    let path = spec.run_dir.join(VMM_LOG);
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| VmmError::file("open", &path, e))?;
    let log_again = log.try_clone().map_err(|e| VmmError::file("open", &path, e))?;
    let netns = match &spec.netns {
        Some(path) => Some(File::open(path).map_err(|e| VmmError::file("open", path, e))?),
        None => None,
    };
    let mounts = process::mounts::inherited()
        .map_err(|source| VmmError::Descriptor { what: "inherited mount namespace", source })?;
    let standard = [OwnedFd::from(stdin), OwnedFd::from(log), OwnedFd::from(log_again)];
    let child = process::spawn(SpawnOptions {
        program: spec.program.clone(),
        args,
        netns: netns.as_ref().map(File::as_fd),
        new_session: true,
        parent_death_signal: Some(Signal::KILL),
        fds: standard.into_iter().chain(fds).zip(0 as RawFd..).collect(),
        mounts: mounts.as_ref().map_or(Mounts::Own, |from| Mounts::OwnFrom(from.as_fd())),
        rlimit_nofile: Some(NOFILE),
        ..SpawnOptions::default()
    })?;
    watch(child)
}

#[allow(
    deprecated,
    reason = "the new constructor is unsafe for types that may lie about their descriptor; \
    an OwnedFd does not, and this crate has no unsafe code"
)]
fn watch(child: process::Child) -> Result<VmmProcess, VmmError> {
    match AsyncFd::try_with_interest(child.pidfd, Interest::READABLE) {
        Ok(pidfd) => Ok(VmmProcess { identity: child.identity, pidfd, ended: None }),
        Err(e) => {
            let (pidfd, source) = e.into_parts();
            end_now(child.identity.pid, &pidfd);
            Err(VmmError::Descriptor { what: "pidfd", source })
        }
    }
}

fn end_now(pid: u32, pidfd: &OwnedFd) {
    let end = process::signal(pidfd.as_fd(), Signal::KILL)
        .and_then(|()| process::wait(pidfd.as_fd(), Duration::from_secs(5)));
    match end {
        Ok(Some(_)) => {}
        // It dies with this process.
        Ok(None) => tracing::error!(pid, "a VMM that cannot be watched does not end"),
        Err(e) => tracing::error!(pid, error = %e, "a VMM that cannot be watched was not ended"),
    }
}

/// A connected pair of unix sockets: ours for the runtime, and the one for the VMM.
pub(crate) fn socket_pair(what: &'static str) -> Result<(UnixStream, OwnedFd), VmmError> {
    let pair = || {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((UnixStream::from_std(ours)?, OwnedFd::from(theirs)))
    };
    pair().map_err(|source| VmmError::Descriptor { what, source })
}

/// A socket path in the run directory, free to be bound: an older file in this place is ours, since the
/// directory is.
pub(crate) fn fresh_socket(run_dir: &Path, name: &str) -> Result<PathBuf, VmmError> {
    let path = run_dir.join(name);
    check_socket_path(&path)?;
    remove_if_there(&path).map_err(|e| VmmError::file("remove", &path, e))?;
    Ok(path)
}

/// Refuses a path that no unix socket can have.
///
/// # Errors
/// [`VmmError::PathTooLong`].
pub fn check_socket_path(path: &Path) -> Result<(), VmmError> {
    if path.as_os_str().len() > MAX_SOCKET_PATH {
        return Err(VmmError::PathTooLong { path: path.to_owned() });
    }
    Ok(())
}

/// Removes a file; its absence is success.
pub(crate) fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_of_107_bytes_is_the_longest() {
        let path = |n: usize| PathBuf::from(format!("/{}", "x".repeat(n - 1)));
        assert!(check_socket_path(&path(107)).is_ok());
        let error = check_socket_path(&path(108)).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("shorter run directory"), "{error}");
    }

    #[test]
    fn a_stale_socket_gives_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = fresh_socket(dir.path(), "a.sock").unwrap();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        assert!(!fresh_socket(dir.path(), "a.sock").unwrap().exists());
    }
}
