//! Cgroups: kill, wait, remove.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use hearth_core::host::ErrorClass;
use hearth_core::process::Liveness;
use hearth_host::cgroup::{Cgroups, Limits};
use hearth_host::process::{Child, SpawnOptions, liveness, spawn};

use crate::{SOON, end_of, root_or_skip};

fn cgroups(label: &str) -> Cgroups {
    let instance = format!("t{}-{label}", std::process::id());
    Cgroups::locate(&instance.parse().expect("instance name")).expect("a cgroup2 mount")
}

fn shell(cgroups: &Cgroups, name: &str, script: &str) -> Child {
    let fd = cgroups.open(name).expect("open the cgroup");
    spawn(SpawnOptions {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("PATH".into(), "/usr/bin:/bin".into())],
        cgroup_fd: Some(fd.as_fd()),
        new_session: true,
        ..SpawnOptions::default()
    })
    .expect("spawn")
}

fn wait_for(what: &str, mut f: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !f() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn release_kills_what_ignores_signals_and_what_forks() {
    if !root_or_skip("release_kills_what_ignores_signals_and_what_forks") {
        return;
    }
    let c = cgroups("tree");
    c.ensure("aaaaaaaaaaaaaaaa").unwrap();
    let deaf = shell(&c, "aaaaaaaaaaaaaaaa", "trap '' TERM HUP INT; while :; do sleep 1000; done");
    let tree = shell(&c, "aaaaaaaaaaaaaaaa", "while :; do (setsid sleep 1000 &); sleep 0.02; done");
    wait_for("the tree does not grow", || c.pids("aaaaaaaaaaaaaaaa").unwrap().len() >= 6);
    let before = c.pids("aaaaaaaaaaaaaaaa").unwrap();
    c.release("aaaaaaaaaaaaaaaa", SOON).unwrap();
    // Reaped as well, since nobody else may know of them.
    for child in [&deaf, &tree] {
        assert!(!std::fs::exists(format!("/proc/{}", child.identity.pid)).unwrap(), "a zombie is left");
        assert_eq!(liveness(&child.identity), Liveness::Gone);
    }
    for pid in before {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "left: {state}");
    }
    assert!(c.census().unwrap().ours.is_empty());
    c.release("aaaaaaaaaaaaaaaa", SOON).unwrap();
    c.remove_root().unwrap();
    assert!(!c.root().exists());
}

#[test]
fn release_removes_cgroups_below_and_says_who_is_left_at_the_deadline() {
    if !root_or_skip("release_removes_cgroups_below_and_says_who_is_left_at_the_deadline") {
        return;
    }
    let c = cgroups("nest");
    c.ensure("aaaaaaaaaaaaaaaa").unwrap();
    std::fs::create_dir_all(c.root().join("aaaaaaaaaaaaaaaa/b/c")).unwrap();
    let child = shell(&c, "aaaaaaaaaaaaaaaa", "echo $$ > \"$0\"/cgroup.procs");
    assert!(end_of(&child).code.is_some());
    let child = shell(
        &c,
        "aaaaaaaaaaaaaaaa",
        &format!("echo $$ > {}/aaaaaaaaaaaaaaaa/b/c/cgroup.procs; exec sleep 1000", c.root().display()),
    );
    wait_for("it does not move", || {
        std::fs::read_to_string(c.root().join("aaaaaaaaaaaaaaaa/b/c/cgroup.procs"))
            .unwrap()
            .contains(&child.identity.pid.to_string())
    });
    assert_eq!(c.pids("aaaaaaaaaaaaaaaa").unwrap(), [child.identity.pid]);
    assert!(c.census().unwrap().ours[0].facts.contains("has processes"));
    c.release("aaaaaaaaaaaaaaaa", SOON).unwrap();
    assert_eq!(liveness(&child.identity), Liveness::Gone);
    assert!(!std::fs::exists(format!("/proc/{}", child.identity.pid)).unwrap(), "a zombie is left");
    assert!(!c.root().join("aaaaaaaaaaaaaaaa").exists());
    c.remove_root().unwrap();
}

#[test]
fn names_that_are_no_ids_are_foreign_and_block_nothing_else() {
    if !root_or_skip("names_that_are_no_ids_are_foreign_and_block_nothing_else") {
        return;
    }
    let c = cgroups("names");
    c.ensure("aaaaaaaaaaaaaaaa").unwrap();
    std::fs::create_dir(c.root().join("Not-Ours")).unwrap();
    let census = c.census().unwrap();
    assert_eq!((census.ours.len(), census.foreign.len()), (1, 1));
    c.release("aaaaaaaaaaaaaaaa", SOON).unwrap();
    assert_eq!(c.release("Not-Ours", SOON).unwrap_err().class, ErrorClass::Refused);
    let error = c.remove_root().unwrap_err();
    assert_eq!(error.class, ErrorClass::Busy, "{error}");
    std::fs::remove_dir(c.root().join("Not-Ours")).unwrap();
    c.remove_root().unwrap();
    c.remove_root().unwrap();
}

#[test]
fn limits_without_a_controller_are_named_not_ignored() {
    if !root_or_skip("limits_without_a_controller_are_named_not_ignored") {
        return;
    }
    let c = cgroups("limit");
    c.ensure("aaaaaaaaaaaaaaaa").unwrap();
    let limits = Limits { memory_bytes: Some(64 << 20), cpu_millis: Some(500), pids: Some(50) };
    let skipped = c.set_limits("aaaaaaaaaaaaaaaa", &limits).unwrap();
    let have = c.controllers().unwrap();
    for (controller, file) in [("memory", "memory.max"), ("cpu", "cpu.max"), ("pids", "pids.max")] {
        assert_eq!(skipped.contains(&file), !have.iter().any(|h| h == controller), "{file}: {skipped:?}");
    }
    c.release("aaaaaaaaaaaaaaaa", SOON).unwrap();
    c.remove_root().unwrap();
}
