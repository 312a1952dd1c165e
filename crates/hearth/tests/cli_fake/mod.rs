//! A daemon that plays a script instead of running sandboxes, and writes down what it is asked.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_api::v1::create_progress::Progress;
use hearth_api::v1::exec_input::Input;
use hearth_api::v1::exec_output::Output;
use hearth_api::v1::sandbox_service_server::{SandboxService, SandboxServiceServer};
use hearth_api::v1::{
    CreateProgress, CreateRequest, DeleteRequest, DeleteResponse, ExecExit, ExecInput, ExecOutput,
    ExecStarted, GetRequest, GetResponse, ListRequest, ListResponse, LogsChunk, LogsRequest,
    ResizeExecRequest, ResizeExecResponse, Sandbox, SignalExecRequest, SignalExecResponse, StatsRequest,
    StatsResponse, StepStarted, StepTime,
};
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::{ErrorDetails, StatusExt as _};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Exit(i32, i32),
    /// stdin comes back on stdout, until its end.
    Echo,
    /// Runs until a signal, and dies of it.
    UntilSignal,
    /// As above, but only of signal 9.
    IgnoreSignals,
    /// Writes until a signal.
    Endless,
}

/// What the fake does.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    act: Act,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    starting: u32,
    slow_create: bool,
    refuse: Option<(Code, &'static str)>,
}

impl Script {
    pub(crate) fn new() -> Self {
        Self {
            act: Act::Exit(0, 0),
            stdout: vec![],
            stderr: vec![],
            starting: 0,
            slow_create: false,
            refuse: None,
        }
    }
    pub(crate) fn exit(self, code: i32) -> Self {
        Self { act: Act::Exit(code, 0), ..self }
    }
    pub(crate) fn killed(self, signal: i32) -> Self {
        Self { act: Act::Exit(128 + signal, signal), ..self }
    }
    pub(crate) fn echo(self) -> Self {
        Self { act: Act::Echo, ..self }
    }
    pub(crate) fn until_signal(self) -> Self {
        Self { act: Act::UntilSignal, ..self }
    }
    pub(crate) fn ignore_signals(self) -> Self {
        Self { act: Act::IgnoreSignals, ..self }
    }
    pub(crate) fn endless(self) -> Self {
        Self { act: Act::Endless, ..self }
    }
    pub(crate) fn stdout(self, data: &[u8]) -> Self {
        Self { stdout: data.to_vec(), ..self }
    }
    pub(crate) fn stderr(self, data: &[u8]) -> Self {
        Self { stderr: data.to_vec(), ..self }
    }
    /// Says "starting" to so many calls first.
    pub(crate) fn starting(self, calls: u32) -> Self {
        Self { starting: calls, ..self }
    }
    /// Never gets further than its first step.
    pub(crate) fn slow_create(self) -> Self {
        Self { slow_create: true, ..self }
    }
    pub(crate) fn refuse(self, code: Code, why: &'static str) -> Self {
        Self { refuse: Some((code, why)), ..self }
    }
}

/// The running fake.
pub(crate) struct Daemon {
    addr: String,
    calls: Arc<Mutex<Vec<String>>>,
    _runtime: tokio::runtime::Runtime,
}

impl Daemon {
    pub(crate) fn start(script: Script) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let calls = Arc::new(Mutex::new(vec![]));
        let fake = Fake {
            starting: Mutex::new(script.starting),
            lingering: Mutex::new(3),
            script,
            calls: Arc::clone(&calls),
            signal: watch::channel(0).0,
        };
        let serve = tonic::transport::Server::builder()
            .add_service(SandboxServiceServer::new(fake))
            .serve_with_incoming(TcpListenerStream::new(listener));
        // Ends with the runtime.
        drop(runtime.spawn(serve));
        Self { addr, calls, _runtime: runtime }
    }

    pub(crate) fn addr(&self) -> &str {
        &self.addr
    }

    /// What was asked so far.
    pub(crate) fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }
}

struct Fake {
    script: Script,
    starting: Mutex<u32>,
    /// How often `get` still finds a sandbox whose create was given up.
    lingering: Mutex<u32>,
    calls: Arc<Mutex<Vec<String>>>,
    signal: watch::Sender<i32>,
}

fn sandbox(name: &str) -> Sandbox {
    let step = |step: &str, micros| StepTime { step: step.into(), micros };
    Sandbox {
        id: "id0".into(),
        name: name.into(),
        template: "base".into(),
        state: "running".into(),
        vmm: "qemu".into(),
        created_at_ms: 1,
        steps: vec![step("record", 200), step("boot", 1_500)],
        ..Sandbox::default()
    }
}

impl Fake {
    fn note(&self, call: String) -> Result<(), Status> {
        self.calls.lock().unwrap().push(call);
        let mut left = self.starting.lock().unwrap();
        if *left > 0 {
            *left -= 1;
            let details = ErrorDetails::with_retry_info(Some(Duration::from_millis(100)));
            return Err(Status::with_error_details(Code::Unavailable, "scanning", details));
        }
        Ok(())
    }
}

type Reply<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl SandboxService for Fake {
    type CreateStream = Reply<CreateProgress>;
    type ExecStream = Reply<ExecOutput>;
    type LogsStream = Reply<LogsChunk>;

    async fn create(&self, request: Request<CreateRequest>) -> Result<Response<Self::CreateStream>, Status> {
        let request = request.into_inner();
        self.note(format!("create {}", request.name))?;
        if let Some((code, why)) = self.script.refuse {
            return Err(Status::new(code, why));
        }
        let step = |name: &str, number| {
            Ok(CreateProgress {
                progress: Some(Progress::Step(StepStarted { step: name.into(), number, total: 2 })),
            })
        };
        let made = Ok(CreateProgress { progress: Some(Progress::Sandbox(sandbox(&request.name))) });
        let (tx, rx) = mpsc::channel(4);
        tx.send(step("record", 1)).await.unwrap();
        if self.script.slow_create {
            // Held open by the stream's own end only.
            let forever = futures::StreamExt::chain(ReceiverStream::new(rx), futures::stream::pending());
            return Ok(Response::new(Box::pin(forever)));
        }
        tx.send(step("boot", 2)).await.unwrap();
        tx.send(made).await.unwrap();
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        let name = request.into_inner().sandbox;
        self.note(format!("get {name}"))?;
        let mut found = sandbox(&name);
        if self.script.slow_create {
            let mut left = self.lingering.lock().unwrap();
            if *left == 0 {
                return Err(Status::not_found("gone"));
            }
            *left -= 1;
            found.state = "deleting".into();
        }
        Ok(Response::new(GetResponse { sandbox: Some(found) }))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        Ok(Response::new(ListResponse { sandboxes: vec![sandbox("web")] }))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        let name = request.into_inner().sandbox;
        self.note(format!("delete {name}"))?;
        if name == "missing" {
            return Err(Status::not_found("there is no sandbox \"missing\""));
        }
        Ok(Response::new(DeleteResponse {}))
    }

    async fn exec(
        &self,
        request: Request<Streaming<ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        let mut input = request.into_inner();
        let Some(ExecInput { input: Some(Input::Start(start)) }) = input.message().await? else {
            return Err(Status::invalid_argument("the first message is a start"));
        };
        self.note(format!("exec {} {:?} {:?}", start.sandbox, start.argv, start.env))?;
        if let Some(size) = start.tty {
            self.note(format!("tty {}x{}", size.rows, size.cols))?;
        }
        let (tx, rx) = mpsc::channel(4);
        let (script, calls, signal) = (self.script.clone(), Arc::clone(&self.calls), self.signal.subscribe());
        let play = async move {
            // That the client left is what some tests are about.
            drop(play(script, calls, signal, input, tx).await);
        };
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(play);
        // The tasks live as long as the answer.
        let answer = futures::StreamExt::map(ReceiverStream::new(rx), move |item| {
            let _keep = &tasks;
            Ok(ExecOutput { output: Some(item) })
        });
        Ok(Response::new(Box::pin(answer)))
    }

    async fn signal_exec(
        &self,
        request: Request<SignalExecRequest>,
    ) -> Result<Response<SignalExecResponse>, Status> {
        let request = request.into_inner();
        assert_eq!(request.exec_id, "e1");
        self.note(format!("signal {}", request.signal))?;
        self.signal.send_replace(request.signal);
        Ok(Response::new(SignalExecResponse {}))
    }

    async fn resize_exec(
        &self,
        _: Request<ResizeExecRequest>,
    ) -> Result<Response<ResizeExecResponse>, Status> {
        Ok(Response::new(ResizeExecResponse {}))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        Ok(Response::new(StatsResponse::default()))
    }

    async fn logs(&self, _: Request<LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let chunk = |data: &[u8]| Ok(LogsChunk { data: data.to_vec() });
        Ok(Response::new(Box::pin(tokio_stream::iter([chunk(b"con\xff"), chunk(b"sole")]))))
    }
}

async fn play(
    script: Script,
    calls: Arc<Mutex<Vec<String>>>,
    mut signal: watch::Receiver<i32>,
    mut input: Streaming<ExecInput>,
    tx: mpsc::Sender<Output>,
) -> Result<(), mpsc::error::SendError<Output>> {
    tx.send(Output::Started(ExecStarted { exec_id: "e1".into(), pid: 2 })).await?;
    calls.lock().unwrap().push("started".into());
    for chunk in script.stdout.chunks(65_536) {
        tx.send(Output::Stdout(chunk.to_vec())).await?;
    }
    if !script.stderr.is_empty() {
        tx.send(Output::Stderr(script.stderr)).await?;
    }
    let died = |deadly: fn(i32) -> bool| {
        let mut signal = signal.clone();
        async move { signal.wait_for(|n| deadly(*n)).await.map(|n| *n).unwrap_or(0) }
    };
    let (status, number) = match script.act {
        Act::Exit(code, number) => (code, number),
        Act::Echo => loop {
            match input.message().await.ok().flatten().and_then(|m| m.input) {
                Some(Input::Stdin(data)) => tx.send(Output::Stdout(data)).await?,
                _ => break (0, 0),
            }
        },
        Act::UntilSignal => {
            let n = died(|n| n != 0).await;
            (128 + n, n)
        }
        Act::IgnoreSignals => {
            let n = died(|n| n == 9).await;
            (128 + n, n)
        }
        Act::Endless => loop {
            let n = *signal.borrow_and_update();
            if n != 0 {
                break (128 + n, n);
            }
            tx.send(Output::Stdout(b"y\n".repeat(4_096))).await?;
        },
    };
    tx.send(Output::Exit(ExecExit { status, signal: number })).await
}
