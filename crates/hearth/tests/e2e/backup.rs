//! Copies of the host's firewall rules: made before they are changed, and put back byte by byte.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::layout::{Dirty, tools_missing};
use crate::node::{Node, Wish, cannot, in_path, text};

/// All rules as the programs show them.
fn shown(dirty: &Dirty) -> String {
    format!("{}\n{}", dirty.rules().join("\n"), dirty.host("nft", &["-s", "list", "ruleset"]))
}

fn json(out: &std::process::Output) -> Value {
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
}

#[test]
fn rules_that_a_reclaim_removed_come_back_byte_by_byte() {
    let test = "rules_that_a_reclaim_removed_come_back_byte_by_byte";
    if tools_missing(test) {
        return;
    }
    if !in_path("nft") {
        hearth_testkit::skip(test, "nft is not in PATH");
        return;
    }
    let dirty = Dirty::make(12, 1);
    dirty.host("nft", &["add", "table", "inet", "others"]);
    dirty.host(
        "nft",
        &["add", "set", "inet", "others", "names", "{ type ifname; elements = { \"b\", \"a\" }; }"],
    );
    let before = shown(&dirty);
    let out = dirty.hearth(&["reclaim", "apply", "--yes", "--json", "--grace", "5s"]);
    let answer = json(&out);
    assert!(out.status.success(), "{answer:#}");
    let removed = shown(&dirty);
    assert_ne!(removed, before);
    let file = answer["backup"].as_str().unwrap().to_owned();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(Path::new(&file).starts_with(dirty.dir.path().join("s/backups")), "{file}");

    // Nobody can be asked: it is shown, and nothing is done.
    let out = dirty.plain(&["reclaim", "restore", &file]);
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    assert!(said.contains("iptables-nft table filter: 24 lines come back, 0 go"), "{said}");
    assert!(said.contains("  +-A FORWARD -i veth-"), "{said}");
    assert_eq!(shown(&dirty), removed);

    let out = dirty.plain(&["reclaim", "restore", &file, "--yes", "--json"]);
    let answer = json(&out);
    assert!(out.status.success(), "{answer:#}");
    let outcomes: Vec<&str> =
        answer["changes"].as_array().unwrap().iter().map(|c| c["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["restored", "restored"], "{answer:#}");
    assert_eq!(shown(&dirty), before);
    // There is a way back from that too, and once more is nothing.
    let back = answer["before"].as_str().unwrap();
    let out = dirty.plain(&["reclaim", "restore", &file, "--yes"]);
    assert!(out.status.success() && text(&out.stdout).contains("Nothing differs"), "{}", text(&out.stdout));
    assert!(dirty.plain(&["reclaim", "restore", back, "--yes"]).status.success());
    assert_eq!(shown(&dirty), removed);

    // What is no backup, and what is of another host, changes nothing.
    let bad = dirty.dir.path().join("bad.rules");
    fs::write(&bad, &fs::read_to_string(&file).unwrap()[..200]).unwrap();
    let out = dirty.plain(&["reclaim", "restore", bad.to_str().unwrap(), "--yes"]);
    assert_eq!(out.status.code(), Some(2), "{}", text(&out.stderr));
    let host = hearth_host::backup::host_name();
    let other = fs::read_to_string(&file).unwrap();
    let other = other.replacen(&format!("\"host\":\"{host}\""), "\"host\":\"elsewhere-7\"", 1);
    fs::write(&bad, other).unwrap();
    let out = dirty.plain(&["reclaim", "restore", bad.to_str().unwrap(), "--yes"]);
    assert!(
        out.status.code() == Some(1) && text(&out.stderr).contains("elsewhere-7"),
        "{}",
        text(&out.stderr)
    );
    assert_eq!(shown(&dirty), removed);
    dirty.clean();
}

/// The backups of a node, the oldest first.
fn backups(node: &Node) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(node.state.join("backups")) else { return vec![] };
    let mut all: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

#[test]
fn a_daemon_saves_the_rules_before_its_first_change_and_no_others() {
    let test = "a_daemon_saves_the_rules_before_its_first_change_and_no_others";
    if cannot(test, false) {
        return;
    }
    if !in_path("nft") {
        hearth_testkit::skip(test, "nft is not in PATH");
        return;
    }
    // No slots: what a killed daemon leaves of them is not the point here.
    let mut node = Node::new(&Wish { own_state: true, slot_pool: 0, ..Wish::default() });
    node.host("nft", &["add", "table", "inet", "others"]);
    node.start_daemon();
    let first = backups(&node);
    assert_eq!(first.len(), 1, "{}", node.log_text());
    let saved = fs::read_to_string(&first[0]).unwrap();
    assert!(saved.contains("table inet others {") && !saved.contains("table inet hearth-"), "{saved}");
    // All is as it should be at the second start: nothing is changed, and nothing saved.
    node.kill_daemon();
    node.host("nft", &["add", "table", "inet", "later"]);
    node.start_daemon();
    assert_eq!(backups(&node), first);
    node.kill_daemon();
    let own = format!("hearth-{}", node.instance);
    node.host("nft", &["delete", "table", "inet", &own]);
    node.start_daemon();
    let second = backups(&node);
    assert_eq!(second.len(), 2);
    let saved = fs::read_to_string(&second[1]).unwrap();
    assert!(saved.contains("table inet later {") && !saved.contains(&format!("table inet {own}")), "{saved}");
    fs::remove_dir_all(node.state.join("backups")).unwrap();
    node.end_clean();
}
