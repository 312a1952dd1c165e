//! Starts on a host full of leftovers: what goes, what stays, and that kills in the middle cost nothing.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use hearth_core::host::Host as _;
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::resource::Resource;
use hearth_host::kernel_host::{HostConfig, KernelHost};
use hearth_host::net::netns;

use crate::http::{get, get_with};
use crate::node::{Node, Wish, cannot};

const PROCESS: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 1,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// The layout that the harness configures.
pub fn layout(node: &Node) -> SlotLayout {
    SlotLayout {
        instance: node.instance.parse().unwrap(),
        veth_prefix: "hxv".parse().unwrap(),
        cidr: "10.77.0.0/20".parse().unwrap(),
    }
}

pub fn slot(n: u32) -> SlotIndex {
    SlotIndex::new(n).unwrap()
}

/// Makes whole slots that no record names.
pub fn leak(node: &Node, numbers: impl Iterator<Item = u32> + Send) {
    let config = HostConfig {
        layout: layout(node),
        state_dir: node.state.join(&node.instance),
        run_dir: node.dir.path().join("r").join(&node.instance),
    };
    netns::enter(&node.netns.path(), || {
        let host = KernelHost::new(config)?;
        for n in numbers {
            Resource::of_slot(slot(n)).iter().try_for_each(|part| host.ensure(part))?;
        }
        Ok(())
    })
    .unwrap();
}

/// The numbers that have a namespace's name or a link.
pub fn present(node: &Node) -> BTreeSet<u32> {
    let layout = layout(node);
    let names = fs::read_dir("/run/netns").unwrap().map(|e| e.unwrap().file_name());
    let mut present: BTreeSet<u32> =
        names.filter_map(|n| layout.slot_of_netns(n.to_str()?)).map(SlotIndex::get).collect();
    let links = node.host("ip", &["-o", "link"]);
    let names = links.lines().filter_map(|l| l.split([':', '@']).nth(1));
    present.extend(names.filter_map(|n| layout.slot_of_veth(n.trim())).map(SlotIndex::get));
    present
}

/// Waits for something in `/health` of a daemon that answers.
pub fn until(node: &Node, what: &str, good: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(answer) = get_with(node, "/health", "") {
            let health = answer.json();
            if good(&health) {
                return health;
            }
            assert!(Instant::now() < end, "never {what}: {health}\n{}", node.log_text());
        }
        assert!(Instant::now() < end, "never {what}: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn reclaim_is_done(health: &serde_json::Value) -> bool {
    health["reclaim"]["state"] == "done"
}

fn sleep_inside(node: &Node, n: u32) -> Child {
    let path = layout(node).netns_path(slot(n));
    netns::enter(&path, || Ok(Command::new("sleep").arg("600").spawn().unwrap())).unwrap()
}

/// The value of one metric line.
pub fn metric(node: &Node, line: &str) -> f64 {
    let metrics = get(node, "/metrics").body;
    let value = metrics.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {line} in {metrics}")).parse().unwrap()
}

#[test]
fn leftovers_go_and_nothing_foreign_is_changed() {
    if cannot("leftovers_go_and_nothing_foreign_is_changed", false) {
        return;
    }
    let mut node = Node::new(&Wish { own_state: true, ..PROCESS });
    leak(&node, 1..=40);
    let plain = layout(&node).netns_path(slot(50));
    fs::write(&plain, "an operator's notes").unwrap();
    // Another orchestrator's slot.
    let other = format!("ns-7{}", std::process::id());
    node.host("ip", &["netns", "add", &other]);
    node.host("ip", &["link", "add", "veth-7", "type", "veth", "peer", "name", "eth0", "netns", &other]);
    let mut stranger = sleep_inside(&node, 9);
    let untouched = |node: &Node| {
        let ours = node.host("ip", &["-o", "addr", "show", "dev", "hxv9"]);
        let theirs = node.host("ip", &["-o", "link", "show", "dev", "veth-7"]);
        (ours, theirs, fs::read(&plain).unwrap(), fs::exists(format!("/run/netns/{other}")).unwrap())
    };
    let before = untouched(&node);
    node.spawn_daemon();
    let health = until(&node, "reclaimed", reclaim_is_done);
    assert_eq!(health["reclaim"]["total"], 40);
    assert_eq!(health["reclaim"]["done"], 39, "{}", node.log_text());
    assert_eq!(health["reclaim"]["failed"], 1);
    assert_eq!(health["status"], "healthy");
    assert_eq!(metric(&node, "hearth_leaked{kind=\"netns\"}"), 1.0);
    for (state, n) in [("found", 40.0), ("released", 39.0), ("failed", 1.0), ("pending", 0.0)] {
        let line = format!("hearth_reclaim_leftovers{{state=\"{state}\"}}");
        assert_eq!(metric(&node, &line), n, "{state}");
    }
    let looked =
        |whose: &str| metric(&node, &format!("hearth_census_things{{kind=\"netns\",whose=\"{whose}\"}}"));
    // Tests beside this one have namespaces of their own.
    assert!((looked("named"), looked("nameless")) == (0.0, 40.0) && looked("foreign") >= 1.0);
    assert_eq!(metric(&node, "hearth_slots{state=\"foreign\"}"), 2.0, "the held one and the plain file");
    let named = format!("process {} (sleep)", stranger.id());
    assert!(node.log_text().contains(&named), "the holder is not named: {}", node.log_text());
    assert!(stranger.try_wait().unwrap().is_none(), "a foreign process was ended");
    assert_eq!(before, untouched(&node));

    // The stranger goes, and the slot with it at the next try.
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    until(&node, "the last one", |health| health["reclaim"]["done"] == 40);
    assert_eq!(metric(&node, "hearth_leaked{kind=\"netns\"}"), 0.0);
    assert!(!present(&node).contains(&9));
    assert_eq!(fs::read(&plain).unwrap(), b"an operator's notes");
    fs::remove_file(plain).unwrap();
    node.host("ip", &["netns", "del", &other]);
    node.end_clean();
}

#[test]
fn a_hundred_kills_in_the_middle_lose_nothing_and_repeat_nothing() {
    if cannot("a_hundred_kills_in_the_middle_lose_nothing_and_repeat_nothing", true) {
        return;
    }
    const KILLS: u32 = 100;
    const KEPT_BUSY: usize = 80;
    // Blocking: a few go at a time from the first moment on, so that most kills come in the middle.
    let mut node = Node::start(&Wish { env: &[("HEARTH_RECLAIM_MODE", "blocking")], ..PROCESS });
    node.ok(&["create", "busybox", "--name", "survivor", "--vmm", "process", "--disk", "16"]);
    let before = node.inspect("survivor");
    let survivor = u32::try_from(before["slot"].as_u64().unwrap()).unwrap();
    node.kill_daemon();
    // Prepared by the daemon that was killed.
    let mut leaked = present(&node);
    leaked.remove(&survivor);
    let plain = layout(&node).netns_path(slot(900));
    fs::write(&plain, "not ours").unwrap();
    let (mut next, mut cut, mut gone) = (1000, 0, 0);
    for kill in 0..KILLS {
        if leaked.len() < KEPT_BUSY {
            let numbers = (1000..2000).cycle().skip(next).filter(|n| !leaked.contains(n));
            let new: Vec<u32> = numbers.take(64).collect();
            leak(&node, new.iter().copied());
            leaked.extend(new);
            next += 64;
        }
        node.spawn_daemon();
        // From before the port is bound to well into the release.
        std::thread::sleep(Duration::from_millis(u64::from(20 + kill * 37 % 400)));
        node.kill_daemon();
        let mut left = present(&node);
        assert!(left.remove(&survivor), "kill {kill}: the slot of a running sandbox is gone");
        left.remove(&900);
        // A killed daemon may have prepared slots of its own, under low numbers.
        let back: Vec<u32> = left.iter().filter(|n| **n >= 1000 && !leaked.contains(n)).copied().collect();
        assert!(back.is_empty(), "kill {kill}: what was gone is back: {back:?}");
        let went = leaked.difference(&left).count();
        gone += went;
        cut += u32::from(went > 0 && left.len() > 1);
        leaked = left;
    }
    assert!(cut > KILLS / 10, "only {cut} of {KILLS} kills came in the middle of the release");
    eprintln!("{cut} of {KILLS} kills came in the middle; {gone} slots went meanwhile");
    node.start_daemon();
    let health = until(&node, "reclaimed", reclaim_is_done);
    assert_eq!(health["reclaim"]["failed"], 0, "{}", node.log_text());
    assert!(present(&node).iter().all(|n| *n < 1000), "{:?}", present(&node));
    let after = node.inspect("survivor");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    assert_eq!(node.ok(&["exec", "survivor", "--", "echo", "alive"]), "alive\n");
    assert_eq!(fs::read(&plain).unwrap(), b"not ours");
    fs::remove_file(plain).unwrap();
    node.end_clean();
}

#[test]
fn a_place_that_cannot_be_listed_keeps_the_node_starting() {
    if cannot("a_place_that_cannot_be_listed_keeps_the_node_starting", false) {
        return;
    }
    let mut node = Node::new(&Wish { own_state: true, ..PROCESS });
    leak(&node, 1..=3);
    // Where the sandboxes' run directories are there is a file.
    let run = node.dir.path().join("r").join(&node.instance);
    fs::create_dir_all(&run).unwrap();
    fs::write(run.join("sandboxes"), "").unwrap();
    node.spawn_daemon();
    let health = until(&node, "told", |h| h["reason"].as_str().is_some_and(|r| r.contains("census")));
    assert_eq!(health["status"], "starting");
    assert_eq!(get(&node, "/health").code, 503);
    assert_eq!(get(&node, "/health/live").code, 200);
    assert_eq!(present(&node), [1, 2, 3].into(), "something was released without a whole census");
    fs::remove_file(run.join("sandboxes")).unwrap();
    until(&node, "healthy and reclaimed", |h| h["status"] == "healthy" && reclaim_is_done(h));
    assert!(present(&node).iter().all(|n| *n > 3 || *n == 1), "{:?}", present(&node));
    node.end_clean();
}
