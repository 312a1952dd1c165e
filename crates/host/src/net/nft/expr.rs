//! Expressions of nf_tables rules, as many as this crate uses. All match on register 1.

use std::net::Ipv4Addr;

use hearth_core::network::Cidr;

use super::super::attr::Message;
use super::{ACCEPT, DROP, IPV4};

const REGISTER: u32 = 1;
const VERDICT: u32 = 0;
const IFNAMSIZ: usize = 16;

/// One expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Expr {
    /// Loads a property of the packet (`NFT_META_…`).
    Meta(u32),
    /// Goes on only if the register begins with (or, negated, does not begin with) these bytes.
    Compare {
        /// Go on if they differ.
        negated: bool,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Loads bytes of the network header.
    Network {
        /// First byte.
        offset: u32,
        /// How many.
        len: u32,
    },
    /// Masks the register.
    Mask([u8; 4]),
    /// Loads the connection's state bits.
    ConnectionState,
    /// Loads an address.
    Address(Ipv4Addr),
    /// Ends the rule with a verdict.
    Verdict(u32),
    /// Rewrites the source (true) or the destination address to the one in the register.
    Nat {
        /// Source, not destination.
        source: bool,
    },
    /// Rewrites the source to the outgoing link's address.
    Masquerade,
    /// Counts packets; iptables-nft shows one on each of its rules.
    Counter,
    /// The `conntrack` match of iptables for established and related: iptables-nft 1.8.9 calls a whole table
    /// incompatible if a rule in it uses the native expression.
    XtEstablished,
}

const META_NFPROTO: u32 = 15;
const META_IIFNAME: u32 = 6;
const META_OIFNAME: u32 = 7;
/// Established and related, in the bits of the native expression.
const ESTABLISHED: u32 = 2 | 4;
const INVALID: u32 = 1;
/// Offsets in the IPv4 header.
const SOURCE: u32 = 12;
const DESTINATION: u32 = 16;

/// The packet came in by a link whose name is `name`, or begins with it if it ends in `*`.
pub(crate) fn iif(name: &str) -> Vec<Expr> {
    link(META_IIFNAME, name, false)
}

/// The packet leaves by a link whose name is `name`, or begins with it if it ends in `*`.
pub(crate) fn oif(name: &str) -> Vec<Expr> {
    link(META_OIFNAME, name, false)
}

/// The opposite of [`oif`].
pub(crate) fn oif_not(name: &str) -> Vec<Expr> {
    link(META_OIFNAME, name, true)
}

fn link(key: u32, name: &str, negated: bool) -> Vec<Expr> {
    let bytes = match name.strip_suffix('*') {
        Some(prefix) => prefix.as_bytes().to_vec(),
        None => {
            let mut padded = name.as_bytes().to_vec();
            padded.resize(IFNAMSIZ, 0);
            padded
        }
    };
    vec![Expr::Meta(key), Expr::Compare { negated, bytes }]
}

/// The packet is IPv4, which an address match in an inet table must ask first.
pub(crate) fn ipv4() -> Vec<Expr> {
    family(false)
}

/// The packet is not IPv4.
pub(crate) fn not_ipv4() -> Vec<Expr> {
    family(true)
}

fn family(negated: bool) -> Vec<Expr> {
    vec![Expr::Meta(META_NFPROTO), Expr::Compare { negated, bytes: vec![IPV4] }]
}

/// Source address inside a network.
pub(crate) fn from_net(cidr: &Cidr) -> Vec<Expr> {
    address(SOURCE, cidr.base(), cidr.prefix_len(), false)
}

/// Source address outside a network.
pub(crate) fn from_outside(cidr: &Cidr) -> Vec<Expr> {
    address(SOURCE, cidr.base(), cidr.prefix_len(), true)
}

/// Destination address inside a network.
pub(crate) fn to_net(cidr: &Cidr) -> Vec<Expr> {
    address(DESTINATION, cidr.base(), cidr.prefix_len(), false)
}

/// This source address.
pub(crate) fn from(ip: Ipv4Addr) -> Vec<Expr> {
    address(SOURCE, ip, 32, false)
}

/// Any other source address.
pub(crate) fn not_from(ip: Ipv4Addr) -> Vec<Expr> {
    address(SOURCE, ip, 32, true)
}

/// This destination address.
pub(crate) fn to(ip: Ipv4Addr) -> Vec<Expr> {
    address(DESTINATION, ip, 32, false)
}

fn address(offset: u32, ip: Ipv4Addr, prefix_len: u8, negated: bool) -> Vec<Expr> {
    let mut list = vec![Expr::Network { offset, len: 4 }];
    if prefix_len < 32 {
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix_len)).unwrap_or(0);
        list.push(Expr::Mask(mask.to_be_bytes()));
    }
    list.push(Expr::Compare { negated, bytes: ip.octets().to_vec() });
    list
}

/// Belongs to a connection that was let through before.
pub(crate) fn established() -> Vec<Expr> {
    state(ESTABLISHED)
}

/// Belongs to no connection that makes sense, and so escapes address translation.
pub(crate) fn invalid() -> Vec<Expr> {
    state(INVALID)
}

fn state(bits: u32) -> Vec<Expr> {
    vec![
        Expr::ConnectionState,
        Expr::Mask(bits.to_ne_bytes()),
        Expr::Compare { negated: true, bytes: vec![0; 4] },
    ]
}

/// Lets the packet through this chain.
pub(crate) fn accept() -> Vec<Expr> {
    vec![Expr::Verdict(ACCEPT)]
}

/// Ends the packet.
pub(crate) fn drop() -> Vec<Expr> {
    vec![Expr::Verdict(DROP)]
}

impl Expr {
    /// Its name in the kernel.
    fn name(&self) -> &'static str {
        match self {
            Expr::Meta(_) => "meta",
            Expr::Compare { .. } => "cmp",
            Expr::Network { .. } => "payload",
            Expr::Mask(_) => "bitwise",
            Expr::ConnectionState => "ct",
            Expr::Address(_) | Expr::Verdict(_) => "immediate",
            Expr::Nat { .. } => "nat",
            Expr::Masquerade => "masq",
            Expr::Counter => "counter",
            Expr::XtEstablished => "match",
        }
    }

    /// Writes it as `NFTA_EXPR_NAME` and `NFTA_EXPR_DATA`.
    pub(crate) fn write(&self, m: Message) -> Message {
        let value = |bytes: &[u8]| {
            let bytes = bytes.to_vec();
            move |m: Message| m.attr(1, &bytes)
        };
        m.str(1, self.name()).nest(2, |m| match self {
            Expr::Meta(key) => m.be32(2, *key).be32(1, REGISTER),
            Expr::Compare { negated, bytes } => {
                m.be32(1, REGISTER).be32(2, u32::from(*negated)).nest(3, value(bytes))
            }
            Expr::Network { offset, len } => m.be32(1, REGISTER).be32(2, 1).be32(3, *offset).be32(4, *len),
            Expr::Mask(mask) => {
                m.be32(1, REGISTER).be32(2, REGISTER).be32(3, 4).nest(4, value(mask)).nest(5, value(&[0; 4]))
            }
            Expr::ConnectionState => m.be32(2, 0).be32(1, REGISTER),
            Expr::Address(ip) => m.be32(1, REGISTER).nest(2, value(&ip.octets())),
            Expr::Verdict(code) => m.be32(1, VERDICT).nest(2, |m| m.nest(2, |m| m.be32(1, *code))),
            Expr::Nat { source } => m.be32(1, u32::from(!source)).be32(2, u32::from(IPV4)).be32(3, REGISTER),
            Expr::Masquerade => m,
            Expr::Counter => m.be64(1, 0).be64(2, 0),
            Expr::XtEstablished => m.str(1, "conntrack").be32(2, 3).attr(3, &xt_conntrack_established()),
        })
    }
}

/// `struct xt_conntrack_mtinfo3` that matches the states established and related.
fn xt_conntrack_established() -> [u8; 168] {
    const MATCH_FLAGS: usize = 146;
    const STATE_MASK: usize = 150;
    const XT_CONNTRACK_STATE: u16 = 1;
    let mut info = [0; 168];
    info[MATCH_FLAGS..MATCH_FLAGS + 2].copy_from_slice(&XT_CONNTRACK_STATE.to_ne_bytes());
    info[STATE_MASK..STATE_MASK + 2].copy_from_slice(&6u16.to_ne_bytes());
    info
}
