//! The engine: everything the daemon decides, behind one value. The binary gives it a host and settings and
//! passes requests on.

mod asked;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::FutureExt as _;
use hearth_core::block::DiskRate;
use hearth_core::event::EventKind;
use hearth_core::host::Host;
use hearth_core::id::{SandboxId, SandboxName, TemplateName};
use hearth_core::image::Template;
use hearth_core::lifecycle::SandboxState;
use hearth_core::record::Record;
use hearth_core::resource::{Kind, Resource};
use hearth_core::spec::{DEFAULT_DISK_MIB, SandboxSpec, VmmKind};
use hearth_core::stuck::{Left, Stuck};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::blocking::blocking;
use crate::books::Books;
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::events::Events;
use crate::exits::Exits;
use crate::failpoint::Faults;
use crate::images::disk::Blanks;
use crate::images::{self, GuestProgram};
use crate::meters::Meters;
use crate::nbds::Nbds;
use crate::pool::SlotPool;
use crate::reclaim::{Demand, Hands, ReclaimProgress};
use crate::reconcile::Reconciler;
use crate::records::Records;
use crate::sandbox::{Begin, By, DeleteError, Disks, Handle, Sandbox, StepStarted, View};
use crate::trace::{self, TraceContext};

/// Sandboxes released at the same time after a start.
const RELEASES_AT_START: usize = 8;

/// What the tasks of one engine share.
#[derive(Debug)]
pub(crate) struct Context<H> {
    pub(crate) host: Arc<H>,
    pub(crate) config: EngineConfig,
    pub(crate) records: Records,
    pub(crate) exits: Exits,
    pub(crate) pool: Arc<SlotPool<H>>,
    pub(crate) nbds: Nbds,
    pub(crate) books: Books,
    pub(crate) guest: GuestProgram,
    pub(crate) blanks: Blanks,
    pub(crate) faults: Faults,
    pub(crate) events: Events,
    pub(crate) meters: Meters,
    /// What the removal of many slots yields to.
    pub(crate) demand: Demand,
    /// Leftovers under release.
    pub(crate) hands: Hands,
    /// The daemon ends and leaves VMs to their shims.
    pub(crate) detach: CancellationToken,
    /// Ends creations under way.
    pub(crate) no_creates: CancellationToken,
    /// Bounds the releases that a start begins at once.
    pub(crate) releases: Semaphore,
}

/// Least time before the third try of a task that panics; doubled for each further one.
const PANIC_RETRY_MIN: Duration = Duration::from_secs(1);
/// Longest time between two tries of a task that panics.
const PANIC_RETRY_MAX: Duration = Duration::from_secs(60);

/// Where the engine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Requests are refused with this reason; ask again.
    Starting(String),
    /// Requests are served.
    Ready,
    /// The start failed; the reason tells what to mend.
    Failed(String),
}

/// A sandbox as asked for. `None` and 0 take the defaults.
#[derive(Debug, Clone, Default)]
pub struct NewSandbox {
    /// Name; one is made up if `None`.
    pub name: Option<SandboxName>,
    /// Virtual CPUs; 0: 1.
    pub cpus: u32,
    /// MiB; 0: 256.
    pub memory_mib: u64,
    /// MiB; 0: 512.
    pub disk_mib: u64,
    /// Seconds; 0: no end.
    pub timeout_seconds: u64,
    /// Network card.
    pub net: bool,
    /// `None`: the node's choice.
    pub vmm: Option<VmmKind>,
    /// Environment of every command.
    pub env: Vec<(String, String)>,
    /// The caller's span.
    pub trace: TraceContext,
    /// How fast its disks may be; 0: as the node has it.
    pub disk_rate: DiskRate,
}

/// The engine of one instance.
#[derive(Debug)]
pub struct Engine<H> {
    pub(crate) context: Arc<Context<H>>,
    pub(crate) tasks: TaskTracker,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) reclaim: watch::Sender<ReclaimProgress>,
    pub(crate) reconciler: Arc<Reconciler>,
    /// Ends the pool's filler, the release of leftovers and the reconcile loop.
    pub(crate) stop: CancellationToken,
}

impl<H: Host> Engine<H> {
    /// An engine that has touched nothing yet.
    #[must_use]
    pub fn new(host: Arc<H>, config: EngineConfig) -> Arc<Self> {
        let events = config.journal.clone().map_or_else(Events::in_memory, Events::in_files);
        let pool = SlotPool::new(Arc::clone(&host), &config, events.clone());
        let context = Context {
            nbds: Nbds::new(&config),
            records: Records::new(&config.state_dir),
            exits: Exits::new(&config.state_dir, config.exits),
            guest: GuestProgram::new(config.guest_program.clone()),
            blanks: Blanks::new(&config.store_dir, config.layout.instance.as_str()),
            faults: Faults::new(config.failpoints.clone(), config.kill9.clone()),
            events,
            meters: Meters::default(),
            host,
            config,
            pool,
            books: Books::default(),
            demand: Demand::default(),
            hands: Hands::default(),
            detach: CancellationToken::new(),
            no_creates: CancellationToken::new(),
            releases: Semaphore::new(RELEASES_AT_START),
        };
        Arc::new(Self {
            context: Arc::new(context),
            tasks: TaskTracker::new(),
            phase: watch::Sender::new(Phase::Starting("not begun".into())),
            reclaim: watch::Sender::new(ReclaimProgress::default()),
            reconciler: Arc::new(Reconciler::new()),
            stop: CancellationToken::new(),
        })
    }

    /// Follows the phase.
    #[must_use]
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// How far the release of leftovers is.
    #[must_use]
    pub fn reclaim(&self) -> ReclaimProgress {
        self.reclaim.borrow().clone()
    }

    pub(crate) fn ready(&self) -> Result<(), EngineError> {
        match &*self.phase.borrow() {
            Phase::Ready => Ok(()),
            Phase::Starting(why) => Err(EngineError::Starting(why.clone())),
            Phase::Failed(why) => Err(EngineError::Failed(format!("the node could not start: {why}"))),
        }
    }

    /// Makes a sandbox. Dropping the future cancels: what was made is released.
    ///
    /// # Errors
    /// After whatever was made is gone, or is stuck and says so.
    pub async fn create(
        &self,
        template: TemplateName,
        new: NewSandbox,
        progress: mpsc::Sender<StepStarted>,
    ) -> Result<View, EngineError> {
        self.ready()?;
        let span = trace::begin("create", &new.trace);
        let created = self.create_within(&span, template, new, progress).await;
        trace::end(&span, &created);
        created
    }

    async fn create_within(
        &self,
        span: &TraceContext,
        template: TemplateName,
        new: NewSandbox,
        progress: mpsc::Sender<StepStarted>,
    ) -> Result<View, EngineError> {
        let _creating = self.context.demand.creating();
        let vmm = new.vmm.unwrap_or(self.context.config.vmms.auto);
        // Its disks go through its shim's block server.
        let served = match vmm {
            VmmKind::Qemu => true,
            VmmKind::Firecracker => self.context.nbds.serve(&self.context.host).await,
            VmmKind::Process => false,
        };
        let record = self.new_record(template.clone(), new)?;
        trace::about(span, &record);
        // Held until the guest runs, so that neither the template nor its kernel is replaced in between.
        let store_dir = self.context.config.store_dir.clone();
        let (template, _hold) = blocking(move || hold_template(&store_dir, &template)).await?;
        check_vmm(&self.context.config, &record.spec, &template)?;
        if served && template.rootfs && vmm == VmmKind::Firecracker {
            self.context.nbds.check()?;
        }

        let (outcome, created) = oneshot::channel();
        let cancel = self.context.no_creates.child_token();
        let (mut sandbox, handle) = self.sandbox(record, Some(template), cancel.clone(), Some(progress));
        sandbox.trace = span.clone();
        sandbox.disks = match (served, vmm) {
            (false, _) => Disks::Files,
            (true, VmmKind::Firecracker) => Disks::Device,
            (true, _) => Disks::Sockets,
        };
        self.context.books.enter_new(handle)?;
        self.spawn(sandbox, Begin::Create(outcome));
        let cancel_on_drop = cancel.drop_guard();
        let view = created.await.unwrap_or_else(|_| {
            Err(EngineError::Failed("the sandbox's task failed; what it made is being released".into()))
        })?;
        cancel_on_drop.disarm();
        Ok(view)
    }

    fn new_record(&self, template: TemplateName, new: NewSandbox) -> Result<Record, EngineError> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let spec = SandboxSpec {
            template,
            cpus: if new.cpus == 0 { 1 } else { new.cpus },
            memory_mib: or(new.memory_mib, 256),
            disk_mib: or(new.disk_mib, DEFAULT_DISK_MIB),
            timeout_seconds: (new.timeout_seconds != 0).then_some(new.timeout_seconds),
            net: new.net,
            vmm: new.vmm.unwrap_or(self.context.config.vmms.auto),
            env: new.env,
            disk_rate: new.disk_rate,
        };
        // A plain process has no disks.
        let limited = spec.vmm != VmmKind::Process;
        let disk_rate =
            if limited { spec.disk_rate.or(self.context.config.disk_rate) } else { spec.disk_rate };
        let spec = SandboxSpec { disk_rate, ..spec };
        spec.validate().map_err(|e| EngineError::Invalid(e.to_string()))?;
        let id = random_id()?;
        let name = match new.name {
            Some(name) if name.as_str().parse::<SandboxId>().is_ok() => {
                return Err(EngineError::Invalid(format!(
                    "the name {name} has the form of a sandbox id; choose another"
                )));
            }
            Some(name) => name,
            None => id.as_str().parse().map_err(|e| EngineError::Failed(format!("{e}")))?,
        };
        let created_at_ms = now_ms();
        Ok(Record {
            schema: Record::SCHEMA,
            id,
            name,
            ends_at_ms: spec.timeout_seconds.map(|s| created_at_ms + s * 1000),
            spec,
            state: SandboxState::Creating,
            created_at_ms,
            boot_id: self.context.host.boot_id().to_owned(),
            slot: None,
            shim: None,
            resources: vec![],
            stuck: None,
        })
    }

    /// A sandbox and the handle others hold.
    pub(crate) fn sandbox(
        &self,
        record: Record,
        template: Option<Template>,
        cancel: CancellationToken,
        progress: Option<mpsc::Sender<StepStarted>>,
    ) -> (Sandbox<H>, Handle) {
        let (commands, receiver) = mpsc::channel(16);
        let view = watch::Sender::new(View {
            state: record.state,
            record: record.clone(),
            steps: vec![],
            shim: None,
            unreachable: None,
            exit: None,
            gone: false,
        });
        let run_dir = self.run_dir(&record.id);
        let handle = Handle {
            id: record.id.clone(),
            name: record.name.clone(),
            commands,
            view: view.subscribe(),
            cancel: cancel.clone(),
            run_dir: run_dir.clone(),
        };
        let sandbox = Sandbox {
            context: Arc::clone(&self.context),
            record,
            template,
            run_dir,
            view,
            commands: receiver,
            cancel,
            progress,
            shim_pidfd: None,
            trace: TraceContext::new(),
            ending: None,
            by: By::Daemon("its creation failed".into()),
            disks: Disks::Files,
        };
        (sandbox, handle)
    }

    pub(crate) fn run_dir(&self, id: &SandboxId) -> PathBuf {
        self.context.config.run_dir.join("sandboxes").join(id.as_str())
    }

    /// Starts a sandbox's task. If the task panics, another one releases what it owned; one that panics again
    /// and again leaves the sandbox stuck between two tries, as any release that does not end.
    pub(crate) fn spawn(&self, sandbox: Sandbox<H>, begin: Begin) {
        let id = sandbox.record.id.clone();
        let at_begin = sandbox.record.clone();
        // Enough of the engine to start the second task.
        let engine = Self {
            context: Arc::clone(&self.context),
            tasks: self.tasks.clone(),
            phase: self.phase.clone(),
            reclaim: self.reclaim.clone(),
            reconciler: Arc::clone(&self.reconciler),
            stop: self.stop.clone(),
        };
        self.tasks.spawn(async move {
            let (mut sandbox, mut begin) = (sandbox, begin);
            let mut wait = Duration::ZERO;
            loop {
                let task = std::panic::AssertUnwindSafe(sandbox.run(begin)).catch_unwind();
                let Err(panic) = task.await else { return };
                let why = format!("its task panicked: {}", panic_text(panic.as_ref()));
                tracing::error!(sandbox = %id, "{why}");
                let Some(mut record) = engine.record_after_panic(at_begin.clone()).await else { return };
                record.state = SandboxState::Stuck;
                let left =
                    Left { kind: Kind::Record, what: "sandbox".into(), why: why.clone(), holders: vec![] };
                record.stuck = Some(Stuck::again(record.stuck.as_ref(), vec![left], now_ms()));
                engine.context.events.about(EventKind::SandboxStuck, &record, why.as_str());
                let (next, handle) = engine.sandbox(record, None, CancellationToken::new(), None);
                engine.context.books.enter_found(handle);
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    () = engine.context.detach.cancelled() => return,
                }
                wait = (wait * 2).clamp(PANIC_RETRY_MIN, PANIC_RETRY_MAX);
                (sandbox, begin) = (next, Begin::Release(why));
            }
        });
    }

    /// All that a sandbox whose task panicked may own: its record, and what has its id for a name. `None` if
    /// the daemon ends before the record could be read; the next start takes it up.
    async fn record_after_panic(&self, at_begin: Record) -> Option<Record> {
        let id = at_begin.id.clone();
        let mut record = loop {
            let (records, id) = (self.context.records.clone(), id.clone());
            match blocking(move || records.load_one(&id)).await {
                Ok(Some(record)) => break record,
                // It goes last, so nothing else is left of one that was there; its slot may be another's now.
                Ok(None) => break Record { slot: None, shim: None, resources: vec![], ..at_begin },
                Err(why) => tracing::error!("its record cannot be read, trying again: {why}"),
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(5)) => {}
                () = self.context.detach.cancelled() => return None,
            }
        };
        record.intend(Resource::Directory { path: self.context.records.sandbox_dir(&id) });
        record.intend(Resource::Directory { path: self.run_dir(&id) });
        record.intend(Resource::Cgroup { name: id.to_string() });
        Some(record)
    }

    /// Deletes a sandbox; answers when everything is gone.
    ///
    /// # Errors
    /// If there is none, or something is stuck.
    pub async fn delete(&self, key: &str) -> Result<(), EngineError> {
        self.delete_within(key, &TraceContext::new()).await
    }

    /// As [`delete`](Self::delete), below the caller's span.
    ///
    /// # Errors
    /// If there is none, or something is stuck.
    pub async fn delete_within(&self, key: &str, trace: &TraceContext) -> Result<(), EngineError> {
        self.ready()?;
        let handle = self.context.books.find(key)?;
        let name = handle.name.to_string();
        let deleted = trace::within("delete", trace, async |span| handle.delete_within(By::User, span).await);
        deleted.await.map_err(|e| match e {
            DeleteError::Stuck(why) => EngineError::Stuck { name, why },
            DeleteError::Ended => EngineError::Closed(format!(
                "sandbox {name} is not deleted: the daemon stopped looking after it; ask the next one"
            )),
        })
    }

    /// The journal of what happened.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.context.events
    }

    /// What is counted as it happens.
    #[must_use]
    pub fn meters(&self) -> &Meters {
        &self.context.meters
    }

    /// The faults ordered at the places that a front passes by itself.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.context.faults
    }

    /// Settings it was made with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.context.config
    }
}

fn hold_template(
    store_dir: &std::path::Path,
    name: &TemplateName,
) -> Result<(Template, images::template::Hold), EngineError> {
    let store = images::Store::open(store_dir)?;
    let hold = images::template::hold(&store, name)?;
    let template = hold.template.clone();
    Ok((template, hold))
}

fn check_vmm(config: &EngineConfig, spec: &SandboxSpec, template: &Template) -> Result<(), EngineError> {
    let vmms = &config.vmms;
    vmms.program(spec.vmm).map_err(|why| EngineError::Precondition(format!("vmm {}: {why}", spec.vmm)))?;
    if spec.vmm == VmmKind::Firecracker
        && let Some(remote) = &template.remote
    {
        return Err(EngineError::Precondition(format!(
            "vmm firecracker: the root disk of template {} is remote ({}), and Firecracker takes files only; use --vmm qemu",
            template.name, remote.url
        )));
    }
    if spec.vmm == VmmKind::Firecracker
        && template.rootfs
        && let Err(why) = &vmms.kvm
    {
        return Err(EngineError::Precondition(format!(
            "vmm firecracker: an ordinary Linux guest does not boot on this host: {why}; use --vmm qemu"
        )));
    }
    Ok(())
}

fn random_id() -> Result<SandboxId, EngineError> {
    let mut bytes = [0; SandboxId::LEN];
    getrandom::fill(&mut bytes).map_err(|e| EngineError::Failed(format!("no random bytes: {e}")))?;
    Ok(SandboxId::from_random(bytes))
}

pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
