//! The veth pair of a slot: host end `<prefix><n>` with the even address of the slot's /31, other end `uplink`
//! inside the slot's namespace with the odd one and the default route.
//!
//! The pair is born in one message with its far end inside the namespace: moving it there later waits for a
//! grace period (20 ms). The host end dies with the namespace, which makes it the witness of the namespace's death.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use hearth_core::host::{Census, Sighting};
use hearth_core::network::{SlotIndex, SlotLayout, UPLINK_NAME};
use hearth_core::resource::Resource;

use super::error::{Op, Result};
use super::netns::{self, Place};
use super::rtnl::{self, Link, Rtnl};

/// Both ends share a /31 (RFC 3021).
const PREFIX_LEN: u8 = 31;

/// Lists the host ends of this instance's pairs, by one dump of links without their counters.
///
/// # Errors
/// If the kernel cannot be asked. A list that changed underneath is reported as incomplete.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    let op = Op::new("census", "veth");
    let mut census = Census::default();
    let links = match Rtnl::open().and_then(|mut r| r.links()) {
        Ok(links) => links,
        Err(e @ super::netlink::NetlinkError::Interrupted) => {
            census.incomplete.push(format!("links: {e}"));
            return Ok(census);
        }
        Err(e) => return Err(op.netlink("list links", e)),
    };
    for link in links {
        match layout.slot_of_veth(&link.name) {
            Some(slot) if link.kind == "veth" => census.ours.push(Sighting {
                resource: Resource::Veth { slot },
                facts: format!("veth, index {}, {}", link.index, if link.up { "up" } else { "down" }),
            }),
            Some(_) => {
                let why = format!("has our name but is {}", kind_in_words(&link));
                census.foreign.insert(link.name, why);
            }
            None if link.name.starts_with(layout.veth_prefix.as_str()) => {
                census.foreign.insert(link.name, "begins with our prefix, but no slot number follows".into());
            }
            None => {}
        }
    }
    Ok(census)
}

/// Makes the pair, or completes one that lacks addresses or routes or is down. A pair whose far end is not in
/// the slot's namespace is made anew.
///
/// # Errors
/// Foreign if a link of another type has the name; Refused if the namespace is absent.
pub fn ensure(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let name = layout.veth(slot);
    let op = Op::new("ensure", format!("veth {name}"));
    let ns = match netns::look(&op, &netns::path(layout, slot))? {
        Place::Namespace(fd, _) => fd,
        Place::Foreign(why) => return Err(op.foreign(format!("its namespace's place is taken by {why}"))),
        Place::Absent | Place::Half => {
            return Err(op.refused(format!("namespace {} is absent; ensure it first", layout.netns(slot))));
        }
    };
    let mut host = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let fd = ns.try_clone().map_err(|e| op.io("duplicate a descriptor", e))?;
    // A socket stays in the namespace it was opened in, whichever thread uses it.
    let mut inner =
        netns::inside_fd(&op, fd, || Rtnl::open().map_err(|e| op.netlink("open a route socket inside", e)))?;

    let (near, far) = match pair(&op, &mut host, &mut inner, &name, ns.as_fd())? {
        Some(pair) => pair,
        None => {
            host.create_veth(&name, UPLINK_NAME, ns.as_fd()).map_err(|e| op.netlink("create the pair", e))?;
            pair(&op, &mut host, &mut inner, &name, ns.as_fd())?
                .ok_or_else(|| op.failed("the pair vanished while it was made"))?
        }
    };
    let (even, odd) = (layout.host_address(slot), layout.sandbox_address(slot));
    if !near.quiet_v6 {
        host.apply(vec![rtnl::set_quiet_v6(near.index)], &[libc::EAFNOSUPPORT])
            .map_err(|e| op.netlink("keep IPv6 off the host's end", e))?;
    }
    if !far.quiet_v6 {
        inner
            .apply(vec![rtnl::set_quiet_v6(far.index)], &[libc::EAFNOSUPPORT])
            .map_err(|e| op.netlink("keep IPv6 off uplink", e))?;
    }
    // The far end first: the near end gets its carrier then, and its route is live from the start.
    inner
        .apply(
            vec![
                rtnl::add_address(far.index, odd, PREFIX_LEN),
                rtnl::set_forwarding(far.index),
                rtnl::set_up(far.index, true),
            ],
            &[libc::EEXIST],
        )
        .map_err(|e| op.netlink("configure uplink", e))?;
    host.apply(
        vec![rtnl::add_address(near.index, even, PREFIX_LEN), rtnl::set_up(near.index, true)],
        &[libc::EEXIST],
    )
    .map_err(|e| op.netlink("configure the host's end", e))?;
    inner
        .apply(vec![rtnl::default_route(far.index, even)], &[])
        .map_err(|e| op.netlink("set the default route inside", e))
}

/// Deletes the pair. Costs a grace period (17-20 ms) under a lock of the whole host: to remove many slots,
/// release their namespaces instead.
///
/// # Errors
/// Foreign if a link of another type has the name.
pub fn release(layout: &SlotLayout, slot: SlotIndex, _within: Duration) -> Result<()> {
    let name = layout.veth(slot);
    let op = Op::new("release", format!("veth {name}"));
    let mut host = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    match host.link(&name).map_err(|e| op.netlink("look for it", e))? {
        None => Ok(()),
        Some(link) if link.kind != "veth" => Err(op.foreign(format!("it is {}", kind_in_words(&link)))),
        Some(link) => {
            // By index: a link that took the name meanwhile is not meant.
            host.delete_link(link.index).map_err(|e| op.netlink("delete it", e))?;
            match host.link_at(link.index).map_err(|e| op.netlink("see it gone", e))? {
                Some(l) if l.name == name => Err(op.failed("it is still there after its deletion")),
                _ => Ok(()),
            }
        }
    }
}

/// Both ends of a pair that is where it belongs. Clears away one that is not.
fn pair(
    op: &Op,
    host: &mut Rtnl,
    inner: &mut Rtnl,
    name: &str,
    ns: BorrowedFd<'_>,
) -> Result<Option<(Link, Link)>> {
    let near = host.link(name).map_err(|e| op.netlink("look for it", e))?;
    if let Some(l) = near.as_ref().filter(|l| l.kind != "veth") {
        return Err(op.foreign(format!("the name is taken by {}", kind_in_words(l))));
    }
    let far = inner.link(UPLINK_NAME).map_err(|e| op.netlink("look for uplink", e))?;
    if let Some(l) = far.as_ref().filter(|l| l.kind != "veth") {
        return Err(op.foreign(format!("uplink inside is {}", kind_in_words(l))));
    }
    if let (Some(near), Some(far)) = (&near, &far) {
        // An index is unique only within a namespace, so the namespaces are compared as well.
        let there = host.nsid(ns).map_err(|e| op.netlink("identify the namespace", e))?;
        if near.peer == Some(far.index) && far.peer == Some(near.index) && near.peer_nsid == there {
            return Ok(Some((near.clone(), far.clone())));
        }
    }
    if let Some(near) = near {
        host.delete_link(near.index).map_err(|e| op.netlink("delete a pair that ends elsewhere", e))?;
    }
    if let Some(far) = far {
        inner.delete_link(far.index).map_err(|e| op.netlink("delete an uplink that ends elsewhere", e))?;
    }
    Ok(None)
}

fn kind_in_words(link: &Link) -> String {
    match link.kind.as_str() {
        "" => "a physical link".into(),
        kind => format!("a link of type {kind}"),
    }
}
