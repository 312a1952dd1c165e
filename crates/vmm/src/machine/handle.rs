//! The outside of a machine: its phases, the commands to its owner, and the handle that everybody else holds.

use std::time::Duration;

use hearth_core::block::DiskStats;
use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_core::usage::Usage;
use tokio::sync::{mpsc, oneshot, watch};

use crate::agent::AgentClient;
use crate::backend::VmmError;
use crate::disks::DiskBook;

/// Where a machine is, and what exists there.
#[derive(Debug, Clone)]
pub enum Phase {
    /// Waits for [`MachineHandle::boot`].
    Idle,
    /// The VMM runs, the guest is not ready.
    Booting {
        /// Of the VMM.
        vmm_pid: u32,
    },
    /// The guest is ready.
    Running {
        /// Of the VMM.
        vmm_pid: u32,
        /// None for a guest without one.
        agent: Option<AgentClient>,
    },
    /// The VMM was reaped and its exit record written.
    Exited(ExitRecord),
}

/// A command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The sandbox ended.
    #[error("sandbox exited: {}{}", .0.reason.as_str(), detail(.0))]
    Exited(ExitRecord),
    /// It does not run yet.
    #[error("the sandbox does not run yet")]
    NotRunning,
    /// The VMM refused.
    #[error("the VMM refused")]
    Vmm(#[from] VmmError),
    /// The owner task is gone without an exit record: a bug, or the runtime ends.
    #[error("the machine's task is gone")]
    Lost,
}

fn detail(record: &ExitRecord) -> String {
    if record.detail.is_empty() { String::new() } else { format!(": {}", record.detail) }
}

pub(super) enum Command {
    Boot,
    Stop {
        grace: Duration,
        /// Why, if it is no user who asks.
        policy: Option<String>,
    },
    /// What the VM depends on is broken.
    Fail {
        reason: ExitReason,
        why: String,
    },
    Usage(oneshot::Sender<Usage>),
    Pause(oneshot::Sender<Result<(), MachineError>>),
    Resume(oneshot::Sender<Result<(), MachineError>>),
}

impl Command {
    /// Answers a command that makes no sense now.
    pub(super) fn refuse(self) {
        if let Command::Pause(reply) | Command::Resume(reply) = self {
            // The caller may have gone.
            drop(reply.send(Err(MachineError::NotRunning)));
        }
    }
}

/// Answers a question; whoever asked may have gone.
pub(super) fn tell<T>(reply: oneshot::Sender<T>, value: T) {
    if reply.send(value).is_err() {
        tracing::debug!("nobody waits for an answer any more");
    }
}

/// What everybody but the owner holds.
#[derive(Debug, Clone)]
pub struct MachineHandle {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) phase: watch::Receiver<Phase>,
    pub(super) disk_book: DiskBook,
}

impl MachineHandle {
    /// The present phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// What was counted of each disk that is served; empty where the VMM opens the files itself.
    #[must_use]
    pub fn disk_stats(&self) -> Vec<DiskStats> {
        self.disk_book.stats()
    }

    /// Each change of phase, the present one not yet seen.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Phase> {
        let mut phase = self.phase.clone();
        phase.mark_changed();
        phase
    }

    /// Starts the VM once and waits until the guest is ready; the VMM's pid. Repeating it, also while another
    /// caller waits, gives the same outcome.
    ///
    /// # Errors
    /// [`MachineError::Exited`] if it ended instead.
    pub async fn boot(&self) -> Result<u32, MachineError> {
        // Unsent: the machine ended, and the phase says how.
        drop(self.commands.send(Command::Boot).await);
        match self.wait_for(|p| matches!(p, Phase::Running { .. } | Phase::Exited(_))).await? {
            Phase::Running { vmm_pid, .. } => Ok(vmm_pid),
            Phase::Exited(record) => Err(MachineError::Exited(record)),
            Phase::Idle | Phase::Booting { .. } => Err(MachineError::Lost),
        }
    }

    /// Asks the guest to end, waits for `grace`, kills. Returns when the VMM was reaped and its record is
    /// written. May be repeated; a shorter grace counts from then on.
    ///
    /// # Errors
    /// [`MachineError::Lost`] only.
    pub async fn stop(&self, grace: Duration) -> Result<ExitRecord, MachineError> {
        self.end_by(Command::Stop { grace, policy: None }).await
    }

    /// As [`stop`](Self::stop), for a reason of the daemon's own that is told in the record.
    ///
    /// # Errors
    /// [`MachineError::Lost`] only.
    pub async fn stop_by_policy(&self, grace: Duration, why: &str) -> Result<ExitRecord, MachineError> {
        self.end_by(Command::Stop { grace, policy: Some(why.to_owned()) }).await
    }

    /// Kills the VM since what serves it is broken: the record says `reason`, a backend's, and `why`.
    ///
    /// # Errors
    /// [`MachineError::Lost`] only.
    pub async fn fail(&self, reason: ExitReason, why: &str) -> Result<ExitRecord, MachineError> {
        self.end_by(Command::Fail { reason, why: why.to_owned() }).await
    }

    /// What the sandbox uses now; has the VMM asked for its numbers soon.
    ///
    /// # Errors
    /// If no VMM runs.
    pub async fn usage(&self) -> Result<Usage, MachineError> {
        let (reply, answer) = oneshot::channel();
        drop(self.commands.send(Command::Usage(reply)).await);
        let answer = tokio::select! {
            biased;
            answer = answer => answer.ok(),
            () = self.commands.closed() => None,
        };
        answer.ok_or_else(|| match self.phase() {
            Phase::Exited(record) => MachineError::Exited(record),
            _ => MachineError::NotRunning,
        })
    }

    async fn end_by(&self, command: Command) -> Result<ExitRecord, MachineError> {
        drop(self.commands.send(command).await);
        match self.wait_for(|p| matches!(p, Phase::Exited(_))).await? {
            Phase::Exited(record) => Ok(record),
            _ => Err(MachineError::Lost),
        }
    }

    /// Stops the virtual CPUs.
    ///
    /// # Errors
    /// If the machine does not run or the VMM refuses.
    pub async fn pause(&self) -> Result<(), MachineError> {
        self.ask(Command::Pause).await
    }

    /// Lets the virtual CPUs go on.
    ///
    /// # Errors
    /// If the machine does not run or the VMM refuses.
    pub async fn resume(&self) -> Result<(), MachineError> {
        self.ask(Command::Resume).await
    }

    /// The exit record, once there is one.
    pub async fn exited(&self) -> Option<ExitRecord> {
        match self.wait_for(|p| matches!(p, Phase::Exited(_))).await {
            Ok(Phase::Exited(record)) => Some(record),
            _ => None,
        }
    }

    async fn ask(
        &self,
        command: fn(oneshot::Sender<Result<(), MachineError>>) -> Command,
    ) -> Result<(), MachineError> {
        let (reply, answer) = oneshot::channel();
        drop(self.commands.send(command(reply)).await);
        let answer = tokio::select! {
            biased;
            answer = answer => answer.ok(),
            // What is sent while the queue is dropped stays in it as long as there is a sender: this one.
            () = self.commands.closed() => None,
        };
        match answer {
            Some(outcome) => outcome,
            // Unanswered: the machine ended meanwhile.
            None => match self.exited().await {
                Some(record) => Err(MachineError::Exited(record)),
                None => Err(MachineError::Lost),
            },
        }
    }

    async fn wait_for(&self, wanted: impl FnMut(&Phase) -> bool) -> Result<Phase, MachineError> {
        let mut phase = self.phase.clone();
        let seen = phase.wait_for(wanted).await.map_err(|_| MachineError::Lost)?;
        Ok(seen.clone())
    }
}
