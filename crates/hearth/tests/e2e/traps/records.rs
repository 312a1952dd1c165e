//! Records that cannot be read, and disks that cannot be written.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{PROCESS, alive, create, id, record_path, refused, shim_pid, slot, until, vmm_pid};
use crate::node::{Node, Wish, cannot};

#[test]
fn a_record_that_cannot_be_read_is_shown_kept_and_never_acted_on() {
    if cannot("a_record_that_cannot_be_read_is_shown_kept_and_never_acted_on", true) {
        return;
    }
    let mut node = Node::start(&PROCESS);
    let names = ["empty", "cut", "future", "good"];
    for name in names {
        node.ok(&create(name));
    }
    let ids = names.map(|name| id(&node, name));
    let slots = names.map(|name| slot(&node, name));
    let vmms = names.map(|name| vmm_pid(&node, name));
    node.kill_daemon();
    let texts: Vec<String> =
        ids.iter().map(|id| fs::read_to_string(record_path(&node, id)).unwrap()).collect();
    fs::write(record_path(&node, &ids[0]), "").unwrap();
    fs::write(record_path(&node, &ids[1]), &texts[1][..texts[1].len() / 2]).unwrap();
    fs::write(record_path(&node, &ids[2]), texts[2].replace("\"schema\": 1", "\"schema\": 99")).unwrap();
    let broken: Vec<Vec<u8>> = ids.iter().map(|id| fs::read(record_path(&node, id)).unwrap()).collect();

    // Twice: a restart is the usual reaction.
    for _ in 0..2 {
        node.start_daemon();
        let list = node.list();
        let unknown =
            |id: &str| list.as_array().unwrap().iter().any(|s| s["id"] == id && s["state"] == "unknown");
        assert!(ids[..3].iter().all(|id| unknown(id)), "{list}");
        assert!(node.ok(&["ls"]).contains("record unusable"));
        for (id, words) in ids.iter().zip(["empty", "EOF", "schema 99"]) {
            let seen = node.inspect(id);
            let why = seen["unknown"].as_str().unwrap();
            assert!(why.contains(words) && why.contains("record.json"), "{why}");
            let why = refused(&node, &["rm", id]);
            assert!(why.contains("nothing of it is touched"), "{why}");
        }
        // By name it is not "not found" either.
        assert!(refused(&node, &["inspect", "empty"]).contains("cannot"));
        assert_eq!(node.ok(&["exec", "good", "--", "echo", "works"]), "works\n");
        node.ok(&create("new"));
        assert!(!slots.contains(&slot(&node, "new")), "the slot of an unknown sandbox was handed out");
        node.ok(&["rm", "new"]);
        assert!(vmms.iter().all(|pid| alive(*pid)), "an unknown sandbox was killed");
        node.kill_daemon();
    }
    for (id, broken) in ids.iter().zip(&broken) {
        assert_eq!(&fs::read(record_path(&node, id)).unwrap(), broken, "a record was changed");
    }
    // Put back, all of them live on.
    for (id, text) in ids.iter().zip(&texts) {
        fs::write(record_path(&node, id), text).unwrap();
    }
    node.start_daemon();
    for name in names {
        assert_eq!(node.ok(&["exec", name, "--", "echo", "works"]), "works\n");
    }
    node.end_clean();
}

/// A small file system that is the state directory of a host, with the prepared kernel and template in it.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(node: &Node) -> Self {
        let at = node.state.clone();
        fs::create_dir(&at).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=128m", "hx-small-disk", path(&at)]);
        let disk = Self(at);
        let prepared = PathBuf::from(std::env::var_os("HEARTH_TEST_STATE").unwrap());
        for name in ["kernels", "templates", "tmp"] {
            std::os::unix::fs::symlink(prepared.join(name), disk.0.join(name)).unwrap();
        }
        disk
    }

    /// By a read-only view over it: the file system itself is busy while the daemon has a file open for writing.
    fn read_only(&self, yes: bool) {
        if yes {
            run("mount", &["--bind", path(&self.0), path(&self.0)]);
            run("mount", &["-o", "remount,bind,ro", path(&self.0)]);
        } else {
            run("umount", &["-l", path(&self.0)]);
        }
    }

    /// Leaves not a byte.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("fill")).unwrap();
        for size in [1 << 20, 4096, 1] {
            while file.write_all(&vec![1; size]).is_ok() {}
        }
    }

    fn free(&self) {
        fs::remove_file(self.0.join("fill")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: after a failed assertion a daemon may still be there, and the view.
        let unmount = || Command::new("umount").arg("-lq").arg(&self.0).status();
        while unmount().is_ok_and(|s| s.success()) {}
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(program: &str, args: &[&str]) {
    assert!(Command::new(program).args(args).status().unwrap().success(), "{program} {args:?}");
}

#[test]
fn a_full_disk_costs_no_sandbox_and_no_release() {
    if cannot("a_full_disk_costs_no_sandbox_and_no_release", true) {
        return;
    }
    let mut node = Node::new(&Wish { own_state: true, ..PROCESS });
    let disk = SmallDisk::mount(&node);
    node.start_daemon();
    for name in ["a", "b", "c"] {
        node.ok(&create(name));
    }
    let before = node.inspect("a");
    disk.fill();
    let why = refused(&node, &create("d"));
    assert!(why.contains("No space left"), "{why}");
    assert_eq!(node.list().as_array().unwrap().len(), 3, "something is left of a create that failed");
    assert_eq!(node.ok(&["exec", "a", "--", "echo", "works"]), "works\n");
    // A release that cannot be written down is a release all the same.
    let vmm = vmm_pid(&node, "b");
    node.ok(&["rm", "b"]);
    assert!(!alive(vmm));
    node.kill_daemon();
    disk.fill();
    node.start_daemon();
    let after = node.inspect("a");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    signal_shim_and_wait(&node, "c");
    disk.free();
    node.ok(&create("d"));
    node.ok(&["rm", "--all"]);
    node.stop_daemon();
    node.check_clean();
    drop(disk);
}

/// The VM ends with nowhere to write how.
fn signal_shim_and_wait(node: &Node, name: &str) {
    super::signal("-KILL", &[shim_pid(node, name)]);
    until(node, "gone from the list", || !node.list().as_array().unwrap().iter().any(|s| s["name"] == name));
}

#[test]
fn a_state_directory_that_became_read_only_is_told_and_heals() {
    if cannot("a_state_directory_that_became_read_only_is_told_and_heals", true) {
        return;
    }
    let mut node = Node::new(&Wish { own_state: true, ..PROCESS });
    let disk = SmallDisk::mount(&node);
    node.start_daemon();
    node.ok(&create("a"));
    node.ok(&create("b"));
    let vmm = vmm_pid(&node, "a");
    disk.read_only(true);
    let why = refused(&node, &create("c"));
    assert!(why.contains("Read-only"), "{why}");
    assert_eq!(node.list().as_array().unwrap().len(), 2, "something is left of a create that failed");
    // All but the directory goes, and nobody says that it is gone.
    let why = refused(&node, &["rm", "a"]);
    assert!(why.contains("stuck") && why.contains("Read-only"), "{why}");
    assert!(!alive(vmm));
    let seen = node.inspect("a");
    assert_eq!(seen["stuck"]["left"][0]["kind"], "directory", "{seen}");
    assert!(node.ok(&["ls"]).contains("next try in"));
    // Over a restart too: one goes on, the other is tried again.
    node.kill_daemon();
    node.start_daemon();
    assert_eq!(node.ok(&["exec", "b", "--", "echo", "works"]), "works\n");
    until(&node, "stuck again", || node.inspect("a")["state"] == "stuck");
    disk.read_only(false);
    // By a delete at once, unless the next try came first.
    let again = node.cli(&["rm", "a"]);
    assert!(again.status.success() || refused(&node, &["inspect", "a"]).contains("has ended"));
    node.ok(&["rm", "b"]);
    node.stop_daemon();
    node.check_clean();
    drop(disk);
}
