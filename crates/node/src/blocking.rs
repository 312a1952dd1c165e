//! The one way from async code to host calls, which block.

use std::sync::Arc;

use hearth_core::host::Host;

/// Runs `work` with the host on a thread that may wait. The work is never abandoned: dropping the returned
/// future does not stop it, so callers await it to its end (host calls have deadlines of their own).
///
/// # Panics
/// Passes on a panic of `work`, so that it ends the sandbox's task and nothing else.
pub(crate) async fn on_host<H: Host, T: Send + 'static>(
    host: &Arc<H>,
    work: impl FnOnce(&H) -> T + Send + 'static,
) -> T {
    let host = Arc::clone(host);
    blocking(move || work(&host)).await
}

/// Runs blocking `work` on a thread that may wait.
///
/// # Panics
/// Passes on a panic of `work`.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(e) => std::panic::resume_unwind(e.into_panic()),
    }
}
