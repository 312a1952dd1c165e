//! One sandbox: the task that owns it and the handle others hold.
//!
//! ```text
//!            create()                 delete, or the VM ended
//! Creating ───────────► Running ───────────────────────────► Deleting ──release()──► gone
//!     │ error, cancel                                            ▲    │
//!     └──────────────────────────────────────────────────────────┘    ▼ not all gone
//!                                                               Stuck ─┘ retried with back-off
//! ```
//!
//! Only the task changes the record and the host. Everybody else sends a [`Command`] or reads the [`View`].

mod create;
mod ended;
mod places;
mod release;
mod shim_end;
mod task;

use std::path::PathBuf;

use hearth_core::exit::ExitRecord;
use hearth_core::id::{SandboxId, SandboxName};
use hearth_core::lifecycle::SandboxState;
use hearth_core::record::Record;
use hearth_core::steps::Step;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::shim_client::Client;
use crate::trace::TraceContext;

pub(crate) use create::Disks;
pub(crate) use ended::By;
pub(crate) use task::{Begin, Sandbox};

/// What others see of a sandbox.
#[derive(Debug, Clone)]
pub struct View {
    /// As on disk.
    pub record: Record,
    /// Where it is in its life; finer than the record between two writes.
    pub state: SandboxState,
    /// Time each step of creation took.
    pub steps: Vec<(Step, Duration)>,
    /// The shim, while it can be asked.
    pub shim: Option<Client>,
    /// Why the shim of a running sandbox cannot be asked; nothing before the first try.
    pub unreachable: Option<String>,
    /// How the VM ended.
    pub exit: Option<ExitRecord>,
    /// Set when everything is gone.
    pub gone: bool,
}

/// A step of creation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepStarted(pub Step);

/// What may be asked of a sandbox's task.
#[derive(Debug)]
pub(crate) enum Command {
    /// Release everything; the answer comes when all is gone, or says what is stuck. With who wants it and the span it is
    /// part of.
    Delete(oneshot::Sender<Result<(), String>>, By, TraceContext),
}

/// How others reach a sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    pub(crate) id: SandboxId,
    pub(crate) name: SandboxName,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) view: watch::Receiver<View>,
    /// Ends a creation under way.
    pub(crate) cancel: CancellationToken,
    /// `<run>/sandboxes/<id>`.
    pub(crate) run_dir: PathBuf,
}

/// Why a delete did not end with everything gone.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeleteError {
    /// Something is left and is tried again.
    #[error("stuck: {0}")]
    Stuck(String),
    /// The sandbox's task ended first: the daemon is shutting down, or the task is being replaced.
    #[error("the daemon stopped looking after it")]
    Ended,
}

impl Handle {
    /// Deletes and waits for the outcome.
    pub(crate) async fn delete(&self, by: By) -> Result<(), DeleteError> {
        self.delete_within(by, TraceContext::new()).await
    }

    /// The same below a span.
    pub(crate) async fn delete_within(&self, by: By, trace: TraceContext) -> Result<(), DeleteError> {
        self.cancel.cancel();
        let (answer, outcome) = oneshot::channel();
        let told = match self.commands.send(Command::Delete(answer, by, trace)).await {
            Ok(()) => tokio::select! {
                biased;
                outcome = outcome => outcome.ok(),
                // What is sent while the task's end drops the queue stays in it as long as there is a sender: this one.
                () = self.commands.closed() => None,
            },
            Err(_) => None,
        };
        match told {
            Some(outcome) => outcome.map_err(DeleteError::Stuck),
            None if self.view.borrow().gone => Ok(()),
            None => Err(DeleteError::Ended),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// So many that the two come together: a delete that waits for its answer alone hangs in one of them.
    const ROUNDS: usize = 20_000;

    #[test]
    fn a_delete_sent_while_the_task_ends_is_answered() {
        let view = View {
            record: crate::records::tests::record("a1b2c3d4e5f6g7h8"),
            state: SandboxState::Running,
            steps: vec![],
            shim: None,
            unreachable: None,
            exit: None,
            gone: false,
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
        let (_view, watched) = watch::channel(view);
        let (to_end, ending) = std::sync::mpsc::channel::<mpsc::Receiver<Command>>();
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for receiver in ending {
                    together.wait();
                    drop(receiver);
                }
            });
            for round in 0..ROUNDS {
                let (commands, receiver) = mpsc::channel(16);
                let handle = Handle {
                    id: watched.borrow().record.id.clone(),
                    name: watched.borrow().record.name.clone(),
                    commands,
                    view: watched.clone(),
                    cancel: CancellationToken::new(),
                    run_dir: PathBuf::new(),
                };
                to_end.send(receiver).expect("the other thread");
                together.wait();
                let soon = Duration::from_secs(10);
                let answer =
                    runtime.block_on(async { tokio::time::timeout(soon, handle.delete(By::User)).await });
                assert!(matches!(answer, Ok(Err(DeleteError::Ended))), "round {round}: {answer:?}");
            }
            drop(to_end);
        });
    }
}
