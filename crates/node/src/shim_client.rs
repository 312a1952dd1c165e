//! The daemon's end of a shim's socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_api::shim::shim_service_client::ShimServiceClient;
use hearth_api::shim::{
    BlockStatsRequest, BootRequest, InfoRequest, InfoResponse, StopRequest, UsageRequest,
};
use hearth_core::block::DiskStats;
use hearth_core::id::SandboxId;
use hearth_core::shim::{SHIM_SOCKET, check_protocol};
use hearth_core::usage::Usage;
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

/// A client of one shim. Cheap to clone.
pub type Client = ShimServiceClient<Channel>;

/// How long a shim may take to answer what it answers at once.
const ANSWER: Duration = Duration::from_secs(5);

/// Connects and proves that the shim serves the sandbox it should.
///
/// # Errors
/// In words, with the socket.
pub(crate) async fn connect(run_dir: &Path, id: &SandboxId) -> Result<Client, String> {
    let socket = run_dir.join(SHIM_SOCKET);
    let client = channel(socket.clone()).await.map_err(|e| format!("{}: {e}", socket.display()))?;
    let info = info(&client).await.map_err(|e| format!("{}: {e}", socket.display()))?;
    if info.sandbox_id != id.as_str() {
        return Err(format!("{}: the shim serves sandbox {}, not {id}", socket.display(), info.sandbox_id));
    }
    check_protocol(info.protocol).map_err(|why| format!("{}: {why}", socket.display()))?;
    Ok(client)
}

/// Like [`connect`], tried again until the socket is there or `within` has passed.
pub(crate) async fn connect_new(run_dir: &Path, id: &SandboxId, within: Duration) -> Result<Client, String> {
    let end = tokio::time::Instant::now() + within;
    loop {
        match connect(run_dir, id).await {
            Ok(client) => return Ok(client),
            Err(why) if tokio::time::Instant::now() >= end => {
                return Err(format!("the shim did not answer within {} s: {why}", within.as_secs()));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

async fn channel(socket: PathBuf) -> Result<Client, tonic::transport::Error> {
    let connector = tower::service_fn(move |_: tonic::transport::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The address is not used: the connector has the path.
    let channel = Endpoint::from_static("http://shim.invalid")
        .connect_timeout(ANSWER)
        .connect_with_connector(connector)
        .await?;
    Ok(ShimServiceClient::new(channel))
}

async fn info(client: &Client) -> Result<InfoResponse, String> {
    match tokio::time::timeout(ANSWER, client.clone().info(InfoRequest {})).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err(format!("no answer within {} s", ANSWER.as_secs())),
    }
}

/// What the sandbox uses; `None` if the shim does not say.
pub(crate) async fn usage(client: &Client) -> Option<Usage> {
    let answer = tokio::time::timeout(ANSWER, client.clone().usage(UsageRequest {})).await.ok()?.ok()?;
    serde_json::from_str(&answer.into_inner().usage).ok()
}

/// What was counted of its disks; `None` if the shim does not say, empty if it serves none.
pub(crate) async fn disks(client: &Client) -> Option<Vec<DiskStats>> {
    let mut client = client.clone();
    let answer = tokio::time::timeout(ANSWER, client.block_stats(BlockStatsRequest {})).await.ok()?.ok()?;
    serde_json::from_str(&answer.into_inner().disks).ok()
}

/// Starts the VM and waits until the guest is ready.
pub(crate) async fn boot(client: &Client, within: Duration) -> Result<(), String> {
    match tokio::time::timeout(within, client.clone().boot(BootRequest {})).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err(format!("the guest was not ready within {} s", within.as_secs())),
    }
}

/// Has the VM killed and its exit recorded, as a user's wish if `policy` is empty.
///
/// # Errors
/// In words.
pub(crate) async fn stop(client: &Client, within: Duration, policy: &str) -> Result<(), String> {
    let request = StopRequest { grace_ms: 0, policy: policy.to_owned() };
    match tokio::time::timeout(within, client.clone().stop(request)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(status)) => Err(status.message().to_owned()),
        Err(_) => Err(format!("no answer within {} ms", within.as_millis())),
    }
}
