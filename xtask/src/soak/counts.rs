//! How much there is of every kind, on the host and in the daemon, as one line of a table.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};
use hearth_testkit::clean_slate::{Inventory, Scope};

use crate::bench::daemon::{Daemon, Ground};

/// Kinds of things on the host, as the inventory calls them, and whether a ready slot has one.
const THINGS: [(&str, bool); 7] = [
    ("netns", true),
    ("link", true),
    ("nft", false),
    ("mount", true),
    ("cgroup", false),
    ("process", false),
    ("file", false),
];
/// What the daemon's memory may grow by: its allocator keeps what a burst needed. KiB.
const MEMORY_SLACK: u64 = 16 << 10;

/// One look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    things: BTreeMap<&'static str, usize>,
    names: Vec<String>,
    /// Slots the daemon keeps ready, which the looker asks it for.
    pub(crate) ready: usize,
    rss_kib: u64,
    threads: u64,
    descriptors: u64,
}

impl Counts {
    /// Looks, in the namespaces of the calling thread.
    pub(crate) fn take(ground: &Ground, daemon: &Daemon) -> Result<Self> {
        let dir = ground.dir().display().to_string();
        let instance = ground.layout.instance.as_str();
        let scope = Scope {
            dirs: vec![ground.instance_dir(), ground.dir().join("r")],
            programs: vec![dir],
            ..Scope::instance(instance, ground.layout.veth_prefix.as_str())
        };
        let inventory = Inventory::take(&scope).context("look at the host")?;
        let names: Vec<String> = inventory.lines().map(str::to_owned).collect();
        let count = |kind: &str| names.iter().filter(|n| n.split(' ').next() == Some(kind)).count();
        let things = THINGS.map(|(kind, _)| (kind, count(kind))).into();
        let proc = format!("/proc/{}", daemon.pid());
        let status = fs::read_to_string(format!("{proc}/status")).context("look at the daemon")?;
        let descriptors = fs::read_dir(format!("{proc}/fd")).context("look at the daemon")?.count() as u64;
        Ok(Self {
            things,
            names,
            ready: 0,
            rss_kib: value(&status, "VmRSS:")?,
            threads: value(&status, "Threads:")?,
            descriptors,
        })
    }

    /// Names of the columns.
    pub(crate) fn heading() -> String {
        let mut line = format!("{:>9}", "");
        for (kind, _) in THINGS {
            line += &format!(" {kind:>8}");
        }
        line + &format!(" {:>8} {:>8} {:>8}", "rss MiB", "threads", "fds")
    }

    /// The columns.
    pub(crate) fn row(&self, label: &str) -> String {
        let mut line = format!("{label:>9}");
        for (kind, _) in THINGS {
            line += &format!(" {:>8}", self.things[kind]);
        }
        line + &format!(" {:>8.1} {:>8} {:>8}", self.rss_kib as f64 / 1024.0, self.threads, self.descriptors)
    }

    /// Whether the things on the host are the same; the daemon itself is left out.
    pub(crate) fn same_things(&self, other: &Self) -> bool {
        self.names == other.names
    }

    /// What there is more of than before, in words. Ready slots are no leak, however many.
    pub(crate) fn beyond(&self, before: &Self) -> Vec<String> {
        let mut beyond = vec![];
        for (kind, in_slots) in THINGS {
            let rest =
                |counts: &Self| counts.things[kind].saturating_sub(if in_slots { counts.ready } else { 0 });
            if rest(self) > rest(before) {
                let all: Vec<&str> = self
                    .names
                    .iter()
                    .filter(|n| n.split(' ').next() == Some(kind))
                    .map(String::as_str)
                    .collect();
                let shown = all[..all.len().min(20)].join("; ");
                beyond.push(format!("{kind}: {} before, {} now: {shown}", rest(before), rest(self)));
            }
        }
        let daemon = [
            ("memory of the daemon, KiB", before.rss_kib + MEMORY_SLACK, self.rss_kib),
            ("threads of the daemon", before.threads, self.threads),
            ("descriptors of the daemon", before.descriptors, self.descriptors),
        ];
        for (what, allowed, now) in daemon {
            if now > allowed {
                beyond.push(format!("{what}: {now}, at most {allowed}"));
            }
        }
        beyond
    }
}

/// The number after a name in `/proc/<pid>/status`.
fn value(status: &str, name: &str) -> Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok());
    word.with_context(|| format!("no {name} in the daemon's status"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(names: &[&str], ready: usize, rss_kib: u64) -> Counts {
        let names: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
        let count = |kind: &str| names.iter().filter(|n| n.split(' ').next() == Some(kind)).count();
        let things = THINGS.map(|(kind, _)| (kind, count(kind))).into();
        Counts { things, names, ready, rss_kib, threads: 5, descriptors: 20 }
    }

    #[test]
    fn more_of_any_kind_is_named_and_ready_slots_are_no_leak() {
        let before = counts(&["netns a", "link a", "mount a", "nft t"], 1, 100);
        let more_ready =
            counts(&["netns a", "netns b", "link a", "link b", "mount a", "mount b", "nft t"], 2, 100);
        assert_eq!(more_ready.beyond(&before), Vec::<String>::new());
        for (kind, _) in THINGS {
            let name = format!("{kind} left");
            let left = counts(&["netns a", "link a", "mount a", "nft t", name.as_str()], 1, 100);
            let beyond = left.beyond(&before);
            assert!(beyond.len() == 1 && beyond[0].contains(&name), "{kind}: {beyond:?}");
        }
        let grown = Counts { threads: 6, descriptors: 21, ..counts(&["nft t"], 0, 100 + MEMORY_SLACK + 1) };
        assert_eq!(grown.beyond(&before).len(), 3, "{:?}", grown.beyond(&before));
    }
}
