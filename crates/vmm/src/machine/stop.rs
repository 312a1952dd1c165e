//! The end of a VM: however it came, the process is reaped, its files are cleared, and a record is made.

use std::io;
use std::time::Duration;

use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_host::process::{Ended, Signal};
use tokio::time::{Instant, sleep_until, timeout};

use super::handle::tell;
use super::{CONFIRM, Command, Live, Machine, chain, last_words, now_ms};
use crate::agent::AgentClient;
use crate::backend::VmmEvent;
use crate::disks::Failure;
use crate::verdict::{GuestWords, judge};

/// A VMM whose disk answers ends within this after SIGKILL, most of the time.
const AT_ONCE: Duration = Duration::from_millis(250);
/// A wait after SIGKILL says so each time this passes.
const SAY_SO: Duration = Duration::from_secs(15);
/// Pause after a pidfd that could not be polled.
const POLL_AGAIN: Duration = Duration::from_secs(1);

/// Why a VM ends.
#[derive(Debug)]
pub(super) enum Cause {
    /// The VMM ended by itself.
    Ended(io::Result<Ended>),
    /// It was asked for.
    Stop {
        /// Time for the guest.
        grace: Duration,
        /// Why, if no user asked.
        policy: Option<String>,
    },
    /// What it depends on is broken.
    Broken {
        /// What.
        reason: ExitReason,
        /// In words.
        why: String,
    },
    /// The end time came.
    EndTime,
    /// The VMM is of no use.
    Failed {
        /// In words.
        why: String,
        /// Whether this may be the first sign of an exit not seen yet.
        maybe_exit: bool,
    },
    /// The VMM hung up on its disks: mostly on its way out, and then nothing is to be said of it.
    HungUp {
        /// In words.
        why: String,
    },
}

impl From<Failure> for Cause {
    fn from(failure: Failure) -> Self {
        match failure.hung_up {
            true => Cause::HungUp { why: failure.why },
            false => Cause::Broken { reason: ExitReason::BlockFailed, why: failure.why },
        }
    }
}

impl Machine {
    /// Brings the VM to its end.
    pub(super) async fn end(
        &mut self,
        mut live: Live,
        agent: Option<AgentClient>,
        cause: Cause,
    ) -> ExitRecord {
        let (asked, ended) = match cause {
            Cause::Ended(Ok(ended)) => (None, ended),
            Cause::Ended(Err(e)) => {
                live.notes.push(format!("its pidfd could not be polled: {e}"));
                (None, kill(&mut live).await)
            }
            Cause::EndTime => {
                live.last_flush().await;
                (Some(ExitReason::EndTime), kill(&mut live).await)
            }
            Cause::Broken { reason, why } => {
                live.notes.push(why);
                (Some(reason), kill(&mut live).await)
            }
            Cause::Stop { grace, policy } => {
                live.last_flush().await;
                if !grace.is_zero() {
                    self.ask_guest(&mut live, agent, grace).await;
                }
                let reason = if policy.is_some() { ExitReason::Policy } else { ExitReason::Stopped };
                live.notes.extend(policy);
                (Some(reason), kill(&mut live).await)
            }
            Cause::Failed { why, maybe_exit } => {
                live.notes.push(why);
                let within = if maybe_exit { CONFIRM } else { Duration::ZERO };
                // How it exited is the better answer.
                match timeout(within, live.process.ended()).await {
                    Ok(Ok(ended)) => (None, ended),
                    _ => (Some(ExitReason::VmmFailed), kill(&mut live).await),
                }
            }
            Cause::HungUp { why } => match timeout(CONFIRM, live.process.ended()).await {
                Ok(Ok(ended)) => (None, ended),
                _ => {
                    live.notes.push(why);
                    (Some(ExitReason::VmmFailed), kill(&mut live).await)
                }
            },
        };
        while let Some(event) = now(live.vmm.event()).await {
            let VmmEvent::GuestStopped { reason } = event;
            live.stopped = Some(reason);
        }
        live.clear(ended == Ended { code: Some(0), signal: None }).await;
        let words = live.heard.words();
        let mut record = self.record(&live, asked, ended, &words);
        if words.oom_kills > 0 {
            record.guest_oom_kills = Some(words.oom_kills);
        }
        live.meter.finish(&mut record);
        record.disks = self.disk_book.stats();
        tracing::info!(
            reason = record.reason.as_str(),
            code = ended.code,
            signal = ended.signal,
            "VMM ended"
        );
        record
    }

    /// What is known of the end.
    fn record(&self, live: &Live, asked: Option<ExitReason>, ended: Ended, words: &GuestWords) -> ExitRecord {
        let mut notes = live.notes.clone();
        let reason = match asked {
            Some(reason) => reason,
            None => {
                let oom = live.meter.oom(ended);
                let (reason, why) = judge(ended, live.stopped.as_deref(), words, oom);
                notes.extend(live.stopped.clone());
                notes.extend(why);
                reason
            }
        };
        if reason == ExitReason::VmmFailed || (reason == ExitReason::GuestShutdown && !self.was_ready()) {
            notes.extend(last_words(&self.spec));
        }
        ExitRecord {
            code: ended.code,
            signal: ended.signal,
            ..ExitRecord::new(reason, now_ms(), notes.join("; "))
        }
    }

    fn was_ready(&self) -> bool {
        matches!(*self.phase.borrow(), super::Phase::Running { .. })
    }

    /// Asks the guest to power off and waits for the VMM's end at most `grace`. Another stop meanwhile may
    /// shorten the wait, and so does the end time.
    async fn ask_guest(&mut self, live: &mut Live, agent: Option<AgentClient>, grace: Duration) {
        let mut deadline = Instant::now() + grace;
        let ask = async {
            match agent {
                Some(agent) => agent.shutdown().await.map_err(|e| chain(&e)),
                None => live.vmm.request_stop().await.map_err(|e| chain(&e)),
            }
        };
        tokio::pin!(ask);
        let mut asked = false;
        loop {
            let command = tokio::select! {
                biased;
                _ = live.process.ended() => return,
                () = sleep_until(deadline) => return,
                () = self.end.reached() => return,
                outcome = &mut ask, if !asked => {
                    asked = true;
                    if let Err(e) = outcome {
                        tracing::info!(error = e, "the guest was not asked to shut down");
                    }
                    continue;
                }
                command = self.commands.recv() => command,
            };
            match command {
                Some(Command::Stop { grace, .. }) => deadline = deadline.min(Instant::now() + grace),
                Some(Command::Usage(reply)) => tell(reply, live.meter.sample()),
                Some(other) => other.refuse(),
                None => return,
            }
        }
    }
}

/// Kills and reaps. A process in uninterruptible sleep is waited for as long as it takes: a record that says
/// "ended" of a living VMM would free what it still uses. Where it may sleep in the I/O of a device that is served here, that
/// is let go of first.
async fn kill(live: &mut Live) -> Ended {
    let mut within = if live.disks.may_hold_up() { AT_ONCE } else { SAY_SO };
    loop {
        if let Err(e) = live.process.signal(Signal::KILL) {
            tracing::error!(error = %e, "SIGKILL was refused");
        }
        let ended = timeout(within, live.process.ended()).await;
        within = SAY_SO;
        match ended {
            Err(_) if live.disks.let_go() => {}
            Ok(Ok(ended)) => return ended,
            Ok(Err(e)) => {
                tracing::error!(error = %e, "the VMM's pidfd cannot be polled");
                tokio::time::sleep(POLL_AGAIN).await;
            }
            Err(_) => {
                let what = hearth_host::process::describe(live.process.pid());
                tracing::warn!(what, "waiting for a killed VMM to end");
            }
        }
    }
}

/// The result of a future that is ready now or after what the runtime already knows.
async fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    timeout(Duration::from_millis(1), future).await.ok()
}
