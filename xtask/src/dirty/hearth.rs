//! Leftovers of this project's own daemon: whole slots made by the host's own verbs, which no record of a sandbox
//! names.

use std::fmt;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::resource::Resource;
use hearth_host::cgroup::Cgroups;
use hearth_host::net::{host_firewall, netns, sandbox_firewall, tap, veth};

use super::{resident, sweep};
use crate::stop::Stop;

/// More make little difference: the kernel's locks let one link be made at a time.
const MAKERS: u32 = 2;
/// How long killed processes, and one thing of the host, may take to go.
const WITHIN: Duration = Duration::from_secs(10);

/// What to make.
#[derive(Debug, Clone)]
pub(crate) struct Leftovers {
    /// Instance, names and addresses.
    pub(crate) layout: SlotLayout,
    /// Slots 1 to this.
    pub(crate) slots: u32,
    /// Whether to make the host's table.
    pub(crate) rules: bool,
    /// Processes, in the first slots.
    pub(crate) processes: u32,
    /// For the record of the sysctl and the processes' program; made if absent.
    pub(crate) dir: PathBuf,
}

/// What was removed.
#[derive(Debug)]
pub(crate) struct Removed {
    cgroups: usize,
    namespaces: usize,
    links: usize,
    table: bool,
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cgroups, namespaces, links, table } = self;
        write!(f, "{namespaces} namespaces, {links} links of theirs, {cgroups} cgroups")?;
        if *table { f.write_str(", the host's table") } else { Ok(()) }
    }
}

impl Leftovers {
    /// An error if a daemon of this instance left or has anything here.
    pub(crate) fn refuse_if_in_use(&self) -> Result<()> {
        let instance = &self.layout.instance;
        let seen = netns::census(&self.layout)?.ours.len() + veth::census(&self.layout)?.ours.len();
        let cgroups = Cgroups::locate(instance)?;
        ensure!(
            seen == 0 && !cgroups.root().exists(),
            "instance {instance} has slots or cgroups that dirty-host did not make; choose another --instance"
        );
        Ok(())
    }

    /// Makes what is not there yet.
    pub(crate) fn make(&self, stop: &Stop) -> Result<()> {
        let capacity = self.layout.cidr.slot_capacity();
        ensure!(self.slots <= capacity, "{} holds {capacity} slots", self.layout.cidr);
        fs::create_dir_all(&self.dir).with_context(|| format!("make {}", self.dir.display()))?;
        if self.rules {
            host_firewall::ensure(&self.layout, &self.sysctl_record(), &|| ())?;
        }
        let next = AtomicU32::new(1);
        let failed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let makers: Vec<_> = (0..MAKERS)
                .map(|_| {
                    scope.spawn(|| {
                        let made = self.make_slots(&next, &failed, stop);
                        failed.fetch_or(made.is_err(), Ordering::Relaxed);
                        made
                    })
                })
                .collect();
            let ends =
                makers.into_iter().map(|m| m.join().unwrap_or_else(|_| Err(anyhow!("a maker panicked"))));
            ends.collect::<Vec<Result<()>>>().into_iter().collect::<Result<()>>()
        })?;
        self.make_processes()
    }

    fn make_slots(&self, next: &AtomicU32, failed: &AtomicBool, stop: &Stop) -> Result<()> {
        while !failed.load(Ordering::Relaxed) {
            stop.check()?;
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(slot) = SlotIndex::new(n).filter(|_| n <= self.slots) else { break };
            netns::ensure(&self.layout, slot)?;
            veth::ensure(&self.layout, slot)?;
            tap::ensure(&self.layout, slot)?;
            sandbox_firewall::ensure(&self.layout, slot)?;
            if n.is_multiple_of(500) {
                eprintln!("{n} of {} slots made", self.slots);
            }
        }
        Ok(())
    }

    fn make_processes(&self) -> Result<()> {
        let cgroups = Cgroups::locate(&self.layout.instance)?;
        for n in 1..=self.processes {
            let slot = SlotIndex::new(n).context("slot number")?;
            let id = format!("dirty{n:0>11}");
            cgroups.ensure(&id)?;
            if !cgroups.pids(&id)?.is_empty() {
                continue;
            }
            let cgroup = cgroups.open(&id)?;
            let path = self.layout.netns_path(slot);
            let netns = File::open(&path).with_context(|| format!("open {}", path.display()))?;
            resident::start(&self.dir, "hearth", &["shim", &id], cgroup.as_fd(), netns.as_fd())?;
        }
        Ok(())
    }

    /// Removes everything of the instance.
    pub(crate) fn clean(&self) -> Result<Removed> {
        let cgroups = Cgroups::locate(&self.layout.instance)?;
        let mut ended = 0;
        for sighting in cgroups.census()?.ours {
            if let Resource::Cgroup { name } = sighting.resource {
                cgroups.release(&name, WITHIN)?;
                ended += 1;
            }
        }
        cgroups.remove_root()?;
        let ours = |name: &str| self.layout.slot_of_veth(name).is_some();
        let links = sweep::links()?.iter().filter(|name| ours(name)).count();
        let namespaces = self.drop_namespaces(&Stop::default())?;
        let count = u32::try_from(namespaces).unwrap_or(u32::MAX);
        sweep::wait_until_gone(ours, sweep::patience(count), &Stop::default())?;
        if self.rules {
            host_firewall::release(&self.layout, &self.sysctl_record(), WITHIN)?;
        }
        Ok(Removed { cgroups: ended, namespaces, links, table: self.rules })
    }

    /// Drops all namespaces of the instance without waiting; how many.
    pub(crate) fn drop_namespaces(&self, stop: &Stop) -> Result<usize> {
        let census = netns::census(&self.layout)?;
        let mut paths = Vec::new();
        for sighting in census.ours {
            let Resource::Netns { slot } = sighting.resource else { continue };
            let path = self.layout.netns_path(slot);
            // An interrupted making leaves an empty file, which nothing is mounted on.
            if sighting.facts.starts_with("empty") {
                fs::remove_file(&path).with_context(|| format!("unlink {}", path.display()))?;
            } else {
                paths.push(path);
            }
        }
        sweep::drop_namespaces(&paths, stop)
    }

    fn sysctl_record(&self) -> PathBuf {
        self.dir.join("sysctl.json")
    }
}
