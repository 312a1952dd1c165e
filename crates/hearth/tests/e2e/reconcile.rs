//! Leaks made under a living daemon: what goes and when, what stays, and what a pass costs.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dirty::{layout, leak, metric, present, reclaim_is_done, slot, until};
use crate::node::{Node, Wish, cannot, text};

const NOBODY: &str = "nobodynobodynobo";

/// Passes come on demand alone.
const ON_DEMAND: Wish = Wish {
    test: "process_vmm = true\n[reconcile]\ninterval_seconds = 3600\nmin_age_seconds = 0",
    slot_pool: 1,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

fn cgroups(node: &Node) -> hearth_host::cgroup::Cgroups {
    hearth_host::cgroup::Cgroups::locate(&node.instance.parse().unwrap()).unwrap()
}

fn run_dir(node: &Node, name: &str) -> PathBuf {
    node.dir.path().join("r").join(&node.instance).join("sandboxes").join(name)
}

/// A cgroup of no sandbox with a process in it.
fn orphan(node: &Node) -> Child {
    let cgroups = cgroups(node);
    cgroups.ensure(NOBODY).unwrap();
    let child = Command::new("sleep").arg("600").spawn().unwrap();
    fs::write(cgroups.root().join(NOBODY).join("cgroup.procs"), child.id().to_string()).unwrap();
    child
}

/// One pass, and whether the command took it for a good one.
fn pass(node: &Node, options: &[&str]) -> (bool, Value) {
    let out = node.cli(&[&["node", "reconcile", "--json"], options].concat());
    let answer = serde_json::from_slice(&out.stdout);
    (
        out.status.success(),
        answer.unwrap_or_else(|e| panic!("{e}: {}\n{}", text(&out.stderr), node.log_text())),
    )
}

/// The findings as "what: outcome".
fn outcomes(pass: &Value) -> BTreeSet<String> {
    let findings = pass["findings"].as_array().unwrap().iter();
    findings.map(|f| format!("{}: {}", f["what"].as_str().unwrap(), f["outcome"].as_str().unwrap())).collect()
}

fn all_are(pass: &Value, outcome: &str) -> bool {
    pass["findings"].as_array().unwrap().iter().all(|f| f["outcome"] == outcome)
}

fn wait(what: &str, node: &Node, good: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !good() {
        assert!(Instant::now() < end, "never {what}: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn passes(node: &Node) -> f64 {
    metric(node, "hearth_reconcile_passes_total{result=\"ok\"}")
}

#[test]
fn leaks_under_a_living_daemon_go_and_foreign_things_stay() {
    if cannot("leaks_under_a_living_daemon_go_and_foreign_things_stay", true) {
        return;
    }
    let node = Node::start(&ON_DEMAND);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    wait("a prepared slot", &node, || metric(&node, "hearth_slots{state=\"ready\"}") == 1.0);
    let (well, clean) = pass(&node, &[]);
    assert!(well && outcomes(&clean).is_empty(), "{clean}");
    let before = node.inventory();

    // Not ours, or not provably.
    let plain = layout(&node).netns_path(slot(2000));
    fs::write(&plain, "an operator's notes").unwrap();
    node.host("ip", &["link", "add", "hxv2001", "type", "veth", "peer", "name", "other"]);
    let notes = run_dir(&node, "notes");
    fs::create_dir(&notes).unwrap();
    let elsewhere = cgroups(&node).root().join("Not-An-Id");
    fs::create_dir(&elsewhere).unwrap();
    let with_foreign = node.inventory();

    leak(&node, 1000..=1001);
    let mut process = orphan(&node);
    fs::create_dir(run_dir(&node, NOBODY)).unwrap();
    fs::write(run_dir(&node, NOBODY).join("console.log"), "x").unwrap();
    let (well, dry) = pass(&node, &["--dry-run"]);
    assert!(!well && all_are(&dry, "waiting"), "{dry}");
    let (well, first) = pass(&node, &[]);
    assert!(!well && all_are(&first, "waiting"), "{first}");
    assert_eq!(outcomes(&first).len(), 4, "{first}");
    assert!(process.try_wait().unwrap().is_none());
    assert_eq!(metric(&node, "hearth_leaked{kind=\"netns\"}"), 2.0);
    let (well, second) = pass(&node, &[]);
    assert!(well && all_are(&second, "released"), "{second}\n{}", node.log_text());
    assert_eq!(outcomes(&second).len(), 4, "{second}");
    assert_eq!(process.wait().unwrap().signal(), Some(9));
    assert_eq!(node.inventory(), with_foreign);
    assert_eq!(metric(&node, "hearth_leaked{kind=\"netns\"}"), 0.0);
    for (kind, n) in [("netns", 2.0), ("cgroup", 1.0), ("directory", 1.0)] {
        assert_eq!(metric(&node, &format!("hearth_reclaimed_total{{kind=\"{kind}\"}}")), n, "{kind}");
    }

    // Nothing is said when there is nothing to say.
    let said = node.log_text();
    for _ in 0..3 {
        let (well, quiet) = pass(&node, &[]);
        assert!(well && outcomes(&quiet).is_empty(), "{quiet}");
    }
    assert_eq!(node.log_text(), said);
    assert_eq!(node.ok(&["exec", "lives", "--", "echo", "alive"]), "alive\n");
    fs::remove_file(plain).unwrap();
    node.host("ip", &["link", "del", "hxv2001"]);
    fs::remove_dir(notes).unwrap();
    fs::remove_dir(elsewhere).unwrap();
    assert_eq!(node.inventory(), before);
    node.end_clean();
}

#[test]
fn what_vanishes_is_replaced_and_a_running_sandbox_is_left() {
    if cannot("what_vanishes_is_replaced_and_a_running_sandbox_is_left", true) {
        return;
    }
    let node = Node::start(&ON_DEMAND);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    let own = u32::try_from(node.inspect("lives")["slot"].as_u64().unwrap()).unwrap();
    let ready = || metric(&node, "hearth_slots{state=\"ready\"}") == 1.0;
    wait("a prepared slot", &node, ready);
    let others: Vec<u32> = present(&node).into_iter().filter(|n| *n != own).collect();
    let [prepared] = others[..] else { panic!("{others:?}") };

    node.host("ip", &["link", "del", &layout(&node).veth(slot(prepared))]);
    node.host("ip", &["netns", "del", &layout(&node).netns(slot(own))]);
    let table = layout(&node).host_table();
    node.host("nft", &["delete", "table", "inet", &table]);
    assert!(all_are(&pass(&node, &[]).1, "waiting"));
    assert!(node.host("nft", &["list", "tables"]).contains(&table), "the firewall is not made again");
    assert!(node.log_text().contains("the host firewall was not whole"), "{}", node.log_text());
    let (_, second) = pass(&node, &[]);
    let expected = [
        format!("prepared slot {prepared}: released"),
        format!("slot {own} of running sandbox {}: reported", node.inspect("lives")["id"].as_str().unwrap()),
    ];
    assert_eq!(outcomes(&second), expected.into(), "{}", node.log_text());
    wait("another prepared slot", &node, ready);
    assert_eq!(node.ok(&["exec", "lives", "--", "echo", "alive"]), "alive\n");
    node.ok(&["create", "busybox", "--name", "next", "--vmm", "process", "--disk", "16"]);
    assert_eq!(node.ok(&["exec", "next", "--", "echo", "alive"]), "alive\n");
    node.end_clean();
}

#[test]
fn report_mode_changes_nothing_and_a_pass_over_500_slots_is_cheap() {
    const NAME: &str = "report_mode_changes_nothing_and_a_pass_over_500_slots_is_cheap";
    if cannot(NAME, false) {
        return;
    }
    const REPORT: &str = "process_vmm = true\n[reconcile]\ninterval_seconds = 1\nmin_age_seconds = 0\n\
                          max_share_percent = 100\naction = \"report\"";
    let mut node = Node::start(&Wish { test: REPORT, own_state: true, slot_pool: 0, ..ON_DEMAND });
    wait("a pass", &node, || passes(&node) > 0.0);
    let cost = |node: &Node| pass(node, &[]).1["took_ms"].as_u64().unwrap();
    let empty = cost(&node);
    leak(&node, 1..=500);
    let mut process = orphan(&node);
    fs::create_dir_all(run_dir(&node, NOBODY)).unwrap();
    let before = node.inventory();
    wait("it is seen", &node, || metric(&node, "hearth_leaked{kind=\"netns\"}") == 500.0);
    let seen = passes(&node);
    wait("more passes", &node, || passes(&node) > seen + 2.0);
    let (well, reported) = pass(&node, &[]);
    assert!(!well && all_are(&reported, "reported"), "{reported}");
    assert_eq!(outcomes(&reported).len(), 502);
    assert_eq!(node.inventory(), before);
    assert!(process.try_wait().unwrap().is_none());
    let full = cost(&node);
    hearth_testkit::report(&format!("a reconcile pass takes {empty} ms with 0 slots, {full} ms with 500"));
    assert!(full < 5_000, "a pass over 500 slots takes {full} ms");

    // The next start releases what this daemon only told.
    node.kill_daemon();
    node.start_daemon();
    until(&node, "reclaimed", reclaim_is_done);
    process.wait().unwrap();
    assert_eq!(present(&node), BTreeSet::new());
    node.end_clean();
}

#[test]
fn a_storm_of_creates_during_fast_passes_loses_no_slot_and_shares_none() {
    if cannot("a_storm_of_creates_during_fast_passes_loses_no_slot_and_shares_none", true) {
        return;
    }
    const FAST: &str = "process_vmm = true\n[reconcile]\ninterval_seconds = 1\nmin_age_seconds = 0";
    const ROUNDS: usize = 8;
    const AT_ONCE: usize = 6;
    let node = Node::start(&Wish { test: FAST, slot_pool: 2, ..ON_DEMAND });
    let begun = passes(&node);
    let filled = || metric(&node, "hearth_slots{state=\"ready\"}") == 2.0;
    let (mut round, mut highest) = (0, 0);
    while round < ROUNDS || passes(&node) < begun + 4.0 {
        round += 1;
        wait("prepared slots", &node, filled);
        highest = present(&node).last().copied().unwrap_or(0).max(highest);
        // A number that these creations reach for, so that a claim and a creation may meet.
        leak(&node, highest + 3..=highest + 3);
        std::thread::scope(|scope| {
            for n in 0..AT_ONCE {
                let (node, name) = (&node, format!("s{round}x{n}"));
                scope.spawn(move || {
                    node.ok(&["create", "busybox", "--name", &name, "--vmm", "process", "--disk", "16"]);
                    assert_eq!(node.ok(&["exec", &name, "--", "echo", "hi"]), "hi\n");
                });
            }
        });
        let list = node.list();
        let slots: BTreeSet<u64> =
            list.as_array().unwrap().iter().filter_map(|s| s["slot"].as_u64()).collect();
        assert_eq!(slots.len(), AT_ONCE, "two sandboxes with one slot: {list}");
        let there = present(&node);
        highest = there.last().copied().unwrap_or(0).max(highest);
        assert!(slots.iter().all(|n| there.contains(&u32::try_from(*n).unwrap())), "{slots:?} of {there:?}");
        node.ok(&["rm", "--all"]);
    }
    wait("only prepared slots are left", &node, || filled() && present(&node).len() == 2);
    for result in ["failed", "capped", "incomplete"] {
        let line = format!("hearth_reconcile_passes_total{{result=\"{result}\"}}");
        assert_eq!(metric(&node, &line), 0.0, "{result}: {}", node.log_text());
    }
    node.end_clean();
}
