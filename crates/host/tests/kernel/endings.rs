//! A child that ends while it is looked at: it has left its cgroup and cannot be waited for yet.

use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;

use hearth_core::host::{ErrorClass, Host as _, SpawnSpec};
use hearth_core::process::ProcessIdentity;
use hearth_core::resource::Resource;
use hearth_host::kernel_host::{HostConfig, KernelHost};
use hearth_host::process::{Signal, signal, wait};

use crate::{SOON, root_or_skip};

const CGROUP: &str = "endingchild00001";

/// Starts it in its cgroup and takes it out again, as the kernel does with one that ends.
fn child(host: &KernelHost, dir: &Path, script: &str) -> hearth_core::host::Spawned {
    let spec = SpawnSpec {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("PATH".into(), "/usr/bin:/bin".into())],
        cgroup: CGROUP.into(),
        log: dir.join("log"),
    };
    let child = host.spawn(&spec).expect("spawn");
    let root = host.cgroups().root().ancestors().nth(2).expect("the mount of cgroup2");
    fs::write(root.join("cgroup.procs"), child.identity.pid.to_string()).expect("leave the cgroup");
    child
}

fn there(process: &ProcessIdentity) -> bool {
    Path::new(&format!("/proc/{}", process.pid)).exists()
}

#[test]
fn a_child_that_left_its_cgroup_to_end_is_reaped_and_one_that_lives_is_told() {
    if !root_or_skip("a_child_that_left_its_cgroup_to_end_is_reaped_and_one_that_lives_is_told") {
        return;
    }
    let instance = format!("t{}end", std::process::id());
    let dir = tempfile::tempdir().unwrap();
    let host = KernelHost::new(HostConfig {
        layout: hearth_core::network::SlotLayout {
            instance: instance.parse().unwrap(),
            veth_prefix: "hen".parse().unwrap(),
            cidr: "10.213.1.0/24".parse().unwrap(),
        },
        state_dir: dir.path().join("state"),
        run_dir: dir.path().join("run"),
    })
    .unwrap();
    let cgroup = Resource::Cgroup { name: CGROUP.into() };
    host.ensure(&cgroup).unwrap();

    let ending = child(&host, dir.path(), "sleep 0.3");
    host.release(&Resource::Process { process: ending.identity.clone() }, SOON).unwrap();
    assert!(!there(&ending.identity), "a zombie is left");

    let living = child(&host, dir.path(), "exec sleep 60");
    let left = host.release(&Resource::Process { process: living.identity.clone() }, SOON).unwrap_err();
    assert_eq!(left.class, ErrorClass::Deadline, "a process that lives is not gone: {left}");
    assert!(there(&living.identity), "what is in no cgroup of ours was killed");
    signal(living.pidfd.as_fd(), Signal::KILL).unwrap();
    wait(living.pidfd.as_fd(), SOON).unwrap();

    host.release(&cgroup, SOON).unwrap();
    host.cgroups().remove_root().unwrap();
}
