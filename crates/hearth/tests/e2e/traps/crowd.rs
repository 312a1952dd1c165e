//! Many VMs that die at once, and one process that cannot die.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{PROCESS, create, id, refused, slot, until, vmm_pid};
use crate::http::get;
use crate::node::{Node, Wish, cannot, text};

/// Makes sandboxes, a few at a time.
pub fn create_all(node: &Node, names: &[String]) {
    for some in names.chunks(8) {
        let start = |name: &String| {
            let mut command = node.command(&create(name));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for creating in some.iter().map(start).collect::<Vec<_>>() {
            let out = creating.wait_with_output().unwrap();
            assert!(out.status.success(), "{}\n{}", text(&out.stderr), node.log_text());
        }
    }
}

/// Median time of a create, while `more` says so.
fn creates(node: &Node, prefix: &str, mut more: impl FnMut(usize) -> bool) -> (usize, Duration) {
    let mut times = Vec::new();
    while more(times.len()) {
        let name = format!("{prefix}{}", times.len());
        let begun = Instant::now();
        node.ok(&create(&name));
        times.push(begun.elapsed());
    }
    times.sort();
    (times.len(), times[times.len() / 2])
}

#[test]
fn fifty_vms_killed_at_once_are_released_with_the_reason() {
    if cannot("fifty_vms_killed_at_once_are_released_with_the_reason", true) {
        return;
    }
    const VMS: usize = 50;
    let node = Node::start(&Wish { slot_pool: 4, ..PROCESS });
    let names: Vec<String> = (0..VMS).map(|n| format!("v{n}")).collect();
    create_all(&node, &names);
    let (_, idle) = creates(&node, "idle", |n| n < 10);
    let ids: Vec<String> = names.iter().map(|name| id(&node, name)).collect();
    let vmms: Vec<u32> = names.iter().map(|name| vmm_pid(&node, name)).collect();
    let left = || {
        let list = node.list();
        list.as_array().unwrap().iter().filter(|s| s["name"].as_str().unwrap().starts_with('v')).count()
    };
    let begun = Instant::now();
    super::signal("-KILL", &vmms);
    let mut released = None;
    let (made, meanwhile) = creates(&node, "during", |n| {
        if left() == 0 {
            released.get_or_insert_with(|| begun.elapsed());
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{} left: {}", left(), node.log_text());
        n == 0 || released.is_none()
    });
    let released = released.unwrap();
    hearth_testkit::report(&format!(
        "{VMS} VMs killed at once: released after {:.1} s; {made} creates meanwhile, median {} ms, idle {} ms",
        released.as_secs_f64(),
        meanwhile.as_millis(),
        idle.as_millis()
    ));
    for id in &ids {
        let how = refused(&node, &["inspect", id]);
        assert!(how.contains("signal 9"), "{how}");
    }
    let log = node.log_text();
    let errors: Vec<&str> = log.lines().filter(|l| l.contains("ERROR")).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    node.end_clean();
}

/// A file system that can be frozen: who writes to it then sleeps where no signal reaches.
struct Freezer(PathBuf);

impl Freezer {
    /// `None` where a file cannot be mounted.
    fn mount(dir: &Path) -> Option<Self> {
        let (image, at) = (dir.join("image"), dir.join("m"));
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(&at).unwrap();
        let made = Command::new("mkfs.ext4").arg("-q").arg(&image).status().is_ok_and(|s| s.success());
        let mount = || Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&at).status();
        (made && mount().is_ok_and(|s| s.success())).then(|| Self(at))
    }

    fn freeze(&self, yes: bool) -> bool {
        let how = if yes { "-f" } else { "-u" };
        Command::new("fsfreeze")
            .arg(how)
            .arg(&self.0)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.freeze(false);
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

#[test]
fn a_cgroup_that_stays_populated_is_told_with_the_place_in_the_kernel() {
    let test = "a_cgroup_that_stays_populated_is_told_with_the_place_in_the_kernel";
    if cannot(test, true) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = Freezer::mount(dir.path()) else {
        hearth_testkit::skip(test, "no file can be mounted here (mkfs.ext4, loop device)");
        return;
    };
    let node = Node::start(&PROCESS);
    node.ok(&create("a"));
    let (number, id) = (slot(&node, "a"), id(&node, "a"));
    assert!(disk.freeze(true));
    let file = disk.0.join("f");
    let write = format!("sh -c 'echo x > {}' </dev/null >/dev/null 2>&1 &", file.display());
    node.ok(&["exec", "a", "--", "sh", "-c", &write]);
    let state = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let asleep = || super::pids(&node, &id).into_iter().find(|pid| state(pid).contains(") D "));
    until(&node, "a process in state D", || asleep().is_some());
    let asleep = asleep().unwrap();

    let why = refused(&node, &["rm", "a"]);
    assert!(why.contains("stuck") && why.contains(&id), "{why}");
    let seen = node.inspect("a");
    assert_eq!(seen["state"], "stuck", "{seen}");
    let left = &seen["stuck"]["left"][0];
    assert_eq!(
        (left["kind"].as_str(), left["holders"][0]["pid"].as_u64()),
        (Some("cgroup"), Some(asleep.into()))
    );
    assert_eq!(left["holders"][0]["state"], "D", "{seen}");
    assert!(left["holders"][0]["wchan"].is_string(), "{seen}");
    assert!(!left["holders"][0]["stack"].as_array().unwrap().is_empty(), "{seen}");
    assert!(node.ok(&["ls"]).contains(&format!("cgroup {id} stays")));
    let stuck = "hearth_stuck{kind=\"cgroup\"} ";
    assert!(get(&node, "/metrics").body.lines().any(|l| l == format!("{stuck}1")));
    // Others are served, and its slot is not theirs: who sleeps there may still hold it.
    node.ok(&create("b"));
    assert_ne!(slot(&node, "b"), number);
    let tries = |node: &Node| node.inspect("a")["stuck"]["tries"].as_u64().unwrap();
    let before = tries(&node);
    until(&node, "tried again", || tries(&node) > before);
    assert_eq!(seen["stuck"]["since_ms"], node.inspect("a")["stuck"]["since_ms"]);

    assert!(disk.freeze(false));
    until(&node, "its end", || !super::alive(asleep));
    let again = node.cli(&["rm", "a"]);
    assert!(again.status.success() || refused(&node, &["inspect", "a"]).contains("has ended"));
    assert!(get(&node, "/metrics").body.lines().any(|l| l == format!("{stuck}0")));
    node.end_clean();
}
