//! The host firewall's own promises on a real kernel: constant size, repeatable, and a way back that restores what
//! was there and nothing else.

#![allow(clippy::unwrap_used)]

mod net_support;

use std::fs;

use hearth_core::host::ErrorClass;
use hearth_core::network::SlotLayout;
use hearth_core::resource::Resource;
use hearth_host::net::host_firewall;
use hearth_host::net::links::Links;
use net_support::{WITHIN, ip, nft, on_a_host, run};

const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

fn ruleset() -> String {
    run("nft", "-s list ruleset")
}

#[test]
fn the_host_is_afterwards_as_it_was() {
    on_a_host("the_host_is_afterwards_as_it_was", |lab| {
        nft("table ip nat { chain PREROUTING { type nat hook prerouting priority -100; } }
             table inet wall { chain input { type filter hook input priority 0; policy accept; } }
             table ip fine { chain forward { type filter hook forward priority 0; policy accept; } }");
        let (before, sysctl) = (ruleset(), fs::read_to_string(FORWARD).unwrap());
        assert_eq!(sysctl.trim(), "0");
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();

        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(fs::read_to_string(FORWARD).unwrap().trim(), "1");
        assert!(fs::read_to_string(&lab.record).unwrap().contains("\"old\":\"0\""));
        let during = run("nft", "-a list ruleset");
        assert!(during.contains("iifname \"hth*\" oifname \"hth*\" drop"), "{during}");
        assert!(
            during.contains("ip saddr 10.12.0.0/16 oifname != \"hth*\" oifname != \"lo\" masquerade"),
            "{during}"
        );
        let own = run("nft", &format!("list table inet {}", lab.layout.host_table()));
        assert_eq!(
            ruleset().replace(&own, "").trim(),
            before.trim(),
            "a chain that drops nothing was changed"
        );

        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(run("nft", "-a list ruleset"), during, "the second ensure changed something");
        let census = host_firewall::census(&lab.layout).unwrap();
        assert_eq!(census.ours.len(), 1);
        assert_eq!(census.ours[0].resource, Resource::HostFirewall);
        assert!(census.ours[0].facts.contains("current"), "{}", census.ours[0].facts);

        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
        assert_eq!((ruleset(), fs::read_to_string(FORWARD).unwrap()), (before, sysctl));
        assert!(!lab.record.exists());
        assert!(host_firewall::census(&lab.layout).unwrap().ours.is_empty());
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
    });
}

#[test]
fn a_table_of_another_version_is_replaced() {
    on_a_host("a_table_of_another_version_is_replaced", |lab| {
        let name = lab.layout.host_table();
        nft(&format!(
            "table inet {name} {{ chain old {{ type filter hook forward priority 0; policy drop; }} }}"
        ));
        assert!(host_firewall::census(&lab.layout).unwrap().ours[0].facts.contains("another version"));
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        let listed = ruleset();
        assert!(!listed.contains("chain old"), "{listed}");
        // A rule of a stranger in it goes too.
        run("nft", &format!("insert rule inet {name} forward accept"));
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(ruleset(), listed);
    });
}

#[test]
fn a_new_prefix_replaces_the_rules_in_foreign_chains() {
    on_a_host("a_new_prefix_replaces_the_rules_in_foreign_chains", |lab| {
        run("iptables-nft", "-P FORWARD DROP");
        let theirs = run("iptables-nft", "-S");
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        let other = SlotLayout { veth_prefix: "sbx".parse().unwrap(), ..lab.layout.clone() };
        host_firewall::ensure(&other, &lab.record, &|| ()).unwrap();
        let rules = run("iptables-nft", "-S");
        assert!(rules.contains("-i sbx+") && rules.contains("-o sbx+") && !rules.contains("hth"), "{rules}");
        assert_eq!(rules.lines().count(), theirs.lines().count() + 2, "{rules}");
        host_firewall::release(&other, &lab.record, WITHIN).unwrap();
        assert_eq!(run("iptables-nft", "-S"), theirs);
    });
}

#[test]
fn a_setting_changed_since_is_left_alone() {
    on_a_host("a_setting_changed_since_is_left_alone", |lab| {
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        fs::write(FORWARD, "0").unwrap();
        // A crash between record and change: the old value on record stays the first one.
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
        assert_eq!(fs::read_to_string(FORWARD).unwrap().trim(), "0");

        // On before: not ours to turn off.
        fs::write(FORWARD, "1").unwrap();
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert!(!lab.record.exists());
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
        assert_eq!(fs::read_to_string(FORWARD).unwrap().trim(), "1");
    });
}

#[test]
fn two_instances_do_not_touch_each_other() {
    on_a_host("two_instances_do_not_touch_each_other", |lab| {
        run("iptables-nft", "-P FORWARD DROP");
        let other = SlotLayout {
            instance: "other".parse().unwrap(),
            veth_prefix: "oth".parse().unwrap(),
            cidr: "10.13.0.0/16".parse().unwrap(),
        };
        let others_record = lab.record.with_file_name("other.json");
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        host_firewall::ensure(&other, &others_record, &|| ()).unwrap();
        let census = host_firewall::census(&lab.layout).unwrap();
        assert_eq!(census.foreign.keys().collect::<Vec<_>>(), ["hearth-other"]);
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
        let (rules, xt) = (ruleset(), run("iptables-nft", "-S"));
        assert!(rules.contains("table inet hearth-other") && !rules.contains("hth"), "{rules}");
        assert!(xt.contains("oth+") && !xt.contains("hth+"), "{xt}");
        // The other still forwards.
        assert_eq!(fs::read_to_string(FORWARD).unwrap().trim(), "1");
        host_firewall::release(&other, &others_record, WITHIN).unwrap();
        assert_eq!(run("iptables-nft", "-S"), "-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n");
    });
}

#[test]
fn a_damaged_record_is_an_error_and_the_rest_still_goes() {
    on_a_host("a_damaged_record_is_an_error_and_the_rest_still_goes", |lab| {
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        fs::write(&lab.record, "{\"sysctl\":\"kernel.panic\"").unwrap();
        let error = host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap_err();
        assert_eq!(error.class, ErrorClass::Refused);
        assert!(error.to_string().contains("by hand"), "{error}");
        assert_eq!(ruleset(), "");
    });
}

fn prefix_conflict(layout: &SlotLayout) -> Option<String> {
    host_firewall::prefix_conflict(layout, &Links::of(layout).unwrap()).unwrap()
}

#[test]
fn a_prefix_that_meets_another_instances_is_a_conflict() {
    on_a_host("a_prefix_that_meets_another_instances_is_a_conflict", |lab| {
        let conflict = || prefix_conflict(&lab.layout);
        let with = |prefix: &str| SlotLayout {
            instance: "other-1".parse().unwrap(),
            veth_prefix: prefix.parse().unwrap(),
            cidr: "10.13.0.0/16".parse().unwrap(),
        };
        assert_eq!(conflict(), None);
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        lab.ensure(1);
        // Neither our own things nor an operator's link are another instance's.
        ip("link add hth7 type veth peer name op7");
        assert_eq!(conflict(), None);
        let record = lab.record.with_file_name("other.json");
        for (prefix, meets) in [("oth", false), ("hth", true), ("hthx", true), ("ht", true), ("hta", false)] {
            host_firewall::ensure(&with(prefix), &record, &|| ()).unwrap();
            match conflict() {
                Some(why) => {
                    assert!(meets, "{prefix}: {why}");
                    assert!(why.contains("table inet hearth-other-1 of instance other-1"), "{why}");
                    assert!(why.contains(&format!("{prefix}*")) && why.contains("hth*"), "{why}");
                }
                None => assert!(!meets, "{prefix}"),
            }
            assert_eq!(prefix_conflict(&with(prefix)).is_some(), meets, "{prefix}");
        }
        host_firewall::release(&with("hta"), &record, WITHIN).unwrap();
        assert_eq!(conflict(), None);
        // A table of no instance.
        nft("table inet wall { chain f { type filter hook forward priority 0; iifname \"hth*\" accept; } }");
        assert_eq!(conflict(), None);
        ip("link set hth7 alias hearth-other-1-7");
        let why = conflict().unwrap();
        assert!(why.contains("link hth7") && why.contains("instance other-1's"), "{why}");
        lab.release(1);
    });
}
