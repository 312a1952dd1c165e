//! `hearth.v1.NodeService`. Runs on the front's thread and answers from the first moment, whatever the engine
//! does.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hearth_api::v1;
use hearth_api::v1::node_service_server::NodeService;
use hearth_core::host::Host;
use hearth_core::lifecycle::{SandboxState, SlotState};
use hearth_core::network::SlotIndex;
use hearth_core::record::Record;
use hearth_core::resource::{Kind, Resource};
use hearth_node::{Ask, BooksNow, Desired, Found, KindProgress, Outcome, Pass, Phase, ReclaimProgress, Work};
use tonic::{Request, Response, Status};

use super::{Node, convert};

/// A stream looks this often; that is also how often it sends at most.
const LOOK: Duration = Duration::from_millis(250);

type Reply<T> = Result<Response<T>, Status>;
type Statuses = Pin<Box<dyn Stream<Item = Result<v1::NodeStatus, Status>> + Send>>;

/// The service over one node.
pub(crate) struct NodeInfo<H>(pub(crate) Arc<Node<H>>);

impl<H: Host> NodeInfo<H> {
    fn ask(&self, ask: Ask) -> Result<v1::NodeStatus, Status> {
        self.0.engine.ask(ask).map_err(|e| convert::status(&e))?;
        Ok(node_status(&self.0))
    }

    /// The status now and at each change, until `last` says that this was the last one, or the daemon ends.
    fn follow(
        &self,
        last: impl Fn(&v1::NodeStatus) -> bool + Send + 'static,
    ) -> impl Stream<Item = Result<v1::NodeStatus, Status>> + Send + 'static {
        let node = Arc::clone(&self.0);
        let begin = (node, None::<v1::NodeStatus>, last);
        futures::stream::unfold(begin, |(node, told, last)| async move {
            if told.as_ref().is_some_and(&last) {
                return None;
            }
            loop {
                let now = node_status(&node);
                if told.as_ref().is_none_or(|told| differ(told, &now)) {
                    return Some((Ok(now.clone()), (node, Some(now), last)));
                }
                if node.ended.is_cancelled() {
                    return None;
                }
                // Once more after the end: why the daemon ends is news.
                tokio::select! {
                    () = tokio::time::sleep(LOOK) => {}
                    () = node.ended.cancelled() => {}
                }
            }
        })
    }
}

/// Whether there is news. The estimate alone is none: it changes all the time.
fn differ(told: &v1::NodeStatus, now: &v1::NodeStatus) -> bool {
    let plain = |status: &v1::NodeStatus| {
        let mut status = status.clone();
        if let Some(reclaim) = &mut status.reclaim {
            reclaim.estimate_ms = None;
        }
        status
    };
    plain(told) != plain(now)
}

#[tonic::async_trait]
impl<H: Host> NodeService for NodeInfo<H> {
    type WatchStream = Statuses;
    type DrainStream = Statuses;

    async fn info(&self, _: Request<v1::InfoRequest>) -> Reply<v1::InfoResponse> {
        let node = &self.0;
        let config = node.engine.config();
        Ok(Response::new(v1::InfoResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            instance: config.layout.instance.to_string(),
            pid: std::process::id(),
            started_at_ms: node.started_at_ms,
            state_dir: config.state_dir.display().to_string(),
            run_dir: config.run_dir.display().to_string(),
            vmm: config.vmms.auto.to_string(),
            vmm_reason: config.vmms.auto_reason.clone(),
            slots: node.engine.slot_counts().into_iter().collect(),
            slot_capacity: config.layout.cidr.slot_capacity(),
            node: Some(node_status(node)),
        }))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Reply<Self::WatchStream> {
        Ok(Response::new(Box::pin(self.follow(|_| false))))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Reply<Self::DrainStream> {
        let wait = request.into_inner().wait;
        self.ask(Ask::Drain)?;
        let draining = Desired::Draining { from_standby: false }.as_str();
        let last = move |now: &v1::NodeStatus| !wait || now.drained || now.desired != draining;
        Ok(Response::new(Box::pin(self.follow(last))))
    }

    async fn undrain(&self, _: Request<v1::UndrainRequest>) -> Reply<v1::NodeStatus> {
        self.ask(Ask::Undrain).map(Response::new)
    }

    async fn standby(&self, _: Request<v1::StandbyRequest>) -> Reply<v1::NodeStatus> {
        self.ask(Ask::Standby).map(Response::new)
    }

    async fn activate(&self, _: Request<v1::ActivateRequest>) -> Reply<v1::NodeStatus> {
        self.ask(Ask::Activate).map(Response::new)
    }

    async fn reconcile(&self, request: Request<v1::ReconcileRequest>) -> Reply<v1::ReconcileResponse> {
        let (engine, dry_run) = (Arc::clone(&self.0.engine), request.into_inner().dry_run);
        let pass = self.0.call(async move { engine.reconcile(dry_run).await }).await?;
        Ok(Response::new(pass_message(pass)))
    }

    async fn books(&self, _: Request<v1::BooksRequest>) -> Reply<v1::BooksResponse> {
        let engine = &self.0.engine;
        let books = engine.books_now().map_err(|e| convert::status(&e))?;
        Ok(Response::new(books_message(engine.config().layout.instance.to_string(), books)))
    }
}

fn books_message(instance: String, books: BooksNow) -> v1::BooksResponse {
    let slot = |(slot, state): (SlotIndex, SlotState)| {
        let word = state.as_str().to_owned();
        let why = match state {
            SlotState::Foreign(why) | SlotState::Stuck(why) => why,
            _ => String::new(),
        };
        v1::BookedSlot { slot: slot.get(), state: word, why }
    };
    let sandbox = |(record, state): (Record, SandboxState)| v1::BookedSandbox {
        id: record.id.to_string(),
        name: record.name.to_string(),
        state: state.to_string(),
        slot: record.slot.map_or(0, SlotIndex::get),
    };
    let unknown = |id| v1::BookedSandbox { id, state: convert::UNKNOWN.into(), ..Default::default() };
    let releasing = |resource: Resource| match resource {
        Resource::Cgroup { name } => Some(name),
        Resource::Directory { path } => Some(path.display().to_string()),
        _ => None,
    };
    v1::BooksResponse {
        instance,
        pid: std::process::id(),
        slots: books.slots.into_iter().map(slot).collect(),
        sandboxes: books
            .sandboxes
            .into_iter()
            .map(sandbox)
            .chain(books.unknown.into_iter().map(unknown))
            .collect(),
        releasing: books.releasing.into_iter().filter_map(releasing).collect(),
    }
}

fn pass_message(pass: Pass) -> v1::ReconcileResponse {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let finding = |found: Found| v1::Finding {
        kind: found.finding.kind().to_string(),
        what: found.finding.to_string(),
        evidence: found.facts,
        sightings: found.sightings,
        age_ms: ms(found.age),
        outcome: found.outcome.as_str().into(),
        why: if let Outcome::Failed(why) = found.outcome { why } else { String::new() },
    };
    v1::ReconcileResponse {
        result: pass.result.as_str().into(),
        reason: pass.reason,
        objects: u64::try_from(pass.objects).unwrap_or(u64::MAX),
        took_ms: ms(pass.took),
        findings: pass.findings.into_iter().map(finding).collect(),
    }
}

/// Everything a client is told of the node's status.
fn node_status<H: Host>(node: &Node<H>) -> v1::NodeStatus {
    let report = node.report();
    let work = node.engine.work();
    let desired = node.engine.desired();
    v1::NodeStatus {
        status: report.status.as_str().into(),
        reason: report.reason,
        since_ms: report.since_ms,
        desired: desired.as_str().into(),
        phase: match &*node.engine.phase().borrow() {
            Phase::Starting(_) => "starting",
            Phase::Ready => "ready",
            Phase::Failed(_) => "failed",
        }
        .into(),
        reclaim: Some(reclaim(&node.engine.reclaim(), &node.engine.leftovers())),
        drained: matches!(desired, Desired::Draining { .. }) && work.is_some_and(|w| w.total() == 0),
        work: work.map(work_message),
    }
}

fn work_message(work: Work) -> v1::Work {
    v1::Work {
        creating: work.creating,
        live: work.running,
        deleting: work.exited + work.deleting,
        stuck: work.stuck,
    }
}

fn reclaim(progress: &ReclaimProgress, kinds: &BTreeMap<Kind, KindProgress>) -> v1::Reclaim {
    v1::Reclaim {
        state: progress.state.as_str().into(),
        total: progress.total,
        done: progress.done,
        failed: progress.failed,
        estimate_ms: progress.estimate().map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
        kinds: kinds
            .iter()
            .map(|(kind, p)| {
                let leftovers = v1::Leftovers {
                    leaked: p.leaked,
                    stuck: p.stuck,
                    reclaimed: p.reclaimed,
                    failures: p.failures,
                };
                (kind.to_string(), leftovers)
            })
            .collect(),
    }
}
