//! The `process` back end: the guest agent as a plain process on the host, talked to over a socket pair. It
//! isolates nothing; hearth's own tests use it for everything around a VMM.

use futures::future::BoxFuture;
use hearth_core::shim::{CONSOLE_LOG, ShimSpec};
use hearth_host::process::{Signal, signal};
use std::os::fd::{AsFd as _, OwnedFd};

use crate::backend::{AgentStream, Launched, Vmm, VmmError, socket_pair, start};

/// Starts `program --agent-fd 3`.
pub(crate) fn launch(spec: &ShimSpec) -> Result<Launched, VmmError> {
    let (ours, theirs) = socket_pair("agent")?;
    let console = spec.run_dir.join(CONSOLE_LOG);
    std::fs::write(&console, "a plain process, no machine: it has no console\n")
        .map_err(|e| VmmError::file("write", &console, e))?;
    let process = start(spec, vec!["--agent-fd".into(), "3".into()], vec![theirs])?;
    let pidfd = match process.pidfd() {
        Ok(pidfd) => pidfd,
        Err(e) => {
            process.abandon();
            return Err(VmmError::Descriptor { what: "pidfd", source: e });
        }
    };
    let stream = spec.agent.then_some(ours);
    Ok(Launched { process, vmm: Box::new(Plain { stream, pidfd }), console: None, metrics: None })
}

struct Plain {
    stream: Option<AgentStream>,
    pidfd: OwnedFd,
}

impl Plain {
    fn send(&self, which: Signal) -> BoxFuture<'_, Result<(), VmmError>> {
        let sent = signal(self.pidfd.as_fd(), which).map_err(VmmError::Signal);
        Box::pin(std::future::ready(sent))
    }
}

impl Vmm for Plain {
    fn boot(&mut self) -> BoxFuture<'_, Result<Option<AgentStream>, VmmError>> {
        Box::pin(std::future::ready(Ok(self.stream.take())))
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.send(Signal::STOP)
    }

    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.send(Signal::CONT)
    }

    fn request_stop(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.send(Signal::TERM)
    }
}
