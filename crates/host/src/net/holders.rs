//! Who keeps a network namespace alive. Reads `/proc` only.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use super::netns::NsId;
use super::rtnl::Rtnl;

/// Holders named in an error; the rest are counted.
const NAMED: usize = 8;

/// The processes inside each namespace, by one look at every process.
///
/// # Errors
/// If `/proc` cannot be read: unknown is not empty.
pub(crate) fn inside() -> io::Result<HashMap<NsId, Vec<u32>>> {
    let mut found: HashMap<NsId, Vec<u32>> = HashMap::new();
    scan(false, |pid, _, id| {
        found.entry(id).or_default().push(pid);
        false
    })?;
    Ok(found)
}

/// The processes inside the namespace bound at `path`; none where that cannot be seen.
pub(crate) fn of_name(path: &std::path::Path) -> Vec<u32> {
    let Ok(meta) = fs::metadata(path) else { return Vec::new() };
    inside().ok().and_then(|mut found| found.remove(&(meta.dev(), meta.ino()))).unwrap_or_default()
}

/// Whether a process is inside a namespace now.
pub(crate) fn is_inside(pid: u32, id: NsId) -> io::Result<bool> {
    match fs::metadata(format!("/proc/{pid}/ns/net")) {
        Ok(m) => Ok((m.dev(), m.ino()) == id),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// A process in words.
pub(crate) fn describe(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("process {pid} ({})", name.trim())
}

/// Processes inside one of the namespaces, or inside the one this namespace knows as `nsid` (a name that is
/// already unlinked leaves no inode to compare).
pub(crate) fn of_any(rtnl: &mut Rtnl, ids: &[NsId], nsid: Option<i32>) -> Vec<String> {
    let mut known: Vec<(NsId, bool)> = ids.iter().map(|id| (*id, true)).collect();
    let found = scan(true, |_, path, id| {
        if let Some((_, hit)) = known.iter().find(|(k, _)| *k == id) {
            return *hit;
        }
        let file = File::open(path);
        let hit = nsid.is_some() && file.is_ok_and(|f| rtnl.nsid(f.as_fd()).is_ok_and(|found| found == nsid));
        known.push((id, hit));
        hit
    });
    named(found.unwrap_or_default())
}

/// At most a few by name, the rest as a number.
pub(crate) fn named(mut found: Vec<String>) -> Vec<String> {
    let more = found.len().saturating_sub(NAMED);
    if more > 0 {
        found.truncate(NAMED);
        found.push(format!("{more} more"));
    }
    found
}

/// Looks at the namespace of every process, or of every thread.
fn scan(threads: bool, mut hit: impl FnMut(u32, &str, NsId) -> bool) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc")? {
        let Some(pid) = process?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let mut paths = vec![format!("/proc/{pid}/ns/net")];
        if threads && let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) {
            let tid =
                |t: fs::DirEntry| format!("/proc/{pid}/task/{}/ns/net", t.file_name().to_string_lossy());
            paths.extend(tasks.flatten().map(tid));
        }
        for path in paths {
            match fs::metadata(&path) {
                Ok(m) if hit(pid, &path, (m.dev(), m.ino())) => {
                    found.push(describe(pid));
                    break;
                }
                Ok(_) => {}
                // Ended meanwhile, or a zombie, which holds nothing.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {}
                // More privileged than the daemon (init of a container host, say), so not started by it.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {}
                // Unknown is not empty.
                Err(e) => return Err(e),
            }
        }
    }
    Ok(found)
}
