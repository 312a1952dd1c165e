//! For tests and benchmarks that need a kernel of their own to play with: runs a closure on a thread in a fresh
//! network and mount namespace. Both end with the thread.

use std::io;
use std::path::Path;

use hearth_core::network::NETNS_DIR;

/// Whether this process may do so: it is root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Takes the bind mount and the file of one namespace away: the least that removes it, and nothing is waited for.
/// The namespace dies later, with its last holder.
///
/// # Errors
/// If nothing is mounted there, or the kernel refuses.
pub fn drop_namespace(path: &Path) -> io::Result<()> {
    use rustix::mount::UnmountFlags;
    rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    std::fs::remove_file(path)
}

/// Runs `f` on a new thread that has network and mount namespaces of its own, with `lo` down and an empty
/// `/run/netns`. Threads that `f` starts inherit them, and all of it ends with the last one, so that even a
/// failed test leaves nothing there. Panics of `f` go on in the caller.
///
/// # Errors
/// If the namespaces cannot be made (not root).
pub fn in_private_namespaces<R: Send>(f: impl FnOnce() -> R + Send) -> io::Result<R> {
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let flags = rustix::thread::UnshareFlags::NEWNET | rustix::thread::UnshareFlags::NEWNS;
            // SAFETY: only this thread's namespaces change (and its own copy of root and working directory
            // is split off); no descriptor table is unshared, and the thread ends with the closure.
            unsafe { rustix::thread::unshare_unsafe(flags) }?;
            use rustix::mount::MountPropagationFlags as Propagation;
            rustix::mount::mount_change("/", Propagation::DOWNSTREAM | Propagation::REC)?;
            // As systemd leaves a host: a mount shows in every copy of the mounts.
            rustix::mount::mount_change("/", Propagation::SHARED | Propagation::REC)?;
            std::fs::create_dir_all(NETNS_DIR)?;
            rustix::mount::mount(
                "hearth-test",
                NETNS_DIR,
                "tmpfs",
                rustix::mount::MountFlags::empty(),
                None,
            )?;
            Ok(f())
        });
        match run.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
