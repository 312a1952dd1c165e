//! The host's side: the table `inet hearth-<instance>`, constant in size (it matches the veth prefix and the CIDR,
//! never one slot), the few rules that other firewalls on the host need, and the forwarding sysctl.
//!
//! | packet | verdict |
//! |---|---|
//! | sandbox → sandbox | drop |
//! | sandbox → outside | drop if its source is not in the CIDR or its target is in a blocked range; else accept |
//! | outside → sandbox | only as part of a connection |
//! | sandbox → host | only as part of a connection |
//! | sandbox → outside, leaving | masquerade |

use std::path::Path;
use std::time::Duration;

use hearth_core::host::{Census, Sighting};
use hearth_core::id::VethPrefix;
use hearth_core::network::{BLOCKED_DESTINATIONS, SlotLayout};
use hearth_core::resource::Resource;

use super::error::{Op, Result};
use super::links::Links;
use super::netlink::NetlinkError;
use super::nft::expr::{
    Expr, accept, drop, established, from_net, from_outside, iif, ipv4, not_ipv4, oif, oif_not, to_net,
};
use super::nft::{ACCEPT, Chain, Hook, INET, Nft, Table};
use super::{foreign_chains, forwarding, legacy, sandbox_firewall, veth};

const NAT_AFTER: i32 = 100;

/// The interface pattern of this instance's host veths.
pub(crate) fn pattern(layout: &SlotLayout) -> String {
    format!("{}*", layout.veth_prefix)
}

fn table(layout: &SlotLayout) -> Table {
    let ours = pattern(layout);
    let (in_ours, out_ours) = (|| iif(&ours), || oif(&ours));
    let mut forward = vec![
        [in_ours(), out_ours(), drop()].concat(),
        [in_ours(), not_ipv4(), drop()].concat(),
        [in_ours(), ipv4(), from_outside(&layout.cidr), drop()].concat(),
    ];
    for net in BLOCKED_DESTINATIONS {
        forward.push([in_ours(), ipv4(), to_net(net), drop()].concat());
    }
    forward.push([in_ours(), accept()].concat());
    forward.push([out_ours(), established(), accept()].concat());
    forward.push([out_ours(), drop()].concat());
    let filter = |name, hook, rules| Chain { name, kind: "filter", hook, priority: 0, policy: ACCEPT, rules };
    Table {
        name: layout.host_table(),
        chains: vec![
            filter("forward", Hook::Forward, forward),
            filter(
                "input",
                Hook::Input,
                vec![[in_ours(), established(), accept()].concat(), [in_ours(), drop()].concat()],
            ),
            Chain {
                name: "postrouting",
                kind: "nat",
                hook: Hook::Postrouting,
                priority: NAT_AFTER,
                policy: ACCEPT,
                rules: vec![
                    // Not on lo: the host talking to one of its own even addresses.
                    [ipv4(), from_net(&layout.cidr), oif_not(&ours), oif_not("lo"), vec![Expr::Masquerade]]
                        .concat(),
                ],
            },
        ],
    }
}

/// Looks for the table and for rules with our tag in other chains. Other instances' tables are reported as
/// foreign.
///
/// # Errors
/// If the kernel cannot be asked.
pub fn census(layout: &SlotLayout) -> Result<Census> {
    let op = Op::new("census", "host-firewall");
    let mut census = Census::default();
    let name = layout.host_table();
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    let (tables, whole) = nft.tables_seen().map_err(|e| op.netlink("list tables", e))?;
    if !whole {
        census.incomplete.push(format!("tables: {}", NetlinkError::Interrupted));
    }
    let mut facts = Vec::new();
    for t in tables.iter().filter(|t| t.name.starts_with("hearth-")) {
        if t.name == name && t.family == INET {
            let current = t.comment == Some(table(layout).fingerprint());
            facts.push(format!(
                "table inet {name}, {}",
                if current { "current" } else { "of another version" }
            ));
        } else {
            census.foreign.insert(t.name.clone(), "a table of another instance or family".into());
        }
    }
    match foreign_chains::tagged(&mut nft, &name) {
        Ok(rules) if rules.is_empty() => {}
        Ok(rules) => facts.push(format!("{} tagged rules in other firewalls' chains", rules.len())),
        Err(e) => census.incomplete.push(format!("rules in other firewalls' chains: {e}")),
    }
    match legacy::tagged(&op, &name) {
        Ok(0) => {}
        Ok(n) => facts.push(format!("{n} tagged rules in the legacy iptables FORWARD chain")),
        Err(e) => census.incomplete.push(e.to_string()),
    }
    if !facts.is_empty() {
        census.ours.push(Sighting { resource: Resource::HostFirewall, facts: facts.join(", ") });
    }
    Ok(census)
}

/// Other firewalls' chains that drop forwarded packets by default; `ensure` adds its rules there.
///
/// # Errors
/// If the kernel or the legacy iptables cannot be asked.
pub fn obstacles() -> Result<Vec<String>> {
    let op = Op::new("census", "forward chains");
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    let mut found = foreign_chains::dropping(&mut nft).map_err(|e| op.netlink("list forward chains", e))?;
    if legacy::drops(&op)? {
        found.push("legacy iptables FORWARD".into());
    }
    Ok(found)
}

/// What of another instance this one's rules, or that one's on ours, would match: a table of its whose veth prefix
/// is ours or begins like it, or links of its under our prefix. Ask it at start, before anything is made; with an
/// answer the daemon must not go on.
///
/// # Errors
/// If the kernel cannot be asked; Busy if the links changed all the time and nothing was found in what was seen.
pub fn prefix_conflict(layout: &SlotLayout, links: &Links) -> Result<Option<String>> {
    let op = Op::new("census", "veth prefixes of other instances");
    let ours = layout.veth_prefix.as_str();
    let choose = "give this instance another network.veth_prefix";
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    for t in nft.tables().map_err(|e| op.netlink("list tables", e))? {
        let Some(instance) = t.name.strip_prefix("hearth-").filter(|i| *i != layout.instance.as_str()) else {
            continue;
        };
        if t.family != INET {
            continue;
        }
        let rules =
            nft.rules(INET, &t.name, None).map_err(|e| op.netlink("list another instance's rules", e))?;
        // A name pattern has no padding and is the only comparison that parses as a prefix.
        let theirs = rules.iter().filter_map(|r| String::from_utf8(r.first_compared.clone()).ok());
        let theirs = theirs.filter(|p| p.parse::<VethPrefix>().is_ok());
        if let Some(theirs) = theirs.into_iter().find(|p| p.starts_with(ours) || ours.starts_with(p.as_str()))
        {
            return Ok(Some(format!(
                "table inet {} of instance {instance} matches links {theirs}*, this instance's are {ours}*; \
                 {choose}, or remove that table if the other instance is gone for good",
                t.name
            )));
        }
    }
    for link in links.alone.iter().filter(|l| l.kind == "veth") {
        if let Some(instance) = veth::instance_in(&link.alias).filter(|i| *i != layout.instance.as_str()) {
            return Ok(Some(format!(
                "link {} begins with this instance's veth prefix {ours} and is instance {instance}'s (alias {}); {choose}",
                link.name, link.alias
            )));
        }
    }
    Ok(None)
}

/// Makes the table, adds the rules other firewalls need, and turns on IPv4 forwarding; its old value is written to
/// the file `record` first. `before` is called before each change of rules, and not if all is as it should be.
///
/// # Errors
/// Refused, saying what to do, if another firewall does not let itself be added to.
pub fn ensure(layout: &SlotLayout, record: &Path, before: &dyn Fn()) -> Result<()> {
    let op = Op::new("ensure", "host-firewall");
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    // The table first: nothing is let through elsewhere, and nothing forwarded, before it stands.
    sandbox_firewall::put(&op, &mut nft, &table(layout), before)?;
    foreign_chains::ensure(&op, &mut nft, layout, before)?;
    legacy::ensure(&op, layout, before)?;
    forwarding::ensure(&op, record)
}

/// Takes all of it back, in the opposite order, going on past errors. The sysctl gets its old value only if it
/// still has the one set here and no other instance needs it.
///
/// # Errors
/// All that went wrong, as one error.
pub fn release(layout: &SlotLayout, record: &Path, _within: Duration) -> Result<()> {
    let op = Op::new("release", "host-firewall");
    let name = layout.host_table();
    let mut nft = Nft::open().map_err(|e| op.netlink("open an nf_tables socket", e))?;
    let mut errors = Vec::new();
    match nft.tables().map_err(|e| op.netlink("list tables", e)) {
        Ok(tables) => {
            let others: Vec<_> = tables
                .into_iter()
                .filter(|t| t.family == INET && t.name.starts_with("hearth-") && t.name != name)
                .map(|t| t.name)
                .collect();
            errors.extend(forwarding::release(&op, record, &others).err());
        }
        Err(e) => errors.push(e),
    }
    errors.extend(legacy::release(&op, &name).err());
    errors.extend(foreign_chains::release(&op, &mut nft, &name).err());
    errors.extend(sandbox_firewall::remove(&op, &mut nft, &name).err());
    op.all(errors).map_or(Ok(()), Err)
}
