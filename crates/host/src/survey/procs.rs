//! All processes at one moment, with what tells who has what: parents, namespaces, cgroups, and open files.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::unless_gone;
use crate::process;

/// One process.
#[derive(Debug, Clone)]
pub(super) struct Proc {
    pub(super) seen: process::Seen,
    /// Its command line, word by word; empty for a kernel thread.
    pub(super) words: Vec<PathBuf>,
    /// Device and inode of its network namespace; nothing if it is hidden.
    pub(super) netns: Option<(u64, u64)>,
    /// Path of its cgroup2.
    pub(super) cgroup: Option<String>,
}

impl Proc {
    /// Last part of the path it was started by, or its name.
    pub(super) fn program(&self) -> &str {
        let first = self.words.first().and_then(|w| w.file_name()).and_then(OsStr::to_str);
        first.unwrap_or(&self.seen.comm)
    }
}

/// All processes; those that end meanwhile may be missing.
///
/// # Errors
/// If `/proc` cannot be listed, or one that lives cannot be looked at.
pub(super) fn all() -> io::Result<HashMap<u32, Proc>> {
    let mut found = HashMap::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Some(seen) = process::look(pid)? else { continue };
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = line.split(|b| *b == 0).filter(|w| !w.is_empty());
        let words = words.map(|w| Path::new(OsStr::from_bytes(w)).to_owned()).collect();
        let netns = fs::metadata(format!("/proc/{pid}/ns/net")).ok().map(|m| (m.dev(), m.ino()));
        found.insert(pid, Proc { seen, words, netns, cgroup: process::membership::path_of(pid) });
    }
    Ok(found)
}

/// Who has which of some files open.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    /// Path of a file, or of a socket's file, to the processes that have it open.
    pub(super) holders: HashMap<PathBuf, Vec<u32>>,
    /// API sockets with a connection: somebody speaks to whoever listens there.
    pub(super) connected: HashSet<PathBuf>,
    /// Processes whose files could not be seen.
    pub(super) hidden: usize,
}

/// Looks for who has files below `directories` open, sockets by the tables of all network namespaces in use.
pub(super) fn open_files(procs: &HashMap<u32, Proc>, directories: &[PathBuf]) -> OpenFiles {
    let below = |path: &Path| path.parent().is_some_and(|p| directories.iter().any(|d| d == p));
    let mut open = OpenFiles::default();
    let mut sockets: HashMap<u64, PathBuf> = HashMap::new();
    let mut tables: HashSet<(u64, u64)> = HashSet::new();
    for (pid, proc) in procs {
        let Some(netns) = proc.netns else { continue };
        if !tables.insert(netns) {
            continue;
        }
        let text = match unless_gone(fs::read(format!("/proc/{pid}/net/unix"))) {
            Ok(Some(text)) => text,
            other => {
                // One that ended meanwhile: another of the same namespace is as good.
                tables.remove(&netns);
                open.hidden += usize::from(other.is_err());
                continue;
            }
        };
        for (inode, connected, path) in text.split(|b| *b == b'\n').skip(1).filter_map(socket) {
            if below(&path) {
                if connected {
                    open.connected.insert(path.clone());
                }
                sockets.insert(inode, path);
            }
        }
    }
    for pid in procs.keys() {
        let entries = match unless_gone(fs::read_dir(format!("/proc/{pid}/fd"))) {
            Ok(Some(entries)) => entries,
            Ok(None) => continue,
            Err(_) => {
                open.hidden += 1;
                continue;
            }
        };
        for link in entries.flatten().filter_map(|e| fs::read_link(e.path()).ok()) {
            let socket =
                link.to_str().and_then(|l| l.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            let path = match socket {
                Some(inode) => sockets.get(&inode).cloned(),
                None => below(&link).then_some(link),
            };
            if let Some(path) = path {
                let holders = open.holders.entry(path).or_default();
                if !holders.contains(pid) {
                    holders.push(*pid);
                }
            }
        }
    }
    open
}

/// One line of `/proc/net/unix` (proc_pid_net(5)): inode, whether it is an end of a connection, and path.
fn socket(line: &[u8]) -> Option<(u64, bool, PathBuf)> {
    let mut rest = line;
    let mut fields = Vec::new();
    for _ in 0..7 {
        rest = rest.trim_ascii_start();
        let end = rest.iter().position(|b| *b == b' ').unwrap_or(rest.len());
        fields.push(&rest[..end]);
        rest = &rest[end..];
    }
    let path = rest.strip_prefix(b" ")?;
    let inode = std::str::from_utf8(fields.get(6)?).ok()?.parse().ok()?;
    // State 03: connected.
    (!path.is_empty())
        .then(|| (inode, fields[5] == b"03", PathBuf::from(std::ffi::OsString::from_vec(path.to_vec()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_socket_table_is_read() {
        let line = b"0000000000000000: 00000002 00000000 00010000 0001 01 21507 /tmp/fc-a b.sock";
        assert_eq!(socket(line), Some((21_507, false, PathBuf::from("/tmp/fc-a b.sock"))));
        let line = b"0000000000000000: 00000003 00000000 00000000 0001 03   507 /tmp/x";
        assert_eq!(socket(line), Some((507, true, PathBuf::from("/tmp/x"))));
        assert_eq!(socket(b"0000000000000000: 00000003 00000000 00000000 0001 03 29"), None);
    }

    #[test]
    fn holders_of_sockets_and_files_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let file = dir.path().join("f");
        let _open = fs::File::create(&file).unwrap();
        let look = || open_files(&all().unwrap(), &[dir.path().to_owned()]);
        let me = std::process::id();
        let open = look();
        assert_eq!((&open.holders[&path], &open.holders[&file]), (&vec![me], &vec![me]));
        assert!(open.connected.is_empty());
        let _client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let (_server, _) = listener.accept().unwrap();
        assert!(look().connected.contains(&path));
    }
}
