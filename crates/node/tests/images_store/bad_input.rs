//! Bad input: a clear error that names the object, and a store that is as it was.

use hearth_node::images::template::{Options, Source, TarInput};
use hearth_node::images::{ErrorClass, ImageError};
use tar::EntryType;

use crate::common::{Bench, docker_like_tar, skip, tar_file, tar_header};

fn one_entry(kind: EntryType, name: &str, link: &str) -> Vec<u8> {
    let mut h = tar_header(kind, name, 0);
    h.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    h.set_cksum();
    let mut out = h.as_bytes().to_vec();
    out.extend_from_slice(&[0; 1024]);
    out
}

#[test]
fn bad_archives_leave_nothing() {
    if skip("bad_archives_leave_nothing", &["mke2fs", "tar"]) {
        return;
    }
    let bench = Bench::new();
    let before = bench.listing();
    let good = docker_like_tar();
    let mut through = one_entry(EntryType::Symlink, "d", "/etc");
    through.truncate(512);
    through.extend(one_entry(EntryType::Regular, "d/passwd", ""));
    let packed = zstd::encode_all(&good[..], 1).unwrap();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("truncated", good[..1300].to_vec(), "truncated at entry \"bin/tool\""),
        ("no-end", good[..good.len() - 1024].to_vec(), "truncated at entry \"bin/ping\""),
        ("cut-zst", packed[..packed.len() / 2].to_vec(), "tar archive"),
        ("absolute", one_entry(EntryType::Regular, "/etc/x", ""), "entry \"/etc/x\": its name is absolute"),
        ("dots", one_entry(EntryType::Regular, "a/../../x", ""), "entry \"a/../../x\": its name has '..'"),
        ("hard-abs", one_entry(EntryType::Link, "x", "/etc/shadow"), "hard link to \"/etc/shadow\""),
        ("hard-dots", one_entry(EntryType::Link, "x", "../../etc/shadow"), "hard link to"),
        ("through", through, "entry \"d/passwd\": its path goes through \"d\""),
        ("text", b"hello".repeat(400), "not a tar archive"),
        ("empty", Vec::new(), "truncated"),
    ];
    for (name, data, why) in &cases {
        let path = bench.input(name, data);
        let file = bench.create("t", tar_file(&path)).unwrap_err();
        let input = TarInput::Reader { reader: Box::new(&data[..]), label: name.to_string() };
        let stream = bench.create("t", Source::Tar(input)).unwrap_err();
        for err in [file, stream] {
            assert_eq!(err.class(), ErrorClass::Invalid, "{err}");
            let text = err.to_string();
            assert!(text.contains(why) && text.contains(name), "{name}: {text}");
        }
        assert_eq!(bench.listing(), before, "{name}");
    }
    // A reader that fails is the archive's fault, not a panic.
    struct Broken;
    impl std::io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the client went away"))
        }
    }
    let input = TarInput::Reader { reader: Box::new(Broken), label: "upload".into() };
    let err = bench.create("t", Source::Tar(input)).unwrap_err();
    assert!(err.to_string().contains("upload") && err.to_string().contains("went away"), "{err}");
    assert_eq!(bench.listing(), before);
}

#[test]
fn bad_sources_leave_nothing() {
    if skip("bad_sources_leave_nothing", &["mke2fs"]) {
        return;
    }
    let bench = Bench::new();
    let text = bench.input("text", b"hello");
    let zeros = bench.input("zeros", &[0; 8192]);
    let disk = bench.path("disk");
    hearth_node::images::disk::create(&disk, 16, &crate::common::job()).unwrap();
    let mut dirty = std::fs::read(&disk).unwrap();
    let cut = bench.input("cut.ext4", &dirty[..8 << 20]);
    dirty[1024 + 0x3a] = 0;
    let dirty = bench.input("dirty.ext4", &dirty);
    bench.input("root/file", &vec![1; (6 << 20) - 3 * 4096]);
    let before = bench.listing();
    let debian =
        |suite: &str, package: &str| Source::Debian { suite: suite.into(), include: vec![package.into()] };
    let cases = [
        (Source::Image(text.clone()), "not ext4"),
        (Source::Image(zeros.clone()), "not ext4"),
        (Source::Image(bench.path("root")), "not ext4"),
        (Source::Image(cut), "truncated"),
        (Source::Image(dirty), "e2fsck -fy"),
        (Source::Image(bench.path("nowhere")), "nowhere"),
        (Source::Directory(text), "not a directory"),
        (Source::Directory(bench.path("nowhere")), "nowhere"),
        (Source::Directory(bench.store.state_dir().parent().unwrap().to_owned()), "hearth's own state"),
        (tar_file(&bench.path("nowhere")), "nowhere"),
        (tar_file(&bench.path("root")), "not a file"),
        (debian("--help", "x"), "not the name of a suite"),
        (debian("bookworm", "-o"), "not the name of a package"),
    ];
    for (source, why) in cases {
        let words = format!("{source:?}");
        let err = bench.create("t", source).unwrap_err();
        assert!(err.to_string().contains(why), "{words}: {err}");
        assert_eq!(bench.listing(), before, "{words}");
    }
    let small = Options { size_mib: Some(2), ..Options::default() };
    let err = bench.create_with("t", Source::Directory(bench.path("root")), &small).unwrap_err();
    assert!(err.to_string().contains("2 MiB cannot hold 6 MiB"), "{err}");
    // Enough for the data, not for the rest: mke2fs itself says no.
    let tight = Options { size_mib: Some(6), ..Options::default() };
    let err = bench.create_with("t", Source::Directory(bench.path("root")), &tight).unwrap_err();
    assert!(err.to_string().contains("mke2fs failed"), "{err}");
    let small = Options { size_mib: Some(u64::MAX), ..Options::default() };
    assert!(bench.create_with("t", Source::Directory(bench.path("root")), &small).is_err());
    assert_eq!(bench.listing(), before);
}

#[test]
fn without_a_kernel_no_template() {
    let dir = tempfile::tempdir().unwrap();
    let store = hearth_node::images::Store::open(dir.path()).unwrap();
    let make = |options: &Options| {
        let name = "t".parse().unwrap();
        let job = crate::common::job();
        hearth_node::images::template::create(&store, &name, Source::KernelOnly, options, &job)
    };
    let err = make(&Options::default()).unwrap_err();
    assert_eq!(err.to_string(), "kernel: there is none yet; import one with `hearth kernel import`");
    let elf = dir.path().join("vmlinux");
    std::fs::write(&elf, crate::common::kernel_elf("1.2")).unwrap();
    for name in ["a", "b"] {
        let name = name.parse().unwrap();
        hearth_node::images::kernel::import(&store, &name, &elf, None, false, &crate::common::job()).unwrap();
    }
    let err = make(&Options::default()).unwrap_err();
    assert!(err.to_string().contains("several (a, b)"), "{err}");
    assert!(matches!(err, ImageError::Option { field: "kernel", .. }));
    let made = make(&Options { kernel: Some("b".parse().unwrap()), ..Options::default() }).unwrap();
    assert_eq!(made.kernel.as_str(), "b");
}
