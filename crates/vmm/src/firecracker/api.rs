//! Firecracker's API: HTTP/1.1 over a unix socket. One connection per call, since keeping one gains nothing
//! and ten are the limit; each call has a deadline. A broken connection does not prove that the VMM is dead.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Most of an answer that is read; the answers are short.
const MAX_ANSWER: usize = 64 * 1024;

/// A call that failed.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// Nobody accepts on the socket.
    #[error("connect to {}", socket.display())]
    Connect {
        /// Its path.
        socket: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The request could not be formed.
    #[error("form {method} {path}")]
    Form {
        /// Method.
        method: Method,
        /// Path.
        path: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The connection ended within the call.
    #[error("{method} {path}: the connection ended")]
    Broken {
        /// Method.
        method: Method,
        /// Path.
        path: &'static str,
        /// How.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It answered no.
    #[error("{method} {path}: refused with {status}: {fault}")]
    Refused {
        /// Method.
        method: Method,
        /// Path.
        path: &'static str,
        /// Status.
        status: StatusCode,
        /// Its `fault_message`.
        fault: String,
    },
    /// It did not answer.
    #[error("{method} {path}: no answer within {after:?}")]
    Deadline {
        /// Method.
        method: Method,
        /// Path.
        path: &'static str,
        /// The limit.
        after: Duration,
    },
}

#[derive(Deserialize)]
struct Fault {
    fault_message: String,
}

/// The API of one Firecracker.
#[derive(Debug)]
pub(super) struct Api {
    socket: PathBuf,
}

impl Api {
    pub(super) fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Succeeds once somebody accepts.
    pub(super) async fn probe(&self) -> Result<(), ApiError> {
        self.connect().await.map(drop)
    }

    pub(super) async fn put<B: Serialize>(
        &self,
        path: &'static str,
        body: &B,
        limit: Duration,
    ) -> Result<(), ApiError> {
        self.call(Method::PUT, path, body, limit).await
    }

    pub(super) async fn patch<B: Serialize>(
        &self,
        path: &'static str,
        body: &B,
        limit: Duration,
    ) -> Result<(), ApiError> {
        self.call(Method::PATCH, path, body, limit).await
    }

    async fn connect(&self) -> Result<UnixStream, ApiError> {
        UnixStream::connect(&self.socket)
            .await
            .map_err(|source| ApiError::Connect { socket: self.socket.clone(), source })
    }

    async fn call<B: Serialize>(
        &self,
        method: Method,
        path: &'static str,
        body: &B,
        limit: Duration,
    ) -> Result<(), ApiError> {
        let form = |source| ApiError::Form { method: method.clone(), path, source };
        let body = serde_json::to_vec(body).map_err(|e| form(e.into()))?;
        let request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| form(e.into()))?;
        let exchange = async {
            let (status, answer) = self.exchange(request, &method, path).await?;
            if status.is_success() {
                return Ok(());
            }
            Err(ApiError::Refused { method: method.clone(), path, status, fault: fault(&answer) })
        };
        timeout(limit, exchange)
            .await
            .unwrap_or_else(|_| Err(ApiError::Deadline { method: method.clone(), path, after: limit }))
    }

    async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        method: &Method,
        path: &'static str,
    ) -> Result<(StatusCode, Bytes), ApiError> {
        let broken = |source| ApiError::Broken { method: method.clone(), path, source };
        let stream = self.connect().await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| broken(e.into()))?;
        let talk = async {
            let answer = sender.send_request(request).await.map_err(|e| broken(e.into()))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await.map_err(broken)?;
            Ok((status, body.to_bytes()))
        };
        tokio::pin!(talk);
        // The connection must be polled for the talk to go on. When it ends first, the talk knows what it got.
        tokio::select! {
            biased;
            answer = &mut talk => answer,
            ended = connection => {
                if let Err(e) = ended {
                    tracing::debug!(error = %e, path, "API connection");
                }
                talk.await
            }
        }
    }
}

/// The words of a refusal.
fn fault(answer: &[u8]) -> String {
    serde_json::from_slice(answer)
        .map_or_else(|_| String::from_utf8_lossy(answer).into_owned(), |f: Fault| f.fault_message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixListener;

    async fn answered(answer: &'static str, limit: Duration) -> (String, Result<(), ApiError>) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("fc.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut seen = vec![0; 4096];
            let n = stream.read(&mut seen).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            if answer.is_empty() {
                std::future::pending::<()>().await;
            }
            String::from_utf8(seen[..n].to_vec()).unwrap()
        };
        let api = Api::new(socket.clone());
        let body = serde_json::json!({"a": 1});
        let call = api.put("/actions", &body, limit);
        if answer.is_empty() {
            tokio::select! { _ = server => unreachable!(), r = call => (String::new(), r) }
        } else {
            tokio::join!(server, call)
        }
    }

    #[tokio::test]
    async fn a_request_is_complete_and_a_refusal_gives_the_fault_message() {
        let second = Duration::from_secs(5);
        let (seen, result) = answered("HTTP/1.1 204 \r\nServer: x\r\n\r\n", second).await;
        result.unwrap();
        assert!(
            seen.starts_with("PUT /actions HTTP/1.1\r\n") && seen.ends_with("\r\n\r\n{\"a\":1}"),
            "{seen}"
        );
        let refusal = "HTTP/1.1 400 \r\nContent-Length: 34\r\n\r\n{\"fault_message\":\"no such kernel\"}";
        let error = answered(refusal, second).await.1.unwrap_err().to_string();
        assert!(error.ends_with("400 Bad Request: no such kernel"), "{error}");
        let error = answered("HTTP/1.1 400 \r\nContent-Length: 30\r\n\r\n", second).await.1.unwrap_err();
        assert!(matches!(error, ApiError::Broken { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_mute_vmm_costs_the_deadline_and_no_more() {
        let error = answered("", Duration::from_millis(30)).await.1.unwrap_err();
        assert!(matches!(error, ApiError::Deadline { .. }), "{error:?}");
        let absent = Api::new("/nowhere/fc.sock".into());
        assert!(matches!(absent.probe().await, Err(ApiError::Connect { .. })));
    }
}
