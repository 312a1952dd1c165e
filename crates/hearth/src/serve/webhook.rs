//! Events posted to an address: in order, signed, each until it is taken. The journal is the queue, so that nothing
//! waits in memory and a restart loses nothing; what is not kept any more when its turn comes is told as missed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hearth_core::event::Event;
use hearth_node::Events;
use hearth_node::events::{From, Item, Reader};
use hmac::{Hmac, Mac as _};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use tokio_util::sync::CancellationToken;

use crate::config::Config;

/// Events posted at once.
const AT_ONCE: usize = 64;
/// How long one try may take.
const WITHIN: Duration = Duration::from_secs(10);
/// Back-off between two tries.
const RETRY: std::ops::RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(60);
/// Header with time and signature.
const SIGNATURE: &str = "hearth-signature";

/// What became of it so far.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Events that were taken.
    pub(crate) delivered: AtomicU64,
    /// Tries that were not.
    pub(crate) failures: AtomicU64,
    /// Events that were not kept until their turn came.
    pub(crate) missed: AtomicU64,
}

/// One address.
pub(crate) struct Webhook {
    uri: Uri,
    secret: Vec<u8>,
    instance: String,
    /// Notes how far it is; `None` where no journal is kept.
    cursor: Option<PathBuf>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    counts: Arc<Counts>,
}

/// What is posted.
#[derive(Serialize)]
struct Body<'a> {
    instance: &'a str,
    /// Events that came before or among these and are not there.
    missed: u64,
    events: Vec<&'a Event>,
}

/// The note of how far it is.
#[derive(Serialize, Deserialize)]
struct Cursor {
    delivered: u64,
}

impl Webhook {
    /// The one that is configured, if one is.
    ///
    /// # Errors
    /// If the secret cannot be read, or https has no roots of trust here.
    pub(crate) fn new(config: &Config, counts: Arc<Counts>) -> anyhow::Result<Option<Self>> {
        let (Some(url), Some(file)) = (&config.webhook.url, &config.webhook.secret_file) else {
            return Ok(None);
        };
        let secret = fs::read(file).with_context(|| format!("webhook.secret_file {}", file.display()))?;
        let secret = secret.trim_ascii().to_vec();
        if secret.is_empty() {
            bail!("webhook.secret_file {} is empty; write a secret into it", file.display());
        }
        let uri = url.uri();
        let connector = hyper_rustls::HttpsConnectorBuilder::new();
        let connector = match uri.scheme_str() {
            Some("https") => connector.with_native_roots().context("webhook.url: no roots of trust")?,
            _ => connector.with_tls_config(no_trust()),
        };
        let connector = connector.https_or_http().enable_http1().build();
        let client = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        let kept = config.events.keep_mib > 0;
        let cursor = kept.then(|| config.instance_state_dir().join("events/webhook.json"));
        Ok(Some(Self { uri, secret, instance: config.instance.to_string(), cursor, client, counts }))
    }

    /// Posts until `stop`.
    pub(crate) async fn run(self, events: Events, stop: CancellationToken) {
        stop.run_until_cancelled(self.deliver_all(events)).await;
    }

    async fn deliver_all(&self, events: Events) {
        let cursor = self.cursor.clone();
        let delivered = tokio::task::spawn_blocking(move || read_cursor(cursor.as_deref())).await;
        let from = delivered.ok().flatten().map_or(From::Now, From::After);
        let reader = match events.read(from).await {
            Ok(reader) => Ok(reader),
            Err(e) => {
                // The journal was taken away meanwhile, and begins again.
                tracing::warn!("webhook: {e}; beginning with the oldest event there is");
                events.read(From::Oldest).await
            }
        };
        let Ok(mut reader) = reader else { return };
        let mut told = false;
        loop {
            let batch = match next_batch(&mut reader).await {
                Ok(batch) => batch,
                Err(e) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::warn!("webhook: the journal cannot be read, trying again: {e}");
                    }
                    tokio::time::sleep(*RETRY.start()).await;
                    continue;
                }
            };
            told = false;
            self.counts.missed.fetch_add(batch.missed, Ordering::Relaxed);
            self.deliver(&batch).await;
            self.counts.delivered.fetch_add(batch.events.len() as u64, Ordering::Relaxed);
            if let Some(last) = batch.last {
                self.note(last).await;
            }
        }
    }

    /// Tries until these are taken. One line in the log per change of state.
    async fn deliver(&self, batch: &Batch) {
        let events = batch.events.iter().map(Arc::as_ref).collect();
        let body = Body { instance: &self.instance, missed: batch.missed, events };
        let body = match serde_json::to_vec(&body) {
            Ok(body) => Bytes::from(body),
            Err(e) => return tracing::error!("webhook: {e}"),
        };
        let mut wait = *RETRY.start();
        let mut failing = false;
        while let Err(why) = self.post(body.clone()).await {
            self.counts.failures.fetch_add(1, Ordering::Relaxed);
            if !std::mem::replace(&mut failing, true) {
                tracing::warn!("webhook {}: {why}; trying again", self.uri);
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(*RETRY.end());
        }
        if failing {
            tracing::info!("webhook {}: events are taken again", self.uri);
        }
    }

    async fn post(&self, body: Bytes) -> Result<(), String> {
        let seconds = super::now_ms() / 1000;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.uri.clone())
            .header("content-type", "application/json")
            .header("user-agent", concat!("hearth/", env!("CARGO_PKG_VERSION")))
            .header(SIGNATURE, signature(&self.secret, seconds, &body)?)
            .body(Full::new(body))
            .map_err(|e| e.to_string())?;
        match tokio::time::timeout(WITHIN, self.client.request(request)).await {
            Err(_) => Err(format!("no answer within {} s", WITHIN.as_secs())),
            Ok(Err(e)) => Err(hearth_node::chain(&e)),
            Ok(Ok(answer)) if answer.status().is_success() => Ok(()),
            Ok(Ok(answer)) => Err(format!("it answered {}", answer.status())),
        }
    }

    async fn note(&self, delivered: u64) {
        let Some(path) = self.cursor.clone() else { return };
        let written = tokio::task::spawn_blocking(move || write_cursor(&path, delivered)).await;
        // Told where it matters: the next daemon posts these events once more.
        if let Err(e) = written.unwrap_or_else(|e| Err(io::Error::other(e))) {
            tracing::debug!("webhook: how far it is cannot be noted: {e}");
        }
    }
}

/// What is posted at once.
struct Batch {
    events: Vec<Arc<Event>>,
    missed: u64,
    /// Last number in it, or among what was missed.
    last: Option<u64>,
}

async fn next_batch(reader: &mut Reader) -> io::Result<Batch> {
    let mut batch = Batch { events: vec![], missed: 0, last: None };
    let mut item = Some(reader.next().await?);
    while let Some(next) = item {
        match next {
            Item::Gap { first, last } => {
                batch.missed += last - first + 1;
                batch.last = Some(last);
            }
            Item::Event(event) => {
                batch.last = Some(event.seq);
                batch.events.push(event);
            }
        }
        if batch.events.len() == AT_ONCE {
            break;
        }
        item = reader.ready().await?;
    }
    Ok(batch)
}

/// `t=SECONDS,v1=HEX`: HMAC-SHA256 over the seconds, a dot and the body.
fn signature(secret: &[u8], seconds: u64, body: &[u8]) -> Result<String, String> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(|e| e.to_string())?;
    mac.update(format!("{seconds}.").as_bytes());
    mac.update(body);
    let hex: String = mac.finalize().into_bytes().iter().map(|b| format!("{b:02x}")).collect();
    Ok(format!("t={seconds},v1={hex}"))
}

fn read_cursor(path: Option<&Path>) -> Option<u64> {
    let cursor: Cursor = serde_json::from_slice(&fs::read(path?).ok()?).ok()?;
    Some(cursor.delivered)
}

fn write_cursor(path: &Path, delivered: u64) -> io::Result<()> {
    let fresh = path.with_extension("json.new");
    fs::write(&fresh, serde_json::to_vec(&Cursor { delivered })?)?;
    fs::rename(&fresh, path)
}

/// For an address that is not https: no certificate is ever looked at.
fn no_trust() -> rustls::ClientConfig {
    rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_other_implementations() {
        // openssl dgst -sha256 -hmac secret on the bytes `1700000000.{}`.
        let expected = "t=1700000000,v1=b8569b78799ff9e3cbff0fc2d63a33a2b57f3282abd07c37ae5e8e7d79a5f163";
        assert_eq!(signature(b"secret", 1_700_000_000, b"{}").unwrap(), expected);
    }
}
