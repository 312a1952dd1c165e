//! The mounts a VMM is given. A mount namespace begins as a copy of its maker's, and every named network namespace is
//! a mount: among 10,000 of them the copy takes 54 ms, and each that goes is unmounted in every copy. So the daemon
//! makes one mount namespace without them, every shim inherits a descriptor of it, and the VMM's own is a copy of that.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use hearth_core::network::NETNS_DIR;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags};
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::mountinfo::{self, MountEntry};

/// Names the inherited descriptor to a shim.
pub(crate) const VARIABLE: &str = "HEARTH_MOUNTS";
/// Its number there: the first after standard error.
pub(crate) const NUMBER: RawFd = 3;
/// `_IO(0xb7, 3)`: the `CLONE_NEW*` flag of a namespace, ioctl_ns(2).
const NS_GET_NSTYPE: libc::c_ulong = 0xb703;

/// Which mounts a program sees.
#[derive(Debug, Clone, Copy, Default)]
pub enum Mounts<'a> {
    /// The caller's, in its namespace.
    #[default]
    Shared,
    /// A namespace of its own, copied from the caller's; mounts made later outside still show inside, none the
    /// other way.
    Own,
    /// As [`Own`](Self::Own), copied from this mount namespace.
    OwnFrom(BorrowedFd<'a>),
}

/// Whether the named network namespaces lie below a mount of their own, so that they can be left out in one step. It is
/// made with the first of them.
pub(crate) fn are_apart() -> bool {
    rustix::fs::statx(CWD, NETNS_DIR, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// A mount namespace as this thread's, but without `/run/netns`. It lives as long as its descriptor.
///
/// `None` where it would not do: mounts made later above one of `paths` would not show in it, as they do in a copy made
/// then; or this process has another root directory than its mount namespace.
///
/// # Errors
/// If the kernel refuses a step.
pub(crate) fn without_netns(paths: &[&Path]) -> io::Result<Option<OwnedFd>> {
    if !all_receive(&mountinfo::read()?, paths) {
        return Ok(None);
    }
    let make = || {
        let root = std::fs::metadata("/")?;
        // SAFETY: changes this thread's mounts, root and working directory alone, and the thread ends here.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
        // Several may lie on one another. EINVAL: nothing is mounted there any more.
        loop {
            match rustix::mount::unmount(NETNS_DIR, UnmountFlags::DETACH) {
                Ok(()) => {}
                Err(rustix::io::Errno::INVAL) => break,
                Err(e) => return Err(e.into()),
            }
        }
        let made = OwnedFd::from(std::fs::File::open("/proc/thread-self/ns/mnt")?);
        // Entering makes the namespace's root the root directory, out of any chroot(2).
        rustix::thread::move_into_link_name_space(
            std::os::fd::AsFd::as_fd(&made),
            Some(LinkNameSpaceType::Mount),
        )?;
        let entered = std::fs::metadata("/")?;
        Ok(((root.dev(), root.ino()) == (entered.dev(), entered.ino())).then_some(made))
    };
    std::thread::scope(|scope| scope.spawn(make).join())
        .unwrap_or_else(|_| Err(io::Error::other("the thread that makes it panicked")))
}

/// Whether mounts made later anywhere at or above these paths show in a copy of the mounts as well.
fn all_receive(mounts: &[MountEntry], paths: &[&Path]) -> bool {
    paths.iter().all(|path| {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        mounts.iter().filter(|m| path.starts_with(&m.point)).all(|m| m.receives)
    })
}

/// The mount namespace that whoever started this process gave it; to the first caller only.
///
/// # Errors
/// If what was given is no such thing.
pub fn inherited() -> io::Result<Option<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if std::env::var_os(VARIABLE).is_none_or(|v| v != *NUMBER.to_string())
        || TAKEN.swap(true, Ordering::AcqRel)
    {
        return Ok(None);
    }
    // SAFETY: the starter put it there for us alone, as the variable says; the flag above keeps it from a second owner.
    // Were the number not open, the check below would find that before anything is closed.
    let given = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(NUMBER) });
    // SAFETY: takes no argument and changes nothing.
    match unsafe { libc::ioctl(given.as_raw_fd(), NS_GET_NSTYPE) } {
        libc::CLONE_NEWNS => {
            let given = std::mem::ManuallyDrop::into_inner(given);
            rustix::io::fcntl_setfd(&given, rustix::io::FdFlags::CLOEXEC)?;
            Ok(Some(given))
        }
        -1 => Err(io::Error::last_os_error()),
        other => Err(io::Error::other(format!("a namespace of type {other:#x}, not of mounts"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(point: &str, receives: bool) -> MountEntry {
        MountEntry { id: 1, point: point.into(), fs_type: "ext4".into(), source: "x".into(), receives }
    }

    #[test]
    fn every_mount_above_a_path_counts() {
        let mounts = [mount("/", true), mount("/private", false), mount("/private/shared", true)];
        for (path, receives) in [("/", true), ("/var/lib", true), ("/private/a", false), ("/privates", true)]
        {
            assert_eq!(all_receive(&mounts, &[Path::new(path)]), receives, "{path}");
        }
        assert!(!all_receive(&mounts, &[Path::new("/"), Path::new("/private/shared/a")]));
    }

    #[test]
    fn a_process_is_given_none_without_a_word() {
        assert!(inherited().unwrap().is_none());
    }
}
