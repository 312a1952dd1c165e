//! An engine on a fake host, with shims that are threads of the test: they serve the real shim protocol on
//! the real socket and end when their fake process does.
#![allow(clippy::unwrap_used, missing_docs, unreachable_pub, dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::Stream;
use hearth_api::shim::shim_service_server::{ShimService, ShimServiceServer};
use hearth_api::shim::{
    BootRequest, BootResponse, InfoRequest, InfoResponse, StopRequest, StopResponse, UsageRequest,
    UsageResponse, WatchRequest,
};
use hearth_api::v1::{
    ExecInput, ExecOutput, ResizeExecRequest, ResizeExecResponse, SignalExecRequest, SignalExecResponse,
};
use hearth_core::image::{Kernel, Template};
use hearth_core::network::SlotLayout;
use hearth_core::resource::Resource;
use hearth_core::shim::{SHIM_PROTOCOL, SHIM_SOCKET, ShimSpec};
use hearth_core::spec::VmmKind;
use hearth_node::{
    Engine, EngineConfig, EngineError, Failpoints, FirecrackerDisk, KeepExits, Kill9, NewSandbox, Phase,
    Reclaim, ReclaimMode, Reconcile, ReconcileAction, View, Vmms,
};
use hearth_testkit::FakeHost;
use tokio::sync::mpsc;
use tonic::{Request, Response, Status, Streaming};

/// A state directory, a fake host on it, and the engines that come and go.
pub struct Bench {
    pub tmp: tempfile::TempDir,
    pub host: Arc<FakeHost>,
    pub boot_blocks: Arc<AtomicBool>,
    /// What its shims say that they speak.
    pub protocol: Arc<AtomicU32>,
    pub cidr: &'static str,
    pub slot_pool: usize,
    pub reclaim: ReclaimMode,
    pub reconcile: Reconcile,
    /// How its sandboxes are given their disks; with `File` they run on the VMM `process` and have none.
    pub disk: FirecrackerDisk,
    /// Most devices that are used; 0: all there are.
    pub nbd_devices: u32,
}

pub const TEMPLATE: &str = "flat";

impl Bench {
    pub fn new() -> Self {
        Self::sized("10.12.0.0/24", 2)
    }

    pub fn sized(cidr: &'static str, slot_pool: usize) -> Self {
        let tmp = tempfile::tempdir().unwrap();
        let layout = layout(cidr);
        let (state, run) = (tmp.path().join("state/t"), tmp.path().join("run/t"));
        std::fs::create_dir_all(&state).unwrap();
        std::fs::create_dir_all(&run).unwrap();
        let host = Arc::new(FakeHost::new(layout, state, run));
        let boot_blocks = Arc::new(AtomicBool::new(false));
        let protocol = Arc::new(AtomicU32::new(SHIM_PROTOCOL));
        let (blocks, speaks) = (Arc::clone(&boot_blocks), Arc::clone(&protocol));
        let on = Arc::downgrade(&host);
        host.on_spawn(move |spec, process| {
            let dir = PathBuf::from(spec.args.last().ok_or("no directory")?);
            let (blocks, speaks, on) = (Arc::clone(&blocks), Arc::clone(&speaks), Weak::clone(&on));
            std::thread::spawn(move || shim_thread(&dir, &process, blocks, speaks, on));
            Ok(())
        });
        write_template(&tmp.path().join("state"), TEMPLATE, false);
        Self {
            tmp,
            host,
            boot_blocks,
            protocol,
            cidr,
            slot_pool,
            reclaim: ReclaimMode::Background,
            reconcile: never(),
            disk: FirecrackerDisk::File,
            nbd_devices: 0,
        }
    }

    /// Its sandboxes run on Firecracker, and each has its disk as one of so many devices.
    pub fn with_devices(self, limit: u32) -> Self {
        self.host.load_nbd(limit);
        self.on_firecracker()
    }

    /// Its sandboxes run on Firecracker with a disk.
    pub fn on_firecracker(self) -> Self {
        write_template(&self.tmp.path().join("state"), TEMPLATE, true);
        Self { disk: FirecrackerDisk::Auto, ..self }
    }

    pub fn config(&self, failpoints: Failpoints) -> EngineConfig {
        let program = Ok(PathBuf::from("/bin/true"));
        EngineConfig {
            layout: layout(self.cidr),
            store_dir: self.tmp.path().join("state"),
            state_dir: self.tmp.path().join("state/t"),
            run_dir: self.tmp.path().join("run/t"),
            slot_pool: self.slot_pool,
            dns: vec![],
            shim_program: "/bin/true".into(),
            guest_program: "/bin/true".into(),
            vmms: Vmms {
                auto: match self.disk {
                    FirecrackerDisk::File => VmmKind::Process,
                    _ => VmmKind::Firecracker,
                },
                auto_reason: String::new(),
                programs: BTreeMap::from([
                    (VmmKind::Process.as_str(), program.clone()),
                    (VmmKind::Firecracker.as_str(), program),
                ]),
                kvm: Ok(()),
            },
            failpoints,
            kill9: Kill9::new(|| panic!("no daemon to kill in this test")),
            reclaim: Reclaim {
                mode: self.reclaim,
                parallelism: 2,
                grace: Duration::from_secs(1),
                budget: None,
                budget_count: None,
            },
            reconcile: self.reconcile.clone(),
            release_deadline: Duration::from_millis(300),
            boot_deadline: Duration::from_secs(5),
            disk_rate: Default::default(),
            firecracker_disk: self.disk,
            nbd_devices: self.nbd_devices,
            chunk_cache_mib: 64,
            console_cap_bytes: 4096,
            journal: None,
            stats_interval: Duration::ZERO,
            exits: KeepExits { keep: Duration::from_secs(60), most: 100 },
        }
    }

    pub async fn engine(&self) -> Arc<Engine<FakeHost>> {
        self.engine_with(Failpoints::default()).await
    }

    pub async fn engine_with(&self, failpoints: Failpoints) -> Arc<Engine<FakeHost>> {
        let engine = Engine::new(Arc::clone(&self.host), self.config(failpoints));
        engine.start().await.unwrap();
        assert_eq!(*engine.phase().borrow(), Phase::Ready);
        engine
    }

    /// What exists beyond the instance's constant table, once prepared slots are gone too.
    pub fn leftovers(&self) -> Vec<Resource> {
        self.host.leftovers().into_iter().filter(|r| *r != Resource::HostFirewall).collect()
    }
}

/// No pass but on demand, without guards that take time.
fn never() -> Reconcile {
    Reconcile {
        interval: Duration::from_secs(3600),
        action: ReconcileAction::Clean,
        min_age: Duration::ZERO,
        max_share_percent: 20,
        patience: Duration::from_secs(60),
    }
}

pub fn layout(cidr: &str) -> SlotLayout {
    SlotLayout {
        instance: "t".parse().unwrap(),
        veth_prefix: "hth".parse().unwrap(),
        cidr: cidr.parse().unwrap(),
    }
}

pub async fn create(engine: &Engine<FakeHost>, name: &str) -> Result<View, EngineError> {
    let (progress, mut steps) = mpsc::channel(16);
    let new = NewSandbox { name: Some(name.parse().unwrap()), disk_mib: 16, ..NewSandbox::default() };
    let view = engine.create(TEMPLATE.parse().unwrap(), new, progress).await;
    while steps.try_recv().is_ok() {}
    view
}

fn write_template(state: &Path, name: &str, rootfs: bool) {
    let template = state.join("templates").join(name);
    let kernel = state.join("kernels/k");
    std::fs::create_dir_all(&template).unwrap();
    std::fs::create_dir_all(&kernel).unwrap();
    let k = Kernel {
        schema: Kernel::SCHEMA,
        name: "k".parse().unwrap(),
        release: "1".into(),
        modules: vec![],
        source: "test".into(),
        created_at_ms: 1,
    };
    let t = Template {
        remote: None,
        schema: Template::SCHEMA,
        name: name.parse().unwrap(),
        kernel: "k".parse().unwrap(),
        rootfs,
        rootfs_bytes: 0,
        source: "test".into(),
        created_at_ms: 1,
    };
    std::fs::write(kernel.join(Kernel::FILE), serde_json::to_vec(&k).unwrap()).unwrap();
    std::fs::write(kernel.join(Kernel::ELF), b"x").unwrap();
    std::fs::write(template.join(Template::FILE), serde_json::to_vec(&t).unwrap()).unwrap();
}

/// Plays one shim until its fake process ends.
fn shim_thread(
    dir: &Path,
    process: &hearth_testkit::fake_host::ProcessHandle,
    blocks: Arc<AtomicBool>,
    protocol: Arc<AtomicU32>,
    host: Weak<FakeHost>,
) {
    let spec: ShimSpec = serde_json::from_slice(&std::fs::read(dir.join("spec.json")).unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let shim = FakeShim { spec, pid: process.identity().pid, blocks, protocol, host };
    let socket = dir.join(SHIM_SOCKET);
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::bind(socket).unwrap();
        let incoming = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let process = process.clone();
        let ended =
            tokio::task::spawn_blocking(move || while process.wait(Duration::from_secs(60)).is_none() {});
        let served = tonic::transport::Server::builder()
            .add_service(ShimServiceServer::new(shim))
            .serve_with_incoming(incoming);
        tokio::select! {
            _ = ended => {}
            served = served => served.unwrap(),
        }
    });
}

struct FakeShim {
    spec: ShimSpec,
    pid: u32,
    blocks: Arc<AtomicBool>,
    protocol: Arc<AtomicU32>,
    host: Weak<FakeHost>,
}

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl ShimService for FakeShim {
    type WatchStream = Messages<InfoResponse>;
    type ExecStream = Messages<ExecOutput>;

    async fn info(&self, _: Request<InfoRequest>) -> Result<Response<InfoResponse>, Status> {
        Ok(Response::new(InfoResponse {
            protocol: self.protocol.load(Ordering::Relaxed),
            sandbox_id: self.spec.id.to_string(),
            shim_pid: self.pid,
            ..InfoResponse::default()
        }))
    }

    async fn boot(&self, _: Request<BootRequest>) -> Result<Response<BootResponse>, Status> {
        while self.blocks.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if let (Some(block), Some(host)) = (&self.spec.block, self.host.upgrade())
            && let Some(index) = block.nbd
        {
            host.plant(Resource::Nbd { index, sandbox: self.spec.id.clone() });
        }
        Ok(Response::new(BootResponse { vmm_pid: self.pid + 1 }))
    }

    async fn block_stats(
        &self,
        _: Request<hearth_api::shim::BlockStatsRequest>,
    ) -> Result<Response<hearth_api::shim::BlockStatsResponse>, Status> {
        Err(Status::unimplemented("a fake shim has no disks"))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<UsageResponse>, Status> {
        Err(Status::unimplemented("a shim of an older release"))
    }

    async fn stop(&self, _: Request<StopRequest>) -> Result<Response<StopResponse>, Status> {
        Ok(Response::new(StopResponse { exit: String::new() }))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not in tests"))
    }

    async fn exec(&self, _: Request<Streaming<ExecInput>>) -> Result<Response<Self::ExecStream>, Status> {
        Err(Status::unimplemented("not in tests"))
    }

    async fn signal_exec(
        &self,
        _: Request<SignalExecRequest>,
    ) -> Result<Response<SignalExecResponse>, Status> {
        Err(Status::unimplemented("not in tests"))
    }

    async fn resize_exec(
        &self,
        _: Request<ResizeExecRequest>,
    ) -> Result<Response<ResizeExecResponse>, Status> {
        Err(Status::unimplemented("not in tests"))
    }
}
