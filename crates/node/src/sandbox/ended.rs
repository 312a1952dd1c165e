//! How a sandbox ended, kept before the last of it goes.

use std::sync::Arc;

use hearth_core::exit::{ExitReason, ExitRecord, KeptExit};
use hearth_core::host::Host;

use super::task::Sandbox;
use crate::blocking::blocking;
use crate::engine::now_ms;

/// Who ends a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum By {
    /// A user asked for it.
    User,
    /// The daemon, for this reason.
    Daemon(String),
}

impl By {
    /// What a shim is told: the daemon's reason, or nothing.
    pub(super) fn policy(&self) -> &str {
        match self {
            By::User => "",
            By::Daemon(why) => why,
        }
    }
}

impl<H: Host> Sandbox<H> {
    /// Keeps how the VM ended, if there ever was one; what cannot be kept is told and lost.
    pub(super) async fn keep_end(&self, other_boot: bool) {
        let Some(exit) = self.end_as_known(other_boot) else { return };
        let record = &self.record;
        // Also of one that was deleted, and only once: then it is forgotten.
        self.context.meters.usage.ended(&record.id, &record.spec.template, &exit);
        let kept = KeptExit {
            schema: KeptExit::SCHEMA,
            id: record.id.clone(),
            name: record.name.clone(),
            template: record.spec.template.clone(),
            vmm: record.spec.vmm,
            cpus: record.spec.cpus,
            memory_mib: record.spec.memory_mib,
            created_at_ms: record.created_at_ms,
            exit: exit.clone(),
        };
        self.view.send_modify(|v| v.exit = Some(exit));
        let context = Arc::clone(&self.context);
        if let Err(e) = blocking(move || context.exits.keep(kept, now_ms())).await {
            tracing::warn!(sandbox = %record.id, "how it ended is not kept: {e}");
        }
    }

    fn end_as_known(&self, other_boot: bool) -> Option<ExitRecord> {
        let told = self.context.records.exit_record(&self.record.id);
        let told = told.or_else(|| self.view.borrow().exit.clone());
        if told.is_some() {
            return told;
        }
        if other_boot {
            let why = "the host was booted while it ran";
            return Some(ExitRecord::new(ExitReason::VmmFailed, now_ms(), why));
        }
        // Without a shim there was no VM.
        self.record.shim.as_ref()?;
        let silent = "its shim did not answer, and was killed with all in its cgroup";
        Some(match &self.by {
            By::User => ExitRecord::new(ExitReason::Stopped, now_ms(), silent),
            By::Daemon(why) => ExitRecord::new(ExitReason::Policy, now_ms(), format!("{why}; {silent}")),
        })
    }
}
