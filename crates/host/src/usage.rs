//! Reads what a sandbox uses: its cgroup's counters, its VMM's process, the slot's tap. All reads are of small
//! files made by the kernel; nothing is entered or changed.
//!
//! The tap is read through the process that is in the slot's namespace (`/proc/<pid>/net/dev`), so no thread has
//! to go there. No file of `/proc/<pid>/net` is kept open: it would hold the namespace.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hearth_core::usage::{CgroupCounters, DiskCounters, NetCounters};

use crate::process::membership;

/// Use of one process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessUse {
    /// CPU time of all its threads, microseconds.
    pub cpu_us: Option<u64>,
    /// Resident set, bytes.
    pub resident_bytes: Option<u64>,
    /// Largest resident set so far, bytes.
    pub resident_peak_bytes: Option<u64>,
    /// Bytes it had from and gave to block devices (`/proc/<pid>/io`, proc_pid_io(5)); no counts of requests.
    pub disk: Option<DiskCounters>,
}

/// The cgroup of a process, if its last part is `name`: any other is shared with strangers.
#[must_use]
pub fn own_cgroup(pid: u32, name: &str) -> Option<PathBuf> {
    let path = membership::path_of(pid)?;
    let inside = path.trim_start_matches('/');
    if Path::new(inside).file_name()? != name || inside.split('/').any(|part| part == "..") {
        return None;
    }
    Some(crate::cgroup::mount_point().ok()??.join(inside))
}

/// The counters of a cgroup; all absent once it is gone.
#[must_use]
pub fn cgroup(dir: &Path) -> CgroupCounters {
    let read = |file: &str| fs::read_to_string(dir.join(file)).ok();
    let number = |file: &str| read(file)?.trim().parse().ok();
    let field = |file: &str, name: &str| field(&read(file)?, name);
    let io = read("io.stat").map(|text| io_totals(&text));
    CgroupCounters {
        cpu_us: field("cpu.stat", "usage_usec"),
        memory_bytes: number("memory.current"),
        memory_peak_bytes: number("memory.peak"),
        oom_kills: field("memory.events", "oom_kill"),
        read_bytes: io.map(|(read, _)| read),
        written_bytes: io.map(|(_, written)| written),
    }
}

/// What a process uses.
#[must_use]
pub fn process(pid: u32) -> ProcessUse {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let kib = |text: &str, name: &str| field(text, name).map(|n: u64| n.saturating_mul(1024));
    let status = read("status");
    let disk = read("io").and_then(|text| {
        Some(DiskCounters {
            read_bytes: field(&text, "read_bytes:")?,
            written_bytes: field(&text, "write_bytes:")?,
            ..DiskCounters::default()
        })
    });
    ProcessUse {
        cpu_us: read("stat").and_then(|text| cpu_us(&text)),
        resident_bytes: status.as_deref().and_then(|text| kib(text, "VmRSS:")),
        resident_peak_bytes: status.as_deref().and_then(|text| kib(text, "VmHWM:")),
        disk,
    }
}

/// The counters of a tap in the network namespace of a process, turned round: what the tap sends the guest
/// receives.
///
/// # Errors
/// If the process is gone, or its namespace has no such link.
pub fn tap(pid: u32, name: &str) -> io::Result<NetCounters> {
    let text = fs::read_to_string(format!("/proc/{pid}/net/dev"))?;
    tap_in(&text, name).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no link {name}")))
}

/// How often the host's OOM killer acted since boot, for whatever reason (`/proc/vmstat`).
#[must_use]
pub fn host_oom_kills() -> Option<u64> {
    field(&fs::read_to_string("/proc/vmstat").ok()?, "oom_kill")
}

/// The value after a name at the beginning of a line.
fn field<T: std::str::FromStr>(text: &str, name: &str) -> Option<T> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == name).then(|| words.next()?.parse().ok())?
    })
}

/// Bytes read and written, over all devices.
fn io_totals(text: &str) -> (u64, u64) {
    let sum = |key: &str| {
        let values = text.split_ascii_whitespace().filter_map(|w| w.strip_prefix(key)?.parse::<u64>().ok());
        values.fold(0, u64::saturating_add)
    };
    (sum("rbytes="), sum("wbytes="))
}

/// Fields 14 and 15 of `/proc/<pid>/stat`, in ticks. The name before them may hold anything.
fn cpu_us(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut ticks = rest.split_ascii_whitespace().skip(11).map(str::parse::<u64>);
    let total = ticks.next()?.ok()?.saturating_add(ticks.next()?.ok()?);
    // SAFETY: a plain library call without pointers.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    let per_second = u64::try_from(per_second).ok().filter(|n| *n > 0)?;
    Some(total.saturating_mul(1_000_000) / per_second)
}

/// `name: bytes packets …` eight times for what was received, then eight for what was sent.
fn tap_in(text: &str, name: &str) -> Option<NetCounters> {
    let values = text.lines().find_map(|l| l.trim_start().strip_prefix(name)?.strip_prefix(':'))?;
    let values: Vec<u64> = values.split_ascii_whitespace().filter_map(|w| w.parse().ok()).collect();
    Some(NetCounters {
        sent_bytes: *values.first()?,
        sent_packets: *values.get(1)?,
        received_bytes: *values.get(8)?,
        received_packets: *values.get(9)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_tap_sends_the_guest_receives() {
        let text = "Inter-|   Receive     |  Transmit\n face |bytes packets\n\
                    tap01:1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  tap0:  10 1 0 0 0 0 0 0  20 2 0 0 0 0 0 0\n";
        let expected =
            NetCounters { sent_bytes: 10, sent_packets: 1, received_bytes: 20, received_packets: 2 };
        assert_eq!(tap_in(text, "tap0"), Some(expected));
        assert_eq!(tap_in(text, "tap"), None);
    }

    #[test]
    fn kernel_texts_are_read_by_whole_names() {
        let events = "low 0\nhigh 0\nmax 7\noom 1\noom_kill 3\noom_group_kill 0\n";
        assert_eq!(field::<u64>(events, "oom_kill"), Some(3));
        assert_eq!(field::<u64>(events, "oom_"), None);
        let io = "8:0 rbytes=1 wbytes=20 rios=9\n8:16 rbytes=4 wbytes=5 dbytes=7\n";
        assert_eq!(io_totals(io), (5, 25));
        let stat = "7 (a) 1 2 (b) S 1 2 3 4 5 6 7 8 9 10 150 50 0";
        assert_eq!(cpu_us(stat), Some(2_000_000));
    }

    #[test]
    fn this_process_uses_something_and_an_absent_one_nothing() {
        let own = process(std::process::id());
        assert!(own.resident_bytes > Some(0) && own.resident_peak_bytes >= own.resident_bytes, "{own:?}");
        assert!(own.cpu_us.is_some());
        assert_eq!(process(u32::MAX), ProcessUse::default());
        assert_eq!(cgroup(Path::new("/nonexistent")), CgroupCounters::default());
        assert_eq!(own_cgroup(std::process::id(), "aaaaaaaaaaaaaaaa"), None);
    }
}
