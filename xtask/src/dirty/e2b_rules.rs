//! The e2b orchestrator's host rules of its first generation: six per slot, by iptables.
//!
//! Added in one go. Removed by writing back what was saved without them, since to delete rules one by one takes a
//! time that grows with the square of their number.

use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::e2b::{host_address, veth};
use crate::program;

/// Ports redirected to a proxy, and where to.
const REDIRECTS: [(u16, u16); 3] = [(80, 5016), (111, 5017), (2049, 5018)];

/// One rule: its table, and the rest as iptables-save shows it, the chain first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Rule {
    /// `filter` or `nat`.
    pub(crate) table: &'static str,
    /// Chain and rule, to follow `-A` or `-D`.
    pub(crate) text: String,
}

/// The link of the default route; `eth0` where there is none.
pub(crate) fn gateway() -> Result<String> {
    let routes = program::run("ip", &["-j", "-4", "route", "show", "default"], "")?;
    let routes: Value = serde_json::from_str(if routes.trim().is_empty() { "[]" } else { &routes })
        .context("ip route answers no JSON")?;
    Ok(routes[0]["dev"].as_str().unwrap_or("eth0").to_owned())
}

/// The rules of one slot.
pub(crate) fn of_slot(n: u32, gateway: &str) -> Vec<Rule> {
    let veth = veth(n);
    let mut rules = vec![
        Rule { table: "filter", text: format!("FORWARD -i {veth} -o {gateway} -j ACCEPT") },
        Rule { table: "filter", text: format!("FORWARD -i {gateway} -o {veth} -j ACCEPT") },
        Rule {
            table: "nat",
            text: format!("POSTROUTING -s {}/32 -o {gateway} -j MASQUERADE", host_address(n)),
        },
    ];
    rules.extend(REDIRECTS.map(|(from, to)| Rule {
        table: "nat",
        text: format!(
            "PREROUTING -d 192.0.2.1/32 -i {veth} -p tcp -m tcp --dport {from} -j REDIRECT --to-ports {to}"
        ),
    }));
    rules
}

/// Adds the rules of all these slots behind those that are there.
pub(crate) fn add(slots: Range<u32>, gateway: &str) -> Result<()> {
    let rules: Vec<Rule> = slots.flat_map(|n| of_slot(n, gateway)).collect();
    let mut input = String::new();
    for table in ["filter", "nat"] {
        input += &format!("*{table}\n");
        for rule in rules.iter().filter(|r| r.table == table) {
            input += &format!("-A {}\n", rule.text);
        }
        input += "COMMIT\n";
    }
    program::run("iptables-restore", &["--noflush"], &input).map(drop)
}

/// Removes exactly the rules of these slots; how many there were.
pub(crate) fn remove(slots: Range<u32>, gateway: &str) -> Result<usize> {
    let mut removed = 0;
    for table in ["filter", "nat"] {
        let ours: HashSet<String> = slots
            .clone()
            .flat_map(|n| of_slot(n, gateway))
            .filter(|r| r.table == table)
            .map(|r| r.text)
            .collect();
        let saved = program::run("iptables-save", &["-c", "-t", table], "")?;
        let (kept, gone) = without(&saved, &ours);
        if gone > 0 {
            program::run("iptables-restore", &["-c", "-T", table], &kept)?;
        }
        removed += gone;
    }
    Ok(removed)
}

/// Saved rules without ours, and how many were ours.
fn without(saved: &str, ours: &HashSet<String>) -> (String, usize) {
    let is_ours = |line: &&str| {
        // Counters come first: `[0:0] -A FORWARD …`
        line.split_once("-A ").is_some_and(|(counters, rule)| {
            (counters.is_empty() || counters.starts_with('[')) && ours.contains(rule.trim_end())
        })
    };
    let gone = saved.lines().filter(is_ours).count();
    let kept = saved.lines().filter(|line| !is_ours(line)).map(|line| format!("{line}\n")).collect();
    (kept, gone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_rules_are_taken_out() {
        let saved = "*filter\n:FORWARD DROP [0:0]\n[1:2] -A FORWARD -i veth-7 -o eth0 -j ACCEPT\n\
                     [0:0] -A FORWARD -i veth-77 -o eth0 -j ACCEPT\n[0:0] -A FORWARD -j LOG --log-prefix \"-A x\"\nCOMMIT\n";
        let ours: HashSet<String> = of_slot(7, "eth0").into_iter().map(|r| r.text).collect();
        let (kept, gone) = without(saved, &ours);
        assert_eq!(gone, 1);
        assert_eq!(kept.lines().count(), saved.lines().count() - 1);
        assert!(!kept.contains("veth-7 ") && kept.contains("veth-77 ") && kept.contains("LOG"));
    }
}
