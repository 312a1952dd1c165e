//! Signals that ask us to stop, as values to be waited for.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::error::CliError;

/// SIGINT, SIGTERM and SIGHUP. From the first call of [`Signals::new`] they no longer end the process.
#[derive(Debug)]
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes the signals over.
    pub(super) fn new() -> Result<Self, CliError> {
        let take = |kind| signal(kind).map_err(|e| CliError::failed("cannot handle signals", e.to_string()));
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: take(SignalKind::hangup())?,
        })
    }

    /// The number of the next one.
    pub(super) async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hangup.recv() => 1,
        }
    }
}

/// What people call it.
pub(super) fn name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "Ctrl-C",
        15 => "SIGTERM",
        _ => "a signal",
    }
}
