//! The test plays a supervisor that speaks systemd's notify protocol.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use crate::node::{Node, Wish, cannot};
use crate::probe;
use crate::running::serve;

/// What the daemon is told: it must be heard of within this time.
const WATCHDOG: Duration = Duration::from_secs(4);

/// One assignment of a message.
fn value<'a>(message: &'a str, name: &str) -> Option<&'a str> {
    message.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
}

fn receive(socket: &UnixDatagram) -> String {
    try_receive(socket).expect("the daemon says nothing")
}

fn try_receive(socket: &UnixDatagram) -> Option<String> {
    let mut buffer = [0; 4096];
    let n = socket.recv(&mut buffer).ok()?;
    Some(String::from_utf8(buffer[..n].to_vec()).unwrap())
}

/// Pids of the sandbox `g`.
fn shim_and_vmm(node: &Node) -> [String; 2] {
    let shim = node.inspect("g")["shim_pid"].to_string();
    let vmm = fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    let vmm = vmm.split_whitespace().next().unwrap().to_owned();
    [shim, vmm]
}

#[test]
fn a_supervisor_hears_ready_alive_and_the_end() {
    if cannot("a_supervisor_hears_ready_alive_and_the_end", true) {
        return;
    }
    let node = Node::new(&Wish { test: "process_vmm = true", ..Wish::default() });
    let path = node.dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let usec = WATCHDOG.as_micros().to_string();
    let mut daemon = serve(
        &node,
        "daemon.log",
        &["--shutdown-mode", "drain", "--shutdown-drain-seconds", "7200"],
        &[("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", &usec)],
    );
    let first = receive(&socket);
    assert_eq!(value(&first, "READY"), Some("1"), "{first}");
    // Ready says that the port answers, whatever the node's health.
    let (code, _) = probe::get(&node.netns, 5008, "/health/live").expect("nobody answers after READY=1");
    assert_eq!(code, 200);

    let begun = Instant::now();
    let mut heard = begun;
    let mut healthy = false;
    while begun.elapsed() < WATCHDOG * 2 {
        let message = receive(&socket);
        assert_eq!(value(&message, "READY"), None, "ready is said once: {message}");
        assert_eq!(value(&message, "WATCHDOG"), Some("1"), "{message}");
        // Each message has it, changes of the status and mere signs of life alike.
        let gap = heard.elapsed();
        assert!(gap < WATCHDOG, "a supervisor would have ended it: {gap:?}");
        heard = Instant::now();
        healthy |= value(&message, "STATUS").is_some_and(|s| s.starts_with("healthy"));
    }
    assert!(healthy, "no STATUS said that the node is healthy");

    // Its variables reach no shim and no guest.
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    for pid in shim_and_vmm(&node) {
        let env = fs::read(format!("/proc/{pid}/environ")).unwrap();
        let env = String::from_utf8_lossy(&env);
        assert!(!env.contains("NOTIFY_SOCKET") && !env.contains("WATCHDOG"), "{env}");
    }
    node.ok(&["rm", "g"]);

    let ended = daemon.terminate();
    assert!(ended.success(), "{}", daemon.log_text());
    // All it said is in the socket by now.
    socket.set_nonblocking(true).unwrap();
    let said: Vec<String> = std::iter::from_fn(|| try_receive(&socket)).collect();
    let last = said.iter().find(|m| value(m, "STOPPING") == Some("1")).expect("no STOPPING");
    let more: u64 = value(last, "EXTEND_TIMEOUT_USEC").unwrap().parse().unwrap();
    assert!(more > 7_200_000_000, "a drain would be cut short: {last}");
    fs::remove_file(&path).unwrap();
    node.check_clean();
}

#[test]
fn a_shield_from_the_oom_killer_does_not_reach_a_guest() {
    let test = "a_shield_from_the_oom_killer_does_not_reach_a_guest";
    if cannot(test, true) {
        return;
    }
    let node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    let score = |pid: &str| format!("/proc/{pid}/oom_score_adj");
    let shield = fs::write(score(&node.daemon_pid().to_string()), "-500");
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    let scores = shim_and_vmm(&node).map(|pid| fs::read_to_string(score(&pid)).unwrap());
    node.end_clean();
    match shield {
        Ok(()) => assert_eq!(scores.map(|s| s.trim().to_owned()), ["0", "0"]),
        Err(e) => hearth_testkit::skip(test, &format!("the kernel allows no shield here: {e}")),
    }
}
