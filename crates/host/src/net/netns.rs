//! Network namespaces of slots: bind mounts in `/run/netns`, laid out as `ip netns` does it, so that its
//! commands work on them.
//!
//! States of one name: absent → empty file (half made) → namespace, possibly several stacked. Everything else
//! in that place is foreign. Entering happens on a thread that ends afterwards, so that no thread of the daemon
//! is ever left in the wrong namespace.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::host::{Census, Sighting};
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::resource::Resource;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use super::error::{Op, Result};
use super::rtnl::{Rtnl, set_up};

/// Where `ip netns` keeps namespaces.
pub const DIRECTORY: &str = "/run/netns";
/// The calling thread's own namespace. `/proc/self` would be the main thread's.
const OWN: &str = "/proc/thread-self/ns/net";
const NSFS_MAGIC: u64 = 0x6e73_6673;
/// Others hold the directory's lock for two system calls.
const LOCK_WITHIN: Duration = Duration::from_secs(5);
/// More namespaces than this stacked on one name is not something unmounting cures.
const STACK_LIMIT: usize = 64;

/// What identifies a namespace while it lives: device and inode of its file.
pub(crate) type NsId = (u64, u64);

/// What a name in `/run/netns` stands for.
#[derive(Debug)]
pub(crate) enum Place {
    /// Nothing.
    Absent,
    /// An empty file: made, but never mounted on.
    Half,
    /// A network namespace, open.
    Namespace(OwnedFd, NsId),
    /// Something we never make; why.
    Foreign(String),
}

/// The path of a slot's namespace.
#[must_use]
pub fn path(layout: &SlotLayout, slot: SlotIndex) -> PathBuf {
    Path::new(DIRECTORY).join(layout.netns(slot))
}

/// Lists the namespaces of this instance: one directory entry and one `stat` each.
///
/// # Errors
/// If the directory cannot be read at all.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    let op = Op::new("census", "netns");
    let mut census = Census::default();
    let directory = match fs::read_dir(DIRECTORY) {
        Ok(d) => d,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(census),
        Err(e) => return Err(op.io(&format!("read {DIRECTORY}"), e)),
    };
    let base = fs::symlink_metadata(DIRECTORY).map_err(|e| op.io(&format!("stat {DIRECTORY}"), e))?.dev();
    let ours = format!("hearth-{}-", layout.instance);
    for entry in directory {
        let entry = match entry {
            Ok(e) => e,
            Err(e) => {
                census.incomplete.push(format!("{DIRECTORY}: {e}"));
                break;
            }
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(slot) = layout.slot_of_netns(&name) else {
            if name.starts_with(&ours) {
                census.foreign.insert(name, "what follows the instance's name is no slot number".into());
            } else if name.starts_with("hearth-") {
                census.foreign.insert(name, "of another instance".into());
            }
            continue;
        };
        // Not `entry.metadata()`: its d_type is that of the file below the mount.
        let facts = match fs::symlink_metadata(entry.path()) {
            Ok(m) if m.file_type().is_file() && m.dev() != base => format!("namespace inode {}", m.ino()),
            Ok(m) if m.file_type().is_file() && m.len() == 0 => "empty file, half made".to_owned(),
            Ok(m) => {
                census.foreign.insert(name, describe(&m));
                continue;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => {
                census.incomplete.push(format!("{name}: {e}"));
                continue;
            }
        };
        census.ours.push(Sighting { resource: Resource::Netns { slot }, facts });
    }
    Ok(census)
}

/// The slots that have anything under their namespace's name, by names alone.
pub(super) fn named(layout: &SlotLayout) -> Result<BTreeSet<SlotIndex>> {
    let op = Op::new("census", "netns");
    let entries = match fs::read_dir(DIRECTORY) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(e) => return Err(op.io(&format!("read {DIRECTORY}"), e)),
    };
    let mut slots = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(|e| op.io(&format!("read {DIRECTORY}"), e))?.file_name();
        slots.extend(name.to_str().and_then(|name| layout.slot_of_netns(name)));
    }
    Ok(slots)
}

/// Makes the slot's namespace with `lo` up, or completes an empty file.
///
/// # Errors
/// Foreign if the name is taken by anything but a network namespace or an empty file.
pub fn ensure(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let path = path(layout, slot);
    let op = Op::new("ensure", format!("netns {}", layout.netns(slot)));
    match look(&op, &path)? {
        Place::Foreign(why) => return Err(op.foreign(why)),
        // The namespace was whole before it got its name; only `lo` can have been lowered since.
        Place::Namespace(fd, _) => return inside_fd(&op, fd, || raise_loopback(&op)),
        Place::Half => {}
        Place::Absent => {
            shared_directory(&op)?;
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDONLY | OFlags::CLOEXEC;
            match rustix::fs::open(&path, flags, Mode::empty()) {
                Ok(_) | Err(rustix::io::Errno::EXIST) => {}
                Err(e) => return Err(op.io(&format!("create {}", path.display()), e.into())),
            }
        }
    }
    on_thread(&op, || {
        // SAFETY: only the network namespace of this thread changes, and the thread ends with this closure.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|e| op.io("make a network namespace", e.into()))?;
        raise_loopback(&op)?;
        rustix::mount::mount_bind(OWN, &path)
            .map_err(|e| op.io(&format!("bind it on {}", path.display()), e.into()))
    })
}

/// Takes the namespace's name away, layer by layer, and tells what it stood for. The namespace dies when nothing
/// holds it any more, which is not waited for. `known` was just looked at: it takes the short way.
///
/// # Errors
/// Foreign as for [`ensure`]; Refused if too many are stacked.
pub(crate) fn unlink(op: &Op, path: &Path, known: Option<NsId>) -> Result<Vec<NsId>> {
    let mut ids = Vec::new();
    if let Some(known) = known
        && fs::symlink_metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == known)
    {
        detach(op, path)?;
        ids.push(known);
        // Below it lies the empty file, or something that is looked at first.
        let empty =
            fs::symlink_metadata(path).is_ok_and(|m| m.is_file() && m.len() == 0 && m.dev() != known.0);
        if empty && fs::remove_file(path).is_ok() {
            return Ok(ids);
        }
    }
    loop {
        match look(op, path)? {
            Place::Absent => return Ok(ids),
            Place::Foreign(why) => return Err(op.foreign(why)),
            Place::Half => match fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(op.io(&format!("unlink {}", path.display()), e));
                }
                _ => return Ok(ids),
            },
            Place::Namespace(..) if ids.len() == STACK_LIMIT => {
                let why = format!("over {STACK_LIMIT} mounts are stacked on {}", path.display());
                return Err(op.refused(why));
            }
            Place::Namespace(fd, id) => {
                // An open descriptor would keep it alive.
                drop(fd);
                detach(op, path)?;
                ids.push(id);
            }
        }
    }
}

fn detach(op: &Op, path: &Path) -> Result<()> {
    rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|e| op.io(&format!("unmount {}", path.display()), e.into()))
}

/// Runs `f` on a fresh thread inside the namespace at `path`; the thread ends afterwards.
///
/// # Errors
/// What `f` returns; Refused if there is no network namespace at `path`.
pub fn enter<T: Send>(path: &Path, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let op = Op::new("enter", format!("netns {}", path.display()));
    match look(&op, path)? {
        Place::Namespace(fd, _) => inside_fd(&op, fd, f),
        Place::Foreign(why) => Err(op.foreign(why)),
        Place::Absent => Err(op.refused("there is no such namespace; ensure it first")),
        Place::Half => Err(op.refused("only an empty file is there, half made; ensure the namespace first")),
    }
}

/// As [`enter`], for a verb that is satisfied if there is no namespace.
pub(crate) fn enter_if_there<T: Send>(
    path: &Path,
    f: impl FnOnce() -> Result<T> + Send,
) -> Result<Option<T>> {
    let op = Op::new("enter", format!("netns {}", path.display()));
    match look(&op, path)? {
        Place::Namespace(fd, _) => inside_fd(&op, fd, f).map(Some),
        Place::Foreign(why) => Err(op.foreign(why)),
        Place::Absent | Place::Half => Ok(None),
    }
}

pub(crate) fn inside_fd<T: Send>(op: &Op, fd: OwnedFd, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    on_thread(op, move || {
        rustix::thread::move_into_link_name_space(fd.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|e| op.io("enter the network namespace", e.into()))?;
        drop(fd);
        f()
    })
}

fn on_thread<T: Send>(op: &Op, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".into()).stack_size(256 << 10);
        let handle = thread.spawn_scoped(scope, f).map_err(|e| op.io("start a thread", e))?;
        handle.join().unwrap_or_else(|_| Err(op.failed("the thread inside the namespace panicked")))
    })
}

/// What is at `path`.
pub(crate) fn look(op: &Op, path: &Path) -> Result<Place> {
    let fail = |e: io::Error| op.io(&format!("look at {}", path.display()), e);
    let metadata = match fs::symlink_metadata(path) {
        Ok(m) => m,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Place::Absent),
        Err(e) => return Err(fail(e)),
    };
    if !metadata.file_type().is_file() {
        return Ok(Place::Foreign(describe(&metadata)));
    }
    let fd = match rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
    {
        Ok(fd) => fd,
        Err(rustix::io::Errno::NOENT) => return Ok(Place::Absent),
        Err(e) => return Err(fail(e.into())),
    };
    let statfs = rustix::fs::fstatfs(&fd).map_err(|e| fail(e.into()))?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| fail(e.into()))?;
    if u64::try_from(statfs.f_type).ok() != Some(NSFS_MAGIC) {
        let empty = stat.st_size == 0;
        return Ok(if empty { Place::Half } else { Place::Foreign(describe(&metadata)) });
    }
    const NS_GET_NSTYPE: libc::Ioctl = 0xb703;
    // SAFETY: the request takes no argument and `fd` is open.
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) };
    if kind != libc::CLONE_NEWNET {
        return Ok(Place::Foreign("a namespace of another type".into()));
    }
    let id = (stat.st_dev, stat.st_ino);
    let own = fs::metadata(OWN).map_err(|e| op.io(&format!("look at {OWN}"), e))?;
    if id == (own.dev(), own.ino()) {
        return Ok(Place::Foreign("the daemon's own network namespace".into()));
    }
    Ok(Place::Namespace(fd, id))
}

/// The namespace under this name if it is the one that was seen there.
pub(crate) fn open_known(path: &Path, known: NsId) -> Option<OwnedFd> {
    // Whatever may be there by now: a FIFO would block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&fd).ok()?;
    ((stat.st_dev, stat.st_ino) == known).then_some(fd)
}

fn describe(m: &fs::Metadata) -> String {
    let t = m.file_type();
    match () {
        () if t.is_dir() => "a directory".into(),
        () if t.is_symlink() => "a symbolic link".into(),
        () if t.is_file() => format!("a file with {} bytes in it", m.len()),
        () if t.is_socket() || t.is_fifo() => "a socket or FIFO".into(),
        () => "a device".into(),
    }
}

fn raise_loopback(op: &Op) -> Result<()> {
    // `lo` has index 1 in every namespace.
    let up = |mut r: Rtnl| r.apply(vec![set_up(1, true)], &[]);
    Rtnl::open().and_then(up).map_err(|e| op.netlink("raise lo", e))
}

/// Makes `/run/netns` a shared mount point, as `ip netns add` does: a namespace unmounted here is then unmounted
/// in every mount namespace that was copied from this one, and can die. Costs one system call when it already is.
fn shared_directory(op: &Op) -> Result<()> {
    let share = || rustix::mount::mount_change(DIRECTORY, MountPropagationFlags::SHARED);
    match share() {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::INVAL) => {}
        Err(e) => return Err(op.io(&format!("share {DIRECTORY}"), e.into())),
    }
    fs::create_dir_all(DIRECTORY).map_err(|e| op.io(&format!("create {DIRECTORY}"), e))?;
    // Two that bind at once would stack two mounts; iproute2 takes the same lock.
    let lock = lock(op, Path::new(DIRECTORY), LOCK_WITHIN)?;
    let done = match share() {
        Err(rustix::io::Errno::INVAL) => {
            rustix::mount::mount_bind_recursive(DIRECTORY, DIRECTORY).and_then(|()| share())
        }
        other => other,
    };
    drop(lock);
    done.map_err(|e| op.io(&format!("make {DIRECTORY} a shared mount point"), e.into()))
}

/// Locks a directory, held as long as the descriptor is open.
fn lock(op: &Op, directory: &Path, within: Duration) -> Result<OwnedFd> {
    let fail = |e: rustix::io::Errno| op.io(&format!("lock {}", directory.display()), e.into());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(fail)?;
    let deadline = Instant::now() + within;
    loop {
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(fd),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let why =
                    format!("another process keeps {} locked (flock) for {within:?}", directory.display());
                return Err(op.busy(format!("{why}; /proc/locks names it")));
            }
            Err(e) => return Err(fail(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::host::ErrorClass;

    #[test]
    fn a_lock_held_elsewhere_is_waited_for_and_then_named() {
        let directory = tempfile::tempdir().unwrap();
        let op = Op::new("ensure", "netns x");
        let short = Duration::from_millis(50);
        let held = lock(&op, directory.path(), short).unwrap();
        let error = lock(&op, directory.path(), short).unwrap_err();
        assert_eq!(error.class, ErrorClass::Busy);
        assert!(error.to_string().contains(directory.path().to_str().unwrap()), "{error}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock(&op, directory.path(), Duration::from_secs(60)).map(drop));
            drop(held);
            waiting.join().unwrap().unwrap();
        });
    }
}
