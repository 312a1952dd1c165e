//! Rules of another orchestrator on a real kernel: found in both back ends of iptables and in nftables sets, and
//! deleted without a change to anything else. In namespaces of the test's own.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use hearth_core::layout::Layout;
use hearth_host::net::rules::{Backend, census, delete};
use hearth_host::test_support::{in_private_namespaces, is_root};

fn layout() -> Layout {
    serde_json::from_value(serde_json::json!({
        "name": "other",
        "slots": { "netns": "ns-{n}", "veth": "veth-{n}", "first": 1, "last": 100, "addresses": "10.11.0.0/16" },
        "processes": { "vmm": [], "daemons": ["other"] },
        "rules": [
            { "table": "filter", "rule": "FORWARD -i veth-{n} -o {word} -j ACCEPT" },
            { "table": "nat", "rule": "POSTROUTING -s {address}/32 -o {word} -j MASQUERADE" }
        ],
        "elements": [
            { "family": "inet", "table": "other-firewall", "set": "veths", "element": "veth-{n}" },
            { "family": "inet", "table": "other-firewall", "set": "addresses", "element": "{address}" }
        ]
    }))
    .unwrap()
}

fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn has(program: &str) -> bool {
    let dirs = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"];
    dirs.iter().any(|dir| std::path::Path::new(dir).join(program).is_file())
}

fn on_a_host(test: &str, program: &str, f: impl FnOnce() + Send) {
    if !is_root() {
        hearth_testkit::skip(test, "needs root");
    } else if !has(program) {
        hearth_testkit::skip(test, &format!("{program} is not installed"));
    } else {
        in_private_namespaces(f).unwrap();
    }
}

fn iptables(backend: Backend, test: &str) {
    let program = backend.as_str();
    on_a_host(test, program, || {
        let add = |args: &str| drop(run(program, &args.split(' ').collect::<Vec<_>>()));
        add("-A FORWARD -i eth7 -j DROP");
        for n in 1..=3 {
            add(&format!("-A FORWARD -i veth-{n} -o eth0 -j ACCEPT"));
            add(&format!("-A FORWARD -i veth-{n} -j DROP"));
        }
        add("-t nat -A POSTROUTING -s 10.11.0.2/32 -o eth0 -j MASQUERADE");
        add("-t nat -A POSTROUTING -s 10.11.0.0/16 -o eth0 -j MASQUERADE");
        let (found, unseen) = census(&layout());
        assert!(unseen.is_empty(), "{unseen:?}");
        let slots: Vec<(u32, &str)> = found.iter().map(|r| (r.slot, r.table.as_str())).collect();
        assert_eq!(slots, [(1, "filter"), (2, "filter"), (3, "filter"), (2, "nat")]);
        assert!(found.iter().all(|r| r.backend == backend), "{found:?}");

        let before = run(program, &["-S", "FORWARD"]);
        // One that is not there is gone already and keeps none of the others.
        let mut texts: Vec<String> =
            found.iter().filter(|r| r.table == "filter" && r.slot != 2).map(|r| r.text.clone()).collect();
        texts.push("FORWARD -i veth-9 -o eth0 -j ACCEPT".into());
        delete(backend, "filter", &texts).unwrap();
        let gone = |line: &&str| !texts.iter().any(|t| **line == format!("-A {t}"));
        let expected: Vec<&str> = before.lines().filter(gone).collect();
        let after = run(program, &["-S", "FORWARD"]);
        assert_eq!(after.lines().collect::<Vec<_>>(), expected);
        assert!(after.contains("veth-2 -o") && after.contains("veth-1 -j DROP"), "{after}");
        // Once more is success.
        delete(backend, "filter", &texts).unwrap();
    });
}

#[test]
fn rules_of_the_nft_back_end_go_and_others_stay() {
    iptables(Backend::IptablesNft, "rules_of_the_nft_back_end_go_and_others_stay");
}

#[test]
fn rules_of_the_legacy_back_end_go_and_others_stay() {
    iptables(Backend::IptablesLegacy, "rules_of_the_legacy_back_end_go_and_others_stay");
}

#[test]
fn elements_of_sets_go_and_others_stay() {
    on_a_host("elements_of_sets_go_and_others_stay", "nft", || {
        run("nft", &["add table inet other-firewall"]);
        run("nft", &["add set inet other-firewall veths { type ifname; }"]);
        run("nft", &["add set inet other-firewall addresses { type ipv4_addr; flags interval; }"]);
        run("nft", &["add element inet other-firewall veths { \"veth-1\", \"veth-2\", \"eth0\" }"]);
        run("nft", &["add element inet other-firewall addresses { 10.11.0.1, 10.11.0.2, 10.99.0.0/16 }"]);
        let (found, unseen) = census(&layout());
        assert!(unseen.is_empty(), "{unseen:?}");
        let mut slots: Vec<(&str, u32)> = found.iter().map(|r| (r.text.as_str(), r.slot)).collect();
        slots.sort_unstable();
        assert_eq!(slots, [("\"veth-1\"", 1), ("\"veth-2\"", 2), ("10.11.0.1", 1), ("10.11.0.2", 2)]);
        for table in ["inet other-firewall veths", "inet other-firewall addresses"] {
            let of_first: Vec<String> =
                found.iter().filter(|r| r.table == table && r.slot == 1).map(|r| r.text.clone()).collect();
            delete(Backend::Nft, table, &of_first).unwrap();
        }
        let after = run("nft", &["list ruleset"]);
        assert!(!after.contains("veth-1") && !after.contains("10.11.0.1"), "{after}");
        for kept in ["veth-2", "eth0", "10.11.0.2", "10.99.0.0/16"] {
            assert!(after.contains(kept), "{kept}: {after}");
        }
    });
}
