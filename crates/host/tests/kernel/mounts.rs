//! The mounts a VMM begins with: those of the host without the named network namespaces, and what is mounted later.

use std::fs;
use std::path::Path;

use hearth_core::host::{Host as _, SpawnSpec};
use hearth_core::resource::Resource;
use hearth_host::kernel_host::{HostConfig, KernelHost};
use hearth_host::process::wait;
use hearth_host::test_support::in_private_namespaces;
use rustix::mount::{MountFlags, MountPropagationFlags as Propagation, UnmountFlags};

use crate::{SOON, root_or_skip};

const CGROUP: &str = "mountnamespace01";

fn host(dir: &Path, suffix: &str) -> KernelHost {
    let host = KernelHost::new(HostConfig {
        layout: hearth_core::network::SlotLayout {
            instance: format!("t{}{suffix}", std::process::id()).parse().expect("instance"),
            veth_prefix: "hmn".parse().expect("prefix"),
            cidr: "10.213.2.0/24".parse().expect("cidr"),
        },
        state_dir: dir.join("state"),
        run_dir: dir.join("run"),
    });
    let host = host.expect("host");
    host.ensure(&Resource::Cgroup { name: CGROUP.into() }).expect("cgroup");
    host
}

/// What a shell script prints that runs as a shim would.
fn says(host: &KernelHost, dir: &Path, script: &str) -> String {
    let log = dir.join("log");
    fs::write(&log, "").expect("log");
    let child = host
        .spawn(&SpawnSpec {
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            env: vec![("PATH".into(), "/usr/sbin:/usr/bin:/sbin:/bin".into())],
            cgroup: CGROUP.into(),
            log: log.clone(),
        })
        .expect("spawn");
    use std::os::fd::AsFd as _;
    wait(child.pidfd.as_fd(), SOON).expect("wait").expect("an end");
    fs::read_to_string(log).expect("log")
}

fn mount(on: &Path) {
    fs::create_dir_all(on).expect("mkdir");
    rustix::mount::mount("hearth-test", on, "tmpfs", MountFlags::empty(), None).expect("mount");
}

const INSIDE: &str =
    "nsenter --mount=/proc/self/fd/3 -- sh -c 'cut -d\" \" -f5 /proc/self/mountinfo; touch later/seen'";

#[test]
fn a_vmm_begins_without_the_named_namespaces_and_sees_later_mounts() {
    if !root_or_skip("a_vmm_begins_without_the_named_namespaces_and_sees_later_mounts") {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path();
    in_private_namespaces(|| {
        mount(Path::new("/run/netns/a"));
        let host = host(dir, "mnta");
        host.prepare_spawn();
        mount(Path::new("/run/netns/b"));
        let later = dir.join("later");
        mount(&later);
        assert_eq!(says(&host, dir, "echo $HEARTH_MOUNTS"), "3\n");
        let script = INSIDE.replace("later/", &format!("{}/", later.display()));
        let text = says(&host, dir, &script);
        let points: Vec<&str> = text.lines().collect();
        assert!(points.contains(&"/") && points.contains(&later.to_str().expect("text")), "{text}");
        assert!(!text.contains("/run/netns"), "{text}");
        assert!(later.join("seen").exists(), "another file system shows inside");
        // What is unmounted goes there as well, or it would be busy for ever.
        rustix::mount::unmount(&later, UnmountFlags::empty()).expect("unmount");
        let text = says(&host, dir, &script);
        assert!(!text.contains("later"), "{text}");
        host.release(&Resource::Cgroup { name: CGROUP.into() }, SOON).expect("cgroup");
        host.remove_instance(SOON).expect("remove the instance");
    })
    .unwrap();
}

#[test]
fn where_later_mounts_would_not_show_a_vmm_copies_all() {
    if !root_or_skip("where_later_mounts_would_not_show_a_vmm_copies_all") {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    in_private_namespaces(|| {
        rustix::mount::mount_change("/", Propagation::PRIVATE | Propagation::REC).expect("private");
        let host = host(tmp.path(), "mntb");
        host.prepare_spawn();
        assert_eq!(says(&host, tmp.path(), "echo $HEARTH_MOUNTS; ls /proc/self/fd"), "\n0\n1\n2\n3\n");
        host.release(&Resource::Cgroup { name: CGROUP.into() }, SOON).expect("cgroup");
        host.remove_instance(SOON).expect("remove the instance");
    })
    .unwrap();
}
