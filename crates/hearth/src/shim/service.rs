//! `ShimService`: the machine's handle as gRPC. It holds no state of its own but a counter.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::Stream;
use hearth_api::shim::info_response::State;
use hearth_api::shim::shim_service_server::ShimService;
use hearth_api::shim::{
    BlockStatsRequest, BlockStatsResponse, BootRequest, BootResponse, InfoRequest, InfoResponse, StopRequest,
    StopResponse, UsageRequest, UsageResponse, WatchRequest,
};
use hearth_api::v1::{
    ExecInput, ResizeExecRequest, ResizeExecResponse, SignalExecRequest, SignalExecResponse,
};
use hearth_core::exit::ExitRecord;
use hearth_core::id::SandboxId;
use hearth_core::shim::SHIM_PROTOCOL;
use hearth_vmm::agent::{AgentClient, AgentClientError};
use hearth_vmm::machine::{MachineError, MachineHandle, Phase};
use tonic::{Request, Response, Status, Streaming};

use super::{exec, status};

/// A broken agent connection is mostly an exit that the pidfd tells in a moment.
const EXIT_CONFIRM: Duration = Duration::from_secs(2);

/// The shim's gRPC service.
#[derive(Debug, Clone)]
pub(super) struct Service {
    id: SandboxId,
    machine: MachineHandle,
    execs: Arc<AtomicU64>,
}

impl Service {
    pub(super) fn new(id: SandboxId, machine: MachineHandle) -> Self {
        Self { id, machine, execs: Arc::new(AtomicU64::new(1)) }
    }

    /// The agent of a guest that runs.
    fn agent(&self) -> Result<AgentClient, Status> {
        match self.machine.phase() {
            Phase::Running { agent: Some(agent), .. } => Ok(agent),
            Phase::Running { agent: None, .. } => {
                Err(Status::failed_precondition("template has no guest agent"))
            }
            Phase::Idle | Phase::Booting { .. } => {
                Err(Status::failed_precondition(MachineError::NotRunning.to_string()))
            }
            Phase::Exited(record) => Err(status::exited(&record)),
        }
    }

    /// An agent's error; where the connection ended because the VM did, how the VM ended.
    pub(super) async fn status(&self, error: AgentClientError) -> Status {
        if matches!(error, AgentClientError::Closed { .. })
            && let Ok(Some(record)) = tokio::time::timeout(EXIT_CONFIRM, self.machine.exited()).await
        {
            return status::exited(&record);
        }
        status::of_agent(&error)
    }

    fn info(&self, phase: &Phase) -> InfoResponse {
        let (state, vmm_pid, exit) = match phase {
            Phase::Idle => (State::Idle, 0, String::new()),
            Phase::Booting { vmm_pid } => (State::Booting, *vmm_pid, String::new()),
            Phase::Running { vmm_pid, .. } => (State::Running, *vmm_pid, String::new()),
            Phase::Exited(record) => (State::Exited, 0, json(record)),
        };
        InfoResponse {
            protocol: SHIM_PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            sandbox_id: self.id.to_string(),
            shim_pid: std::process::id(),
            state: state.into(),
            vmm_pid,
            exit,
        }
    }
}

fn json(record: &ExitRecord) -> String {
    // A struct of numbers and strings always serializes.
    serde_json::to_string(record).unwrap_or_default()
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl ShimService for Service {
    async fn info(&self, _: Request<InfoRequest>) -> Answer<InfoResponse> {
        Ok(Response::new(self.info(&self.machine.phase())))
    }

    async fn boot(&self, _: Request<BootRequest>) -> Answer<BootResponse> {
        match self.machine.boot().await {
            Ok(vmm_pid) => Ok(Response::new(BootResponse { vmm_pid })),
            // Not UNAVAILABLE: trying again gives the same outcome.
            Err(e @ MachineError::Exited(_)) => Err(Status::aborted(e.to_string())),
            Err(e) => Err(status::of_machine(&e)),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<InfoResponse, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Answer<Self::WatchStream> {
        let state = (self.clone(), self.machine.watch(), false);
        let changes = futures::stream::unfold(state, |(service, mut phase, over)| async move {
            if over || phase.changed().await.is_err() {
                return None;
            }
            let now = phase.borrow_and_update().clone();
            let over = matches!(now, Phase::Exited(_));
            Some((Ok(service.info(&now)), (service, phase, over)))
        });
        Ok(Response::new(Box::pin(changes)))
    }

    type ExecStream = exec::OutputStream;

    async fn exec(&self, request: Request<Streaming<ExecInput>>) -> Answer<Self::ExecStream> {
        let mut input = request.into_inner();
        let id = format!("x{}", self.execs.fetch_add(1, Ordering::Relaxed));
        let command = exec::first(&mut input, id).await?;
        let agent = self.agent()?;
        Ok(Response::new(exec::start(self, &agent, input, command).await?))
    }

    async fn signal_exec(&self, request: Request<SignalExecRequest>) -> Answer<SignalExecResponse> {
        let request = request.into_inner();
        match self.agent()?.signal(&request.exec_id, request.signal).await {
            Ok(()) => Ok(Response::new(SignalExecResponse {})),
            Err(e) => Err(self.status(e).await),
        }
    }

    async fn resize_exec(&self, request: Request<ResizeExecRequest>) -> Answer<ResizeExecResponse> {
        let request = request.into_inner();
        let size = request.size.ok_or_else(|| Status::invalid_argument("size is missing"))?;
        let size = exec::tty_size(&size)?;
        match self.agent()?.resize(&request.exec_id, size.rows, size.cols).await {
            Ok(()) => Ok(Response::new(ResizeExecResponse {})),
            Err(e) => Err(self.status(e).await),
        }
    }

    async fn block_stats(&self, _: Request<BlockStatsRequest>) -> Answer<BlockStatsResponse> {
        // Numbers and strings always serialize.
        let disks = serde_json::to_string(&self.machine.disk_stats()).unwrap_or_default();
        Ok(Response::new(BlockStatsResponse { disks }))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Answer<UsageResponse> {
        match self.machine.usage().await {
            // Numbers always serialize.
            Ok(usage) => {
                Ok(Response::new(UsageResponse { usage: serde_json::to_string(&usage).unwrap_or_default() }))
            }
            Err(MachineError::Exited(record)) => Err(status::exited(&record)),
            Err(e) => Err(status::of_machine(&e)),
        }
    }

    async fn stop(&self, request: Request<StopRequest>) -> Answer<StopResponse> {
        let StopRequest { grace_ms, policy } = request.into_inner();
        let grace = Duration::from_millis(grace_ms);
        let stopped = match policy.as_str() {
            "" => self.machine.stop(grace).await,
            why => self.machine.stop_by_policy(grace, why).await,
        };
        match stopped {
            Ok(record) => Ok(Response::new(StopResponse { exit: json(&record) })),
            Err(e) => Err(status::of_machine(&e)),
        }
    }
}
