//! `hearth block attach`: a disk as a device of this host's kernel, for as long as the command runs. The stop order is the
//! one of a sandbox: made durable, socket shut, disconnected, and seen quiet.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hearth_core::host::HostError;
use hearth_core::id::SandboxId;
use hearth_core::nbd_pool::{NbdPool, Proof};
use hearth_host::nbd::{self, Device, Order, Outcome, Server, Timeouts};
use hearth_vmm::block::nbd::{Export, Limits, serve_attached};
use hearth_vmm::block::{BLOCK, Backend, Limit};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{DiskArgs, PATIENCE};
use crate::cli::error::{self, CliError};
use crate::cli::signals::Signals;
use crate::cli::{Context, out};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth block attach --base rootfs.ext4 --overlay disk.overlay
  hearth block attach --file disk.img --index 3 --read-only

Unmount the device before you end the command. It needs root and the module nbd.";

/// For the kernel to connect.
const CONNECT: Duration = Duration::from_secs(20);
/// For the device to get quiet.
const QUIET: Duration = Duration::from_secs(10);

/// Arguments of `hearth block attach`.
#[derive(Debug, Args)]
pub(in crate::cli) struct AttachArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Use /dev/nbd<N>; without it, one that is free
    #[arg(long, value_name = "N")]
    index: Option<u32>,
    /// Answer a request within this time, with an error if need be
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().request.as_secs(),
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

/// A connected device, and what it takes to let it go.
struct Attached {
    device: Device,
    /// The kernel's end of its socket.
    socket: OwnedFd,
}

pub(super) async fn run(args: AttachArgs, context: &Context) -> Result<u8, CliError> {
    let mut signals = Signals::new()?;
    let disk = args.disk.open().await?;
    let limits = Limits { request: Duration::from_secs(args.timeout), ..Limits::default() };
    let export = Export::new("disk", disk.clone());
    let (ours, theirs) = UnixStream::pair().map_err(|e| CliError::failed("no socket", e.to_string()))?;
    let ours = ours.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(ours));
    let (read, write) = ours.map_err(|e| CliError::failed("no socket", e.to_string()))?.into_split();
    let stop = CancellationToken::new();
    // It answers while the device is being connected: the kernel may read at once.
    let serving = serve_attached(read, write, export.clone(), limits, stop.clone());
    tokio::pin!(serving);
    let (index, flags) = (args.index, export.flags());
    let size = disk.size();
    let connecting =
        tokio::task::spawn_blocking(move || connect(index, size, flags, limits.request, theirs.into()));
    tokio::pin!(connecting);
    let connected = tokio::select! {
        connected = &mut connecting => connected,
        // Refused, it is closed before that was told.
        _ = &mut serving => connecting.await,
    };
    let attached = connected.map_err(|e| CliError::failed("cannot connect", e.to_string()))??;
    tell(&attached, &disk, context)?;
    let mut ended = false;
    tokio::select! {
        _ = &mut serving => ended = true,
        _ = signals.next() => {}
    }
    // What was written and not flushed is kept too: the operator means well.
    let synced = match disk.read_only() {
        true => Ok(()),
        false => disk.flush(&Limit::within(PATIENCE)).await,
    };
    let index = attached.device.index;
    let releasing = tokio::task::spawn_blocking(move || {
        nbd::release(&attached.device, &Server::Shut(&[attached.socket]), QUIET)
    });
    // The socket is shut by the release; the server sees that and ends.
    let released =
        releasing.await.map_err(|e| CliError::failed("cannot release the device", e.to_string()))?;
    stop.cancel();
    if !ended {
        serving.await;
    }
    let leaked = disk.close(limits.quiet).await;
    released.map_err(|e| failed(&format!("/dev/nbd{index} is not released"), &e))?;
    synced.map_err(|e| CliError::failed("not all that was written is safe", e.to_string()))?;
    match (leaked, ended) {
        (0, false) => Ok(error::OK),
        (0, true) => {
            Err(CliError::failed(format!("/dev/nbd{index} is gone"), "somebody else disconnected it"))
        }
        (n, _) => {
            Err(CliError::failed("the disk did not get quiet", format!("the kernel still has {n} requests")))
        }
    }
}

fn tell(attached: &Attached, disk: &Arc<dyn Backend>, context: &Context) -> Result<(), CliError> {
    let Device { index, owner, .. } = &attached.device;
    let path = format!("/dev/nbd{index}");
    let (size, read_only) = (disk.size(), disk.read_only());
    if context.json {
        out::json(&json!({ "device": path, "backend": owner, "size": size, "read_only": read_only }))
    } else {
        let how = if read_only { ", read-only" } else { "" };
        out::line(&format!("{path} ({size} bytes{how})"))
    }
}

/// Connects the index asked for, or the free ones in turn until one can be had.
fn connect(
    index: Option<u32>,
    size: u64,
    flags: u16,
    backend: Duration,
    socket: OwnedFd,
) -> Result<Attached, CliError> {
    let limits =
        nbd::limits().map_err(|e| CliError::failed("cannot look at the module nbd", e.to_string()))?;
    let Some(limits) = limits else {
        return Err(CliError::failed("no device", "the kernel has no nbd here").todo("load it: modprobe nbd"));
    };
    // Nobody is asked whose a device is that is not quiet: it is left alone.
    let mut pool = NbdPool::new(limits.most, |index| match nbd::look(index) {
        Ok(seen) if seen.unquiet().is_none() => Proof::Quiet,
        _ => Proof::Unproven,
    });
    let owner = random_owner()?;
    loop {
        let taken = match index {
            Some(index) => index,
            None => pool.acquire().map_err(|e| CliError::failed("no device", e.to_string()))?,
        };
        let copy = || socket.try_clone().map_err(|e| CliError::failed("no socket", e.to_string()));
        let order = Order {
            device: Device { index: taken, owner: owner.clone(), task: None },
            size,
            block_size: block_size(size),
            flags,
            timeouts: Timeouts::above(backend),
            backend,
        };
        let what = format!("cannot connect /dev/nbd{taken}");
        let why = match nbd::connect(&order, vec![copy()?], CONNECT) {
            Outcome::Done(device) => return Ok(Attached { device, socket }),
            Outcome::NotSent(e) | Outcome::Refused(e) => e,
            Outcome::Unknown(e) => {
                // It may be there yet, with a socket that is good for nothing once it is shut.
                nbd::release(&order.device, &Server::Shut(&[socket]), QUIET)
                    .map_err(|left| failed(&format!("{what}: {e}; and it is not released"), &left))?;
                return Err(failed(&what, &e));
            }
        };
        // Another took it between the look and the call.
        let lost = why.class == hearth_core::host::ErrorClass::Busy && index.is_none();
        if !(lost && pool.give_back(taken, Proof::Unproven)) {
            return Err(failed(&what, &why));
        }
    }
}

/// The largest that the kernel takes and the disk is made of.
fn block_size(size: u64) -> u64 {
    if size.is_multiple_of(BLOCK) { BLOCK } else { 512 }
}

/// Nobody else's: a device is known by it.
fn random_owner() -> Result<SandboxId, CliError> {
    let mut bytes = [0; SandboxId::LEN];
    getrandom::fill(&mut bytes).map_err(|e| CliError::failed("no random bytes", e.to_string()))?;
    Ok(SandboxId::from_random(bytes))
}

fn failed(what: &str, e: &HostError) -> CliError {
    CliError::failed(what.to_owned(), e.why.clone())
}
