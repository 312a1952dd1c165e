//! Waiting for the end of a shim.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::host::Host;
use hearth_core::process::{Liveness, ProcessIdentity};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::blocking::on_host;

/// How often the host is asked while the descriptor cannot be watched.
const ASK: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(10);

/// Ends when the process has ended: its pidfd is readable then (pidfd_open(2)). Without a descriptor, or
/// where it cannot be watched (out of memory or descriptors), the host is asked from time to time; only its
/// plain "gone" counts, since unknown is not gone.
pub(super) async fn ended<H: Host>(host: &Arc<H>, process: &ProcessIdentity, pidfd: Option<OwnedFd>) {
    let mut pidfd = pidfd;
    let mut wait = *ASK.start();
    loop {
        if let Some(fd) = pidfd.take() {
            match watch(fd) {
                Ok(fd) => match fd.readable().await {
                    Ok(_) => return,
                    Err(e) => tracing::warn!(
                        sandbox = process.cgroup,
                        pid = process.pid,
                        "cannot watch a shim, asking instead: {e}"
                    ),
                },
                Err((fd, e)) => {
                    tracing::warn!(
                        sandbox = process.cgroup,
                        pid = process.pid,
                        "cannot watch a shim, trying again: {e}"
                    );
                    pidfd = Some(fd);
                }
            }
        }
        let asked = process.clone();
        if on_host(host, move |host| host.liveness(&asked)).await == Liveness::Gone {
            return;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(*ASK.end());
    }
}

// Deprecated because an `AsRawFd` of any type may close its descriptor meanwhile; an `OwnedFd` cannot.
#[allow(deprecated)]
fn watch(fd: OwnedFd) -> Result<AsyncFd<OwnedFd>, (OwnedFd, std::io::Error)> {
    AsyncFd::try_with_interest(fd, Interest::READABLE).map_err(|e| e.into_parts())
}
