//! A VMM that the host's kernel kills since memory ran out in its cgroup. Needs root and a cgroup2 with the memory
//! controller: the lab has one.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Place, Running, identity, skipped};
use hearth_core::exit::ExitReason;
use hearth_core::shim::ShimSpec;
use hearth_core::spec::VmmKind;
use hearth_host::cgroup::{Cgroups, Limits};
use hearth_host::process::Signal;

const ID: &str = "abcdefghijkmnpqr";

/// This process in a cgroup of its own until dropped: a VMM is born in its shim's.
struct Inside {
    cgroups: Cgroups,
    home: PathBuf,
}

impl Inside {
    fn enter(memory_bytes: u64) -> Option<Self> {
        let instance = format!("oom{}", std::process::id()).parse().expect("a name");
        let Ok(cgroups) = Cgroups::locate(&instance) else {
            skipped("no cgroup2 is mounted");
            return None;
        };
        if !cgroups.controllers().is_ok_and(|all| all.iter().any(|c| c == "memory")) {
            skipped("cgroup2 has no memory controller here; the lab has one");
            return None;
        }
        if cgroups.ensure(ID).is_err() {
            skipped("needs root");
            return None;
        }
        let limits = Limits { memory_bytes: Some(memory_bytes), ..Limits::default() };
        cgroups.set_limits(ID, &limits).expect("the memory controller");
        // Without swap, or it would take the host's for a while; absent where the host has none.
        drop(std::fs::write(cgroups.root().join(ID).join("memory.swap.max"), "0"));
        let own = std::fs::read_to_string("/proc/self/cgroup").expect("own cgroup");
        let own = own.lines().find_map(|l| l.strip_prefix("0::/")).expect("a cgroup2").to_owned();
        let mount = hearth_host::cgroup::mount_point().expect("mounts").expect("a cgroup2");
        move_to(&cgroups.root().join(ID));
        Some(Self { cgroups, home: mount.join(own) })
    }
}

fn move_to(cgroup: &Path) {
    std::fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).expect("move to a cgroup");
}

impl Drop for Inside {
    fn drop(&mut self) {
        move_to(&self.home);
        self.cgroups.release(ID, Duration::from_secs(10)).expect("release the cgroup");
        self.cgroups.remove_root().expect("remove the instance's cgroup");
    }
}

fn script(place: &Place, command: &str) -> PathBuf {
    let path = place.dir.path().join("vmm.sh");
    std::fs::write(&path, format!("#!/bin/sh\n{command}\n")).expect("write the program");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("make it a program");
    path
}

#[tokio::test]
async fn a_vmm_out_of_memory_in_its_cgroup_is_told_from_a_kill() {
    let Some(inside) = Inside::enter(96 << 20) else { return };
    let place = Place::new();
    // One line without an end, kept in memory.
    let program = script(&place, "exec tail /dev/zero");
    let spec = ShimSpec { id: ID.parse().unwrap(), ..place.spec(VmmKind::Process, &program) };
    let running = Running::new(spec);
    drop(running.handle.boot().await);
    let record = running.ended().await;
    assert_eq!((record.reason, record.signal), (ExitReason::VmmOom, Some(9)), "{record:?}");
    let cgroup = record.cgroup.as_deref().expect("counters of the cgroup");
    assert!(cgroup.oom_kills > Some(0) && cgroup.cpu_us > Some(0), "{cgroup:?}");
    assert!(record.cpu_us > Some(0) && record.wall_ms.is_some(), "{record:?}");

    // The count of the one before must not be taken for this one's.
    let place = Place::new();
    let program = script(&place, "exec sleep 1000");
    let spec = ShimSpec { id: ID.parse().unwrap(), ..place.spec(VmmKind::Process, &program) };
    let running = Running::new(spec);
    let vmm = identity(running.handle.boot().await.unwrap());
    let pidfd = hearth_host::process::open(&vmm).unwrap();
    hearth_host::process::signal(std::os::fd::AsFd::as_fd(&pidfd), Signal::KILL).unwrap();
    let record = running.ended().await;
    assert_eq!(record.reason, ExitReason::Killed, "{record:?}");
    drop(inside);
}
