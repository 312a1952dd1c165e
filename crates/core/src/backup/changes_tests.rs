//! Scripts are carried out on a model of the programs.

use proptest::prelude::*;

use super::super::tests::backup;
use super::*;

fn saved(tool: Tool, text: &str) -> Part {
    Part { tool, content: Content::Saved(text.to_owned()) }
}

/// Rules by chain.
type Model = BTreeMap<String, Vec<String>>;

fn section(chains: &Model) -> String {
    let mut text = "*filter\n".to_owned();
    for chain in chains.keys() {
        let policy = if chain.starts_with('u') { "-" } else { "ACCEPT" };
        text.push_str(&format!(":{chain} {policy} [0:0]\n"));
    }
    for (chain, rules) in chains {
        rules.iter().for_each(|rule| text.push_str(&format!("-A {chain} {rule}\n")));
    }
    text + "COMMIT\n"
}

/// What `iptables-restore --noflush` does; it stops at what does not exist.
fn carry_out(script: &str, chains: &mut Model) {
    for line in script.lines().filter(|l| !l.starts_with('*') && *l != "COMMIT") {
        let words: Vec<&str> = line.split(' ').collect();
        if let Some(chain) = words[0].strip_prefix(':') {
            assert!(chains.insert(chain.to_owned(), vec![]).is_none(), "{line}: emptied what was there");
            continue;
        }
        if words[0] == "-X" {
            assert_eq!(chains.remove(words[1]).unwrap(), [""; 0], "{line}");
            continue;
        }
        let rules = chains.get_mut(words[1]).unwrap_or_else(|| panic!("{line}: no such chain"));
        let position = || words[2].parse::<usize>().unwrap() - 1;
        match words[0] {
            "-F" => rules.clear(),
            "-A" => rules.push(words[2..].join(" ")),
            "-I" => {
                assert!(position() < rules.len(), "{line}: a place without a rule");
                rules.insert(position(), words[3..].join(" "));
            }
            "-D" => drop(rules.remove(position())),
            _ => panic!("{line}"),
        }
    }
}

fn chains() -> impl Strategy<Value = Model> {
    let rule =
        prop::sample::select(vec!["-i a -j DROP", "-i b -j DROP", "-i c -j u1", "-j u2", "-i d -j ACCEPT"]);
    let rules = prop::collection::vec(rule.prop_map(str::to_owned), 0..12);
    let own = prop::collection::btree_map(prop::sample::select(vec!["u1", "u2", "u3"]), rules.clone(), 0..3);
    (own, rules).prop_map(|(own, forward)| {
        let mut chains: Model = own.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        chains.insert("FORWARD".into(), forward);
        chains
    })
}

proptest! {
    #[test]
    fn an_iptables_script_leads_from_any_rules_to_any_others(now in chains(), then in chains()) {
        let found = compare(&backup(vec![saved(Tool::IptablesNft, &section(&then))]), &[saved(Tool::IptablesNft, &section(&now))]);
        prop_assert_eq!(found.changes.is_empty(), now == then);
        let mut model = now;
        found.changes.iter().for_each(|change| carry_out(&change.script, &mut model));
        prop_assert_eq!(model, then);
    }
}

#[test]
fn only_what_is_missing_is_put_in() {
    let then = "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -i a -j DROP\n-A FORWARD -i b -j DROP\n-A FORWARD -i c -j DROP\nCOMMIT\n";
    let now = then.replace("-A FORWARD -i b -j DROP\n", "").replace("FORWARD DROP", "FORWARD ACCEPT");
    let found = compare(&backup(vec![saved(Tool::IptablesNft, then)]), &[saved(Tool::IptablesNft, &now)]);
    let change = &found.changes[0];
    assert_eq!(change.script, "*filter\n:FORWARD DROP [0:0]\n-I FORWARD 2 -i b -j DROP\nCOMMIT\n");
    assert_eq!((change.added, change.removed), (2, 1));
    assert!(change.diff.contains("\n+-A FORWARD -i b -j DROP\n"), "{}", change.diff);
}

const OLD: &str = "table inet other {\n\tcomment \"x\"\n\tcounter c {\n\t}\n\n\tct helper h {\n\t\ttype \"sip\" protocol udp\n\t}\n\n\
    \tset s {\n\t\ttype ifname\n\t\telements = { \"veth-1\",\n\t\t\t     \"veth-2\" }\n\t}\n\n\
    \tchain f {\n\t\ttype filter hook forward priority filter; policy drop;\n\t\tmeta l4proto { tcp, udp } accept\n\t}\n}\n";

#[test]
fn an_nft_table_stays_in_its_place_while_its_contents_are_put_back() {
    let now = OLD.replace("\"veth-1\",\n\t\t\t     ", "");
    let found = compare(&backup(vec![saved(Tool::Nft, OLD)]), &[saved(Tool::Nft, &now)]);
    let expected = format!(
        "flush table inet other\ndelete set inet other s\ndelete chain inet other f\n\
         delete counter inet other c\ndelete ct helper inet other h\n{OLD}"
    );
    assert_eq!(found.changes[0].script, expected);
    // What a table says of itself cannot be changed in place, and one that is gone is only made.
    let other = OLD.replace("\"x\"", "\"y\"");
    let found = compare(&backup(vec![saved(Tool::Nft, OLD)]), &[saved(Tool::Nft, &other)]);
    assert_eq!(found.changes[0].script, format!("delete table inet other\n{OLD}"));
    let found = compare(&backup(vec![saved(Tool::Nft, OLD)]), &[]);
    assert_eq!(found.changes[0].script, OLD);
}

#[test]
fn what_came_since_what_is_ours_and_what_was_not_seen_stays() {
    let own = "table inet hearth-a {\n}\n";
    let then = backup(vec![
        Part { tool: Tool::IptablesLegacy, content: Content::Absent("not installed".into()) },
        saved(Tool::IptablesNft, "*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT\n"),
        saved(Tool::Ip6tablesNft, "*nat\nCOMMIT\n"),
        saved(Tool::Nft, &format!("{OLD}{own}")),
    ]);
    let now = [
        saved(Tool::IptablesLegacy, "*raw\nCOMMIT\n"),
        Part { tool: Tool::Ip6tablesNft, content: Content::Absent("it is broken".into()) },
        saved(Tool::Nft, &format!("table ip filter {{\n}}\ntable ip new {{\n}}\n{OLD}")),
    ];
    let found = compare(&then, &now);
    assert_eq!(found.changes, []);
    assert_eq!(found.left.len(), 3, "{:?}", found.left);
    for (n, word) in ["not in the backup: not installed", "ip new", "inet hearth-a"].iter().enumerate() {
        assert!(found.left.iter().any(|l| l.contains(word)), "{n}: {:?}", found.left);
    }
    // iptables gave the table up, so its rules cannot be put in by iptables.
    assert_eq!(found.unseen.len(), 2, "{:?}", found.unseen);
    assert!(found.unseen[0].contains("it is nft's by now"), "{:?}", found.unseen);
    assert!(found.unseen[1].contains("it is broken"), "{:?}", found.unseen);
}
