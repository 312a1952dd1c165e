//! Processes: who one is, whether it still runs, how to signal it and to wait for its end. A pid is never
//! trusted alone: the start time and the boot id go with it, and signals go through a pidfd.
//!
//! Starting one is in [`mod@spawn`].

mod child;
pub(crate) mod membership;
pub mod mounts;
pub mod spawn;
mod stat;
mod tasks;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hearth_core::host::{ErrorClass, HostError};
use hearth_core::process::{Liveness, ProcessIdentity};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

pub use mounts::Mounts;
pub use rustix::process::Signal;
pub use spawn::{Child, SpawnError, SpawnOptions, spawn};
pub use tasks::tasks;

use crate::error;

/// How a process ended. Both `None`: it ended, but not as our child, so nobody told us how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Exit code, if it exited.
    pub code: Option<i32>,
    /// Signal number, if one ended it.
    pub signal: Option<i32>,
}

/// This boot's id.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn boot_id() -> io::Result<&'static str> {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = BOOT_ID.get() {
        return Ok(id);
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT_ID.get_or_init(|| text.trim().to_owned()))
}

/// The identity of the process that has `pid` now. Only sound while the caller knows that the pid cannot be
/// handed out again: its own unreaped child, itself, or a pid that is checked by other facts afterwards.
///
/// # Errors
/// If there is no such process or `/proc` cannot be read.
pub fn identity_of(pid: u32) -> io::Result<ProcessIdentity> {
    let stat = stat::read(pid)?;
    let boot_id = boot_id()?.to_owned();
    Ok(ProcessIdentity { pid, start_time: stat.start_time, boot_id, cgroup: None })
}

/// Ends this process as `kill -9` from outside does: nothing of it runs afterwards. For faults on purpose.
pub fn kill_self() {
    if let Err(e) = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL) {
        tracing::error!("cannot kill this process: {e}");
    }
}

/// Whether a recorded process still runs, by pid, start time and boot; who knows the cgroups looks at that fact
/// as well. A zombie counts as gone.
#[must_use]
pub fn liveness(process: &ProcessIdentity) -> Liveness {
    match boot_id() {
        Ok(now) if now != process.boot_id => return Liveness::Gone,
        Ok(_) => {}
        Err(e) => return Liveness::Unknown(format!("the boot id cannot be read: {e}")),
    }
    match stat::read(process.pid) {
        Ok(stat) if stat.start_time != process.start_time || stat.ended() => Liveness::Gone,
        Ok(_) => Liveness::Alive,
        Err(e) if stat::says_absent(&e) => match pid_exists(process.pid) {
            // Without /proc (or with hidepid) absence of the file proves nothing; the pid's own does.
            Ok(false) => Liveness::Gone,
            Ok(true) => match stat::read(process.pid) {
                // Somebody took the number between the two looks.
                Ok(stat) if stat.start_time != process.start_time || stat.ended() => Liveness::Gone,
                Ok(_) => Liveness::Alive,
                Err(e) => Liveness::Unknown(format!("pid {} exists, but its stat: {e}", process.pid)),
            },
            Err(e) => Liveness::Unknown(format!("kill({}, 0): {e}", process.pid)),
        },
        Err(e) => Liveness::Unknown(format!("/proc/{}/stat: {e}", process.pid)),
    }
}

fn pid_exists(pid: u32) -> io::Result<bool> {
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(false);
    };
    match rustix::process::test_kill_process(pid) {
        Ok(()) | Err(rustix::io::Errno::PERM) => Ok(true),
        Err(rustix::io::Errno::SRCH) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// A pidfd of a recorded process: opened first, then proven to be the same process, so that the number
/// cannot change hands in between.
///
/// # Errors
/// [`ErrorClass::Refused`] if it is gone or its pid belongs to another process now.
pub fn open(process: &ProcessIdentity) -> Result<OwnedFd, HostError> {
    open_for("open", process)?.ok_or_else(|| {
        let why = "it ended, or its pid belongs to another process now";
        error::plain("open", format_args!("process {}", process.pid), ErrorClass::Refused, why)
    })
}

/// As [`open`], but `None` if the process is gone or is a zombie.
fn open_for(verb: &'static str, process: &ProcessIdentity) -> Result<Option<OwnedFd>, HostError> {
    let fd = pidfd(verb, process.pid)?;
    match liveness(process) {
        Liveness::Alive => Ok(fd),
        Liveness::Gone => Ok(None),
        Liveness::Unknown(why) => {
            Err(error::plain(verb, format_args!("process {}", process.pid), ErrorClass::Failed, why))
        }
    }
}

/// Whoever has this pid now.
pub(crate) fn pidfd(verb: &'static str, pid: u32) -> Result<Option<OwnedFd>, HostError> {
    let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return Ok(None);
    };
    match rustix::process::pidfd_open(raw, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        // EINVAL: the number is a thread's now, which no process of ours ever was.
        Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => Ok(None),
        Err(e) => Err(error::os(verb, format_args!("process {pid}"), "pidfd_open", e.into())),
    }
}

/// Reaps a process if it is our child, which has to end within `patience`; any other is left alone.
///
/// # Errors
/// [`ErrorClass::Deadline`] if it is our child and lives on.
pub(crate) fn reap(process: &ProcessIdentity, patience: Duration) -> Result<(), HostError> {
    let what = format!("process {}", process.pid);
    let fail = |e| error::os("release", &what, "reap", e);
    let Some(fd) = pidfd("release", process.pid)? else {
        return Ok(());
    };
    let same = boot_id().is_ok_and(|b| b == process.boot_id)
        && stat::read(process.pid).is_ok_and(|s| s.start_time == process.start_time);
    if same && is_child(fd.as_fd()).map_err(fail)? && wait(fd.as_fd(), patience).map_err(fail)?.is_none() {
        let why =
            format!("it left its cgroup and lives on ({}); end it by hand", stat::describe(process.pid));
        return Err(error::plain("release", what, ErrorClass::Deadline, why));
    }
    Ok(())
}

fn is_child(pidfd: BorrowedFd<'_>) -> io::Result<bool> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    loop {
        match rustix::process::waitid(WaitId::PidFd(pidfd), look) {
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::CHILD) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Sends a signal. A process that has ended is success: a pidfd never reaches a stranger.
///
/// # Errors
/// If the kernel refuses (no permission).
pub fn signal(pidfd: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    match rustix::process::pidfd_send_signal(pidfd, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Waits until the process ended, at most `timeout` (zero: only looks), and reaps it if it is our child.
/// `None`: it still runs. Who holds the pidfd of a child must call this in the end, else a zombie stays.
///
/// # Errors
/// If the descriptor cannot be polled.
pub fn wait(pidfd: BorrowedFd<'_>, timeout: Duration) -> io::Result<Option<Ended>> {
    if !poll_until(pidfd, PollFlags::IN, Instant::now().checked_add(timeout))? {
        return Ok(None);
    }
    loop {
        let unknown = Ended { code: None, signal: None };
        match rustix::process::waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(Some(status)) => {
                return Ok(Some(Ended { code: status.exit_status(), signal: status.terminating_signal() }));
            }
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(Some(unknown)),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Polls one descriptor until an event or the deadline (`None`: no deadline).
pub(crate) fn poll_until(fd: impl AsFd, flags: PollFlags, deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let spec = left.map(|l| Timespec {
            tv_sec: i64::try_from(l.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(l.subsec_nanos()),
        });
        match rustix::event::poll(&mut [PollFd::new(&fd, flags)], spec.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Ends a process and waits until it is gone; reaps it if it is our child.
///
/// # Errors
/// [`ErrorClass::Deadline`] if it still runs after `within` (a process in uninterruptible sleep).
pub fn release(process: &ProcessIdentity, within: Duration) -> Result<(), HostError> {
    let what = format!("process {}", process.pid);
    let Some(pidfd) = open_for("release", process)? else {
        return reap(process, Duration::ZERO);
    };
    signal(pidfd.as_fd(), Signal::KILL).map_err(|e| error::os("release", &what, "SIGKILL", e))?;
    match wait(pidfd.as_fd(), within) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => {
            let why = format!("still there {within:?} after SIGKILL ({})", stat::describe(process.pid));
            Err(error::plain("release", what, ErrorClass::Deadline, why))
        }
        Err(e) => Err(error::os("release", what, "wait", e)),
    }
}

/// A word or two on a process for an operator: its name and state letter.
#[must_use]
pub fn describe(pid: u32) -> String {
    stat::describe(pid)
}

/// The name of the process that has `pid` now (at most 15 bytes), for messages.
#[must_use]
pub fn comm(pid: u32) -> Option<String> {
    stat::read(pid).ok().map(|s| s.comm)
}

/// A process as its line in `/proc` shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Its name, at most 15 bytes.
    pub comm: String,
    /// Pid of its parent.
    pub parent: u32,
    /// Clock ticks after boot.
    pub start_time: u64,
}

/// Looks at a process; nothing if it is gone or a zombie.
///
/// # Errors
/// If it is there and cannot be looked at.
pub fn look(pid: u32) -> io::Result<Option<Seen>> {
    match stat::read(pid) {
        Ok(stat) if stat.ended() => Ok(None),
        Ok(stat) => Ok(Some(Seen { comm: stat.comm, parent: stat.parent, start_time: stat.start_time })),
        Err(e) if stat::says_absent(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// When a process that began so many clock ticks after boot did so, in milliseconds since the Unix epoch.
#[must_use]
pub fn started_ms(start_time: u64) -> Option<u64> {
    static BOOTED: OnceLock<Option<u64>> = OnceLock::new();
    let booted = *BOOTED.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/stat").ok()?;
        text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
    });
    // SAFETY: sysconf only reads.
    let ticks = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok().filter(|t| *t > 0)?;
    Some(booted?.saturating_mul(1000).saturating_add(start_time.saturating_mul(1000) / ticks))
}

/// Whether SIGKILL was sent to a process that is still there.
#[must_use]
pub fn is_killed(pid: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return false };
    let masks = text.lines().filter_map(|l| l.strip_prefix("SigPnd:").or_else(|| l.strip_prefix("ShdPnd:")));
    let kill = 1u64 << (libc::SIGKILL - 1);
    masks.filter_map(|m| u64::from_str_radix(m.trim(), 16).ok()).any(|mask| mask & kill != 0)
}

/// This process's soft limit of open files.
pub(crate) fn nofile_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX)
}

/// Raises this process's soft limit of open files to its hard one: a daemon holds a few per sandbox, and one
/// that runs out of them cannot watch its shims.
///
/// # Errors
/// From setrlimit(2); the limit is then as it was.
pub fn raise_nofile_limit() -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).map_err(io::Error::from)
}
