//! Rules of another orchestrator in chains that it shares with others: listed as their own program writes them, and
//! deleted by the same text, all of one table in one transaction. Nothing is flushed and no table is written back, so
//! whatever else is in those chains stays as it is, counters too.
//!
//! A deletion names a rule in full. One that is not there any more makes the whole transaction fail, so what is there
//! is looked at right before, and again if somebody changed the rules in between.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::time::Duration;

use hearth_core::layout::Layout;
use serde_json::Value;

use super::error::{Op, Result};
use super::nft::{IPV4, Nft};
use crate::program;

/// Bound of one listing or transaction; that of the wait for the lock of legacy iptables is below it.
const WITHIN: Duration = Duration::from_secs(30);
/// Seconds that a program waits for the lock of legacy iptables.
const LOCK: &str = "10";
/// Somebody else may change the rules between our look and our change.
const TRIES: usize = 4;

/// Which program a rule is listed and deleted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    /// `iptables-nft`.
    IptablesNft,
    /// `iptables-legacy`.
    IptablesLegacy,
    /// `nft`, for elements of sets.
    Nft,
}

impl Backend {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Backend::IptablesNft => "iptables-nft",
            Backend::IptablesLegacy => "iptables-legacy",
            Backend::Nft => "nft",
        }
    }

    /// The back end with that word.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        [Backend::IptablesNft, Backend::IptablesLegacy, Backend::Nft].into_iter().find(|b| b.as_str() == word)
    }
}

/// A rule, or an element of a set, that a layout calls its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotRule {
    /// Whose text it is.
    pub backend: Backend,
    /// Its table; for an element family, table and set.
    pub table: String,
    /// Chain and rule as behind `-A`, or the element.
    pub text: String,
    /// The slot it speaks of.
    pub slot: u32,
}

/// Lists what a layout calls its own, and why not all could be seen.
#[must_use]
pub fn census(layout: &Layout) -> (Vec<SlotRule>, Vec<String>) {
    let (mut found, mut unseen) = (Vec::new(), Vec::new());
    let mut tables: Vec<&str> = layout.rules.iter().map(|r| r.table.as_str()).collect();
    tables.sort_unstable();
    tables.dedup();
    let mut listed: Vec<(Backend, &str)> = Vec::new();
    for backend in [Backend::IptablesNft, Backend::IptablesLegacy] {
        match loaded(backend) {
            Ok(there) => listed.extend(
                tables.iter().filter(|t| there.iter().any(|there| there == **t)).map(|t| (backend, *t)),
            ),
            Err(e) => unseen.push(format!("rule: {}: {e}", backend.as_str())),
        }
    }
    // At once: with thousands of slots each takes a good part of a second.
    let (lists, elements) = std::thread::scope(|scope| {
        let running: Vec<_> =
            listed.iter().map(|(backend, table)| scope.spawn(|| saved(*backend, table))).collect();
        let elements = elements(layout);
        let panicked = |_| Err(io::Error::other("its thread panicked"));
        let lists: Vec<_> =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect();
        (lists, elements)
    });
    for ((backend, table), list) in listed.into_iter().zip(lists) {
        match list {
            Ok(lines) => found.extend(lines.into_iter().filter_map(|text| {
                let slot = layout.slot_of_rule(table, &text)?;
                Some(SlotRule { backend, table: table.to_owned(), text, slot })
            })),
            Err(e) => unseen.push(format!("rule: {} table {table}: {e}", backend.as_str())),
        }
    }
    match elements {
        Ok(elements) => found.extend(elements),
        Err(e) => unseen.push(format!("rule: nft: {e}")),
    }
    (found, unseen)
}

/// Deletes rules of one table in one transaction, and sees them gone. Those that are not there are gone already.
///
/// # Errors
/// If the program refuses; then nothing was changed.
pub fn delete(backend: Backend, table: &str, rules: &[String]) -> Result<()> {
    let op = Op::new("release", format!("rules of {} in table {table}", backend.as_str()));
    let mut refused = None;
    for _ in 0..TRIES {
        let there = match backend {
            Backend::Nft => listed_elements(table),
            _ => saved(backend, table),
        };
        let mut there = count(there.map_err(|e| op.io("list them", e))?);
        let left: Vec<&String> = rules.iter().filter(|rule| take_one(&mut there, rule)).collect();
        if left.is_empty() {
            return Ok(());
        }
        let done = match backend {
            Backend::Nft => {
                let all = left.iter().map(|e| e.as_str()).collect::<Vec<_>>().join(", ");
                run("nft", &["-f", "-"], &format!("delete element {table} {{ {all} }}\n"), WITHIN)
            }
            _ => {
                let lines: String = left.iter().map(|rule| format!("-D {rule}\n")).collect();
                let program = format!("{}-restore", backend.as_str());
                run(&program, &["--noflush", "-w", LOCK], &format!("*{table}\n{lines}COMMIT\n"), WITHIN)
            }
        };
        // It may be only that somebody was faster with one of them.
        refused = done.err();
    }
    Err(match refused {
        Some(e) => op.io("delete them in one transaction", e),
        None => op.busy("they come back again and again; somebody makes them: stop that first"),
    })
}

/// Runs a program for rules.
pub(super) fn run(name: &str, args: &[&str], input: &str, within: Duration) -> io::Result<String> {
    let program = program::find(name)
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{name} is not installed")))?;
    program::run(&program, args, input, within)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", program.display())))
}

/// Tables that exist. To ask for another would load its module.
fn loaded(backend: Backend) -> io::Result<Vec<String>> {
    if backend == Backend::IptablesLegacy {
        // `/proc/net` is the main thread's.
        return match fs::read_to_string("/proc/thread-self/net/ip_tables_names") {
            Ok(names) => Ok(names.lines().map(str::to_owned).collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(vec![]),
            Err(e) => Err(e),
        };
    }
    let mut nft = Nft::open().map_err(|e| io::Error::other(e.to_string()))?;
    let tables = nft.tables().map_err(|e| io::Error::other(e.to_string()))?;
    Ok(tables.into_iter().filter(|t| t.family == IPV4).map(|t| t.name).collect())
}

/// The rules of one table, as behind `-A`.
fn saved(backend: Backend, table: &str) -> io::Result<Vec<String>> {
    let text = run(&format!("{}-save", backend.as_str()), &["-t", table], "", WITHIN)?;
    // A table that was changed by other means is not shown, and that is no error to the program.
    let whole = text.lines().any(|l| l == format!("*{table}")) && text.lines().any(|l| l == "COMMIT");
    if !whole {
        return Err(io::Error::other(format!("table {table} is not shown: {}", text.trim())));
    }
    Ok(text.lines().filter_map(|line| line.strip_prefix("-A ")).map(|l| l.trim_end().to_owned()).collect())
}

fn elements(layout: &Layout) -> io::Result<Vec<SlotRule>> {
    if layout.elements.is_empty() {
        return Ok(vec![]);
    }
    let mut nft = Nft::open().map_err(|e| io::Error::other(e.to_string()))?;
    let tables = nft.tables().map_err(|e| io::Error::other(e.to_string()))?;
    let mut found = Vec::new();
    for element in &layout.elements {
        if !tables.iter().any(|t| t.name == element.table) {
            continue;
        }
        let table = format!("{} {} {}", element.family, element.table, element.set);
        for text in listed_elements(&table)? {
            if let Some(slot) = layout.slot_of(&element.element, text.trim_matches('"')) {
                found.push(SlotRule { backend: Backend::Nft, table: table.clone(), text, slot });
            }
        }
    }
    Ok(found)
}

/// The elements of a set that are one value each, as nft takes them.
fn listed_elements(table: &str) -> io::Result<Vec<String>> {
    let words: Vec<&str> = table.split(' ').collect();
    let text = run("nft", &[&["-j", "list", "set"], &words[..]].concat(), "", WITHIN)?;
    let value: Value = serde_json::from_str(&text)?;
    Ok(values(&value))
}

fn values(listing: &Value) -> Vec<String> {
    let sets = listing["nftables"].as_array().into_iter().flatten().filter_map(|o| o.get("set"));
    let elements = sets.filter_map(|s| s["elem"].as_array()).flatten();
    elements
        .filter_map(|element| match element {
            Value::String(text) => Some(text.as_str()),
            // With a counter or a timeout the value is one level down.
            other => other["elem"]["val"].as_str(),
        })
        .map(|text| match text.parse::<std::net::Ipv4Addr>() {
            Ok(_) => text.to_owned(),
            Err(_) => format!("\"{text}\""),
        })
        .collect()
}

fn count(lines: Vec<String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in lines {
        *counts.entry(line).or_default() += 1;
    }
    counts
}

fn take_one(there: &mut BTreeMap<String, usize>, rule: &str) -> bool {
    match there.get_mut(rule) {
        Some(n) if *n > 0 => {
            *n -= 1;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_in_every_form_and_ranges_are_left_out() {
        let listing = serde_json::json!({ "nftables": [{ "metainfo": {} }, { "set": { "elem": [
            "veth-7", "10.11.0.5", { "elem": { "val": "veth-8", "counter": {} } }, { "range": ["10.0.0.1", "10.0.0.9"] }
        ] } }] });
        assert_eq!(values(&listing), ["\"veth-7\"", "10.11.0.5", "\"veth-8\""]);
        assert!(values(&serde_json::json!({})).is_empty());
    }

    #[test]
    fn of_two_equal_rules_each_is_one() {
        let mut there = count(vec!["a".into(), "a".into(), "b".into()]);
        assert!(take_one(&mut there, "a") && take_one(&mut there, "a") && !take_one(&mut there, "a"));
        assert!(!take_one(&mut there, "c"));
        assert_eq!(Backend::of("iptables-legacy"), Some(Backend::IptablesLegacy));
    }
}
