//! `/proc/<pid>/stat` (proc_pid_stat(5)), read so that no process name can forge a field.

use std::io;

/// The fields we use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stat {
    /// The name, at most 15 bytes, any bytes.
    pub(super) comm: String,
    /// State letter.
    pub(super) state: char,
    /// Pid of its parent.
    pub(super) parent: u32,
    /// Threads that are not yet gone.
    threads: u64,
    /// Clock ticks after boot.
    pub(super) start_time: u64,
}

impl Stat {
    /// A zombie or dead. A leader that ended before its other threads shows `Z` too, but is not gone.
    pub(super) fn ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x') && self.threads <= 1
    }
}

pub(super) fn read(pid: u32) -> io::Result<Stat> {
    let bytes = std::fs::read(format!("/proc/{pid}/stat"))?;
    parse(&bytes).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is not understood"))
    })
}

/// Whether this error of [`read`] says that there is no such process: the directory is gone, or the process
/// went while we read.
pub(super) fn says_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

pub(super) fn describe(pid: u32) -> String {
    read(pid).map_or_else(|_| format!("pid {pid}"), |s| format!("pid {pid} {:?} state {}", s.comm, s.state))
}

/// The name may hold blanks and parentheses: it ends at the *last* `)`.
fn parse(bytes: &[u8]) -> Option<Stat> {
    let open = bytes.iter().position(|b| *b == b'(')?;
    let close = bytes.iter().rposition(|b| *b == b')')?;
    let comm = String::from_utf8_lossy(bytes.get(open + 1..close)?).into_owned();
    let rest = std::str::from_utf8(bytes.get(close + 1..)?).ok()?;
    // rest begins with field 3; threads is field 20, start time field 22.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Stat {
        comm,
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        threads: fields.get(17)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_parentheses_forges_nothing() {
        let line = b"42 (a) R 1 (b) S 7) Z 1 42 42 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 9876 0 0";
        let stat = parse(line).unwrap();
        assert_eq!((stat.comm.as_str(), stat.state, stat.start_time), ("a) R 1 (b) S 7", 'Z', 9876));
        assert!(stat.ended());
        let line = b"42 (x) Z 1 42 42 0 -1 4 0 0 0 0 0 0 0 0 20 0 3 0 9876 0 0";
        assert!(!parse(line).unwrap().ended(), "the leader ended, two threads run on");
        assert_eq!(parse(b"42 (x) R 1 2"), None);
    }

    #[test]
    fn absence_is_told_from_other_errors() {
        assert!(says_absent(&read(u32::MAX).unwrap_err()));
        assert!(!read(std::process::id()).unwrap().ended());
    }
}
