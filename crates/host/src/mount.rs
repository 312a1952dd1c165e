//! tmpfs mounts below the instance's run directory. Ours is a tmpfs whose source is `hearth-<instance>`;
//! anything else in the place is foreign and stays.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::host::{Census, ErrorClass, HostError, Sighting};
use hearth_core::id::InstanceName;
use hearth_core::resource::Resource;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::directory::Directories;
use crate::error;
use crate::mountinfo::{self, MountEntry};

/// The mounts of one instance.
#[derive(Debug, Clone)]
pub struct Mounts {
    run: PathBuf,
    source: String,
    directories: Directories,
}

impl Mounts {
    /// `run` is the instance's own run directory.
    #[must_use]
    pub fn new(instance: &InstanceName, run: PathBuf) -> Self {
        // Only below the run directory: no state directory is given.
        let directories = Directories::new(run.clone(), run.clone());
        Self { run, source: format!("hearth-{instance}"), directories }
    }

    /// Mounts a tmpfs at `path` (made if absent); there already is success.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] outside the run directory, [`ErrorClass::Foreign`] if something else is
    /// mounted there.
    pub fn ensure(&self, path: &Path) -> Result<(), HostError> {
        let what = format!("mount {}", path.display());
        // On a mount of ours this would change the mode of its root, which is 0700 as well.
        self.directories.ensure(path)?;
        match self.top("ensure", path)? {
            Some(m) if self.is_ours(&m) => return Ok(()),
            Some(m) => return Err(foreign("ensure", &what, &m)),
            None => {}
        }
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount(self.source.as_str(), path, "tmpfs", flags, Some(c"mode=0700"))
            .map_err(|e| error::os("ensure", what, "mount tmpfs", e.into()))
    }

    /// Unmounts and removes the mount point if that is empty. Absent is success. Never lazily: a lazy
    /// unmount hides what is still used.
    ///
    /// # Errors
    /// [`ErrorClass::Busy`] if it is in use until `within` has passed.
    pub fn release(&self, path: &Path, within: Duration) -> Result<(), HostError> {
        let what = format!("mount {}", path.display());
        let deadline = Instant::now() + within;
        loop {
            match self.top("release", path)? {
                None => break,
                Some(m) if !self.is_ours(&m) => return Err(foreign("release", &what, &m)),
                Some(_) => {}
            }
            match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
                // Once more round: another of ours may lie below.
                Ok(()) => {}
                Err(rustix::io::Errno::BUSY) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(rustix::io::Errno::BUSY) => {
                    let why = format!("in use after {within:?}; see who: fuser -vm {}", path.display());
                    return Err(error::plain("release", what, ErrorClass::Busy, why));
                }
                Err(e) => return Err(error::os("release", what, "umount", e.into())),
            }
        }
        match std::fs::remove_dir(path) {
            Ok(()) => Ok(()),
            // Not empty: it was there before the mount and belongs to its directory.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTEMPTY | libc::ENOTDIR)) => {
                Ok(())
            }
            Err(e) => Err(error::os("release", what, "rmdir of the mount point", e)),
        }
    }

    /// Mounts of ours below the run directory, from one read of mountinfo. A mount of another kind there is
    /// foreign.
    ///
    /// # Errors
    /// If mountinfo cannot be read.
    pub fn census(&self) -> Result<Census, HostError> {
        let mut census = Census::default();
        let Some(resolved) = self.resolved_run("census")? else {
            return Ok(census);
        };
        for m in mountinfo::read().map_err(|e| error::os("census", "mounts", "read mountinfo", e))? {
            let Ok(below) = m.point.strip_prefix(&resolved) else { continue };
            if below.as_os_str().is_empty() {
                continue;
            }
            let path = self.run.join(below);
            if self.is_ours(&m) {
                let resource = Resource::Mount { path };
                if !census.ours.iter().any(|s| s.resource == resource) {
                    census.ours.push(Sighting { resource, facts: format!("tmpfs, mount id {}", m.id) });
                }
            } else {
                census.foreign.insert(path.display().to_string(), format!("{} of {:?}", m.fs_type, m.source));
            }
        }
        Ok(census)
    }

    fn is_ours(&self, m: &MountEntry) -> bool {
        m.fs_type == "tmpfs" && m.source == self.source
    }

    /// The run directory as mountinfo writes it; `None` if it does not exist, so that nothing can be in it.
    fn resolved_run(&self, verb: &'static str) -> Result<Option<PathBuf>, HostError> {
        match self.run.canonicalize() {
            Ok(path) => Ok(Some(path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(error::os(verb, "mounts", format_args!("resolve {}", self.run.display()), e)),
        }
    }

    /// The uppermost mount at exactly this path.
    fn top(&self, verb: &'static str, path: &Path) -> Result<Option<MountEntry>, HostError> {
        let what = format!("mount {}", path.display());
        let below = path.strip_prefix(&self.run).ok().filter(|p| !p.as_os_str().is_empty());
        let plain =
            below.is_some_and(|p| p.components().all(|c| matches!(c, std::path::Component::Normal(_))));
        let (Some(below), true) = (below, plain) else {
            let why = format!("it is not below {}; only mounts there are ours", self.run.display());
            return Err(error::plain(verb, what, ErrorClass::Refused, why));
        };
        let Some(point) = self.resolved_run(verb)?.map(|r| r.join(below)) else {
            return Ok(None);
        };
        let all = mountinfo::read().map_err(|e| error::os(verb, what, "read mountinfo", e))?;
        Ok(all.into_iter().rev().find(|m| m.point == point))
    }
}

fn foreign(verb: &'static str, what: &str, m: &MountEntry) -> HostError {
    let why = format!("{} of {:?} is mounted there, which is not ours", m.fs_type, m.source);
    error::plain(verb, what, ErrorClass::Foreign, why)
}
