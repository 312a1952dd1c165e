//! The task that owns one sandbox from its first step to its last.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_core::event::EventKind;
use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_core::host::Host;
use hearth_core::image::Template;
use hearth_core::lifecycle::SandboxState;
use hearth_core::process::Liveness;
use hearth_core::record::Record;
use hearth_core::resource::Kind;
use hearth_core::steps::Step;
use hearth_core::stuck::{Left, Stuck};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{By, Command, Disks, StepStarted, View, shim_end};
use crate::blocking::{blocking, on_host};
use crate::engine::{Context, now_ms};
use crate::error::EngineError;
use crate::events::Events;
use crate::shim_client;
use crate::trace::TraceContext;

/// Between two tries to connect to a shim that lives and does not answer.
const RECONNECT: Duration = Duration::from_secs(1);

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
#[derive(Debug, thiserror::Error)]
pub(super) enum CreateError {
    #[error("cancelled")]
    Cancelled,
    #[error("{0}")]
    Exhausted(String),
    #[error("step {0}: {1}")]
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
    Deleted(oneshot::Sender<Result<(), String>>, TraceContext),
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
    /// What its creation or release is part of.
    pub(crate) trace: TraceContext,
    /// When its release began.
    pub(crate) ending: Option<Instant>,
    /// Who ends it, should it be ended now.
    pub(crate) by: By,
    /// What creation makes of its disks.
    pub(crate) disks: Disks,
}

impl<H: Host> Sandbox<H> {
    /// Lives the whole life. Returns when everything is gone, or when the daemon detaches.
    pub(crate) async fn run(mut self, begin: Begin) {
        let mut waiting = Vec::new();
        // What came of a try just made.
        let mut tried = None;
        match begin {
            Begin::Create(outcome) => match self.create_and_tell().await {
                Ok(()) => {
                    self.trace = TraceContext::new();
                    let view = self.view.borrow().clone();
                    if outcome.send(Ok(view)).is_ok() {
                        if !self.live(&mut waiting).await {
                            return;
                        }
                    } else {
                        self.by = By::Daemon("whoever asked for it went away".into());
                        tracing::info!(sandbox = %self.record.id, "the caller went away, taking it back");
                        self.tell(EventKind::SandboxDeleting, "the caller went away");
                    }
                }
                Err(e) => {
                    let first = self.release_once().await;
                    let error = self.create_error(e, first.clone());
                    tracing::info!(sandbox = %self.record.id, "{error}");
                    // Nobody may be listening any more; the release went on all the same.
                    drop(outcome.send(Err(error)));
                    tried = Some(first);
                }
            },
            Begin::Found => match self.judge().await {
                Judged::Alive if self.record.state == SandboxState::Running => {
                    self.tell(EventKind::SandboxAdopted, "its shim lives");
                    if !self.live(&mut waiting).await {
                        return;
                    }
                }
                Judged::Alive | Judged::Gone => self.show_exit(),
                Judged::Detached => return,
            },
            Begin::Release(why) => {
                // How its VM ended while no daemon looked.
                self.show_exit();
                self.tell(EventKind::SandboxDeleting, &why);
                self.by = By::Daemon(why.clone());
                tracing::info!(sandbox = %self.record.id, name = %self.record.name, "releasing: {why}");
                // Thousands may have to go after a reboot; creations must not queue behind them.
                let context = Arc::clone(&self.context);
                let permit = tokio::select! {
                    permit = context.releases.acquire() => permit.ok(),
                    () = context.detach.cancelled() => return,
                };
                tried = Some(self.release_once().await);
                drop(permit);
            }
        }
        self.release_until_gone(waiting, tried).await;
    }

    /// Shows how the VM ended, if its shim said so.
    fn show_exit(&self) {
        let exit = self.context.records.exit_record(&self.record.id);
        // What its record already calls ended was told by an earlier daemon.
        if let Some(exit) = exit.as_ref().filter(|_| self.record.state == SandboxState::Running) {
            self.tell_exit(exit);
        }
        self.view.send_modify(|v| v.exit = exit);
    }

    fn tell(&self, kind: EventKind, reason: &str) {
        self.context.events.about(kind, &self.record, reason);
    }

    fn tell_exit(&self, exit: &ExitRecord) {
        self.context.meters.exited(exit);
        let event = Events::now(EventKind::SandboxExited).about(&self.record).because(exit.words());
        let event = event.with("reason", exit.reason.as_str()).with("ended_at_ms", exit.at_ms);
        let event = exit.code.into_iter().fold(event, |e, code| e.with("code", code));
        self.context.events.tell(exit.signal.into_iter().fold(event, |e, signal| e.with("signal", signal)));
    }

    /// Creates, and tells of it.
    async fn create_and_tell(&mut self) -> Result<(), CreateError> {
        let begun = Instant::now();
        let spec = &self.record.spec;
        let event = Events::now(EventKind::SandboxCreating).about(&self.record);
        let event = event.with("template", &spec.template).with("vmm", spec.vmm);
        self.context.events.tell(event.with("cpus", spec.cpus).with("memory_mib", spec.memory_mib));
        let created = self.create_and_save().await;
        let (events, meters) = (&self.context.events, &self.context.meters);
        match &created {
            Ok(()) => {
                meters.created(begun.elapsed());
                meters.usage.began(&self.record.id);
                let event = Events::now(EventKind::SandboxRunning).about(&self.record);
                let event = event.with("took_ms", begun.elapsed().as_millis());
                let event = self.record.slot.iter().fold(event, |e, slot| e.with("slot", slot));
                events.tell(self.record.shim.iter().fold(event, |e, shim| e.with("shim_pid", shim.pid)));
            }
            Err(e) => {
                let (reason, why) = match e {
                    CreateError::Cancelled => ("cancelled", "it was cancelled"),
                    CreateError::Exhausted(why) => ("exhausted", why.as_str()),
                    CreateError::Step(step, why) => (step.as_str(), why.as_str()),
                };
                meters.create_failed(reason);
                let event = Events::now(EventKind::SandboxCreateFailed).about(&self.record).because(why);
                events.tell(event.with("step", reason));
            }
        }
        created
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
            (CreateError::Step(step, failed), Err(why)) => {
                EngineError::Stuck { name, why: format!("{why}, after step {step} failed: {failed}") }
            }
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
        let mut stuck: Option<Stuck> = None;
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
            if stuck.is_none() {
                tracing::warn!(sandbox = %self.record.id, name = %self.record.name, "kept as it is: {why}");
                self.tell(EventKind::SandboxStuck, &why);
            }
            let what = format!("process {}", process.pid);
            let left = Left { kind: Kind::Process, what, why: why.clone(), holders: vec![] };
            let again = Stuck::again(stuck.as_ref(), vec![left], now_ms());
            self.view.send_modify(|v| {
                v.state = SandboxState::Stuck;
                v.record.stuck = Some(again.clone());
            });
            let wait = again.wait();
            stuck = Some(again);
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // What may be alive and another's is not killed on request either.
                Some(Command::Delete(answer, ..)) = self.commands.recv() => drop(answer.send(Err(why))),
                () = self.context.detach.cancelled() => return Judged::Detached,
            }
        }
    }

    /// Waits while the VM runs. False if the daemon detaches.
    async fn live(&mut self, waiting: &mut Vec<oneshot::Sender<Result<(), String>>>) -> bool {
        let Some(process) = self.record.shim.clone() else { return true };
        let host = Arc::clone(&self.context.host);
        let ended = shim_end::ended(&host, &process, self.shim_pidfd.take());
        tokio::pin!(ended);
        let end = tokio::select! {
            biased;
            () = self.context.detach.cancelled() => End::Detached,
            () = &mut ended => End::VmEnded,
            Some(Command::Delete(answer, by, trace)) = self.commands.recv() => {
                self.by = by;
                End::Deleted(answer, trace)
            }
            never = stay_connected(&self.view, &self.run_dir) => match never {},
        };
        match end {
            End::Deleted(answer, trace) => {
                self.trace = trace;
                self.tell(EventKind::SandboxDeleting, "a client asked for it");
                waiting.push(answer);
            }
            End::Detached => return false,
            End::VmEnded => {
                let exit = self.context.records.exit_record(&self.record.id);
                let exit = exit.unwrap_or_else(shim_died);
                let reason = exit.words();
                tracing::info!(sandbox = %self.record.id, name = %self.record.name, reason, "the VM ended");
                self.tell_exit(&exit);
                self.view.send_modify(|v| {
                    v.state = SandboxState::Exited;
                    v.exit = Some(exit);
                });
            }
        }
        true
    }

    /// Tries with back-off for ever, and at once when a delete comes. `tried`: the outcome of a try just made.
    async fn release_until_gone(
        mut self,
        mut waiting: Vec<oneshot::Sender<Result<(), String>>>,
        mut tried: Option<Result<(), String>>,
    ) {
        loop {
            let outcome = match tried.take() {
                Some(outcome) => outcome,
                None => self.release_once().await,
            };
            let Err(why) = outcome else { break };
            let wait = self.record.stuck.as_ref().map_or(RECONNECT, Stuck::wait);
            for answer in waiting.drain(..) {
                // Whoever asked may have stopped waiting.
                drop(answer.send(Err(why.clone())));
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Some(Command::Delete(answer, by, trace)) = self.commands.recv() => {
                    self.by = by;
                    self.trace = trace;
                    waiting.push(answer);
                }
                () = self.context.detach.cancelled() => return,
            }
        }
        self.gone(waiting);
    }

    fn gone(mut self, waiting: Vec<oneshot::Sender<Result<(), String>>>) {
        let took = self.ending.map(|begun| begun.elapsed()).unwrap_or_default();
        self.context.meters.deleted(took);
        self.context.meters.usage.forget(&self.record.id);
        self.context.nbds.forget(&self.record.id);
        let event =
            Events::now(EventKind::SandboxDeleted).about(&self.record).because("nothing of it is left");
        self.context.events.tell(event.with("took_ms", took.as_millis()));
        // First the books, then the answers: whoever hears "gone" may use the name again.
        self.context.books.remove(&self.record, self.view.borrow().exit.as_ref());
        self.view.send_modify(|v| v.gone = true);
        self.commands.close();
        for answer in waiting {
            drop(answer.send(Ok(())));
        }
        while let Ok(Command::Delete(answer, ..)) = self.commands.try_recv() {
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

/// Connects to the shim of a sandbox that was taken over, if need be again and again.
async fn stay_connected(view: &watch::Sender<View>, run_dir: &Path) -> Infallible {
    let id = view.borrow().record.id.clone();
    while view.borrow().shim.is_none() {
        match shim_client::connect(run_dir, &id).await {
            Ok(client) => view.send_modify(|v| {
                v.shim = Some(client);
                v.unreachable = None;
            }),
            Err(why) => {
                if view.borrow().unreachable.is_none() {
                    tracing::warn!(sandbox = %id, "cannot reach its shim, trying again: {why}");
                }
                view.send_modify(|v| v.unreachable = Some(why));
                tokio::time::sleep(RECONNECT).await;
            }
        }
    }
    std::future::pending().await
}

/// What is said of a VM whose shim ended without a word: it ended with it.
fn shim_died() -> ExitRecord {
    ExitRecord::new(ExitReason::VmmFailed, now_ms(), "its shim died, and the VM with it")
}

fn cancelled(name: &str) -> EngineError {
    EngineError::Cancelled(format!("creation of sandbox {name} was cancelled; nothing of it is left"))
}
