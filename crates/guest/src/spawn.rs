//! Fork and exec of one command. Everything is prepared before the fork; the child makes system calls only.
//! A step of the child that fails is reported through a close-on-exec pipe, whose end without a report means
//! that the program runs. The parent reads it asynchronously: loading a program may wait for a slow disk, and
//! the agent has one thread.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::OnceLock;

use crate::users::Ids;

/// A command, ready to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) argv: Vec<CString>,
    pub(crate) env: Vec<CString>,
    /// Programs to try in this order.
    pub(crate) candidates: Vec<CString>,
    pub(crate) workdir: CString,
    /// Where the working directory was not asked for, `/` will do.
    pub(crate) workdir_optional: bool,
    /// `None`: stay who we are.
    pub(crate) ids: Option<Ids>,
    /// Stdin is a terminal and becomes the controlling one.
    pub(crate) tty: bool,
    /// The command dies with the agent.
    pub(crate) dies_with_agent: bool,
}

/// Step of the child that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Session, terminal, standard descriptors.
    Setup = 1,
    /// Groups and user.
    User = 2,
    /// Working directory.
    Workdir = 3,
    /// The program itself.
    Exec = 4,
}

/// A child that was forked, and the pipe on which it reports.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: i32,
    pub(crate) report: OwnedFd,
}

/// Open files of the agent: three for each command it may have, and its own.
const NOFILE: u64 = 4096;
/// What commands get: the limit this process was started with.
static COMMANDS_NOFILE: OnceLock<libc::rlimit> = OnceLock::new();

/// Raises this process's own limit of open files; commands keep the old one. Where it may not be raised, fewer
/// commands can run, and one too many says so.
pub(crate) fn raise_own_limit() {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills a local structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut old) } < 0 {
        return;
    }
    let wanted = libc::rlimit { rlim_cur: old.rlim_cur.max(NOFILE), rlim_max: old.rlim_max.max(NOFILE) };
    let allowed = libc::rlimit { rlim_cur: wanted.rlim_cur.min(old.rlim_max), rlim_max: old.rlim_max };
    // SAFETY: reads local structures.
    let raised = unsafe {
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const wanted) == 0
            || libc::setrlimit(libc::RLIMIT_NOFILE, &raw const allowed) == 0
    };
    if raised {
        // Called once per process.
        crate::ignore(COMMANDS_NOFILE.set(old));
    }
}

/// Length of a report: stage, then errno.
pub(crate) const REPORT: usize = 5;

/// What a report says.
pub(crate) fn parse_report(report: [u8; REPORT]) -> (Stage, io::Error) {
    let [stage, errno @ ..] = report;
    let stage = [Stage::Setup, Stage::User, Stage::Workdir, Stage::Exec]
        .into_iter()
        .find(|s| *s as u8 == stage)
        .unwrap_or(Stage::Setup);
    (stage, io::Error::from_raw_os_error(i32::from_le_bytes(errno)))
}

/// Forks. The caller registers the pid before its next await.
pub(crate) fn fork(plan: &Plan, stdio: [BorrowedFd<'_>; 3]) -> io::Result<Forked> {
    let (report, report_child) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let argv = pointers(&plan.argv);
    let env = pointers(&plan.env);
    let child = Child {
        plan,
        argv: &argv,
        env: &env,
        stdio: stdio.map(|fd| fd.as_raw_fd()),
        report: report_child.as_raw_fd(),
        parent: std::process::id().cast_signed(),
        nofile: COMMANDS_NOFILE.get(),
    };
    // SAFETY: the process has one thread, so the child's memory is consistent; the child calls only
    // async-signal-safe functions on memory prepared above and ends in exec or _exit.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => child.run(),
        pid => Ok(Forked { pid, report }),
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// What the child needs; borrowed from the parent's memory before the fork.
struct Child<'a> {
    plan: &'a Plan,
    argv: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
    stdio: [i32; 3],
    report: i32,
    parent: i32,
    nofile: Option<&'a libc::rlimit>,
}

impl Child<'_> {
    fn run(&self) -> ! {
        let (stage, errno) = match self.steps() {
            Ok(never) => match never {},
            Err(failed) => failed,
        };
        let mut report = [stage as u8, 0, 0, 0, 0];
        report[1..].copy_from_slice(&errno.to_le_bytes());
        // SAFETY: writes a local array to a descriptor we hold; _exit runs no destructor of the parent's.
        unsafe {
            libc::write(self.report, report.as_ptr().cast(), report.len());
            libc::_exit(127)
        }
    }

    fn steps(&self) -> Result<std::convert::Infallible, (Stage, i32)> {
        let setup = |r: libc::c_int| check(r).map_err(|e| (Stage::Setup, e));
        // SAFETY: system calls on numbers, and on memory of this process that outlives them. Dispositions
        // and mask are reset since exec would hand ours on (SIGPIPE is ignored here).
        unsafe {
            setup(libc::setsid())?;
            for signal in 1..=64 {
                // Fails for KILL, STOP and the two that libc keeps; they have no other disposition.
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            setup(libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()))?;
            // Sources are above 2, since 0 to 2 are open in the agent; so no dup2 destroys a later source.
            for (target, source) in (0..).zip(self.stdio) {
                setup(libc::dup2(source, target))?;
            }
            if self.plan.tty {
                setup(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
            }
            // All of ours are close-on-exec; this catches what the host's process VMM leaked to us. Old
            // kernels do not know it.
            libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
            libc::umask(0o022);
            if let Some(limit) = self.nofile {
                setup(libc::setrlimit(libc::RLIMIT_NOFILE, ptr::from_ref(limit)))?;
            }
        }
        self.become_user().map_err(|e| (Stage::User, e))?;
        self.enter_workdir().map_err(|e| (Stage::Workdir, e))?;
        if self.plan.dies_with_agent {
            // SAFETY: as above. Changing the user cleared it, hence here; the parent may have died before.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() != self.parent {
                    libc::_exit(127);
                }
            }
        }
        Err((Stage::Exec, self.exec()))
    }

    fn become_user(&self) -> Result<(), i32> {
        let Some(ids) = &self.plan.ids else { return Ok(()) };
        // The raw calls: libc's wrappers signal other threads, and there are none. Groups first, user last,
        // since each step needs the rights that the last one gives away.
        // SAFETY: the list outlives the call.
        unsafe {
            check_long(libc::syscall(libc::SYS_setgroups, ids.groups.len(), ids.groups.as_ptr()))?;
            check_long(libc::syscall(libc::SYS_setresgid, ids.gid, ids.gid, ids.gid))?;
            check_long(libc::syscall(libc::SYS_setresuid, ids.uid, ids.uid, ids.uid))
        }
    }

    fn enter_workdir(&self) -> Result<(), i32> {
        // SAFETY: terminated strings that outlive the call.
        let entered = check(unsafe { libc::chdir(self.plan.workdir.as_ptr()) });
        if entered.is_err() && self.plan.workdir_optional {
            // SAFETY: as above.
            return check(unsafe { libc::chdir(c"/".as_ptr()) });
        }
        entered
    }

    /// Tries each candidate, as `execvp` does, but without its fallback to a shell. Returns the error.
    fn exec(&self) -> i32 {
        let mut error = libc::ENOENT;
        for program in &self.plan.candidates {
            // SAFETY: null-terminated arrays of terminated strings that outlive the call.
            unsafe { libc::execve(program.as_ptr(), self.argv.as_ptr(), self.env.as_ptr()) };
            match errno() {
                libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG => {}
                // It may be found, and runnable, further on; if not, this says more than "not found".
                libc::EACCES => error = libc::EACCES,
                other => return other,
            }
        }
        error
    }
}

fn errno() -> i32 {
    // SAFETY: the address is this thread's errno.
    unsafe { *libc::__errno_location() }
}

fn check(result: libc::c_int) -> Result<(), i32> {
    if result < 0 { Err(errno()) } else { Ok(()) }
}

fn check_long(result: libc::c_long) -> Result<(), i32> {
    if result < 0 { Err(errno()) } else { Ok(()) }
}

/// Programs that `argv[0]` may mean: itself if it has a slash, else one per directory of PATH.
pub(crate) fn candidates(program: &str, path: &str) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    path.split(':')
        .map(|dir| if dir.is_empty() { "." } else { dir })
        .map(|d| format!("{d}/{program}"))
        .collect()
}

/// Two descriptors of a new terminal, ours and the command's. Its peer is opened through ours, so `/dev/pts`
/// of the guest is not needed.
pub(crate) fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::OpenptFlags;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&ours)?;
    let theirs = rustix::pty::ioctl_tiocgptpeer(&ours, flags)?;
    Ok((ours, theirs))
}

/// `/dev/null`, or where it is missing an empty pipe's reading end.
pub(crate) fn null() -> io::Result<OwnedFd> {
    // SAFETY: a terminated path; the result is checked.
    let fd = unsafe { libc::open(CStr::as_ptr(c"/dev/null"), libc::O_RDWR | libc::O_CLOEXEC) };
    if fd >= 0 {
        // SAFETY: just opened, owned by nobody else.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_lookup() {
        assert_eq!(candidates("./x", "/bin"), ["./x"]);
        assert_eq!(candidates("sh", "/a::/b"), ["/a/sh", "./sh", "/b/sh"]);
    }

    #[test]
    fn reports_are_parsed() {
        let (stage, e) = parse_report([3, 2, 0, 0, 0]);
        assert_eq!((stage, e.raw_os_error()), (Stage::Workdir, Some(libc::ENOENT)));
    }
}
