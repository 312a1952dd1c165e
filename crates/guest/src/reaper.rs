//! The only place that waits for children: commands and, as pid 1, orphans. A command's entry goes in the
//! same step in which its pid is freed, so that no signal can reach a later process of that number.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_core::agent::ExecExit;
use rustix::process::{WaitOptions, WaitStatus};
use tokio::sync::oneshot;

use crate::ignore;

/// A command that runs.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    /// Of its first process, and of its process group.
    pub(crate) pid: i32,
    /// Its terminal, if it has one.
    pub(crate) tty: Option<Arc<OwnedFd>>,
}

#[derive(Debug, Default)]
struct Table {
    by_pid: HashMap<i32, (String, oneshot::Sender<ExecExit>)>,
    by_id: HashMap<String, Running>,
}

/// Commands by id and by pid.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    table: Mutex<Table>,
}

impl Reaper {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command with this id.
    pub(crate) fn running(&self, id: &str) -> Option<Running> {
        self.table().by_id.get(id).cloned()
    }

    /// Pids of all commands.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.table().by_pid.keys().copied().collect()
    }

    /// Enters a child that was just forked. No await may lie between fork and this: there is one thread, so
    /// the child cannot be reaped before.
    pub(crate) fn register(&self, id: &str, running: Running) -> oneshot::Receiver<ExecExit> {
        let (tx, rx) = oneshot::channel();
        let mut table = self.table();
        table.by_pid.insert(running.pid, (id.to_owned(), tx));
        table.by_id.insert(id.to_owned(), running);
        rx
    }

    /// Takes every child that has ended.
    pub(crate) fn reap(&self) {
        // Ends with None (none has ended) or ECHILD (there are none).
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let Some(exit) = exit_of(status) else { continue };
            let mut table = self.table();
            if let Some((id, tx)) = table.by_pid.remove(&pid.as_raw_nonzero().get()) {
                table.by_id.remove(&id);
                // Nobody waits if the command could not be started.
                ignore(tx.send(exit));
            }
        }
    }
}

fn exit_of(status: WaitStatus) -> Option<ExecExit> {
    if let Some(code) = status.exit_status() {
        return Some(ExecExit { code: Some(code), signal: None });
    }
    status.terminating_signal().map(|signal| ExecExit { code: None, signal: Some(signal) })
}
