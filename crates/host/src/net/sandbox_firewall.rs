//! The table `inet hearth` inside a slot's namespace: translation between the odd address and the guest's, and
//! what the guest may reach. It dies with the namespace.
//!
//! ```text
//!   host veth (even) ── uplink (odd) ┃ DNAT odd → guest, SNAT guest → odd ┃ tap0 ── guest
//! ```

use std::time::Duration;

use hearth_core::host::{Census, Sighting};
use hearth_core::network::{
    BLOCKED_DESTINATIONS, GUEST_ADDRESS, SlotIndex, SlotLayout, TAP_NAME, UPLINK_NAME,
};
use hearth_core::resource::Resource;

use super::conntrack;
use super::error::{Op, Result};
use super::netlink::tolerate;
use super::netns;
use super::nft::expr::{
    Expr, accept, drop, established, from, iif, invalid, ipv4, not_from, not_ipv4, oif, to, to_net,
};
use super::nft::{self, ACCEPT, Chain, DROP, Hook, INET, Nft, Table};
use super::tap::inside_each;

const TABLE: &str = "hearth";
const NAT_BEFORE: i32 = -100;
const NAT_AFTER: i32 = 100;

/// The table of one slot.
fn table(layout: &SlotLayout, slot: SlotIndex) -> Table {
    let (even, odd) = (layout.host_address(slot), layout.sandbox_address(slot));
    let in_up = || iif(UPLINK_NAME);
    let in_tap = || iif(TAP_NAME);
    let out_up = || oif(UPLINK_NAME);
    let mut forward = vec![
        [in_tap(), not_ipv4(), drop()].concat(),
        [in_tap(), ipv4(), not_from(GUEST_ADDRESS), drop()].concat(),
        // Before "established": a connection to a private range is never established, save one the host opened.
        [established(), accept()].concat(),
        // Escapes translation, so it would leave with the guest's own address.
        [invalid(), drop()].concat(),
    ];
    for net in BLOCKED_DESTINATIONS.iter().chain([&layout.cidr]) {
        forward.push([in_tap(), ipv4(), to_net(net), drop()].concat());
    }
    forward.push([in_tap(), out_up(), accept()].concat());
    forward.push([in_up(), oif(TAP_NAME), ipv4(), from(even), accept()].concat());
    let filter = |name, hook, policy, rules| Chain { name, kind: "filter", hook, priority: 0, policy, rules };
    let nat =
        |name, hook, priority, rules| Chain { name, kind: "nat", hook, priority, policy: ACCEPT, rules };
    Table {
        name: TABLE.into(),
        chains: vec![
            nat(
                "prerouting",
                Hook::Prerouting,
                NAT_BEFORE,
                vec![
                    [
                        in_up(),
                        ipv4(),
                        to(odd),
                        vec![Expr::Address(GUEST_ADDRESS), Expr::Nat { source: false }],
                    ]
                    .concat(),
                ],
            ),
            nat(
                "postrouting",
                Hook::Postrouting,
                NAT_AFTER,
                vec![
                    [
                        out_up(),
                        ipv4(),
                        from(GUEST_ADDRESS),
                        vec![Expr::Address(odd), Expr::Nat { source: true }],
                    ]
                    .concat(),
                ],
            ),
            filter("forward", Hook::Forward, DROP, forward),
            // The guest has nothing to ask of the namespace itself; ARP does not pass here.
            filter("input", Hook::Input, ACCEPT, vec![[in_tap(), drop()].concat()]),
        ],
    }
}

/// Lists the tables in this instance's namespaces by entering each.
///
/// # Errors
/// If the namespaces cannot be listed.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    inside_each(layout, "sandbox-firewall", |slot| {
        let op = Op::new("census", "sandbox-firewall");
        let seen = Nft::open().and_then(|mut n| n.table(INET, TABLE));
        let seen = seen.map_err(|e| op.netlink("look for the table", e))?;
        Ok(seen.map(|t| Sighting {
            resource: Resource::SandboxFirewall { slot },
            facts: match t.comment {
                Some(c) if c == table(layout, slot).fingerprint() => "table inet hearth, current".into(),
                _ => "table inet hearth, of another version or layout".into(),
            },
        }))
    })
}

/// Makes the table, or replaces one that is not exactly what it should be.
///
/// # Errors
/// Refused if the namespace is absent.
pub fn ensure(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let op = Op::new("ensure", format!("sandbox-firewall of slot {slot}"));
    let wanted = table(layout, slot);
    netns::enter(&netns::path(layout, slot), || {
        let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
        put(&op, &mut nft, &wanted, &|| ())
    })
}

/// Removes the table. No namespace, no table: that is success at once.
///
/// # Errors
/// If the kernel refuses.
pub fn release(layout: &SlotLayout, slot: SlotIndex, _within: Duration) -> Result<()> {
    let op = Op::new("release", format!("sandbox-firewall of slot {slot}"));
    netns::enter_if_there(&netns::path(layout, slot), || {
        let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
        remove(&op, &mut nft, TABLE)
    })
    .map(|_| ())
}

/// Replaces the table and forgets every connection of the namespace.
///
/// # Errors
/// Refused if the slot has no namespace or no table.
pub fn reset(layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let op = Op::new("reset", format!("sandbox-firewall of slot {slot}"));
    netns::enter(&netns::path(layout, slot), || reset_inside(&op, layout, slot))
}

/// As [`reset`], on a thread that is inside already.
pub(crate) fn reset_inside(op: &Op, layout: &SlotLayout, slot: SlotIndex) -> Result<()> {
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    let seen = nft.table(INET, TABLE).map_err(|e| op.netlink("look for the table", e))?;
    if seen.is_none() {
        return Err(op.refused("the slot has no firewall; release it and make it anew"));
    }
    nft.commit(table(layout, slot).replace(true), None).map_err(|e| op.netlink("replace the table", e))?;
    conntrack::flush(nft.socket()).map_err(|e| op.netlink("forget connections", e))
}

/// Makes `wanted` be there, whole. A table is committed in one transaction, so one with the right fingerprint and
/// the right number of rules was neither half made nor changed since. `before` is called before a change.
pub(crate) fn put(op: &Op, nft: &mut Nft, wanted: &Table, before: &dyn Fn()) -> Result<()> {
    let seen = nft.table(INET, &wanted.name).map_err(|e| op.netlink("look for the table", e))?;
    if let Some(seen) = &seen
        && seen.comment == Some(wanted.fingerprint())
    {
        let rules = nft.rules(INET, &wanted.name, None).map_err(|e| op.netlink("list its rules", e))?;
        if rules.len() == wanted.rule_count() {
            return Ok(());
        }
    }
    before();
    nft.commit(wanted.replace(seen.is_some()), None)
        .map_err(|e| op.netlink(&format!("make table inet {}", wanted.name), e))
}

/// Deletes a table and sees it gone.
pub(crate) fn remove(op: &Op, nft: &mut Nft, name: &str) -> Result<()> {
    tolerate(nft.commit(vec![nft::delete_table(INET, name)], None), &[libc::ENOENT])
        .map_err(|e| op.netlink(&format!("delete table inet {name}"), e))?;
    match nft.table(INET, name).map_err(|e| op.netlink("see the table gone", e))? {
        None => Ok(()),
        Some(_) => Err(op.failed(format!("table inet {name} is still there after its deletion"))),
    }
}
