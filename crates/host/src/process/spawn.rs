//! Starts a program by one `clone3`: born in its cgroup, with a pidfd, an exact list of descriptors and
//! nothing else inherited. The child shares the parent's memory until it executes the program
//! (`CLONE_VM | CLONE_VFORK`), so the cost does not grow with the daemon's heap (a fork of 512 MiB: 27 ms;
//! this: 0.7 ms). What runs in that time is in `child.rs` and makes only system calls.
//!
//! **Parent-death signal**: `PR_SET_PDEATHSIG` follows the *thread* that called [`spawn`], not the process.
//! If that thread ends, the child is signalled though the process lives on. Call from the main thread or one
//! that lives as long as the process; never from a pool that retires threads (tokio's blocking pool).

use std::ffi::{CString, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hearth_core::process::ProcessIdentity;

use super::child::{self, Plan};
use super::{Mounts, Signal, identity_of};

/// What to start, and how.
#[derive(Debug, Default)]
pub struct SpawnOptions<'a> {
    /// Absolute path; no search.
    pub program: PathBuf,
    /// Arguments without the program's name.
    pub args: Vec<OsString>,
    /// The whole environment: nothing is inherited.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory; `None`: the caller's.
    pub cwd: Option<PathBuf>,
    /// Directory of the cgroup it is born in; `None`: the caller's.
    pub cgroup_fd: Option<BorrowedFd<'a>>,
    /// Network namespace it enters; `None`: the calling thread's.
    pub netns: Option<BorrowedFd<'a>>,
    /// A session of its own: out of reach of the caller's terminal, and without one.
    pub new_session: bool,
    /// Sent to it when the calling *thread* ends (see the head of this file).
    pub parent_death_signal: Option<Signal>,
    /// The descriptors it has, each with its number there. Standard input, output and error are entries
    /// like any other; what is not listed is closed.
    pub fds: Vec<(OwnedFd, RawFd)>,
    /// Which mounts it sees.
    pub mounts: Mounts<'a>,
    /// Soft limit of open files, lowered to the present hard limit where that is less.
    pub rlimit_nofile: Option<u64>,
}

/// A started process. Dropping it neither ends nor reaps the process: see [`super::wait`].
#[derive(Debug)]
pub struct Child {
    /// To be recorded.
    pub identity: ProcessIdentity,
    /// Readable when it ended.
    pub pidfd: OwnedFd,
}

/// The step that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Step {
    /// Checks and copies before anything was started.
    Prepare = 1,
    /// clone3(2); `EBUSY` or `ENODEV` speak of the cgroup.
    Clone,
    /// setsid(2).
    Session,
    /// `PR_SET_PDEATHSIG`; `ESRCH`: the parent died meanwhile.
    ParentDeathSignal,
    /// setns(2).
    Netns,
    /// setns(2), unshare(2) and making `/` a slave.
    Mounts,
    /// setrlimit(2).
    Limit,
    /// chdir(2).
    Directory,
    /// dup2(2) and close_range(2).
    Descriptors,
    /// Dispositions and mask.
    Signals,
    /// execve(2).
    Exec,
    /// Reading the new process's start time.
    Identity,
}

impl Step {
    const CHILD: [Step; 9] = [
        Step::Session,
        Step::ParentDeathSignal,
        Step::Netns,
        Step::Mounts,
        Step::Limit,
        Step::Directory,
        Step::Descriptors,
        Step::Signals,
        Step::Exec,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Prepare => "prepare",
            Step::Clone => "clone3 into the cgroup for",
            Step::Session => "setsid for",
            Step::ParentDeathSignal => "parent-death signal for",
            Step::Netns => "enter the network namespace for",
            Step::Mounts => "private mounts for",
            Step::Limit => "limit of open files for",
            Step::Directory => "chdir for",
            Step::Descriptors => "descriptors of",
            Step::Signals => "signal state of",
            Step::Exec => "exec",
            Step::Identity => "identity of",
        })
    }
}

/// A program that was not started. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
#[error("{step} {}: {error}", program.display())]
pub struct SpawnError {
    /// Where it failed.
    pub step: Step,
    /// Which program.
    pub program: PathBuf,
    /// Why; part of the text, hence not a `source`.
    pub error: io::Error,
}

/// Starts a program. Blocks this thread until the program is executed or failed to be.
///
/// # Errors
/// Names the step. The failed child is gone and reaped by then.
pub fn spawn(options: SpawnOptions<'_>) -> Result<Child, SpawnError> {
    let program = options.program.clone();
    let fail = |step, error| SpawnError { step, program: program.clone(), error };
    let prepared = Prepared::new(options).map_err(|e| fail(Step::Prepare, e))?;
    let outcome = child::start(&prepared.plan(), prepared.cgroup).map_err(|e| fail(Step::Clone, e))?;
    // SAFETY: clone3 has just made this descriptor for us; nobody else knows the number.
    let pidfd = unsafe { OwnedFd::from_raw_fd(outcome.pidfd) };
    drop(prepared);
    if let Some((step, errno)) = outcome.failed {
        reap(&pidfd);
        let step = Step::CHILD.into_iter().find(|s| *s as u32 == step).unwrap_or(Step::Exec);
        return Err(fail(step, io::Error::from_raw_os_error(errno)));
    }
    // Our unreaped child: the pid is its own until somebody waits for it.
    match identity_of(outcome.pid) {
        Ok(identity) => Ok(Child { identity, pidfd }),
        Err(e) => {
            kill_and_reap(&pidfd);
            Err(fail(Step::Identity, e))
        }
    }
}

fn kill_and_reap(pidfd: &OwnedFd) {
    use std::os::fd::AsFd;
    if let Err(e) = super::signal(pidfd.as_fd(), Signal::KILL) {
        tracing::warn!(error = %e, "a process whose identity could not be read was not killed");
    }
    reap(pidfd);
}

/// The child has called `_exit` or was killed: its end is a matter of moments.
fn reap(pidfd: &OwnedFd) {
    use std::os::fd::AsFd;
    match super::wait(pidfd.as_fd(), std::time::Duration::from_secs(5)) {
        Ok(Some(_)) => {}
        Ok(None) => tracing::warn!("a child that failed to start does not end; it will stay as a zombie"),
        Err(e) => tracing::warn!(error = %e, "a child that failed to start was not reaped"),
    }
}

/// Everything the child reads, owned here: it must not allocate.
struct Prepared {
    program: CString,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    cwd: Option<CString>,
    cgroup: Option<RawFd>,
    netns: Option<RawFd>,
    new_session: bool,
    death_signal: Option<i32>,
    fds: Vec<(OwnedFd, RawFd)>,
    moves: Vec<(RawFd, RawFd)>,
    gaps: Vec<(u32, u32)>,
    own_mounts: bool,
    mounts_from: Option<RawFd>,
    nofile: Option<libc::rlimit>,
    /// What `argv` and `envp` point into.
    _strings: Vec<CString>,
}

impl Prepared {
    fn new(options: SpawnOptions<'_>) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
        if !options.program.is_absolute() {
            return Err(invalid("the path is not absolute"));
        }
        let program = c_string(options.program.as_os_str())?;
        let mut strings = vec![program.clone()];
        for arg in &options.args {
            strings.push(c_string(arg)?);
        }
        let argc = strings.len();
        for (key, value) in &options.env {
            if key.is_empty() || key.as_bytes().contains(&b'=') {
                return Err(invalid("an environment variable's name is empty or has a '='"));
            }
            let mut line = key.clone();
            line.push("=");
            line.push(value);
            strings.push(c_string(&line)?);
        }
        let pointers = |range: &[CString]| {
            range.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
        };
        let (argv, envp) = (pointers(&strings[..argc]), pointers(&strings[argc..]));
        let (fds, moves, gaps) = arrange(options.fds)?;
        Ok(Self {
            program,
            argv,
            envp,
            cwd: options.cwd.as_deref().map(Path::as_os_str).map(c_string).transpose()?,
            cgroup: options.cgroup_fd.map(|fd| fd.as_raw_fd()),
            netns: options.netns.map(|fd| fd.as_raw_fd()),
            new_session: options.new_session,
            death_signal: options.parent_death_signal.map(Signal::as_raw),
            fds,
            moves,
            gaps,
            own_mounts: !matches!(options.mounts, Mounts::Shared),
            mounts_from: match options.mounts {
                Mounts::OwnFrom(fd) => Some(fd.as_raw_fd()),
                Mounts::Shared | Mounts::Own => None,
            },
            nofile: options.rlimit_nofile.map(limit).transpose()?,
            _strings: strings,
        })
    }

    fn plan(&self) -> Plan<'_> {
        debug_assert_eq!(self.fds.len(), self.moves.len());
        Plan {
            program: &self.program,
            argv: &self.argv,
            envp: &self.envp,
            cwd: self.cwd.as_deref(),
            netns: self.netns,
            new_session: self.new_session,
            death_signal: self.death_signal,
            parent: std::process::id(),
            moves: &self.moves,
            gaps: &self.gaps,
            own_mounts: self.own_mounts,
            mounts_from: self.mounts_from,
            nofile: self.nofile,
        }
    }
}

fn c_string(s: &std::ffi::OsStr) -> io::Result<CString> {
    Ok(CString::new(s.as_bytes())?)
}

fn limit(wanted: u64) -> io::Result<libc::rlimit> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a value of the right type that lives across the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut now) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::rlimit { rlim_cur: wanted.min(now.rlim_max), rlim_max: now.rlim_max })
}

type Arranged = (Vec<(OwnedFd, RawFd)>, Vec<(RawFd, RawFd)>, Vec<(u32, u32)>);

/// Lifts every source above every target, so that no move can overwrite a source still needed; and lists the
/// ranges to close afterwards.
fn arrange(given: Vec<(OwnedFd, RawFd)>) -> io::Result<Arranged> {
    let mut targets: Vec<RawFd> = given.iter().map(|(_, t)| *t).collect();
    targets.sort_unstable();
    if targets.first().is_some_and(|t| *t < 0) || targets.windows(2).any(|w| w[0] == w[1]) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a descriptor number is negative or given twice",
        ));
    }
    let above = targets.last().map_or(0, |t| t.saturating_add(1));
    let mut fds = Vec::with_capacity(given.len());
    for (fd, target) in given {
        let fd = if fd.as_raw_fd() < above { rustix::io::fcntl_dupfd_cloexec(&fd, above)? } else { fd };
        fds.push((fd, target));
    }
    let moves = fds.iter().map(|(fd, target)| (fd.as_raw_fd(), *target)).collect();
    let mut gaps = Vec::new();
    let mut next = 0u32;
    for target in targets {
        let target = target.unsigned_abs();
        if target > next {
            gaps.push((next, target - 1));
        }
        next = target + 1;
    }
    gaps.push((next, u32::MAX));
    Ok((fds, moves, gaps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_exactly_what_is_not_listed() {
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let (fds, moves, gaps) = arrange(vec![(null(), 5), (null(), 0), (null(), 1)]).unwrap();
        assert_eq!(gaps, [(2, 4), (6, u32::MAX)]);
        assert!(moves.iter().all(|(from, _)| *from > 5), "{moves:?}");
        assert_eq!(fds.len(), 3);
        assert_eq!(arrange(vec![]).unwrap().2, [(0, u32::MAX)]);
        assert!(arrange(vec![(null(), 1), (null(), 1)]).is_err());
    }
}
