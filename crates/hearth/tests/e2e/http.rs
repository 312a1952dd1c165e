//! Raw requests to a daemon on its host: a socket made inside the host's namespace works from outside.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

use crate::node::Node;

const PORT: u16 = 5008;
/// Far more than any answer may take.
const ANSWER: Duration = Duration::from_secs(10);

fn connect(path: &std::path::Path) -> std::io::Result<TcpStream> {
    let connected = hearth_host::net::netns::enter(path, || {
        Ok(TcpStream::connect_timeout(&SocketAddr::from(([127, 0, 0, 1], PORT)), ANSWER))
    });
    connected.unwrap()
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub code: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

/// `GET path` with more header lines. `None`: nobody listens yet.
pub fn get_with(node: &Node, path: &str, headers: &str) -> Option<Answer> {
    let mut stream = connect(&node.netns.path()).ok()?;
    stream.set_read_timeout(Some(ANSWER)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: hearth\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some(Answer { code, head: head.to_ascii_lowercase(), body: body.to_owned() })
}

/// `GET path` of a daemon that listens.
pub fn get(node: &Node, path: &str) -> Answer {
    get_with(node, path, "").expect("the daemon does not listen")
}

/// Waits for a status in `/health`.
pub fn wait_for(node: &Node, status: &str) -> Answer {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = get(node, "/health");
        if answer.json()["status"] == status {
            return answer;
        }
        assert!(Instant::now() < end, "not {status}: {answer:?}\n{}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the port is bound.
pub fn wait_for_port(node: &Node) {
    let end = Instant::now() + Duration::from_secs(30);
    while get_with(node, "/health/live", "").is_none() {
        assert!(Instant::now() < end, "nobody listens: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A gRPC connection.
pub async fn channel(node: &Node) -> Channel {
    let path = node.netns.path();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move {
            let stream = connect(&path)?;
            stream.set_nonblocking(true)?;
            std::io::Result::Ok(TokioIo::new(tokio::net::TcpStream::from_std(stream)?))
        }
    });
    Endpoint::from_static("http://hearth").connect_with_connector(connector).await.unwrap()
}
