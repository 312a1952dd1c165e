//! Leftovers made on purpose are there, and removing them leaves nothing; in namespaces of the test's own.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

use hearth_host::test_support::{in_private_namespaces, is_root};

/// Runs the chore; its stdout.
fn dirty_host(args: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("dirty-host").args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn ip(args: &[&str]) -> String {
    let out = Command::new("ip").args(args).output().unwrap();
    assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn rules() -> String {
    let out = Command::new("iptables-save").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    text.lines().filter(|l| l.starts_with("-A")).map(|l| format!("{l}\n")).collect()
}

fn namespaces() -> usize {
    fs::read_dir("/run/netns").unwrap().count()
}

fn cgroup(below: &str) -> std::path::PathBuf {
    hearth_host::cgroup::mount_point().unwrap().unwrap().join(below)
}

/// Processes in the cgroups below a directory.
fn processes(dir: &Path) -> usize {
    let cgroups = fs::read_dir(dir).map(|d| d.flatten().collect()).unwrap_or_else(|_| vec![]);
    let procs = cgroups.iter().filter_map(|c| fs::read_to_string(c.path().join("cgroup.procs")).ok());
    procs.map(|text| text.lines().count()).sum()
}

fn on_a_host(test: &str, f: impl FnOnce() + Send) {
    if !is_root() {
        hearth_testkit::skip(test, "needs root");
        return;
    }
    in_private_namespaces(|| {
        ip(&["link", "set", "lo", "up"]);
        f();
    })
    .unwrap();
}

#[test]
fn leftovers_of_hearth_are_made_and_removed() {
    on_a_host("leftovers_of_hearth_are_made_and_removed", || {
        let instance = format!("dh{}", std::process::id());
        let args = ["--slots", "20", "--rules", "--processes", "3", "--instance", &instance];
        dirty_host(&args);
        // Once more changes nothing.
        dirty_host(&args);
        let cgroups = cgroup("hearth").join(&instance);
        assert_eq!(namespaces(), 20);
        assert_eq!(ip(&["-o", "link"]).matches(": dty").count(), 20);
        assert!(ip(&["-n", &format!("hearth-{instance}-20"), "-o", "link"]).contains("tap0"));
        assert_eq!(processes(&cgroups), 3);
        let removed = dirty_host(&["--clean", "--instance", &instance]);
        assert!(removed.contains("20 namespaces") && removed.contains("3 cgroups"), "{removed}");
        assert_eq!(namespaces(), 0);
        assert_eq!(ip(&["-o", "link"]).lines().count(), 1);
        assert!(!cgroups.exists());
        assert!(!Path::new("/run/hearth-dirty").join(format!("hearth-{instance}")).exists());
        assert!(dirty_host(&["--clean", "--instance", &instance]).contains("nothing"));
    });
}

#[test]
fn leftovers_of_e2b_are_made_and_removed_and_nothing_else() {
    on_a_host("leftovers_of_e2b_are_made_and_removed_and_nothing_else", || {
        let instance = format!("de{}", std::process::id());
        let files = tempfile::tempdir().unwrap();
        let dir = files.path().display().to_string();
        ip(&["netns", "add", "ns-31"]);
        let foreign = Command::new("iptables")
            .args(["-A", "FORWARD", "-i", "veth-310", "-j", "DROP"])
            .status()
            .unwrap();
        assert!(foreign.success());
        let before = rules();
        let of = ["--layout", "e2b", "--instance", &instance];
        let what = ["--slots", "20", "--from", "11", "--rules", "--processes", "3", "--dir", &dir];
        dirty_host(&[&of[..], &what[..]].concat());
        dirty_host(&[&of[..], &what[..]].concat());
        assert_eq!(namespaces(), 21);
        assert_eq!(ip(&["-o", "link"]).matches(": veth-").count(), 20);
        let inside = ip(&["-n", "ns-30", "-o", "-4", "address"]);
        assert!(inside.contains("10.12.0.61/31") && inside.contains("169.254.0.22/30"), "{inside}");
        assert_eq!(rules().lines().count(), before.lines().count() + 6 * 20);
        assert_eq!(fs::read_dir(files.path()).unwrap().count(), 9);
        let names = fs::read_dir(cgroup("e2b"))
            .unwrap()
            .flatten()
            .filter(|c| c.file_name().to_string_lossy().starts_with(&format!("sbx-i{instance}x")));
        assert_eq!(names.count(), 3);
        let removed = dirty_host(&[&of[..], &["--clean"]].concat());
        assert!(removed.contains("20 namespaces") && removed.contains("120 rules"), "{removed}");
        assert_eq!(namespaces(), 1);
        assert_eq!(ip(&["-o", "link"]).lines().count(), 1);
        assert_eq!(rules(), before);
        assert_eq!(fs::read_dir(files.path()).unwrap().count(), 0);
        ip(&["netns", "del", "ns-31"]);
    });
}

#[test]
fn what_dirty_host_did_not_make_is_refused() {
    on_a_host("what_dirty_host_did_not_make_is_refused", || {
        ip(&["netns", "add", "ns-7"]);
        let out = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["dirty-host", "--layout", "e2b", "--slots", "10", "--instance"])
            .arg(format!("dr{}", std::process::id()))
            .output()
            .unwrap();
        assert!(!out.status.success());
        assert!(String::from_utf8_lossy(&out.stderr).contains("slot 7 "), "{out:?}");
        assert_eq!(namespaces(), 1);
        ip(&["netns", "del", "ns-7"]);
    });
}
