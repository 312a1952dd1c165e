//! The veth pair of a slot: host end `<prefix><n>` with the even address of the slot's /31, other end `uplink`
//! inside the slot's namespace with the odd one and the default route.
//!
//! The pair is born in one message with its far end inside the namespace: moving it there later waits for a
//! grace period (20 ms). The host end dies with the namespace, which makes it the witness of the namespace's death.
//!
//! A name is no proof (law 3): the prefix may be another instance's too, or an operator's. The host end is ours if
//! its alias is the name of the slot's namespace, or if its other end lies in that namespace, see [`stranger`].

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use hearth_core::host::{Census, Sighting};
use hearth_core::network::{SlotIndex, SlotLayout, UPLINK_NAME};
use hearth_core::resource::Resource;

use super::error::{Op, Result};
use super::links;
use super::netns::{self, Place};
use super::rtnl::{self, Link, Rtnl};

/// Both ends share a /31 (RFC 3021).
pub(crate) const PREFIX_LEN: u8 = 31;

/// Lists the host ends of this instance's pairs: the names of all links, and a closer look at those with the prefix.
///
/// # Errors
/// If the kernel cannot be asked.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    let op = Op::new("census", "veth");
    let mut census = Census::default();
    let mut host = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let prefix = layout.veth_prefix.as_str();
    for link in links::with_prefix(&mut host, prefix).map_err(|e| op.netlink("list links", e))? {
        sort(&op, &mut host, layout, link, &mut census);
    }
    Ok(census)
}

/// Enters a link that has our prefix into a census: ours, foreign, or not known.
pub(super) fn sort(op: &Op, host: &mut Rtnl, layout: &SlotLayout, link: Link, census: &mut Census) {
    let Some(slot) = layout.slot_of_veth(&link.name) else {
        census.foreign.insert(link.name, "begins with our prefix, but no slot number follows".into());
        return;
    };
    match stranger(op, host, layout, slot, &link) {
        Ok(None) => census
            .ours
            .push(Sighting { resource: Resource::Veth { slot }, facts: facts(layout, slot, &link) }),
        Ok(Some(why)) => drop(census.foreign.insert(link.name, why)),
        Err(e) => census.incomplete.push(format!("{}: {e}", link.name)),
    }
}

/// Makes the pair, or completes one that lacks addresses or routes or is down. A pair whose far end is not in
/// the slot's namespace is made anew.
///
/// # Errors
/// Foreign if a link that is not proven ours has the name; Refused if the namespace is absent.
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

    let mut find = |host: &mut Rtnl| pair(&op, host, &mut inner, layout, slot, ns.as_fd());
    let (near, far) = match find(&mut host)? {
        Some(pair) => pair,
        None => {
            host.create_veth(&name, UPLINK_NAME, ns.as_fd()).map_err(|e| op.netlink("create the pair", e))?;
            find(&mut host)?.ok_or_else(|| op.failed("the pair vanished while it was made"))?
        }
    };
    let (even, odd) = (layout.host_address(slot), layout.sandbox_address(slot));
    if near.alias != layout.netns(slot) {
        host.apply(vec![rtnl::set_alias(near.index, &layout.netns(slot))], &[])
            .map_err(|e| op.netlink("mark the host's end", e))?;
    }
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
/// Foreign if a link that is not proven ours has the name.
pub fn release(layout: &SlotLayout, slot: SlotIndex, _within: Duration) -> Result<()> {
    let name = layout.veth(slot);
    let op = Op::new("release", format!("veth {name}"));
    let mut host = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let Some(link) = host.link(&name).map_err(|e| op.netlink("look for it", e))? else { return Ok(()) };
    if let Some(why) = stranger(&op, &mut host, layout, slot, &link)? {
        return Err(op.foreign(why));
    }
    // By index: a link that took the name meanwhile is not meant.
    host.delete_link(link.index).map_err(|e| op.netlink("delete it", e))?;
    match host.link_at(link.index).map_err(|e| op.netlink("see it gone", e))? {
        Some(l) if l.name == name => Err(op.failed("it is still there after its deletion")),
        _ => Ok(()),
    }
}

/// Why a link with the name of the slot's host end is not that end; nothing if it is proven to be. The alias decides
/// if it has hearth's form. Without one the other end does: the pair may be half made.
pub(crate) fn stranger(
    op: &Op,
    host: &mut Rtnl,
    layout: &SlotLayout,
    slot: SlotIndex,
    link: &Link,
) -> Result<Option<String>> {
    if link.kind != "veth" {
        return Ok(Some(format!("has our name but is {}", kind_in_words(link))));
    }
    let ns = layout.netns(slot);
    if link.alias == ns {
        return Ok(None);
    }
    if let Some(instance) = instance_in(&link.alias) {
        return Ok(Some(format!(
            "has our name but its alias is {}, which makes it instance {instance}'s",
            link.alias
        )));
    }
    let known = match (link.peer_nsid, netns::look(op, &netns::path(layout, slot))?) {
        (Some(_), Place::Namespace(fd, _)) => {
            host.nsid(fd.as_fd()).map_err(|e| op.netlink(&format!("identify namespace {ns}"), e))?
        }
        _ => None,
    };
    let ours = known.is_some() && known == link.peer_nsid;
    Ok((!ours)
        .then(|| format!("has our name but not the alias {ns}, and its other end is not in that namespace")))
}

/// The instance named by an alias of hearth's form, `hearth-<instance>-<n>`.
pub(crate) fn instance_in(alias: &str) -> Option<&str> {
    let (instance, n) = alias.strip_prefix("hearth-")?.rsplit_once('-')?;
    (!instance.is_empty() && n.parse().is_ok_and(|n| SlotIndex::new(n).is_some())).then_some(instance)
}

/// Both ends of a pair that is where it belongs. Clears away one of ours that is not.
fn pair(
    op: &Op,
    host: &mut Rtnl,
    inner: &mut Rtnl,
    layout: &SlotLayout,
    slot: SlotIndex,
    ns: BorrowedFd<'_>,
) -> Result<Option<(Link, Link)>> {
    let near = host.link(&layout.veth(slot)).map_err(|e| op.netlink("look for it", e))?;
    if let Some(l) = &near
        && let Some(why) = stranger(op, host, layout, slot, l)?
    {
        return Err(op.foreign(why));
    }
    let far = inner.link(UPLINK_NAME).map_err(|e| op.netlink("look for uplink", e))?;
    if let Some(l) = far.as_ref().filter(|l| l.kind != "veth") {
        return Err(op.foreign(format!("uplink inside is {}", kind_in_words(l))));
    }
    if let (Some(near), Some(far)) = (&near, &far) {
        // An index is unique only within a namespace, so the namespaces are compared as well.
        let there = host.nsid(ns).map_err(|e| op.netlink("identify the namespace", e))?;
        let ends_there = there.is_some() && near.peer_nsid == there;
        if ends_there && near.peer == Some(far.index) && far.peer == Some(near.index) {
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

fn facts(layout: &SlotLayout, slot: SlotIndex, link: &Link) -> String {
    let state = if link.up { "up" } else { "down" };
    let marked = link.alias == layout.netns(slot);
    let proof = if marked { "ours by its alias" } else { "ours by where it ends, half made" };
    format!("veth, index {}, {state}, {proof}", link.index)
}

fn kind_in_words(link: &Link) -> String {
    match link.kind.as_str() {
        "" => "a physical link".into(),
        kind => format!("a link of type {kind}"),
    }
}
