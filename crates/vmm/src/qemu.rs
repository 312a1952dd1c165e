//! The QEMU back end: KVM where the CPU has it, else emulation. Monitor, console, agent and disks are socket pairs
//! inherited by QEMU, so it leaves no socket behind however it ends.

mod args;
mod qmp;

use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::future::BoxFuture;
use hearth_core::shim::ShimSpec;
use hearth_host::facts;

pub(crate) use qmp::QmpError;

use crate::backend::{AgentStream, Launched, Vmm, VmmError, VmmEvent, socket_pair, start};
use args::Accelerator;
use qmp::Qmp;

/// From spawn to the monitor's greeting; under 0.1 s on an idle host.
const GREETING_DEADLINE: Duration = Duration::from_secs(30);
/// One monitor command; 1 to 2 ms on an idle host.
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// Starts QEMU, which boots the guest at once.
pub(crate) fn launch(spec: &ShimSpec, disks: Vec<OwnedFd>) -> Result<Launched, VmmError> {
    let (qmp, qmp_theirs) = socket_pair("monitor")?;
    let (console, console_theirs) = socket_pair("console")?;
    let (agent, agent_theirs) = socket_pair("agent")?;
    let accelerator = choose();
    let tsc_khz = facts::tsc_khz().ok().flatten();
    let args = args::build(spec, accelerator, tsc_khz);
    let mut fds = vec![qmp_theirs, console_theirs];
    let mut stream = None;
    if spec.agent {
        fds.push(agent_theirs);
        stream = Some(agent);
    }
    fds.extend(disks);
    let process = start(spec, args, fds)?;
    let vmm = Qemu { qmp: Qmp::new(qmp), stream };
    Ok(Launched { process, vmm: Box::new(vmm), console: Some(Box::new(console)) })
}

/// KVM on a CPU without vmx or svm aborts QEMU or spins, however good `/dev/kvm` looks.
fn choose() -> Accelerator {
    let has_kvm = matches!(facts::cpu_virtualization(), Ok(Some(_))) && facts::kvm_usable().is_ok();
    if has_kvm { Accelerator::Kvm } else { Accelerator::Tcg }
}

struct Qemu {
    qmp: Qmp,
    stream: Option<AgentStream>,
}

impl Vmm for Qemu {
    fn boot(&mut self) -> BoxFuture<'_, Result<Option<AgentStream>, VmmError>> {
        Box::pin(async {
            self.qmp.start(GREETING_DEADLINE).await?;
            Ok(self.stream.take())
        })
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(async { Ok(self.qmp.execute("stop", CALL_DEADLINE).await?) })
    }

    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(async { Ok(self.qmp.execute("cont", CALL_DEADLINE).await?) })
    }

    fn request_stop(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        Box::pin(async { Ok(self.qmp.execute("system_powerdown", CALL_DEADLINE).await?) })
    }

    fn event(&mut self) -> BoxFuture<'_, VmmEvent> {
        Box::pin(self.qmp.event())
    }
}
