//! Creations one after the other, over gRPC, each timed from call to running sandbox.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hearth_api::v1::create_progress::Progress;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use hearth_api::v1::{CreateRequest, DeleteRequest, Sandbox};
use tonic::transport::{Channel, Endpoint};

use super::stats::{ms, percentile};
use crate::stop::Stop;

/// What creations took.
#[derive(Debug, Default)]
pub(crate) struct Creates {
    /// Time of each that worked.
    pub(crate) took: Vec<Duration>,
    /// When each of these ended.
    pub(crate) ended: Vec<Instant>,
    /// Why the others failed.
    pub(crate) failed: Vec<String>,
    /// Time of each step, by its place in the order of steps.
    steps: Vec<(String, Vec<Duration>)>,
    /// The one that took longest.
    slowest: Option<Slowest>,
}

#[derive(Debug)]
struct Slowest {
    took: Duration,
    /// Creations before it.
    at: usize,
    steps: Vec<(String, Duration)>,
}

impl Creates {
    /// The middle time of each step, for people: where the time goes.
    pub(crate) fn steps(&self) -> String {
        let shown = self.steps.iter().filter_map(|(name, times)| {
            percentile(times, 50).map(|middle| format!("{name} {:.1} ms", ms(middle)))
        });
        shown.collect::<Vec<_>>().join(", ")
    }

    /// Where the time of the slowest one went.
    pub(crate) fn slowest(&self) -> String {
        let Some(slowest) = &self.slowest else { return "none".to_owned() };
        let steps = slowest.steps.iter().map(|(name, time)| format!("{name} {:.1} ms", ms(*time)));
        let steps = steps.collect::<Vec<_>>().join(", ");
        format!("number {}, {:.1} ms: {steps}", slowest.at + 1, ms(slowest.took))
    }

    fn note(&mut self, began: Instant, sandbox: Sandbox) {
        let took = began.elapsed();
        if self.slowest.as_ref().is_none_or(|s| s.took < took) {
            let steps = sandbox.steps.iter().map(|s| (s.step.clone(), Duration::from_micros(s.micros)));
            self.slowest = Some(Slowest { took, at: self.took.len(), steps: steps.collect() });
        }
        self.took.push(took);
        self.ended.push(Instant::now());
        for step in sandbox.steps {
            let at = self.steps.iter().position(|(name, _)| *name == step.step).unwrap_or_else(|| {
                self.steps.push((step.step.clone(), vec![]));
                self.steps.len() - 1
            });
            self.steps[at].1.push(Duration::from_micros(step.micros));
        }
    }
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
                Ok(sandbox) => {
                    creates.note(began, sandbox);
                    let delete = client.delete(DeleteRequest { sandbox: name.clone() }).await;
                    delete.with_context(|| format!("delete {name}"))?;
                }
                Err(e) => creates.failed.push(format!("{e:#}")),
            }
        }
        Ok(creates)
    })
}

async fn create(client: &mut SandboxServiceClient<Channel>, template: &str, name: &str) -> Result<Sandbox> {
    let request = CreateRequest {
        name: name.to_owned(),
        template: template.to_owned(),
        vmm: "process".to_owned(),
        ..CreateRequest::default()
    };
    let mut progress = client.create(request).await?.into_inner();
    let mut running = None;
    while let Some(message) = progress.message().await? {
        if let Some(Progress::Sandbox(sandbox)) = message.progress {
            running = Some(sandbox);
        }
    }
    running.context("the call ended without a sandbox")
}
