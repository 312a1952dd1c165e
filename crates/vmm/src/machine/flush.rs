//! Flushes, as one of the owner's works: begun only by it, so never beside a pause, and never after the exit.

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use super::handle::{Command, tell};
use super::{Live, Machine, Woken, chain, or_stop};
use crate::backend::Flushed;
use crate::metrics::flusher::Turn;

/// A VMM that is about to be killed gets this long for its last metrics.
const LAST: Duration = Duration::from_millis(100);

impl Machine {
    /// Does what is due. Returns what interrupted it, if something did; the call to the VMM is dropped then.
    pub(super) async fn flush(&mut self, live: &mut Live) -> Option<Woken> {
        if let Turn::Confirm(_) = live.flusher.turn() {
            // What the runtime knows of the pidfd may be older than this moment.
            match live.process.has_ended() {
                Ok(false) => live.flusher.confirmed(Instant::now()),
                _ => return Some(Woken::Ended(live.process.ended().await)),
            }
            return None;
        }
        live.meter.about_to_flush();
        live.meter.sample();
        if !matches!(live.process.has_ended(), Ok(false)) {
            return Some(Woken::Ended(live.process.ended().await));
        }
        tracing::trace!("flush begins");
        let seen = live.meter.counted();
        let outcome = {
            let Live { vmm, process, meter, .. } = live;
            let call = vmm.flush();
            tokio::pin!(call);
            loop {
                let command = tokio::select! {
                    biased;
                    ended = process.ended() => return Some(Woken::Ended(ended)),
                    () = self.end.reached() => return Some(Woken::EndTime),
                    command = self.commands.recv() => or_stop(command),
                    outcome = &mut call => break outcome,
                };
                match command {
                    // Whoever asks for numbers waits for no VMM.
                    Command::Usage(reply) => tell(reply, meter.sample()),
                    other => {
                        live.flusher.postponed(Instant::now());
                        return Some(Woken::Command(other));
                    }
                }
            }
        };
        let now = Instant::now();
        match outcome {
            Ok(flushed) => live.flushed(flushed, seen),
            Err(e) => live.flusher.failed(chain(&e), now),
        }
        None
    }
}

impl Live {
    fn flushed(&mut self, flushed: Flushed, seen: u64) {
        match flushed {
            Flushed::Nothing => {}
            Flushed::Counters(disk) => self.meter.answered(disk),
            Flushed::Announced => self.meter.announced(seen),
        }
        self.flusher.succeeded(Instant::now());
    }

    /// The last numbers of a VMM that is about to be killed. It may be of no use any more, so nothing is said of a
    /// failure.
    pub(super) async fn last_flush(&mut self) {
        if self.flusher.is_well() && self.flusher.turn() != Turn::Never {
            let seen = self.meter.counted();
            self.meter.about_to_flush();
            if matches!(self.process.has_ended(), Ok(false)) {
                let Live { vmm, process, .. } = self;
                let outcome = tokio::select! {
                    biased;
                    _ = process.ended() => None,
                    outcome = timeout(LAST, vmm.flush()) => Some(outcome),
                };
                if let Some(Ok(Ok(flushed))) = outcome {
                    self.flushed(flushed, seen);
                }
            }
        }
        self.meter.sample();
    }
}

/// Waits until the turn has come; a paused VM's counters stand still.
pub(super) async fn due(turn: Turn, paused: bool) {
    match turn {
        Turn::Confirm(at) => sleep_until(at).await,
        Turn::Flush(at) if !paused => sleep_until(at).await,
        Turn::Flush(_) | Turn::Never => std::future::pending().await,
    }
}
