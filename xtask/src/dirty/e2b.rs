//! Leftovers in the layout of the e2b orchestrator's first generation: namespaces `ns-<n>`, veth pairs `veth-<n>`
//! and `eth0`, a tap and addresses. Rules and processes are in files of their own.
//!
//! Its names carry no instance. What is removed is what the record names: the numbers it holds.

use std::collections::HashSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use hearth_core::id::InstanceName;
use hearth_core::network::{NETNS_DIR, TAP_ADDRESS, TAP_PREFIX_LEN};

use super::{e2b_processes, e2b_rules, sweep};
use crate::program;
use crate::stop::Stop;

/// Greatest slot number.
const MAX: u32 = 32_766;
/// Slots made by one run of `ip`.
const BATCH: usize = 64;
/// Of the addresses the host knows sandboxes by, and of the link pairs.
const HOST_BASE: Ipv4Addr = Ipv4Addr::new(10, 11, 0, 0);
const LINK_BASE: Ipv4Addr = Ipv4Addr::new(10, 12, 0, 0);

/// What to make.
#[derive(Debug, Clone)]
pub(crate) struct Leftovers {
    /// Part of the sandboxes' names.
    pub(crate) instance: InstanceName,
    /// First slot number.
    pub(crate) from: u32,
    /// How many.
    pub(crate) slots: u32,
    /// With rules for this way out.
    pub(crate) rules: Option<String>,
    /// Processes, in the first slots.
    pub(crate) processes: u32,
    /// Whether the cgroup above all sandboxes was not there before.
    pub(crate) own_cgroup_root: bool,
    /// Where sockets and FIFOs go.
    pub(crate) files: PathBuf,
    /// For the processes' program.
    pub(crate) dir: PathBuf,
}

/// What was removed.
#[derive(Debug)]
pub(crate) struct Removed {
    cgroups: usize,
    files: usize,
    namespaces: usize,
    rules: usize,
}

impl fmt::Display for Removed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cgroups, files, namespaces, rules } = self;
        write!(
            f,
            "{namespaces} namespaces with their links, {rules} rules, {cgroups} cgroups, {files} sockets and FIFOs"
        )
    }
}

/// The host's link of a slot.
pub(crate) fn veth(n: u32) -> String {
    format!("veth-{n}")
}

/// The sandbox as the host knows it.
pub(super) fn host_address(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(HOST_BASE) + n)
}

/// The host's end of the link pair; the namespace's is the next address.
fn link_address(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(LINK_BASE) + 2 * n)
}

fn peer_address(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(LINK_BASE) + 2 * n + 1)
}

/// The namespace's file.
pub(super) fn netns_path(n: u32) -> PathBuf {
    Path::new(NETNS_DIR).join(format!("ns-{n}"))
}

impl Leftovers {
    fn numbers(&self) -> std::ops::Range<u32> {
        self.from..self.from + self.slots
    }

    /// An error if one of the numbers is taken.
    pub(crate) fn refuse_if_in_use(&self) -> Result<()> {
        let links: HashSet<String> = sweep::links()?.into_iter().collect();
        let taken = self.numbers().find(|n| netns_path(*n).exists() || links.contains(&veth(*n)));
        ensure!(
            taken.is_none(),
            "slot {} is there and dirty-host did not make it; choose another --from",
            taken.unwrap_or_default()
        );
        Ok(())
    }

    /// Makes what is not there yet.
    pub(crate) fn make(&self, stop: &Stop) -> Result<()> {
        ensure!(self.from >= 1 && self.from + self.slots <= MAX + 1, "slot numbers go from 1 to {MAX}");
        let missing = self.missing(stop)?;
        for (done, batch) in missing.chunks(BATCH).enumerate() {
            stop.check()?;
            program::run("ip", &["-batch", "-"], &lines(batch, outside))?;
            // Entering a namespace takes a process of its own.
            std::thread::scope(|scope| {
                let halves: Vec<_> = batch
                    .chunks(batch.len().div_ceil(2))
                    .map(|half| scope.spawn(|| half.iter().try_for_each(|n| inside(*n))))
                    .collect();
                let mut ends = halves.into_iter().map(|h| h.join());
                ends.try_for_each(|end| end.unwrap_or_else(|_| Err(anyhow!("a maker panicked"))))
            })?;
            program::run("ip", &["-batch", "-"], &lines(batch, last))?;
            eprintln!("{} of {} slots made", done * BATCH + batch.len(), missing.len());
        }
        if let Some(gateway) = &self.rules {
            e2b_rules::remove(self.numbers(), gateway)?;
            e2b_rules::add(self.numbers(), gateway)?;
        }
        e2b_processes::make(self)
    }

    /// Slots to make; what an interrupted call left half made is removed.
    fn missing(&self, stop: &Stop) -> Result<Vec<u32>> {
        // The route is the last thing made.
        let routes = program::run("ip", &["-4", "route", "show", "root", "10.11.0.0/16"], "")?;
        let whole: HashSet<&str> = routes.lines().filter_map(|l| l.split_whitespace().next()).collect();
        let missing: Vec<u32> =
            self.numbers().filter(|n| !whole.contains(host_address(*n).to_string().as_str())).collect();
        self.drop_slots(missing.iter().copied(), stop)?;
        Ok(missing)
    }

    /// Drops the namespaces of these numbers and waits for their links; how many.
    fn drop_slots(&self, numbers: impl Iterator<Item = u32>, stop: &Stop) -> Result<usize> {
        let numbers: Vec<u32> = numbers.collect();
        let paths: Vec<PathBuf> =
            numbers.iter().map(|n| netns_path(*n)).filter(|p| p.symlink_metadata().is_ok()).collect();
        let dropped = sweep::drop_namespaces(&paths, stop)?;
        let links: HashSet<String> = numbers.iter().map(|n| veth(*n)).collect();
        sweep::wait_until_gone(|name| links.contains(name), sweep::patience(self.slots), stop)?;
        Ok(dropped)
    }

    /// Removes everything the record names.
    pub(crate) fn clean(&self) -> Result<Removed> {
        let (cgroups, files) = e2b_processes::clean(self)?;
        // Rules first, as they name links.
        let rules =
            self.rules.as_ref().map_or(Ok(0), |gateway| e2b_rules::remove(self.numbers(), gateway))?;
        let namespaces = self.drop_slots(self.numbers(), &Stop::default())?;
        Ok(Removed { cgroups, files, namespaces, rules })
    }
}

fn lines(numbers: &[u32], of: impl Fn(u32) -> String) -> String {
    numbers.iter().map(|n| of(*n)).collect()
}

fn outside(n: u32) -> String {
    format!(
        "netns add ns-{n}\n\
         link add veth-{n} type veth peer name eth0 netns ns-{n}\n\
         address add {}/31 dev veth-{n}\n\
         link set veth-{n} up\n",
        link_address(n)
    )
}

fn inside(n: u32) -> Result<()> {
    let batch = format!(
        "link set lo up\n\
         address add {peer}/31 dev eth0\n\
         link set eth0 up\n\
         route add default via {link}\n\
         tuntap add dev tap0 mode tap\n\
         address add {TAP_ADDRESS}/{TAP_PREFIX_LEN} dev tap0\n\
         link set tap0 up\n",
        peer = peer_address(n),
        link = link_address(n),
    );
    let run = program::run("ip", &["-n", &format!("ns-{n}"), "-batch", "-"], &batch);
    run.map(drop).with_context(|| format!("inside ns-{n}"))
}

fn last(n: u32) -> String {
    format!("route add {}/32 via {} dev veth-{n}\n", host_address(n), peer_address(n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_from_the_number() {
        assert_eq!(host_address(300), Ipv4Addr::new(10, 11, 1, 44));
        assert_eq!(
            (link_address(1), peer_address(1)),
            (Ipv4Addr::new(10, 12, 0, 2), Ipv4Addr::new(10, 12, 0, 3))
        );
        assert_eq!(peer_address(MAX), Ipv4Addr::new(10, 12, 255, 253));
    }
}
