//! Control groups of one instance: `<cgroup2 mount>/hearth/<instance>/<sandbox id>`. A cgroup here tracks
//! and kills; it needs no controller for that, so the bare cgroup2 of a hybrid host is enough.
//!
//! Releasing one kills every process in it, forks included, waits until it is empty and removes it. It never
//! touches a cgroup outside the instance's own.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::host::{Census, ErrorClass, HostError, Sighting};
use hearth_core::id::{InstanceName, SandboxId};
use hearth_core::resource::Resource;
use rustix::event::PollFlags;
use rustix::fs::{Mode, OFlags};

use crate::process::{self, Signal};
use crate::{error, mountinfo};

/// Limits of one cgroup; a `None` is left as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// `memory.max`, bytes.
    pub memory_bytes: Option<u64>,
    /// `cpu.max`, thousandths of one CPU.
    pub cpu_millis: Option<u64>,
    /// `pids.max`.
    pub pids: Option<u64>,
}

/// The cgroups of one instance.
#[derive(Debug, Clone)]
pub struct Cgroups {
    mount: PathBuf,
    root: PathBuf,
}

/// Where systemd mounts cgroup2: alone, and beside version 1.
const USUAL: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// `CGROUP2_SUPER_MAGIC` of statfs(2).
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Where cgroup2 is mounted, `None` if nowhere. The usual places win where there are several: they are asked first and
/// alone, since every shim asks: with the list of all mounts a VM's start took 40 ms longer where 10,000 network namespaces
/// have names.
///
/// # Errors
/// If the mounts cannot be read.
pub fn mount_point() -> io::Result<Option<PathBuf>> {
    if let Some(usual) = USUAL.iter().find(|place| is_cgroup2(place)) {
        return Ok(Some(usual.into()));
    }
    Ok(mountinfo::read()?.into_iter().find(|m| m.fs_type == "cgroup2").map(|m| m.point))
}

fn is_cgroup2(place: &str) -> bool {
    // The type of the field differs between targets.
    #[allow(clippy::unnecessary_cast)]
    rustix::fs::statfs(place).is_ok_and(|stat| stat.f_type as i64 == CGROUP2_MAGIC)
}

impl Cgroups {
    /// Finds the cgroup2 mount; makes nothing.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] if there is no cgroup2 mount.
    pub fn locate(instance: &InstanceName) -> Result<Self, HostError> {
        let what = format!("cgroups of instance {instance}");
        let mount = mount_point().map_err(|e| error::os("census", &what, "read mountinfo", e))?;
        let mount = mount.ok_or_else(|| {
            let why = "no cgroup2 file system is mounted; run: mount -t cgroup2 none /sys/fs/cgroup";
            error::plain("census", &what, ErrorClass::Refused, why)
        })?;
        let root = mount.join("hearth").join(instance.as_str());
        Ok(Self { mount, root })
    }

    /// The instance's own directory, which may not exist yet.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Controllers that our cgroups can have: those the top passes on. We never switch one on there, since
    /// that would change the host.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn controllers(&self) -> io::Result<Vec<String>> {
        let text = fs::read_to_string(self.mount.join("cgroup.subtree_control"))?;
        Ok(text.split_ascii_whitespace().map(str::to_owned).collect())
    }

    /// Makes the cgroup; there already is success.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] for a name that is no sandbox id.
    pub fn ensure(&self, name: &str) -> Result<(), HostError> {
        let path = self.path("ensure", name)?;
        make(&path).map_err(|e| {
            let doing = format_args!("mkdir {}", path.display());
            error::os("ensure", format_args!("cgroup {name}"), doing, e)
        })
    }

    /// Sets limits and answers with the names of those the host has no controller for.
    ///
    /// # Errors
    /// If the cgroup is absent or the kernel refuses a value.
    pub fn set_limits(&self, name: &str, limits: &Limits) -> Result<Vec<&'static str>, HostError> {
        let path = self.path("ensure", name)?;
        let fail = |doing: String, e| error::os("ensure", format_args!("limits of cgroup {name}"), doing, e);
        let available = self.controllers().map_err(|e| fail("read controllers".into(), e))?;
        let wanted = [
            ("memory", "memory.max", limits.memory_bytes.map(|b| b.to_string())),
            (
                "cpu",
                "cpu.max",
                limits.cpu_millis.map(|m| format!("{} 100000", m.saturating_mul(100).max(1000))),
            ),
            ("pids", "pids.max", limits.pids.map(|n| n.to_string())),
        ];
        let mut skipped = Vec::new();
        for (controller, file, value) in wanted {
            let Some(value) = value else { continue };
            if !available.iter().any(|c| c == controller) {
                skipped.push(file);
                continue;
            }
            for dir in [self.root.parent(), Some(self.root.as_path())].into_iter().flatten() {
                let control = dir.join("cgroup.subtree_control");
                fs::write(&control, format!("+{controller}"))
                    .map_err(|e| fail(format!("pass {controller} on in {}", dir.display()), e))?;
            }
            fs::write(path.join(file), &value).map_err(|e| fail(format!("write {value} to {file}"), e))?;
        }
        Ok(skipped)
    }

    /// A descriptor of the cgroup's directory, for `CLONE_INTO_CGROUP`.
    ///
    /// # Errors
    /// If it is absent.
    pub fn open(&self, name: &str) -> Result<OwnedFd, HostError> {
        let path = self.path("spawn", name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| {
            let doing = format_args!("open {}", path.display());
            error::os("spawn", format_args!("cgroup {name}"), doing, e.into())
        })
    }

    /// The processes in it, in cgroups below it included. An absent cgroup has none.
    ///
    /// # Errors
    /// If it cannot be read: unknown is not empty.
    pub fn pids(&self, name: &str) -> Result<Vec<u32>, HostError> {
        let path = self.path("census", name)?;
        pids_below(&path)
            .map_err(|e| error::os("census", format_args!("cgroup {name}"), "read cgroup.procs", e))
    }

    /// Kills all in it, waits until it is empty, removes it with all below it. Absent is success. Children of
    /// this process among the killed are reaped: whoever started one may never have come to know its pid.
    ///
    /// # Errors
    /// [`ErrorClass::Deadline`] names the processes that are still there.
    pub fn release(&self, name: &str, within: Duration) -> Result<(), HostError> {
        let path = self.path("release", name)?;
        let what = format!("cgroup {name}");
        let deadline = Instant::now() + within;
        let fail =
            |doing: &str, e| error::os("release", &what, format_args!("{doing} {}", path.display()), e);
        let mut killed = Vec::new();
        loop {
            match populated(&path) {
                Ok(None) => break,
                Ok(Some(true)) => {
                    killed.extend(pidfds(&path).map_err(|e| fail("list processes of", e))?);
                    // Repeated each round: where the kernel has no cgroup.kill a fork may have got away.
                    kill_all(&path).map_err(|e| fail("kill processes of", e))?;
                    let round = deadline.min(Instant::now() + Duration::from_millis(100));
                    wait_for_event(&path, round).map_err(|e| fail("wait for", e))?;
                }
                Ok(Some(false)) => match remove_tree(&path) {
                    Ok(()) => break,
                    // A process that entered just now, or one still on its way out.
                    Err(e) if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENOTEMPTY)) => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Err(e) => return Err(fail("rmdir", e)),
                },
                Err(e) => return Err(fail("read cgroup.events of", e)),
            }
            if Instant::now() >= deadline && !matches!(populated(&path), Ok(None)) {
                let left = pids_below(&path).unwrap_or_default();
                let left: Vec<_> = left.into_iter().take(8).map(process::describe).collect();
                let why = format!("not empty {within:?} after the kill; still there: [{}]", left.join(", "));
                return Err(error::plain("release", what, ErrorClass::Deadline, why));
            }
        }
        for pidfd in killed {
            // A process leaves its cgroup a moment before it can be waited for.
            let left = deadline.saturating_duration_since(Instant::now());
            process::wait(pidfd.as_fd(), left).map_err(|e| fail("reap a process of", e))?;
        }
        Ok(())
    }

    /// All cgroups of the instance, from one directory read.
    ///
    /// # Errors
    /// If the instance's directory exists but cannot be read.
    pub fn census(&self) -> Result<Census, HostError> {
        let mut census = Census::default();
        let fail = |e| error::os("census", "cgroups", format_args!("list {}", self.root.display()), e);
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(census),
            Err(e) => return Err(fail(e)),
        };
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(e) => {
                    census.incomplete.push(format!("{}: {e}", self.root.display()));
                    break;
                }
            };
            if !entry.file_type().is_ok_and(|t| t.is_dir()) {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            match name.parse::<SandboxId>() {
                Ok(id) => {
                    let facts = match populated(&entry.path()) {
                        Ok(Some(true)) => "has processes",
                        Ok(Some(false)) => "empty",
                        Ok(None) => continue,
                        Err(_) => "cgroup.events unreadable",
                    };
                    let resource = Resource::Cgroup { name: id.into() };
                    census.ours.push(Sighting { resource, facts: facts.to_owned() });
                }
                Err(e) => {
                    census.foreign.insert(entry.path().display().to_string(), e.to_string());
                }
            }
        }
        Ok(census)
    }

    /// Removes the instance's directory, and `hearth` above it unless another instance uses it.
    ///
    /// # Errors
    /// [`ErrorClass::Busy`] if cgroups of the instance are left.
    pub fn remove_root(&self) -> Result<(), HostError> {
        match fs::remove_dir(&self.root) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => {
                let doing = format_args!("rmdir {}", self.root.display());
                return Err(error::os("release", "cgroup of the instance", doing, e));
            }
        }
        match self.root.parent().map(fs::remove_dir) {
            None | Some(Ok(())) => Ok(()),
            Some(Err(e))
                if matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENOTEMPTY | libc::ENOENT)) =>
            {
                Ok(())
            }
            Some(Err(e)) => Err(error::os("release", "cgroup hearth", "rmdir", e)),
        }
    }

    /// Only sandbox ids: any other text could leave the instance's directory or name a file of the kernel.
    fn path(&self, verb: &'static str, name: &str) -> Result<PathBuf, HostError> {
        match name.parse::<SandboxId>() {
            Ok(_) => Ok(self.root.join(name)),
            Err(e) => Err(error::plain(verb, format_args!("cgroup {name:?}"), ErrorClass::Refused, e)),
        }
    }
}

/// For how long [`make`] tries again. The directory above is removed once per release of an instance's last cgroup, so a
/// second try all but always does; a number of tries alone is spent within microseconds by two that run in step.
const MAKE_WITHIN: Duration = Duration::from_secs(1);

/// Makes the directory and those above it. Other instances make and remove `hearth` at the same time: it may be gone when
/// it is to be entered (`ENOENT`), or be there when it is to be made and gone when it is looked at (`EEXIST`).
pub(crate) fn make(path: &Path) -> io::Result<()> {
    let deadline = Instant::now() + MAKE_WITHIN;
    let mut pause = Duration::from_micros(1);
    loop {
        match fs::create_dir_all(path) {
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists)
                    && Instant::now() < deadline =>
            {
                // Two that try without a pause can keep missing each other: the directory's lock goes from hand to hand.
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

/// `None`: no such cgroup.
fn populated(path: &Path) -> io::Result<Option<bool>> {
    match fs::read_to_string(path.join("cgroup.events")) {
        Ok(text) => Ok(Some(!text.lines().any(|l| l == "populated 0"))),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns when `cgroup.events` changed (POLLPRI), the cgroup is empty or gone, or at the deadline.
fn wait_for_event(path: &Path, deadline: Instant) -> io::Result<()> {
    let mut file = match fs::File::open(path.join("cgroup.events")) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    // The poll tells of changes since the last read of this very descriptor.
    let mut text = String::new();
    match io::Read::read_to_string(&mut file, &mut text) {
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
        Err(e) => return Err(e),
        Ok(_) if text.lines().any(|l| l == "populated 0") => return Ok(()),
        Ok(_) => {}
    }
    process::poll_until(&file, PollFlags::PRI, Some(deadline)).map(|_| ())
}

fn kill_all(path: &Path) -> io::Result<()> {
    match fs::OpenOptions::new().write(true).open(path.join("cgroup.kill")) {
        Ok(mut file) => match io::Write::write_all(&mut file, b"1") {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => Err(e),
            _ => Ok(()),
        },
        // Linux < 5.14, or the cgroup is gone.
        Err(e) if e.kind() == io::ErrorKind::NotFound => kill_one_by_one(path),
        Err(e) => Err(e),
    }
}

fn kill_one_by_one(path: &Path) -> io::Result<()> {
    pidfds(path)?.iter().try_for_each(|pidfd| process::signal(pidfd.as_fd(), Signal::KILL))
}

/// Descriptors of the processes in it.
fn pidfds(path: &Path) -> io::Result<Vec<OwnedFd>> {
    let mut found = Vec::new();
    for pid in pids_below(path)? {
        let Some(raw) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) else { continue };
        let Ok(pidfd) = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()) else {
            continue;
        };
        // With the descriptor in hand the number cannot change hands: still in the list means it is the one.
        if pids_below(path)?.contains(&pid) {
            found.push(pidfd);
        }
    }
    Ok(found)
}

pub(crate) fn pids_below(path: &Path) -> io::Result<Vec<u32>> {
    let text = match fs::read_to_string(path.join("cgroup.procs")) {
        Ok(text) => text,
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    // 0 stands for a process outside our pid namespace.
    let mut pids: Vec<u32> = text.lines().filter_map(|l| l.parse().ok()).filter(|p| *p != 0).collect();
    for child in children(path)? {
        pids.extend(pids_below(&child)?);
    }
    Ok(pids)
}

fn children(path: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut dirs = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            dirs.push(entry.path());
        }
    }
    Ok(dirs)
}

pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    for child in children(path)? {
        remove_tree(&child)?;
    }
    match fs::remove_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{SpawnOptions, spawn, wait};
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_directory_is_made_while_others_make_and_remove_the_one_above() {
        let top = tempfile::tempdir().unwrap();
        let hearth = top.path().join("hearth");
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    drop(fs::create_dir(&hearth));
                    // Not empty while the other uses it.
                    drop(fs::remove_dir(&hearth));
                }
            });
            let path = hearth.join("instance");
            let made = (0..2000).try_for_each(|_| make(&path).and_then(|()| fs::remove_dir(&path)));
            done.store(true, Ordering::Relaxed);
            made.unwrap();
        });
        drop(fs::remove_dir(&hearth));
        fs::write(&hearth, "").unwrap();
        assert!(make(&hearth).is_err(), "a file in its place is told");
    }

    #[test]
    fn the_mount_is_one_that_the_list_of_mounts_has() {
        let listed: Vec<PathBuf> = mountinfo::read()
            .unwrap()
            .into_iter()
            .filter(|m| m.fs_type == "cgroup2")
            .map(|m| m.point)
            .collect();
        let found = mount_point().unwrap();
        assert_eq!(found.is_some(), !listed.is_empty());
        assert!(found.is_none_or(|found| listed.contains(&found)), "{listed:?}");
        assert!(!is_cgroup2("/proc") && !is_cgroup2("/nowhere"));
    }

    #[test]
    fn without_cgroup_kill_each_process_is_killed_by_its_pidfd() {
        if !crate::test_support::is_root() {
            hearth_testkit::skip("without_cgroup_kill_each_process_is_killed_by_its_pidfd", "needs root");
            return;
        }
        let instance = format!("t{}-kill", std::process::id()).parse().unwrap();
        let cgroups = Cgroups::locate(&instance).unwrap();
        cgroups.ensure("aaaaaaaaaaaaaaaa").unwrap();
        let fd = cgroups.open("aaaaaaaaaaaaaaaa").unwrap();
        let child = spawn(SpawnOptions {
            program: "/bin/sleep".into(),
            args: vec!["1000".into()],
            cgroup_fd: Some(fd.as_fd()),
            ..SpawnOptions::default()
        })
        .unwrap();
        kill_one_by_one(&cgroups.root().join("aaaaaaaaaaaaaaaa")).unwrap();
        let ended = wait(child.pidfd.as_fd(), Duration::from_secs(5)).unwrap().unwrap();
        assert_eq!(ended.signal, Some(libc::SIGKILL));
        cgroups.release("aaaaaaaaaaaaaaaa", Duration::from_secs(5)).unwrap();
        cgroups.remove_root().unwrap();
    }
}
