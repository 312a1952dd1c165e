//! A slot that processes of ours keep alive: told to end, then killed.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use hearth_core::host::SlotRelease;
use hearth_core::network::SlotIndex;

use crate::net::error::{Op, Result};
use crate::net::holders;
use crate::process::{self, Signal};

/// Processes that were told to end, and whose slot waits for it.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) slot: SlotIndex,
    processes: Vec<(u32, OwnedFd)>,
    kill_at: Instant,
    until: Instant,
    killed: bool,
}

impl Held {
    /// Sends SIGTERM to each. The pidfds were opened before the pids were proven, so no stranger is hit.
    pub(super) fn tell_to_end(
        op: &Op,
        slot: SlotIndex,
        processes: Vec<(u32, OwnedFd)>,
        order: &SlotRelease<'_>,
    ) -> Result<Self> {
        for (pid, fd) in &processes {
            process::signal(fd.as_fd(), Signal::TERM)
                .map_err(|e| op.io(&format!("end {}", holders::describe(*pid)), e))?;
        }
        let kill_at = Instant::now() + order.grace;
        Ok(Self { slot, processes, kill_at, until: kill_at + order.within, killed: false })
    }

    /// Whether all have ended; kills those whose time is over.
    ///
    /// # Errors
    /// Deadline if one does not even end by SIGKILL in time.
    pub(super) fn look(&mut self, op: &Op) -> Result<bool> {
        let mut left = Vec::new();
        for (pid, fd) in std::mem::take(&mut self.processes) {
            let ended = process::wait(fd.as_fd(), Duration::ZERO)
                .map_err(|e| op.io(&format!("wait for {}", holders::describe(pid)), e))?;
            if ended.is_none() {
                left.push((pid, fd));
            }
        }
        self.processes = left;
        if self.processes.is_empty() {
            return Ok(true);
        }
        let now = Instant::now();
        let names =
            || holders::named(self.processes.iter().map(|(pid, _)| holders::describe(*pid)).collect());
        if now >= self.until {
            return Err(op.deadline(format!("killed and still there: {}", names().join(", "))));
        }
        if now >= self.kill_at && !self.killed {
            self.killed = true;
            for (pid, fd) in &self.processes {
                process::signal(fd.as_fd(), Signal::KILL)
                    .map_err(|e| op.io(&format!("kill {}", holders::describe(*pid)), e))?;
            }
        }
        Ok(false)
    }
}
