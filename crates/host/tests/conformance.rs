//! One suite, two hosts: the fake always, the kernel as root, in network and mount namespaces of its own.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hearth_core::host::Host;
use hearth_core::network::SlotLayout;
use hearth_core::resource::{Kind, Resource};
use hearth_host::kernel_host::{HostConfig, KernelHost};
use hearth_host::test_support::{in_private_namespaces, is_root};
use hearth_testkit::FakeHost;
use hearth_testkit::clean_slate::{Inventory, Scope};
use hearth_testkit::conformance::{Planted, Subject, run};

fn layout(instance: &str, veth_prefix: &str) -> SlotLayout {
    SlotLayout {
        instance: instance.parse().expect("instance"),
        veth_prefix: veth_prefix.parse().expect("prefix"),
        cidr: "10.213.0.0/24".parse().expect("cidr"),
    }
}

#[test]
fn the_fake_host_conforms() {
    let dir = tempfile::tempdir().unwrap();
    let (state_dir, run_dir) = (dir.path().join("state/a"), dir.path().join("run/a"));
    let host = FakeHost::new(layout("a", "hth"), state_dir.clone(), run_dir.clone());
    let subject = Subject {
        host: &host,
        state_dir: &state_dir,
        run_dir: &run_dir,
        slots: 1..=2,
        skip: &[],
        plant: None,
    };
    assert_eq!(run(&subject).len(), Kind::ALL.len() - 1);
    assert_eq!(host.leftovers(), []);
}

#[test]
fn the_kernel_conforms_and_nothing_is_left() {
    if !is_root() {
        hearth_testkit::skip("the_kernel_conforms_and_nothing_is_left", "needs root");
        return;
    }
    let instance = format!("t{}", std::process::id());
    let dir = tempfile::tempdir().unwrap();
    let scope = Scope { dirs: vec![dir.path().to_owned()], ..Scope::instance(&instance, "hct") };
    let before = Inventory::take(&scope).unwrap();
    in_private_namespaces(|| {
        let outer = Inventory::take(&scope).expect("inventory");
        kernel_in_private(&instance, dir.path());
        let diff = outer.diff(&Inventory::take(&scope).expect("inventory"));
        assert!(diff.appeared.iter().all(|l| l.starts_with("file ")), "inside: {diff}");
    })
    .unwrap();
    let left = before.diff(&Inventory::take(&scope).unwrap());
    // The directories that hold the instance, empty: the host makes and keeps them.
    for line in &left.appeared {
        let path = line.strip_prefix("file ").map(Path::new);
        assert!(path.is_some_and(Path::is_dir), "left behind: {left}");
    }
    assert!(left.vanished.is_empty(), "{left}");
}

#[test]
fn a_broken_release_of_the_host_firewall_is_named() {
    if !is_root() {
        hearth_testkit::skip("a_broken_release_of_the_host_firewall_is_named", "needs root");
        return;
    }
    let instance = format!("t{}fw", std::process::id());
    let dir = tempfile::tempdir().unwrap();
    let scope = Scope::instance(&instance, "hcf");
    in_private_namespaces(|| {
        let host = KernelHost::new(HostConfig {
            layout: layout(&instance, "hcf"),
            state_dir: dir.path().join("state"),
            run_dir: dir.path().join("run"),
        });
        let host = host.expect("kernel host");
        let before = Inventory::take(&scope).expect("inventory");
        host.ensure(&Resource::HostFirewall).expect("host firewall");
        // The end of the instance, its release left out.
        let left = before.diff(&Inventory::take(&scope).expect("inventory"));
        assert_eq!(left.appeared, [format!("nft table inet hearth-{instance}")], "{left}");
        host.remove_instance(Duration::from_secs(20)).expect("remove the instance");
        let left = before.diff(&Inventory::take(&scope).expect("inventory"));
        assert!(left.is_empty(), "{left}");
    })
    .unwrap();
}

fn kernel_in_private(instance: &str, base: &Path) {
    let config = HostConfig {
        layout: layout(instance, "hct"),
        state_dir: base.join("state").join(instance),
        run_dir: base.join("run").join(instance),
    };
    let host = KernelHost::new(config.clone()).expect("kernel host");
    let plant = |kind| plant(kind, &config, host.cgroups().root());
    let subject = Subject {
        host: &host,
        state_dir: &config.state_dir,
        run_dir: &config.run_dir,
        slots: 1..=2,
        skip: &[],
        plant: Some(&plant),
    };
    assert_eq!(run(&subject).len(), Kind::ALL.len() - 1);
    fill(&host);
    host.remove_instance(Duration::from_secs(20)).expect("remove the instance");
    assert!(!config.run_dir.exists(), "the run directory is left");
    assert!(!host.cgroups().root().exists(), "the cgroup is left");
}

/// Makes what belongs to the instance itself, so that `remove_instance` has something to remove.
fn fill(host: &KernelHost) {
    host.ensure(&Resource::HostFirewall).expect("host firewall");
    let cgroup = Resource::Cgroup { name: "conformance99999".into() };
    host.ensure(&cgroup).expect("cgroup");
    host.release(&cgroup, Duration::from_secs(5)).expect("cgroup");
}

/// Look-alikes: a name of another instance that begins like ours, or our place with the wrong grammar.
fn plant(kind: Kind, config: &HostConfig, cgroups: &Path) -> Option<Planted> {
    let instance = config.layout.instance.as_str();
    match kind {
        Kind::Netns => {
            let name = format!("hearth-{instance}-x-1");
            ip(&["netns", "add", &name]);
            let path = Path::new("/run/netns").join(&name);
            let gone = name.clone();
            Some(Planted {
                what: name,
                untouched: Box::new(move || path.exists()),
                remove: Box::new(move || ip(&["netns", "del", &gone])),
            })
        }
        Kind::Veth => {
            ip(&["link", "add", "hct07", "type", "veth", "peer", "name", "hctp07"]);
            Some(Planted {
                what: "hct07".into(),
                untouched: Box::new(|| {
                    fs::read_to_string("/proc/thread-self/net/dev").is_ok_and(|t| t.contains("hct07:"))
                }),
                remove: Box::new(|| ip(&["link", "del", "hct07"])),
            })
        }
        Kind::Directory => Some(planted_directory(config.run_dir.join("sandboxes/Not-An-Id"))),
        Kind::Cgroup => Some(planted_directory(cgroups.join("Not-An-Id"))),
        _ => None,
    }
}

fn planted_directory(path: std::path::PathBuf) -> Planted {
    fs::create_dir_all(&path).expect("plant a directory");
    let (seen, gone) = (path.clone(), path.clone());
    Planted {
        what: path.display().to_string(),
        untouched: Box::new(move || seen.is_dir()),
        remove: Box::new(move || fs::remove_dir(gone).expect("take the planted directory away")),
    }
}

fn ip(args: &[&str]) {
    let status = Command::new("ip").args(args).status().expect("run ip");
    assert!(status.success(), "ip {args:?}: {status}");
}
