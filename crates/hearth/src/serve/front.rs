//! The port: HTTP/1.1 and gRPC (h2c) on one listener, served by a thread of its own, so that the answer to
//! "are you alive" never waits for the engine.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt as _;

use hearth_node::ReclaimProgress;

use super::metrics::classic;
use super::status::Report;

/// Longest time a client may take to send its request head.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long open connections get to end when the daemon does.
const GOODBYE: Duration = Duration::from_secs(3);
/// Connections at once; further ones wait in the kernel's backlog.
const MAX_CONNECTIONS: usize = 2048;

/// How a scraper asks for OpenMetrics.
const OPEN: &[u8] = b"application/openmetrics-text";
/// The text format that Prometheus and its kin read.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What `/health` says.
#[derive(Debug, Serialize)]
struct Health {
    status: &'static str,
    reason: String,
    version: &'static str,
    /// Milliseconds since the Unix epoch.
    since: u64,
    reclaim: Reclaim,
    sandboxes: usize,
}

/// How far the release of leftovers is.
#[derive(Debug, Serialize)]
struct Reclaim {
    state: &'static str,
    total: u64,
    done: u64,
    failed: u64,
}

/// What the front needs to answer health questions.
pub(crate) struct HealthSource {
    pub(crate) report: Answer<Report>,
    /// Number of sandboxes and the progress of reclaim.
    pub(crate) engine: Answer<(usize, ReclaimProgress)>,
    /// The text of `/metrics`.
    pub(crate) metrics: Answer<String>,
}

/// A question that is answered at once, without the engine's threads.
type Answer<T> = Box<dyn Fn() -> T + Send + Sync>;

/// The running front.
pub(crate) struct Front {
    thread: JoinHandle<()>,
    stop: CancellationToken,
}

/// Adds the HTTP routes to the gRPC ones.
pub(crate) fn router(grpc: Router, source: HealthSource, token: Option<String>) -> Router {
    let source = Arc::new(source);
    let measured = Arc::clone(&source);
    let expected = token.map(|token| Arc::new(format!("Bearer {token}")));
    let scraper = expected.clone();
    let guarded = match expected {
        None => grpc,
        Some(expected) => grpc.layer(axum::middleware::from_fn(
            move |request: axum::extract::Request, next: axum::middleware::Next| {
                let expected = Arc::clone(&expected);
                async move {
                    if authorized(request.headers(), &expected) {
                        next.run(request).await
                    } else {
                        tonic::Status::unauthenticated("a token is needed: set HEARTH_TOKEN").into_http()
                    }
                }
            },
        )),
    };
    guarded
        .route("/health", get(move || health(Arc::clone(&source))))
        .route("/health/live", get(|| async { "live\n" }))
        .route(
            "/metrics",
            get(async move |headers: HeaderMap| match &scraper {
                // Unlike health this tells how the node is used.
                Some(expected) if !authorized(&headers, expected) => {
                    let ask = [(header::WWW_AUTHENTICATE, "Bearer")];
                    (StatusCode::UNAUTHORIZED, ask, "a token is needed\n").into_response()
                }
                _ => {
                    let text = (measured.metrics)();
                    match headers.get(header::ACCEPT) {
                        Some(accepts) if accepts.as_bytes().windows(OPEN.len()).any(|w| w == OPEN) => {
                            ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
                        }
                        // What a person, promtool and older scrapers read.
                        _ => ([(header::CONTENT_TYPE, classic::TYPE)], classic::of(&text)).into_response(),
                    }
                }
            }),
        )
        .reset_fallback()
        .fallback(not_found)
}

/// Compares without telling by its time how much of the token was right.
fn authorized(headers: &HeaderMap, expected: &str) -> bool {
    let Some(given) = headers.get(header::AUTHORIZATION) else { return false };
    let (given, expected) = (given.as_bytes(), expected.as_bytes());
    given.len() == expected.len()
        && given.iter().zip(expected).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

async fn not_found(headers: HeaderMap) -> Response {
    let grpc =
        headers.get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(b"application/grpc"));
    if grpc {
        return tonic::Status::unimplemented("no such service").into_http();
    }
    (StatusCode::NOT_FOUND, "no such page; there are /health, /health/live and /metrics\n").into_response()
}

async fn health(source: Arc<HealthSource>) -> Response {
    let report = (source.report)();
    let code = if report.status.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let (sandboxes, reclaim) = (source.engine)();
    let body = Health {
        status: report.status.as_str(),
        reason: report.reason,
        version: env!("CARGO_PKG_VERSION"),
        since: report.since_ms,
        reclaim: Reclaim {
            state: reclaim.state.as_str(),
            total: reclaim.total,
            done: reclaim.done,
            failed: reclaim.failed,
        },
        sandboxes,
    };
    (code, axum::Json(body)).into_response()
}

impl Front {
    /// Serves `app` on `listener` until stopped. `setup` runs on the front's own runtime before the first
    /// connection is taken.
    pub(crate) fn start(
        listener: TcpListener,
        setup: impl Future<Output = Router> + Send + 'static,
    ) -> anyhow::Result<Self> {
        listener.set_nonblocking(true).context("listener")?;
        let stop = CancellationToken::new();
        let ended = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("front".into()).spawn(move || {
            runtime.block_on(async move {
                let app = setup.await;
                match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => accept(listener, app, ended).await,
                    Err(e) => tracing::error!("the listener is lost: {e}"),
                }
            });
        })?;
        Ok(Self { thread, stop })
    }

    /// Ends it; waits a bounded time for open connections. Blocks.
    pub(crate) fn stop(self) {
        self.stop.cancel();
        if self.thread.join().is_err() {
            tracing::error!("the front thread panicked");
        }
    }
}

async fn accept(listener: tokio::net::TcpListener, app: Router, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            _ = connections.join_next(), if connections.len() >= MAX_CONNECTIONS => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                connections.spawn(connection(stream, peer, app.clone(), stop.clone()));
            }
            Err(e) => {
                // Out of descriptors, say: the backlog keeps the client meanwhile.
                tracing::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    let goodbye = tokio::time::sleep(GOODBYE);
    tokio::pin!(goodbye);
    loop {
        tokio::select! {
            next = connections.join_next() => if next.is_none() { break },
            () = &mut goodbye => break,
        }
    }
    connections.shutdown().await;
}

async fn connection(stream: tokio::net::TcpStream, peer: SocketAddr, app: Router, stop: CancellationToken) {
    if let Err(e) = stream.set_nodelay(true) {
        tracing::debug!(%peer, "{e}");
    }
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(Duration::from_secs(30));
    let asked = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&asked);
    let app = tower::service_fn(move |request| {
        seen.store(true, Ordering::Relaxed);
        app.clone().oneshot(request)
    });
    let connection = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    tokio::pin!(connection);
    // hyper's own limit begins once it knows which HTTP is spoken; a client that says nothing must not hold
    // one of a bounded number of connections.
    let first_request = async {
        tokio::time::sleep(HEADER_TIMEOUT).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = first_request => {
            tracing::debug!(%peer, "no request came in time");
            return;
        }
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(e) = ended {
        // A client that goes away is no event.
        tracing::debug!(%peer, "{e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_compared_whole() {
        let mut headers = HeaderMap::new();
        assert!(!authorized(&headers, "Bearer abc"));
        headers.insert(header::AUTHORIZATION, "Bearer ab".parse().unwrap());
        assert!(!authorized(&headers, "Bearer abc"));
        headers.insert(header::AUTHORIZATION, "Bearer abc".parse().unwrap());
        assert!(authorized(&headers, "Bearer abc"));
    }
}
