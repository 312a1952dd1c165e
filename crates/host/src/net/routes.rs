//! Routes of the host that a slot CIDR would collide with. Read-only; asked once at start.

use hearth_core::network::{Cidr, SlotLayout};

use super::error::{Op, Result};
use super::links::{Links, NameOf};
use super::rtnl::{Link, Route, Rtnl};
use super::veth;

/// Host routes that overlap the layout's CIDR, in words, without those over our own veths. Default routes
/// (length 0, or 1 as VPN clients set them) overlap everything and do not count; neither do routes that only
/// refuse, since ours are more specific.
///
/// # Errors
/// If the routes cannot be listed.
pub fn overlapping(layout: &SlotLayout, links: &Links) -> Result<Vec<String>> {
    let op = Op::new("census", "host routes");
    let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
    let routes = rtnl.routes().map_err(|e| op.netlink("list routes", e))?;
    let mut found = Vec::new();
    let names = NameOf::open().map_err(|e| op.io("open a socket", e))?;
    for route in routes.iter().filter(|r| collides(r, &layout.cidr)) {
        let name = route.oif.and_then(|index| names.link(index).ok().flatten());
        let slot = name.and_then(|name| layout.slot_of_veth(&name));
        if slot.is_some_and(|slot| links.beside.contains(&slot)) {
            continue;
        }
        let link = match route.oif {
            Some(index) => rtnl.link_at(index).map_err(|e| op.netlink("name a route's link", e))?,
            None => None,
        };
        let our_slot = |l: &Link| layout.slot_of_veth(&l.name);
        let ours = match link.as_ref().and_then(|l| Some((l, our_slot(l)?))) {
            Some((link, slot)) => veth::stranger(&op, &mut rtnl, layout, slot, link)?.is_none(),
            None => false,
        };
        if !ours {
            found.push(in_words(route, link.as_ref().map(|l| l.name.as_str())));
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn collides(route: &Route, cidr: &Cidr) -> bool {
    let carries = matches!(
        route.kind,
        libc::RTN_UNICAST | libc::RTN_LOCAL | libc::RTN_BROADCAST | libc::RTN_ANYCAST | libc::RTN_NAT
    );
    // Parsing also checks what the kernel said.
    let other = format!("{}/{}", route.to, route.prefix_len).parse::<Cidr>();
    carries && route.prefix_len > 1 && other.is_ok_and(|o| o.overlaps(cidr))
}

fn in_words(route: &Route, link: Option<&str>) -> String {
    let what = match route.kind {
        libc::RTN_LOCAL => "own address",
        libc::RTN_BROADCAST => "broadcast address",
        _ => "route to",
    };
    let via = route.gateway.map(|g| format!(" via {g}")).unwrap_or_default();
    let dev = link.map(|l| format!(" on {l}")).unwrap_or_default();
    let table = match route.table {
        254 | 255 => String::new(),
        n => format!(" (table {n})"),
    };
    format!("{what} {}/{}{via}{dev}{table}", route.to, route.prefix_len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn defaults_and_refusals_do_not_collide() {
        let cidr: Cidr = "10.12.0.0/16".parse().unwrap();
        let route = |to: [u8; 4], prefix_len, kind| Route {
            to: Ipv4Addr::from(to),
            prefix_len,
            table: 254,
            kind,
            oif: None,
            gateway: None,
        };
        assert!(collides(&route([10, 0, 0, 0], 8, libc::RTN_UNICAST), &cidr));
        assert!(collides(&route([10, 12, 3, 4], 32, libc::RTN_LOCAL), &cidr));
        assert!(!collides(&route([0, 0, 0, 0], 0, libc::RTN_UNICAST), &cidr));
        assert!(!collides(&route([0, 0, 0, 0], 1, libc::RTN_UNICAST), &cidr));
        assert!(!collides(&route([10, 0, 0, 0], 8, libc::RTN_UNREACHABLE), &cidr));
        assert!(!collides(&route([10, 13, 0, 0], 16, libc::RTN_UNICAST), &cidr));
    }
}
