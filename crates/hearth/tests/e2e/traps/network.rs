//! The sandbox's network is taken away, replaced or held by others while it runs.

use std::fs;
use std::process::Command;

use super::{PROCESS, Stranger, create, layout, refused, slot, until};
use crate::node::{Node, Wish, cannot};

fn has_link(node: &Node, name: &str) -> bool {
    let links = node.host("ip", &["-o", "link"]);
    links.lines().filter_map(|l| l.split([':', '@']).nth(1)).any(|n| n.trim() == name)
}

#[test]
fn a_namespace_deleted_from_outside_is_no_obstacle() {
    if cannot("a_namespace_deleted_from_outside_is_no_obstacle", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));
    let slot = slot(&node, "a");
    node.host("ip", &["netns", "del", &layout(&node).netns(slot)]);
    // Its processes hold the namespace, so nothing inside notices.
    assert!(has_link(&node, &layout(&node).veth(slot)));
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    node.ok(&["rm", "a"]);
    assert!(!has_link(&node, &layout(&node).veth(slot)), "gone was said, and its link is there");
    node.end_clean();
}

#[test]
fn a_slot_that_lost_its_link_is_not_handed_on() {
    if cannot("a_slot_that_lost_its_link_is_not_handed_on", true) {
        return;
    }
    // With a pool a slot is reset and kept, if it is whole.
    let node = Node::start(&Wish { slot_pool: 2, ..PROCESS });
    node.ok(&create("a"));
    let lost = slot(&node, "a");
    node.host("ip", &["link", "del", &layout(&node).veth(lost)]);
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    node.ok(&["rm", "a"]);
    for name in ["b", "c", "d"] {
        node.ok(&create(name));
        assert!(has_link(&node, &layout(&node).veth(slot(&node, name))), "{name} has no link");
    }
    node.end_clean();
}

#[test]
fn a_file_in_the_place_of_a_namespace_is_left_alone() {
    if cannot("a_file_in_the_place_of_a_namespace_is_left_alone", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));
    let number = slot(&node, "a");
    let path = layout(&node).netns_path(number);
    node.host("ip", &["netns", "del", &layout(&node).netns(number)]);
    fs::write(&path, "an operator's notes").unwrap();
    let why = refused(&node, &["rm", "a"]);
    assert!(why.contains("stuck") && why.contains(&layout(&node).netns(number)), "{why}");
    let seen = node.inspect("a");
    assert_eq!(seen["state"], "stuck", "{seen}");
    assert_eq!(seen["stuck"]["left"][0]["kind"], "netns", "{seen}");
    assert_eq!(fs::read(&path).unwrap(), b"an operator's notes");
    // Its number is nobody's meanwhile, and others are served.
    node.ok(&create("b"));
    assert_ne!(slot(&node, "b"), number);
    fs::remove_file(&path).unwrap();
    // A delete does not wait for the next try. The one by back-off may be the one that did it.
    let again = node.cli(&["rm", "a"]);
    assert!(again.status.success() || refused(&node, &["inspect", "a"]).contains("has ended"));
    node.end_clean();
}

#[test]
fn a_namespace_held_by_another_is_stuck_until_it_lets_go() {
    if cannot("a_namespace_held_by_another_is_stuck_until_it_lets_go", true) {
        return;
    }
    let node = Node::start(&PROCESS);
    for inside in [true, false] {
        node.ok(&create("a"));
        let number = slot(&node, "a");
        let path = layout(&node).netns_path(number);
        let mut holder = if inside {
            let enter = format!("--net={}", path.display());
            Stranger::start(Command::new("nsenter").args([&enter, "--", "sleep", "600"]))
        } else {
            // Not inside: it only has a descriptor.
            let hold = format!("exec sleep 600 3<{}", path.display());
            Stranger::start(Command::new("bash").args(["-c", &hold]))
        };
        until(&node, "held", || {
            let name = fs::read_to_string(format!("/proc/{}/comm", holder.pid())).unwrap_or_default();
            name.trim() == "sleep"
        });
        let why = refused(&node, &["rm", "a"]);
        assert!(why.contains("stuck"), "{why}");
        holder.assert_alive();
        let seen = node.inspect("a");
        assert_eq!(seen["stuck"]["left"][0]["kind"], "netns", "{seen}");
        if inside {
            assert!(seen["stuck"]["why"].as_str().unwrap().contains(&format!("process {}", holder.pid())));
            assert_eq!(seen["stuck"]["left"][0]["holders"][0]["pid"], holder.pid(), "{seen}");
        }
        node.ok(&create("b"));
        assert_ne!(slot(&node, "b"), number, "a number that is stuck was handed out");
        node.ok(&["rm", "b"]);
        holder.end();
        // By itself: the next try is seconds away.
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        assert!(!has_link(&node, &layout(&node).veth(number)));
    }
    node.end_clean();
}
