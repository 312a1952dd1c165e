//! Limits of the host and how much of them is used, for `hearth doctor`. Looks only; the verdict is
//! [`Limit`]'s own.

use std::fs;
use std::io;
use std::path::Path;

use hearth_core::doctor::{Limit, Room};

use crate::facts::{self, number};
use crate::mountinfo;

/// Free space below which a file system counts as full, and as nearly full.
const DISK_LEAST: u64 = 1 << 30;
const DISK_FAIR: u64 = 5 << 30;

/// What of each limit one sandbox may need: descriptors of shim and VMM, their threads, neighbours on both sides of
/// its link, its namespace, that namespace's mount.
const FILES: u64 = 64;
const TASKS: u64 = 16;
const NEIGHBOURS: u64 = 2;

/// Of what, and where it is kept.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// Number of slots that are configured.
    pub slots: u64,
    /// Where records and disks are.
    pub state_dir: &'a Path,
    /// The daemon, if one runs.
    pub daemon: Option<u32>,
}

/// Looks at all of them. One that cannot be seen says so.
#[must_use]
pub fn look(subject: &Subject<'_>) -> Vec<Limit> {
    let Subject { slots, state_dir, daemon } = *subject;
    let mut all = vec![
        seen("open files of the host", || {
            let text = fs::read_to_string("/proc/sys/fs/file-nr")?;
            let mut numbers = text.split_ascii_whitespace().map(str::parse::<u64>);
            let (used, _, max) = (numbers.next(), numbers.next(), numbers.next());
            Ok(counted(used, max, Some(slots * FILES), "raise fs.file-max"))
        }),
        seen("tasks of the host", || {
            let max = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
            let text = fs::read_to_string("/proc/loadavg")?;
            let used = text.split_ascii_whitespace().nth(3).and_then(|f| f.split_once('/')?.1.parse().ok());
            Ok((used, Some(max), Some(slots * TASKS), "raise kernel.pid_max and kernel.threads-max"))
        }),
        seen("inotify instances per user", || {
            let max = number("/proc/sys/fs/inotify/max_user_instances")?;
            Ok((None, Some(max), None, "raise fs.inotify.max_user_instances"))
        }),
        seen("inotify watches per user", || {
            let max = number("/proc/sys/fs/inotify/max_user_watches")?;
            Ok((None, Some(max), None, "raise fs.inotify.max_user_watches"))
        }),
        seen("neighbour table", || {
            let used = fs::read_to_string("/proc/thread-self/net/arp")?.lines().skip(1).count();
            let todo = "raise net.ipv4.neigh.default.gc_thresh3 (and gc_thresh2)";
            Ok((Some(used as u64), Some(facts::neighbour_limit()?), Some(slots * NEIGHBOURS), todo))
        }),
        seen("tracked connections", || {
            let Some(max) = facts::conntrack_max()? else { return Ok((None, None, None, "")) };
            let used = number("/proc/sys/net/netfilter/nf_conntrack_count").ok();
            Ok((used, Some(max), None, "raise net.netfilter.nf_conntrack_max"))
        }),
        seen("network namespaces", || {
            let used = match fs::read_dir(hearth_core::network::NETNS_DIR) {
                Ok(entries) => entries.count() as u64,
                Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
                Err(e) => return Err(e),
            };
            let max = number("/proc/sys/user/max_net_namespaces")?;
            Ok((Some(used), Some(max), Some(slots), "raise user.max_net_namespaces"))
        }),
        seen("mounts", || {
            let used = mountinfo::read()?.len() as u64;
            Ok((
                Some(used),
                Some(number("/proc/sys/fs/mount-max")?),
                Some(used + slots),
                "raise fs.mount-max",
            ))
        }),
        seen("network block devices", || {
            let max = match number("/sys/module/nbd/parameters/nbds_max") {
                Ok(max) => max,
                // Without the module there is nothing to run out of.
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((None, None, None, "")),
                Err(e) => return Err(e),
            };
            let used = crate::survey::nbd_connected()?;
            Ok((Some(used), Some(max), None, "load nbd with a greater nbds_max"))
        }),
        seen("huge pages", || {
            let text = fs::read_to_string("/proc/meminfo")?;
            let of = |name: &str| {
                let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
                line.and_then(|l| l.split_ascii_whitespace().next()?.parse::<u64>().ok())
            };
            let total = of("HugePages_Total").filter(|n| *n > 0);
            let used = total.zip(of("HugePages_Free")).map(|(total, free)| total.saturating_sub(free));
            Ok((used, total, None, "raise vm.nr_hugepages"))
        }),
        disk(state_dir),
    ];
    if let Some(pid) = daemon {
        all.push(seen("open files of the daemon", || {
            let text = fs::read_to_string(format!("/proc/{pid}/limits"))?;
            let max = text.lines().find_map(|l| l.strip_prefix("Max open files"));
            let max = max.and_then(|l| l.split_ascii_whitespace().next()?.parse().ok());
            let used = fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
            Ok((Some(used), max, None, "raise LimitNOFILE of the daemon's unit"))
        }));
    }
    all
}

/// Used, most, wanted, and what to do.
type Numbers = (Option<u64>, Option<u64>, Option<u64>, &'static str);

fn seen(limit: &str, read: impl FnOnce() -> io::Result<Numbers>) -> Limit {
    match read() {
        Ok((used, max, wanted, todo)) => Limit::counted(limit, used, max, wanted, todo),
        Err(e) => Limit::unseen(limit, e.to_string()),
    }
}

fn counted<E>(
    used: Option<Result<u64, E>>,
    max: Option<Result<u64, E>>,
    wanted: Option<u64>,
    todo: &'static str,
) -> Numbers {
    (used.and_then(Result::ok), max.and_then(Result::ok), wanted, todo)
}

fn disk(dir: &Path) -> Limit {
    const LIMIT: &str = "disk of the state directory, bytes";
    let existing = dir.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let stat = match rustix::fs::statvfs(existing) {
        Ok(stat) => stat,
        Err(e) => return Limit::unseen(LIMIT, format!("{}: {e}", existing.display())),
    };
    let all = stat.f_blocks.saturating_mul(stat.f_frsize);
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let (result, why) = match free {
        0..DISK_LEAST => (Room::Fail, "less than 1 GiB is free"),
        DISK_LEAST..DISK_FAIR => (Room::Warn, "less than 5 GiB are free"),
        _ => (Room::Ok, ""),
    };
    Limit {
        limit: LIMIT.into(),
        used: Some(all.saturating_sub(free)),
        max: Some(all),
        wanted: None,
        result,
        why: why.into(),
        todo: if result == Room::Ok { String::new() } else { format!("free space below {}", dir.display()) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_this_host_can_be_read() {
        let subject = Subject { slots: 10, state_dir: Path::new("/"), daemon: Some(std::process::id()) };
        let all = look(&subject);
        let of = |name: &str| all.iter().find(|l| l.limit.starts_with(name)).unwrap();
        for name in ["open files of the host", "tasks", "disk", "open files of the daemon", "mounts"] {
            let limit = of(name);
            assert!(limit.used.is_some_and(|n| n > 0) && limit.max.is_some(), "{limit:?}");
        }
        assert_eq!(of("mounts").wanted, of("mounts").used.map(|n| n + 10));
    }
}
