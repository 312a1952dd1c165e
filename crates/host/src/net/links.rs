//! The links whose names begin with a prefix, cheaply: the kernel finds the id of a link's far namespace by a walk
//! over all it knows, so that each closer look costs 75 µs with 4,000 namespaces and 130 µs with 10,000. Names cost 2 µs.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, AsRawFd};

use hearth_core::layout::Layout;
use hearth_core::network::{SlotIndex, SlotLayout};

use super::error::{Op, Result};
use super::netlink::NetlinkError;
use super::netns;
use super::rtnl::{Link, Rtnl};

/// Of the thread: `/proc/net` is the main thread's, `/sys/class/net` that of whoever mounted it.
const NAMES: &str = "/proc/thread-self/net/dev";

/// The links that have an instance's veth prefix, as they were at one moment.
#[derive(Debug)]
pub struct Links {
    /// Slots that have both a link and a namespace of the right name. Taken for ours without a closer look.
    pub(super) beside: BTreeSet<SlotIndex>,
    /// All others.
    pub(super) alone: Vec<Link>,
}

impl Links {
    /// Looks at them.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn of(layout: &SlotLayout) -> Result<Self> {
        let op = Op::new("census", "links");
        let namespaces = netns::named(layout)?;
        let (mut beside, mut alone) = (BTreeSet::new(), Vec::new());
        for name in names_with(layout.veth_prefix.as_str()).map_err(|e| op.netlink("list links", e))? {
            match layout.slot_of_veth(&name) {
                Some(slot) if namespaces.contains(&slot) => drop(beside.insert(slot)),
                _ => alone.push(name),
            }
        }
        let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
        let alone = rtnl.links_named(&alone).map_err(|e| op.netlink("look at links", e))?;
        Ok(Self { beside, alone: alone.into_iter().flatten().collect() })
    }
}

/// All links with names that begin with `prefix`, by name. One that comes or goes meanwhile may or may not be there.
pub(super) fn with_prefix(rtnl: &mut Rtnl, prefix: &str) -> std::result::Result<Vec<Link>, NetlinkError> {
    Ok(rtnl.links_named(&names_with(prefix)?)?.into_iter().flatten().collect())
}

/// Index of each link that has the instance's veth prefix.
///
/// # Errors
/// If the kernel cannot be asked.
pub fn indexes(layout: &SlotLayout) -> Result<HashMap<String, u32>> {
    let op = Op::new("census", "links");
    let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let links =
        with_prefix(&mut rtnl, layout.veth_prefix.as_str()).map_err(|e| op.netlink("list links", e))?;
    Ok(links.into_iter().map(|link| (link.name, link.index)).collect())
}

/// A link that a layout calls a slot's.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) slot: u32,
    pub(crate) name: String,
    pub(crate) index: u32,
    /// Its other end is in the slot's namespace.
    pub(crate) inside: bool,
}

/// The links with a prefix that `slot_of` gives a slot to, and its namespace if there is one.
pub(crate) fn ends(
    prefix: &str,
    slot_of: impl Fn(&str) -> Option<(u32, Option<fs::File>)>,
) -> Result<Vec<End>> {
    let op = Op::new("census", "links");
    let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let links = with_prefix(&mut rtnl, prefix).map_err(|e| op.netlink("list links", e))?;
    let mut found = Vec::new();
    for link in links {
        let Some((slot, namespace)) = slot_of(&link.name) else { continue };
        let known = match (&namespace, link.peer_nsid) {
            // A name that stands for no namespace has no id.
            (Some(file), Some(_)) => rtnl.nsid(file.as_fd()).ok().flatten(),
            _ => None,
        };
        let inside = link.kind == "veth" && known.is_some() && known == link.peer_nsid;
        found.push(End { slot, name: link.name, index: link.index, inside });
    }
    Ok(found)
}

/// Slots of another orchestrator that have a link, by names alone.
pub(crate) fn slots_with_link(layout: &Layout) -> Result<HashSet<u32>> {
    let op = Op::new("census", "links");
    let pattern = &layout.slots.veth;
    let prefix = pattern.to_string();
    let prefix = prefix.split('{').next().unwrap_or_default();
    let names = names_with(prefix).map_err(|e| op.netlink("list links", e))?;
    Ok(names.iter().filter_map(|name| layout.slot_of(pattern, name)).collect())
}

fn names_with(prefix: &str) -> std::result::Result<Vec<String>, NetlinkError> {
    let text = fs::read_to_string(NAMES).map_err(NetlinkError::Socket)?;
    let names = names(&text).ok_or_else(|| {
        let why = format!("{NAMES} is not of the known form");
        NetlinkError::Socket(io::Error::new(io::ErrorKind::InvalidData, why))
    })?;
    let mut names: Vec<String> = names.filter(|n| n.starts_with(prefix)).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// The names in `/proc/net/dev`: two lines of headings, then `  name: 1 2 3 …`. A name has no space and no colon
/// (dev_valid_name in net/core/dev.c).
fn names(text: &str) -> Option<impl Iterator<Item = &str>> {
    let mut lines = text.lines();
    let headings = [lines.next()?, lines.next()?];
    (headings[0].starts_with("Inter-") && headings[1].trim_start().starts_with("face")).then_some(())?;
    Some(lines.filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim()))
}

/// Names of links by their index, without a closer look (netdevice(7)).
#[derive(Debug)]
pub(crate) struct NameOf(UdpSocket);

impl NameOf {
    pub(crate) fn open() -> io::Result<Self> {
        // Any socket of the namespace does; this one is bound to loopback and sends nothing.
        UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("0.0.0.0:0")).map(Self)
    }

    /// Nothing if there is no such link. Never waits for whoever changes links, unlike a question over netlink.
    pub(crate) fn link(&self, index: u32) -> io::Result<Option<String>> {
        // SAFETY: an all-zero ifreq is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        request.ifr_ifru.ifru_ifindex = i32::try_from(index).map_err(io::Error::other)?;
        // SAFETY: SIOCGIFNAME reads and writes one ifreq, which lives here.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SIOCGIFNAME, &raw mut request) } < 0 {
            let e = io::Error::last_os_error();
            return if e.raw_os_error() == Some(libc::ENODEV) { Ok(None) } else { Err(e) };
        }
        // SAFETY: the kernel ends the name with a NUL within the field (netdev_get_name).
        let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
        Ok(Some(name.to_string_lossy().into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_another_form_is_refused() {
        let text = "Inter-|   Receive\n face |bytes\n    lo:  10 0\nhth12:1 2\n  hth7: 0 0\n";
        assert_eq!(names(text).unwrap().collect::<Vec<_>>(), ["lo", "hth12", "hth7"]);
        for other in ["", "lo: 1 2", "Inter-|\nlo: 1\n"] {
            assert!(names(other).is_none(), "{other:?}");
        }
        assert!(names(&fs::read_to_string(NAMES).unwrap()).unwrap().any(|n| n == "lo"));
    }

    #[test]
    fn the_first_link_is_lo() {
        let names = NameOf::open().unwrap();
        assert_eq!(names.link(1).unwrap().as_deref(), Some("lo"));
        assert_eq!(names.link(2_000_000_000).unwrap(), None);
    }
}
