//! Templates from every source, looked at with debugfs and e2fsck.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use hearth_core::block::RemoteDisk;
use hearth_core::image::Template;
use hearth_node::images::template::{Options, Source, TarInput};
use hearth_node::images::{ErrorClass, disk, template};

use crate::common::{Bench, assert_sound, debugfs, docker_like_tar, job, skip, tar_file};

fn looks_like_docker(bench: &Bench, name: &str) {
    let image = bench.rootfs(name);
    assert_sound(&image);
    let stat = |path: &str| debugfs(&image, &format!("stat {path}"));
    let (tool, other) = (stat("/bin/tool"), stat("/bin/other"));
    assert!(tool.contains("Mode:  04755") && tool.contains("Links: 2"), "{tool}");
    assert_eq!(tool, other);
    let null = stat("/dev/null");
    assert!(null.contains("Type: character special") && null.contains("Mode:  0666"), "{null}");
    assert!(null.contains("01:03"), "{null}");
    let owned = stat("/etc/owned");
    assert!(owned.contains("User:  1234   Group:  1235") && owned.contains("Mode:  0640"), "{owned}");
    assert!(stat("/etc/editor").contains("Fast link dest: \"/usr/bin/vi\""));
    let xattrs = debugfs(&image, "ea_list /bin/ping");
    assert!(xattrs.contains("security.capability (20)"), "{xattrs}");
    assert!(xattrs.contains("user.note (13)"), "{xattrs}");
    assert_eq!(debugfs(&image, "cat /etc/owned"), "me");
    let root = stat("/");
    assert!(root.contains("Mode:  0755") && root.contains("User:     0"), "{root}");
}

#[test]
fn a_docker_tar_keeps_links_owners_devices_and_attributes() {
    if skip("a_docker_tar_keeps_links_owners_devices_and_attributes", &["mke2fs", "tar", "debugfs", "e2fsck"])
    {
        return;
    }
    let bench = Bench::new();
    let plain = docker_like_tar();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&plain).unwrap();
    let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
    xz.write_all(&plain).unwrap();
    let forms = [
        ("gz", gz.finish().unwrap()),
        ("xz", xz.finish().unwrap()),
        ("zst", zstd::encode_all(&plain[..], 1).unwrap()),
        ("plain", plain.clone()),
    ];
    for (name, data) in forms {
        let path = bench.input(&format!("{name}.tar"), &data);
        let made = bench.create(name, tar_file(&path)).unwrap();
        assert!(made.rootfs && made.source.ends_with(".tar"));
        looks_like_docker(&bench, name);
    }
    let reader = TarInput::Reader { reader: Box::new(&plain[..]), label: "stdin".into() };
    assert_eq!(bench.create("stream", Source::Tar(reader)).unwrap().source, "tar stdin");
    looks_like_docker(&bench, "stream");
    assert_eq!(std::fs::read_dir(bench.state("tmp")).unwrap().count(), 0);
    let names: Vec<_> =
        template::list(&bench.store).unwrap().found.iter().map(|t| t.name.to_string()).collect();
    assert_eq!(names, ["gz", "plain", "stream", "xz", "zst"]);
}

#[test]
fn a_directory_becomes_a_small_image() {
    if skip("a_directory_becomes_a_small_image", &["mke2fs", "debugfs", "e2fsck"]) {
        return;
    }
    let bench = Bench::new();
    let file = bench.input("root/bin/sh", &vec![7; 3 << 20]);
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&file, Some(7), Some(8)).unwrap();
    std::fs::hard_link(&file, bench.path("root/bin/bash")).unwrap();
    std::os::unix::fs::symlink("bin/sh", bench.path("root/init")).unwrap();
    let made = bench.create("dir", Source::Directory(bench.path("root"))).unwrap();
    let image = bench.rootfs("dir");
    assert_sound(&image);
    assert_eq!(std::fs::metadata(&image).unwrap().len(), made.rootfs_bytes);
    assert!((19 << 20..24 << 20).contains(&made.rootfs_bytes), "{} bytes", made.rootfs_bytes);
    let sh = debugfs(&image, "stat /bin/sh");
    assert!(sh.contains("User:     7   Group:     8") && sh.contains("Links: 2"), "{sh}");
    assert!(debugfs(&image, "stat /init").contains("Fast link dest: \"bin/sh\""));
    let features = debugfs(&image, "features");
    assert!(features.contains("extent") && !features.contains("has_journal"), "{features}");
    let wide = Options { size_mib: Some(64), ..Options::default() };
    let made = bench.create_with("wide", Source::Directory(bench.path("root")), &wide).unwrap();
    assert_eq!(made.rootfs_bytes, 64 << 20);
    // The image of one template is the source of another.
    let copied = bench.create("copy", Source::Image(image.clone())).unwrap();
    assert_eq!(copied.rootfs_bytes, std::fs::metadata(&image).unwrap().len());
    assert!(std::fs::read(bench.rootfs("copy")).unwrap() == std::fs::read(&image).unwrap());
}

#[test]
fn a_remote_root_disk_stays_where_it_is() {
    let bench = Bench::new();
    let disk = RemoteDisk { url: "http://h/d".into(), bytes: 1 << 30, mark: "\"v1\"".into() };
    let made = bench.create("far", Source::Remote(disk.clone())).unwrap();
    assert!(made.rootfs && made.rootfs_bytes == 1 << 30 && !bench.rootfs("far").exists());
    assert_eq!(
        (made.schema, &made.remote, &*made.source),
        (Template::SCHEMA, &Some(disk.clone()), "http://h/d")
    );
    assert_eq!(template::get(&bench.store, &made.name).unwrap(), made);
    let wide = Options { size_mib: Some(64), ..Options::default() };
    let err = bench.create_with("wide", Source::Remote(disk), &wide).unwrap_err();
    assert!(err.to_string().contains("resize2fs"), "{err}");
}

#[test]
fn a_kernel_alone_is_a_template() {
    let bench = Bench::new();
    let made = bench.create("flat", Source::KernelOnly).unwrap();
    assert!(!made.rootfs && made.rootfs_bytes == 0 && made.kernel.as_str() == "default");
    assert_eq!(template::get(&bench.store, &made.name).unwrap(), made);
    assert!(!bench.rootfs("flat").exists());
    assert_eq!(Template::SCHEMA_LOCAL, made.schema);
    let mut other = Options { kernel: Some("nope".parse().unwrap()), ..Options::default() };
    let err = bench.create_with("x", Source::KernelOnly, &other).unwrap_err();
    assert_eq!(err.class(), ErrorClass::NotFound);
    other = Options { force: true, ..Options::default() };
    let again = bench.create_with("flat", Source::KernelOnly, &other).unwrap();
    assert!(again.created_at_ms >= made.created_at_ms);
}

#[test]
fn a_disk_is_sparse_writable_and_quick() {
    if skip("a_disk_is_sparse_writable_and_quick", &["mke2fs", "e2fsck"]) {
        return;
    }
    use std::os::unix::fs::MetadataExt;
    let bench = Bench::new();
    let path = bench.path("disk.ext4");
    let mut best = std::time::Duration::MAX;
    for size in [16, 512, 4096] {
        let made = disk::create(&path, size, &job()).unwrap();
        best = best.min(made.took);
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!(meta.len(), size << 20);
        assert!(meta.blocks() * 512 < 16 << 20, "{} bytes on disk", meta.blocks() * 512);
        assert_sound(&path);
    }
    println!("best of three disks: {best:?}");
    assert!(disk::create(&path, u64::MAX, &job()).is_err());
    assert!(disk::create(&bench.path("no/where/disk"), 16, &job()).is_err());
}

#[test]
fn a_blank_disk_is_made_once_per_size_and_outlives_its_name() {
    if skip("a_blank_disk_is_made_once_per_size_and_outlives_its_name", &["mke2fs", "e2fsck"]) {
        return;
    }
    let bench = Bench::new();
    let state = bench.path("state");
    let dir = state.join("blanks");
    let blanks = disk::Blanks::new(&state, "one");
    let first = blanks.get(16, &job()).unwrap();
    assert!(disk::room(16) > 16 << 20 && disk::room(u64::MAX) == u64::MAX);
    assert!(std::sync::Arc::ptr_eq(&first, &blanks.get(16, &job()).unwrap()), "made twice");
    assert_eq!(blanks.get(32, &job()).unwrap().file.metadata().unwrap().len(), 32 << 20);
    // Another daemon takes the same.
    let inode = |path: &std::path::Path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    let path = bench.path("linked.ext4");
    assert!(disk::Blanks::new(&state, "two").get(16, &job()).unwrap().link(&path));
    assert_eq!(inode(&path), inode(&first.path));
    for size in 33..80 {
        blanks.get(size, &job()).unwrap();
    }
    assert!(std::fs::read_dir(&dir).unwrap().count() <= 16);
    assert!(!first.path.exists());
    assert_sound(&path);
    assert!(!first.link(&bench.path("again.ext4")), "its name is gone");
    assert!(blanks.get(u64::MAX, &job()).is_err());
    // Killed while one was made.
    std::fs::write(dir.join(".one.new"), "half").unwrap();
    blanks.sweep().unwrap();
    assert!(!dir.join(".one.new").exists());
    blanks.sweep().unwrap();
}
