//! What slots are made of: namespaces with who is inside, links, and what lives inside a namespace.

use std::collections::HashSet;

use hearth_core::doctor::{Identity, ItemKind, Thing};
use hearth_core::network::SlotIndex;
use hearth_core::resource::Resource;

use super::{Scan, of_census, with_inode};
use crate::kernel_host::HostConfig;
use crate::net::{self, holders};
use crate::process;

/// Strangers named with a namespace.
const NAMED: usize = 3;

pub(super) fn namespaces(config: &HostConfig) -> Scan {
    let layout = &config.layout;
    let (inside, seen_inside) = match holders::inside() {
        Ok(inside) => (inside, Ok(())),
        Err(e) => (Default::default(), Err(e)),
    };
    let mut scan = of_census(ItemKind::Netns, net::netns::census(layout), |resource, thing| {
        let slot = slot_of(resource)?;
        let thing = Thing { name: layout.netns(slot), slot: Some(slot.get()), ..thing };
        let mut thing = with_inode(thing, &layout.netns_path(slot))?;
        if let Identity::Inode { device, inode } = thing.identity
            && let Some(pids) = inside.get(&(device, inode))
        {
            let strangers: Vec<u32> = pids
                .iter()
                .copied()
                .filter(|pid| !process::membership::in_instance(*pid, layout.instance.as_str()))
                .collect();
            let named: Vec<String> =
                strangers.iter().take(NAMED).map(|pid| holders::describe(*pid)).collect();
            if !named.is_empty() {
                let all = strangers.len();
                thing.facts.push(format!("{all} processes inside that are not ours: {}", named.join(", ")));
            }
        }
        Some(thing)
    });
    for thing in scan.things.iter_mut().filter(|t| t.foreign.is_some()) {
        thing.slot = layout.slot_of_netns(&thing.name).map(SlotIndex::get);
    }
    if let Err(e) = seen_inside {
        scan.unseen.push(format!("netns: who is inside: {e}"));
    }
    scan
}

pub(super) fn links(config: &HostConfig) -> Scan {
    let layout = &config.layout;
    let mut scan = of_census(ItemKind::Veth, net::veth::census(layout), |resource, thing| {
        let slot = slot_of(resource)?;
        Some(Thing { name: layout.veth(slot), slot: Some(slot.get()), ..thing })
    });
    let ours: HashSet<String> =
        scan.things.iter().filter(|t| t.foreign.is_none()).map(|t| t.name.clone()).collect();
    match net::links::indexes(layout) {
        Ok(indexes) => {
            for thing in &mut scan.things {
                if let Some(index) = indexes.get(&thing.name).filter(|_| ours.contains(&thing.name)) {
                    thing.identity = Identity::Link { index: *index };
                }
            }
        }
        Err(e) => scan.unseen.push(e.to_string()),
    }
    scan
}

pub(super) fn taps(config: &HostConfig) -> Scan {
    inside(ItemKind::Tap, config, net::tap::census(&config.layout))
}

pub(super) fn firewalls(config: &HostConfig) -> Scan {
    inside(ItemKind::SandboxFirewall, config, net::sandbox_firewall::census(&config.layout))
}

fn inside(
    kind: ItemKind,
    config: &HostConfig,
    census: Result<hearth_core::host::Census, hearth_core::host::HostError>,
) -> Scan {
    of_census(kind, census, |resource, thing| {
        let slot = slot_of(resource)?;
        let name = format!("in {}", config.layout.netns(slot));
        Some(Thing { name, slot: Some(slot.get()), ..thing })
    })
}

fn slot_of(resource: &Resource) -> Option<SlotIndex> {
    match resource {
        Resource::Netns { slot }
        | Resource::Veth { slot }
        | Resource::Tap { slot }
        | Resource::SandboxFirewall { slot } => Some(*slot),
        _ => None,
    }
}
