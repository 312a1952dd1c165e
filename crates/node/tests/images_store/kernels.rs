//! Kernels and their initramfs.

use hearth_core::id::KernelName;
use hearth_core::image::Kernel;
use hearth_node::images::template::Source;
use hearth_node::images::{ErrorClass, GuestProgram, ImageError, initramfs, kernel};

use crate::common::{Bench, bzimage, job, kernel_elf, module_elf};

fn name(s: &str) -> KernelName {
    s.parse().unwrap()
}

fn guest(bench: &Bench, contents: &str) -> GuestProgram {
    GuestProgram::new(bench.input(&format!("guest-{}", contents.len()), contents.as_bytes()))
}

#[test]
fn a_bzimage_with_modules_is_imported() {
    let bench = Bench::new();
    let elf = kernel_elf("6.9.0-b");
    let image = bench.input("vmlinuz", &bzimage(&elf, "6.9.0-b (me@there)"));
    let magic = "vermagic=6.9.0-b SMP";
    bench.input("m/6.9.0-b/kernel/virtio.ko", &module_elf(&["depends=", magic]));
    let packed = zstd::encode_all(&module_elf(&["depends=virtio", magic])[..], 1).unwrap();
    bench.input("m/6.9.0-b/kernel/virtio_blk.ko.zst", &packed);
    bench.input("m/6.9.0-b/modules.builtin", b"kernel/fs/ext4.ko\n");
    let done =
        kernel::import(&bench.store, &name("b"), &image, Some(&bench.path("m")), false, &job()).unwrap();
    assert_eq!(done.kernel.release, "6.9.0-b");
    assert_eq!(done.kernel.modules, ["virtio.ko", "virtio_blk.ko"]);
    assert!(done.notes.iter().any(|n| n.contains("overlay")), "{:?}", done.notes);
    assert!(std::fs::read(kernel::elf_path(&bench.store, &name("b"))).unwrap() == elf);
    assert_eq!(kernel::get(&bench.store, &name("b")).unwrap(), done.kernel);
    let names: Vec<_> =
        kernel::list(&bench.store).unwrap().found.into_iter().map(|k| k.name.to_string()).collect();
    assert_eq!(names, ["b", "default"]);
    let again = kernel::import(&bench.store, &name("b"), &image, None, false, &job());
    assert_eq!(again.unwrap_err().class(), ErrorClass::Exists);
    let forced = kernel::import(&bench.store, &name("b"), &image, None, true, &job()).unwrap();
    assert!(forced.kernel.modules.is_empty());
    kernel::remove(&bench.store, &name("b"), &job()).unwrap();
    assert!(matches!(kernel::get(&bench.store, &name("b")), Err(ImageError::NotFound { .. })));
    assert!(matches!(kernel::remove(&bench.store, &name("b"), &job()), Err(ImageError::NotFound { .. })));
}

#[test]
fn what_is_no_kernel_changes_nothing() {
    let bench = Bench::new();
    let before = bench.listing();
    let elf = kernel_elf("6.1.0-test");
    let image = bzimage(&elf, "6.1.0-test");
    let inputs = [
        bench.input("script", b"#!/bin/sh\n"),
        bench.input("empty", b""),
        bench.input("cut", &elf[..elf.len() - 1]),
        bench.input("cut-image", &image[..image.len() - 40]),
        bench.input("odd-payload", &bzimage(b"not an elf", "1")),
        bench.path("nowhere"),
        std::env::temp_dir(),
    ];
    for input in &inputs {
        let err = kernel::import(&bench.store, &name("x"), input, None, false, &job()).unwrap_err();
        let text = err.to_string();
        assert!(text.contains("is not a kernel: ") || matches!(err, ImageError::Io { .. }), "{text}");
        assert!(text.contains(input.to_str().unwrap()), "{text}");
    }
    let good = bench.input("vmlinuz", &image);
    bench.input("m/kernel/virtio_blk.ko", &module_elf(&["vermagic=5.0 x"]));
    for modules in [bench.path("m"), bench.path("nowhere"), bench.path("script")] {
        let err = kernel::import(&bench.store, &name("x"), &good, Some(&modules), false, &job()).unwrap_err();
        assert!(matches!(err, ImageError::Modules { .. }), "{err}");
    }
    assert_eq!(bench.listing(), before);
}

#[test]
fn a_kernel_stays_while_a_template_needs_it() {
    let bench = Bench::new();
    bench.create("t", Source::KernelOnly).unwrap();
    let err = kernel::remove(&bench.store, &name("default"), &job()).unwrap_err();
    assert_eq!(err.to_string(), "kernel \"default\" is in use by template t; remove that first");
    std::fs::write(bench.state("templates/t/template.json"), "{").unwrap();
    let err = kernel::remove(&bench.store, &name("default"), &job()).unwrap_err();
    assert!(err.to_string().contains("templates/t/template.json"), "{err}");
    assert!(bench.state("kernels/default").join(Kernel::ELF).exists());
}

#[test]
fn an_initramfs_is_made_once_per_guest_binary() {
    let bench = Bench::new();
    let image = bench.input("vmlinux", &kernel_elf("6.1.0-test"));
    bench.input("m/kernel/virtio_blk.ko", &module_elf(&["vermagic=6.1.0-test x"]));
    let k = name("k");
    kernel::import(&bench.store, &k, &image, Some(&bench.path("m")), false, &job()).unwrap();
    let first = initramfs::ensure(&bench.store, &k, &guest(&bench, "guest 1"), &job()).unwrap();
    let bytes = std::fs::read(&first).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    for part in
        ["init\0", "guest 1", "modules/order\0", "virtio_blk.ko\n", "modules/virtio_blk.ko\0", "newroot\0"]
    {
        assert!(text.contains(part), "{part:?} is missing");
    }
    let meta = std::fs::metadata(&first).unwrap();
    assert_eq!(initramfs::ensure(&bench.store, &k, &guest(&bench, "guest 1"), &job()).unwrap(), first);
    assert_eq!(std::fs::metadata(&first).unwrap().modified().unwrap(), meta.modified().unwrap());
    let second = initramfs::ensure(&bench.store, &k, &guest(&bench, "guest 2"), &job()).unwrap();
    assert!(first.exists() && first != second);
    let third = initramfs::ensure(&bench.store, &k, &guest(&bench, "guest 3"), &job()).unwrap();
    assert!(!first.exists() && second.exists() && third.exists());
    assert_eq!(std::fs::read_dir(bench.state("tmp")).unwrap().count(), 0);
    assert!(initramfs::ensure(&bench.store, &name("nope"), &guest(&bench, ""), &job()).is_err());
}

#[test]
fn many_at_once_make_one_initramfs() {
    let bench = Bench::new();
    let k = name("default");
    let guest = guest(&bench, "guest");
    std::thread::scope(|s| {
        let all: Vec<_> = (0..8)
            .map(|_| s.spawn(|| initramfs::ensure(&bench.store, &k, &guest, &job()).unwrap()))
            .collect();
        let paths: Vec<_> = all.into_iter().map(|t| t.join().unwrap()).collect();
        assert!(paths.iter().all(|p| p == &paths[0] && p.exists()));
    });
    assert_eq!(std::fs::read_dir(bench.state("tmp")).unwrap().count(), 0);
}
