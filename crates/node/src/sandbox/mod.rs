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
    /// Release everything; the answer comes when all is gone, or says what is stuck.
    Delete(oneshot::Sender<Result<(), String>>),
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
#[derive(Debug)]
pub(crate) enum DeleteError {
    /// Something is left and is tried again.
    Stuck(String),
    /// The sandbox's task ended first: the daemon is shutting down, or the task is being replaced.
    Ended,
}

impl Handle {
    /// Deletes and waits for the outcome.
    pub(crate) async fn delete(&self) -> Result<(), DeleteError> {
        self.cancel.cancel();
        let (answer, outcome) = oneshot::channel();
        let told = match self.commands.send(Command::Delete(answer)).await {
            Ok(()) => outcome.await.ok(),
            Err(_) => None,
        };
        match told {
            Some(outcome) => outcome.map_err(DeleteError::Stuck),
            None if self.view.borrow().gone => Ok(()),
            None => Err(DeleteError::Ended),
        }
    }
}
