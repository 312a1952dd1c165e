//! The connection to a daemon: address, token, and patience while it starts.

use std::future::Future;
use std::time::{Duration, Instant};

use hearth_api::v1::event_service_client::EventServiceClient;
use hearth_api::v1::node_service_client::NodeServiceClient;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt as _;

use super::error::CliError;
use super::out;

/// How long a daemon that says it is starting is waited for.
const PATIENCE: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);
/// A list of all sandboxes of a full node is larger than the 4 MiB tonic takes by default.
const LARGEST_MESSAGE: usize = 64 << 20;

/// The daemon's token. Only from the environment: other users see command lines.
const TOKEN_VARIABLE: &str = "HEARTH_TOKEN";

const DEFAULT_ADDRESS: &str = "127.0.0.1:5008";

/// Where the daemon is: the flag, HEARTH_ADDR, or the address a daemon has by default; and whether it was said.
pub(super) fn address(flag: Option<&str>) -> (String, bool) {
    let variable = std::env::var("HEARTH_ADDR").ok().filter(|v| !v.is_empty());
    let said = flag.map(str::to_owned).or(variable);
    (said.clone().unwrap_or_else(|| DEFAULT_ADDRESS.to_owned()), said.is_some())
}

/// Adds the token to every call.
#[derive(Debug, Clone)]
pub(crate) struct Auth(Option<MetadataValue<Ascii>>);

impl Interceptor for Auth {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

/// Calls to sandboxes.
pub(crate) type Sandboxes = SandboxServiceClient<InterceptedService<Channel, Auth>>;

/// Calls to the node itself, which answers while it starts too.
pub(crate) type Nodes = NodeServiceClient<InterceptedService<Channel, Auth>>;

/// Calls for events, which are answered while it starts too.
pub(super) type EventStreams = EventServiceClient<InterceptedService<Channel, Auth>>;

/// A connection to one daemon; cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    sandboxes: Sandboxes,
    nodes: Nodes,
    events: EventStreams,
    json: bool,
}

impl Client {
    /// Connects at once, so that "nobody listens" is told apart from every later failure.
    pub(crate) async fn connect(addr: &str, json: bool) -> Result<Self, CliError> {
        let uri = if addr.contains("://") { addr.to_owned() } else { format!("http://{addr}") };
        let endpoint = Endpoint::from_shared(uri)
            .map_err(|_| {
                CliError::usage("--addr", format!("{addr:?} is not an address; write ADDRESS:PORT"))
            })?
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            // A host that vanished must not look like a command that is silent.
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(20));
        let channel = endpoint.connect().await.map_err(|e| CliError::unreachable(addr, root_cause(&e)))?;
        let header = match std::env::var(TOKEN_VARIABLE) {
            Ok(token) if !token.is_empty() => Some(bearer(&token)?),
            _ => None,
        };
        let auth = Auth(header);
        let nodes = NodeServiceClient::with_interceptor(channel.clone(), auth.clone());
        let events = EventServiceClient::with_interceptor(channel.clone(), auth.clone());
        let sandboxes =
            SandboxServiceClient::with_interceptor(channel, auth).max_decoding_message_size(LARGEST_MESSAGE);
        Ok(Self { sandboxes, nodes, events, json })
    }

    /// The node itself.
    pub(crate) fn nodes(&self) -> Nodes {
        self.nodes.clone()
    }

    /// The journal.
    pub(super) fn events(&self) -> EventStreams {
        self.events.clone()
    }

    /// For calls that have their own way with errors.
    pub(super) fn sandboxes(&self) -> Sandboxes {
        self.sandboxes.clone()
    }

    /// Makes a call, again and again while the daemon says that it is starting.
    pub(super) async fn call<T, F: Future<Output = Result<T, Status>>>(
        &self,
        what: &str,
        mut call: impl FnMut(Sandboxes) -> F,
    ) -> Result<T, CliError> {
        let begin = Instant::now();
        let mut told = false;
        loop {
            let status = match call(self.sandboxes.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(status) => status,
            };
            let Some(delay) = retry_after(&status).filter(|_| begin.elapsed() < PATIENCE) else {
                return Err(CliError::from_status(what, &status));
            };
            if !told && !self.json {
                out::note(&format!("the daemon is not ready yet ({}); waiting up to 30 s", status.message()));
            }
            told = true;
            tokio::time::sleep(delay).await;
        }
    }
}

fn bearer(token: &str) -> Result<MetadataValue<Ascii>, CliError> {
    let mut value: MetadataValue<Ascii> = format!("Bearer {token}")
        .parse()
        .map_err(|_| CliError::usage(TOKEN_VARIABLE, "a token is printable ASCII without spaces"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// When to try again, if the daemon says so.
fn retry_after(status: &Status) -> Option<Duration> {
    if status.code() != Code::Unavailable {
        return None;
    }
    let delay = status.get_details_retry_info()?.retry_delay.unwrap_or_default();
    Some(delay.clamp(Duration::from_millis(50), Duration::from_secs(3)))
}

/// The last error of a chain: "Connection refused" instead of "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
