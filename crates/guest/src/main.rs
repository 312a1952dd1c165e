//! Init and agent of a hearth guest, in one small static program.
//!
//! As pid 1 of our initramfs it loads modules, mounts the root disk with its overlay, moves into it and
//! serves the host over a virtio-serial port or vsock. With `--agent-fd N` it only serves, on a connected
//! socket it inherited, and leaves the machine alone: that is the test VMM `process`.
//!
//! The protocol is `hearth_core::agent`. Modules: `boot` (pid 1 up to the new root), `port` and `vsock`
//! (transports), `session` (handshake, yamux), `agent` (requests), `places`, `exec`, `spawn`, `reaper`, `users`
//! (commands), `configure`, `net`, `power` (the guest as a whole). One thread: an await is the only place where
//! something else can run, which is what makes "fork, then register the child" free of races.
//!
//! It must never depend on a program or a directory of the root file system, and never panic on what it reads.

// Runs inside the guest: fork, exec, ioctls and module loading have no safe wrapper that fits pid 1.
#![allow(unsafe_code)]
// The standard runtime opens /dev/null where a standard descriptor is missing and aborts if it cannot; as
// pid 1 of an initramfs without device nodes that would be a kernel panic. So main is the C one.
#![cfg_attr(not(test), no_main)]
#![cfg_attr(test, allow(dead_code))]

use std::os::fd::{FromRawFd, OwnedFd};

mod agent;
mod boot;
mod configure;
mod dev;
mod exec;
mod frame;
mod modules;
mod net;
mod places;
mod port;
mod power;
mod reaper;
mod session;
mod spawn;
mod users;
mod vsock;

/// A line on the console (or stderr). Output errors have nowhere to go.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::print_line(format_args!($($arg)*))
    };
}
pub(crate) use say;

/// Says in code what the comment next to it explains: this failure concerns nobody.
pub(crate) fn ignore<T, E>(_: Result<T, E>) {}

pub(crate) fn print_line(line: std::fmt::Arguments<'_>) {
    use std::io::Write;
    // One write per line, so that it is not mixed with the kernel's; nobody to tell if it fails.
    ignore(std::io::stderr().write_all(format!("hearth-guest: {line}\n").as_bytes()));
}

/// Entry point; see the crate's head for why it is not the standard one.
#[cfg(not(test))]
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    // A panic must not unwind into C. It has printed itself by then.
    let code = std::panic::catch_unwind(run).unwrap_or(101);
    libc::c_int::from(code)
}

/// The test harness replaces it.
#[cfg(test)]
fn main() {}

fn run() -> u8 {
    // The standard runtime would have done this: a command that closed its stdin must not end us.
    // SAFETY: sets a disposition before any thread or handler exists.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["--agent-fd", fd] => match fd.parse() {
            Ok(fd) if fd > 2 => serve_fd(fd),
            _ => usage(&format!("--agent-fd wants the number of an inherited socket, not {fd:?}")),
        },
        ["--version"] => {
            println!("hearth-guest {}", env!("CARGO_PKG_VERSION"));
            0
        }
        // The kernel passes what it does not know itself as arguments to pid 1.
        _ if std::process::id() == 1 => serve_as_init(),
        _ => usage("it runs as pid 1 of a guest, or with --agent-fd N"),
    }
}

fn usage(what: &str) -> u8 {
    say!("{what}");
    2
}

fn serve_fd(fd: i32) -> u8 {
    // SAFETY: asks about a number; nothing is assumed about it.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return usage(&format!("descriptor {fd} is not open"));
    }
    // SAFETY: open, as just seen, and by the contract of --agent-fd ours alone.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    finish(block_on(agent::serve_socket(socket)))
}

fn serve_as_init() -> u8 {
    match boot::boot() {
        Ok(()) => {}
        Err(e) => {
            say!("boot failed: {e}");
            power::give_up();
        }
    }
    // Returns only if the runtime cannot start; pid 1 ending makes the kernel panic, which ends the VM.
    finish(block_on(agent::serve_guest()))
}

fn block_on(work: impl Future<Output = std::io::Result<()>>) -> std::io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

fn finish(result: std::io::Result<()>) -> u8 {
    match result {
        Ok(()) => 0,
        Err(e) => {
            say!("{e}");
            1
        }
    }
}
