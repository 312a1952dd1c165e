//! Which numbers are taken, in a time that thousands of leftovers do not spoil.

use hearth_core::host::{Census, Sighting};
use hearth_core::network::SlotLayout;
use hearth_core::resource::Resource;

use crate::net::error::{Op, Result};
use crate::net::links::Links;
use crate::net::rtnl::Rtnl;
use crate::net::{netns, veth};

/// Namespaces and links; see [`hearth_core::host::Host::census_slots`].
///
/// # Errors
/// If either cannot be listed at all.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    let op = Op::new("census", "slots");
    let mut census = netns::census(layout)?;
    // After the namespaces: a link that goes with its namespace in between is not taken for one without.
    let links = Links::of(layout)?;
    for slot in links.beside {
        let facts = "a link beside its namespace".to_owned();
        census.ours.push(Sighting { resource: Resource::Veth { slot }, facts });
    }
    let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    for link in links.alone {
        veth::sort(&op, &mut rtnl, layout, link, &mut census);
    }
    Ok(census)
}
