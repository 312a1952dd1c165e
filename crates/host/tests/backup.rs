//! Backups of firewall rules on a real kernel: what was saved comes back byte by byte, and what does not differ is not
//! touched. In namespaces of the test's own.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::process::{Command, Stdio};

use hearth_core::backup::changes::compare;
use hearth_core::backup::{Content, Part, Tool};
use hearth_host::backup::{Backups, load};
use hearth_host::net::rules::{Backend, delete};
use hearth_host::net::rulesets::{carry_out, read};
use hearth_host::test_support::{in_private_namespaces, is_root};

fn run(program: &str, args: &[&str]) -> String {
    feed(program, args, "")
}

fn feed(program: &str, args: &[&str], input: &str) -> String {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    child.stdin.take().expect("it has a stdin").write_all(input.as_bytes()).expect("it reads");
    let out = child.wait_with_output().expect("it ends");
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn words(program: &str, line: &str) {
    run(program, &line.split(' ').collect::<Vec<_>>());
}

fn on_a_host(test: &str, programs: &[&str], f: impl FnOnce() + Send) {
    let dirs = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"];
    let has = |program: &str| dirs.iter().any(|dir| std::path::Path::new(dir).join(program).is_file());
    if !is_root() {
        hearth_testkit::skip(test, "needs root");
    } else if let Some(missing) = programs.iter().find(|p| !has(p)) {
        hearth_testkit::skip(test, &format!("{missing} is not installed"));
    } else {
        in_private_namespaces(f).unwrap();
    }
}

/// As the programs show them, dates and counters of chains aside.
fn shown() -> String {
    let strip = |text: String| {
        let kept = text.lines().filter(|l| !l.starts_with('#'));
        kept.map(|l| format!("{}\n", l.split(" [").next().unwrap())).collect::<String>()
    };
    let saved = ["iptables-nft-save", "ip6tables-nft-save"].map(|p| strip(run(p, &[])));
    format!("{}{}{}", saved[0], saved[1], run("nft", &["-s", "list", "ruleset"]))
}

const TABLES: &str = "table inet first {\n}\n\
table inet other-firewall {\n\
    comment \"of another\"\n\
    set veths { type ifname; elements = { \"veth-9\", \"veth-1\", \"veth-200\" }; }\n\
    set nets { type ipv4_addr; flags interval; elements = { 10.0.0.1-10.0.0.9, 10.11.0.0/24, 1.2.3.4 }; }\n\
    set seen { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 1h; elements = { 7.7.7.7 timeout 30m }; }\n\
    counter hits { packets 5 bytes 9; }\n\
    quota much { over 10 mbytes; }\n\
    ct helper sip {\n type \"sip\" protocol udp;\n }\n\
    chain sub {\n ct state established,related counter packets 3 bytes 77 accept\n\
        meta l4proto { tcp, udp } th dport 53 log prefix \"x { y\" accept\n }\n\
    map verdicts { type ifname : verdict; elements = { \"eth0\" : jump sub, \"a;b\" : drop }; }\n\
    chain forward {\n type filter hook forward priority -1; policy drop;\n iifname @veths counter accept\n\
        ip saddr @nets counter name hits drop comment \"a } brace { in\"\n iifname vmap @verdicts\n }\n\
}\n\
table ip6 last {\n}\n";

fn fill() {
    feed("nft", &["-f", "-"], TABLES);
    for n in 1..=6 {
        words("iptables-nft", &format!("-A FORWARD -i veth-{n} -o eth0 -j ACCEPT"));
        words("iptables-nft", &format!("-A FORWARD -i veth-{n} -j DROP"));
        words("iptables-nft", &format!("-t nat -A POSTROUTING -s 10.11.0.{n}/32 -o eth0 -j MASQUERADE"));
    }
    words("iptables-nft", "-N OWN");
    words("iptables-nft", "-A OWN -p tcp -m tcp --dport 80 -m comment --comment two`words -j RETURN");
    words("iptables-nft", "-A FORWARD -j OWN");
    words("ip6tables-nft", "-A INPUT -i eth7 -j DROP");
}

#[test]
fn what_was_removed_comes_back_byte_by_byte() {
    let test = "what_was_removed_comes_back_byte_by_byte";
    on_a_host(test, &["nft", "iptables-nft", "iptables-nft-save", "ip6tables-nft-save"], || {
        fill();
        let before = shown();
        let dir = tempfile::tempdir().unwrap();
        let backups = Backups { dir: dir.path().join("b"), keep: 3, instance: "i".into() };
        let taken = backups.take("a test", None).unwrap();
        assert!(taken.written && taken.absent().is_empty(), "{:?}", taken.absent());
        // Rules that did not change are not written again.
        let again = backups.take("a test", None).unwrap();
        assert!(!again.written && again.path == taken.path);
        let backup = load(&taken.path).unwrap();
        // What iptables shows is not nft's to restore as well.
        let names: Vec<String> =
            backup.parts.iter().flat_map(|p| p.tables()).map(|t| t.name.to_owned()).collect();
        assert_eq!(names, ["filter", "nat", "filter", "inet first", "inet other-firewall", "ip6 last"]);
        assert!(compare(&backup, &read()).changes.is_empty());

        let all = |range: std::ops::RangeInclusive<u32>, rule: fn(u32) -> String| {
            range.map(rule).collect::<Vec<_>>()
        };
        let accepting = all(2..=5, |n| format!("FORWARD -i veth-{n} -o eth0 -j ACCEPT"));
        delete(Backend::IptablesNft, "filter", &accepting).unwrap();
        let masquerading = all(1..=6, |n| format!("POSTROUTING -s 10.11.0.{n}/32 -o eth0 -j MASQUERADE"));
        delete(Backend::IptablesNft, "nat", &masquerading).unwrap();
        delete(Backend::Nft, "inet other-firewall veths", &["\"veth-1\"".into(), "\"veth-200\"".into()])
            .unwrap();
        words("iptables-nft", "-P FORWARD DROP");
        assert_ne!(shown(), before);

        let found = compare(&backup, &read());
        assert!(found.left.is_empty() && found.unseen.is_empty(), "{found:?}");
        let changed: Vec<&str> = found.changes.iter().map(|c| c.table.as_str()).collect();
        assert_eq!(changed, ["filter", "nat", "inet other-firewall"]);
        for change in &found.changes {
            carry_out(change.tool, &change.script).unwrap();
        }
        assert_eq!(shown(), before);
        assert_eq!(read(), backup.parts);
    });
}

#[test]
fn rules_of_the_older_iptables_come_back_too() {
    let test = "rules_of_the_older_iptables_come_back_too";
    on_a_host(test, &["iptables-legacy", "iptables-legacy-save", "ip6tables-legacy"], || {
        words("iptables-legacy", "-N OWN");
        words("iptables-legacy", "-A OWN -p udp -j DROP");
        for n in 1..=4 {
            words("iptables-legacy", &format!("-A FORWARD -i veth-{n} -o eth0 -j ACCEPT"));
            words(
                "iptables-legacy",
                &format!("-t nat -A POSTROUTING -s 10.11.0.{n}/32 -o eth0 -j MASQUERADE"),
            );
        }
        words("iptables-legacy", "-A FORWARD -j OWN");
        words("ip6tables-legacy", "-A INPUT -i eth7 -j DROP");
        let before = read();
        let dir = tempfile::tempdir().unwrap();
        let backups = Backups { dir: dir.path().to_owned(), keep: 3, instance: "i".into() };
        let backup = backups.take("a test", None).unwrap().backup;
        let tools: Vec<(Tool, usize)> =
            backup.parts.iter().map(|p| (p.tool, p.tables().len())).filter(|(_, n)| *n > 0).collect();
        assert_eq!(tools, [(Tool::IptablesLegacy, 2), (Tool::Ip6tablesLegacy, 1)]);
        words("iptables-legacy", "-D FORWARD 2");
        words("iptables-legacy", "-D FORWARD 4");
        words("iptables-legacy", "-F OWN");
        words("iptables-legacy", "-X OWN");
        words("iptables-legacy", "-P FORWARD DROP");
        words("iptables-legacy", "-t nat -F POSTROUTING");
        let found = compare(&backup, &read());
        assert_eq!(found.changes.len(), 2, "{found:#?}");
        for change in &found.changes {
            carry_out(change.tool, &change.script).unwrap();
        }
        assert_eq!(read(), before);
    });
}

#[test]
fn a_table_that_is_gone_comes_back_and_one_that_came_since_stays() {
    let test = "a_table_that_is_gone_comes_back_and_one_that_came_since_stays";
    on_a_host(test, &["nft", "iptables-nft", "iptables-nft-save", "ip6tables-nft-save"], || {
        fill();
        let dir = tempfile::tempdir().unwrap();
        let backups = Backups { dir: dir.path().to_owned(), keep: 3, instance: "i".into() };
        let backup = backups.take("a test", None).unwrap().backup;
        feed(
            "nft",
            &["-f", "-"],
            "delete table ip nat\ndelete table inet other-firewall\nadd table inet hearth-x\nadd table ip new\n",
        );
        words("iptables-nft", "-t mangle -A FORWARD -j ACCEPT");
        let found = compare(&backup, &read());
        assert_eq!(found.changes.len(), 2, "{found:#?}");
        assert_eq!(found.left.len(), 3, "{:?}", found.left);
        for change in &found.changes {
            carry_out(change.tool, &change.script).unwrap();
        }
        let now = read();
        for (then, now) in backup.parts.iter().zip(&now) {
            let (then, now) = (then.tables(), now.tables());
            then.iter().for_each(|table| assert!(now.contains(table), "{} differs: {now:#?}", table.name));
        }
        let all = run("nft", &["list", "tables"]);
        assert!(all.contains("ip new") && all.contains("ip mangle") && all.contains("hearth-x"), "{all}");
    });
}

#[test]
fn a_script_that_is_refused_changes_nothing_and_a_table_iptables_gave_up_is_told() {
    let test = "a_script_that_is_refused_changes_nothing_and_a_table_iptables_gave_up_is_told";
    on_a_host(test, &["nft", "iptables-nft", "iptables-nft-save", "ip6tables-nft-save"], || {
        fill();
        let before = shown();
        carry_out(Tool::Nft, "flush table inet other-firewall\ndelete set inet other-firewall nothing\n")
            .unwrap_err();
        let bad = "*filter\n-D FORWARD 1\n-A FORWARD -j NOWHERE\nCOMMIT\n";
        carry_out(Tool::IptablesNft, bad).unwrap_err();
        assert_eq!(shown(), before);
        let dir = tempfile::tempdir().unwrap();
        let backups = Backups { dir: dir.path().to_owned(), keep: 3, instance: "i".into() };
        let backup = backups.take("a test", None).unwrap().backup;
        // iptables does not know such a rule.
        words("nft", "add rule ip nat POSTROUTING ct mark 1 accept");
        let found = compare(&backup, &read());
        assert!(found.changes.is_empty(), "{found:#?}");
        assert_eq!(found.unseen.len(), 1, "{found:#?}");
        assert!(found.unseen[0].contains("it is nft's by now"), "{:?}", found.unseen);
    });
}

#[test]
fn a_host_without_rules_is_empty_and_runs_no_program() {
    on_a_host("a_host_without_rules_is_empty_and_runs_no_program", &[], || {
        let empty = |part: &Part| part.content == Content::Empty;
        assert!(read().iter().all(empty), "{:?}", read());
    });
}
