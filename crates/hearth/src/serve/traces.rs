//! Traces to a collector. A span that ends goes into a bounded queue and is sent by a task of its own: a collector
//! that is slow or dead costs spans, which are counted, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hearth_node::trace::TraceContext;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry::KeyValue;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::transport::Endpoint;

use super::tls;
use crate::config::{Config, Url};

/// Spans that wait to be sent; what ends while so many wait is dropped.
const QUEUE: usize = 4096;
/// Spans sent at once.
const AT_ONCE: usize = 512;
/// How long spans are gathered before they are sent.
const GATHER: Duration = Duration::from_millis(500);
/// How long the collector may take.
const WITHIN: Duration = Duration::from_secs(5);

/// What became of spans so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Taken by the collector.
    pub(crate) sent: AtomicU64,
    /// Dropped: too many waited, or the collector did not take them.
    pub(crate) dropped: AtomicU64,
}

/// Where ended spans go.
#[derive(Debug)]
struct Queue {
    spans: mpsc::Sender<SpanData>,
    counts: Arc<Counts>,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &TraceContext) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() && self.spans.try_send(span).is_err() {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The sending side.
pub(crate) struct Traces {
    spans: mpsc::Receiver<SpanData>,
    endpoint: Url,
    connector: HttpsConnector<HttpConnector>,
    resource: Resource,
    counts: Arc<Counts>,
}

impl Traces {
    /// Begins to gather spans of the whole process for the collector that is configured, if one is.
    ///
    /// # Errors
    /// If https to it has nobody to trust.
    pub(crate) fn begin(config: &Config, counts: Arc<Counts>) -> anyhow::Result<Option<Self>> {
        let Some(endpoint) = &config.otlp.endpoint else { return Ok(None) };
        let ca_file = config.otlp.ca_file.as_deref();
        let connector = tls::connector(&endpoint.uri(), tls::Http::Two, "otlp.ca_file", ca_file)?;
        let (sender, spans) = mpsc::channel(QUEUE);
        let resource = Resource::builder()
            .with_service_name("hearth")
            .with_attribute(KeyValue::new("service.instance.id", config.instance.to_string()))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        let queue = Queue { spans: sender, counts: Arc::clone(&counts) };
        let provider = SdkTracerProvider::builder();
        let provider = provider.with_resource(resource.clone()).with_span_processor(queue).build();
        opentelemetry::global::set_tracer_provider(provider);
        Ok(Some(Self { spans, endpoint: endpoint.clone(), connector, resource, counts }))
    }

    /// Sends until `stop`, and once more what waits then.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let endpoint = Endpoint::from(self.endpoint.uri()).connect_timeout(WITHIN).timeout(WITHIN);
        let channel = endpoint.connect_with_connector_lazy(self.connector.clone());
        let exporter = SpanExporter::builder().with_tonic().with_channel(channel).with_timeout(WITHIN);
        let mut exporter = match exporter.build() {
            Ok(exporter) => exporter,
            Err(e) => return tracing::error!("no traces: {e}"),
        };
        exporter.set_resource(&self.resource);
        let mut failing = false;
        loop {
            let ending = stop.run_until_cancelled(tokio::time::sleep(GATHER)).await.is_none();
            let mut batch = vec![];
            while batch.len() < AT_ONCE
                && let Ok(span) = self.spans.try_recv()
            {
                batch.push(span);
            }
            if !batch.is_empty() {
                self.send(&exporter, batch, &mut failing).await;
            }
            if ending {
                return;
            }
        }
    }

    async fn send(&self, exporter: &SpanExporter, batch: Vec<SpanData>, failing: &mut bool) {
        let count = batch.len() as u64;
        let sent = tokio::time::timeout(WITHIN, exporter.export(batch)).await;
        let sent = match sent {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err(format!("no answer within {} s", WITHIN.as_secs())),
        };
        match sent {
            Ok(()) => {
                self.counts.sent.fetch_add(count, Ordering::Relaxed);
                if std::mem::take(failing) {
                    tracing::info!("traces: the collector takes spans again");
                }
            }
            Err(why) => {
                self.counts.dropped.fetch_add(count, Ordering::Relaxed);
                if !std::mem::replace(failing, true) {
                    tracing::warn!("traces: {} does not take spans, dropping them: {why}", self.endpoint);
                }
            }
        }
    }
}

struct Metadata<'a>(&'a MetadataMap);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        // Only asked for by name.
        vec![]
    }
}

/// The caller's span, if its request names one (`traceparent`, W3C Trace Context).
pub(crate) fn parent(metadata: &MetadataMap) -> TraceContext {
    TraceContextPropagator::new().extract_with_context(&TraceContext::new(), &Metadata(metadata))
}
