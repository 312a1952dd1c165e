//! What is killed and when: pseudo-random numbers from one seed, so that a run can be repeated as far as the machine
//! repeats itself.

use std::time::Duration;

use anyhow::Result;
use hearth_core::resource::Resource;
use hearth_host::cgroup::Cgroups;
use hearth_host::process;

use crate::bench::daemon::Ground;

/// How long a killed process may take to be gone.
const WITHIN: Duration = Duration::from_secs(20);
/// Longest stay of a sandbox.
const STAY_MS: u64 = 2000;

/// What can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    Daemon,
    Shim,
    Vmm,
}

/// The source of chance.
#[derive(Debug)]
pub(crate) struct Chaos {
    state: u64,
    every: u64,
}

impl Chaos {
    /// One kill in about `every` creates; 0 for none.
    pub(crate) fn new(seed: u64, every: u32) -> Self {
        Self { state: seed, every: every.into() }
    }

    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// How long the next sandbox stays.
    pub(crate) fn stay(&mut self) -> Duration {
        Duration::from_millis(self.next() % STAY_MS)
    }

    /// What to kill now, if anything.
    pub(crate) fn victim(&mut self) -> Option<Victim> {
        if self.every == 0 || !self.next().is_multiple_of(self.every) {
            return None;
        }
        Some([Victim::Daemon, Victim::Shim, Victim::Vmm][usize::try_from(self.next() % 3).unwrap_or(0)])
    }

    /// Kills the shim or the VMM of some sandbox. Whether there was one.
    pub(crate) fn kill(&mut self, victim: Victim, ground: &Ground) -> Result<bool> {
        let cgroups = Cgroups::locate(&ground.layout.instance)?;
        let ids = ids(&cgroups)?;
        if ids.is_empty() {
            return Ok(false);
        }
        let id = &ids[usize::try_from(self.next() % ids.len() as u64).unwrap_or(0)];
        for pid in cgroups.pids(id)? {
            // The VMM `process` is the guest agent's program.
            let is_vmm = process::comm(pid).is_some_and(|comm| comm.starts_with("hearth-guest"));
            if is_vmm != (victim == Victim::Vmm) {
                continue;
            }
            // Gone meanwhile: by a delete.
            let Ok(identity) = process::identity_of(pid) else { continue };
            // The number may have changed hands since it was read in the cgroup.
            if cgroups.pids(id)?.contains(&pid) {
                process::release(&identity, WITHIN)?;
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The sandboxes that have a cgroup.
pub(crate) fn ids(cgroups: &Cgroups) -> Result<Vec<String>> {
    let seen = cgroups.census()?.ours.into_iter();
    let names = seen.filter_map(|sighting| match sighting.resource {
        Resource::Cgroup { name } => Some(name),
        _ => None,
    });
    Ok(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_itself_and_nothing_is_killed_when_not_asked() {
        let kills = |seed, every| {
            let mut chaos = Chaos::new(seed, every);
            (0..1000).map(|_| chaos.victim()).collect::<Vec<_>>()
        };
        assert_eq!(kills(7, 20), kills(7, 20));
        assert_ne!(kills(7, 20), kills(8, 20));
        assert!(kills(7, 0).iter().all(Option::is_none));
        for victim in [Victim::Daemon, Victim::Shim, Victim::Vmm] {
            assert!(kills(7, 20).contains(&Some(victim)), "{victim:?}");
        }
    }
}
