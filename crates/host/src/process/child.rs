//! The moments between `clone3` and `execve`. The child runs on a stack of its own in the parent's memory
//! while the parent's thread waits: it must not allocate, lock, panic or return, and it may only make system
//! calls. All it reads was prepared before; it reports through one shared page.

use std::ffi::CStr;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::spawn::Step;

/// What the child does, in the order of [`Step`].
pub(super) struct Plan<'a> {
    pub(super) program: &'a CStr,
    pub(super) argv: &'a [*const libc::c_char],
    pub(super) envp: &'a [*const libc::c_char],
    pub(super) cwd: Option<&'a CStr>,
    pub(super) netns: Option<RawFd>,
    pub(super) new_session: bool,
    pub(super) death_signal: Option<i32>,
    pub(super) parent: u32,
    pub(super) moves: &'a [(RawFd, RawFd)],
    pub(super) gaps: &'a [(u32, u32)],
    pub(super) own_mounts: bool,
    pub(super) mounts_from: Option<RawFd>,
    pub(super) nofile: Option<libc::rlimit>,
}

/// A child was made; it runs the program, or `failed` says which step did not work, with the errno.
pub(super) struct Outcome {
    pub(super) pid: u32,
    pub(super) pidfd: RawFd,
    pub(super) failed: Option<(u32, i32)>,
}

/// First page of the mapping that is shared with the child in any case, even where memory is not.
#[repr(C)]
struct Report {
    step: AtomicU32,
    errno: AtomicI32,
}

#[repr(C)]
struct Task<'a> {
    plan: &'a Plan<'a>,
    report: &'a Report,
}

/// As in `linux/sched.h`; the libc crate's constant overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const STACK: usize = 64 * 1024;
const PAGE: usize = 4096;

/// `[report | guard | stack]`, one anonymous shared mapping.
struct Region(*mut libc::c_void);

impl Region {
    const LEN: usize = 2 * PAGE + STACK;

    fn new() -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping; no address is asked for.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::LEN,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let region = Self(at);
        // SAFETY: the second page lies inside the mapping just made and nothing refers to it.
        if unsafe { libc::mprotect(at.byte_add(PAGE), PAGE, libc::PROT_NONE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(region)
    }

    fn report(&self) -> &Report {
        // SAFETY: the page is mapped, aligned, zeroed by the kernel (valid for two atomics), and lives as
        // long as `self`; both processes reach it through atomics only.
        unsafe { &*self.0.cast::<Report>() }
    }

    fn stack(&self) -> *mut libc::c_void {
        // SAFETY: two pages into a mapping of LEN bytes.
        unsafe { self.0.byte_add(2 * PAGE) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the child has executed or ended by now (CLONE_VFORK), so that nobody
        // stands on this stack.
        let rc = unsafe { libc::munmap(self.0, Self::LEN) };
        debug_assert_eq!(rc, 0);
    }
}

/// `struct clone_args` of clone3(2), version 2 (with `cgroup`).
#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Makes the child and waits until it runs the program or failed.
pub(super) fn start(plan: &Plan<'_>, cgroup: Option<RawFd>) -> io::Result<Outcome> {
    let region = Region::new()?;
    let task = Task { plan, report: region.report() };
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: (libc::CLONE_VFORK | libc::CLONE_PIDFD) as u64,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if SHARES_MEMORY {
        args.flags |= libc::CLONE_VM as u64;
        args.stack = region.stack() as u64;
        args.stack_size = STACK as u64;
    }
    if let Some(fd) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(fd.unsigned_abs());
    }
    // No handler of ours may run in the child: it would run in our memory under another pid.
    let old = block_all_signals()?;
    // SAFETY: `args` is a whole clone_args; stack, task, plan and report outlive the child's use of them,
    // since CLONE_VFORK holds this thread until it has executed or ended.
    let rc = unsafe { clone3(&args, &task) };
    restore_signals(&old);
    if rc < 0 {
        return Err(io::Error::from_raw_os_error(i32::try_from(-rc).unwrap_or(libc::EIO)));
    }
    let step = task.report.step.load(Ordering::Acquire);
    let errno = task.report.errno.load(Ordering::Acquire);
    Ok(Outcome { pid: u32::try_from(rc).unwrap_or(0), pidfd, failed: (step != 0).then_some((step, errno)) })
}

fn block_all_signals() -> io::Result<libc::sigset_t> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset writes the whole set, pthread_sigmask the whole old set on success.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        match libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr()) {
            0 => Ok(old.assume_init()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: a set that pthread_sigmask itself filled; it cannot fail with SIG_SETMASK.
    let rc = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
    debug_assert_eq!(rc, 0);
}

/// Where the call cannot be written without assembly we do not share memory: slower, but the same.
const SHARES_MEMORY: bool = cfg!(target_arch = "x86_64");

/// Returns the child's pid or a negated errno, in the parent only.
///
/// # Safety
/// With a stack in `args`: it is mapped, unused and outlives the child's use of it, as does `task`.
#[cfg(target_arch = "x86_64")]
unsafe fn clone3(args: &CloneArgs, task: &Task<'_>) -> i64 {
    let rc: i64;
    // SAFETY: the child starts behind `syscall` with rax = 0 on the new stack, whose top is 16-byte aligned
    // (a page boundary), calls `child_main` and never comes back; so it never touches this frame. In the
    // parent only rax, rcx and r11 change.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => rc,
            in("rdi") std::ptr::from_ref(args),
            in("rsi") std::mem::size_of::<CloneArgs>(),
            in("r12") std::ptr::from_ref(task),
            in("r13") child_main as extern "C" fn(&Task<'_>) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    rc
}

/// As above, without shared memory and on a copy of this stack.
///
/// # Safety
/// None beyond that of clone3(2) without `CLONE_VM`.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn clone3(args: &CloneArgs, task: &Task<'_>) -> i64 {
    // SAFETY: `args` is a whole clone_args without CLONE_VM: the child has its own copy of everything.
    match unsafe {
        libc::syscall(libc::SYS_clone3, std::ptr::from_ref(args), std::mem::size_of::<CloneArgs>())
    } {
        0 => child_main(task),
        -1 => -i64::from(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
        pid => pid,
    }
}

extern "C" fn child_main(task: &Task<'_>) -> ! {
    // SAFETY: we are the child; see `run`.
    let step = unsafe { run(task.plan) };
    // SAFETY: errno of the failed call, in the memory of the waiting parent thread or our copy.
    let errno = unsafe { *libc::__errno_location() };
    task.report.errno.store(if errno == 0 { libc::EIO } else { errno }, Ordering::Release);
    task.report.step.store(step as u32, Ordering::Release);
    // SAFETY: ends this process alone; no handler and no destructor runs.
    unsafe { libc::_exit(127) }
}

/// Comes back only with the step that failed; errno says why.
///
/// # Safety
/// Only in the child: it gives up this process's descriptors, session and signals. Every call is a bare
/// system call; every pointer comes from the plan.
unsafe fn run(plan: &Plan<'_>) -> Step {
    // SAFETY: as this function's own contract.
    unsafe {
        if plan.new_session && libc::setsid() < 0 {
            return Step::Session;
        }
        if let Some(signal) = plan.death_signal {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal as libc::c_ulong, 0, 0, 0) != 0 {
                return Step::ParentDeathSignal;
            }
            // Had the parent died before the call above, no signal would ever come.
            if libc::getppid().unsigned_abs() != plan.parent {
                *libc::__errno_location() = libc::ESRCH;
                return Step::ParentDeathSignal;
            }
        }
        if let Some(fd) = plan.netns
            && libc::setns(fd, libc::CLONE_NEWNET) != 0
        {
            return Step::Netns;
        }
        if let Some(fd) = plan.mounts_from
            && libc::setns(fd, libc::CLONE_NEWNS) != 0
        {
            return Step::Mounts;
        }
        if plan.own_mounts {
            let (none, root) = (std::ptr::null(), c"/".as_ptr());
            if libc::unshare(libc::CLONE_NEWNS) != 0
                || libc::mount(none, root, none, libc::MS_REC | libc::MS_SLAVE, none.cast()) != 0
            {
                return Step::Mounts;
            }
        }
        if let Some(dir) = plan.cwd
            && libc::chdir(dir.as_ptr()) != 0
        {
            return Step::Directory;
        }
        // Sources lie above all targets; the copy loses close-on-exec.
        for (from, to) in plan.moves {
            if libc::dup2(*from, *to) < 0 {
                return Step::Descriptors;
            }
        }
        for (first, last) in plan.gaps {
            if libc::syscall(libc::SYS_close_range, *first, *last, 0) != 0 {
                return Step::Descriptors;
            }
        }
        // After the moves: a target may lie above the limit.
        if let Some(limit) = &plan.nofile
            && libc::setrlimit(libc::RLIMIT_NOFILE, limit) != 0
        {
            return Step::Limit;
        }
        // An ignored signal survives exec (Rust ignores SIGPIPE). The bare call, since glibc's keeps 32 and 33
        // for itself and those may come to us ignored. All zero is SIG_DFL; KILL and STOP are refused.
        let default = [0u64; 4];
        let mut signal = 1;
        while signal <= 64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u64>(), 8usize);
            signal += 1;
        }
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        if libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) != 0 {
            return Step::Signals;
        }
        libc::execve(plan.program.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr());
        Step::Exec
    }
}
