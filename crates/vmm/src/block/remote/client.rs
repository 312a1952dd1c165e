//! How stores are reached: HTTP/1.1 by hyper, TLS by rustls with ring. It makes one try and says of what failed whether
//! another may go better; when that comes is up to [`super::object`].

use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt as _, Full};
use hyper::StatusCode;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};

/// Bytes of an error's body that are read and shown.
const SHOWN: usize = 512;

/// Makes clients for the stores.
#[derive(Debug)]
pub(super) struct Connector {
    /// Only without TLS, for which a host needs no roots of trust. Else both, if the store's own options allow it.
    pub(super) plain: bool,
}

/// The store answered that it cannot now.
#[derive(Debug, thiserror::Error)]
#[error("the server answered {status}{text}")]
pub(super) struct Busy {
    status: StatusCode,
    text: String,
}

#[derive(Debug)]
enum Service {
    Plain(Client<Tcp, HttpRequestBody>),
    Tls(Client<HttpsConnector<Tcp>, HttpRequestBody>),
}

/// What [`HttpConnector::connect`] says of a host without roots of trust.
fn no_roots(source: std::io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "TLS", source: Box::new(source) }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut client = Client::builder(TokioExecutor::new());
        client.pool_timer(TokioTimer::new());
        if self.plain {
            return Ok(HttpClient::new(Service::Plain(client.build(Tcp::new()))));
        }
        let plain = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let tls = HttpsConnectorBuilder::new().with_native_roots().map_err(no_roots)?;
        let tls = if plain { tls.https_or_http() } else { tls.https_only() };
        Ok(HttpClient::new(Service::Tls(client.build(tls.enable_http1().build()))))
    }
}

impl HttpService for Service {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> BoxFuture<'b, Result<HttpResponse, HttpError>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let response = match self {
                Service::Plain(client) => client.request(request),
                Service::Tls(client) => client.request(request),
            };
            let response = response.await.map_err(|e| {
                let kind = if e.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
                HttpError::new(kind, Flat(flat(&e).into()))
            })?;
            let (mut parts, body) = response.into_parts();
            let body = body.map_err(|e| HttpError::new(HttpErrorKind::Interrupted, Flat(flat(&e).into())));
            let status = parts.status;
            if status.is_success() {
                return Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)));
            }
            // Whoever gets this reads it to its end, into as much memory as it says it needs.
            let text = first_line(HttpResponseBody::new(body)).await;
            if status.is_server_error()
                || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT)
            {
                return Err(HttpError::new(HttpErrorKind::Interrupted, Busy { status, text }));
            }
            parts.headers.remove(hyper::header::CONTENT_LENGTH);
            let text = Full::new(Bytes::from(text)).map_err(|never| match never {});
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(text)))
        })
    }
}

/// An error with its causes in one line.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Flat(Arc<str>);

/// All of an error's chain, without what is said twice.
pub(super) fn flat(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        next = cause.source();
    }
    text
}

async fn first_line(mut body: HttpResponseBody) -> String {
    let mut seen = Vec::new();
    while seen.len() < SHOWN {
        let Some(Ok(frame)) = body.frame().await else { break };
        let data: Bytes = frame.into_data().unwrap_or_default();
        seen.extend_from_slice(&data[..data.len().min(SHOWN - seen.len())]);
    }
    let text = String::from_utf8_lossy(&seen);
    let line: String = text.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).collect();
    if line.is_empty() { line } else { format!(": {line}") }
}
