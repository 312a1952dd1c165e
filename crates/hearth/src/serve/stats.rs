//! What running sandboxes use: asked of their shims, a few at a time, each with a deadline. A shim that does not
//! answer, or is of a release that cannot, has its reason in the answer and holds nobody up.

use std::time::Duration;

use futures::StreamExt as _;
use hearth_api::shim::UsageRequest;
use hearth_api::v1;
use hearth_core::exit::{ExitRecord, KeptExit};
use hearth_core::host::Host;
use hearth_core::lifecycle::SandboxState;
use hearth_core::usage::{CgroupCounters, Usage};
use hearth_node::{Engine, EngineError, View};
use tonic::Code;

/// Shims asked at once.
const AT_ONCE: usize = 32;
/// For one shim; it reads a few files of the kernel.
const ANSWER: Duration = Duration::from_secs(2);
/// State of a sandbox of which only its end is left.
const GONE: &str = "gone";

/// Of one sandbox, or of all that run.
pub(super) async fn of<H: Host>(engine: &Engine<H>, key: &str) -> Result<v1::StatsResponse, EngineError> {
    let views = if key.is_empty() {
        let running = |v: &View| v.state == SandboxState::Running;
        engine.list()?.into_iter().filter(running).collect()
    } else {
        // Tells why if it does not run.
        engine.connected(key).await?;
        vec![engine.get(key)?]
    };
    let mut asked = futures::stream::iter(views.into_iter().map(ask)).buffered(AT_ONCE);
    let mut sandboxes = Vec::new();
    while let Some(stats) = asked.next().await {
        sandboxes.extend(stats);
    }
    Ok(v1::StatsResponse { sandboxes })
}

/// `None` for one that ended meanwhile.
async fn ask(view: View) -> Option<v1::SandboxStats> {
    let record = view.record;
    let mut stats = v1::SandboxStats {
        id: record.id.to_string(),
        name: record.name.to_string(),
        cpus: record.spec.cpus,
        memory_mib: record.spec.memory_mib,
        ..v1::SandboxStats::default()
    };
    let Some(mut shim) = view.shim else {
        stats.error = view.unreachable.unwrap_or_else(|| "its shim is being connected to".into());
        return Some(stats);
    };
    match tokio::time::timeout(ANSWER, shim.usage(UsageRequest {})).await {
        Ok(Ok(answer)) => match serde_json::from_str(&answer.into_inner().usage) {
            Ok(read) => stats.usage = Some(usage(&read)),
            Err(e) => stats.error = format!("its shim's answer is not understood: {e}"),
        },
        Ok(Err(status)) if status.code() == Code::Unavailable => return None,
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            stats.error = "its shim is of a release that cannot tell".into();
        }
        Ok(Err(status)) => stats.error = status.message().to_owned(),
        Err(_) => stats.error = format!("its shim did not answer within {} s", ANSWER.as_secs()),
    }
    Some(stats)
}

/// Usage for clients.
fn usage(u: &Usage) -> v1::Usage {
    v1::Usage {
        at_ms: u.at_ms,
        cpu_us: u.cpu_us,
        memory_bytes: u.memory_bytes,
        memory_peak_bytes: u.memory_peak_bytes,
        disk: u.disk.map(|d| v1::DiskUsage {
            read_bytes: d.read_bytes,
            written_bytes: d.written_bytes,
            reads: d.reads,
            writes: d.writes,
        }),
        net: u.net.map(|n| v1::NetUsage {
            received_bytes: n.received_bytes,
            sent_bytes: n.sent_bytes,
            received_packets: n.received_packets,
            sent_packets: n.sent_packets,
        }),
        vmm_at_ms: u.vmm.map(|v| v.at_ms),
        vmm_samples: u.vmm.map_or(0, |v| v.samples),
        vmm_missed: u.vmm.map_or(0, |v| v.missed),
    }
}

/// An end for clients.
pub(super) fn exit(e: &ExitRecord) -> v1::Exit {
    let cgroup = |c: &CgroupCounters| v1::CgroupCounters {
        cpu_us: c.cpu_us,
        memory_bytes: c.memory_bytes,
        memory_peak_bytes: c.memory_peak_bytes,
        oom_kills: c.oom_kills,
        read_bytes: c.read_bytes,
        written_bytes: c.written_bytes,
    };
    v1::Exit {
        reason: e.reason.as_str().into(),
        code: e.code,
        signal: e.signal,
        at_ms: e.at_ms,
        detail: e.detail.clone(),
        wall_ms: e.wall_ms,
        cpu_us: e.cpu_us,
        usage: e.usage.as_deref().map(usage),
        cgroup: e.cgroup.as_deref().map(cgroup),
        guest_oom_kills: e.guest_oom_kills,
        // Numbers and strings always serialize.
        disks: serde_json::to_string(&e.disks).unwrap_or_default(),
    }
}

/// A sandbox of which only its end is left.
pub(super) fn ended(kept: &KeptExit) -> v1::Sandbox {
    v1::Sandbox {
        id: kept.id.to_string(),
        name: kept.name.to_string(),
        template: kept.template.to_string(),
        state: GONE.into(),
        created_at_ms: kept.created_at_ms,
        cpus: kept.cpus,
        memory_mib: kept.memory_mib,
        vmm: kept.vmm.to_string(),
        exit: Some(exit(&kept.exit)),
        ..v1::Sandbox::default()
    }
}
