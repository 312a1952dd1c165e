//! Commands in a real Linux guest under qemu.

use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use crate::node::{Node, Wish, cannot, peak_kib, text};

#[test]
fn a_command_runs_in_a_guest_and_its_status_comes_back() {
    if cannot("a_command_runs_in_a_guest_and_its_status_comes_back", true) {
        return;
    }
    let node = Node::start(&Wish::default());
    let uname = node.ok(&["run", "busybox", "--", "uname", "-a"]);
    assert!(uname.starts_with("Linux ") && uname.contains("x86_64"), "{uname}");
    assert!(
        !uname.contains(&std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim().to_owned())
    );
    node.ok(&["create", "busybox", "--name", "g"]);
    let status = |command: &str| node.cli(&["exec", "g", "--", "sh", "-c", command]).status.code();
    assert_eq!(status("exit 7"), Some(7));
    assert_eq!(status("kill -9 $$"), Some(137));
    assert_eq!(status("kill -15 $$"), Some(143));
    let missing = node.cli(&["exec", "g", "--", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(127), "{}", text(&missing.stderr));
    assert!(text(&missing.stderr).contains("no-such-program"));
    let out = node.cli(&["exec", "g", "--", "printf", "\\377\\376\\000ok"]);
    assert_eq!(out.stdout, b"\xff\xfe\x00ok");
    let out = node.cli(&["exec", "g", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((text(&out.stdout).as_str(), text(&out.stderr).as_str()), ("out\n", "err\n"));
    let env =
        node.ok(&["exec", "--env", "A=b c", "--workdir", "/tmp", "g", "--", "sh", "-c", "echo $A; pwd"]);
    assert_eq!(env, "b c\n/tmp\n");
    let hostname = node.ok(&["exec", "g", "--", "hostname"]);
    assert_eq!(hostname.trim(), "g");
    assert!(node.ok(&["logs", "g"]).len() < 2 * 1024 * 1024);
    node.end_clean();
}

#[test]
fn sixty_four_mib_pass_through_a_guest_unchanged() {
    if cannot("sixty_four_mib_pass_through_a_guest_unchanged", true) {
        return;
    }
    let node = Node::start(&Wish::default());
    node.ok(&["create", "busybox", "--name", "g"]);
    let agent = || -> u64 {
        let peak = node.ok(&["exec", "g", "--", "grep", "VmHWM", "/proc/1/status"]);
        peak.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = agent();
    let mut child = node
        .command(&["exec", "-i", "g", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || {
        let mut random = std::fs::File::open("/dev/urandom").unwrap();
        let (mut hash, mut block) = (Sha256::new(), vec![0; 1 << 20]);
        for _ in 0..64 {
            random.read_exact(&mut block).unwrap();
            hash.update(&block);
            stdin.write_all(&block).unwrap();
        }
        hash.finalize()
    });
    let (mut hash, mut total, mut block) = (Sha256::new(), 0, vec![0; 1 << 16]);
    let mut stdout = child.stdout.take().unwrap();
    loop {
        let n = stdout.read(&mut block).unwrap();
        if n == 0 {
            break;
        }
        total += n;
        hash.update(&block[..n]);
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(total, 64 << 20);
    assert_eq!(hash.finalize(), writer.join().unwrap());
    let after = agent();
    assert!(after.saturating_sub(before) < 16 * 1024, "the agent grew from {before} to {after} KiB");
    node.end_clean();
}

#[test]
fn a_gibibyte_of_output_grows_nobody() {
    if cannot("a_gibibyte_of_output_grows_nobody", true) {
        return;
    }
    const LIMIT_KIB: u64 = 16 * 1024;
    let node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    // Through daemon, shim and agent; the agent as a process of this host, since emulation would take
    // minutes to say the same.
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process"]);
    let shim = u32::try_from(node.inspect("g")["shim_pid"].as_u64().unwrap()).unwrap();
    let agent = child_of(shim);
    node.ok(&["exec", "g", "--", "head", "-c", "8388608", "/dev/zero"]);
    let before: Vec<u64> = [node.daemon_pid(), shim, agent].map(peak_kib).to_vec();
    let mut child = node
        .command(&["exec", "g", "--", "head", "-c", "1073741824", "/dev/zero"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut total, mut block) = (0u64, vec![0; 1 << 16]);
    let mut stdout = child.stdout.take().unwrap();
    loop {
        let n = stdout.read(&mut block).unwrap();
        if n == 0 {
            break;
        }
        total += n as u64;
        // A reader that falls behind: what it has not read must wait in the guest.
        if total % (64 << 20) < (1 << 16) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(total, 1 << 30);
    let after: Vec<u64> = [node.daemon_pid(), shim, agent].map(peak_kib).to_vec();
    for (who, (before, after)) in ["daemon", "shim", "agent"].iter().zip(before.iter().zip(&after)) {
        println!("{who}: {before} -> {after} KiB");
        assert!(after.saturating_sub(*before) < LIMIT_KIB, "{who} grew from {before} to {after} KiB");
    }
    node.end_clean();
}

fn child_of(pid: u32) -> u32 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn twenty_sandboxes_at_once() {
    if cannot("twenty_sandboxes_at_once", true) {
        return;
    }
    let node = Node::start(&Wish::default());
    let children: Vec<_> = (0..20)
        .map(|i| {
            let say = format!("echo guest {i}");
            let mut command = node.command(&["run", "--memory", "96", "busybox", "--", "sh", "-c", &say]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for (i, child) in children.into_iter().enumerate() {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success(), "{i}: {}\n{}", text(&out.stderr), node.log_text());
        assert_eq!(text(&out.stdout), format!("guest {i}\n"));
    }
    assert_eq!(node.list().as_array().unwrap().len(), 0);
    node.end_clean();
}

#[test]
fn python_runs_in_the_debian_template() {
    if cannot("python_runs_in_the_debian_template", true) {
        return;
    }
    let node = Node::start(&Wish::default());
    let out = node.ok(&["run", "base", "--", "python3", "-c", "import sys; print(6 * 7, sys.platform)"]);
    assert_eq!(out, "42 linux\n");
    node.end_clean();
}

#[test]
fn the_end_time_is_kept_without_a_daemon() {
    if cannot("the_end_time_is_kept_without_a_daemon", true) {
        return;
    }
    let mut node = Node::start(&Wish { test: "process_vmm = true", ..Wish::default() });
    node.ok(&["create", "busybox", "--name", "g", "--vmm", "process", "--timeout", "4s"]);
    let shim = u32::try_from(node.inspect("g")["shim_pid"].as_u64().unwrap()).unwrap();
    node.kill_daemon();
    let end = Instant::now() + Duration::from_secs(20);
    // A zombie has no memory map; its parent, the daemon, is gone, so init reaps it.
    while std::fs::read_link(format!("/proc/{shim}/exe")).is_ok() {
        assert!(Instant::now() < end, "the shim outlived the end time");
        std::thread::sleep(Duration::from_millis(50));
    }
    node.start_daemon();
    let end = Instant::now() + Duration::from_secs(10);
    while !node.list().as_array().unwrap().is_empty() {
        assert!(Instant::now() < end, "the ended sandbox is still listed");
        std::thread::sleep(Duration::from_millis(50));
    }
    let gone = node.cli(&["inspect", "g"]);
    assert!(text(&gone.stderr).contains("end-time"), "{}", text(&gone.stderr));
    node.end_clean();
}
