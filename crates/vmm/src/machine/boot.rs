//! Booting: the VMM's configuration, the agent's handshake, the guest's settings; raced with the VMM's end,
//! the end time and an order to stop.

use std::time::Duration;

use hearth_core::agent::{GuestConfig, GuestNet};
use hearth_core::network::{GUEST_ADDRESS, TAP_ADDRESS, TAP_PREFIX_LEN};
use hearth_core::shim::ShimSpec;
use tokio::time::{Instant, timeout_at};

use super::handle::tell;
use super::stop::Cause;
use super::{Command, Live, Machine, chain, or_stop};
use crate::agent::{AgentClient, AgentClientError};
use crate::backend::{Vmm, VmmError};
use crate::end_time::now_ms;
use crate::firecracker::ApiError;
use crate::qemu::QmpError;

/// From spawn to a configured guest. An emulated guest needs 3 s on an idle host and many times that when
/// dozens boot on two cores.
const BOOT_LIMIT: Duration = Duration::from_secs(120);

/// Booting failed though the VMM lives.
#[derive(Debug, thiserror::Error)]
enum BootError {
    #[error("the VMM could not be set up")]
    Vmm(#[from] VmmError),
    #[error("the guest agent")]
    Agent(#[from] AgentClientError),
    #[error("not ready within {after:?}")]
    Deadline { after: Duration },
}

impl BootError {
    /// Whether this is an answer (or a silence), not a connection that broke: then no exit is to be expected.
    fn comes_from_the_living(&self) -> bool {
        match self {
            BootError::Deadline { .. } => true,
            BootError::Vmm(e) => matches!(
                e,
                VmmError::NoTap { .. }
                    | VmmError::Api(ApiError::Refused { .. })
                    | VmmError::Qmp(QmpError::Refused { .. })
            ),
            BootError::Agent(e) => {
                matches!(e, AgentClientError::Agent(_) | AgentClientError::HandshakeTimeout { .. })
            }
        }
    }
}

impl Machine {
    /// Until the guest is ready, or the reason why it will not be.
    pub(super) async fn boot(&mut self, live: &mut Live) -> Result<Option<AgentClient>, Cause> {
        let spec = self.spec.clone();
        let Live { vmm, process, disks, meter, .. } = live;
        let boot = prepare(&spec, vmm.as_mut());
        tokio::pin!(boot);
        loop {
            let command = tokio::select! {
                biased;
                ended = process.ended() => return Err(Cause::Ended(ended)),
                failure = disks.failed() => return Err(failure.into()),
                () = self.end.reached() => return Err(Cause::EndTime),
                outcome = &mut boot => {
                    return outcome.map_err(|e| Cause::Failed {
                        why: format!("boot failed: {}", chain(&e)),
                        maybe_exit: !e.comes_from_the_living(),
                    });
                }
                command = self.commands.recv() => or_stop(command),
            };
            match command {
                Command::Boot => {}
                // No guest yet to be asked.
                Command::Stop { policy, .. } => return Err(Cause::Stop { grace: Duration::ZERO, policy }),
                Command::Fail { reason, why } => return Err(Cause::Broken { reason, why }),
                Command::Usage(reply) => tell(reply, meter.sample()),
                other => other.refuse(),
            }
        }
    }
}

async fn prepare(spec: &ShimSpec, vmm: &mut dyn Vmm) -> Result<Option<AgentClient>, BootError> {
    let deadline = Instant::now() + BOOT_LIMIT;
    let work = async {
        let Some(stream) = vmm.boot().await? else {
            return Ok(None);
        };
        let agent = AgentClient::connect(stream, deadline).await?;
        agent.configure(guest_config(spec)).await?;
        Ok(Some(agent))
    };
    timeout_at(deadline, work).await.unwrap_or(Err(BootError::Deadline { after: BOOT_LIMIT }))
}

fn guest_config(spec: &ShimSpec) -> GuestConfig {
    GuestConfig {
        hostname: spec.name.as_str().to_owned(),
        net: spec.net.as_ref().map(|net| GuestNet {
            address: GUEST_ADDRESS,
            prefix_len: TAP_PREFIX_LEN,
            gateway: TAP_ADDRESS,
            dns: net.dns.clone(),
        }),
        env: spec.env.clone(),
        now_ms: now_ms(),
    }
}
