//! Ends: of the processes, of the machine, and of a test agent's descendants.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions};
use rustix::system::{RebootCommand, reboot};

use crate::reaper::Reaper;
use crate::{boot, ignore, say};

/// How long processes may take to end themselves, and to be ended.
const TERM: Duration = Duration::from_secs(1);
const KILL: Duration = Duration::from_millis(500);
const STEP: Duration = Duration::from_millis(2);

/// The kill system call: a negative number is a process group, -1 is everybody but us.
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: a plain system call.
    if unsafe { libc::kill(pid, signal) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ends every process of the guest and makes the disks safe. Best effort: the machine goes off in any case.
pub(crate) async fn quiesce() {
    for (signal, patience) in [(libc::SIGTERM, TERM), (libc::SIGKILL, KILL)] {
        if kill(-1, signal).is_err() {
            break;
        }
        let start = Instant::now();
        // All processes descend from pid 1; the reaper's task takes them while this one sleeps.
        while start.elapsed() < patience && has_children() {
            tokio::time::sleep(STEP).await;
        }
        if !has_children() {
            break;
        }
    }
    rustix::fs::sync();
    boot::remount_read_only();
}

fn has_children() -> bool {
    let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(rustix::process::waitid(WaitId::All, peek), Err(Errno::CHILD))
}

/// Powers off; does not return. Where the machine cannot (the kernel would halt and the VM stay), it restarts,
/// which ends a Firecracker, and a qemu that has `-no-reboot`.
pub(crate) fn off() -> ! {
    let command = if boot::can_power_off() { RebootCommand::PowerOff } else { RebootCommand::Restart };
    for command in [command, RebootCommand::Restart] {
        if let Err(e) = reboot(command) {
            say!("{command:?}: {e}");
        }
    }
    // The end of pid 1 makes the kernel panic; `panic=` on its command line ends the VM.
    std::process::abort()
}

/// Boot failed: ends the machine once the console has the message. Does not return.
pub(crate) fn give_up() -> ! {
    rustix::fs::sync();
    std::thread::sleep(Duration::from_millis(100));
    off()
}

/// Makes this process the parent of every descendant whose own parent ends.
pub(crate) fn adopt_orphans() {
    // Fails on no kernel since 3.4; without it a few grandchildren may outlive a test.
    ignore(rustix::process::set_child_subreaper(Some(rustix::process::getpid())));
}

/// Kills all descendants of a test agent: whoever loses its parent becomes our child, so killing children
/// until there are none reaches all of them.
pub(crate) fn kill_descendants(reaper: &Reaper) {
    for pid in reaper.pids() {
        // Gone already is as good.
        ignore(kill(-pid, libc::SIGKILL));
    }
    let start = Instant::now();
    while start.elapsed() < TERM && has_children() {
        for pid in children() {
            ignore(kill(pid, libc::SIGKILL));
        }
        reaper.reap();
        std::thread::sleep(STEP);
    }
}

/// Processes whose parent we are, from `/proc`.
fn children() -> Vec<i32> {
    let us = std::process::id().to_string();
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            // The name in parentheses may hold anything; state and parent follow the last one.
            let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?;
            (parent == us).then_some(pid)
        })
        .collect()
}
