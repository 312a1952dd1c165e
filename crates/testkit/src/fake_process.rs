//! Processes that are not: each has an identity, a descriptor that becomes readable at its end as a pidfd
//! does, and a handle by which a test ends it or learns that it was killed.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::process::ProcessIdentity;

/// How a fake process came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The host was asked to release it or its cgroup, or the test killed it.
    Killed,
    /// It ended by itself.
    Exited,
}

/// One fake process; clones speak of the same.
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    identity: ProcessIdentity,
    life: Arc<Life>,
}

#[derive(Debug)]
struct Life {
    /// The writer is dropped at the end, which makes the reader readable.
    state: Mutex<(Option<PipeWriter>, Option<End>)>,
    changed: Condvar,
    reader: PipeReader,
}

impl ProcessHandle {
    pub(crate) fn new(identity: ProcessIdentity) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let state = Mutex::new((Some(writer), None));
        Ok(Self { identity, life: Arc::new(Life { state, changed: Condvar::new(), reader }) })
    }

    /// Its identity.
    #[must_use]
    pub fn identity(&self) -> &ProcessIdentity {
        &self.identity
    }

    /// Kills it, as `kill -9` from outside would.
    pub fn kill(&self) {
        self.end(End::Killed);
    }

    /// It ends by itself.
    pub fn exit(&self) {
        self.end(End::Exited);
    }

    /// How it ended; `None` while it runs.
    #[must_use]
    pub fn ended(&self) -> Option<End> {
        self.lock().1
    }

    /// Waits until it ended: what a thread that plays the process does.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<End> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while state.1.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self.life.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.1
    }

    /// A stand-in for a pidfd: readable once the process ended. Not good for signals.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        Ok(self.life.reader.try_clone()?.into())
    }

    fn end(&self, how: End) {
        let mut state = self.lock();
        if state.1.is_none() {
            *state = (None, Some(how));
            self.life.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<PipeWriter>, Option<End>)> {
        self.life.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
