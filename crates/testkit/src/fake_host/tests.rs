//! The fake's own promises: faults come when ordered, and half an effect is half an effect.

use std::io::Read;
use std::sync::mpsc;
use std::time::Duration;

use hearth_core::host::Host;
use hearth_core::process::Liveness;

use super::*;

const SOON: Duration = Duration::from_secs(10);

fn host(dir: &tempfile::TempDir) -> FakeHost {
    let layout = SlotLayout {
        instance: "a".parse().unwrap(),
        veth_prefix: "hth".parse().unwrap(),
        cidr: "10.12.0.0/16".parse().unwrap(),
    };
    let host = FakeHost::new(layout, dir.path().join("state"), dir.path().join("run"));
    host.ensure(&Resource::Directory { path: dir.path().join("run/sandboxes/aaaaaaaaaaaaaaaa") }).unwrap();
    host
}

fn spec(dir: &tempfile::TempDir) -> SpawnSpec {
    SpawnSpec {
        program: "/bin/sleep".into(),
        args: vec![],
        env: vec![],
        cgroup: "aaaaaaaaaaaaaaaa".into(),
        log: dir.path().join("run/sandboxes/aaaaaaaaaaaaaaaa/log"),
    }
}

#[test]
fn the_nth_call_fails_and_the_next_completes_what_was_half_made() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(&dir);
    let slot = SlotIndex::new(1).unwrap();
    let netns = Resource::Netns { slot };
    host.fail(Verb::Ensure, Kind::Netns, 2, Fault::HalfDone(ErrorClass::Failed));
    host.ensure(&netns).unwrap();
    host.ensure(&netns).unwrap_err();
    assert_eq!(host.census(Kind::Netns).unwrap().ours[0].facts, "half made");
    host.ensure(&Resource::Veth { slot }).unwrap_err();
    host.ensure(&netns).unwrap();
    host.ensure(&Resource::Veth { slot }).unwrap();
    host.fail_always(Verb::Release, Kind::Netns, Fault::Error(ErrorClass::Busy));
    for _ in 0..3 {
        assert_eq!(host.release(&netns, SOON).unwrap_err().class, ErrorClass::Busy);
    }
    assert_eq!(host.leftovers().len(), 3);
    host.heal();
    host.release(&netns, SOON).unwrap();
    assert_eq!(host.leftovers().len(), 1, "the namespace takes its link with it");
    assert_eq!(host.count(Verb::Release, Kind::Netns), 4);
    host.fail(Verb::Census, Kind::Cgroup, 1, Fault::Incomplete);
    assert!(!host.census(Kind::Cgroup).unwrap().incomplete.is_empty());
    assert!(host.census(Kind::Cgroup).unwrap().incomplete.is_empty());
}

#[test]
fn the_descriptor_of_a_fake_process_becomes_readable_at_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(&dir);
    let cgroup = Resource::Cgroup { name: "aaaaaaaaaaaaaaaa".into() };
    host.ensure(&cgroup).unwrap();
    let (said, heard) = mpsc::channel();
    host.on_spawn(move |_, process| {
        let said = said.clone();
        std::thread::spawn(move || said.send(process.wait(SOON)));
        Ok(())
    });
    let spawned = host.spawn(&spec(&dir)).unwrap();
    assert_eq!(host.liveness(&spawned.identity), Liveness::Alive);
    host.blind(spawned.identity.pid, Some("no /proc"));
    assert_eq!(host.liveness(&spawned.identity), Liveness::Unknown("no /proc".into()));
    host.blind(spawned.identity.pid, None);
    host.release(&cgroup, SOON).unwrap();
    assert_eq!(heard.recv_timeout(SOON).unwrap(), Some(End::Killed));
    // End of file: nobody holds the other end any more.
    assert_eq!(std::fs::File::from(spawned.pidfd).read(&mut [0]).unwrap(), 0);
    assert_eq!(host.liveness(&spawned.identity), Liveness::Gone);
}

#[test]
fn a_spawn_half_done_leaves_a_process_that_nobody_was_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(&dir);
    host.ensure(&Resource::Cgroup { name: "aaaaaaaaaaaaaaaa".into() }).unwrap();
    host.fail(Verb::Spawn, Kind::Process, 1, Fault::HalfDone(ErrorClass::Failed));
    host.spawn(&spec(&dir)).unwrap_err();
    assert_eq!(host.running().len(), 1);
    assert_eq!(host.census(Kind::Process).unwrap().ours.len(), 1);
}

#[test]
fn what_is_foreign_is_reported_and_never_taken() {
    let dir = tempfile::tempdir().unwrap();
    let host = host(&dir);
    let netns = Resource::Netns { slot: SlotIndex::new(7).unwrap() };
    host.plant_foreign(netns.clone(), "a plain file");
    assert_eq!(host.ensure(&netns).unwrap_err().class, ErrorClass::Foreign);
    assert_eq!(host.release(&netns, SOON).unwrap_err().class, ErrorClass::Foreign);
    let census = host.census(Kind::Netns).unwrap();
    assert!(census.ours.is_empty());
    assert_eq!(census.foreign.len(), 1);
}
