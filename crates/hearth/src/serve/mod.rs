//! `hearth serve`: takes the lock, binds the port, then starts the engine. From the bind on every question
//! is answered, if only with "starting" and the reason.

mod bind;
mod checks;
mod convert;
mod events;
mod front;
mod logs;
mod metrics;
mod node;
mod sandboxes;
mod signals;
mod standalone;
mod stats;
mod status;
mod supervisor;
mod templates;
mod tls;
mod traces;
pub(crate) mod vmms;
mod webhook;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use hearth_api::v1::event_service_server::EventServiceServer;
use hearth_api::v1::node_service_server::NodeServiceServer;
use hearth_api::v1::sandbox_service_server::SandboxServiceServer;
use hearth_api::v1::template_service_server::TemplateServiceServer;
use hearth_core::event::EventKind;
use hearth_core::host::Host;
use hearth_host::kernel_host::{HostConfig, KernelHost};
use hearth_host::lock::InstanceClaim;
use hearth_node::{
    Ask, Engine, EngineConfig, EngineError, Events, FirecrackerDisk, JournalConfig, KeepExits, Phase,
    Reclaim, ReclaimMode, Reconcile, ReconcileAction,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic_health::pb::health_server::{Health, HealthServer};

use crate::config::{Config, ShutdownMode};
use crate::logging::LogLines;
use bind::Place;
use front::{Front, HealthSource};
use metrics::Told;
use signals::Signals;
use status::{Report, Status, StatusCell};
use supervisor::Supervisor;

pub(crate) use standalone::Standalone;

/// How long the release of one resource may take before a sandbox counts as stuck.
const RELEASE_DEADLINE: Duration = Duration::from_secs(10);
/// How long beyond three intervals the reconcile loop may not get on before the node is unhealthy: longer than any one
/// scan or release takes.
const RECONCILE_PATIENCE: Duration = Duration::from_secs(60);
/// How long a guest may take to be ready: plain emulation on a loaded machine needs tens of seconds.
const BOOT_DEADLINE: Duration = Duration::from_secs(180);
/// Console log of one sandbox: two parts of this size.
const CONSOLE_CAP_BYTES: u64 = 1024 * 1024;
/// Threads of the engine; host calls have threads of their own.
const WORKERS: usize = 2;
/// How long the last events may take to be written.
const JOURNAL: Duration = Duration::from_secs(5);
/// How often the front looks at the status when nothing tells it to.
const LOOK: Duration = Duration::from_millis(250);

/// What the services share.
pub(crate) struct Node<H> {
    pub(crate) engine: Arc<Engine<H>>,
    pub(crate) status: StatusCell,
    pub(crate) started_at_ms: u64,
    /// Whether clients must send a token.
    pub(crate) has_token: bool,
    /// What came of telling others.
    pub(crate) told: Told,
    /// Whether each sandbox has metrics of its own.
    pub(crate) per_sandbox: bool,
    /// The engine's runtime.
    runtime: tokio::runtime::Handle,
    tasks: TaskTracker,
    /// The daemon's last moment: what only watches ends.
    ended: CancellationToken,
}

impl<H: Host> Node<H> {
    /// The status at this moment. Waits for nothing. For the front's thread alone: two that look at once
    /// could take an older answer for a change.
    pub(crate) fn report(&self) -> Report {
        let phase = self.engine.phase().borrow().clone();
        self.status.look(&phase, self.engine.desired())
    }

    /// Runs a task on the engine's runtime; it is joined when the daemon ends.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.tasks.spawn_on(task, &self.runtime));
    }

    /// Runs a call on the engine's runtime. It goes on when the caller goes away.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    ) -> Result<T, tonic::Status> {
        match self.tasks.spawn_on(call, &self.runtime).await {
            Ok(result) => result.map_err(|e| convert::status(&e)),
            Err(e) => Err(tonic::Status::internal(format!("the call's task failed: {e}"))),
        }
    }
}

/// Runs the daemon until a signal ends it.
///
/// # Errors
/// If the instance is taken, the port cannot be bound or the configuration does not fit the host.
pub(crate) fn run(config: &Config, log: LogLines) -> anyhow::Result<ExitCode> {
    let main = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signals = main.block_on(async { Signals::new() })?;
    let supervisor = Supervisor::from_env();
    let Some((lock, place)) = main.block_on(bind::take(config, &mut signals, &supervisor))? else {
        return Ok(ExitCode::SUCCESS);
    };
    let daemon = Daemon::start(config, place, supervisor, log)?;
    tracing::info!(listen = %daemon.address, instance = %config.instance, pid = std::process::id(), "listening");
    let mut phase = daemon.node.engine.phase();
    let ended = main.block_on(async {
        tokio::select! {
            signal = signals.next() => Ok(signal),
            failed = phase.wait_for(|p| matches!(p, Phase::Failed(_))) => Err(match failed.as_deref() {
                Ok(Phase::Failed(why)) => why.clone(),
                _ => "the engine is gone".to_owned(),
            }),
        }
    });
    match ended {
        Ok(signal) => {
            daemon.end(config, signal);
            drop(lock);
            Ok(ExitCode::SUCCESS)
        }
        Err(why) => {
            daemon.end(config, "the start failed");
            drop(lock);
            bail!("cannot start: {why}")
        }
    }
}

/// A running daemon, without the lock.
struct Daemon {
    address: SocketAddr,
    runtime: tokio::runtime::Runtime,
    node: Arc<Node<KernelHost>>,
    front: Front,
    host: Arc<KernelHost>,
    supervisor: Supervisor,
    /// Held to the end: nobody else acts under this instance's name.
    _claim: InstanceClaim,
}

impl Daemon {
    fn start(config: &Config, place: Place, supervisor: Supervisor, log: LogLines) -> anyhow::Result<Self> {
        let Place { listener, claim } = place;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("engine")
            .enable_all()
            .build()?;
        let host = KernelHost::new(HostConfig {
            layout: config.slot_layout(),
            state_dir: config.instance_state_dir(),
            run_dir: config.instance_run_dir(),
        })?;
        let host = Arc::new(match config.backups() {
            Some(backups) => host.with_backups(backups),
            None => host,
        });
        if let Err(e) = hearth_host::process::raise_nofile_limit() {
            tracing::warn!("the limit of open files stays low: {e}");
        }
        let told = Told::new(log.clone());
        let webhook = webhook::Webhook::new(config, Arc::clone(&told.webhook))?;
        let traces = traces::Traces::begin(config, Arc::clone(&told.traces))?;
        let engine = Engine::new(Arc::clone(&host), engine_config(config, host.boot_id(), log)?);
        let events = engine.events().clone();
        let event = Events::now(EventKind::DaemonStarted).with("pid", std::process::id());
        events.tell(event.with("version", env!("CARGO_PKG_VERSION")).with("listen", address));
        let node = Arc::new(Node {
            engine,
            status: StatusCell::new(events.clone()),
            started_at_ms: now_ms(),
            has_token: config.token.is_some(),
            per_sandbox: config.metrics.per_sandbox,
            told,
            runtime: runtime.handle().clone(),
            tasks: TaskTracker::new(),
            ended: CancellationToken::new(),
        });
        let front = Front::start(listener, app(Arc::clone(&node), config.token.clone(), supervisor.clone()))?;
        if let Some(webhook) = webhook {
            node.spawn(webhook.run(node.engine.events().clone(), node.ended.clone()));
        }
        if let Some(traces) = traces {
            node.spawn(traces.run(node.ended.clone()));
        }
        let starting = Arc::clone(&node);
        // The phase tells its failure.
        node.spawn(async move { drop(starting.engine.start().await) });
        let checked = Arc::clone(&node);
        node.spawn(async move { checks::run(&checked, checked.ended.clone()).await });
        Ok(Self { address, runtime, node, front, host, supervisor, _claim: claim })
    }

    /// What happens to running sandboxes, as configured; tells what is left of what had to go.
    async fn settle(&self, config: &Config) -> Vec<String> {
        let engine = &self.node.engine;
        match config.shutdown.mode {
            ShutdownMode::Detach => vec![],
            ShutdownMode::Kill => engine.delete_all().await,
            ShutdownMode::Drain => {
                let bound = Duration::from_secs(config.shutdown.drain_seconds);
                if let Err(e) = engine.ask(Ask::Drain) {
                    tracing::error!("{e}");
                }
                tracing::info!(seconds = bound.as_secs(), "draining: waiting for sandboxes to end");
                if !engine.drained(bound).await {
                    tracing::warn!("not drained; what is left goes on without a daemon");
                }
                vec![]
            }
        }
    }

    /// Ends as configured and tells what is left, if anything.
    fn end(self, config: &Config, why: &str) {
        let node = &self.node;
        self.supervisor.stopping(match config.shutdown.mode {
            ShutdownMode::Drain => Duration::from_secs(config.shutdown.drain_seconds),
            ShutdownMode::Detach | ShutdownMode::Kill => Duration::ZERO,
        });
        node.engine.events().tell(Events::now(EventKind::DaemonEnding).because(why));
        node.status.end(format!("{why}: shutting down"));
        node.engine.close("it is shutting down");
        let left = self.runtime.block_on(async {
            let mut left = vec![];
            let second = async { anyhow::Ok(Signals::new()?.next().await) };
            tokio::select! {
                gone = self.settle(config) => left.extend(gone),
                Ok(signal) = second => left.push(format!("what was waited for: a second {signal} came")),
            }
            left.extend(node.engine.detach().await);
            left
        });
        for what in left {
            tracing::warn!("left behind, the next start takes it up: {what}");
        }
        // With nobody left in it, the instance's own cgroup has no use until the next start.
        if let Err(e) = self.host.cgroups().remove_root() {
            tracing::debug!("{}", hearth_node::chain(&e));
        }
        node.ended.cancel();
        self.front.stop();
        if !node.engine.events().close(JOURNAL) {
            tracing::warn!("the last events are not written");
        }
        self.runtime.shutdown_timeout(Duration::from_secs(5));
    }
}

/// What gRPC health can be asked for; the empty name is the whole.
const SERVICES: [&str; 5] = [
    "",
    "hearth.v1.EventService",
    "hearth.v1.SandboxService",
    "hearth.v1.TemplateService",
    "hearth.v1.NodeService",
];

async fn app(node: Arc<Node<KernelHost>>, token: Option<String>, supervisor: Supervisor) -> axum::Router {
    let (reporter, health) = tonic_health::server::health_reporter();
    // The reporter begins with "serving", which is not true yet.
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    let watched = Arc::clone(&node);
    let follow = async move {
        let mut phase = watched.engine.phase();
        let mut told = None;
        while !watched.ended.is_cancelled() {
            // Serving means that sandboxes are created here: who balances creates asks this.
            let status = match watched.report().status {
                Status::Healthy => tonic_health::ServingStatus::Serving,
                _ => tonic_health::ServingStatus::NotServing,
            };
            if told.replace(status) != Some(status) {
                for service in SERVICES {
                    reporter.set_service_status(service, status).await;
                }
            }
            // A loop that stopped sends nothing, so it is looked for.
            tokio::select! {
                _ = phase.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
                () = watched.ended.cancelled() => {}
            }
        }
    };
    // Ends with the daemon, on the front's own thread.
    drop(node.tasks.spawn_on(follow, &tokio::runtime::Handle::current()));
    let routes = services(&node, health);
    let told = Arc::clone(&node);
    let told = supervisor.follow(move || {
        supervisor::status_text(&told.report(), told.engine.sandbox_count(), &told.engine.reclaim())
    });
    drop(node.tasks.spawn_on(told, &tokio::runtime::Handle::current()));
    let (reported, counted, measured) = (Arc::clone(&node), Arc::clone(&node), node);
    let source = HealthSource {
        report: Box::new(move || reported.report()),
        engine: Box::new(move || (counted.engine.sandbox_count(), counted.engine.reclaim())),
        metrics: Box::new(move || metrics::render(&measured)),
    };
    front::router(routes.into_axum_router(), source, token)
}

fn services(node: &Arc<Node<KernelHost>>, health: HealthServer<impl Health>) -> tonic::service::Routes {
    let mut routes = tonic::service::Routes::new(health)
        .add_service(SandboxServiceServer::new(sandboxes::Sandboxes(Arc::clone(node))))
        .add_service(TemplateServiceServer::new(templates::Templates(Arc::clone(node))))
        .add_service(NodeServiceServer::new(node::NodeInfo(Arc::clone(node))))
        .add_service(EventServiceServer::new(events::EventStreams(Arc::clone(node))));
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(hearth_api::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    match (builder().build_v1(), builder().build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => routes = routes.add_service(v1).add_service(v1alpha),
        (Err(e), _) | (_, Err(e)) => tracing::error!("no gRPC reflection: {e}"),
    }
    routes
}

fn engine_config(config: &Config, boot_id: &str, log: LogLines) -> anyhow::Result<EngineConfig> {
    Ok(EngineConfig {
        layout: config.slot_layout(),
        store_dir: config.state_dir.clone(),
        state_dir: config.instance_state_dir(),
        run_dir: config.instance_run_dir(),
        slot_pool: config.network.slot_pool,
        dns: config.network.dns.clone(),
        disk_rate: config.disk,
        firecracker_disk: match config.firecracker_disk {
            crate::config::FirecrackerDisk::Auto => FirecrackerDisk::Auto,
            crate::config::FirecrackerDisk::File => FirecrackerDisk::File,
            crate::config::FirecrackerDisk::Nbd => FirecrackerDisk::Nbd,
        },
        nbd_devices: config.nbd_devices,
        chunk_cache_mib: config.block.cache_mib,
        shim_program: std::env::current_exe().context("the path of this binary")?,
        guest_program: vmms::guest_program(config),
        vmms: vmms::find(config),
        failpoints: config.failpoints.clone(),
        // The place where it died would be missing from the log.
        kill9: hearth_node::Kill9::new(move || {
            log.settle(Duration::from_secs(1));
            hearth_host::process::kill_self();
        }),
        reclaim: Reclaim {
            mode: match config.reclaim.mode {
                crate::config::ReclaimMode::Background => ReclaimMode::Background,
                crate::config::ReclaimMode::Blocking => ReclaimMode::Blocking,
                crate::config::ReclaimMode::Off => ReclaimMode::Off,
            },
            parallelism: usize::try_from(config.reclaim.parallelism)?,
            grace: Duration::from_secs(config.reclaim.grace_seconds),
            budget: (config.reclaim.budget_seconds > 0)
                .then(|| Duration::from_secs(config.reclaim.budget_seconds)),
            budget_count: (config.reclaim.budget_count > 0).then_some(config.reclaim.budget_count),
        },
        reconcile: Reconcile {
            interval: Duration::from_secs(config.reconcile.interval_seconds),
            action: match config.reconcile.action {
                crate::config::ReconcileAction::Clean => ReconcileAction::Clean,
                crate::config::ReconcileAction::Report => ReconcileAction::Report,
            },
            min_age: Duration::from_secs(config.reconcile.min_age_seconds),
            max_share_percent: config.reconcile.max_share_percent,
            patience: RECONCILE_PATIENCE,
        },
        release_deadline: RELEASE_DEADLINE,
        boot_deadline: BOOT_DEADLINE,
        console_cap_bytes: CONSOLE_CAP_BYTES,
        journal: (config.events.keep_mib > 0).then(|| JournalConfig {
            dir: config.instance_state_dir().join("events"),
            keep_bytes: config.events.keep_mib << 20,
            boot_id: boot_id.to_owned(),
        }),
        stats_interval: Duration::from_secs(config.stats.interval_seconds),
        exits: KeepExits {
            keep: Duration::from_secs(config.exits.keep_seconds),
            most: config.exits.keep_count,
        },
    })
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
