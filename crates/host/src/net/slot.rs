//! A slot as a whole: putting a used one back into the state its parts were made in, and removing many.

mod census;
mod dying;
mod held;
mod release;

use hearth_core::network::{SlotIndex, SlotLayout, UPLINK_NAME};

use super::error::{Op, Result};
use super::rtnl::Rtnl;
use super::{netns, sandbox_firewall, tap};

pub use census::census;
pub use release::{OwnProcesses, release, release_one};

/// Fresh rules, no connection tracked, no neighbour learnt, an empty tap queue. Call it when every process of the
/// former owner was seen gone.
///
/// # Errors
/// Refused if a part of the slot is missing; release it then.
pub fn reset(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let op = Op::new("reset", format!("slot {slot}"));
    netns::enter(&netns::path(layout, slot), || {
        let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
        let uplink = rtnl.link(UPLINK_NAME).map_err(|e| op.netlink("look for uplink", e))?;
        let uplink = uplink
            .filter(|l| l.kind == "veth" && l.up && l.forwarding)
            .ok_or_else(|| op.refused("uplink is missing or not whole; release the slot and make it anew"))?;
        let routed = rtnl.has_default_route(uplink.index, layout.host_address(slot));
        if !routed.map_err(|e| op.netlink("look for the default route", e))? {
            return Err(op.refused("the default route is missing; release the slot and make it anew"));
        }
        // Down first: nothing of the former guest's may create an entry after the flush.
        tap::cycle(&op, &mut rtnl)?;
        rtnl.flush_neighbours(uplink.index).map_err(|e| op.netlink("forget neighbours", e))?;
        sandbox_firewall::reset_inside(&op, layout, slot)
    })
}
