//! `hearth.v1.SandboxService`. Work runs on the engine's runtime; this thread only passes messages.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::StreamExt as _;
use hearth_api::shim::BlockStatsRequest;
use hearth_api::v1;
use hearth_api::v1::sandbox_service_server::SandboxService;
use hearth_core::block::DiskRate;
use hearth_core::host::Host;
use hearth_core::steps::Step;
use hearth_node::trace::{self, Open, TraceContext};
use hearth_node::{EngineError, NewSandbox, StepStarted, View};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::convert::{self, parse};
use super::{Node, logs, stats, traces};

type Reply<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// For a shim to say what it has counted, which it does at once.
const STATS: Duration = Duration::from_secs(1);

/// The service over one node.
pub(crate) struct Sandboxes<H>(pub(crate) Arc<Node<H>>);

fn new_sandbox(
    request: v1::CreateRequest,
    trace: TraceContext,
) -> Result<(hearth_core::id::TemplateName, NewSandbox), EngineError> {
    if request.template.is_empty() {
        return Err(EngineError::Invalid("no template given; `hearth template ls` lists them".into()));
    }
    let mut env: Vec<(String, String)> = request.env.into_iter().collect();
    env.sort();
    let new = NewSandbox {
        name: if request.name.is_empty() { None } else { Some(parse(&request.name)?) },
        cpus: request.cpus,
        memory_mib: request.memory_mib,
        disk_mib: request.disk_mib,
        timeout_seconds: request.timeout_seconds,
        net: request.net.unwrap_or(true),
        vmm: match request.vmm.as_str() {
            "" | "auto" => None,
            other => Some(parse(other)?),
        },
        env,
        trace,
        disk_rate: DiskRate {
            mib_per_second: request.disk_mib_per_second,
            iops: request.disk_iops,
            burst_ms: request.disk_burst_ms,
        },
    };
    Ok((parse(&request.template)?, new))
}

/// What the shim has counted of its disks; empty if it does not say so in time.
async fn disk_stats(view: &View) -> String {
    let Some(mut shim) = view.shim.clone() else { return String::new() };
    match tokio::time::timeout(STATS, shim.block_stats(BlockStatsRequest {})).await {
        Ok(Ok(answer)) => answer.into_inner().disks,
        // A shim of before this question, one that ends, or one that is very busy: the rest of the answer is as good.
        Ok(Err(_)) | Err(_) => String::new(),
    }
}

fn step_message(step: Step) -> v1::CreateProgress {
    let number = Step::ALL.iter().position(|s| *s == step).map_or(0, |i| i + 1);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let started =
        v1::StepStarted { step: step.to_string(), number: count(number), total: count(Step::ALL.len()) };
    v1::CreateProgress { progress: Some(v1::create_progress::Progress::Step(started)) }
}

#[tonic::async_trait]
impl<H: Host> SandboxService for Sandboxes<H> {
    type CreateStream = Messages<v1::CreateProgress>;
    type ExecStream = Messages<v1::ExecOutput>;
    type LogsStream = Messages<v1::LogsChunk>;

    async fn create(&self, request: Request<v1::CreateRequest>) -> Reply<Self::CreateStream> {
        let trace = traces::parent(request.metadata());
        let (template, new) = new_sandbox(request.into_inner(), trace).map_err(|e| convert::status(&e))?;
        let (out, messages) = mpsc::channel(Step::ALL.len() + 1);
        let node = Arc::clone(&self.0);
        self.0.spawn(async move {
            let (progress, mut steps) = mpsc::channel::<StepStarted>(Step::ALL.len());
            let create = node.engine.create(template, new, progress);
            tokio::pin!(create);
            let created = loop {
                tokio::select! {
                    created = &mut create => break created,
                    Some(StepStarted(step)) = steps.recv() => {
                        if out.send(Ok(step_message(step))).await.is_err() {
                            return;
                        }
                    }
                    // The client went away: dropping the creation takes it back.
                    () = out.closed() => return,
                }
            };
            let last = match created {
                Ok(view) => {
                    let sandbox = convert::sandbox(&view, &node.engine);
                    Ok(v1::CreateProgress { progress: Some(v1::create_progress::Progress::Sandbox(sandbox)) })
                }
                Err(e) => Err(convert::status(&e)),
            };
            while let Ok(StepStarted(step)) = steps.try_recv() {
                if out.send(Ok(step_message(step))).await.is_err() {
                    break;
                }
            }
            // A client that goes away between success and this message has a sandbox it can list and delete.
            drop(out.send(last).await);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn get(&self, request: Request<v1::GetRequest>) -> Reply<v1::GetResponse> {
        let engine = &self.0.engine;
        let v1::GetRequest { sandbox: key, ended } = request.into_inner();
        let mut unknown = engine.unknown().map_err(|e| convert::status(&e))?;
        let sandbox = match unknown.remove(&key) {
            Some(why) => convert::unknown(key, why),
            None => match engine.get(&key) {
                Ok(view) => {
                    let disk_stats = disk_stats(&view).await;
                    v1::Sandbox { disk_stats, ..convert::sandbox(&view, engine) }
                }
                Err(EngineError::NotFound(_)) if ended => {
                    stats::ended(&*engine.ended(&key).map_err(|e| convert::status(&e))?)
                }
                Err(e) => return Err(convert::status(&e)),
            },
        };
        Ok(Response::new(v1::GetResponse { sandbox: Some(sandbox) }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Reply<v1::ListResponse> {
        let engine = &self.0.engine;
        let views = engine.list().map_err(|e| convert::status(&e))?;
        let unknown = engine.unknown().map_err(|e| convert::status(&e))?;
        let known = views.iter().map(|v| convert::sandbox(v, engine));
        let mut sandboxes: Vec<v1::Sandbox> =
            known.chain(unknown.into_iter().map(|(id, why)| convert::unknown(id, why))).collect();
        if request.into_inner().ended {
            let ended = engine.all_ended().map_err(|e| convert::status(&e))?;
            // One that is about to go is kept already.
            let gone = ended.iter().filter(|k| views.iter().all(|v| v.record.id != k.id));
            sandboxes.extend(gone.map(|kept| stats::ended(kept)));
        }
        Ok(Response::new(v1::ListResponse { sandboxes }))
    }

    async fn delete(&self, request: Request<v1::DeleteRequest>) -> Reply<v1::DeleteResponse> {
        let trace = traces::parent(request.metadata());
        let key = request.into_inner().sandbox;
        let node = Arc::clone(&self.0);
        self.0.call(async move { node.engine.delete_within(&key, &trace).await }).await?;
        Ok(Response::new(v1::DeleteResponse {}))
    }

    async fn exec(&self, request: Request<Streaming<v1::ExecInput>>) -> Reply<Self::ExecStream> {
        let parent = traces::parent(request.metadata());
        let mut input = request.into_inner();
        let first = input.message().await?;
        let Some(v1::exec_input::Input::Start(start)) = first.and_then(|m| m.input) else {
            return Err(Status::invalid_argument("the first message of an exec must be its start"));
        };
        let mut span = Open::begin("exec", &parent, &start.sandbox);
        let connect = async |_| self.0.engine.connected(&start.sandbox).await;
        let shim = trace::within("exec.connect", &span.context(), connect).await;
        let mut shim = shim.map_err(|e| convert::status(&e))?;
        let start = v1::ExecInput { input: Some(v1::exec_input::Input::Start(start)) };
        // An input that breaks off is an input that ends: the shim then ends the command's stdin.
        let rest = tokio_stream::StreamExt::map_while(input, Result::ok);
        let messages = futures::stream::once(async { start }).chain(rest);
        let place = hearth_core::steps::Place::Exec;
        let faults = self.0.engine.faults();
        let begin = async |_| faults.around(place, Status::internal, shim.exec(messages)).await;
        let output = trace::within("exec.start", &span.context(), begin).await?.into_inner();
        // The span lives as long as the stream, and ends with it.
        let output = output.inspect(move |message| {
            if let Err(status) = message {
                span.failed(status.message());
            }
        });
        Ok(Response::new(Box::pin(output)))
    }

    async fn signal_exec(&self, request: Request<v1::SignalExecRequest>) -> Reply<v1::SignalExecResponse> {
        let request = request.into_inner();
        let mut shim = self.0.engine.connected(&request.sandbox).await.map_err(|e| convert::status(&e))?;
        shim.signal_exec(request).await
    }

    async fn resize_exec(&self, request: Request<v1::ResizeExecRequest>) -> Reply<v1::ResizeExecResponse> {
        let request = request.into_inner();
        let mut shim = self.0.engine.connected(&request.sandbox).await.map_err(|e| convert::status(&e))?;
        shim.resize_exec(request).await
    }

    async fn stats(&self, request: Request<v1::StatsRequest>) -> Reply<v1::StatsResponse> {
        let node = Arc::clone(&self.0);
        let key = request.into_inner().sandbox;
        self.0.call(async move { stats::of(&node.engine, &key).await }).await.map(Response::new)
    }

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        let request = request.into_inner();
        let (path, view) = self.0.engine.console(&request.sandbox).map_err(|e| convert::status(&e))?;
        let (out, messages) = mpsc::channel(4);
        self.0.spawn(logs::follow(path, view, request.follow, out));
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}
