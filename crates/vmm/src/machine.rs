//! The life of one VM. One task owns it ([`Machine::run`]); everybody else holds a [`MachineHandle`], which
//! sends commands and sees the present [`Phase`].
//!
//! ```text
//!            boot               ready
//!   Idle ──────────► Booting ──────────► Running ⇄ paused
//!    │                  │                   │
//!    │ stop, end time   │ stop, end time,   │ stop, end time, the VMM's exit
//!    │                  │ failure, exit     │
//!    └──────────────────┴───────────────────┴──────► Exited(record)   final: the record is on disk
//! ```
//!
//! Only the pidfd says that the VMM is dead. Once it did, nothing is asked of the VMM any more (law 7): the
//! console is drained, the VMM's files are removed, the record is written, then everybody is told. A machine
//! never ends with a VMM alive: each way out of Booting and Running goes through the reaping of the process.
//! Nothing here depends on who asks: a caller that goes away changes nothing.

mod boot;
mod flush;
mod handle;
mod stop;

use std::time::Duration;

use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_core::shim::{CONSOLE_LOG, ShimSpec, VMM_LOG};
use hearth_core::usage::VmmSample;
use hearth_host::process::Ended;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use handle::{MachineError, MachineHandle, Phase};

use crate::agent::AgentClient;
use crate::backend::{Launched, Vmm, VmmError, VmmEvent, VmmProcess, remove_if_there};
use crate::console::{CappedLog, keep_small, pump};
use crate::disks::{DiskBook, Disks, Failure};
use crate::end_time::{EndTime, now_ms};
use crate::exit_record;
use crate::metrics::fifo::FifoReader;
use crate::metrics::flusher::{CONFIRM, Flusher};
use crate::metrics::meter::Meter;
use crate::verdict::{Ear, Heard};
use handle::{Command, tell};

/// Draining the console of a dead VMM.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);
/// How much of a log goes into an exit record.
const LAST_WORDS: usize = 1024;

/// The owner of one VM.
pub struct Machine {
    spec: ShimSpec,
    end: EndTime,
    commands: mpsc::Receiver<Command>,
    phase: watch::Sender<Phase>,
    disk_book: DiskBook,
}

/// A VMM and what belongs to it, from spawn to reap.
struct Live {
    process: VmmProcess,
    vmm: Box<dyn Vmm>,
    disks: Disks,
    pumps: JoinSet<u64>,
    log_keeper: JoinSet<()>,
    /// Reads the metrics FIFO, where there is one.
    fifo_reader: JoinSet<()>,
    vmm_dead: CancellationToken,
    flusher: Flusher,
    meter: Meter,
    /// What the guest's kernel said on the console.
    heard: Heard,
    /// What the VMM said of the guest's end.
    stopped: Option<String>,
    /// What went wrong before the end.
    notes: Vec<String>,
}

/// Why an owner's wait was over.
enum Woken {
    Ended(std::io::Result<Ended>),
    Command(Command),
    EndTime,
    Vmm(VmmEvent),
    AgentClosed(String),
    Disks(Failure),
    FlushDue,
}

impl Machine {
    /// A machine in [`Phase::Idle`] and its handle.
    #[must_use]
    pub fn new(spec: ShimSpec) -> (Self, MachineHandle) {
        let (sender, commands) = mpsc::channel(8);
        let (phase, seen) = watch::channel(Phase::Idle);
        let end = EndTime::at_ms(spec.ends_at_ms);
        let disk_book = DiskBook::default();
        let handle = MachineHandle { commands: sender, phase: seen, disk_book: disk_book.clone() };
        (Self { spec, end, commands, phase, disk_book }, handle)
    }

    /// Owns the VM until it ended; on the main thread (see [`crate::backend`]).
    pub async fn run(mut self) -> ExitRecord {
        let record = self.live().await;
        if let Err(e) = exit_record::write(&self.spec.state_dir, &record) {
            tracing::error!(error = %e, dir = %self.spec.state_dir.display(), "the exit record was not written");
        }
        self.phase.send_replace(Phase::Exited(record.clone()));
        record
    }

    async fn live(&mut self) -> ExitRecord {
        if let Some((reason, why)) = self.idle().await {
            return ExitRecord::new(reason, now_ms(), why);
        }
        let disks = match self.open_disks().await {
            Ok(disks) => disks,
            Err(record) => return record,
        };
        let mut live = match Live::start(&self.spec, disks) {
            Ok(live) => live,
            Err(failed) => {
                let (e, mut disks) = *failed;
                let mut words = vec![chain(&e)];
                words.extend(disks.close(false).await);
                return ExitRecord::new(ExitReason::VmmFailed, now_ms(), words.join("; "));
            }
        };
        let vmm_pid = live.process.pid();
        tracing::info!(vmm_pid, vmm = %self.spec.vmm, "VMM started");
        self.phase.send_replace(Phase::Booting { vmm_pid });
        match self.boot(&mut live).await {
            Ok(agent) => {
                tracing::info!(vmm_pid, "guest ready");
                self.phase.send_replace(Phase::Running { vmm_pid, agent: agent.clone() });
                self.running(live, agent).await
            }
            Err(cause) => self.end(live, None, cause).await,
        }
    }

    /// Waits for the order to boot; reason and words if the end came first.
    async fn idle(&mut self) -> Option<(ExitReason, String)> {
        const NEVER: &str = "it was never booted";
        loop {
            let command = tokio::select! {
                biased;
                () = self.end.reached() => return Some((ExitReason::EndTime, NEVER.into())),
                command = self.commands.recv() => command,
            };
            match command {
                Some(Command::Boot) => return None,
                None => return Some((ExitReason::Stopped, NEVER.into())),
                Some(Command::Stop { policy: None, .. }) => return Some((ExitReason::Stopped, NEVER.into())),
                Some(Command::Stop { policy: Some(why), .. }) => {
                    return Some((ExitReason::Policy, format!("{why}; {NEVER}")));
                }
                Some(Command::Fail { reason, why }) => return Some((reason, format!("{why}; {NEVER}"))),
                Some(other) => other.refuse(),
            }
        }
    }

    /// Opens the disks; a record if they cannot be had, or the end came first.
    async fn open_disks(&mut self) -> Result<Disks, ExitRecord> {
        let (spec, book) = (self.spec.clone(), self.disk_book.clone());
        let opening = Disks::open(&spec, &book);
        tokio::pin!(opening);
        let before = "it had not begun to boot".to_owned();
        loop {
            let command = tokio::select! {
                biased;
                opened = &mut opening => {
                    return opened.map_err(|e| ExitRecord::new(ExitReason::BlockFailed, now_ms(), chain(&e)));
                }
                () = self.end.reached() => return Err(ExitRecord::new(ExitReason::EndTime, now_ms(), before)),
                command = self.commands.recv() => or_stop(command),
            };
            match command {
                Command::Boot => {}
                Command::Stop { policy: None, .. } => {
                    return Err(ExitRecord::new(ExitReason::Stopped, now_ms(), before));
                }
                Command::Stop { policy: Some(why), .. } => {
                    return Err(ExitRecord::new(ExitReason::Policy, now_ms(), format!("{why}; {before}")));
                }
                Command::Fail { reason, why } => return Err(ExitRecord::new(reason, now_ms(), why)),
                other => other.refuse(),
            }
        }
    }

    async fn running(&mut self, mut live: Live, mut agent: Option<AgentClient>) -> ExitRecord {
        let mut watched = agent.clone();
        let mut closed_at = None;
        let mut paused = false;
        loop {
            let mut woken = self.wait(&mut live, watched.as_ref(), &mut closed_at, paused).await;
            if let Woken::FlushDue = woken {
                match self.flush(&mut live).await {
                    Some(instead) => woken = instead,
                    None => continue,
                }
            }
            match woken {
                Woken::FlushDue => {}
                Woken::Ended(outcome) => return self.end(live, None, stop::Cause::Ended(outcome)).await,
                Woken::EndTime => return self.end(live, None, stop::Cause::EndTime).await,
                Woken::Vmm(VmmEvent::GuestStopped { reason }) => live.stopped = Some(reason),
                Woken::AgentClosed(why) => {
                    watched = None;
                    tracing::warn!(why, "the guest agent is gone, the VM goes on without it");
                }
                Woken::Disks(failure) => return self.end(live, None, failure.into()).await,
                Woken::Command(Command::Boot) => {}
                Woken::Command(Command::Usage(reply)) => {
                    tell(reply, live.meter.sample());
                    live.flusher.hurry(Instant::now());
                }
                Woken::Command(Command::Fail { reason, why }) => {
                    return self.end(live, None, stop::Cause::Broken { reason, why }).await;
                }
                Woken::Command(Command::Stop { grace, policy }) => {
                    // A paused guest answers nothing.
                    let (agent, grace) = if paused { (None, Duration::ZERO) } else { (agent.take(), grace) };
                    return self.end(live, agent, stop::Cause::Stop { grace, policy }).await;
                }
                Woken::Command(Command::Pause(reply)) => {
                    let outcome = live.vmm.pause().await;
                    paused |= outcome.is_ok();
                    drop(reply.send(outcome.map_err(MachineError::from)));
                }
                Woken::Command(Command::Resume(reply)) => {
                    let outcome = live.vmm.resume().await;
                    paused &= outcome.is_err();
                    drop(reply.send(outcome.map_err(MachineError::from)));
                }
            }
        }
    }

    /// The next thing to act on; the VMM's end before all else.
    async fn wait(
        &mut self,
        live: &mut Live,
        agent: Option<&AgentClient>,
        closed_at: &mut Option<Instant>,
        paused: bool,
    ) -> Woken {
        let closed = async {
            match agent {
                Some(agent) => {
                    let why = agent.closed().await;
                    // Mostly the first sign of an exit, about which nothing is to be said here. Counted from the
                    // first sight of it, since other work interrupts this wait.
                    let seen = *closed_at.get_or_insert_with(Instant::now);
                    tokio::time::sleep_until(seen + CONFIRM).await;
                    why
                }
                None => std::future::pending().await,
            }
        };
        let due = flush::due(live.flusher.turn(), paused);
        tokio::select! {
            biased;
            ended = live.process.ended() => Woken::Ended(ended),
            failure = live.disks.failed() => Woken::Disks(failure),
            () = self.end.reached() => Woken::EndTime,
            command = self.commands.recv() => Woken::Command(or_stop(command)),
            () = due => Woken::FlushDue,
            event = live.vmm.event() => Woken::Vmm(event),
            why = closed => Woken::AgentClosed(why),
        }
    }
}

/// Without a handle left nobody could ever stop it.
fn or_stop(command: Option<Command>) -> Command {
    command.unwrap_or(Command::Stop { grace: Duration::ZERO, policy: None })
}

impl Live {
    /// The disks come back with an error: whoever has them closes them.
    fn start(spec: &ShimSpec, mut disks: Disks) -> Result<Self, Box<(VmmError, Disks)>> {
        let path = spec.run_dir.join(CONSOLE_LOG);
        let started = CappedLog::open(&path, spec.console_cap_bytes)
            .map_err(|e| VmmError::file("open", &path, e))
            .and_then(|log| Ok((log, crate::backend::launch(spec, disks.serve()?)?)));
        let (log, Launched { process, vmm, console, metrics }) = match started {
            Ok(started) => started,
            Err(e) => return Err(Box::new((e, disks))),
        };
        let vmm_dead = CancellationToken::new();
        let mut pumps = JoinSet::new();
        let heard = Heard::default();
        if let Some(source) = console {
            pumps.spawn(pump(Ear::new(source, heard.clone()), log, vmm_dead.clone()));
        }
        let sums = watch::Sender::new(VmmSample::default());
        let mut fifo_reader = JoinSet::new();
        let mut notes = Vec::new();
        if let Some(path) = metrics {
            match FifoReader::open(&path, sums.clone()) {
                Ok(reader) => drop(fifo_reader.spawn(reader.run(vmm_dead.clone()))),
                // The VM is worth more than its numbers.
                Err(e) => notes.push(format!("no metrics: {}: {e}", path.display())),
            }
        }
        let meter = Meter::start(spec, process.pid(), sums);
        let interval = Duration::from_millis(spec.stats_interval_ms);
        let flusher = Flusher::new(interval, &spec.id, Instant::now());
        let mut log_keeper = JoinSet::new();
        let log = spec.run_dir.join(VMM_LOG);
        log_keeper.spawn(keep_small(log, spec.console_cap_bytes, vmm_dead.clone()));
        Ok(Self {
            process,
            vmm,
            disks,
            pumps,
            log_keeper,
            fifo_reader,
            vmm_dead,
            flusher,
            meter,
            heard,
            stopped: None,
            notes,
        })
    }

    /// After the reap: closes the disks, drains console and metrics and removes the VMM's files. `orderly`: the VMM ended by
    /// itself and well.
    async fn clear(&mut self, orderly: bool) {
        self.vmm_dead.cancel();
        self.notes.extend(self.disks.close(orderly).await);
        let drained = async {
            while self.pumps.join_next().await.is_some() {}
            while self.log_keeper.join_next().await.is_some() {}
            while self.fifo_reader.join_next().await.is_some() {}
        };
        if tokio::time::timeout(DRAIN_LIMIT, drained).await.is_err() {
            tracing::warn!(after = ?DRAIN_LIMIT, "console and metrics of a dead VMM did not drain");
            self.pumps.shutdown().await;
            self.log_keeper.shutdown().await;
            self.fifo_reader.shutdown().await;
        }
        for path in self.vmm.leftovers() {
            if let Err(e) = remove_if_there(&path) {
                tracing::warn!(error = %e, file = %path.display(), "a file of the VMM is left");
            }
        }
    }
}

/// The last lines of VMM and console.
fn last_words(spec: &ShimSpec) -> Vec<String> {
    let words = |file: &str| {
        let text = exit_record::last_words(&spec.run_dir.join(file), LAST_WORDS);
        (!text.is_empty()).then(|| format!("{file}: {text}"))
    };
    [VMM_LOG, CONSOLE_LOG].into_iter().filter_map(words).collect()
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
