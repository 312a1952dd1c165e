//! Disks served by the shim, with real guests: they are what they should be, and whoever dies or stalls, the end is bounded and
//! told.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Wish, cannot, in_path, text};
use crate::running::Running;
use crate::telemetry::metric;
use crate::traps::{alive, signal, until};

/// After so many reads of the writable disk a guest has booted long ago, and one that reads the whole disk has not ended.
const READS: u32 = 500;

/// The longer waits and more rounds, for those who have the time.
fn long() -> bool {
    std::env::var_os("HEARTH_TEST_LONG").is_some()
}

fn node(test: String) -> Node {
    Node::start(&Wish { test: test.leak(), slot_pool: 1, ..Wish::default() })
}

fn create(node: &Node, name: &str, more: &[&str]) {
    node.ok(&[&["create", "busybox", "--name", name, "--vmm", "qemu", "--disk", "64"], more].concat());
}

/// Runs in the guest beside the test; what it says is in its log.
fn begin(node: &Node, name: &str, script: &str) -> Running {
    Running::start(node.command(&["exec", name, "--", "sh", "-c", script]), node.dir.path().join("guest.log"))
}

fn state_dir(node: &Node, name: &str) -> PathBuf {
    let id = node.inspect(name)["id"].as_str().unwrap().to_owned();
    node.state.join(&node.instance).join("sandboxes").join(id)
}

/// What was counted of a disk.
fn counted(node: &Node, name: &str, disk: &str) -> Value {
    let disks = node.inspect(name)["disks"].clone();
    let all = disks.as_array().unwrap_or_else(|| panic!("no disks: {disks}"));
    all.iter().find(|d| d["disk"] == disk).unwrap().clone()
}

#[test]
fn a_guests_disks_go_through_its_shim() {
    if cannot("a_guests_disks_go_through_its_shim", true) {
        return;
    }
    let node = Node::start(&Wish { slot_pool: 1, keep_exits: 600, ..Wish::default() });
    create(&node, "g", &[]);
    let dir = state_dir(&node, "g");
    assert!(dir.join("disk.overlay").exists());
    // The base is the one that all of this size share.
    assert!(std::os::unix::fs::MetadataExt::nlink(&dir.join("disk.base").metadata().unwrap()) >= 2);
    let before = counted(&node, "g", "overlay")["write"]["bytes"].as_u64().unwrap();
    node.ok(&["exec", "g", "--", "sh", "-c", "dd if=/dev/urandom of=/f bs=64k count=64; sync; md5sum /f"]);
    let overlay = counted(&node, "g", "overlay");
    assert!(overlay["write"]["bytes"].as_u64().unwrap() >= before + (4 << 20), "{overlay}");
    assert!(overlay["flush"]["requests"].as_u64().unwrap() > 0, "{overlay}");
    assert!(counted(&node, "g", "rootfs")["read"]["bytes"].as_u64().unwrap() > 0);
    let id = node.inspect("g")["id"].as_str().unwrap().to_owned();
    node.ok(&["rm", "g"]);
    assert!(!dir.exists());
    // The end has the last values, and so have the sums, in which nobody else is.
    let kept = node.inspect(&id)["exit"]["disks"].clone();
    let of = |disk: &str, what: &str, of: &str| {
        let disk = kept.as_array().unwrap().iter().find(|d| d["disk"] == disk).unwrap();
        disk[what][of].as_f64().unwrap()
    };
    assert!(of("overlay", "write", "bytes") >= overlay["write"]["bytes"].as_f64().unwrap(), "{kept}");
    for (disk, operation) in [("overlay", "write"), ("overlay", "flush"), ("rootfs", "read")] {
        let labels = format!("{{disk=\"{disk}\",operation=\"{operation}\"}}");
        for (name, what) in [("bytes_total", "bytes"), ("request_seconds_count", "requests")] {
            let summed = metric(&node, &format!("hearth_disk_{name}{labels}"));
            assert_eq!(summed, of(disk, operation, what), "{name} {labels}");
        }
    }
    node.end_clean();
}

#[test]
fn the_end_of_a_block_server_is_the_end_of_its_vm_and_is_told() {
    if cannot("the_end_of_a_block_server_is_the_end_of_its_vm_and_is_told", true) {
        return;
    }
    for fault in ["panic", "kill9"] {
        let node = node(format!("failpoints = \"block.read={fault}@{READS}\""));
        create(&node, "g", &[]);
        let pid = u32::try_from(node.inspect("g")["shim_pid"].as_u64().unwrap()).unwrap();
        let mut reader =
            begin(&node, "g", "while :; do echo 3 > /proc/sys/vm/drop_caches; cat /dev/vdb; done | wc -c");
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        assert!(!alive(pid));
        assert!(!reader.child.wait().unwrap().success());
        let expected = if fault == "panic" { "block server failed: " } else { "its shim died" };
        assert!(node.log_text().contains(expected), "{fault}: {}", node.log_text());
        node.end_clean();
    }
}

#[test]
fn a_vm_is_stopped_at_once_when_a_block_server_dies() {
    if cannot("a_vm_is_stopped_at_once_when_a_block_server_dies", true) {
        return;
    }
    const SERVES_MS: u64 = 3000;
    let test = format!("failpoints = \"block.serve=delay({SERVES_MS})+error\"");
    let node = Node::start(&Wish { test: test.leak(), slot_pool: 1, keep_exits: 600, ..Wish::default() });
    // Whether its guest is ready by then depends on the machine.
    node.cli(&["create", "busybox", "--name", "g", "--vmm", "qemu", "--disk", "16"]);
    until(&node, "released", || node.list().as_array().unwrap().is_empty());
    let exit = node.inspect("g")["exit"].clone();
    assert_eq!(exit["reason"], "block-failed", "{exit}");
    assert!(exit["detail"].as_str().unwrap().contains("block server failed: overlay"), "{exit}");
    // From the VMM's start to its reaped end; its server lives for most of that.
    let after = exit["wall_ms"].as_u64().unwrap().saturating_sub(SERVES_MS);
    // 1 s is the promise; what is beyond is the load of the machine.
    assert!(after < 15_000, "{exit}");
    hearth_testkit::report(&format!("a VM was gone {after} ms after the server of its disk had died"));
    node.end_clean();
}

#[test]
fn what_could_not_be_kept_at_an_orderly_end_is_told_by_it() {
    if cannot("what_could_not_be_kept_at_an_orderly_end_is_told_by_it", true) {
        return;
    }
    let test = "failpoints = \"block.flush=error\"";
    let node = Node::start(&Wish { test, slot_pool: 1, keep_exits: 600, ..Wish::default() });
    // Its guest cannot mount a disk that it cannot flush, and powers off in good order.
    node.cli(&["create", "busybox", "--name", "g", "--vmm", "qemu", "--disk", "16"]);
    until(&node, "released", || node.list().as_array().unwrap().is_empty());
    let exit = node.inspect("g")["exit"].clone();
    assert_eq!(exit["reason"], "guest-shutdown", "{exit}");
    let detail = exit["detail"].as_str().unwrap();
    assert!(detail.contains("not all that the guest wrote was kept: flush of overlay: "), "{exit}");
    node.end_clean();
}

#[test]
fn disks_that_cannot_be_had_or_served_fail_the_creation_and_leave_nothing() {
    if cannot("disks_that_cannot_be_had_or_served_fail_the_creation_and_leave_nothing", true) {
        return;
    }
    for (place, fault, said) in [
        ("open", "error", "the disk overlay cannot be served: failpoint"),
        ("open", "error-after", "the disk overlay cannot be served: failpoint"),
        ("serve", "error", "block server failed: overlay"),
        ("read", "panic", "block server failed: "),
        ("write", "kill9", ""),
    ] {
        let node = node(format!("failpoints = \"block.{place}={fault}\""));
        let out = node.cli(&["create", "busybox", "--name", "g", "--vmm", "qemu", "--disk", "16"]);
        assert_eq!(out.status.code(), Some(1), "{place} {fault}");
        assert!(text(&out.stderr).contains(said), "{place} {fault}: {}", text(&out.stderr));
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        node.end_clean();
    }
}

#[test]
fn a_stalled_disk_delays_neither_its_delete_nor_anybody_else() {
    if cannot("a_stalled_disk_delays_neither_its_delete_nor_anybody_else", true) {
        return;
    }
    let node = node(format!("failpoints = \"block.read=delay(600000)@{READS}\""));
    create(&node, "stalled", &[]);
    create(&node, "other", &[]);
    let pid = u32::try_from(node.inspect("stalled")["shim_pid"].as_u64().unwrap()).unwrap();
    let mut reader =
        begin(&node, "stalled", "while :; do echo 3 > /proc/sys/vm/drop_caches; cat /dev/vdb; done | wc -c");
    until(&node, "stalled", || {
        let now = counted(&node, "stalled", "overlay");
        now["in_flight"] != 0 && now["read"]["requests"].as_u64().unwrap() + 1 >= u64::from(READS)
    });
    std::thread::sleep(Duration::from_secs(1));
    assert!(reader.child.try_wait().unwrap().is_none(), "the guest does not wait");
    let begun = Instant::now();
    assert_eq!(node.ok(&["exec", "other", "--", "echo", "well"]), "well\n");
    let exec = begun.elapsed();
    let begun = Instant::now();
    node.ok(&["rm", "stalled"]);
    let took = begun.elapsed();
    // 5 s is the promise; what is beyond is the load of the machine.
    assert!(took < Duration::from_secs(15), "{took:?}");
    assert!(!alive(pid));
    reader.child.wait().unwrap();
    assert_eq!(node.ok(&["exec", "other", "--", "echo", "well"]), "well\n");
    hearth_testkit::report(&format!(
        "a sandbox with a stalled disk was deleted in {} ms; exec in another meanwhile took {} ms",
        took.as_millis(),
        exec.as_millis()
    ));
    node.end_clean();
}

#[test]
fn a_guest_outlives_a_disk_that_is_slow_for_a_while() {
    if cannot("a_guest_outlives_a_disk_that_is_slow_for_a_while", true) {
        return;
    }
    let slow = Duration::from_secs(if long() { 45 } else { 5 });
    let node = node(format!("failpoints = \"block.read=delay({})@{READS}\"", slow.as_millis()));
    create(&node, "g", &[]);
    let script =
        "for i in 1 2 3 4 5; do echo 3 > /proc/sys/vm/drop_caches; cat /dev/vdb || exit 1; done | wc -c";
    let begun = Instant::now();
    let read = node.ok(&["exec", "g", "--", "sh", "-c", script]);
    assert_eq!(read.trim(), (5 * (64u64 << 20)).to_string());
    assert!(begun.elapsed() >= slow, "nothing was slow");
    assert_eq!(counted(&node, "g", "overlay")["read"]["errors"], 0);
    node.end_clean();
}

#[test]
fn a_limited_disk_takes_its_time() {
    if cannot("a_limited_disk_takes_its_time", true) {
        return;
    }
    let node = node(String::new());
    create(&node, "g", &["--disk-bandwidth", "4M", "--disk-burst-ms", "500"]);
    let script = "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vdb of=/dev/null bs=1M count=24";
    let begun = Instant::now();
    node.ok(&["exec", "g", "--", "sh", "-c", script]);
    let took = begun.elapsed();
    // 24 MiB at 4 MiB/s, less the burst, and less what the boot had read into a cache that cannot be dropped.
    assert!(took >= Duration::from_millis(4500), "{took:?}");
    assert!(counted(&node, "g", "overlay")["limited"]["requests"].as_u64().unwrap() > 0);
    hearth_testkit::report(&format!("24 MiB at a limit of 4 MiB/s took {} ms", took.as_millis()));
    let refused = node.cli(&["create", "busybox", "--disk-bandwidth", "0"]);
    assert_eq!(refused.status.code(), Some(2));
    node.end_clean();
}

/// Files kept beyond the end of their sandbox; removed with this.
struct Kept(PathBuf);

impl Drop for Kept {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap_or_default();
    }
}

#[test]
fn what_was_flushed_outlives_a_shim_killed_under_load() {
    const NAME: &str = "what_was_flushed_outlives_a_shim_killed_under_load";
    if cannot(NAME, true) {
        return;
    }
    if !["e2fsck", "debugfs"].iter().all(|program| in_path(program)) {
        hearth_testkit::skip(NAME, "e2fsck and debugfs are not in PATH");
        return;
    }
    let rounds: u64 = std::env::var("HEARTH_TEST_KILLS").map_or(2, |n| n.parse().unwrap());
    let node = node(String::new());
    let mut acknowledged = 0;
    for round in 0..rounds {
        create(&node, "g", &[]);
        let pid = u32::try_from(node.inspect("g")["shim_pid"].as_u64().unwrap()).unwrap();
        let dir = state_dir(&node, "g");
        let kept = Kept(node.state.join(format!("{}k", node.instance)));
        fs::create_dir_all(&kept.0).unwrap();
        for file in ["disk.base", "disk.overlay"] {
            fs::hard_link(dir.join(file), kept.0.join(file)).unwrap();
        }
        // Block i % 16 is filled with the number i; a line says that it is safe.
        let script = "i=1; while :; do yes $i | head -c 4096 | dd of=/f bs=4096 seek=$((i % 16)) conv=notrunc,fsync \
                      2>/dev/null || exit; echo $i; i=$((i+1)); done";
        let writer = begin(&node, "g", script);
        let last = || -> u64 {
            let log = writer.log_text();
            let whole = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
            whole.lines().filter_map(|l| l.parse().ok()).max().unwrap_or(0)
        };
        let wanted = 20 + round * 7;
        until(&node, "written", || last() >= wanted);
        signal("-9", &[pid]);
        until(&node, "released", || node.list().as_array().unwrap().is_empty());
        let safe = last();
        check(&kept.0, safe);
        acknowledged += safe;
    }
    hearth_testkit::report(&format!("{rounds} shims killed under load, {acknowledged} writes were safe"));
    node.end_clean();
}

/// Each block of the file has the last number that was said to be safe, or one that came later.
fn check(dir: &Path, safe: u64) {
    let image = dir.join("image");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        use hearth_vmm::block::{Backend, FileBackend, Limit, Overlay, Pool};
        let limit = Limit::within(Duration::from_secs(60));
        let base = FileBackend::open(&dir.join("disk.base"), true, Pool::new("base", 2)).unwrap();
        let path = dir.join("disk.overlay");
        let disk = Overlay::open(&path, std::sync::Arc::new(base), true, Pool::new("overlay", 2), &limit);
        let disk = disk.await.unwrap();
        let size = usize::try_from(disk.size()).unwrap();
        fs::write(&image, disk.read_at(0, size, bytes::BytesMut::new(), &limit).await.unwrap()).unwrap();
    });
    // Replays the journal, and finds nothing else to do.
    let checked = Command::new("e2fsck").args(["-fy"]).arg(&image).output().unwrap();
    assert!(checked.status.code().is_some_and(|c| c <= 1), "{}", text(&checked.stdout));
    let file = dir.join("f");
    let dump = format!("dump /upper/f {}", file.display());
    assert!(Command::new("debugfs").args(["-R", &dump]).arg(&image).output().unwrap().status.success());
    let found = fs::read(&file).unwrap();
    for slot in 0..16u64 {
        let last = (0..=safe).rev().find(|i| i % 16 == slot && *i > 0);
        let Some(last) = last else { continue };
        let at = usize::try_from(slot).unwrap() * 4096;
        let block = found.get(at..at + 4096).unwrap_or_else(|| panic!("block {slot} is missing"));
        let number = text(block).lines().next().unwrap_or_default().parse::<u64>();
        let number = number.unwrap_or_else(|_| panic!("block {slot} holds no number"));
        assert!(number == last || number == last + 16, "block {slot} has {number}, {last} was safe");
    }
}
