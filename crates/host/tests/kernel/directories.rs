//! Directories and mounts: what release must not touch.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use hearth_core::host::ErrorClass;
use hearth_core::resource::Resource;
use hearth_host::directory::Directories;
use hearth_host::mount::Mounts;
use hearth_host::test_support::in_private_namespaces;

use crate::{SOON, root_or_skip};

#[test]
fn ensure_makes_private_directories_and_repairs_the_mode() {
    let base = tempfile::tempdir().unwrap();
    let d = Directories::new(base.path().join("state"), base.path().join("run"));
    let path = base.path().join("run/sandboxes/abcabcabcabcabca");
    d.ensure(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    d.ensure(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(d.census().unwrap().ours[0].resource, Resource::Directory { path: path.clone() });
    // A symlink on the way is never followed, neither to make nor to remove.
    let outside = base.path().join("outside");
    fs::create_dir_all(outside.join("abcabcabcabcabca")).unwrap();
    d.release(&path, SOON).unwrap();
    fs::remove_dir(base.path().join("run/sandboxes")).unwrap();
    symlink(&outside, base.path().join("run/sandboxes")).unwrap();
    assert_eq!(d.ensure(&path).unwrap_err().class, ErrorClass::Foreign);
    assert_eq!(d.release(&path, SOON).unwrap_err().class, ErrorClass::Foreign);
    assert!(outside.join("abcabcabcabcabca").exists());
}

#[test]
fn release_refuses_what_is_not_below_our_directories() {
    let base = tempfile::tempdir().unwrap();
    let (state, run) = (base.path().join("state"), base.path().join("run"));
    let d = Directories::new(state.clone(), run.clone());
    fs::create_dir_all(base.path().join("runaway")).unwrap();
    let dotted = run.join("../runaway");
    let close = base.path().join("runaway");
    for path in [Path::new("/"), base.path(), &state, &run, &dotted, &close, Path::new("run/x")] {
        let error = d.release(path, SOON).unwrap_err();
        assert_eq!(error.class, ErrorClass::Refused, "{error}");
    }
    assert!(close.exists());
    d.release(&run.join("never/made"), SOON).unwrap();
}

#[test]
fn release_takes_sockets_fifos_and_dangling_links() {
    let base = tempfile::tempdir().unwrap();
    let d = Directories::new(base.path().join("s"), base.path().join("r"));
    let path = base.path().join("r/sandboxes/abc");
    d.ensure(&path.join("deep/er")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path.join("api.sock")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path.join("metrics.fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    symlink("/nowhere", path.join("deep/link")).unwrap();
    symlink("/", path.join("root")).unwrap();
    fs::write(path.join("read-only"), "").unwrap();
    fs::set_permissions(path.join("read-only"), fs::Permissions::from_mode(0o000)).unwrap();
    d.release(&path, SOON).unwrap();
    assert!(!path.exists());
}

#[test]
fn a_mount_inside_is_not_crossed_and_a_foreign_mount_is_not_ours() {
    if !root_or_skip("a_mount_inside_is_not_crossed_and_a_foreign_mount_is_not_ours") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    let base = base.path();
    in_private_namespaces(|| mounts_in_private(base)).unwrap();
}

fn mounts_in_private(base: &Path) {
    use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, unmount};
    let run = base.join("run");
    let d = Directories::new(base.join("state"), run.clone());
    let m = Mounts::new(&"a".parse().expect("name"), run.clone());
    let path = run.join("sandboxes/abc");
    let inside = path.join("mnt");
    // Ours.
    m.ensure(&inside).expect("mount");
    m.ensure(&inside).expect("mount again");
    fs::write(inside.join("kept"), "x").expect("write");
    assert_eq!(m.census().expect("census").ours.len(), 1);
    let error = d.release(&path, SOON).expect_err("removed a directory with a mount in it");
    assert_eq!(error.class, ErrorClass::Busy, "{error}");
    assert!(inside.join("kept").exists(), "the mount was crossed");
    // In use: never lazily.
    let open = fs::File::open(inside.join("kept")).expect("open");
    let error = m.release(&inside, std::time::Duration::from_millis(30)).expect_err("unmounted in use");
    assert_eq!(error.class, ErrorClass::Busy, "{error}");
    drop(open);
    m.release(&inside, SOON).expect("release");
    m.release(&inside, SOON).expect("release again");
    assert!(m.census().expect("census").ours.is_empty());
    // Foreign by source, and a bind mount of the same file system, which only the mount id gives away.
    fs::create_dir_all(&inside).expect("mkdir");
    mount("other", &inside, "tmpfs", MountFlags::empty(), None).expect("mount other");
    assert_eq!(m.ensure(&inside).expect_err("took a foreign mount").class, ErrorClass::Foreign);
    assert_eq!(m.release(&inside, SOON).expect_err("released a foreign mount").class, ErrorClass::Foreign);
    let census = m.census().expect("census");
    assert_eq!((census.ours.len(), census.foreign.len()), (0, 1));
    unmount(&inside, UnmountFlags::empty()).expect("umount other");
    let elsewhere = base.join("elsewhere");
    fs::create_dir(&elsewhere).expect("mkdir");
    fs::write(elsewhere.join("kept"), "x").expect("write");
    fs::create_dir_all(&inside).expect("mkdir");
    mount_bind(&elsewhere, &inside).expect("bind");
    let error = d.release(&path, SOON).expect_err("crossed a bind mount");
    assert_eq!(error.class, ErrorClass::Busy, "{error}");
    assert!(elsewhere.join("kept").exists(), "the bind mount was crossed");
    unmount(&inside, UnmountFlags::empty()).expect("umount");
    d.release(&path, SOON).expect("release");
    assert!(!path.exists());
    for refused in [Path::new("/mnt"), &run, &run.join("../x"), &base.join("state/x")] {
        assert_eq!(m.ensure(refused).expect_err("mounted outside").class, ErrorClass::Refused);
    }
}
