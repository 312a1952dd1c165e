//! The engine's [`Host`] answered by the kernel: sends each verb to the file of its kind. It decides nothing
//! and remembers nothing; two of the same instance may live in one process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hearth_core::host::{
    Census, ErrorClass, Host, HostError, NbdSeen, Pace, Sighting, SlotRelease, SlotSeen, SpawnSpec, Spawned,
};
use hearth_core::id::SandboxId;
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::resource::{Kind, Resource};
use hearth_core::stuck::Holder;

use crate::backup::Backups;
use crate::cgroup::Cgroups;
use crate::directory::Directories;
use crate::mount::Mounts;
use crate::process::{self, SpawnOptions};
use crate::{error, nbd, net, sparse};

/// Soft limit of open files of a started process: a shim holds a few per block request and connection; more
/// only slows what walks the table (measured: Firecracker starts slower with half a million).
const SPAWN_NOFILE: u64 = 65_536;
/// From leaving its cgroup to its end a process takes moments; one that lives on is another's.
const ENDING: Duration = Duration::from_secs(1);
/// Tasks told of what is stuck.
const HOLDERS: usize = 8;

/// Which instance, and where its directories are.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Names and addresses of slots; holds the instance's name.
    pub layout: SlotLayout,
    /// The instance's own state directory, `<state>/<instance>`.
    pub state_dir: PathBuf,
    /// The instance's own run directory, `<run>/<instance>`.
    pub run_dir: PathBuf,
}

/// The host as the kernel shows it.
#[derive(Debug)]
pub struct KernelHost {
    config: HostConfig,
    boot_id: &'static str,
    cgroups: Cgroups,
    directories: Directories,
    mounts: Mounts,
    /// Mounts for VMMs, once it is known whether there may be any.
    vmm_mounts: OnceLock<Option<OwnedFd>>,
    /// Where the rules are saved before the first change of them.
    backups: Option<Backups>,
    saved: OnceLock<()>,
}

impl KernelHost {
    /// Looks for what every verb needs; makes nothing.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] without a cgroup2 mount, or if a directory is not absolute.
    pub fn new(config: HostConfig) -> Result<Self, HostError> {
        for dir in [&config.state_dir, &config.run_dir] {
            if !dir.is_absolute() {
                let why = "give an absolute path";
                return Err(error::plain("census", dir.display(), ErrorClass::Refused, why));
            }
        }
        let boot_id = process::boot_id().map_err(|e| error::os("census", "boot id", "read /proc", e))?;
        let instance = &config.layout.instance;
        Ok(Self {
            boot_id,
            cgroups: Cgroups::locate(instance)?,
            directories: Directories::new(config.state_dir.clone(), config.run_dir.clone()),
            mounts: Mounts::new(instance, config.run_dir.clone()),
            vmm_mounts: OnceLock::new(),
            config,
            backups: None,
            saved: OnceLock::new(),
        })
    }

    /// Saves the host's firewall rules before this host first changes them. Once in its life: what a later change
    /// replaces is its own.
    #[must_use]
    pub fn with_backups(self, backups: Backups) -> Self {
        Self { backups: Some(backups), ..self }
    }

    /// A backup that fails does not keep the rules from being made: without them sandboxes are less apart.
    fn save_rules(&self) {
        let Some(backups) = &self.backups else { return };
        self.saved.get_or_init(|| {
            let begun = Instant::now();
            match backups.take("hearth serve, before its first change of the host's rules", None) {
                Ok(taken) => {
                    let (path, written) = (taken.path.display(), taken.written);
                    tracing::info!(%path, written, took = ?begun.elapsed(), "the host's firewall rules are saved");
                    for why in taken.absent().into_iter().chain(taken.kept) {
                        tracing::warn!("backup of the firewall rules: {why}");
                    }
                }
                Err(e) => tracing::warn!("no backup of the firewall rules in {}: {e}", backups.dir.display()),
            }
        });
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.config
    }

    /// The instance's cgroups, for limits and statistics.
    #[must_use]
    pub fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Removes what belongs to the instance and to no sandbox: the host firewall, the cgroup directory, and
    /// the run and state directories where they are empty. For an instance that ends for good; its sandboxes are gone by
    /// then. Goes on past errors.
    ///
    /// # Errors
    /// All that could not be removed.
    pub fn remove_instance(&self, within: Duration) -> Result<(), Vec<HostError>> {
        let deadline = Instant::now() + within;
        let mut errors = Vec::new();
        errors.extend(self.release(&Resource::HostFirewall, within).err());
        // A cgroup just emptied can be busy for a moment more.
        while let Err(e) = self.cgroups.remove_root() {
            if Instant::now() >= deadline {
                errors.push(e);
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for dir in [
            self.config.run_dir.join("sandboxes"),
            self.config.run_dir.clone(),
            self.config.state_dir.join("sandboxes"),
            self.config.state_dir.clone(),
        ] {
            match fs::remove_dir(&dir) {
                // Not empty: the daemon's socket or lock are its own to remove.
                Err(e) if !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTEMPTY | libc::EBUSY)) => {
                    errors.push(error::os("release", dir.display(), "rmdir", e));
                }
                _ => {}
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Where the sysctls changed by the host firewall are noted with their old values.
    fn sysctl_record(&self) -> PathBuf {
        self.config.state_dir.join("sysctl.json")
    }

    /// Whether a sandbox is of this instance, by its directories.
    fn knows(&self, sandbox: &SandboxId) -> bool {
        let dirs = [&self.config.state_dir, &self.config.run_dir];
        dirs.iter().any(|dir| dir.join("sandboxes").join(sandbox.as_str()).is_dir())
    }

    /// Pid and cgroup of every process in this instance's cgroups.
    fn own_processes(&self) -> Result<BTreeMap<u32, String>, HostError> {
        let census = self.cgroups.census()?;
        if let Some(why) = census.incomplete.first() {
            return Err(error::plain("census", "cgroups", ErrorClass::Failed, why));
        }
        let mut own = BTreeMap::new();
        for sighting in census.ours {
            let Resource::Cgroup { name } = sighting.resource else { continue };
            own.extend(self.cgroups.pids(&name)?.into_iter().map(|pid| (pid, name.clone())));
        }
        Ok(own)
    }

    /// Ends a process that is proven to be ours; one that only has its numbers is as good as gone.
    fn release_process(&self, process: &ProcessIdentity, within: Duration) -> Result<(), HostError> {
        if process::liveness(process) == Liveness::Alive {
            match self.liveness(process) {
                Liveness::Alive => {}
                // One that is about to end has left its cgroup already, and has to be reaped all the same.
                Liveness::Gone => return process::reap(process, ENDING),
                Liveness::Unknown(why) => return Err(not_ours("release", process, ErrorClass::Failed, &why)),
            }
        }
        process::release(process, within)
    }

    /// The processes in this instance's cgroups.
    fn census_processes(&self) -> Result<Census, HostError> {
        let cgroups = self.cgroups.census()?;
        let mut census = Census { incomplete: cgroups.incomplete, ..Census::default() };
        for sighting in cgroups.ours {
            let Resource::Cgroup { name } = sighting.resource else { continue };
            let pids = match self.cgroups.pids(&name) {
                Ok(pids) => pids,
                Err(e) => {
                    census.incomplete.push(e.to_string());
                    continue;
                }
            };
            for pid in pids {
                // One that ended since is not there; a zombie is gone too.
                let Ok(mut process) = process::identity_of(pid) else { continue };
                process.cgroup = Some(name.clone());
                if self.liveness(&process) == Liveness::Gone {
                    continue;
                }
                let facts = format!("in cgroup {name}: {}", process::describe(pid));
                census.ours.push(Sighting { resource: Resource::Process { process }, facts });
            }
        }
        Ok(census)
    }
}

impl Host for KernelHost {
    fn census(&self, kind: Kind) -> Result<Census, HostError> {
        let layout = &self.config.layout;
        match kind {
            Kind::Record => {
                let why = "records are files of the engine, not of the host";
                Err(error::plain("census", "records", ErrorClass::Refused, why))
            }
            Kind::Directory => self.directories.census(),
            Kind::Cgroup => self.cgroups.census(),
            Kind::Process => self.census_processes(),
            Kind::Netns => net::netns::census(layout),
            Kind::Veth => net::veth::census(layout),
            Kind::Tap => net::tap::census(layout),
            Kind::SandboxFirewall => net::sandbox_firewall::census(layout),
            Kind::HostFirewall => net::host_firewall::census(layout),
            Kind::Mount => self.mounts.census(),
            Kind::Nbd => nbd::census(&|sandbox| self.knows(sandbox)),
        }
    }

    fn ensure(&self, resource: &Resource) -> Result<(), HostError> {
        let layout = &self.config.layout;
        match resource {
            Resource::Directory { path } => self.directories.ensure(path),
            Resource::Cgroup { name } => self.cgroups.ensure(name),
            Resource::Process { process } => {
                let why = "a process is not made by name; spawn one";
                Err(error::plain("ensure", format_args!("process {}", process.pid), ErrorClass::Refused, why))
            }
            Resource::Netns { slot } => net::netns::ensure(layout, *slot),
            Resource::Veth { slot } => net::veth::ensure(layout, *slot),
            Resource::Tap { slot } => net::tap::ensure(layout, *slot),
            Resource::SandboxFirewall { slot } => net::sandbox_firewall::ensure(layout, *slot),
            Resource::HostFirewall => {
                net::host_firewall::ensure(layout, &self.sysctl_record(), &|| self.save_rules())
            }
            Resource::Mount { path } => self.mounts.ensure(path),
            Resource::Nbd { .. } => {
                let why = "a device is not made by name; its server connects it";
                Err(error::plain("ensure", resource, ErrorClass::Refused, why))
            }
        }
    }

    fn release(&self, resource: &Resource, within: Duration) -> Result<(), HostError> {
        let layout = &self.config.layout;
        match resource {
            Resource::Directory { path } => self.directories.release(path, within),
            Resource::Cgroup { name } => self.cgroups.release(name, within),
            Resource::Process { process } => self.release_process(process, within),
            Resource::Netns { slot } => {
                let (spared, pace) = (BTreeSet::new(), || Pace::AtMost(1));
                let order = SlotRelease { within, grace: within, spared: &spared, pace: &pace };
                net::slot::release_one(layout, *slot, &order, &|| self.own_processes())
            }
            Resource::Veth { slot } => net::veth::release(layout, *slot, within),
            Resource::Tap { slot } => net::tap::release(layout, *slot, within),
            Resource::SandboxFirewall { slot } => net::sandbox_firewall::release(layout, *slot, within),
            Resource::HostFirewall => {
                self.save_rules();
                net::host_firewall::release(layout, &self.sysctl_record(), within)
            }
            Resource::Mount { path } => self.mounts.release(path, within),
            Resource::Nbd { index, sandbox } => {
                let device = nbd::Device { index: *index, owner: sandbox.clone(), task: None };
                // The engine releases the sandbox's processes first, and its server is one of them.
                nbd::release(&device, &nbd::Server::Ended, within)
            }
        }
    }

    fn census_slots(&self) -> Result<Census, HostError> {
        net::slot::census(&self.config.layout)
    }

    fn release_slots(&self, slots: &[SlotIndex], order: &SlotRelease<'_>, seen: &mut SlotSeen<'_>) {
        net::slot::release(&self.config.layout, slots, order, &|| self.own_processes(), seen);
    }

    fn reset_slot(&self, slot: SlotIndex) -> Result<(), HostError> {
        net::slot::reset(&self.config.layout, slot)
    }

    fn conflict(&self) -> Result<Option<String>, HostError> {
        let layout = &self.config.layout;
        let links = net::links::Links::of(layout)?;
        if let Some(who) = net::host_firewall::prefix_conflict(layout, &links)? {
            return Ok(Some(format!("network.veth_prefix {}: {who}", layout.veth_prefix)));
        }
        let routes = net::routes::overlapping(layout, &links)?;
        Ok((!routes.is_empty()).then(|| {
            let routes = routes.join(", ");
            format!(
                "network.cidr {} overlaps routes of this host: {routes}; choose another with --cidr",
                layout.cidr
            )
        }))
    }

    fn nbd_limit(&self) -> Result<u32, HostError> {
        nbd::usable().map(|limits| limits.most)
    }

    fn look_at_nbd(&self, index: u32) -> Result<NbdSeen, HostError> {
        let seen =
            nbd::look(index).map_err(|e| error::os("census", format_args!("nbd{index}"), "look at it", e))?;
        Ok(match seen.unquiet() {
            None => NbdSeen::Quiet,
            Some(facts) => NbdSeen::Unquiet { owner: seen.backend.and_then(|id| id.parse().ok()), facts },
        })
    }

    fn free_bytes(&self, dir: &Path) -> Result<u64, HostError> {
        sparse::free_bytes(dir)
    }

    fn copy_sparse(&self, from: &fs::File, to: &Path) -> Result<(), HostError> {
        sparse::copy(from, to)
    }

    fn prepare_spawn(&self) {
        if self.vmm_mounts.get().is_some() || !process::mounts::are_apart() {
            return;
        }
        let paths = [Path::new("/"), &self.config.state_dir, &self.config.run_dir];
        let made = process::mounts::without_netns(&paths).unwrap_or_else(|e| {
            // It works all the same, and takes longer the more slots there are.
            tracing::info!("every VMM gets a copy of all mounts: {e}");
            None
        });
        // One that was made at the same time is as good.
        drop(self.vmm_mounts.set(made));
    }

    fn spawn(&self, spec: &SpawnSpec) -> Result<Spawned, HostError> {
        let cgroup = self.cgroups.open(&spec.cgroup)?;
        let os = |(doing, e): (String, io::Error)| error::os("spawn", spec.program.display(), doing, e);
        let mut fds = standard_descriptors(&spec.log).map_err(os)?;
        let mut env: Vec<_> = spec.env.iter().map(|(k, v)| (k.into(), v.into())).collect();
        self.prepare_spawn();
        if let Some(Some(mounts)) = self.vmm_mounts.get() {
            let mounts = mounts.try_clone().map_err(|e| os(("copy a descriptor".to_owned(), e)))?;
            fds.push((mounts, process::mounts::NUMBER));
            env.push((process::mounts::VARIABLE.into(), process::mounts::NUMBER.to_string().into()));
        }
        let options = SpawnOptions {
            program: spec.program.clone(),
            args: spec.args.iter().map(Into::into).collect(),
            env,
            cwd: Some("/".into()),
            cgroup_fd: Some(cgroup.as_fd()),
            new_session: true,
            fds,
            rlimit_nofile: Some(SPAWN_NOFILE),
            ..SpawnOptions::default()
        };
        match process::spawn(options) {
            Ok(child) => {
                let identity = ProcessIdentity { cgroup: Some(spec.cgroup.clone()), ..child.identity };
                Ok(Spawned { identity, pidfd: child.pidfd })
            }
            Err(e) => Err(HostError {
                verb: "spawn",
                what: spec.program.display().to_string(),
                why: e.to_string(),
                class: error::class_of(&e.error),
                source: Some(e.error),
            }),
        }
    }

    fn holders(&self, resource: &Resource) -> Vec<Holder> {
        let pids = match resource {
            Resource::Process { process } if self.liveness(process) != Liveness::Gone => vec![process.pid],
            // What cannot be seen is not told; nothing is decided by it.
            Resource::Cgroup { name } => self.cgroups.pids(name).unwrap_or_default(),
            Resource::Netns { slot } => net::holders::of_name(&self.config.layout.netns_path(*slot)),
            Resource::Nbd { index, .. } => nbd::openers(*index),
            _ => Vec::new(),
        };
        pids.into_iter().flat_map(process::tasks).take(HOLDERS).collect()
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        match (process::liveness(process), &process.cgroup) {
            (Liveness::Alive, Some(name)) => {
                process::membership::judge(process.pid, self.config.layout.instance.as_str(), name)
            }
            (other, _) => other,
        }
    }

    fn open_process(&self, process: &ProcessIdentity) -> Result<OwnedFd, HostError> {
        // The descriptor first: the number cannot change hands between the proof and its use.
        let pidfd = process::open(process)?;
        match self.liveness(process) {
            Liveness::Alive => Ok(pidfd),
            Liveness::Gone => {
                Err(not_ours("open", process, ErrorClass::Refused, "it is not the recorded one"))
            }
            Liveness::Unknown(why) => Err(not_ours("open", process, ErrorClass::Failed, &why)),
        }
    }

    fn boot_id(&self) -> &str {
        self.boot_id
    }
}

fn not_ours(verb: &'static str, process: &ProcessIdentity, class: ErrorClass, why: &str) -> HostError {
    error::plain(verb, format_args!("process {}", process.pid), class, why)
}

/// Standard input from `/dev/null`, output and error appended to the log (0600, made if absent).
fn standard_descriptors(log: &Path) -> Result<Vec<(OwnedFd, i32)>, (String, io::Error)> {
    let null = fs::File::open("/dev/null").map_err(|e| ("open /dev/null".to_owned(), e))?;
    let log_error = |e| (format!("open log {}", log.display()), e);
    let log_file = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_NOCTTY | libc::O_NOFOLLOW)
        .open(log)
        .map_err(log_error)?;
    let second = log_file.try_clone().map_err(log_error)?;
    Ok(vec![(null.into(), 0), (log_file.into(), 1), (second.into(), 2)])
}
