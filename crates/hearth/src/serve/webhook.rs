//! Events posted to an address: in order, signed, each until it is taken. The journal is the queue, so that nothing
//! waits in memory and a restart loses nothing; what is not kept any more when its turn comes is told as missed.

use std::fs;
use std::io::{self, Write as _};
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
use hyper::{Method, Request, StatusCode, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::tls;
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
    /// Events that were refused for so long that they were given up.
    pub(crate) dropped: AtomicU64,
}

/// One address.
pub(crate) struct Webhook {
    uri: Uri,
    secret: Vec<u8>,
    instance: String,
    /// Notes how far it is; `None` where no journal is kept.
    cursor: Option<PathBuf>,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// How long what is refused is posted again.
    give_up: Duration,
    counts: Arc<Counts>,
}

/// Why a post failed.
struct Failure {
    why: String,
    /// The address does not want these: to post them again helps only once somebody changes it.
    refused: bool,
}

/// What the log has of it: one line per change. The wait goes on with it.
struct Mood {
    now: Taken,
    wait: Duration,
    /// Events that the address has not been told to have missed.
    owed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    Yes,
    TryingAgain,
    Dropping,
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
    /// If the secret cannot be read, or https has nobody to trust.
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
        let ca_file = config.webhook.ca_file.as_deref();
        let connector = tls::connector(&uri, tls::Http::One, "webhook.ca_file", ca_file)?;
        let client = Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        let kept = config.events.keep_mib > 0;
        let cursor = kept.then(|| config.instance_state_dir().join("events/webhook.json"));
        let instance = config.instance.to_string();
        let give_up = Duration::from_secs(config.webhook.give_up_seconds);
        Ok(Some(Self { uri, secret, instance, cursor, client, give_up, counts }))
    }

    /// Posts until `stop`.
    pub(crate) async fn run(self, events: Events, stop: CancellationToken) {
        stop.run_until_cancelled(self.deliver_all(events)).await;
    }

    async fn deliver_all(&self, events: Events) {
        let from = self.beginning(&events).await;
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
        let mut mood = Mood { now: Taken::Yes, wait: *RETRY.start(), owed: 0 };
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
            self.deliver(&batch, &mut mood).await;
            if let Some(last) = batch.last {
                self.note(last).await;
            }
        }
    }

    /// After what was delivered before; the first time with what comes from now on, which is noted, so that a restart before the
    /// first delivery loses nothing.
    async fn beginning(&self, events: &Events) -> From {
        let cursor = self.cursor.clone();
        let read = tokio::task::spawn_blocking(move || read_cursor(cursor.as_deref())).await;
        match read.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(Some(delivered)) => From::After(delivered),
            Ok(None) => {
                let last = events.counts().last;
                self.note(last).await;
                From::After(last)
            }
            Err(e) => {
                tracing::warn!(
                    "webhook: how far it was cannot be read, beginning with the oldest event: {e}"
                );
                From::Oldest
            }
        }
    }

    /// Tries until these are taken, or refused for too long. Then each is tried alone: one that the address cannot
    /// swallow must not take others with it.
    async fn deliver(&self, batch: &Batch, mood: &mut Mood) {
        let mut dropped = 0;
        mood.owed += batch.missed;
        let mut taken = self.insist(&batch.events, self.give_up, mood).await;
        if !taken {
            for event in &batch.events {
                mood.wait = *RETRY.start();
                // Long enough for one more try: that one was refused may have had to do with when.
                taken = self.insist(std::slice::from_ref(event), *RETRY.start(), mood).await;
                dropped += u64::from(!taken);
                mood.owed += u64::from(!taken);
            }
        }
        self.counts.delivered.fetch_add(batch.events.len() as u64 - dropped, Ordering::Relaxed);
        self.counts.dropped.fetch_add(dropped, Ordering::Relaxed);
        if taken && dropped == 0 {
            mood.wait = *RETRY.start();
            if std::mem::replace(&mut mood.now, Taken::Yes) != Taken::Yes {
                tracing::info!("webhook {}: events are taken again", self.uri);
            }
        } else if std::mem::replace(&mut mood.now, Taken::Dropping) != Taken::Dropping {
            let given = self.give_up.as_secs();
            tracing::warn!(
                dropped,
                "webhook {}: dropping events that it has refused for {given} s",
                self.uri
            );
        }
    }

    /// Posts until these are taken; false if they were refused and nothing else for `patience`.
    async fn insist(&self, events: &[Arc<Event>], patience: Duration, mood: &mut Mood) -> bool {
        let missed = mood.owed;
        let events = events.iter().map(Arc::as_ref).collect();
        let body = match serde_json::to_vec(&Body { instance: &self.instance, missed, events }) {
            Ok(body) => Bytes::from(body),
            Err(e) => {
                tracing::error!("webhook: {e}");
                return false;
            }
        };
        let mut refused_since = None;
        while let Err(failure) = self.post(body.clone()).await {
            self.counts.failures.fetch_add(1, Ordering::Relaxed);
            refused_since = failure.refused.then(|| refused_since.unwrap_or_else(Instant::now));
            if refused_since.is_some_and(|since| since.elapsed() >= patience) {
                return false;
            }
            if mood.now == Taken::Yes {
                mood.now = Taken::TryingAgain;
                tracing::warn!("webhook {}: {}; trying again", self.uri, failure.why);
            }
            tokio::time::sleep(mood.wait).await;
            mood.wait = (mood.wait * 2).min(*RETRY.end());
        }
        mood.owed = 0;
        true
    }

    async fn post(&self, body: Bytes) -> Result<(), Failure> {
        let failed = |why| Failure { why, refused: false };
        let seconds = super::now_ms() / 1000;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.uri.clone())
            .header("content-type", "application/json")
            .header("user-agent", concat!("hearth/", env!("CARGO_PKG_VERSION")))
            .header(SIGNATURE, signature(&self.secret, seconds, &body).map_err(failed)?)
            .body(Full::new(body))
            .map_err(|e| failed(e.to_string()))?;
        match tokio::time::timeout(WITHIN, self.client.request(request)).await {
            Err(_) => Err(failed(format!("no answer within {} s", WITHIN.as_secs()))),
            Ok(Err(e)) => Err(failed(hearth_node::chain(&e))),
            Ok(Ok(answer)) if answer.status().is_success() => Ok(()),
            Ok(Ok(answer)) => {
                let status = answer.status();
                Err(Failure { why: format!("it answered {status}"), refused: is_refusal(status) })
            }
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

/// Nothing where none was noted.
fn read_cursor(path: Option<&Path>) -> io::Result<Option<u64>> {
    let Some(path) = path else { return Ok(None) };
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice::<Cursor>(&text)?.delivered)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn write_cursor(path: &Path, delivered: u64) -> io::Result<()> {
    let fresh = path.with_extension("json.new");
    let mut file = fs::File::create(&fresh)?;
    file.write_all(&serde_json::to_vec(&Cursor { delivered })?)?;
    // A crash of the host must not leave the new name on an empty file.
    file.sync_data()?;
    fs::rename(&fresh, path)
}

/// Whether an answer is about what was posted, and not about when.
fn is_refusal(status: StatusCode) -> bool {
    let later =
        [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS].contains(&status);
    status.is_client_error() && !later
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_taken_later_is_no_refusal() {
        for (code, refusal) in [
            (400, true),
            (401, true),
            (413, true),
            (408, false),
            (425, false),
            (429, false),
            (301, false),
            (503, false),
        ] {
            assert_eq!(is_refusal(StatusCode::from_u16(code).unwrap()), refusal, "{code}");
        }
    }

    #[test]
    fn the_signature_is_that_of_other_implementations() {
        // openssl dgst -sha256 -hmac secret on the bytes `1700000000.{}`.
        let expected = "t=1700000000,v1=b8569b78799ff9e3cbff0fc2d63a33a2b57f3282abd07c37ae5e8e7d79a5f163";
        assert_eq!(signature(b"secret", 1_700_000_000, b"{}").unwrap(), expected);
    }
}
