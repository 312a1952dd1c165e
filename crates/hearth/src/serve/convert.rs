//! Between the engine's values and the messages of the API.

use std::collections::HashMap;
use std::time::Duration;

use hearth_api::v1;
use hearth_core::host::Host;
use hearth_core::image::Template;
use hearth_core::stuck::{Holder, Left, Stuck};
use hearth_node::{Engine, EngineError, View};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// State of a sandbox whose record cannot be used.
pub(super) const UNKNOWN: &str = "unknown";

/// When a client may ask a starting node again.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// The status of an engine error.
pub(crate) fn status(e: &EngineError) -> Status {
    let code = match e {
        EngineError::Starting(_) => {
            let details = ErrorDetails::with_retry_info(Some(RETRY_AFTER));
            return Status::with_error_details(Code::Unavailable, e.to_string(), details);
        }
        EngineError::NotActive { desired, .. } => {
            // For clients that choose among nodes; a retry here is of no use until somebody acts.
            let reason = desired.as_str().to_uppercase();
            let details = ErrorDetails::with_error_info(reason, hearth_api::ERROR_DOMAIN, HashMap::new());
            return Status::with_error_details(Code::Unavailable, e.to_string(), details);
        }
        EngineError::Closed(_) | EngineError::Gone(_) => Code::Unavailable,
        EngineError::Invalid(_) => Code::InvalidArgument,
        EngineError::NotFound(_) => Code::NotFound,
        EngineError::AlreadyExists(_) => Code::AlreadyExists,
        EngineError::Exhausted(_) => Code::ResourceExhausted,
        EngineError::Precondition(_) | EngineError::Stuck { .. } => Code::FailedPrecondition,
        EngineError::Cancelled(_) => Code::Cancelled,
        EngineError::Step { .. } | EngineError::Failed(_) => Code::Internal,
    };
    Status::new(code, e.to_string())
}

/// A sandbox for clients.
pub(crate) fn sandbox<H: Host>(view: &View, engine: &Engine<H>) -> v1::Sandbox {
    let record = &view.record;
    let layout = &engine.config().layout;
    v1::Sandbox {
        id: record.id.to_string(),
        name: record.name.to_string(),
        template: record.spec.template.to_string(),
        state: view.state.to_string(),
        created_at_ms: record.created_at_ms,
        ends_at_ms: record.ends_at_ms.unwrap_or(0),
        cpus: record.spec.cpus,
        memory_mib: record.spec.memory_mib,
        disk_mib: record.spec.disk_mib,
        net: record.spec.net,
        vmm: record.spec.vmm.to_string(),
        slot: record.slot.map_or(0, |s| s.get()),
        address: record.slot.map(|s| layout.sandbox_address(s).to_string()).unwrap_or_default(),
        shim_pid: record.shim.as_ref().map_or(0, |p| p.pid),
        stuck: record.stuck.as_ref().map(ToString::to_string).unwrap_or_default(),
        resources: record.resources.iter().map(ToString::to_string).collect(),
        steps: view
            .steps
            .iter()
            .map(|(step, took)| v1::StepTime {
                step: step.to_string(),
                micros: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            })
            .collect(),
        stuck_details: record.stuck.as_ref().map(stuck),
        unknown: String::new(),
        unreachable: view.unreachable.clone().unwrap_or_default(),
        disk_mib_per_second: record.spec.disk_rate.mib_per_second,
        disk_iops: record.spec.disk_rate.iops,
        disk_burst_ms: record.spec.disk_rate.burst_ms,
        disk_stats: String::new(),
        exit: view.exit.as_ref().map(super::stats::exit),
    }
}

fn stuck(stuck: &Stuck) -> v1::Stuck {
    let holder = |h: &Holder| v1::Holder {
        pid: h.pid,
        task: h.task,
        name: h.name.clone(),
        state: h.state.to_string(),
        wchan: h.wchan.clone().unwrap_or_default(),
        stack: h.stack.clone(),
    };
    let left = |l: &Left| v1::Left {
        kind: l.kind.to_string(),
        what: l.what.clone(),
        why: l.why.clone(),
        holders: l.holders.iter().map(holder).collect(),
    };
    v1::Stuck {
        left: stuck.left.iter().map(left).collect(),
        since_ms: stuck.since_ms,
        tries: stuck.tries,
        next_try_ms: stuck.next_try_ms,
    }
}

/// A sandbox of which only the id is known.
pub(crate) fn unknown(id: String, why: String) -> v1::Sandbox {
    v1::Sandbox { id, state: UNKNOWN.into(), unknown: why, ..v1::Sandbox::default() }
}

/// A template for clients.
pub(crate) fn template(t: &Template) -> v1::Template {
    v1::Template {
        name: t.name.to_string(),
        kernel: t.kernel.to_string(),
        rootfs: t.rootfs,
        rootfs_bytes: t.rootfs_bytes,
        source: t.source.clone(),
        created_at_ms: t.created_at_ms,
    }
}

/// A name from a client.
pub(crate) fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, EngineError> {
    text.parse().map_err(|e: T::Err| EngineError::Invalid(e.to_string()))
}
