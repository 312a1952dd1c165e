//! The Firecracker back end, written against version 1.16 (`docs/api_requests` and its swagger file).
//!
//! What was measured and is relied upon here: on *any* existing API socket path Firecracker exits 1. A missing
//! tap is made by Firecracker itself, so its presence is checked first. Its log goes to stdout, which is an
//! append-only file here: `--log-path` would open one without `O_APPEND`, and a panic on stderr would be
//! overwritten (a stdout *pipe* whose reader dies blocks the API for ever). The guest's serial port goes to a
//! pipe of ours, opened by Firecracker as `/proc/self/fd/3` without blocking: an unread pipe loses bytes and
//! never holds up the guest, and it ends when Firecracker does.

mod api;
mod requests;
mod vsock;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use futures::future::BoxFuture;
use hearth_core::agent::VSOCK_PORT;
use hearth_core::shim::{METRICS_FIFO, ShimSpec};
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep};

pub(crate) use api::ApiError;

use crate::backend::{AgentStream, Flushed, Launched, Vmm, VmmError, fresh_socket, start};
use api::Api;
use requests::{Action, BootSource, Drive, MachineConfig, Metrics, NetworkInterface, Serial, VmState, Vsock};

/// Where Firecracker finds the write end of the console pipe.
const CONSOLE_PATH: &str = "/proc/self/fd/3";
/// From spawn to an accepted connection; 4 ms on an idle host.
const API_DEADLINE: Duration = Duration::from_secs(5);
/// One configuration call; 0.1 to 0.4 ms on an idle host.
const CALL_DEADLINE: Duration = Duration::from_secs(5);
/// FlushMetrics; 0.2 ms on an idle host. Shorter than a configuration call: another call waits behind it.
const FLUSH_DEADLINE: Duration = Duration::from_secs(2);
/// InstanceStart loads kernel and initramfs.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// The serial port is the console, a panic or a reboot ends the VM (`reboot=k` is the reset Firecracker
/// understands), and the rest skips what no guest here has.
const KERNEL_LINE: &str =
    "console=ttyS0 quiet reboot=k panic=1 random.trust_cpu=on i8042.noaux i8042.nomux i8042.dumbkbd";

/// Starts Firecracker with its API socket; configuration follows in [`Vmm::boot`].
pub(crate) fn launch(spec: &ShimSpec) -> Result<Launched, VmmError> {
    let api = fresh_socket(&spec.run_dir, "fc.sock")?;
    let vsock = fresh_socket(&spec.run_dir, "vsock.sock")?;
    let metrics = spec.run_dir.join(METRICS_FIFO);
    hearth_host::fifo::ensure(&metrics).map_err(|e| VmmError::file("make", &metrics, e))?;
    let (reader, writer) =
        std::io::pipe().map_err(|source| VmmError::Descriptor { what: "console", source })?;
    let console = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))
        .map_err(|source| VmmError::Descriptor { what: "console", source })?;
    let args = [
        "--api-sock".into(),
        api.clone().into_os_string(),
        "--id".into(),
        spec.id.as_str().into(),
        "--level".into(),
        "Warn".into(),
    ];
    let process = start(spec, args.into(), vec![OwnedFd::from(writer)])?;
    let pid = process.pid();
    let vmm = Firecracker {
        api: Api::new(api.clone()),
        spec: spec.clone(),
        pid,
        vsock,
        socket: api,
        metrics: metrics.clone(),
    };
    Ok(Launched { process, vmm: Box::new(vmm), console: Some(Box::new(console)), metrics: Some(metrics) })
}

struct Firecracker {
    api: Api,
    spec: ShimSpec,
    pid: u32,
    socket: PathBuf,
    vsock: PathBuf,
    metrics: PathBuf,
}

impl Firecracker {
    async fn configure_and_start(&self) -> Result<(), VmmError> {
        let (api, spec) = (&self.api, &self.spec);
        self.wait_for_api().await?;
        // First, so that whatever fails later is counted. A VMM takes it once.
        api.put("/metrics", &Metrics { metrics_path: &self.metrics }, CALL_DEADLINE).await?;
        api.put("/machine-config", &MachineConfig::new(spec.cpus, spec.memory_mib), CALL_DEADLINE).await?;
        let boot = BootSource {
            kernel_image_path: &spec.kernel,
            initrd_path: spec.initramfs.as_deref(),
            boot_args: KERNEL_LINE,
        };
        api.put("/boot-source", &boot, CALL_DEADLINE).await?;
        if let Some(path) = &spec.rootfs {
            api.put("/drives/rootfs", &Drive::root(path, spec.drive_rate), CALL_DEADLINE).await?;
        }
        match (&spec.overlay, spec.block.as_ref().and_then(|block| block.nbd)) {
            (_, Some(index)) => {
                let device = hearth_host::nbd::path(index);
                api.put("/drives/overlay", &Drive::device(&device), CALL_DEADLINE).await?;
            }
            (Some(path), None) => {
                api.put("/drives/overlay", &Drive::writable(path, spec.drive_rate), CALL_DEADLINE).await?;
            }
            (None, None) => {}
        }
        if let Some(net) = &spec.net {
            self.check_tap(&net.tap)?;
            let card = NetworkInterface { iface_id: "eth0", guest_mac: &net.mac, host_dev_name: &net.tap };
            api.put("/network-interfaces/eth0", &card, CALL_DEADLINE).await?;
        }
        if spec.agent {
            api.put("/vsock", &Vsock { guest_cid: 3, uds_path: &self.vsock }, CALL_DEADLINE).await?;
        }
        api.put("/serial", &Serial { serial_out_path: CONSOLE_PATH }, CALL_DEADLINE).await?;
        api.put("/actions", &Action { action_type: "InstanceStart" }, START_DEADLINE).await?;
        Ok(())
    }

    async fn wait_for_api(&self) -> Result<(), VmmError> {
        let deadline = Instant::now() + API_DEADLINE;
        let mut nap = Duration::from_millis(1);
        while let Err(e) = self.api.probe().await {
            if Instant::now() >= deadline {
                return Err(e.into());
            }
            sleep(nap).await;
            nap = (nap * 2).min(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The namespace is read through the process that is in it, which needs no thread to enter it.
    fn check_tap(&self, tap: &str) -> Result<(), VmmError> {
        let path = PathBuf::from(format!("/proc/{}/net/dev", self.pid));
        let table = std::fs::read_to_string(&path).map_err(|e| VmmError::file("read", &path, e))?;
        if has_interface(&table, tap) { Ok(()) } else { Err(VmmError::NoTap { tap: tap.to_owned() }) }
    }

    async fn set_state(&self, state: &'static str) -> Result<(), VmmError> {
        Ok(self.api.patch("/vm", &VmState { state }, START_DEADLINE).await?)
    }
}

impl Vmm for Firecracker {
    fn boot(&mut self) -> BoxFuture<'_, Result<Option<AgentStream>, VmmError>> {
        Box::pin(async {
            self.configure_and_start().await?;
            if !self.spec.agent {
                return Ok(None);
            }
            Ok(Some(vsock::connect(&self.vsock, VSOCK_PORT).await))
        })
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(self.set_state("Paused"))
    }

    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(self.set_state("Resumed"))
    }

    fn request_stop(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(async {
            Ok(self.api.put("/actions", &Action { action_type: "SendCtrlAltDel" }, CALL_DEADLINE).await?)
        })
    }

    fn flush(&mut self) -> BoxFuture<'_, Result<Flushed, VmmError>> {
        Box::pin(async {
            self.api.put("/actions", &Action { action_type: "FlushMetrics" }, FLUSH_DEADLINE).await?;
            Ok(Flushed::Announced)
        })
    }

    fn leftovers(&self) -> Vec<PathBuf> {
        vec![self.socket.clone(), self.vsock.clone(), self.metrics.clone()]
    }
}

/// Whether `/proc/net/dev` lists the interface.
fn has_interface(table: &str, name: &str) -> bool {
    table.lines().any(|line| line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_found_by_its_whole_name() {
        let table = "Inter-|   Receive\n face |bytes\n    lo: 0 0\n tap01:1 2\nuplink:    0\n";
        assert!(has_interface(table, "uplink") && has_interface(table, "tap01"));
        assert!(!has_interface(table, "tap0") && !has_interface(table, "up"));
    }
}
