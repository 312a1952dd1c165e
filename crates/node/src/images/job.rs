//! How a long piece of work reports progress and learns that it should stop.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::ImageError;

/// One report of a long piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What is being done, in words.
    pub step: &'a str,
    /// How much of it, mostly bytes.
    pub done: u64,
    /// Of how much; `None` if nobody knows.
    pub total: Option<u64>,
}

/// What a caller lends to a long piece of work.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// Called often; must be quick.
    pub progress: &'a dyn Fn(Progress<'_>),
    /// Once true, the work ends within about a second with [`ImageError::Stopped`] and leaves nothing.
    pub stop: &'a AtomicBool,
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("stop", self.stop).finish_non_exhaustive()
    }
}

impl<'a> Job<'a> {
    /// A job nobody watches.
    #[must_use]
    pub fn quiet(stop: &'a AtomicBool) -> Self {
        Self { progress: &|_| {}, stop }
    }

    pub(super) fn report(&self, step: &str, done: u64, total: Option<u64>) {
        (self.progress)(Progress { step, done, total });
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// To be called in every loop.
    pub(super) fn check(&self) -> Result<(), ImageError> {
        if self.stopped() { Err(ImageError::Stopped) } else { Ok(()) }
    }
}

/// A reader that reports how far it is and fails once the job is stopped.
pub(super) struct Watched<'a, R> {
    inner: R,
    job: Job<'a>,
    step: &'static str,
    done: u64,
    reported: u64,
    total: Option<u64>,
}

impl<'a, R: Read> Watched<'a, R> {
    pub(super) fn new(inner: R, job: Job<'a>, step: &'static str, total: Option<u64>) -> Self {
        Self { inner, job, step, done: 0, reported: 0, total }
    }
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        if self.job.stopped() {
            return Err(std::io::Error::other("stopped"));
        }
        let n = self.inner.read(buf)?;
        self.done += n as u64;
        if n == 0 || self.done - self.reported >= 1 << 20 {
            self.reported = self.done;
            self.job.report(self.step, self.done, self.total);
        }
        Ok(n)
    }
}
