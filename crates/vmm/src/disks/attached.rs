//! The writable disk as a device of the kernel's own NBD client, for a VMM that takes files and block devices only. The record
//! of the sandbox names the index before the shim is told of it, so whatever becomes of this process, the device is found
//! and released by its name.
//!
//! Nothing on this process's main thread may open the device: the server that would answer runs there.

use std::os::fd::OwnedFd;
use std::time::Duration;

use hearth_core::block::DiskRate;
use hearth_core::host::HostError;
use hearth_core::id::SandboxId;
use hearth_host::nbd::{self, Device, Order, Outcome, Server, Timeouts};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::block::BLOCK;
use crate::block::nbd::{Export, Limits};

/// For the kernel to connect; it takes 30 ms, and waits for every other such command of the host.
const CONNECT: Duration = Duration::from_secs(10);
/// For the device to get quiet once the VMM is dead.
const QUIET: Duration = Duration::from_secs(10);
/// The kernel has so many requests to one device on their way (its tags).
const QUEUE: u64 = 128;
/// Bytes of one such request, at most: `BLK_DEF_MAX_SECTORS_CAP`.
const LARGEST: u64 = 1280 << 10;

/// A device that is connected, or whose release has begun.
pub(super) struct Attached {
    device: Device,
    /// A clone of the kernel's end of its socket, to shut it: only then may the device be disconnected.
    socket: Option<OwnedFd>,
    releasing: Option<JoinHandle<Result<(), HostError>>>,
}

/// What is asked of the kernel.
pub(super) fn order(index: u32, owner: &SandboxId, export: &Export, rate: DiskRate) -> Order {
    let backend = Limits::default().request + longest_wait(rate);
    Order {
        device: Device { index, owner: owner.clone(), task: None },
        size: export.backend().size(),
        // The largest that the kernel takes and the disk is made of.
        block_size: if export.backend().size().is_multiple_of(BLOCK) { BLOCK } else { 512 },
        flags: export.flags(),
        timeouts: Timeouts::above(backend),
        backend,
    }
}

/// The longest time for which the last request of a full queue is made to wait by the rate limit. The kernel's clock runs
/// meanwhile, and it must not lose patience with a server that is well.
fn longest_wait(rate: DiskRate) -> Duration {
    let seconds = |amount: u64, rate: u64| if rate == 0 { 0 } else { amount.div_ceil(rate) };
    Duration::from_secs(
        seconds(QUEUE * LARGEST, rate.mib_per_second.saturating_mul(1 << 20)) + seconds(QUEUE, rate.iops),
    )
}

impl Attached {
    /// Connects the kernel to a server that answers on the other end of `socket` already. If this is dropped meanwhile, what
    /// comes of it is released.
    ///
    /// # Errors
    /// In words.
    pub(super) async fn connect(order: Order, socket: OwnedFd) -> Result<Self, String> {
        let (told, connected) = oneshot::channel();
        let work = move || {
            let outcome = connect(&order, socket);
            if let Err(Ok((device, socket))) = told.send(outcome) {
                // Nobody waits any more.
                if let Err(e) = nbd::release(&device, &Server::Shut(&[socket]), QUIET) {
                    tracing::warn!(error = %e, "a device that nobody waited for is left to the daemon");
                }
            }
        };
        drop(tokio::task::spawn_blocking(work));
        let (device, socket) =
            connected.await.map_err(|_| "the thread that connects it failed".to_owned())??;
        Ok(Self { device, socket: Some(socket), releasing: None })
    }

    /// Begins to release it: the socket is shut, which ends the server and all that waits in the kernel, then it is
    /// disconnected. For when the VMM was killed, at the latest when it does not end of that. False: that has begun before.
    pub(super) fn let_go(&mut self) -> bool {
        let Some(socket) = self.socket.take() else { return false };
        let device = self.device.clone();
        let work = move || nbd::release(&device, &Server::Shut(&[socket]), QUIET);
        self.releasing = Some(tokio::task::spawn_blocking(work));
        true
    }

    /// Whether [`let_go`](Self::let_go) has begun.
    pub(super) fn is_let_go(&self) -> bool {
        self.socket.is_none()
    }

    /// Waits until it is released: proven quiet.
    ///
    /// # Errors
    /// In words; whoever owns the sandbox tries again by its name.
    pub(super) async fn released(&mut self) -> Result<(), String> {
        self.let_go();
        let Some(releasing) = self.releasing.take() else { return Ok(()) };
        match releasing.await {
            Ok(released) => released.map_err(|e| e.to_string()),
            Err(e) => Err(format!("the release of {} failed: {e}", self.device)),
        }
    }
}

fn connect(order: &Order, socket: OwnedFd) -> Result<(Device, OwnedFd), String> {
    let theirs = socket.try_clone().map_err(|e| format!("no descriptor for its socket: {e}"))?;
    match nbd::connect(order, vec![theirs], CONNECT) {
        Outcome::Done(device) => Ok((device, socket)),
        Outcome::NotSent(e) | Outcome::Refused(e) => Err(e.to_string()),
        // It may be there, or may come yet, with a socket that is good for nothing once it is shut.
        Outcome::Unknown(e) => match nbd::release(&order.device, &Server::Shut(&[socket]), QUIET) {
            Ok(()) => Err(e.to_string()),
            Err(left) => Err(format!("{e}; and it is not released: {left}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_waits_for_a_full_queue_at_the_rate_that_was_asked_for() {
        let rate = |mib_per_second, iops| DiskRate { mib_per_second, iops, burst_ms: 0 };
        assert_eq!(longest_wait(rate(0, 0)), Duration::ZERO);
        assert_eq!(longest_wait(rate(4, 0)), Duration::from_secs(40));
        assert_eq!(longest_wait(rate(0, 1)), Duration::from_secs(128));
        assert_eq!(longest_wait(rate(1, 100)), Duration::from_secs(162));
    }
}
