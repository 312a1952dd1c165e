//! The wish to end early, as a value: Ctrl-C and SIGTERM set it, long work asks for it and takes back what it
//! made.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokio::signal::unix::{SignalKind, signal};

/// Whether to end early.
#[derive(Debug, Default)]
pub(crate) struct Stop(AtomicBool);

impl Stop {
    /// An error once the wish was uttered.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(!self.0.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }
}

/// Runs `work` on a thread of its own while this one listens for signals.
pub(crate) fn watching_signals<T: Send>(work: impl FnOnce(&Stop) -> Result<T> + Send) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    let stop = Stop::default();
    let (ended, mut end) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("work".into()).spawn_scoped(scope, || {
            // Dropped when the work ends, by a panic as well.
            let _ended = ended;
            work(&stop)
        });
        let thread = thread.context("start a thread")?;
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = &mut end => break,
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                eprintln!("ending early; what was made is removed first");
                stop.0.store(true, Ordering::Relaxed);
            }
        });
        thread.join().map_err(|_| anyhow!("the work panicked"))?
    })
}
