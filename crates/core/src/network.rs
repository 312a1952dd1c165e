//! Slots: the number, its names and its addresses. All are computed, none is stored.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::id::{InstanceName, VethPrefix};

/// Address of the tap inside a slot's namespace: the guest's gateway. The same in every slot, so that a
/// snapshot fits any slot.
pub const TAP_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// Address of every guest.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// Prefix length of the tap link.
pub const TAP_PREFIX_LEN: u8 = 30;
/// MAC address of every guest's network card (locally administered).
pub const GUEST_MAC: &str = "06:00:ac:10:00:02";
/// The tap's name inside the namespace.
pub const TAP_NAME: &str = "tap0";
/// Where named network namespaces are bound (ip-netns(8)).
pub const NETNS_DIR: &str = "/run/netns";
/// The inner veth end's name inside the namespace.
pub const UPLINK_NAME: &str = "uplink";

/// Destinations no guest may reach: the host's private ranges, link-local (cloud metadata), loopback,
/// carrier-grade NAT, multicast and reserved (RFC 6890).
pub const BLOCKED_DESTINATIONS: &[Cidr] = &[
    Cidr::new_const([0, 0, 0, 0], 8),
    Cidr::new_const([10, 0, 0, 0], 8),
    Cidr::new_const([100, 64, 0, 0], 10),
    Cidr::new_const([127, 0, 0, 0], 8),
    Cidr::new_const([169, 254, 0, 0], 16),
    Cidr::new_const([172, 16, 0, 0], 12),
    Cidr::new_const([192, 168, 0, 0], 16),
    Cidr::new_const([224, 0, 0, 0], 3),
];

/// An IPv4 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    base: u32,
    prefix_len: u8,
}

/// Why a CIDR was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not an IPv4 network: {why}")]
pub struct CidrError {
    /// The text as given.
    pub given: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl Cidr {
    const fn new_const(octets: [u8; 4], prefix_len: u8) -> Self {
        Self { base: u32::from_be_bytes(octets), prefix_len }
    }

    /// First address.
    #[must_use]
    pub fn base(&self) -> Ipv4Addr {
        Ipv4Addr::from(self.base)
    }

    /// Prefix length, 0 to 32.
    #[must_use]
    pub fn prefix_len(&self) -> u8 {
        self.prefix_len
    }

    fn mask(&self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.prefix_len)).unwrap_or(0)
    }

    /// Whether `ip` lies inside.
    #[must_use]
    pub fn contains(&self, ip: Ipv4Addr) -> bool {
        u32::from(ip) & self.mask() == self.base
    }

    /// Whether the two share an address.
    #[must_use]
    pub fn overlaps(&self, other: &Cidr) -> bool {
        self.contains(other.base()) || other.contains(self.base())
    }

    /// How many slots fit: one /31 each, the first pair left unused since slots count from 1.
    #[must_use]
    pub fn slot_capacity(&self) -> u32 {
        let pairs = 1u64 << (32 - u32::from(self.prefix_len)).saturating_sub(1);
        u32::try_from(pairs.saturating_sub(1)).unwrap_or(u32::MAX).min(SlotIndex::MAX)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;
    fn from_str(s: &str) -> Result<Self, CidrError> {
        let fail = |why| CidrError { given: s.to_owned(), why };
        let (ip, len) = s.split_once('/').ok_or_else(|| fail("write ADDRESS/LENGTH"))?;
        let ip: Ipv4Addr = ip.parse().map_err(|_| fail("the address does not parse"))?;
        let prefix_len: u8 = len.parse().map_err(|_| fail("the length does not parse"))?;
        if prefix_len > 32 {
            return Err(fail("the length is over 32"));
        }
        let cidr = Self { base: u32::from(ip), prefix_len };
        if cidr.base & !cidr.mask() != 0 {
            return Err(fail("address bits are set beyond the length"));
        }
        Ok(cidr)
    }
}

impl TryFrom<String> for Cidr {
    type Error = CidrError;
    fn try_from(s: String) -> Result<Self, CidrError> {
        s.parse()
    }
}

impl From<Cidr> for String {
    fn from(c: Cidr) -> String {
        c.to_string()
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base(), self.prefix_len)
    }
}

/// Number of a network slot, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlotIndex(u32);

impl SlotIndex {
    /// Greatest number: five digits, and the pairs of a /16 less one.
    pub const MAX: u32 = 32_767;

    /// The slot with this number, if there can be one.
    #[must_use]
    pub fn new(n: u32) -> Option<Self> {
        (1..=Self::MAX).contains(&n).then_some(Self(n))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for SlotIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What all slots of one instance have in common; names and addresses follow from it and a number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLayout {
    /// Whose slots.
    pub instance: InstanceName,
    /// First part of host veth names.
    pub veth_prefix: VethPrefix,
    /// One /31 per slot.
    pub cidr: Cidr,
}

impl SlotLayout {
    /// The namespace's name in `/run/netns`.
    #[must_use]
    pub fn netns(&self, n: SlotIndex) -> String {
        format!("hearth-{}-{n}", self.instance)
    }

    /// The file its namespace is bound on.
    #[must_use]
    pub fn netns_path(&self, n: SlotIndex) -> std::path::PathBuf {
        std::path::Path::new(NETNS_DIR).join(self.netns(n))
    }

    /// The host veth's name.
    #[must_use]
    pub fn veth(&self, n: SlotIndex) -> String {
        format!("{}{n}", self.veth_prefix)
    }

    /// The host side's address: the even one of the pair.
    #[must_use]
    pub fn host_address(&self, n: SlotIndex) -> Ipv4Addr {
        Ipv4Addr::from(self.cidr.base + 2 * n.get())
    }

    /// The sandbox as the host sees it: the odd address of the pair.
    #[must_use]
    pub fn sandbox_address(&self, n: SlotIndex) -> Ipv4Addr {
        Ipv4Addr::from(self.cidr.base + 2 * n.get() + 1)
    }

    /// The host's firewall table.
    #[must_use]
    pub fn host_table(&self) -> String {
        format!("hearth-{}", self.instance)
    }

    /// The slot whose namespace has this name; `None` for every name outside our full grammar.
    #[must_use]
    pub fn slot_of_netns(&self, name: &str) -> Option<SlotIndex> {
        let n = name.strip_prefix("hearth-")?.strip_prefix(self.instance.as_str())?.strip_prefix('-')?;
        self.number(n)
    }

    /// The slot whose host veth has this name; `None` for every name outside our full grammar.
    #[must_use]
    pub fn slot_of_veth(&self, name: &str) -> Option<SlotIndex> {
        self.number(name.strip_prefix(self.veth_prefix.as_str())?)
    }

    fn number(&self, digits: &str) -> Option<SlotIndex> {
        // "007" and "+7" parse as 7 but are not names we make.
        let n = SlotIndex::new(digits.parse().ok()?)?;
        (n.to_string() == digits && n.get() <= self.cidr.slot_capacity()).then_some(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout() -> SlotLayout {
        SlotLayout {
            instance: "a".parse().unwrap(),
            veth_prefix: "hth".parse().unwrap(),
            cidr: "10.12.0.0/16".parse().unwrap(),
        }
    }

    #[test]
    fn a_sixteen_holds_32767_slots() {
        assert_eq!(layout().cidr.slot_capacity(), 32_767);
        let last = SlotIndex::new(32_767).unwrap();
        assert_eq!(layout().sandbox_address(last), Ipv4Addr::new(10, 12, 255, 255));
        assert_eq!("10.0.0.0/32".parse::<Cidr>().unwrap().slot_capacity(), 0);
        assert_eq!("10.0.0.0/28".parse::<Cidr>().unwrap().slot_capacity(), 7);
    }

    #[test]
    fn names_outside_the_grammar_are_not_ours() {
        let l = layout();
        for name in
            ["hearth-a-0", "hearth-a-07", "hearth-a-1-2", "hearth-b-1", "hearth-a-99999", "ns-7", "hearth-a-"]
        {
            assert_eq!(l.slot_of_netns(name), None, "{name}");
        }
        for name in ["hth", "hth0", "hth01", "hthx", "eth1", "hth+1"] {
            assert_eq!(l.slot_of_veth(name), None, "{name}");
        }
    }

    #[test]
    fn cidrs_with_host_bits_are_refused() {
        assert!("10.12.0.1/16".parse::<Cidr>().is_err());
        assert!("10.12.0.0/33".parse::<Cidr>().is_err());
        assert!("0.0.0.0/0".parse::<Cidr>().is_ok());
    }

    proptest! {
        #[test]
        fn names_round_trip(n in 1u32..=32_767) {
            let (l, n) = (layout(), SlotIndex::new(n).unwrap());
            prop_assert_eq!(l.slot_of_netns(&l.netns(n)), Some(n));
            prop_assert_eq!(l.slot_of_veth(&l.veth(n)), Some(n));
            prop_assert!(l.veth(n).len() <= 15);
            prop_assert!(l.cidr.contains(l.sandbox_address(n)));
        }
    }
}
