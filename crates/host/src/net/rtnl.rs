//! rtnetlink in the words of this crate: links, addresses, routes, neighbours, namespace ids. Decides nothing;
//! `veth`, `tap` and `routes` do.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use super::attr::{Message, read_be32, read_i32, read_u32};
use super::netlink::{F_CREATE, F_EXCL, F_REPLACE, NetlinkError, ROUTE, Reply, Result, Socket, tolerate};

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;
const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;

const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_LINKINFO: u16 = 18;
const IFLA_IFALIAS: u16 = 20;
const IFLA_AF_SPEC: u16 = 26;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_EXT_MASK: u16 = 29;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_LINK_NETNSID: u16 = 37;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFLA_INET_CONF: u16 = 1;
const IPV4_DEVCONF_FORWARDING: u16 = 1;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;
const RTEXT_FILTER_SKIP_STATS: u32 = 1 << 3;

const RTNLGRP_LINK: i32 = 1;
/// Answers that surely fit a socket's buffer: each takes about 4 KiB of it.
const LINKS_AT_ONCE: usize = 64;

const IFINFO: usize = 16;
const RTMSG: usize = 12;
const NDMSG: usize = 12;
const AF_INET: u8 = 2;
const AF_INET6: u16 = 10;
const UP: u32 = libc::IFF_UP as u32;

/// A link, as far as this crate looks at one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    /// Number within its namespace.
    pub(crate) index: u32,
    /// Name.
    pub(crate) name: String,
    /// `veth`, `tun`, …; empty for a physical one.
    pub(crate) kind: String,
    /// Its alias (`ip link set … alias`); empty if it has none.
    pub(crate) alias: String,
    /// Administratively up.
    pub(crate) up: bool,
    /// Index of the other end in its own namespace.
    pub(crate) peer: Option<u32>,
    /// The other end's namespace, as an id valid in this namespace.
    pub(crate) peer_nsid: Option<i32>,
    /// IPv4 forwarding from this link.
    pub(crate) forwarding: bool,
    /// No IPv6 address makes itself here (or there is no IPv6).
    pub(crate) quiet_v6: bool,
    /// A tun device in tap mode, persistent, with one queue.
    pub(crate) persistent_tap: bool,
}

/// A route, as far as this crate looks at one.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    /// Destination.
    pub(crate) to: Ipv4Addr,
    /// Destination's prefix length.
    pub(crate) prefix_len: u8,
    /// Routing table.
    pub(crate) table: u32,
    /// `RTN_…`.
    pub(crate) kind: u8,
    /// Outgoing link.
    pub(crate) oif: Option<u32>,
    /// Next hop.
    pub(crate) gateway: Option<Ipv4Addr>,
}

/// A route socket.
#[derive(Debug)]
pub(crate) struct Rtnl(Socket);

fn ifinfo(index: u32, flags: u32, change: u32) -> [u8; IFINFO] {
    let mut b = [0; IFINFO];
    b[4..8].copy_from_slice(&index.to_ne_bytes());
    b[8..12].copy_from_slice(&flags.to_ne_bytes());
    b[12..16].copy_from_slice(&change.to_ne_bytes());
    b
}

fn ask_link(index: u32, name: Option<&str>) -> Message {
    let ask =
        Message::new(RTM_GETLINK, 0).raw(&ifinfo(index, 0, 0)).u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS);
    match name {
        Some(name) => ask.str(IFLA_IFNAME, name),
        None => ask,
    }
}

fn found_link(answer: Result<Reply>) -> Result<Option<Link>> {
    match answer {
        Ok(reply) => parse_link(&reply).map(Some).ok_or(NetlinkError::Malformed("a link without a name")),
        Err(e) if e.errno() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

fn address(kind: u16, flags: u16, index: u32, ip: Ipv4Addr, prefix_len: u8) -> Message {
    Message::new(kind, flags)
        .raw(&[AF_INET, prefix_len, 0, 0])
        .raw(&index.to_ne_bytes())
        .ip(libc::IFA_LOCAL, ip)
        .ip(libc::IFA_ADDRESS, ip)
}

/// Raises or lowers a link.
pub(crate) fn set_up(index: u32, up: bool) -> Message {
    Message::new(RTM_NEWLINK, 0).raw(&ifinfo(index, if up { UP } else { 0 }, UP))
}

/// Gives a link an alias. The kernel does not take one while it makes the link.
pub(crate) fn set_alias(index: u32, alias: &str) -> Message {
    Message::new(RTM_NEWLINK, 0).raw(&ifinfo(index, 0, 0)).attr(IFLA_IFALIAS, alias.as_bytes())
}

/// Turns IPv4 forwarding on for one link. A write below `/proc/sys/net` inside a namespace would cost time
/// proportional to the number of namespaces; this does not.
pub(crate) fn set_forwarding(index: u32) -> Message {
    Message::new(RTM_NEWLINK, 0).raw(&ifinfo(index, 0, 0)).nest(IFLA_AF_SPEC, |m| {
        m.nest(u16::from(AF_INET), |m| m.nest(IFLA_INET_CONF, |m| m.u32(IPV4_DEVCONF_FORWARDING, 1)))
    })
}

/// Keeps IPv6 from giving the link an address. `EAFNOSUPPORT` (no IPv6 at all) is as good.
pub(crate) fn set_quiet_v6(index: u32) -> Message {
    Message::new(RTM_NEWLINK, 0)
        .raw(&ifinfo(index, 0, 0))
        .nest(IFLA_AF_SPEC, |m| m.nest(AF_INET6, |m| m.u8(IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_NONE)))
}

/// Adds an address; `EEXIST` means it was there.
pub(crate) fn add_address(index: u32, ip: Ipv4Addr, prefix_len: u8) -> Message {
    address(RTM_NEWADDR, F_CREATE | F_EXCL, index, ip, prefix_len)
}

/// Deletes an address; `EADDRNOTAVAIL` means it was gone, `ENODEV` that its link is.
pub(crate) fn delete_address(index: u32, ip: Ipv4Addr, prefix_len: u8) -> Message {
    address(RTM_DELADDR, 0, index, ip, prefix_len)
}

/// Sets the default route.
pub(crate) fn default_route(index: u32, via: Ipv4Addr) -> Message {
    Message::new(RTM_NEWROUTE, F_CREATE | F_REPLACE)
        .raw(&[
            AF_INET,
            0,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
            libc::RT_SCOPE_UNIVERSE,
            libc::RTN_UNICAST,
            0,
            0,
            0,
            0,
        ])
        .ip(libc::RTA_GATEWAY, via)
        .u32(libc::RTA_OIF, index)
}

impl Rtnl {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        Socket::open(ROUTE).map(Self)
    }

    /// Works off messages; the first error that is not in `tolerated` counts.
    pub(crate) fn apply(&mut self, messages: Vec<Message>, tolerated: &[i32]) -> Result<()> {
        self.0.requests(messages)?.into_iter().try_for_each(|r| tolerate(r, tolerated))
    }

    /// Works off messages past every error; one result each.
    pub(crate) fn each(&mut self, messages: Vec<Message>) -> Result<Vec<Result<()>>> {
        self.0.requests(messages)
    }

    /// The link with this name.
    pub(crate) fn link(&mut self, name: &str) -> Result<Option<Link>> {
        self.one_link(0, Some(name))
    }

    /// The link with this index.
    pub(crate) fn link_at(&mut self, index: u32) -> Result<Option<Link>> {
        self.one_link(index, None)
    }

    fn one_link(&mut self, index: u32, name: Option<&str>) -> Result<Option<Link>> {
        found_link(self.0.get(ask_link(index, name)))
    }

    /// The links with these names, in their order.
    pub(crate) fn links_named(&mut self, names: &[String]) -> Result<Vec<Option<Link>>> {
        let mut links = Vec::with_capacity(names.len());
        for run in names.chunks(LINKS_AT_ONCE) {
            let answers = self.0.get_each(run.iter().map(|name| ask_link(0, Some(name))).collect())?;
            for answer in answers {
                links.push(found_link(answer)?);
            }
        }
        Ok(links)
    }

    /// Makes a veth pair in one step: this end here and down, the other end inside `netns` and down (raising it
    /// in the same message fails with ENOTCONN). One queue each: more make the teardown slow.
    pub(crate) fn create_veth(&mut self, name: &str, peer: &str, netns: BorrowedFd<'_>) -> Result<()> {
        let fd = u32::try_from(netns.as_raw_fd()).unwrap_or(u32::MAX);
        let queues = |m: Message| m.u32(IFLA_NUM_TX_QUEUES, 1).u32(IFLA_NUM_RX_QUEUES, 1);
        let m = Message::new(RTM_NEWLINK, F_CREATE | F_EXCL).raw(&ifinfo(0, 0, 0)).str(IFLA_IFNAME, name);
        self.0.request(queues(m).nest(IFLA_LINKINFO, |m| {
            m.str(IFLA_INFO_KIND, "veth").nest(IFLA_INFO_DATA, |m| {
                m.nest(VETH_INFO_PEER, |m| {
                    queues(m.raw(&ifinfo(0, 0, 0)).str(IFLA_IFNAME, peer)).u32(IFLA_NET_NS_FD, fd)
                })
            })
        }))
    }

    /// Deletes a link; one that is gone is as good. After the acknowledgement name and index are free.
    pub(crate) fn delete_link(&mut self, index: u32) -> Result<()> {
        tolerate(
            self.0.request(Message::new(RTM_DELLINK, 0).raw(&ifinfo(index, 0, 0))),
            &[libc::ENODEV, libc::ENOENT],
        )
    }

    /// All IPv4 routes of all tables.
    pub(crate) fn routes(&mut self) -> Result<Vec<Route>> {
        let ask = Message::new(RTM_GETROUTE, 0).raw(&[AF_INET]).raw(&[0; RTMSG - 1]);
        let replies = self.0.dump(&ask)?;
        Ok(replies.iter().filter(|r| r.kind == RTM_NEWROUTE).filter_map(parse_route).collect())
    }

    /// Whether there is a default route through `via` out of the link, in the main table.
    pub(crate) fn has_default_route(&mut self, index: u32, via: Ipv4Addr) -> Result<bool> {
        Ok(self.routes()?.iter().any(|r| {
            r.prefix_len == 0
                && r.table == u32::from(libc::RT_TABLE_MAIN)
                && r.oif == Some(index)
                && r.gateway == Some(via)
        }))
    }

    /// Forgets the IPv4 neighbours learnt on one link.
    pub(crate) fn flush_neighbours(&mut self, index: u32) -> Result<()> {
        let replies = self.0.dump(&Message::new(RTM_GETNEIGH, 0).raw(&[AF_INET]).raw(&[0; NDMSG - 1]))?;
        let mut deletions = Vec::new();
        for r in replies.iter().filter(|r| r.kind == RTM_NEWNEIGH) {
            let on_link = r.body.get(4..).and_then(read_u32) == Some(index);
            if let (true, Some(ip)) = (on_link, r.attrs(NDMSG).ip(libc::NDA_DST)) {
                deletions.push(
                    Message::new(RTM_DELNEIGH, 0)
                        .raw(&[AF_INET, 0, 0, 0])
                        .raw(&index.to_ne_bytes())
                        .raw(&[0; 4])
                        .ip(libc::NDA_DST, ip),
                );
            }
        }
        self.apply(deletions, &[libc::ENOENT, libc::ENXIO])
    }

    /// The id by which this namespace knows the one behind `netns`; none if they never met.
    pub(crate) fn nsid(&mut self, netns: BorrowedFd<'_>) -> Result<Option<i32>> {
        const NETNSA_NSID: u16 = 1;
        const NETNSA_FD: u16 = 3;
        let fd = u32::try_from(netns.as_raw_fd()).unwrap_or(u32::MAX);
        let reply = self.0.get(Message::new(RTM_GETNSID, 0).raw(&[0; 4]).u32(NETNSA_FD, fd))?;
        if reply.kind != RTM_NEWNSID {
            return Err(NetlinkError::Malformed("not a namespace id"));
        }
        let id = reply.attrs(4).get(NETNSA_NSID).and_then(read_i32);
        Ok(id.filter(|id| *id >= 0))
    }
}

/// Tells of links of this namespace as they go.
#[derive(Debug)]
pub(crate) struct LinkEvents(Socket);

impl LinkEvents {
    /// Hears of every link that goes from now on.
    pub(crate) fn open() -> Result<Self> {
        let socket = Socket::open(ROUTE)?;
        socket.join(RTNLGRP_LINK)?;
        Ok(Self(socket))
    }

    /// Waits for links to go, at most until `deadline`, and tells their indexes. False if events were lost.
    pub(crate) fn gone(&mut self, deadline: Instant, mut each: impl FnMut(u32)) -> Result<bool> {
        self.0.events(deadline, |kind, body| {
            // Bridges tell of their ports with a family of their own; only AF_UNSPEC is the link itself.
            if kind == RTM_DELLINK
                && body.first() == Some(&0)
                && let Some(index) = body.get(4..).and_then(read_u32)
            {
                each(index);
            }
        })
    }
}

fn parse_link(reply: &Reply) -> Option<Link> {
    const IFLA_TUN_TYPE: u16 = 3;
    const IFLA_TUN_PERSIST: u16 = 6;
    const IFLA_TUN_MULTI_QUEUE: u16 = 7;
    let index = read_u32(reply.body.get(4..)?)?;
    let flags = read_u32(reply.body.get(8..)?)?;
    let attrs = reply.attrs(IFINFO);
    let info = attrs.nested(IFLA_LINKINFO);
    let kind = info.string(IFLA_INFO_KIND).unwrap_or_default();
    let data = info.nested(IFLA_INFO_DATA);
    let byte = |kind| data.get(kind).and_then(|b| b.first()).copied();
    let persistent_tap = kind == "tun"
        && byte(IFLA_TUN_TYPE) == u8::try_from(libc::IFF_TAP).ok()
        && byte(IFLA_TUN_PERSIST) == Some(1)
        && byte(IFLA_TUN_MULTI_QUEUE) != Some(1);
    let spec = attrs.nested(IFLA_AF_SPEC);
    let v4 = spec.nested(u16::from(AF_INET)).get(IFLA_INET_CONF);
    let v6_mode = spec.nested(AF_INET6).get(IFLA_INET6_ADDR_GEN_MODE).and_then(|b| b.first());
    Some(Link {
        index,
        name: attrs.string(IFLA_IFNAME)?,
        kind,
        alias: attrs.string(IFLA_IFALIAS).unwrap_or_default(),
        up: flags & UP != 0,
        peer: attrs.u32(IFLA_LINK),
        peer_nsid: attrs.get(IFLA_LINK_NETNSID).and_then(read_i32),
        // The array starts with the option numbered 1.
        forwarding: v4.and_then(read_u32) == Some(1),
        quiet_v6: v6_mode.is_none_or(|m| *m == IN6_ADDR_GEN_MODE_NONE),
        persistent_tap,
    })
}

fn parse_route(reply: &Reply) -> Option<Route> {
    let [family, prefix_len, _, _, table, _, _, kind] = *reply.body.first_chunk()?;
    if family != AF_INET {
        return None;
    }
    let attrs = reply.attrs(RTMSG);
    Some(Route {
        to: attrs.get(libc::RTA_DST).and_then(read_be32).unwrap_or(0).into(),
        prefix_len,
        table: attrs.u32(libc::RTA_TABLE).unwrap_or(u32::from(table)),
        kind,
        oif: attrs.u32(libc::RTA_OIF),
        gateway: attrs.ip(libc::RTA_GATEWAY),
    })
}
