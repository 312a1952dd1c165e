//! The instance lock: `flock` on `<run>/lock`, held for the daemon's life. The kernel lets go of it when the
//! holder ends, however it ends, so a file left behind stops nobody. Its text (pid and start time) is only
//! for the message.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_core::process::{Liveness, ProcessIdentity};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::process;

/// Why the lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error("another hearth daemon ({}) runs this instance: it holds {}; stop it, or choose another instance",
        holder.map_or_else(|| "its pid could not be read".to_owned(), |p| format!("pid {p}")), path.display())]
    Held {
        /// The lock file.
        path: PathBuf,
        /// Who, proven alive by start time or named by the kernel's own list.
        holder: Option<u32>,
    },
    /// The file could not be used.
    #[error("instance lock: {doing} {}", path.display())]
    Io {
        /// Which step.
        doing: &'static str,
        /// The lock file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The lock, held until dropped or the process ends.
#[derive(Debug)]
pub struct InstanceLock {
    file: File,
    path: PathBuf,
}

impl InstanceLock {
    /// Takes the lock of the instance whose run directory this is (made if absent). Never waits.
    ///
    /// # Errors
    /// [`LockError::Held`] names the holder's pid.
    pub fn acquire(run_dir: &Path) -> Result<Self, LockError> {
        let path = run_dir.join("lock");
        let io = |doing, source| LockError::Io { doing, path: path.clone(), source };
        // A `doctor` that looks holds a shared lock for a moment; no daemon holds it unnamed for long.
        let mut looks = 5;
        let mut tries = 5;
        loop {
            match DirBuilder::new().recursive(true).mode(0o700).create(run_dir) {
                Err(e) if e.kind() == io::ErrorKind::NotFound && tries > 0 => {
                    tries -= 1;
                    continue;
                }
                made => made.map_err(|e| io("make the directory of", e))?,
            }
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path);
            let file = match file {
                Ok(file) => file,
                // Another instance that ended for good took the empty parent away in between.
                Err(e) if e.kind() == io::ErrorKind::NotFound && tries > 0 => {
                    tries -= 1;
                    continue;
                }
                Err(e) => return Err(io("open", e)),
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let daemon = recorded_holder(&file);
                    looks -= 1;
                    if daemon.is_none() && looks > 0 {
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    }
                    let holder = daemon.or_else(|| holder_by_kernel(&file));
                    return Err(LockError::Held { path, holder });
                }
                Err(e) => return Err(io("lock", e.into())),
            }
            // The former holder may have removed the file between our open and our lock.
            if !is_same(&file, &path) {
                continue;
            }
            write_holder(&file).map_err(|e| io("write", e))?;
            return Ok(Self { file, path });
        }
    }

    /// Removes the file and the run directory if that is empty, then lets go. For an instance that ends for
    /// good.
    ///
    /// # Errors
    /// If the file cannot be removed; the lock is let go in any case.
    pub fn remove(self) -> Result<(), LockError> {
        let io = |doing, source| LockError::Io { doing, path: self.path.clone(), source };
        match std::fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io("remove", e)),
            _ => {}
        }
        if let Some(dir) = self.path.parent() {
            match std::fs::remove_dir(dir) {
                Err(e) if !matches!(e.raw_os_error(), Some(libc::ENOTEMPTY | libc::ENOENT | libc::EBUSY)) => {
                    return Err(io("remove the directory of", e));
                }
                _ => {}
            }
        }
        flock(&self.file, FlockOperation::Unlock).map_err(|e| io("unlock", e.into()))
    }
}

/// The claim to an instance's name on this host, held until dropped or the process ends.
///
/// Namespaces, cgroups and tables carry the instance's name and no directory, so two daemons with one name and
/// different run directories would each call the other's things leaked. The lock is on the instance's own
/// cgroup directory: one per host, and nothing to leave behind.
#[derive(Debug)]
pub struct InstanceClaim {
    _directory: File,
}

impl InstanceClaim {
    /// Claims the instance whose cgroup directory this is (made if absent). Never waits.
    ///
    /// # Errors
    /// [`LockError::Held`] names the holder's pid.
    pub fn acquire(cgroup: &Path) -> Result<Self, LockError> {
        let io = |doing, source| LockError::Io { doing, path: cgroup.to_owned(), source };
        let mut tries = 5;
        loop {
            crate::cgroup::make(cgroup).map_err(|e| io("make", e))?;
            let directory = match File::open(cgroup) {
                Ok(directory) => directory,
                // An instance that ends removes its empty directory.
                Err(e) if e.kind() == io::ErrorKind::NotFound && tries > 0 => {
                    tries -= 1;
                    continue;
                }
                Err(e) => return Err(io("open", e)),
            };
            match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_same(&directory, cgroup) => return Ok(Self { _directory: directory }),
                Ok(()) if tries > 0 => tries -= 1,
                Ok(()) => return Err(io("lock", io::Error::other("it keeps being replaced"))),
                Err(Errno::WOULDBLOCK) => {
                    let holder = holder_by_kernel(&directory);
                    return Err(LockError::Held { path: cgroup.to_owned(), holder });
                }
                Err(e) => return Err(io("lock", e.into())),
            }
        }
    }
}

/// Whether a daemon holds the lock of this instance now; takes nothing.
///
/// # Errors
/// If the file exists and cannot be opened.
pub fn is_held(run_dir: &Path) -> io::Result<bool> {
    let file = match File::open(run_dir.join("lock")) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(e),
    };
    // Shared, so that two that look do not see each other, and gone with the descriptor.
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(e) => Err(e.into()),
    }
}

/// Who holds a lock of either kind, by the kernel's own list: an inner nothing is a process that cannot be named.
/// Takes nothing, so that it may be asked at any time and without a right to lock.
///
/// # Errors
/// If the file exists and cannot be looked at, or the list cannot be read.
pub fn holder(path: &Path) -> io::Result<Option<Option<u32>>> {
    let meta = match std::fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let locks = std::fs::read_to_string("/proc/locks")?;
    Ok(exclusive_in(&locks, meta.ino()))
}

/// The holder of an exclusive `flock` on this inode.
fn exclusive_in(locks: &str, inode: u64) -> Option<Option<u32>> {
    let suffix = format!(":{inode}");
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let held =
            *fields.get(1)? == "FLOCK" && *fields.get(3)? == "WRITE" && fields.get(5)?.ends_with(&suffix);
        held.then(|| fields.get(4).and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0))
    })
}

fn is_same(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Written in one call before the length is cut, so that a reader never finds it empty.
fn write_holder(file: &File) -> io::Result<()> {
    let me = process::identity_of(std::process::id())?;
    let text = format!("{} {} {}\n", me.pid, me.start_time, me.boot_id);
    file.write_all_at(text.as_bytes(), 0)?;
    file.set_len(text.len() as u64)
}

/// The process named in the file, if it is alive. Else the new holder has not written yet, or it handed the
/// descriptor to a child and died.
fn recorded_holder(file: &File) -> Option<u32> {
    let mut bytes = [0u8; 128];
    let n = file.read_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(bytes.get(..n)?).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let recorded = ProcessIdentity {
        pid: fields.next()?.parse().ok()?,
        start_time: fields.next()?.parse().ok()?,
        boot_id: fields.next()?.to_owned(),
        cgroup: None,
    };
    (process::liveness(&recorded) == Liveness::Alive).then_some(recorded.pid)
}

/// From `/proc/locks`: `1: FLOCK  ADVISORY  WRITE 4242 08:01:131099 0 EOF`.
fn holder_by_kernel(file: &File) -> Option<u32> {
    let suffix = format!(":{}", file.metadata().ok()?.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        (*fields.get(1)? == "FLOCK" && fields.get(5)?.ends_with(&suffix)).then_some(())?;
        fields.get(4)?.parse().ok().filter(|pid| *pid > 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_seen_without_taking_anything() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(holder(&dir.path().join("lock")).unwrap(), None);
        let lock = InstanceLock::acquire(dir.path()).unwrap();
        assert_eq!(holder(&dir.path().join("lock")).unwrap(), Some(Some(std::process::id())));
        drop(lock);
        assert_eq!(holder(&dir.path().join("lock")).unwrap(), None);
        let text =
            "1: FLOCK  ADVISORY  WRITE 0 08:01:77 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 9 08:01:78 0 EOF\n";
        assert_eq!(
            (exclusive_in(text, 77), exclusive_in(text, 78), exclusive_in(text, 7)),
            (Some(None), None, None)
        );
    }

    #[test]
    fn a_name_is_claimed_once_whatever_the_run_directory() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("hearth/i");
        let claim = InstanceClaim::acquire(&place).unwrap();
        let error = InstanceClaim::acquire(&place).unwrap_err();
        assert!(matches!(error, LockError::Held { .. }), "{error}");
        drop(claim);
        InstanceClaim::acquire(&place).unwrap();
    }

    #[test]
    fn a_stale_file_stops_nobody_and_removal_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("i");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("lock"), "1 2 some-other-boot with a long tail of old text\n").unwrap();
        assert!(!is_held(&run).unwrap());
        let lock = InstanceLock::acquire(&run).unwrap();
        assert!(is_held(&run).unwrap());
        let text = std::fs::read_to_string(run.join("lock")).unwrap();
        assert!(text.starts_with(&format!("{} ", std::process::id())), "{text}");
        assert!(!text.contains("tail"), "{text}");
        let second = InstanceLock::acquire(&run).unwrap_err();
        assert!(second.to_string().contains(&format!("pid {}", std::process::id())), "{second}");
        lock.remove().unwrap();
        assert!(!run.exists());
    }
}
