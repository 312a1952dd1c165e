//! The guest's tap inside a slot's namespace: persistent, one queue, with the guest's gateway address.
//!
//! It must be there before the VMM: Firecracker silently makes one of its own if the name is missing. The header
//! flags of the last one to attach win (`tun_set_iff`), so one made here suits Firecracker and QEMU.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use hearth_core::host::{Census, Sighting};
use hearth_core::network::{SlotIndex, SlotLayout, TAP_ADDRESS, TAP_NAME, TAP_PREFIX_LEN};
use hearth_core::resource::Resource;

use super::error::{Op, Result};
use super::netns;
use super::rtnl::{self, Link, Rtnl};

/// Lists the taps in this instance's namespaces by entering each.
///
/// # Errors
/// If the namespaces cannot be listed.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    inside_each(layout, "tap", |slot| {
        let op = Op::new("census", "tap");
        let link =
            Rtnl::open().and_then(|mut r| r.link(TAP_NAME)).map_err(|e| op.netlink("look for it", e))?;
        Ok(link.map(|l| Sighting {
            resource: Resource::Tap { slot },
            facts: format!(
                "{}, {}",
                if l.persistent_tap { "persistent" } else { "not persistent" },
                state(&l)
            ),
        }))
    })
}

/// A census of a kind that only exists inside the namespaces of this instance.
pub(crate) fn inside_each(
    layout: &SlotLayout,
    kind: &str,
    look: impl Fn(SlotIndex) -> Result<Option<Sighting>> + Sync,
) -> Result<Census> {
    let namespaces = netns::census(layout)?;
    let mut census = Census { incomplete: namespaces.incomplete, ..Census::default() };
    for sighting in namespaces.ours {
        let Resource::Netns { slot } = sighting.resource else { continue };
        match netns::enter_if_there(&netns::path(layout, slot), || look(slot)) {
            Ok(found) => census.ours.extend(found.flatten()),
            Err(e) => census.incomplete.push(format!("{kind} of slot {slot}: {e}")),
        }
    }
    Ok(census)
}

/// Makes the tap, or completes it.
///
/// # Errors
/// Foreign if a link of another type has the name; Busy if a process has a tap of its own making under it;
/// Refused if the namespace is absent.
pub fn ensure(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let op = Op::new("ensure", format!("tap of slot {slot}"));
    netns::enter(&netns::path(layout, slot), || {
        let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
        let link = match find(&op, &mut rtnl)? {
            Some(link) if link.persistent_tap => link,
            _ => {
                create().map_err(|e| match e.raw_os_error() {
                    Some(libc::EBUSY) => {
                        op.busy("a process made it and has it open; it goes with that process")
                    }
                    Some(libc::ENOENT) => op.refused("/dev/net/tun is missing; load the tun module"),
                    _ => op.io("make it", e),
                })?;
                find(&op, &mut rtnl)?.ok_or_else(|| op.failed("it vanished while it was made"))?
            }
        };
        if !link.quiet_v6 {
            rtnl.apply(vec![rtnl::set_quiet_v6(link.index)], &[libc::EAFNOSUPPORT])
                .map_err(|e| op.netlink("keep IPv6 off it", e))?;
        }
        let messages = vec![
            rtnl::add_address(link.index, TAP_ADDRESS, TAP_PREFIX_LEN),
            rtnl::set_forwarding(link.index),
            rtnl::set_up(link.index, true),
        ];
        rtnl.apply(messages, &[libc::EEXIST]).map_err(|e| op.netlink("configure it", e))
    })
}

/// Deletes the tap, whoever has it open. No namespace, no tap: that is success at once.
///
/// # Errors
/// Foreign if a link of another type has the name.
pub fn release(layout: &SlotLayout, slot: SlotIndex, _within: Duration) -> Result<()> {
    let op = Op::new("release", format!("tap of slot {slot}"));
    netns::enter_if_there(&netns::path(layout, slot), || {
        let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
        let Some(link) = find(&op, &mut rtnl)? else { return Ok(()) };
        rtnl.delete_link(link.index).map_err(|e| op.netlink("delete it", e))?;
        match find(&op, &mut rtnl)? {
            Some(l) if l.index == link.index => Err(op.failed("it is still there after its deletion")),
            _ => Ok(()),
        }
    })
    .map(|_| ())
}

/// Lowers and raises the tap, which empties its queue and forgets its neighbours. Call it inside the namespace.
pub(crate) fn cycle(op: &Op, rtnl: &mut Rtnl) -> Result<()> {
    let link =
        find(op, rtnl)?.ok_or_else(|| op.refused("the slot has no tap; release it and make it anew"))?;
    if !(link.persistent_tap && link.forwarding) {
        return Err(op.refused("the slot's tap is not whole; release it and make it anew"));
    }
    let messages = vec![rtnl::set_up(link.index, false), rtnl::set_up(link.index, true)];
    rtnl.apply(messages, &[]).map_err(|e| op.netlink("lower and raise the tap", e))
}

fn find(op: &Op, rtnl: &mut Rtnl) -> Result<Option<Link>> {
    let link = rtnl.link(TAP_NAME).map_err(|e| op.netlink("look for it", e))?;
    match link {
        Some(l) if l.kind != "tun" => Err(op.foreign(format!("{TAP_NAME} is a link of type {:?}", l.kind))),
        other => Ok(other),
    }
}

fn state(link: &Link) -> &'static str {
    if link.up { "up" } else { "down" }
}

/// Makes the persistent device in the calling thread's namespace, with the flags Firecracker attaches with.
fn create() -> io::Result<()> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: an all-zero ifreq is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(TAP_NAME.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which lives here.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: TUNSETPERSIST takes a number.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETPERSIST, 1) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
