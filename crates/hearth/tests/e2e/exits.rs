//! How sandboxes end, and that each end is told from the others, after everything else of them is gone.

use std::fs;
use std::time::{Duration, Instant};

use crate::node::{Node, Wish, cannot, text};

/// An emulated guest on a loaded host.
const SOON: Duration = Duration::from_secs(90);

fn node() -> Node {
    Node::start(&Wish { test: "process_vmm = true", keep_exits: 600, ..Wish::default() })
}

/// What is kept of a sandbox once it is gone.
fn ended(node: &Node, name: &str) -> serde_json::Value {
    let end = Instant::now() + SOON;
    loop {
        let seen = node.inspect(name);
        if seen["state"] == "gone" {
            return seen;
        }
        assert!(Instant::now() < end, "{name} does not end: {seen}\n{}", node.log_text());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn reason(node: &Node, name: &str) -> (String, String) {
    let exit = &ended(node, name)["exit"];
    (exit["reason"].as_str().unwrap().to_owned(), exit["detail"].as_str().unwrap().to_owned())
}

/// Its only child.
fn vmm_of(node: &Node, name: &str) -> u32 {
    let shim = node.inspect(name)["shim_pid"].as_u64().unwrap();
    let text = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn kill(pid: u32, signal: &str) {
    let status = std::process::Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Runs a command in the guest whose end nobody waits for: the guest goes with it.
fn last_command(node: &Node, name: &str, command: &str) {
    drop(node.cli(&["exec", name, "--", "sh", "-c", command]));
}

#[test]
fn each_end_of_a_real_guest_is_told_from_the_others() {
    if cannot("each_end_of_a_real_guest_is_told_from_the_others", true) {
        return;
    }
    let node = node();
    for name in ["killed", "panic", "poweroff", "oom", "stopped"] {
        node.ok(&["create", "busybox", "--name", name, "--memory", "192"]);
    }
    node.ok(&["create", "busybox", "--name", "end", "--memory", "192", "--timeout", "45s"]);
    // Its use is known while it runs: the guest has read its root disk.
    let stats: serde_json::Value = serde_json::from_str(&node.ok(&["stats", "stopped", "--json"])).unwrap();
    assert!(stats[0]["usage"]["memory_bytes"].as_u64() > Some(10 << 20), "{stats}");

    kill(vmm_of(&node, "killed"), "-9");
    last_command(&node, "panic", "echo c > /proc/sysrq-trigger");
    last_command(&node, "poweroff", "poweroff -f");
    // The kernel's own limit on what it kills is lifted: all memory is taken by what no kill gives back.
    last_command(
        &node,
        "oom",
        "echo 2 > /proc/sys/vm/panic_on_oom; mkdir -p /tmp/m; mount -t tmpfs -o size=1g none /tmp/m; \
         dd if=/dev/zero of=/tmp/m/x bs=1M",
    );
    node.ok(&["rm", "stopped"]);

    let (killed, _) = reason(&node, "killed");
    assert_eq!(killed, "killed");
    assert_eq!(node.inspect("killed")["exit"]["signal"], 9);
    let (panic, why) = reason(&node, "panic");
    assert_eq!(panic, "guest-panic", "{why}");
    assert!(why.contains("Kernel panic - not syncing"), "{why}");
    let (oom, why) = reason(&node, "oom");
    assert_eq!(oom, "guest-oom", "{why}");
    assert_eq!(reason(&node, "poweroff").0, "guest-shutdown");
    assert_eq!(reason(&node, "stopped").0, "stopped");
    assert_eq!(reason(&node, "end").0, "end-time");

    let stopped = node.inspect("stopped");
    let exit = &stopped["exit"];
    assert!(exit["wall_ms"].as_u64() > Some(0) && exit["cpu_us"].as_u64() > Some(100_000), "{exit}");
    let disk = &exit["usage"]["disk"];
    assert!(disk["read_bytes"].as_u64() > Some(100_000) && disk["reads"].as_u64() > Some(10), "{exit}");
    let all = node.ok(&["ls", "--all"]);
    for line in ["killed", "guest-panic", "guest-oom", "guest-shutdown", "stopped", "end-time"] {
        assert!(all.contains(line), "{all}");
    }
    assert_eq!(node.ok(&["ls"]).lines().count(), 1, "none is alive");
    assert_eq!(node.cli(&["rm", "stopped"]).status.code(), Some(1), "what is gone cannot be deleted");
    assert!(!node.log_text().contains(" WARN "), "{}", node.log_text());
    node.end_clean();
}

#[test]
fn a_process_killed_for_memory_inside_a_guest_that_lives_on_is_counted() {
    if cannot("a_process_killed_for_memory_inside_a_guest_that_lives_on_is_counted", true) {
        return;
    }
    let node = node();
    node.ok(&["create", "busybox", "--name", "g", "--memory", "192"]);
    // Grows until the guest's kernel ends it.
    let out = node.cli(&["exec", "g", "--", "sh", "-c", "exec tail -f /dev/zero"]);
    assert_eq!(out.status.code(), Some(137), "{}", text(&out.stderr));
    let alive = node.cli(&["exec", "g", "--", "true"]);
    assert!(alive.status.success(), "the guest lives: {}", text(&alive.stderr));
    node.ok(&["rm", "g"]);
    let exit = ended(&node, "g")["exit"].clone();
    assert_eq!(exit["reason"], "stopped");
    assert!(exit["guest_oom_kills"].as_u64() > Some(0), "{exit}");
    node.end_clean();
}

#[test]
fn ends_are_kept_over_a_restart_and_forgotten_in_time() {
    if cannot("ends_are_kept_over_a_restart_and_forgotten_in_time", true) {
        return;
    }
    const KEEP: u32 = 8;
    let mut node = Node::start(&Wish { test: "process_vmm = true", keep_exits: KEEP, ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    kill(vmm_of(&node, "a"), "-9");
    let before = ended(&node, "a");
    let (id, begun) = (before["id"].as_str().unwrap().to_owned(), Instant::now());
    node.kill_daemon();
    node.start_daemon();
    if begun.elapsed() < Duration::from_secs(4) {
        assert_eq!(node.inspect(&id)["exit"], before["exit"]);
    }
    let end = Instant::now() + SOON;
    while node.cli(&["inspect", &id]).status.success() {
        assert!(Instant::now() < end, "it is kept for ever");
        std::thread::sleep(Duration::from_millis(100));
    }
    // The daemon looks every ten seconds, and the file goes with what it is about.
    let file = node.state.join(&node.instance).join("exits").join(format!("{id}.json"));
    while file.exists() {
        assert!(Instant::now() < end, "its file is kept for ever");
        std::thread::sleep(Duration::from_millis(100));
    }
    node.end_clean();
}

#[test]
fn what_the_daemon_ends_by_itself_is_told_from_a_users_wish() {
    if cannot("what_the_daemon_ends_by_itself_is_told_from_a_users_wish", true) {
        return;
    }
    let mut node = node();
    let config = fs::read_to_string(node.config()).unwrap();
    fs::write(node.config(), config.replacen("[exits]", "[shutdown]\nmode = \"kill\"\n[exits]", 1)).unwrap();
    node.stop_daemon();
    node.start_daemon();
    node.ok(&["create", "busybox", "--name", "a", "--vmm", "process", "--disk", "16"]);
    node.stop_daemon();
    node.start_daemon();
    let (reason, why) = reason(&node, "a");
    assert_eq!(reason, "policy");
    assert!(why.contains("shuts down"), "{why}");
    node.end_clean();
}

#[test]
fn two_hundred_killed_at_once_say_nothing_and_each_end_is_right() {
    const MANY: usize = 200;
    if cannot("two_hundred_killed_at_once_say_nothing_and_each_end_is_right", true) {
        return;
    }
    let node = Node::start(&Wish {
        test: "process_vmm = true",
        keep_exits: 3600,
        slot_pool: 8,
        prefix_len: 22,
        ..Wish::default()
    });
    let names: Vec<String> = (0..MANY).map(|n| format!("s{n}")).collect();
    for some in names.chunks(8) {
        let made: Vec<_> = some
            .iter()
            .map(|name| {
                let args = ["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"];
                node.command(&args).spawn().unwrap()
            })
            .collect();
        for child in made {
            assert!(child.wait_with_output().unwrap().status.success(), "{}", node.log_text());
        }
    }
    let run = node.dir.path().join("r").join(&node.instance).join("sandboxes");
    // A copy of each shim's log: the directory goes with the sandbox.
    let logs: Vec<_> = fs::read_dir(&run)
        .unwrap()
        .map(|d| fs::File::open(d.unwrap().path().join("shim.log")).unwrap())
        .collect();
    assert_eq!(logs.len(), MANY);
    let pids: Vec<String> = names.iter().map(|name| vmm_of(&node, name).to_string()).collect();
    let killed = std::process::Command::new("kill").arg("-9").args(&pids).status().unwrap();
    assert!(killed.success());
    let end = Instant::now() + SOON;
    while !node.list().as_array().unwrap().is_empty() {
        assert!(Instant::now() < end, "not all are gone: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(100));
    }
    let all: serde_json::Value = serde_json::from_str(&node.ok(&["ls", "--all", "--json"])).unwrap();
    let all = all.as_array().unwrap();
    assert_eq!(all.len(), MANY);
    for s in all {
        let exit = &s["exit"];
        assert_eq!((&exit["reason"], &exit["signal"]), (&"killed".into(), &9.into()), "{s}");
        assert!(exit["usage"]["memory_bytes"].as_u64() > Some(0), "no last sample: {s}");
        assert!(exit["wall_ms"].as_u64() > Some(0) && exit["cpu_us"].is_u64(), "{s}");
    }
    let loud = |text: &str| -> Vec<String> {
        text.lines().filter(|l| l.contains(" WARN ") || l.contains(" ERROR ")).map(str::to_owned).collect()
    };
    assert_eq!(loud(&node.log_text()), Vec::<String>::new());
    for mut log in logs {
        let mut said = String::new();
        std::io::Read::read_to_string(&mut log, &mut said).unwrap();
        assert_eq!(loud(&said), Vec::<String>::new());
        assert!(said.contains("VMM ended"), "{said}");
    }
    node.end_clean();
}
