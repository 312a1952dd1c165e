//! Creations one after the other, over gRPC, each timed from call to running sandbox.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hearth_api::v1::create_progress::Progress;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use hearth_api::v1::{CreateRequest, DeleteRequest};
use tonic::transport::{Channel, Endpoint};

use crate::stop::Stop;

/// Small: the disk is not what is measured.
const DISK_MIB: u64 = 16;

/// What creations took.
#[derive(Debug, Default)]
pub(crate) struct Creates {
    /// Time of each that worked.
    pub(crate) took: Vec<Duration>,
    /// When each of these ended.
    pub(crate) ended: Vec<Instant>,
    /// Why the others failed.
    pub(crate) failed: Vec<String>,
}

/// Makes `count` sandboxes that run as plain processes, one at a time; each is deleted before the next, which is not
/// timed.
pub(crate) fn run(
    address: SocketAddr,
    template: &str,
    label: &str,
    count: u32,
    stop: &Stop,
) -> Result<Creates> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true);
        let mut client = SandboxServiceClient::new(endpoint.connect().await.context("connect")?);
        let mut creates = Creates::default();
        for n in 0..count {
            stop.check()?;
            let name = format!("{label}-{n}");
            let began = Instant::now();
            match create(&mut client, template, &name).await {
                Ok(()) => {
                    creates.took.push(began.elapsed());
                    creates.ended.push(Instant::now());
                    let delete = client.delete(DeleteRequest { sandbox: name.clone() }).await;
                    delete.with_context(|| format!("delete {name}"))?;
                }
                Err(e) => creates.failed.push(format!("{e:#}")),
            }
        }
        Ok(creates)
    })
}

async fn create(client: &mut SandboxServiceClient<Channel>, template: &str, name: &str) -> Result<()> {
    let request = CreateRequest {
        name: name.to_owned(),
        template: template.to_owned(),
        disk_mib: DISK_MIB,
        vmm: "process".to_owned(),
        ..CreateRequest::default()
    };
    let mut progress = client.create(request).await?.into_inner();
    let mut running = false;
    while let Some(message) = progress.message().await? {
        running |= matches!(message.progress, Some(Progress::Sandbox(_)));
    }
    ensure!(running, "the call ended without a sandbox");
    Ok(())
}
