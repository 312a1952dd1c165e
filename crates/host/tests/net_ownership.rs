//! Whose a link is (law 3): a name with our prefix and a number is not enough to be completed, waited for or deleted.

#![allow(clippy::unwrap_used)]

mod net_support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_core::host::ErrorClass;
use hearth_core::network::SlotLayout;
use hearth_core::resource::Resource;
use hearth_host::net::{netns, veth};
use net_support::{Lab, WITHIN, complete, inside, ip, on_a_host, open_tap, overlapping, release_slot, slot};

/// The alias `ip` shows for the host's end of a slot.
fn alias(lab: &Lab, n: u32) -> Option<String> {
    let shown = ip(&format!("link show dev {}", lab.layout.veth(slot(n))));
    shown.lines().find_map(|l| l.trim().strip_prefix("alias ").map(str::to_owned))
}

fn index(lab: &Lab, n: u32) -> String {
    ip(&format!("-o link show dev {}", lab.layout.veth(slot(n)))).split(':').next().unwrap().to_owned()
}

/// Every link's number, name, administrative state and alias, and every address: all but the carrier, which the kernel
/// reports late.
fn links_and_addresses() -> Vec<String> {
    let mut seen = Vec::new();
    for line in ip("-o link").lines() {
        let mut words = line.split_whitespace();
        let (number, name) = (words.next().unwrap(), words.next().unwrap());
        let flags: Vec<&str> = words.next().unwrap().trim_matches(['<', '>']).split(',').collect();
        let alias = line.split_once("alias ").map(|(_, a)| a);
        seen.push(format!("{number} {name} up={} {alias:?}", flags.contains(&"UP")));
    }
    seen.extend(ip("-4 -o addr").lines().map(str::to_owned));
    seen
}

/// The first step of making a pair, and no more.
fn half_make(lab: &Lab, n: u32) {
    netns::ensure(&lab.layout, slot(n)).unwrap();
    let (host, ns) = (lab.layout.veth(slot(n)), lab.in_slot(n));
    ip(&format!("link add {host} type veth peer name uplink netns {ns}"));
}

#[test]
fn a_strangers_veth_with_our_name_stays_untouched() {
    on_a_host("a_strangers_veth_with_our_name_stays_untouched", |lab| {
        for n in 1..=6 {
            netns::ensure(&lab.layout, slot(n)).unwrap();
        }
        let ns = |n| lab.in_slot(n);
        ip("netns add elsewhere");
        // An operator's, with both ends here.
        ip("link add hth1 type veth peer name op1");
        // Its other end in a namespace that is not ours, under the name we use.
        ip("link add hth2 type veth peer name uplink netns elsewhere");
        // In one of ours, but of another slot.
        ip(&format!("link add hth3 type veth peer name x netns {}", ns(6)));
        // Of another instance, even if its other end strayed into our namespace.
        ip(&format!("link add hth4 type veth peer name uplink netns {}", ns(4)));
        ip("link set hth4 alias hearth-zzz-4");
        // Of our instance, but not of this slot.
        ip("link add hth5 type veth peer name op5");
        ip(&format!("link set hth5 alias {}", ns(6)));
        // No slot's number.
        ip("link add hth07 type veth peer name op7");
        for n in 1..=5 {
            ip(&format!("addr add 192.0.2.{n}/32 dev hth{n}"));
            ip(&format!("link set hth{n} up"));
        }
        let before = links_and_addresses();

        let census = veth::census(&lab.layout).unwrap();
        assert_eq!(census.incomplete, Vec::<String>::new());
        assert!(census.ours.is_empty(), "{:?}", census.ours);
        let names: Vec<&str> = census.foreign.keys().map(String::as_str).collect();
        assert_eq!(names, ["hth07", "hth1", "hth2", "hth3", "hth4", "hth5"]);
        assert!(census.foreign["hth1"].contains(&format!("not the alias {}", ns(1))), "{census:?}");
        assert!(census.foreign["hth4"].contains("instance zzz's"), "{census:?}");

        for n in 1..=5 {
            let error = veth::ensure(&lab.layout, slot(n)).unwrap_err();
            assert_eq!(error.class, ErrorClass::Foreign, "{error}");
            let error = veth::release(&lab.layout, slot(n), WITHIN).unwrap_err();
            assert_eq!(error.class, ErrorClass::Foreign, "{error}");
        }
        assert_eq!(before, links_and_addresses());
        // The namespaces are ours; a stranger's link of the number is neither stripped of its address nor waited for.
        for n in [1, 2, 5] {
            let error = release_slot(&lab.layout, slot(n), Duration::from_secs(2)).unwrap_err();
            assert_eq!(error.class, ErrorClass::Foreign, "{error}");
            assert!(!netns::path(&lab.layout, slot(n)).exists());
        }
        assert_eq!(before, links_and_addresses());
        // Without a namespace there is nothing it could end in.
        assert_eq!(veth::census(&lab.layout).unwrap().foreign.len(), 6);
        let error = veth::release(&lab.layout, slot(1), WITHIN).unwrap_err();
        assert_eq!(error.class, ErrorClass::Foreign, "{error}");
        assert_eq!(before, links_and_addresses());
    });
}

#[test]
fn two_instances_with_one_prefix_leave_each_other_alone() {
    on_a_host("two_instances_with_one_prefix_leave_each_other_alone", |lab| {
        let other = SlotLayout { instance: "other".parse().unwrap(), ..lab.layout.clone() };
        lab.ensure(1);
        let before = links_and_addresses();
        let census = veth::census(&other).unwrap();
        assert!(census.ours.is_empty() && census.foreign.contains_key("hth1"), "{census:?}");
        netns::ensure(&other, slot(1)).unwrap();
        assert_eq!(veth::ensure(&other, slot(1)).unwrap_err().class, ErrorClass::Foreign);
        assert_eq!(veth::release(&other, slot(1), WITHIN).unwrap_err().class, ErrorClass::Foreign);
        assert_eq!(release_slot(&other, slot(1), WITHIN).unwrap_err().class, ErrorClass::Foreign);
        assert!(!netns::path(&other, slot(1)).exists());
        assert_eq!(before, links_and_addresses());
        assert_eq!(lab.census().len(), 4);
        lab.release(1);
    });
}

#[test]
fn a_half_made_pair_is_ours_by_where_it_ends_and_gets_its_alias() {
    on_a_host("a_half_made_pair_is_ours_by_where_it_ends_and_gets_its_alias", |lab| {
        half_make(lab, 7);
        let made = index(lab, 7);
        assert_eq!(alias(lab, 7), None);
        let seen = complete(veth::census(&lab.layout).unwrap());
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].0, Resource::Veth { slot: slot(7) });
        assert!(seen[0].1.contains("half made"), "{seen:?}");
        lab.ensure(7);
        assert_eq!((alias(lab, 7), index(lab, 7)), (Some(lab.in_slot(7)), made), "made anew, not completed");
        assert!(complete(veth::census(&lab.layout).unwrap())[0].1.contains("by its alias"));
        // An operator's note on it changes nothing about whose it is.
        ip("link set hth7 alias customer-9");
        assert_eq!(complete(veth::census(&lab.layout).unwrap()).len(), 1);
        lab.ensure(7);
        assert_eq!(alias(lab, 7), Some(lab.in_slot(7)));
        lab.release(7);

        half_make(lab, 7);
        veth::release(&lab.layout, slot(7), WITHIN).unwrap();
        assert!(veth::census(&lab.layout).unwrap().ours.is_empty());
        half_make(lab, 8);
        release_slot(&lab.layout, slot(8), WITHIN).unwrap();
        release_slot(&lab.layout, slot(7), WITHIN).unwrap();
        assert!(lab.census().is_empty());
    });
}

/// The proof by the other end goes with the namespace's name; the link must still be known as ours then.
#[test]
fn a_half_made_pair_is_marked_before_its_namespace_loses_its_name() {
    on_a_host("a_half_made_pair_is_marked_before_its_namespace_loses_its_name", |lab| {
        half_make(lab, 4);
        // A tap held from outside keeps the namespace alive, and no process is seen inside.
        let tap = inside(&lab.in_slot(4), || open_tap("held0"));
        for _ in 0..2 {
            let error = release_slot(&lab.layout, slot(4), Duration::from_millis(200)).unwrap_err();
            assert_eq!(error.class, ErrorClass::Deadline, "{error}");
            assert_eq!(complete(veth::census(&lab.layout).unwrap()).len(), 1);
        }
        drop(tap);
        lab.release(4);
        assert!(lab.census().is_empty());
    });
}

#[test]
fn a_strangers_veth_does_not_hide_its_routes() {
    on_a_host("a_strangers_veth_does_not_hide_its_routes", |lab| {
        lab.ensure(1);
        assert_eq!(overlapping(&lab.layout).unwrap(), Vec::<String>::new());
        ip("link add hth9 type veth peer name op9");
        ip("addr add 10.12.0.18/31 dev hth9");
        ip("link set hth9 up");
        let found = overlapping(&lab.layout).unwrap();
        assert!(!found.is_empty() && found.iter().all(|f| f.contains("hth9")), "{found:?}");
        lab.release(1);
    });
}

/// While links come and go elsewhere a list may be cut; what is there all along is seen all the same.
#[test]
fn a_census_amid_changes_still_tells_what_it_saw() {
    on_a_host("a_census_amid_changes_still_tells_what_it_saw", |lab| {
        lab.ensure(1);
        let many: String = (0..200).map(|n| format!("link add d{n} type bridge\n")).collect();
        std::fs::write("/run/many", many).unwrap();
        ip("-batch /run/many");
        let churn: String = (0..20).map(|_| "link add x type bridge\nlink del x\n").collect();
        std::fs::write("/run/churn", churn).unwrap();
        let (stop, mut cut) = (AtomicBool::new(false), 0);
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    ip("-batch /run/churn");
                }
            });
            for _ in 0..50 {
                let census = veth::census(&lab.layout).unwrap();
                let seen: Vec<&Resource> = census.ours.iter().map(|s| &s.resource).collect();
                assert_eq!(seen, [&Resource::Veth { slot: slot(1) }], "{census:?}");
                cut += usize::from(!census.incomplete.is_empty());
            }
            stop.store(true, Ordering::Relaxed);
            changes.join().unwrap();
        });
        println!("{cut} of 50 were cut, after four tries each");
        assert_eq!(complete(veth::census(&lab.layout).unwrap()).len(), 1);
        lab.release(1);
    });
}
