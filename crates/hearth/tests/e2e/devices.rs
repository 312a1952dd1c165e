//! Disks of real Firecracker guests as devices of the kernel's NBD client, which the lab has (`cargo xtask lab
//! hearth:e2e:devices::`): they are what they should be, and whoever dies or stalls, device and index are given back.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_host::{facts, nbd};

use crate::http;
use crate::node::{Node, Wish, cannot, in_path, text};
use crate::running::Running;
use crate::traps::{alive, shim_pid, signal, until, vmm_pid};

/// One device in all, so that its index must come back before the next sandbox can have it.
const ONE: &[(&str, &str)] = &[("HEARTH_DISK_FIRECRACKER", "nbd"), ("HEARTH_DISK_NBD_DEVICES", "1")];
/// After so many writes of the writable disk a guest has booted long ago.
const WRITES: u32 = 300;
/// Writes to the disk for ever, and has each round made safe.
const WRITER: &str = "i=0; while :; do dd if=/dev/urandom of=/f bs=16k count=16 conv=fsync 2>/dev/null || exit; \
                      i=$((i+1)); echo $i; done";
/// Creations that are cut short somewhere on their way, and whole lives among them.
const LIVES: u64 = 24;
const WHOLE: u64 = 8;

/// Why a test of this group cannot run here, if so. Says it as well.
fn cannot_have_devices(test: &str) -> bool {
    if cannot(test, false) {
        return true;
    }
    let missing = if std::env::var_os("HEARTH_TEST_STATE").is_none() {
        "HEARTH_TEST_STATE is not set: run scripts/test"
    } else if std::env::var_os("HEARTH_FIRECRACKER").is_none() && !in_path("firecracker") {
        "no firecracker in PATH or HEARTH_FIRECRACKER"
    } else if facts::kvm_usable().is_err() || !matches!(facts::cpu_virtualization(), Ok(Some(_))) {
        "no KVM that runs ordinary guests, as in the lab"
    } else if !matches!(nbd::limits(), Ok(Some(_))) {
        "the kernel has no module nbd, as in the lab"
    } else {
        return false;
    };
    hearth_testkit::skip(test, missing);
    true
}

fn node(failpoints: &str) -> Node {
    let test = format!("failpoints = \"{failpoints}\"");
    Node::start(&Wish { test: test.leak(), slot_pool: 0, env: ONE, ..Wish::default() })
}

const CREATE: [&str; 8] = ["create", "busybox", "--name", "g", "--vmm", "firecracker", "--disk", "64"];

/// The index that the sandbox has.
fn index(node: &Node) -> u32 {
    let resources = node.inspect("g")["resources"].clone();
    let named = resources.as_array().unwrap().iter().filter_map(|r| r.as_str()?.strip_prefix("nbd"));
    let index = named.filter_map(|rest| rest.split(' ').next()?.parse().ok()).next();
    index.unwrap_or_else(|| panic!("no device: {resources}"))
}

fn counted(node: &Node) -> serde_json::Value {
    let disks = node.inspect("g")["disks"].clone();
    let all = disks.as_array().unwrap_or_else(|| panic!("no disks: {disks}"));
    assert_eq!(all.len(), 1, "{disks}");
    all[0].clone()
}

fn writer(node: &Node) -> Running {
    Running::start(node.command(&["exec", "g", "--", "sh", "-c", WRITER]), node.dir.path().join("guest.log"))
}

/// As [`until`], for what takes longer.
fn until_within(node: &Node, bound: Duration, what: &str, mut good: impl FnMut() -> bool) {
    let end = Instant::now() + bound;
    while !good() {
        assert!(Instant::now() < end, "never {what}: {}", node.log_text());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// No device is connected, and none that is half gone.
fn assert_all_quiet() {
    for index in nbd::indexes().unwrap() {
        assert_eq!(nbd::look(index).unwrap().unquiet(), None, "nbd{index}");
    }
}

fn gauge(node: &Node, state: &str) -> String {
    let metrics = http::get(node, "/metrics").body;
    let name = format!("hearth_nbds{{state=\"{state}\"}} ");
    metrics
        .lines()
        .find_map(|line| line.strip_prefix(&name))
        .unwrap_or_else(|| panic!("no {name}"))
        .to_owned()
}

#[test]
fn a_guests_disk_is_a_device_that_outlives_the_daemon_and_goes_with_the_sandbox() {
    if cannot_have_devices("a_guests_disk_is_a_device_that_outlives_the_daemon_and_goes_with_the_sandbox") {
        return;
    }
    let mut node = node("");
    node.ok(&CREATE);
    let id = node.inspect("g")["id"].as_str().unwrap().to_owned();
    let index = index(&node);
    assert_eq!(nbd::look(index).unwrap().backend.as_deref(), Some(id.as_str()));
    let before = counted(&node)["write"]["bytes"].as_u64().unwrap();
    let script = "dd if=/dev/urandom of=/f bs=64k count=32 2>/dev/null; sync; md5sum /f";
    let sum = node.ok(&["exec", "g", "--", "sh", "-c", script]);
    let disk = counted(&node);
    assert!(disk["write"]["bytes"].as_u64().unwrap() >= before + (2 << 20), "{disk}");
    assert!(disk["flush"]["requests"].as_u64().unwrap() > 0, "{disk}");
    assert_eq!((gauge(&node, "used"), gauge(&node, "free")), ("1".into(), "0".into()));
    // Each sandbox has one, and there is one.
    let second = node.cli(&["create", "busybox", "--name", "h", "--vmm", "firecracker", "--disk", "16"]);
    assert_eq!(second.status.code(), Some(1));
    let said = text(&second.stderr);
    assert!(said.contains("1 used, 0 quarantined, 0 of others, limit 1"), "{said}");
    node.kill_daemon();
    node.start_daemon();
    assert_eq!(gauge(&node, "used"), "1");
    let script = "echo 3 > /proc/sys/vm/drop_caches; md5sum /f";
    until(&node, "well", || node.cli(&["exec", "g", "--", "true"]).status.success());
    assert_eq!(node.ok(&["exec", "g", "--", "sh", "-c", script]), sum);
    let doctor = node.cli(&["doctor"]);
    assert!(doctor.status.success(), "{}{}", text(&doctor.stdout), text(&doctor.stderr));
    node.ok(&["rm", "g"]);
    assert_all_quiet();
    assert_eq!((gauge(&node, "used"), gauge(&node, "free")), ("0".into(), "1".into()));
    node.end_clean();
}

#[test]
fn a_stalled_device_delays_no_delete() {
    if cannot_have_devices("a_stalled_device_delays_no_delete") {
        return;
    }
    let node = node(&format!("block.write=delay(600000)@{WRITES}"));
    node.ok(&CREATE);
    let pids = [shim_pid(&node, "g"), vmm_pid(&node, "g")];
    let mut writer = writer(&node);
    until(&node, "stalled", || {
        let now = counted(&node);
        now["in_flight"] != 0 && now["write"]["requests"].as_u64().unwrap() + 1 >= u64::from(WRITES)
    });
    std::thread::sleep(Duration::from_secs(2));
    assert!(writer.child.try_wait().unwrap().is_none(), "the guest does not wait");
    let begun = Instant::now();
    node.ok(&["rm", "g"]);
    let took = begun.elapsed();
    assert_all_quiet();
    assert!(pids.iter().all(|pid| !alive(*pid)));
    // 5 s is the promise; what is beyond is the load of the machine.
    assert!(took < Duration::from_secs(15), "{took:?}");
    writer.child.wait().unwrap();
    hearth_testkit::report(&format!(
        "a sandbox on Firecracker with a stalled device was deleted in {} ms",
        took.as_millis()
    ));
    node.end_clean();
}

#[test]
fn a_guest_outlives_a_device_that_is_slow_for_a_while() {
    if cannot_have_devices("a_guest_outlives_a_device_that_is_slow_for_a_while") {
        return;
    }
    let slow = Duration::from_secs(if std::env::var_os("HEARTH_TEST_LONG").is_some() { 45 } else { 5 });
    let node = node(&format!("block.write=delay({})@{WRITES}", slow.as_millis()));
    node.ok(&CREATE);
    let begun = Instant::now();
    let mut writer = writer(&node);
    until_within(&node, slow + Duration::from_secs(60), "written", || {
        counted(&node)["write"]["requests"].as_u64().unwrap() > u64::from(WRITES) + 20
    });
    assert!(begun.elapsed() >= slow, "nothing was slow");
    assert!(writer.child.try_wait().unwrap().is_none(), "{}", writer.log_text());
    let disk = counted(&node);
    assert_eq!((&disk["write"]["errors"], &disk["flush"]["errors"]), (&0.into(), &0.into()), "{disk}");
    node.ok(&["rm", "g"]);
    writer.child.wait().unwrap();
    assert_all_quiet();
    node.end_clean();
}

#[test]
fn a_stopped_shim_whose_socket_is_full_delays_no_delete() {
    if cannot_have_devices("a_stopped_shim_whose_socket_is_full_delays_no_delete") {
        return;
    }
    let node = node("");
    node.ok(&CREATE);
    let (index, pids) = (index(&node), [shim_pid(&node, "g"), vmm_pid(&node, "g")]);
    let mut writer = writer(&node);
    until(&node, "written", || writer.log_text().lines().count() > 3);
    signal("-STOP", &pids[..1]);
    // The guest's next round is more than a socket holds.
    until(&node, "waiting", || nbd::look(index).unwrap().in_flight > 0);
    std::thread::sleep(Duration::from_secs(2));
    let begun = Instant::now();
    node.ok(&["rm", "g"]);
    let took = begun.elapsed();
    assert_all_quiet();
    assert!(pids.iter().all(|pid| !alive(*pid)));
    // The shim has 3 s to kill its VMM by itself.
    assert!(took < Duration::from_secs(15), "{took:?}");
    drop(writer.child.kill());
    writer.child.wait().unwrap();
    hearth_testkit::report(&format!(
        "a sandbox on Firecracker whose shim was stopped under writes was deleted in {} ms",
        took.as_millis()
    ));
    node.end_clean();
}

#[test]
fn devices_that_cannot_be_had_or_served_fail_the_creation_and_leave_nothing() {
    if cannot_have_devices("devices_that_cannot_be_had_or_served_fail_the_creation_and_leave_nothing") {
        return;
    }
    for (failpoint, said) in [
        ("block.open=error", "the disk overlay cannot be served: failpoint"),
        ("block.serve=error", "block server failed: overlay"),
        // Whoever opens the device looks for partitions.
        ("block.read=delay(600000)", ""),
        ("block.write=kill9", ""),
    ] {
        let node = node(failpoint);
        let out = node.cli(&CREATE);
        assert_eq!(out.status.code(), Some(1), "{failpoint}");
        assert!(text(&out.stderr).contains(said), "{failpoint}: {}", text(&out.stderr));
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        assert_all_quiet();
        assert_eq!(gauge(&node, "free"), "1", "{failpoint}");
        node.end_clean();
    }
}

#[test]
fn a_killed_shim_gives_its_device_back_also_if_that_stalls() {
    if cannot_have_devices("a_killed_shim_gives_its_device_back_also_if_that_stalls") {
        return;
    }
    for (failpoints, with_daemon) in
        [(String::new(), true), (format!("block.write=delay(600000)@{WRITES}"), true), (String::new(), false)]
    {
        let mut node = node(&failpoints);
        node.ok(&CREATE);
        let pids = [shim_pid(&node, "g"), vmm_pid(&node, "g")];
        let mut writer = writer(&node);
        match failpoints.is_empty() {
            true => until(&node, "written", || writer.log_text().lines().count() > 3),
            false => until(&node, "stalled", || {
                counted(&node)["write"]["requests"].as_u64().unwrap() + 1 >= u64::from(WRITES)
            }),
        }
        std::thread::sleep(Duration::from_secs(1));
        if !with_daemon {
            node.kill_daemon();
        }
        let begun = Instant::now();
        signal("-9", &pids[..1]);
        if !with_daemon {
            node.start_daemon();
        }
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        let took = begun.elapsed();
        assert_all_quiet();
        assert!(pids.iter().all(|pid| !alive(*pid)));
        assert!(took < Duration::from_secs(15), "{took:?}: {}", node.log_text());
        drop(writer.child.kill());
        writer.child.wait().unwrap();
        hearth_testkit::report(&format!(
            "a killed shim's device was given back within {} ms (failpoints {failpoints:?}, daemon {with_daemon})",
            took.as_millis()
        ));
        assert_eq!(gauge(&node, "free"), "1");
        node.end_clean();
    }
}

#[test]
fn the_end_of_a_devices_server_is_the_end_of_its_vm_and_is_told() {
    if cannot_have_devices("the_end_of_a_devices_server_is_the_end_of_its_vm_and_is_told") {
        return;
    }
    let node = node(&format!("block.write=panic@{WRITES}"));
    node.ok(&CREATE);
    let mut writer = writer(&node);
    let log = node.state.join(&node.instance);
    until(&node, "released", || node.list().as_array().unwrap().is_empty());
    assert!(!writer.child.wait().unwrap().success());
    assert!(node.log_text().contains("block server failed: "), "{}: {}", log.display(), node.log_text());
    assert_all_quiet();
    node.end_clean();
}

#[test]
fn after_many_lives_and_creations_cut_short_nothing_is_connected() {
    if cannot_have_devices("after_many_lives_and_creations_cut_short_nothing_is_connected") {
        return;
    }
    let node = node("");
    let quarantined = || gauge(&node, "quarantined");
    let mut whole = 0;
    for life in 0..LIVES {
        let log: PathBuf = node.dir.path().join(format!("life-{life}"));
        if life % (LIVES / WHOLE) == 0 {
            node.ok(&CREATE);
            node.ok(&["rm", "g"]);
            whole += 1;
            continue;
        }
        let mut command = node.command(&CREATE);
        command.stdout(Stdio::null());
        let mut client = Running::start(command, log);
        // Spread over the way of a creation, which takes some seconds here.
        std::thread::sleep(Duration::from_millis(life * 97 % 2000));
        client.child.kill().unwrap();
        client.child.wait().unwrap();
        until(&node, "gone", || node.list().as_array().unwrap().is_empty());
    }
    assert_eq!(quarantined(), "0");
    assert_all_quiet();
    hearth_testkit::report(&format!("{LIVES} lives over one device, {whole} of them whole: 0 connected"));
    node.end_clean();
}
