//! Other firewalls' forward chains. An accept in our table does not undo a drop in another chain at the same hook,
//! so each chain that would drop our traffic gets two constant rules at its head, with our tag as comment: from our
//! veths, and to them as part of a connection. They are found again, and removed, by that tag alone.
//!
//! A chain needs them if its policy is drop or its last rule drops or rejects everything; rules that drop some
//! packets do not make it so. Being first, ours come before the operator's own rules of that chain, for sandbox
//! traffic alone: behind them, a jump into a chain that rejects (ufw's way) would never let it pass.

use hearth_core::network::SlotLayout;

use super::attr::Message;
use super::error::{Op, Result};
use super::host_firewall::pattern;
use super::netlink::{self, NetlinkError, tolerate};
use super::nft::expr::{Expr, accept, established, iif, oif};
use super::nft::read::{SeenChain, SeenRule};
use super::nft::{INET, IPV4, Nft, delete_rule, new_rule};

/// Somebody else may change the rules between our look and our change.
const TRIES: usize = 8;

/// Adds what is missing; calls `before` before a change.
pub(crate) fn ensure(op: &Op, nft: &mut Nft, layout: &SlotLayout, before: &dyn Fn()) -> Result<()> {
    let tag = layout.host_table();
    for chain in forward_chains(nft).map_err(|e| op.netlink("list base chains", e))? {
        let place = describe(&chain);
        // iptables-nft calls its table broken if it meets an expression it does not know.
        let mut xt = chain.family == IPV4 && chain.table == "filter" && chain.name == "FORWARD";
        let mut tries = 0;
        loop {
            tries += 1;
            match complete(nft, &chain, &tag, &pattern(layout), xt, before) {
                Ok(false) => break,
                Ok(true) => {
                    tracing::info!(chain = %place, "added the rules that let sandbox traffic pass there");
                    break;
                }
                Err(e) if e.errno() == Some(libc::ERESTART) && tries < TRIES => {}
                // No compat layer or no conntrack match in this kernel: iptables-nft cannot be the owner.
                Err(e) if e.errno() == Some(libc::ENOENT) && xt => xt = false,
                Err(e) if e.errno() == Some(libc::EPERM) => {
                    let p = &layout.veth_prefix;
                    return Err(op.refused(format!(
                        "chain {place} drops forwarded packets, and its table is owned by another process: allow \
                         forwarding from and to interfaces {p}* there (firewalld: put {p}+ into the zone trusted)"
                    )));
                }
                Err(e) => {
                    let p = &layout.veth_prefix;
                    return Err(op.netlink(
                        &format!("add rules to chain {place}, which drops forwarded packets (or allow interfaces {p}* there)"),
                        e,
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Adds both rules to one chain if it needs them; whether it did.
fn complete(
    nft: &mut Nft,
    chain: &SeenChain,
    tag: &str,
    pattern: &str,
    xt: bool,
    before: &dyn Fn(),
) -> netlink::Result<bool> {
    let generation = nft.generation()?;
    let rules = nft.rules(chain.family, &chain.table, Some(&chain.name))?;
    let (tagged, others): (Vec<_>, Vec<_>) =
        rules.into_iter().partition(|r| r.comment.as_deref() == Some(tag));
    let prefix = pattern.trim_end_matches('*').as_bytes();
    let whole = tagged.len() == 2 && tagged.iter().all(|r| r.first_compared == prefix);
    let needed = chain.drops || others.last().is_some_and(|r| r.drops_all);
    if whole || (!needed && tagged.is_empty()) {
        return Ok(false);
    }
    let mut messages = deletions(&tagged);
    if needed {
        // Each goes to the head, so the one that must come first comes last.
        for rule in [returning(pattern, xt), leaving(pattern, xt)] {
            messages.push(new_rule(chain.family, &chain.table, &chain.name, &rule, Some(tag), 0));
        }
    }
    before();
    nft.commit(messages, Some(generation))?;
    Ok(true)
}

fn leaving(pattern: &str, xt: bool) -> Vec<Expr> {
    let counter = if xt { vec![Expr::Counter] } else { Vec::new() };
    [iif(pattern), counter, accept()].concat()
}

fn returning(pattern: &str, xt: bool) -> Vec<Expr> {
    let state = if xt { vec![Expr::XtEstablished, Expr::Counter] } else { established() };
    [oif(pattern), state, accept()].concat()
}

/// Removes every rule with our tag from other firewalls' forward chains.
pub(crate) fn release(op: &Op, nft: &mut Nft, tag: &str) -> Result<()> {
    for _ in 0..TRIES {
        let removed = nft.generation().and_then(|generation| {
            let rules = tagged(nft, tag)?;
            let left = rules.len();
            nft.commit(deletions(&rules), Some(generation)).map(|()| left)
        });
        match removed {
            Ok(0) => return Ok(()),
            // Once more, to see them gone.
            Ok(_) => {}
            Err(e) if e.errno() == Some(libc::ERESTART) => {}
            Err(e) => return Err(op.netlink("remove our rules from other firewalls' chains", e)),
        }
    }
    Err(op.busy("other firewalls change their rules all the time; our rules in them could not be removed"))
}

fn deletions(rules: &[SeenRule]) -> Vec<Message> {
    rules.iter().map(|r| delete_rule(r.family, &r.table, &r.chain, r.handle)).collect()
}

/// All rules with our tag in other firewalls' forward chains.
pub(crate) fn tagged(nft: &mut Nft, tag: &str) -> netlink::Result<Vec<SeenRule>> {
    let mut found = Vec::new();
    for chain in forward_chains(nft)? {
        match nft.rules(chain.family, &chain.table, Some(&chain.name)) {
            Ok(rules) => found.extend(rules.into_iter().filter(|r| r.comment.as_deref() == Some(tag))),
            // The chain went meanwhile, and its rules with it.
            Err(e) => tolerate(Err(e), &[libc::ENOENT])?,
        }
    }
    Ok(found)
}

fn forward_chains(nft: &mut Nft) -> netlink::Result<Vec<SeenChain>> {
    // Tables of other instances are their business.
    let ours = |c: &SeenChain| c.family == INET && c.table.starts_with("hearth-");
    let chains = match nft.base_chains() {
        Err(NetlinkError::Interrupted) => nft.base_chains()?,
        other => other?,
    };
    Ok(chains
        .into_iter()
        .filter(|c| c.filters_forward && matches!(c.family, INET | IPV4) && !ours(c))
        .collect())
}

/// Chains that drop what no rule of theirs decided, in words.
pub(crate) fn dropping(nft: &mut Nft) -> netlink::Result<Vec<String>> {
    let mut found = Vec::new();
    for chain in forward_chains(nft)? {
        let rules = nft.rules(chain.family, &chain.table, Some(&chain.name))?;
        if chain.drops || rules.last().is_some_and(|r| r.drops_all) {
            found.push(describe(&chain));
        }
    }
    Ok(found)
}

fn describe(chain: &SeenChain) -> String {
    let family = if chain.family == IPV4 { "ip" } else { "inet" };
    format!("{family} {} {}", chain.table, chain.name)
}
