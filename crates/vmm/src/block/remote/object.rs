//! One object of a store, as it was when it was opened: its size and its version are pinned, and every answer is held
//! against them. Tries that failed in a way that may pass are made again, further and further apart.

use std::error::Error as _;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt as _, ObjectStoreScheme, RetryConfig,
};
use sha2::{Digest as _, Sha256};
use tokio::time::{sleep, timeout};

use super::arrival::Arrival;
use super::client::{Connector, flat};
use super::counters::Counters;

/// How long tries may take, and what is between them.
#[derive(Debug, Clone, Copy)]
pub struct Tries {
    /// A try that got no byte for this long is given up.
    pub silence: Duration,
    /// A try that takes longer as a whole is given up.
    pub whole: Duration,
    /// Longest wait after the first try that failed; it doubles with each. What is waited is chance between half of it and it.
    pub pause: Duration,
    /// It grows no longer than this.
    pub longest_pause: Duration,
}

impl Default for Tries {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(5),
            whole: Duration::from_secs(20),
            pause: Duration::from_millis(50),
            longest_pause: Duration::from_secs(2),
        }
    }
}

/// Why an object is not to be had. Another try would not help.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RemoteError {
    /// Not a URL of an object, or one that says too much.
    #[error("{url} cannot be used: {why}")]
    Url {
        /// As given.
        url: Arc<str>,
        /// In words, with what to do.
        why: String,
    },
    /// The store's answer.
    #[error("{url}: {why}")]
    Store {
        /// The object.
        url: Arc<str>,
        /// In words.
        why: String,
    },
    /// It is not what was opened.
    #[error("{url} has changed: {why}; a disk needs an object that stays as it is")]
    Changed {
        /// The object.
        url: Arc<str>,
        /// What it was and is.
        why: String,
    },
    /// Fewer or more bytes than asked for.
    #[error("{url}: {got} bytes came for the {wanted} at {at}")]
    Length {
        /// The object.
        url: Arc<str>,
        /// First byte.
        at: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes that came.
        got: u64,
    },
}

/// Which version of an object it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Bytes.
    pub size: u64,
    /// The store's own mark, or when it was changed last.
    pub mark: String,
}

/// The object.
pub(super) struct Object {
    store: Arc<dyn ObjectStore>,
    path: Path,
    pub(super) url: Arc<str>,
    meta: ObjectMeta,
    tries: Tries,
}

/// What a try ended with.
enum Failure {
    /// Another may go better.
    Passing(String),
    Final(RemoteError),
}

impl Object {
    /// Finds the object and pins its version. `note` is told why a try failed.
    pub(super) async fn open(
        url: &str,
        tries: Tries,
        counters: &Counters,
        note: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Self, RemoteError> {
        let (store, path) = connect(url)?;
        let url = shown(url);
        let head = || async {
            let options = GetOptions { head: true, ..GetOptions::default() };
            match timeout(tries.whole.min(tries.silence * 2), store.get_opts(&path, options)).await {
                Ok(Ok(found)) => Ok(found.meta),
                Ok(Err(e)) => Err(failure(&url, &e)),
                Err(_) => Err(Failure::Passing("no answer".to_owned())),
            }
        };
        let meta = again(tries, counters, note, head).await?;
        if meta.size == 0 {
            return Err(RemoteError::Store {
                url,
                why: "it is empty, and a disk has at least a byte".into(),
            });
        }
        if mark(&meta).is_none() {
            let why =
                "the store tells neither an etag nor when it was changed, so that a change would not be seen";
            return Err(RemoteError::Store { url, why: why.into() });
        }
        Ok(Self { store, path, url, meta, tries })
    }

    pub(super) fn size(&self) -> u64 {
        self.meta.size
    }

    pub(super) fn version(&self) -> Version {
        Version { size: self.meta.size, mark: mark(&self.meta).unwrap_or_default() }
    }

    /// A name for it in a directory: other for another object, version or size of chunks.
    pub(super) fn key(&self, chunk: u64) -> String {
        let mut hash = Sha256::new();
        let Version { size, mark } = self.version();
        for part in [self.url.as_bytes(), mark.as_bytes(), &size.to_le_bytes(), &chunk.to_le_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.finalize()[..16].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Whether what comes of a range may be used before all of it is here. Of a file no: only a look afterwards tells whether it
    /// was changed meanwhile. A store's answer begins with its version and its place.
    pub(super) fn early(&self) -> bool {
        !self.url.starts_with("file:")
    }

    /// Gets a range, with as many tries as it takes: whoever waits has the deadline.
    pub(super) async fn fetch(
        &self,
        at: u64,
        len: u64,
        arrival: &Arrival,
        counters: &Counters,
        note: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Bytes, RemoteError> {
        let one = || async {
            match timeout(self.tries.whole, self.fetch_once(at, len, arrival)).await {
                Ok(done) => done,
                Err(_) => Err(Failure::Passing(format!("not done after {:?}", self.tries.whole))),
            }
        };
        let data = again(self.tries, counters, note, one).await?;
        counters.fetched(data.len() as u64);
        Ok(data)
    }

    async fn fetch_once(&self, at: u64, len: u64, arrival: &Arrival) -> Result<Bytes, Failure> {
        arrival.restart();
        // A weak mark never matches a condition; the answer is looked at in any case.
        let strong = self.meta.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        let since = (strong.is_none() && self.meta.e_tag.is_none()).then_some(self.meta.last_modified);
        let options = GetOptions {
            if_match: strong,
            if_unmodified_since: since,
            range: Some(GetRange::Bounded(at..at + len)),
            ..GetOptions::default()
        };
        let silent = |_| Failure::Passing(format!("silent for {:?}", self.tries.silence));
        let found = timeout(self.tries.silence, self.store.get_opts(&self.path, options)).await;
        let found = found.map_err(silent)?.map_err(|e| self.failure(&e))?;
        self.check(&found.meta).map_err(Failure::Final)?;
        let mut stream = found.into_stream();
        let (mut got, whole) = (0, usize::try_from(len).unwrap_or(usize::MAX));
        loop {
            let next = timeout(self.tries.silence, stream.try_next()).await.map_err(silent)?;
            let Some(piece) = next.map_err(|e| self.failure(&e))? else { break };
            if got == 0 && piece.len() == whole {
                return self.unchanged(piece).await;
            }
            // More than asked for is an error, and room for it none.
            if got + piece.len() > whole {
                got += piece.len();
                break;
            }
            got = arrival.push(&piece, whole);
        }
        if got == whole {
            return self.unchanged(arrival.take()).await;
        }
        let (url, got) = (self.url.clone(), got as u64);
        Err(Failure::Final(RemoteError::Length { url, at, wanted: len, got }))
    }

    /// Looks once more at a file, which anybody may write while it is read; a store gives all of one version.
    async fn unchanged(&self, data: Bytes) -> Result<Bytes, Failure> {
        if !self.early() {
            let now = self.store.head(&self.path).await.map_err(|e| self.failure(&e))?;
            self.check(&now).map_err(Failure::Final)?;
        }
        Ok(data)
    }

    fn check(&self, is: &ObjectMeta) -> Result<(), RemoteError> {
        let was = &self.meta;
        let changed = |why| Err(RemoteError::Changed { url: self.url.clone(), why });
        if was.size != is.size {
            return changed(format!("it had {} bytes and has {}", was.size, is.size));
        }
        match (mark(was), mark(is)) {
            (Some(was), Some(is)) if was == is => Ok(()),
            (was, is) => changed(format!(
                "it was {} and is {}",
                was.unwrap_or_default(),
                is.unwrap_or_else(|| "without a mark".into())
            )),
        }
    }

    fn failure(&self, error: &Error) -> Failure {
        match error {
            Error::Precondition { .. } | Error::NotModified { .. } => Failure::Final(RemoteError::Changed {
                url: self.url.clone(),
                why: format!("it is no longer {}", mark(&self.meta).unwrap_or_default()),
            }),
            _ => failure(&self.url, error),
        }
    }
}

/// What tells a version from another. A weak tag may stay over a change of bytes; with the time of change it does not.
fn mark(meta: &ObjectMeta) -> Option<String> {
    let changed = (meta.last_modified.timestamp() != 0).then(|| meta.last_modified.to_rfc3339());
    match (meta.e_tag.clone(), changed) {
        (Some(weak), Some(changed)) if weak.starts_with("W/") => Some(format!("{weak} of {changed}")),
        (tag, changed) => tag.or(changed),
    }
}

fn failure(url: &Arc<str>, error: &Error) -> Failure {
    let why = flat(error);
    if may_pass(error) {
        Failure::Passing(why)
    } else {
        Failure::Final(RemoteError::Store { url: url.clone(), why })
    }
}

/// Whether another try may go better: only what the way to the store did, or a server that cannot now.
fn may_pass(error: &Error) -> bool {
    let Error::Generic { .. } = error else { return false };
    let mut next = error.source();
    while let Some(cause) = next {
        if let Some(http) = cause.downcast_ref::<HttpError>() {
            return matches!(
                http.kind(),
                HttpErrorKind::Connect
                    | HttpErrorKind::Request
                    | HttpErrorKind::Timeout
                    | HttpErrorKind::Interrupted
            );
        }
        if let Some(local) = cause.downcast_ref::<io::Error>() {
            return matches!(local.kind(), io::ErrorKind::Interrupted | io::ErrorKind::TimedOut);
        }
        next = cause.source();
    }
    false
}

/// Tries until one goes well or fails for good; dropped, it ends.
async fn again<T, F: Future<Output = Result<T, Failure>>>(
    tries: Tries,
    counters: &Counters,
    note: &(dyn Fn(String) + Send + Sync),
    one: impl Fn() -> F,
) -> Result<T, RemoteError> {
    let mut pause = tries.pause;
    loop {
        match one().await {
            Ok(done) => return Ok(done),
            Err(Failure::Final(error)) => return Err(error),
            Err(Failure::Passing(why)) => note(why),
        }
        counters.retried();
        sleep(pause.mul_f64(0.5 + chance() / 2.0)).await;
        pause = (pause * 2).min(tries.longest_pause);
    }
}

/// Between 0 and 1. It only keeps many apart from each other.
fn chance() -> f64 {
    (RandomState::new().build_hasher().finish() >> 32) as f64 / f64::from(u32::MAX)
}

/// A URL as it may be printed: without what may be secret.
pub(super) fn shown(url: &str) -> Arc<str> {
    let plain = url.split(['?', '#']).next().unwrap_or_default();
    // Of what cannot be parsed nobody knows where a password ends.
    let known = url::Url::parse(url).is_ok_and(|parsed| {
        let user = matches!(parsed.scheme(), "http" | "https") && !parsed.username().is_empty();
        !user && parsed.password().is_none() && !url[plain.len()..].contains('@')
    });
    match plain.split_once("://") {
        Some((scheme, _)) if !known && url.contains('@') => format!("{scheme}://…").into(),
        _ => plain.into(),
    }
}

/// The store that a URL names, with the credentials that the environment has, and the object's place in it.
fn connect(text: &str) -> Result<(Arc<dyn ObjectStore>, Path), RemoteError> {
    let refuse = |why: String| RemoteError::Url { url: shown(text), why };
    let url = url::Url::parse(text).map_err(|e| refuse(e.to_string()))?;
    // Azure's container stands where others have a user's name.
    let user = matches!(url.scheme(), "http" | "https") && !url.username().is_empty();
    if user || url.password().is_some() {
        return Err(refuse("it has credentials in it; give them in the environment".to_owned()));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refuse("it has a query or a fragment, which is not sent; give the plain address".into()));
    }
    let (scheme, path) = ObjectStoreScheme::parse(&url).map_err(|e| refuse(e.to_string()))?;
    if path.as_ref().is_empty() {
        return Err(refuse("it names no object".into()));
    }
    // Tries are made here, where the deadline is known.
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    let built: object_store::Result<Arc<dyn ObjectStore>> = match scheme {
        ObjectStoreScheme::Local => Ok(Arc::new(LocalFileSystem::new())),
        ObjectStoreScheme::Http => HttpBuilder::new()
            .with_url(&url[..url::Position::BeforePath])
            .with_http_connector(Connector { plain: url.scheme() == "http" })
            .with_retry(once)
            .build()
            .map(|store| Arc::new(store) as _),
        ObjectStoreScheme::AmazonS3 => AmazonS3Builder::from_env()
            .with_url(text)
            .with_http_connector(Connector { plain: false })
            .with_retry(once)
            .build()
            .map(|store| Arc::new(store) as _),
        ObjectStoreScheme::GoogleCloudStorage => GoogleCloudStorageBuilder::from_env()
            .with_url(text)
            .with_http_connector(Connector { plain: false })
            .with_retry(once)
            .build()
            .map(|store| Arc::new(store) as _),
        ObjectStoreScheme::MicrosoftAzure => MicrosoftAzureBuilder::from_env()
            .with_url(text)
            .with_http_connector(Connector { plain: false })
            .with_retry(once)
            .build()
            .map(|store| Arc::new(store) as _),
        _ => return Err(refuse("no such kind of store; use file, http, https, s3, gs or az".into())),
    };
    built.map(|store| (store, path)).map_err(|e| refuse(flat(&e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_cannot_be_used_are_refused_without_what_is_secret() {
        for (url, word) in [
            ("disk.img", "relative"),
            ("ftp://host/disk", "ftp"),
            ("memory:///disk", "no such kind"),
            ("http://host/", "no object"),
            ("https://host/disk?X-Signature=hunter2", "query"),
            ("https://me:hunter2@host/disk", "environment"),
            ("https://me:hunter2@host:port/disk", "port"),
            ("https://hunter2@host/disk", "environment"),
            ("https://me:pa/hunter2@host/disk", "port"),
            ("https://me:hunter2#ss@host/disk", "port"),
            ("https://me:77#hunter2@host/disk", "fragment"),
        ] {
            let error = connect(url).expect_err(url).to_string();
            assert!(error.contains(word) && !error.contains("hunter2"), "{url}: {error}");
        }
        for url in ["file:///disk.img", "http://host:8080/a/disk", "https://host/disk"] {
            assert!(connect(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn waits_are_between_half_and_all() {
        for _ in 0..100 {
            assert!((0.0..=1.0).contains(&chance()));
        }
    }
}
