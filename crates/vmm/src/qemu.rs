//! The QEMU back end: KVM where the CPU has it, else emulation. Monitor, console, agent and disks are socket pairs
//! inherited by QEMU, so it leaves no socket behind however it ends.

mod args;
mod qmp;

use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::future::BoxFuture;
use hearth_core::shim::ShimSpec;
use hearth_core::usage::DiskCounters;
use hearth_host::facts;
use serde::Deserialize;

pub(crate) use qmp::QmpError;

use crate::backend::{AgentStream, Flushed, Launched, Vmm, VmmError, VmmEvent, socket_pair, start};
use args::Accelerator;
use qmp::Qmp;

/// From spawn to the monitor's greeting; under 0.1 s on an idle host.
const GREETING_DEADLINE: Duration = Duration::from_secs(30);
/// One monitor command; 1 to 2 ms on an idle host.
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// The monitor's answer to a question on counters; its loop may be busy with a guest's disk.
const FLUSH_DEADLINE: Duration = Duration::from_secs(2);

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
    Ok(Launched { process, vmm: Box::new(vmm), console: Some(Box::new(console)), metrics: None })
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

    fn flush(&mut self) -> BoxFuture<'_, Result<Flushed, VmmError>> {
        Box::pin(async {
            let disks: Vec<Blockstats> = self.qmp.query("query-blockstats", FLUSH_DEADLINE).await?;
            Ok(Flushed::Counters(sum(&disks)))
        })
    }

    fn event(&mut self) -> BoxFuture<'_, VmmEvent> {
        Box::pin(self.qmp.event())
    }
}

/// One disk in the answer to `query-blockstats` (qapi/block-core.json); counters since the start.
#[derive(Debug, Deserialize)]
struct Blockstats {
    stats: BlockCounters,
}

#[derive(Debug, Deserialize)]
struct BlockCounters {
    rd_bytes: u64,
    wr_bytes: u64,
    rd_operations: u64,
    wr_operations: u64,
}

fn sum(disks: &[Blockstats]) -> DiskCounters {
    disks.iter().fold(DiskCounters::default(), |sum, Blockstats { stats }| DiskCounters {
        read_bytes: sum.read_bytes.saturating_add(stats.rd_bytes),
        written_bytes: sum.written_bytes.saturating_add(stats.wr_bytes),
        reads: sum.reads.saturating_add(stats.rd_operations),
        writes: sum.writes.saturating_add(stats.wr_operations),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_all_disks_are_added() {
        let answer = r#"[
            {"device": "", "node-name": "rootfs", "qdev": "/machine/x",
             "stats": {"rd_bytes": 10, "wr_bytes": 1, "rd_operations": 2, "wr_operations": 3, "flush_operations": 9}},
            {"stats": {"rd_bytes": 5, "wr_bytes": 20, "rd_operations": 1, "wr_operations": 1}}
        ]"#;
        let disks: Vec<Blockstats> = serde_json::from_str(answer).unwrap();
        let expected = DiskCounters { read_bytes: 15, written_bytes: 21, reads: 3, writes: 4 };
        assert_eq!(sum(&disks), expected);
    }
}
