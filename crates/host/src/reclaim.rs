//! Removing one thing that an operator's plan names: known again right before by what the plan says of it, then
//! removed, then seen gone. Whether it is anybody's was decided before; what is not the planned thing stays as it is.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_core::doctor::Identity;
use hearth_core::host::{ErrorClass, HostError};
use hearth_core::layout::Layout;
use hearth_core::network::NETNS_DIR;
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::reclaim_plan::Here;
use rustix::mount::UnmountFlags;

use crate::process::{self, Signal};
use crate::{error, net, survey};

/// Between two looks whether links are gone.
const LOOK: Duration = Duration::from_millis(20);

/// What became of a thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// It was removed, and seen gone.
    Removed,
    /// It was gone already.
    Gone,
}

/// This place and boot.
///
/// # Errors
/// If `/proc` cannot be read.
pub fn here() -> io::Result<Here> {
    let inode = |file: &str| fs::metadata(format!("/proc/thread-self/ns/{file}")).map(|m| m.ino());
    Ok(Here { boot_id: process::boot_id()?.to_owned(), network: inode("net")?, mounts: inode("mnt")? })
}

/// That a file is the one that was planned; nothing if there is none.
///
/// # Errors
/// [`ErrorClass::Foreign`] if another one has its place.
pub fn prove(path: &Path, identity: &Identity) -> Result<Option<()>, HostError> {
    let what = path.display();
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error::os("release", what, "look at it", e)),
    };
    let now = Identity::Inode { device: meta.dev(), inode: meta.ino() };
    if now == *identity {
        return Ok(Some(()));
    }
    let why = format!("another one has its place now: inode {}", meta.ino());
    Err(error::plain("release", what, ErrorClass::Foreign, why))
}

/// Tells a process to end, kills it after `grace`, and waits until it is gone.
///
/// # Errors
/// [`ErrorClass::Foreign`] if its pid is another's now; Deadline if it does not go within `within` of the kill.
pub fn end_process(identity: &ProcessIdentity, grace: Duration, within: Duration) -> Result<Done, HostError> {
    let what = format!("process {}", identity.pid);
    // The descriptor first: the number cannot change hands between the proof and its use.
    let Some(pidfd) = process::pidfd("release", identity.pid)? else { return Ok(Done::Gone) };
    match process::liveness(identity) {
        Liveness::Alive => {}
        Liveness::Unknown(why) => return Err(error::plain("release", what, ErrorClass::Failed, why)),
        Liveness::Gone => {
            return match process::identity_of(identity.pid) {
                Ok(now) if now.start_time != identity.start_time => {
                    let why = format!("its pid belongs to another process now, of tick {}", now.start_time);
                    Err(error::plain("release", what, ErrorClass::Foreign, why))
                }
                _ => Ok(Done::Gone),
            };
        }
    }
    for (signal, name, wait) in [(Signal::TERM, "SIGTERM", grace), (Signal::KILL, "SIGKILL", within)] {
        process::signal(pidfd.as_fd(), signal).map_err(|e| error::os("release", &what, name, e))?;
        let ended = process::wait(pidfd.as_fd(), wait).map_err(|e| error::os("release", &what, "wait", e))?;
        if ended.is_some() {
            return Ok(Done::Removed);
        }
    }
    let why = format!("still there {within:?} after SIGKILL: {}", process::describe(identity.pid));
    Err(error::plain("release", what, ErrorClass::Deadline, why))
}

/// Unlinks a socket or a FIFO.
///
/// # Errors
/// Foreign if another file has its place.
pub fn unlink(path: &Path, identity: &Identity) -> Result<Done, HostError> {
    if prove(path, identity)?.is_none() {
        return Ok(Done::Gone);
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(Done::Removed),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Done::Gone),
        Err(e) => Err(error::os("release", path.display(), "unlink", e)),
    }
}

/// Removes an empty cgroup with those below it, for at most `within`: a process leaves one a moment after its end.
///
/// # Errors
/// Foreign if another one has its place; Busy if processes are in it, which were not planned.
pub fn remove_cgroup(path: &Path, identity: &Identity, within: Duration) -> Result<Done, HostError> {
    let deadline = Instant::now() + within;
    loop {
        if prove(path, identity)?.is_none() {
            return Ok(Done::Gone);
        }
        match crate::cgroup::remove_tree(path) {
            Ok(()) => return Ok(Done::Removed),
            Err(e) if Instant::now() >= deadline => {
                let left = crate::cgroup::pids_below(path).unwrap_or_default();
                let left: Vec<String> = left.into_iter().take(3).map(process::describe).collect();
                let doing = format!("rmdir; in it are [{}]", left.join(", "));
                return Err(error::os("release", path.display(), doing, e));
            }
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Removes namespaces of another orchestrator's slots together, and waits until their links are gone.
///
/// # Errors
/// One answer each. Foreign if another namespace has the name, or a process is inside.
#[must_use]
pub fn remove_namespaces(
    layout: &Layout,
    slots: &[(u32, Identity)],
    within: Duration,
) -> Vec<Result<Done, HostError>> {
    let inside = net::holders::inside();
    let mut answers: Vec<Result<Done, HostError>> =
        slots.iter().map(|(slot, identity)| detach(layout, *slot, identity, &inside)).collect();
    let deadline = Instant::now() + within;
    let mut waiting: HashSet<usize> =
        (0..answers.len()).filter(|n| matches!(answers[*n], Ok(Done::Removed))).collect();
    while !waiting.is_empty() {
        let links = match net::links::slots_with_link(layout) {
            Ok(links) => links,
            Err(e) => {
                let why = e.to_string();
                for n in waiting {
                    answers[n] = Err(error::plain("release", "links", ErrorClass::Failed, &why));
                }
                break;
            }
        };
        waiting.retain(|n| links.contains(&slots[*n].0));
        if Instant::now() >= deadline {
            for n in &waiting {
                let what = survey::other::netns_name(layout, slots[*n].0);
                let why =
                    format!("its name is gone, but its link is there after {within:?}: something holds it");
                answers[*n] = Err(error::plain("release", what, ErrorClass::Deadline, why));
            }
            break;
        }
        if !waiting.is_empty() {
            std::thread::sleep(LOOK);
        }
    }
    answers
}

type Inside = io::Result<std::collections::HashMap<(u64, u64), Vec<u32>>>;

/// Takes the name of one namespace away.
fn detach(layout: &Layout, slot: u32, identity: &Identity, inside: &Inside) -> Result<Done, HostError> {
    let path = Path::new(NETNS_DIR).join(survey::other::netns_name(layout, slot));
    let what = path.display();
    match inside {
        Err(e) => {
            let why = format!("who is inside cannot be seen: {e}");
            return Err(error::plain("release", what, ErrorClass::Failed, why));
        }
        Ok(inside) => {
            if let Identity::Inode { device, inode } = identity
                && let Some(pid) = inside.get(&(*device, *inode)).and_then(|pids| pids.first())
            {
                let why = format!("{} is inside", net::holders::describe(*pid));
                return Err(error::plain("release", what, ErrorClass::Foreign, why));
            }
        }
    }
    if prove(&path, identity)?.is_none() {
        return Ok(Done::Gone);
    }
    rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|e| error::os("release", path.display(), "unmount", e.into()))?;
    // Below it lies the empty file that it was bound on, unless somebody stacked two.
    match fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_file() && meta.len() == 0 => {}
        Ok(_) => {
            let why = "something else lies below it; look at it and remove it by hand";
            return Err(error::plain("release", path.display(), ErrorClass::Foreign, why));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Done::Removed),
        Err(e) => return Err(error::os("release", path.display(), "look below it", e)),
    }
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(error::os("release", path.display(), "unlink", e))
        }
        _ => Ok(Done::Removed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_took_the_place_of_the_planned_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&path, "").unwrap();
        let meta = fs::metadata(&path).unwrap();
        let identity = Identity::Inode { device: meta.dev(), inode: meta.ino() };
        fs::write(&other, "another").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(unlink(&path, &identity).unwrap_err().class, ErrorClass::Foreign);
        let meta = fs::metadata(&path).unwrap();
        let identity = Identity::Inode { device: meta.dev(), inode: meta.ino() };
        assert_eq!(unlink(&path, &identity).unwrap(), Done::Removed);
        assert_eq!(unlink(&path, &identity).unwrap(), Done::Gone);
    }

    #[test]
    fn a_pid_that_is_anothers_now_is_not_signalled() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let now = process::identity_of(child.id()).unwrap();
        let brief = Duration::from_millis(10);
        let earlier = ProcessIdentity { start_time: now.start_time - 1, ..now.clone() };
        let refused = end_process(&earlier, brief, brief).unwrap_err();
        assert_eq!(refused.class, ErrorClass::Foreign, "{refused}");
        assert!(child.try_wait().unwrap().is_none());
        // Our own child is reaped by the wait.
        assert_eq!(
            end_process(&now, Duration::from_secs(30), Duration::from_secs(30)).unwrap(),
            Done::Removed
        );
        assert_eq!(end_process(&now, brief, brief).unwrap(), Done::Gone);
        drop(child.wait());
    }
}
