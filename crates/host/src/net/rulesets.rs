//! All firewall rules of the host as the programs show them, and scripts of theirs carried out. Nothing is shown twice:
//! a table that iptables keeps in nf_tables is iptables' to show, and only where it cannot, nft's.
//!
//! A program runs only where there is something of its kind: asking for a table of the older iptables would load its
//! module, and most hosts have rules of one or two kinds.

use std::fs;
use std::io;
use std::time::Duration;

use hearth_core::backup::{Content, Part, Tool, normal};

use super::nft::{IPV4, Nft};
use super::rules::run;

/// Bound of one listing or script.
const WITHIN: Duration = Duration::from_secs(30);
/// Seconds that a program waits for the lock of the older iptables.
const LOCK: &str = "10";
/// Somebody may change the rules while they are read.
const TRIES: usize = 4;
/// As the kernel numbers it.
const IPV6: u8 = 10;
const FAMILIES: [(u8, &str); 6] =
    [(1, "inet"), (IPV4, "ip"), (3, "arp"), (5, "netdev"), (7, "bridge"), (IPV6, "ip6")];

/// Everything. A part that cannot be seen says why.
#[must_use]
pub fn read() -> Vec<Part> {
    let mut parts = Vec::new();
    for _ in 0..TRIES {
        let before = generation();
        parts = look();
        // Where there is no nf_tables there is nothing whose changes could be missed, or the parts say so.
        if before == generation() {
            return parts;
        }
    }
    let why = "the rules change all the time; none of the looks is whole".to_owned();
    let half = |part: &mut Part| {
        if matches!(part.content, Content::Saved(_)) && !is_legacy(part.tool) {
            part.content = Content::Absent(why.clone());
        }
    };
    parts.iter_mut().for_each(half);
    parts
}

/// Carries out a script of [`hearth_core::backup::changes`] in one transaction.
///
/// # Errors
/// What the program says; then nothing was changed.
pub fn carry_out(tool: Tool, script: &str) -> io::Result<()> {
    let done = match tool {
        Tool::Nft => run("nft", &["-f", "-"], script, WITHIN),
        _ => run(&format!("{tool}-restore"), &["--noflush", "-w", LOCK], script, WITHIN),
    };
    done.map(drop)
}

fn is_legacy(tool: Tool) -> bool {
    matches!(tool, Tool::IptablesLegacy | Tool::Ip6tablesLegacy)
}

fn generation() -> Option<u32> {
    Nft::open().and_then(|mut nft| nft.generation()).ok()
}

fn look() -> Vec<Part> {
    let tables = nft_tables();
    let of_iptables = [Tool::IptablesNft, Tool::Ip6tablesNft, Tool::IptablesLegacy, Tool::Ip6tablesLegacy];
    let mut parts: Vec<Part> = std::thread::scope(|scope| {
        let tables = &tables;
        let running = of_iptables.map(|tool| (tool, scope.spawn(move || saved(tool, tables))));
        let panicked = |_| Content::Absent("its thread panicked".into());
        running.map(|(tool, thread)| Part { tool, content: thread.join().unwrap_or_else(panicked) }).into()
    });
    // What iptables showed, nft need not: its listing of many rules takes the kernel seconds.
    let content = nft(&tables, &parts);
    parts.push(Part { tool: Tool::Nft, content });
    parts
}

/// Family and name of every table in nf_tables.
fn nft_tables() -> io::Result<Vec<(&'static str, String)>> {
    let tables = Nft::open().and_then(|mut nft| nft.tables());
    let tables = tables.map_err(|e| io::Error::other(format!("nf_tables cannot be asked: {e}")))?;
    let named = |t: super::nft::read::SeenTable| {
        let family = FAMILIES.iter().find(|(number, _)| *number == t.family)?;
        Some((family.1, t.name))
    };
    Ok(tables.into_iter().filter_map(named).collect())
}

fn saved(tool: Tool, tables: &io::Result<Vec<(&'static str, String)>>) -> Content {
    let there = match tool.family_in_nft() {
        Some(family) => match tables {
            Ok(tables) => Ok(tables.iter().any(|(f, _)| *f == family)),
            Err(e) => Err(io::Error::other(e.to_string())),
        },
        None => legacy_tables(tool),
    };
    match there {
        Err(e) => Content::Absent(e.to_string()),
        Ok(false) => Content::Empty,
        Ok(true) => match run(&format!("{tool}-save"), &[], "", WITHIN) {
            Ok(text) => match normal(tool, &text) {
                text if text.is_empty() => Content::Empty,
                text => Content::Saved(text),
            },
            Err(e) => Content::Absent(e.to_string()),
        },
    }
}

/// Whether the older iptables has a table in this namespace.
fn legacy_tables(tool: Tool) -> io::Result<bool> {
    let file = if tool == Tool::IptablesLegacy { "ip_tables_names" } else { "ip6_tables_names" };
    // `/proc/net` is the main thread's.
    match fs::read_to_string(format!("/proc/thread-self/net/{file}")) {
        Ok(names) => Ok(!names.trim().is_empty()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(io::Error::new(e.kind(), format!("{file}: {e}"))),
    }
}

/// The tables that iptables did not show, one listing each: all at once would list its tables too.
fn nft(tables: &io::Result<Vec<(&'static str, String)>>, shown: &[Part]) -> Content {
    let tables = match tables {
        Ok(tables) => tables,
        Err(e) => return Content::Absent(e.to_string()),
    };
    let by_iptables = |family: &str, name: &str| {
        let mut parts = shown.iter().filter(|p| p.tool.family_in_nft() == Some(family));
        parts.any(|p| p.tables().iter().any(|t| t.name == name))
    };
    let mut text = String::new();
    for (family, name) in tables.iter().filter(|(family, name)| !by_iptables(family, name)) {
        match run("nft", &["-s", "list", "table", family, name], "", WITHIN) {
            Ok(table) => text.push_str(&normal(Tool::Nft, &table)),
            Err(e) => return Content::Absent(format!("table {family} {name}: {e}")),
        }
    }
    if text.is_empty() { Content::Empty } else { Content::Saved(text) }
}
