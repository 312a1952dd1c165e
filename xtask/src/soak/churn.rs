//! Lives of sandboxes over gRPC: create, stay, delete, with a daemon that may be killed at any moment.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use hearth_api::v1::node_service_client::NodeServiceClient;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use hearth_api::v1::{CreateRequest, DeleteRequest, InfoRequest, ListRequest};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Sandboxes that live at once, at most.
pub(crate) const AT_ONCE: usize = 64;
/// Small: the disk is not what is tried.
const DISK_MIB: u64 = 16;
/// How long a delete may take, the daemon's absence included.
const WITHIN: Duration = Duration::from_secs(90);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);

/// How a create went. The delete after it always succeeds, else the soak has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The sandbox was running.
    Whole,
    /// The create failed, or its answer was lost with the daemon.
    Cut,
}

/// A client that makes and deletes.
#[derive(Debug, Clone)]
pub(crate) struct Lives {
    sandboxes: SandboxServiceClient<Channel>,
    node: NodeServiceClient<Channel>,
    template: String,
}

impl Lives {
    /// Connects when first used, and again whenever the daemon is another.
    pub(crate) fn new(address: SocketAddr, template: &str) -> Result<Self> {
        let channel = Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .timeout(WITHIN)
            .connect_lazy();
        Ok(Self {
            sandboxes: SandboxServiceClient::new(channel.clone()),
            node: NodeServiceClient::new(channel),
            template: template.to_owned(),
        })
    }

    /// Waits until the daemon answers calls for sandboxes.
    pub(crate) async fn wait_ready(&self, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        let mut client = self.sandboxes.clone();
        while let Err(status) = client.list(ListRequest::default()).await {
            ensure!(Instant::now() < end, "not ready within {} s: {status}", within.as_secs());
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Slots that the daemon keeps ready: nobody's, and no leak.
    pub(crate) async fn ready_slots(&self) -> Result<usize> {
        let info = self.node.clone().info(InfoRequest {}).await?.into_inner();
        Ok(info.slots.get("ready").map_or(0, |n| *n as usize))
    }

    /// One life.
    ///
    /// # Errors
    /// If the sandbox cannot be deleted.
    pub(crate) async fn one(&self, name: String, stay: Duration) -> Result<Outcome> {
        let outcome = match self.create(&name).await {
            Ok(()) => Outcome::Whole,
            Err(_) => Outcome::Cut,
        };
        tokio::time::sleep(stay).await;
        self.delete(&name).await?;
        Ok(outcome)
    }

    async fn create(&self, name: &str) -> Result<(), Status> {
        let request = CreateRequest {
            name: name.to_owned(),
            template: self.template.clone(),
            disk_mib: DISK_MIB,
            vmm: "process".to_owned(),
            ..CreateRequest::default()
        };
        let mut progress = self.sandboxes.clone().create(request).await?.into_inner();
        while progress.message().await?.is_some() {}
        Ok(())
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let end = Instant::now() + WITHIN;
        loop {
            let request = DeleteRequest { sandbox: name.to_owned() };
            match self.sandboxes.clone().delete(request).await {
                Ok(_) => return Ok(()),
                Err(status) if status.code() == Code::NotFound => return Ok(()),
                Err(status) if Instant::now() >= end => return Err(anyhow!("delete {name}: {status}")),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}
