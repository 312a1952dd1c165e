//! Threads for calls that the kernel may never return from. Their number is bounded; one that is late is left behind, and
//! what it owns lives until it ends.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Instant;

/// At once, those left behind included.
pub(super) const MOST: usize = 64;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Why there is no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lost {
    /// Not begun: too many run already, or there is no thread.
    Full,
    /// It may still be running.
    Late,
    /// It panicked.
    Died,
}

/// One place among [`MOST`].
struct Place;

impl Place {
    fn take() -> Option<Self> {
        let more = |n: usize| (n < MOST).then_some(n + 1);
        RUNNING.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok().map(|_| Self)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Runs `work` on a thread of its own and waits for it until `deadline`.
pub(super) fn run<T: Send + 'static>(
    deadline: Instant,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Lost> {
    let place = Place::take().ok_or(Lost::Full)?;
    let (done, result) = sync_channel(1);
    let thread = std::thread::Builder::new().name("nbd".into()).spawn(move || {
        let place = place;
        // Nobody waits any more: the result, with what it holds, is dropped here.
        drop(done.send(work()));
        drop(place);
    });
    if thread.is_err() {
        return Err(Lost::Full);
    }
    let left = deadline.saturating_duration_since(Instant::now());
    result.recv_timeout(left).map_err(|e| match e {
        RecvTimeoutError::Timeout => Lost::Late,
        RecvTimeoutError::Disconnected => Lost::Died,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_late_is_left_behind_and_what_panics_is_told() {
        let soon = || Instant::now() + Duration::from_secs(60);
        assert_eq!(run(soon(), || 5), Ok(5));
        let (go, wait) = channel::<()>();
        let (tell, told) = channel::<()>();
        let late = run(Instant::now(), move || {
            wait.recv().expect_err("nothing is sent");
            drop(tell);
        });
        assert_eq!(late, Err(Lost::Late));
        drop(go);
        // It goes on to its end all the same.
        assert!(
            told.recv_timeout(Duration::from_secs(60)).is_err_and(|e| e == RecvTimeoutError::Disconnected)
        );
        assert_eq!(run(soon(), || -> u8 { panic!("ordered by the test") }), Err(Lost::Died));
    }
}
