//! Webhook and traces over https: taken where the certificate is trusted, and told to nobody else.

use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::TraceServiceServer;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio_rustls::TlsAcceptor;

use crate::http;
use crate::node::{Node, Wish, cannot};
use crate::telemetry::{Collector, metric, wait_for_metric};
use crate::webhook::read_request;

const WEBHOOK: u16 = 9443;
const COLLECTOR: u16 = 4317;

/// A certificate authority that writes its certificate to `ca`, and a server that it vouches for at 127.0.0.1.
fn server(ca: &Path, protocol: &str) -> Arc<ServerConfig> {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    std::fs::write(ca, params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    let mut config = config.with_single_cert(vec![certificate.der().clone()], key).unwrap();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    Arc::new(config)
}

fn listener(node: &Node, port: u16) -> TcpListener {
    let bound = hearth_host::net::netns::enter(&node.netns.path(), || {
        Ok(TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port))))
    });
    bound.expect("the namespace").expect("a listener")
}

/// Counts the posts that came through the handshake.
fn take_posts(listener: TcpListener, tls: Arc<ServerConfig>) -> Arc<AtomicU64> {
    let posts = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&posts);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let tls = rustls::ServerConnection::new(Arc::clone(&tls)).expect("TLS");
            let mut stream = BufReader::new(rustls::StreamOwned::new(tls, stream));
            while read_request(&mut stream).is_some() {
                count.fetch_add(1, Ordering::SeqCst);
                let answer = b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n";
                if stream.get_mut().write_all(answer).is_err() {
                    break;
                }
            }
        }
    });
    posts
}

async fn take_spans(listener: TcpListener, tls: Arc<ServerConfig>, collector: Collector) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let acceptor = TlsAcceptor::from(tls);
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        // Who does not trust it hangs up.
        let Ok(stream) = acceptor.accept(stream).await else { continue };
        let service = TowerToHyperService::new(TraceServiceServer::new(collector.clone()));
        let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service);
        drop(served.await);
    }
}

#[test]
fn https_is_spoken_to_whom_the_configured_authority_vouches_for() {
    if cannot("https_is_spoken_to_whom_the_configured_authority_vouches_for", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    let file = |name: &str| node.dir.path().join(name);
    let (right, wrong, secret) = (file("right.pem"), file("wrong.pem"), file("secret"));
    std::fs::write(&secret, "a secret of this test").unwrap();
    server(&wrong, "h2");
    let tls = server(&right, "http/1.1");
    let posts = take_posts(listener(&node, WEBHOOK), Arc::clone(&tls));
    let mut for_spans = ServerConfig::clone(&tls);
    for_spans.alpn_protocols = vec![b"h2".to_vec()];
    let spans = listener(&node, COLLECTOR);
    spans.set_nonblocking(true).unwrap();
    let collector = Collector::default();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn_on(take_spans(spans, Arc::new(for_spans), collector.clone()), runtime.handle());
    let configure = |node: &Node, ca: &Path| {
        node.set_test(&format!(
            "process_vmm = true\n\
             [webhook]\nurl = \"https://127.0.0.1:{WEBHOOK}/hook\"\nsecret_file = {secret:?}\nca_file = {ca:?}\n\
             [otlp]\nendpoint = \"https://127.0.0.1:{COLLECTOR}\"\nca_file = {ca:?}"
        ));
    };
    let life = |node: &Node, name: &str| {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
        node.ok(&["rm", name]);
    };

    configure(&node, &wrong);
    node.start_daemon();
    life(&node, "first");
    wait_for_metric(&node, "hearth_webhook_failures_total", |n| n > 0.0);
    wait_for_metric(&node, "hearth_traces_dropped_total", |n| n > 0.0);
    let sent = (metric(&node, "hearth_webhook_delivered_total"), metric(&node, "hearth_traces_sent_total"));
    assert_eq!((sent, posts.load(Ordering::SeqCst)), ((0.0, 0.0), 0), "{}", node.log_text());
    assert!(collector.spans().is_empty());
    assert_eq!(http::get(&node, "/health").json()["status"], "healthy");
    assert!(node.log_text().contains("certificate"), "the reason is not told: {}", node.log_text());
    node.stop_daemon();

    configure(&node, &right);
    node.start_daemon();
    life(&node, "second");
    wait_for_metric(&node, "hearth_traces_sent_total", |n| n > 0.0);
    wait_for_metric(&node, "hearth_webhook_delivered_total", |n| n > 0.0);
    assert!(posts.load(Ordering::SeqCst) > 0 && !collector.spans().is_empty());
    node.end_clean();
    runtime.shutdown_background();
}
