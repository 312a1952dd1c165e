//! Reads `/proc/thread-self/mountinfo` (proc_pid_mountinfo(5)). Of the thread, since a thread may sit in a
//! mount namespace of its own.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount as the calling thread sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Unique while mounted; a later mount on the same point stands later in the list.
    pub id: u64,
    /// Where.
    pub point: PathBuf,
    /// File system type.
    pub fs_type: String,
    /// The source given to mount(2).
    pub source: String,
    /// Mounts made below it later, where it came from or where it was copied to, show here as well: it has a peer group
    /// or a master.
    pub receives: bool,
}

/// All mounts in the order of the kernel: of two on one point the later covers the earlier.
///
/// # Errors
/// If `/proc` cannot be read, or a line is not of the documented form: a list with holes is no list.
pub fn read() -> io::Result<Vec<MountEntry>> {
    parse(&std::fs::read("/proc/thread-self/mountinfo")?)
}

fn parse(bytes: &[u8]) -> io::Result<Vec<MountEntry>> {
    bytes
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            entry(line).ok_or_else(|| {
                let text = format!("mountinfo line {:?} is not understood", String::from_utf8_lossy(line));
                io::Error::new(io::ErrorKind::InvalidData, text)
            })
        })
        .collect()
}

fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let point = unescape(fields.nth(3)?);
    // Optional fields end with a lone "-".
    let mut receives = false;
    fields.find(|f| {
        receives |= f.starts_with(b"shared:") || f.starts_with(b"master:");
        *f == b"-"
    })?;
    let fs_type = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(MountEntry { id, point: PathBuf::from(OsString::from_vec(point)), fs_type, source, receives })
}

/// Blank, tab, newline and backslash are written as `\040` and so on.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|d| first == b'\\' && d.iter().all(|c| (b'0'..=b'7').contains(c)));
        match digits {
            Some(d) => {
                out.push(d.iter().fold(0u8, |n, c| n.wrapping_mul(8).wrapping_add(c - b'0')));
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_and_optional_fields_are_understood() {
        let text = b"38 31 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n\
            44 23 8:1 /a /mnt/with\\040blank\\134x rw shared:1 master:2 - tmpfs hearth-a rw,size=1k\n";
        let all = parse(text).unwrap();
        assert_eq!(all[0].fs_type, "cgroup2");
        assert_eq!(all[1].point, PathBuf::from("/mnt/with blank\\x"));
        assert_eq!(all[1].source, "hearth-a");
        assert_eq!((all[0].receives, all[1].receives), (false, true));
        assert!(parse(b"38 31 nonsense\n").is_err());
    }

    #[test]
    fn this_thread_sees_a_root() {
        assert!(read().unwrap().iter().any(|m| m.point.as_os_str() == "/"));
    }
}
