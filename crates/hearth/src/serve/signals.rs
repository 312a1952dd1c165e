//! The signals that ask a daemon for its end. Each asks once; who looks for them must hold a [`Signals`] from
//! before the wait begins, since one that nobody holds is lost.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, kept from the moment this is made.
pub(super) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// From here on neither ends the process by itself. Must be called inside a runtime.
    ///
    /// # Errors
    /// If the handlers cannot be set.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    /// The next one.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}
