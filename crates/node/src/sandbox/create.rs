//! The steps of creation. Each notes its intent in the record before it touches the host (law 1).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use hearth_core::block;
use hearth_core::host::{Host, SpawnSpec};
use hearth_core::network::{GUEST_MAC, TAP_NAME};
use hearth_core::resource::Resource;
use hearth_core::shim::{GuestNetSpec, SHIM_LOG, SHIM_PROTOCOL, SHIM_SPEC_FILE, ShimSpec};
use hearth_core::steps::{Place, Step};

use super::shim_end;
use super::task::{CreateError, Sandbox};
use crate::blocking::{blocking, on_host};
use crate::error::chain;
use crate::images::{self, Job};
use crate::shim_client;
use crate::trace;

/// How long a shim may take from start to its first answer.
const SHIM_START: Duration = Duration::from_secs(20);
/// Of shims.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Work on images that is never stopped half-way.
static GO_ON: AtomicBool = AtomicBool::new(false);
/// File name of a writable disk that the VMM opens itself, in a sandbox's state directory.
const DISK_FILE: &str = "disk.ext4";

/// How its VMM is given its disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disks {
    /// It opens the files.
    Files,
    /// The shim serves them on sockets that the VMM inherits.
    Sockets,
    /// The shim serves the writable one to the kernel, whose device the VMM opens.
    Device,
}

impl<H: Host> Sandbox<H> {
    /// Runs all steps. Ends early, between two steps or while it waits for the guest, when cancelled.
    pub(super) async fn create(&mut self) -> Result<(), CreateError> {
        for step in Step::ALL {
            if self.cancel.is_cancelled() {
                return Err(CreateError::Cancelled);
            }
            // The receiver is gone when the caller is; that cancels, and is seen above.
            if let Some(progress) = &self.progress
                && progress.send(super::StepStarted(step)).await.is_err()
            {
                return Err(CreateError::Cancelled);
            }
            let begun = Instant::now();
            let failed = |why| CreateError::Step(step, why);
            let context = Arc::clone(&self.context);
            let parent = self.trace.clone();
            let done = async |_| context.faults.around(Place::Create(step), failed, self.step(step)).await;
            trace::within(format!("create.{step}"), &parent, done).await?;
            context.meters.create_step(step, begun.elapsed());
            self.view.send_modify(|v| v.steps.push((step, begun.elapsed())));
        }
        Ok(())
    }

    async fn step(&mut self, step: Step) -> Result<(), CreateError> {
        let failed = |why: String| CreateError::Step(step, why);
        match step {
            Step::Record => {
                let path = self.context.records.sandbox_dir(&self.record.id);
                // The record lies in this directory, so here the effect comes first; a directory of this
                // place without a record is ours by its place and is released by the next start.
                self.record.intend(Resource::Directory { path: path.clone() });
                // What is named by the id is known from the start: one write for all of it.
                self.record.intend(Resource::Directory { path: self.run_dir.clone() });
                self.record.intend(Resource::Cgroup { name: self.record.id.to_string() });
                self.ensure(Resource::Directory { path }).await.map_err(failed)?;
                self.save().await.map_err(failed)
            }
            Step::RunDirectory => {
                let path = self.run_dir.clone();
                self.ensure(Resource::Directory { path }).await.map_err(failed)
            }
            Step::Nbd => {
                if !self.has_rootfs() || self.disks != Disks::Device {
                    return Ok(());
                }
                let context = Arc::clone(&self.context);
                let index = context.nbds.acquire(&context.host, &self.record.id).await;
                let index = index.map_err(|e| match e {
                    crate::EngineError::Exhausted(why) => CreateError::Exhausted(why),
                    other => failed(chain(&other)),
                })?;
                // The shim connects it, much later; from here on it is this record's.
                self.record.intend(Resource::Nbd { index, sandbox: self.record.id.clone() });
                self.save().await.map_err(failed)
            }
            Step::Disk => {
                if !self.has_rootfs() {
                    return Ok(());
                }
                // Inside the state directory, which the record names.
                let dir = self.context.records.sandbox_dir(&self.record.id);
                let (size, served) = (self.record.spec.disk_mib, self.served());
                let context = Arc::clone(&self.context);
                // Not stopped half-way: it takes milliseconds, and its end is awaited in any case.
                on_host(&self.context.host, move |host| make_disk(host, &context.blanks, &dir, size, served))
                    .await
                    .map_err(failed)
            }
            Step::Slot => {
                let slot = self.context.pool.acquire().await.map_err(|e| match e {
                    crate::EngineError::Exhausted(why) => CreateError::Exhausted(why),
                    other => failed(chain(&other)),
                })?;
                self.record.slot = Some(slot);
                for part in Resource::of_slot(slot) {
                    self.record.intend(part);
                }
                self.save().await.map_err(failed)
            }
            Step::Cgroup => {
                let name = self.record.id.to_string();
                self.ensure(Resource::Cgroup { name }).await.map_err(failed)
            }
            Step::Shim => self.start_shim().await.map_err(failed),
            Step::Boot => self.boot().await,
        }
    }

    async fn ensure(&self, resource: Resource) -> Result<(), String> {
        on_host(&self.context.host, move |host| host.ensure(&resource)).await.map_err(|e| chain(&e))
    }

    async fn start_shim(&mut self) -> Result<(), String> {
        let spec = self.shim_spec().await?;
        let path = self.run_dir.join(SHIM_SPEC_FILE);
        let text = serde_json::to_vec_pretty(&spec).map_err(|e| e.to_string())?;
        let shown = path.display().to_string();
        blocking(move || std::fs::write(&path, text)).await.map_err(|e| format!("{shown}: {e}"))?;
        let config = &self.context.config;
        let mut env = vec![("PATH".into(), PATH.into())];
        if let Some(disk) = self.remote() {
            // What reads the object has the credentials; its VMM is given none of this.
            env.extend(store_access(&disk.url));
        }
        let spawn = SpawnSpec {
            program: config.shim_program.clone(),
            args: vec!["shim".into(), "--dir".into(), self.run_dir.display().to_string()],
            env,
            cgroup: self.record.id.to_string(),
            log: self.run_dir.join(SHIM_LOG),
        };
        // The cgroup, named in the record, is the intent for every process born in it.
        let born = async {
            on_host(&self.context.host, move |host| host.spawn(&spawn)).await.map_err(|e| chain(&e))
        };
        let spawned = self.context.faults.around(Place::Spawn, |why| why, born).await?;
        let identity = spawned.identity;
        self.record.shim = Some(identity.clone());
        self.record.intend(Resource::Process { process: identity.clone() });
        self.shim_pidfd = Some(spawned.pidfd);
        self.save().await?;
        let client = shim_client::connect_new(&self.run_dir, &self.record.id, SHIM_START);
        let watched = self.shim_pidfd.as_ref().and_then(|fd| fd.try_clone().ok());
        let client = tokio::select! {
            client = client => client,
            () = shim_end::ended(&self.context.host, &identity, watched) => Err("the shim ended at once".into()),
            () = self.cancel.cancelled() => Err("cancelled".into()),
        };
        let client = client.map_err(|why| format!("{why}{}", self.shim_log_tail()))?;
        self.view.send_modify(|v| v.shim = Some(client));
        Ok(())
    }

    /// Last words of the shim, for an error message.
    fn shim_log_tail(&self) -> String {
        let Ok(text) = std::fs::read(self.run_dir.join(SHIM_LOG)) else { return String::new() };
        let text = String::from_utf8_lossy(&text);
        match text.lines().rfind(|l| !l.trim().is_empty()) {
            Some(line) => format!("; the shim's last line: {line}"),
            None => String::new(),
        }
    }

    async fn shim_spec(&self) -> Result<ShimSpec, String> {
        let config = &self.context.config;
        let record = &self.record;
        let state_dir = self.context.records.sandbox_dir(&record.id);
        let boot = self.boot_files().await?;
        let slot = record.slot.ok_or("no slot was assigned")?;
        Ok(ShimSpec {
            protocol: SHIM_PROTOCOL,
            instance: config.layout.instance.clone(),
            id: record.id.clone(),
            name: record.name.clone(),
            vmm: record.spec.vmm,
            program: config.vmms.program(record.spec.vmm)?,
            kernel: boot.kernel,
            initramfs: boot.initramfs,
            rootfs: boot.rootfs,
            overlay: self
                .has_rootfs()
                .then(|| state_dir.join(if self.served() { block::OVERLAY_FILE } else { DISK_FILE })),
            block: self.served().then(|| block::BlockSpec {
                base: state_dir.join(block::BASE_FILE),
                rootfs: self.remote().map(|disk| block::RemoteRootfs {
                    disk: disk.clone(),
                    cache: config.store_dir.join(images::CHUNKS),
                    cache_mib: config.chunk_cache_mib,
                }),
                rate: record.spec.disk_rate,
                failpoints: config.failpoints.only(|place| matches!(place, Place::Block(_))).to_string(),
                nbd: record.resources.iter().find_map(|r| match r {
                    Resource::Nbd { index, .. } => Some(*index),
                    _ => None,
                }),
            }),
            drive_rate: record.spec.disk_rate,
            cpus: record.spec.cpus,
            memory_mib: record.spec.memory_mib,
            netns: Some(config.layout.netns_path(slot)),
            net: record.spec.net.then(|| self.guest_net()),
            agent: self.has_rootfs(),
            env: record.spec.env.clone(),
            ends_at_ms: record.ends_at_ms,
            run_dir: self.run_dir.clone(),
            state_dir,
            console_cap_bytes: config.console_cap_bytes,
            stats_interval_ms: u64::try_from(config.stats_interval.as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn has_rootfs(&self) -> bool {
        self.template.as_ref().is_some_and(|t| t.rootfs)
    }

    /// Its root disk, if that is no file of this node.
    fn remote(&self) -> Option<&block::RemoteDisk> {
        self.template.as_ref().and_then(|t| t.remote.as_ref())
    }

    /// Whether its writable disk goes through the shim's block server.
    fn served(&self) -> bool {
        self.has_rootfs() && self.disks != Disks::Files
    }

    fn guest_net(&self) -> GuestNetSpec {
        GuestNetSpec { tap: TAP_NAME.into(), mac: GUEST_MAC.into(), dns: self.context.config.dns.clone() }
    }

    async fn boot_files(&self) -> Result<BootFiles, String> {
        let store_dir = self.context.config.store_dir.clone();
        let context = Arc::clone(&self.context);
        let template = self.template.clone().ok_or("it was not made by this daemon")?;
        blocking(move || {
            let store = images::Store::open(&store_dir).map_err(|e| chain(&e))?;
            let kernel = images::kernel::elf_path(&store, &template.kernel);
            if !template.rootfs {
                return Ok(BootFiles { kernel, initramfs: None, rootfs: None });
            }
            let initramfs =
                images::initramfs::ensure(&store, &template.kernel, &context.guest, &Job::quiet(&GO_ON))
                    .map_err(|e| {
                        format!(
                            "{}; if the guest agent is missing put it beside hearth or set HEARTH_GUEST",
                            chain(&e)
                        )
                    })?;
            let here = template.remote.is_none();
            let rootfs = here.then(|| images::template::rootfs_path(&store, &template.name));
            Ok(BootFiles { kernel, initramfs: Some(initramfs), rootfs })
        })
        .await
    }

    async fn boot(&mut self) -> Result<(), CreateError> {
        let client = self.view.borrow().shim.clone();
        let Some(client) = client else {
            return Err(CreateError::Step(Step::Boot, "the shim is not connected".into()));
        };
        let within = self.context.config.boot_deadline;
        tokio::select! {
            booted = shim_client::boot(&client, within) => booted.map_err(|w| CreateError::Step(Step::Boot, w)),
            () = self.cancel.cancelled() => Err(CreateError::Cancelled),
        }
    }
}

/// What of the daemon's environment says how the store of this URL is reached: whom to trust, and the credentials for stores
/// of its kind.
fn store_access(url: &str) -> Vec<(String, String)> {
    let names: &[&str] = match url.split_once("://").map_or("", |(scheme, _)| scheme) {
        "http" | "file" => &[],
        "s3" | "s3a" => &["SSL_CERT_", "AWS_"],
        "gs" => &["SSL_CERT_", "GOOGLE_"],
        "az" | "adl" | "azure" | "abfs" | "abfss" => &["SSL_CERT_", "AZURE_"],
        // A store of any kind may have such an address.
        _ => &["SSL_CERT_", "AWS_", "AZURE_", "GOOGLE_"],
    };
    let all = std::env::vars_os().filter_map(|(n, v)| Some((n.into_string().ok()?, v.into_string().ok()?)));
    all.filter(|(name, _)| names.iter().any(|prefix| name.starts_with(prefix))).collect()
}

/// Makes a sandbox's writable disk, or if the disk is `served` its base, above which the shim makes the rest. It could never be
/// held full without the room for it.
fn make_disk<H: Host>(
    host: &H,
    blanks: &images::disk::Blanks,
    dir: &Path,
    size: u64,
    served: bool,
) -> Result<(), String> {
    let need = images::disk::room(size);
    let have = host.free_bytes(dir).map_err(|e| chain(&e))?;
    if have < need {
        let what = "the writable disk".to_owned();
        return Err(images::ImageError::NoSpace { path: dir.to_owned(), what, need, have }.to_string());
    }
    let blank = blanks.get(size, &Job::quiet(&GO_ON)).map_err(|e| chain(&e))?;
    let path = dir.join(if served { block::BASE_FILE } else { DISK_FILE });
    if served && blank.link(&path) {
        return Ok(());
    }
    host.copy_sparse(&blank.file, &path).map_err(|e| chain(&e))
}

struct BootFiles {
    kernel: std::path::PathBuf,
    initramfs: Option<std::path::PathBuf>,
    rootfs: Option<std::path::PathBuf>,
}
