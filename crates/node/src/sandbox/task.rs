//! The task that owns one sandbox from its first step to its last.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::host::Host;
use hearth_core::image::Template;
use hearth_core::lifecycle::SandboxState;
use hearth_core::process::Liveness;
use hearth_core::record::Record;
use hearth_core::steps::Step;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{Command, StepStarted, View, shim_end};
use crate::blocking::{blocking, on_host};
use crate::engine::Context;
use crate::error::EngineError;
use crate::shim_client;

/// Back-off between two tries to release what is stuck.
const RETRY: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(60);

/// Where a task begins.
#[derive(Debug)]
pub(crate) enum Begin {
    /// With the first step; the outcome is told once.
    Create(oneshot::Sender<Result<View, EngineError>>),
    /// Found on disk: taken over if its shim lives and it was running, else released. While that cannot be
    /// told it is kept and shown as stuck.
    Found,
    /// What is left is to be released.
    Release(String),
}

/// Why a creation ended early.
#[derive(Debug)]
pub(super) enum CreateError {
    Cancelled,
    Exhausted(String),
    Step(Step, String),
}

/// What became of the shim of a sandbox found on disk.
enum Judged {
    Alive,
    Gone,
    /// The daemon ends before it could be told.
    Detached,
}

/// Why a living sandbox stops being one.
enum End {
    Deleted(oneshot::Sender<Result<(), String>>),
    VmEnded,
    /// The daemon ends and leaves the VM to its shim.
    Detached,
}

/// One sandbox, owned by its task.
#[derive(Debug)]
pub(crate) struct Sandbox<H> {
    pub(crate) context: Arc<Context<H>>,
    pub(crate) record: Record,
    /// What creation needs; `None` for a sandbox found on disk.
    pub(crate) template: Option<Template>,
    pub(crate) run_dir: PathBuf,
    pub(crate) view: watch::Sender<View>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) cancel: CancellationToken,
    pub(crate) progress: Option<mpsc::Sender<StepStarted>>,
    pub(crate) shim_pidfd: Option<OwnedFd>,
}

impl<H: Host> Sandbox<H> {
    /// Lives the whole life. Returns when everything is gone, or when the daemon detaches.
    pub(crate) async fn run(mut self, begin: Begin) {
        let mut waiting = Vec::new();
        match begin {
            Begin::Create(outcome) => match self.create_and_save().await {
                Ok(()) => {
                    let view = self.view.borrow().clone();
                    if outcome.send(Ok(view)).is_ok() {
                        if !self.live(&mut waiting).await {
                            return;
                        }
                    } else {
                        tracing::info!(sandbox = %self.record.id, "the caller went away, taking it back");
                    }
                }
                Err(e) => {
                    let first = self.release_once().await;
                    let stuck = first.is_err();
                    let error = self.create_error(e, first);
                    tracing::info!(sandbox = %self.record.id, "{error}");
                    // Nobody may be listening any more; the release went on all the same.
                    drop(outcome.send(Err(error)));
                    if !stuck {
                        self.gone(waiting);
                        return;
                    }
                }
            },
            Begin::Found => match self.judge().await {
                Judged::Alive if self.record.state == SandboxState::Running => {
                    self.reconnect().await;
                    if !self.live(&mut waiting).await {
                        return;
                    }
                }
                Judged::Alive | Judged::Gone => {}
                Judged::Detached => return,
            },
            Begin::Release(why) => {
                // How its VM ended while no daemon looked.
                let exit = self.context.records.exit_record(&self.record.id);
                self.view.send_modify(|v| v.exit = exit);
                tracing::info!(sandbox = %self.record.id, name = %self.record.name, "releasing: {why}");
                // Thousands may have to go after a reboot; creations must not queue behind them.
                let context = Arc::clone(&self.context);
                let permit = tokio::select! {
                    permit = context.releases.acquire() => permit.ok(),
                    () = context.detach.cancelled() => return,
                };
                let first = self.release_once().await;
                drop(permit);
                if first.is_ok() {
                    self.gone(waiting);
                    return;
                }
            }
        }
        self.release_until_gone(waiting).await;
    }

    async fn create_and_save(&mut self) -> Result<(), CreateError> {
        self.create().await?;
        self.record.state = SandboxState::Running;
        self.save().await.map_err(|why| CreateError::Step(Step::Boot, why))?;
        self.progress = None;
        Ok(())
    }

    fn create_error(&self, e: CreateError, released: Result<(), String>) -> EngineError {
        let name = self.record.name.to_string();
        match (e, released) {
            (_, Err(why)) => EngineError::Stuck { name, why },
            (CreateError::Cancelled, Ok(())) => cancelled(&name),
            (CreateError::Exhausted(why), Ok(())) => EngineError::Exhausted(why),
            (CreateError::Step(..), Ok(())) if self.cancel.is_cancelled() => cancelled(&name),
            (CreateError::Step(step, why), Ok(())) => EngineError::Step { name, step, why },
        }
    }

    /// Finds out whether its shim lives.
    async fn judge(&mut self) -> Judged {
        let Some(process) = self.record.shim.clone() else { return Judged::Gone };
        let mut wait = *RETRY.start();
        loop {
            let asked = process.clone();
            let judged = on_host(&self.context.host, move |host| match host.liveness(&asked) {
                Liveness::Alive => (Liveness::Alive, host.open_process(&asked).ok()),
                other => (other, None),
            });
            let why = match judged.await {
                (Liveness::Alive, pidfd) => {
                    self.shim_pidfd = pidfd;
                    self.show();
                    return Judged::Alive;
                }
                (Liveness::Gone, _) => return Judged::Gone,
                (Liveness::Unknown(why), _) => format!("its shim cannot be judged: {why}"),
            };
            if wait == *RETRY.start() {
                tracing::warn!(sandbox = %self.record.id, name = %self.record.name, "kept as it is: {why}");
            }
            self.view.send_modify(|v| {
                v.state = SandboxState::Stuck;
                v.record.stuck = Some(why.clone());
            });
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(*RETRY.end()),
                // What may be alive and another's is not killed on request either.
                Some(Command::Delete(answer)) = self.commands.recv() => drop(answer.send(Err(why))),
                () = self.context.detach.cancelled() => return Judged::Detached,
            }
        }
    }

    /// Connects to its shim, if that answers.
    async fn reconnect(&self) {
        match shim_client::connect(&self.run_dir, &self.record.id).await {
            Ok(client) => self.view.send_modify(|v| v.shim = Some(client)),
            Err(why) => {
                tracing::warn!(sandbox = %self.record.id, "cannot reach its shim, trying again: {why}")
            }
        }
    }

    /// Waits while the VM runs. False if the daemon detaches.
    async fn live(&mut self, waiting: &mut Vec<oneshot::Sender<Result<(), String>>>) -> bool {
        let Some(process) = self.record.shim.clone() else { return true };
        let host = Arc::clone(&self.context.host);
        let ended = shim_end::ended(&host, &process, self.shim_pidfd.take());
        tokio::pin!(ended);
        let end = loop {
            let unreachable = self.view.borrow().shim.is_none();
            tokio::select! {
                biased;
                () = self.context.detach.cancelled() => break End::Detached,
                () = &mut ended => break End::VmEnded,
                Some(Command::Delete(answer)) = self.commands.recv() => break End::Deleted(answer),
                () = tokio::time::sleep(*RETRY.start()), if unreachable => {}
            }
            self.reconnect().await;
        };
        match end {
            End::Deleted(answer) => waiting.push(answer),
            End::Detached => return false,
            End::VmEnded => {
                let exit = self.context.records.exit_record(&self.record.id);
                let reason = exit.as_ref().map_or("its shim died", |e| e.reason.as_str());
                tracing::info!(sandbox = %self.record.id, name = %self.record.name, reason, "the VM ended");
                self.view.send_modify(|v| {
                    v.state = SandboxState::Exited;
                    v.exit = exit;
                });
            }
        }
        true
    }

    async fn release_until_gone(mut self, mut waiting: Vec<oneshot::Sender<Result<(), String>>>) {
        let mut wait = *RETRY.start();
        loop {
            let Err(why) = self.release_once().await else { break };
            if wait == *RETRY.start() {
                tracing::warn!(sandbox = %self.record.id, name = %self.record.name, "stuck: {why}");
            }
            for answer in waiting.drain(..) {
                // Whoever asked may have stopped waiting.
                drop(answer.send(Err(why.clone())));
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(*RETRY.end()),
                Some(Command::Delete(answer)) = self.commands.recv() => waiting.push(answer),
                () = self.context.detach.cancelled() => return,
            }
        }
        self.gone(waiting);
    }

    fn gone(mut self, waiting: Vec<oneshot::Sender<Result<(), String>>>) {
        // First the books, then the answers: whoever hears "gone" may use the name again.
        self.context.books.remove(&self.record, self.view.borrow().exit.as_ref());
        self.view.send_modify(|v| v.gone = true);
        self.commands.close();
        for answer in waiting {
            drop(answer.send(Ok(())));
        }
        while let Ok(Command::Delete(answer)) = self.commands.try_recv() {
            drop(answer.send(Ok(())));
        }
    }

    /// Writes the record and shows it.
    pub(super) async fn save(&mut self) -> Result<(), String> {
        self.show();
        let (records, record) = (self.context.records.clone(), self.record.clone());
        let shown = records.sandbox_dir(&record.id).display().to_string();
        blocking(move || records.save(&record)).await.map_err(|e| format!("record in {shown}: {e}"))
    }

    /// Shows the record to others without writing it.
    pub(super) fn show(&self) {
        self.view.send_modify(|v| {
            v.state = self.record.state;
            v.record = self.record.clone();
        });
    }
}

fn cancelled(name: &str) -> EngineError {
    EngineError::Cancelled(format!("creation of sandbox {name} was cancelled; nothing of it is left"))
}
