//! Plans and what is done with them: all that is planned goes, nothing else is touched, and a plan that is stale hits
//! nothing.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Instant;

use serde_json::Value;

use crate::dirty::{leak, present};
use crate::layout::{Dirty, in_state, tools_missing};
use crate::node::{Node, Wish, cannot, text};

const NOBODY: &str = "nobodynobodynobo";

/// How many slots a host has that is cleaned; more by hand.
fn slots() -> u32 {
    std::env::var("HEARTH_TEST_E2B_SLOTS").map_or(40, |n| n.parse().unwrap())
}

fn names(plan: &Value) -> BTreeSet<String> {
    let actions = plan["actions"].as_array().unwrap().iter();
    actions.map(|a| format!("{} {}", a["kind"].as_str().unwrap(), a["name"].as_str().unwrap())).collect()
}

fn outcomes<'a>(answer: &'a Value, word: &str) -> Vec<&'a Value> {
    answer["outcomes"].as_array().unwrap().iter().filter(|o| o["outcome"] == word).collect()
}

fn sleep_in(netns: &str) -> Child {
    Command::new("nsenter").args([&format!("--net=/run/netns/{netns}"), "sleep", "600"]).spawn().unwrap()
}

#[test]
fn what_is_planned_goes_and_no_look_alike_is_touched() {
    if tools_missing("what_is_planned_goes_and_no_look_alike_is_touched") {
        return;
    }
    let (slots, processes) = (slots(), 5);
    let dirty = Dirty::make(slots, processes);
    // Look-alikes of each kind: a slot with a stranger, a socket that is held, a file that is no socket, a link and
    // rules that only mention a slot.
    let kept = format!("ns-{}", dirty.slot(slots - 1));
    let mut stranger = sleep_in(&kept);
    let held = dirty.file("fc", "held-rnd.sock");
    let listener = UnixListener::bind(&held).unwrap();
    let client = UnixStream::connect(&held).unwrap();
    let plain = dirty.file("uffd", "a-b.sock");
    fs::write(&plain, "a file").unwrap();
    let alone = format!("veth-{}", dirty.slot(slots + 20));
    dirty.host("ip", &["link", "add", &alone, "type", "veth", "peer", "name", "other"]);
    for n in 0..10 {
        let veth = format!("veth-{}", dirty.slot(n));
        dirty.host("iptables", &["-A", "FORWARD", "-i", &veth, "-p", "udp", "-j", "DROP"]);
    }
    let all = dirty.rules();
    let of_slot = |rule: &String, n: u32| {
        rule.contains(&format!("veth-{} ", dirty.slot(n))) || rule.contains(&dirty.address(n))
    };
    let foreign: Vec<&String> =
        all.iter().filter(|r| r.contains("udp") || (0..slots - 1).all(|n| !of_slot(r, n))).collect();

    let file = dirty.dir.path().join("plan.json");
    let begun = Instant::now();
    let plan = dirty.json(&["reclaim", "plan", "--json", "--out", file.to_str().unwrap()]);
    let planned_in = begun.elapsed();
    let planned = names(&plan);
    let of = |kind: &str| planned.iter().filter(|n| n.starts_with(&format!("{kind} "))).count();
    let expected = [processes, 2 * processes, processes, processes, 6 * (slots - 1), slots - 1];
    let found = ["process", "socket", "fifo", "cgroup", "rule", "netns"].map(of);
    assert_eq!(found.map(|n| u32::try_from(n).unwrap()), expected, "{planned:#?}");
    // Planning changes nothing.
    assert_eq!(all, dirty.rules());

    let begun = Instant::now();
    let out = dirty.hearth(&["reclaim", "apply", file.to_str().unwrap(), "--json", "--grace", "5s"]);
    let applied_in = begun.elapsed();
    let answer: Value =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)));
    assert!(out.status.success(), "{answer:#}\n{}", text(&out.stderr));
    let removed: BTreeSet<String> = outcomes(&answer, "removed")
        .iter()
        .map(|o| format!("{} {}", o["kind"].as_str().unwrap(), o["name"].as_str().unwrap()))
        .collect();
    assert_eq!(removed, planned, "what was planned is not what was removed");
    hearth_testkit::report(&format!(
        "reclaim of {slots} slots of another orchestrator: plan {planned_in:.1?}, apply {applied_in:.1?}"
    ));

    let after = dirty.json(&["doctor", "--json"]);
    assert!(in_state(&after, "leaked").is_empty(), "{after:#}");
    assert!(stranger.try_wait().unwrap().is_none(), "a foreign process was ended");
    assert!(fs::exists(format!("/run/netns/{kept}")).unwrap());
    assert!(UnixStream::connect(&held).is_ok() && fs::read_to_string(&plain).unwrap() == "a file");
    assert!(dirty.host("ip", &["-o", "link"]).contains(&alone));
    assert_eq!(dirty.rules().iter().collect::<Vec<_>>(), foreign, "foreign rules changed");
    drop((listener, client));
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    dirty.host("ip", &["link", "del", &alone]);
    dirty.clean();
}

#[test]
fn a_plan_that_is_stale_hits_nothing() {
    if tools_missing("a_plan_that_is_stale_hits_nothing") {
        return;
    }
    let dirty = Dirty::make(4, 2);
    let file = dirty.dir.path().join("plan.json");
    let path = file.to_str().unwrap();
    let plan = dirty.json(&["reclaim", "plan", "--json", "--out", path]);
    let save = |plan: &Value| fs::write(&file, plan.to_string()).unwrap();
    let apply = || {
        let out = dirty.hearth(&["reclaim", "apply", path, "--json"]);
        assert_eq!(out.status.code(), Some(1), "{}", text(&out.stdout));
        (serde_json::from_slice::<Value>(&out.stdout).unwrap_or_default(), text(&out.stderr))
    };
    // Older than a boot: nothing at all.
    let mut old = plan.clone();
    old["here"]["boot_id"] = "00000000-0000-0000-0000-000000000000".into();
    save(&old);
    let (_, said) = apply();
    assert!(said.contains("older than the last boot"), "{said}");
    assert_eq!(names(&dirty.json(&["reclaim", "plan", "--json"])), names(&plan));

    // A namespace under the same name, and a pid of another process: refused one by one, the rest goes.
    let reused = format!("ns-{}", dirty.slot(3));
    dirty.host("ip", &["netns", "del", &reused]);
    dirty.host("ip", &["netns", "add", &reused]);
    // Another socket of the same name, and on most file systems of the same inode number.
    let socket = plan["actions"].as_array().unwrap().iter().find(|a| a["kind"] == "socket").unwrap();
    let socket = PathBuf::from(socket["name"].as_str().unwrap());
    fs::remove_file(&socket).unwrap();
    drop(UnixListener::bind(&socket).unwrap());
    let mut stale = plan.clone();
    let actions = stale["actions"].as_array_mut().unwrap();
    let process = actions.iter_mut().find(|a| a["kind"] == "process").unwrap();
    let start = process["identity"]["start_time"].as_u64().unwrap();
    process["identity"]["start_time"] = (start - 1).into();
    let pid = process["name"].as_str().unwrap().to_owned();
    save(&stale);
    let (answer, _) = apply();
    let refused: BTreeSet<&str> =
        outcomes(&answer, "refused").iter().map(|o| o["name"].as_str().unwrap()).collect();
    assert!(refused.contains(pid.as_str()) && refused.contains(reused.as_str()), "{answer:#}");
    assert!(refused.contains(socket.to_str().unwrap()) && socket.exists(), "{answer:#}");
    for outcome in outcomes(&answer, "refused") {
        let why = outcome["why"].as_str().unwrap();
        assert!(why.contains("another thing has its name") || why.contains("is inside"), "{why}");
    }
    assert!(fs::exists(format!("/proc/{pid}")).unwrap(), "a process of the same pid was ended");
    assert!(fs::exists(format!("/run/netns/{reused}")).unwrap());
    assert!(!outcomes(&answer, "removed").is_empty(), "{answer:#}");
    // Asked without a terminal nobody answers, and nothing more goes.
    let asked = dirty.hearth(&["reclaim", "apply", "--interactive", "--json"]);
    let answer: Value = serde_json::from_slice(&asked.stdout).unwrap();
    assert_eq!(answer["removed"], 0, "{answer:#}");
    assert!(answer["skipped"].as_u64().unwrap() > 0, "{answer:#}");
    let all = dirty.hearth(&["reclaim", "apply", "--yes", "--parallel", "4", "--json"]);
    assert!(all.status.success(), "{}", text(&all.stdout));
    assert!(names(&dirty.json(&["reclaim", "plan", "--json"])).is_empty());
    dirty.clean();
}

const WISH: Wish = Wish {
    test: "process_vmm = true\n[reconcile]\ninterval_seconds = 3600\nmin_age_seconds = 0",
    slot_pool: 1,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// A cgroup of no sandbox with a process in it, and a directory and slots of nobody.
fn plant(node: &Node) -> (Child, PathBuf) {
    leak(node, 1000..=1003);
    let cgroups = hearth_host::cgroup::Cgroups::locate(&node.instance.parse().unwrap()).unwrap();
    cgroups.ensure(NOBODY).unwrap();
    let child = Command::new("sleep").arg("600").spawn().unwrap();
    fs::write(cgroups.root().join(NOBODY).join("cgroup.procs"), child.id().to_string()).unwrap();
    let run = node.dir.path().join("r").join(&node.instance).join("sandboxes").join(NOBODY);
    fs::create_dir(&run).unwrap();
    fs::write(run.join("console.log"), "x").unwrap();
    (child, run)
}

fn json(node: &Node, args: &[&str]) -> Value {
    let out = node.cli(args);
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
}

#[test]
fn of_an_instance_only_what_no_record_names_goes_with_and_without_a_daemon() {
    if cannot("of_an_instance_only_what_no_record_names_goes_with_and_without_a_daemon", true) {
        return;
    }
    let mut node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    let before = node.inspect("lives");
    // With the daemon, which is asked.
    let (mut process, run) = plant(&node);
    let answer = json(&node, &["reclaim", "apply", "--yes", "--json"]);
    assert_eq!(
        (&answer["failed"], &answer["refused"]),
        (&0.into(), &0.into()),
        "{answer:#}\n{}",
        node.log_text()
    );
    assert!(answer["removed"].as_u64().unwrap() >= 6, "{answer:#}");
    process.wait().unwrap();
    assert!(!run.exists() && present(&node).iter().all(|n| *n < 1000));
    // Without one, under its lock.
    node.kill_daemon();
    let (mut process, run) = plant(&node);
    let plan = json(&node, &["reclaim", "plan", "--json"]);
    let planned = names(&plan);
    let has = |what: String| assert!(planned.contains(&what), "{what} is not in {planned:#?}");
    (1000..=1003).for_each(|n| has(format!("netns hearth-{}-{n}", node.instance)));
    has(format!("directory {}", run.display()));
    has(format!("process {}", process.id()));
    let answer = json(&node, &["reclaim", "apply", "--yes", "--json", "--grace", "5s"]);
    assert_eq!((&answer["failed"], &answer["refused"]), (&0.into(), &0.into()), "{answer:#}");
    assert_eq!(answer["removed"].as_u64().unwrap(), planned.len() as u64, "{answer:#}");
    process.wait().unwrap();
    let slot = u32::try_from(before["slot"].as_u64().unwrap()).unwrap();
    assert_eq!(present(&node), [slot].into());
    assert!(!run.exists());
    node.start_daemon();
    let after = node.inspect("lives");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    assert_eq!(node.ok(&["exec", "lives", "--", "echo", "alive"]), "alive\n");
    node.end_clean();
}
