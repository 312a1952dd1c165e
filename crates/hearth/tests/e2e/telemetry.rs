//! Traces arrive where a collector takes them, and what is told to others costs nothing where nobody does: no
//! collector that answers, no room for the log, none for the journal.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::v1;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::Span;
use tonic::{Request, Response, Status};

use crate::http;
use crate::node::{Node, Wish, cannot};
use crate::running::{Running, wait_until_ready};

/// The value of a metric, labels included in its name.
pub fn metric(node: &Node, name: &str) -> f64 {
    let text = http::get(node, "/metrics").body;
    let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    let value = line.and_then(|l| l.rsplit(' ').next()).and_then(|v| v.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {text}"))
}

pub fn wait_for_metric(node: &Node, name: &str, seen: impl Fn(f64) -> bool) {
    let end = Instant::now() + Duration::from_secs(90);
    while !seen(metric(node, name)) {
        assert!(Instant::now() < end, "{name} is {}: {}", metric(node, name), node.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn listener(node: &Node, port: u16) -> TcpListener {
    let bound = hearth_host::net::netns::enter(&node.netns.path(), || {
        Ok(TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port))))
    });
    bound.expect("the namespace").expect("a listener")
}

#[derive(Clone, Default)]
pub struct Collector(Arc<Mutex<Vec<Span>>>);

impl Collector {
    /// What came so far.
    pub fn spans(&self) -> Vec<Span> {
        self.0.lock().expect("spans").clone()
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let resources = request.into_inner().resource_spans;
        let spans = resources.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans);
        self.0.lock().expect("spans").extend(spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn traced<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("00-{TRACE}-{PARENT}-01").parse().expect("metadata");
    request.metadata_mut().insert("traceparent", value);
    request
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn wish(node: &Node, more: &str) {
    node.set_test(&format!("process_vmm = true\n{more}"));
}

#[test]
fn spans_of_a_life_arrive_below_the_callers() {
    if cannot("spans_of_a_life_arrive_below_the_callers", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    wish(&node, "[otlp]\nendpoint = \"http://127.0.0.1:4317\"");
    let listener = listener(&node, 4317);
    listener.set_nonblocking(true).unwrap();
    node.start_daemon();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let collector = Collector::default();
    let got = Arc::clone(&collector.0);
    let mut tasks = tokio::task::JoinSet::new();
    runtime.block_on(async {
        let incoming = tokio::net::TcpListener::from_std(listener).unwrap();
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(incoming);
        let server = tonic::transport::Server::builder().add_service(TraceServiceServer::new(collector));
        tasks.spawn(server.serve_with_incoming(incoming));
        let mut client = SandboxServiceClient::new(http::channel(&node).await);
        let create = v1::CreateRequest {
            name: "g".into(),
            template: "busybox".into(),
            vmm: "process".into(),
            disk_mib: 16,
            ..Default::default()
        };
        let mut progress = client.create(traced(create)).await.unwrap().into_inner();
        while progress.message().await.unwrap().is_some() {}
        let start = v1::ExecStart { sandbox: "g".into(), argv: vec!["true".into()], ..Default::default() };
        let start = v1::ExecInput { input: Some(v1::exec_input::Input::Start(start)) };
        let mut output = client.exec(traced(tokio_stream::once(start))).await.unwrap().into_inner();
        while output.message().await.unwrap().is_some() {}
        client.delete(traced(v1::DeleteRequest { sandbox: "g".into() })).await.unwrap();
    });
    let end = Instant::now() + Duration::from_secs(60);
    let spans = loop {
        let spans: Vec<Span> = got.lock().unwrap().clone();
        let ours: Vec<Span> = spans.into_iter().filter(|s| hex(&s.trace_id) == TRACE).collect();
        let top = ours.iter().filter(|s| hex(&s.parent_span_id) == PARENT).count();
        if top == 3 {
            break ours;
        }
        assert!(Instant::now() < end, "{ours:#?}\n{}", node.log_text());
        std::thread::sleep(Duration::from_millis(50));
    };
    let find =
        |name: &str| spans.iter().find(|s| s.name == name).unwrap_or_else(|| panic!("no {name}: {spans:#?}"));
    let create = find("create");
    for step in hearth_core::steps::Step::ALL {
        let span = find(&format!("create.{step}"));
        assert_eq!(span.parent_span_id, create.span_id, "{step}");
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
    }
    let release = find("release");
    assert_eq!(release.parent_span_id, find("delete").span_id);
    for part in ["stop", "process", "nbd", "cgroup", "slot", "run-directory", "directory"] {
        assert_eq!(find(&format!("release.{part}")).parent_span_id, release.span_id, "{part}");
    }
    assert_eq!(find("exec.connect").parent_span_id, find("exec").span_id);
    assert_eq!(metric(&node, "hearth_traces_dropped_total"), 0.0);
    node.end_clean();
    runtime.shutdown_background();
}

#[test]
fn a_collector_that_never_answers_costs_spans_and_nothing_else() {
    if cannot("a_collector_that_never_answers_costs_spans_and_nothing_else", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    wish(&node, "[otlp]\nendpoint = \"http://127.0.0.1:4317\"");
    // Takes connections and says nothing.
    let _silent = listener(&node, 4317);
    node.start_daemon();
    for name in ["a", "b", "c"] {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
        node.ok(&["rm", name]);
    }
    wait_for_metric(&node, "hearth_traces_dropped_total", |n| n >= 30.0);
    assert_eq!(http::get(&node, "/health").json()["status"], "healthy");
    assert_eq!(metric(&node, "hearth_traces_sent_total"), 0.0);
    let said = node.log_text().lines().filter(|l| l.contains("does not take spans")).count();
    assert_eq!(said, 1, "{}", node.log_text());
    node.end_clean();
}

#[test]
fn a_log_without_room_costs_lines_and_nothing_else() {
    if cannot("a_log_without_room_costs_lines_and_nothing_else", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    wish(&node, "[log]\nfile = \"/dev/full\"\nformat = \"json\"");
    node.start_daemon();
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    wait_for_metric(&node, "hearth_log_lines_lost_total{reason=\"not-written\"}", |n| n > 0.0);
    assert_eq!(http::get(&node, "/health").json()["status"], "healthy");
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    node.end_clean();
}

#[test]
fn a_log_file_has_each_sandboxs_id_in_its_lines_and_no_guests_words() {
    if cannot("a_log_file_has_each_sandboxs_id_in_its_lines_and_no_guests_words", true) {
        return;
    }
    let mut node = Node::new(&Wish::default());
    let log = node.dir.path().join("hearth.log");
    wish(&node, &format!("[log]\nfile = {log:?}\nformat = \"json\""));
    node.start_daemon();
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    let (id, shim) = (node.inspect("a")["id"].clone(), node.inspect("a")["shim_pid"].to_string());
    node.ok(&["exec", "a", "--", "echo", "words of a guest"]);
    node.host("kill", &["-9", &shim]);
    let end = Instant::now() + Duration::from_secs(20);
    while !node.list().as_array().unwrap().is_empty() {
        assert!(Instant::now() < end, "{}", node.log_text());
        std::thread::sleep(Duration::from_millis(20));
    }
    node.stop_daemon();
    let text = std::fs::read_to_string(&log).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let ended = lines.iter().find(|l| l["message"] == "the VM ended").unwrap_or_else(|| panic!("{text}"));
    assert_eq!((&ended["sandbox"], &ended["level"]), (&id, &"INFO".into()));
    assert!(!text.contains("words of a guest"), "{text}");
    assert_eq!(node.log_text(), "", "all of it is in the file");
    std::fs::remove_file(&log).unwrap();
    node.start_daemon();
    node.end_clean();
}

#[test]
fn a_journal_without_room_costs_no_sandbox_and_is_watched_all_the_same() {
    if cannot("a_journal_without_room_costs_no_sandbox_and_is_watched_all_the_same", true) {
        return;
    }
    let node = Node::new(&Wish::default());
    wish(&node, "");
    let journal = node.state.join(&node.instance).join("events");
    std::fs::create_dir_all(&journal).unwrap();
    let serve = node.command(&["serve"]);
    let mut command = Command::new("unshare");
    let script = format!(
        "mount --make-rshared / && mount -t tmpfs -o size=16k tmpfs {0} && \
         ! head -c 1000000 /dev/zero > {0}/full 2>/dev/null; exec \"$@\"",
        journal.display()
    );
    command.args(["--mount", "--propagation", "slave", "sh", "-c", &script, "sh"]);
    command.arg(serve.get_program()).args(serve.get_args());
    for (name, value) in serve.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    let mut daemon = Running::start(command, node.dir.path().join("full.log"));
    wait_until_ready(&node, &daemon);
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    node.ok(&["rm", "a"]);
    wait_for_metric(&node, "hearth_events_lost_total{reason=\"not-written\"}", |n| n > 4.0);
    assert_eq!(http::get(&node, "/health").json()["status"], "healthy");
    let kinds = crate::events::kinds_of(&crate::events::events(&node, &[]), "a");
    assert_eq!(kinds.last().map(String::as_str), Some("sandbox-deleted"), "{kinds:?}");
    assert!(daemon.log_text().contains("events are not written"), "{}", daemon.log_text());
    assert!(daemon.terminate().success());
    node.check_clean();
}
