//! Use, removal, replacement, cancellation and crashes.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hearth_core::id::TemplateName;
use hearth_node::images::template::{Options, Source};
use hearth_node::images::{ErrorClass, ImageError, Job, Progress, kernel, template};

use crate::common::{Bench, docker_like_tar, job, record, skip, tar_file};

fn name(s: &str) -> TemplateName {
    s.parse().unwrap()
}

fn force() -> Options {
    Options { force: true, ..Options::default() }
}

#[test]
fn a_template_in_use_is_neither_removed_nor_replaced() {
    let bench = Bench::new();
    bench.create("t", Source::KernelOnly).unwrap();
    bench.create("free", Source::KernelOnly).unwrap();
    let path = record(&bench, "prod", "t");
    let before = bench.listing();
    let both = || {
        let removed = template::remove(&bench.store, &name("t"), &job()).unwrap_err();
        let replaced = bench.create_with("t", Source::KernelOnly, &force()).unwrap_err();
        assert_eq!(bench.listing(), before);
        assert_eq!(removed.class(), ErrorClass::Busy);
        assert_eq!(removed.to_string(), replaced.to_string());
        removed.to_string()
    };
    assert!(both().contains("in use by sandbox web (abcdefghijkmnpqr)"));
    // A record of another template does not matter, one that cannot be read does.
    template::remove(&bench.store, &name("free"), &job()).unwrap();
    bench.create("free", Source::KernelOnly).unwrap();
    std::fs::write(&path, "{\"id\": ").unwrap();
    let err = template::remove(&bench.store, &name("t"), &job()).unwrap_err();
    assert!(err.to_string().contains(path.to_str().unwrap()), "{err}");
    // A sandbox directory without a record is one that is going or coming.
    std::fs::remove_file(&path).unwrap();
    template::remove(&bench.store, &name("t"), &job()).unwrap();
    let err = template::remove(&bench.store, &name("t"), &job()).unwrap_err();
    assert_eq!(err.class(), ErrorClass::NotFound);
    assert!(matches!(template::hold(&bench.store, &name("t")), Err(ImageError::NotFound { .. })));
}

#[test]
fn a_held_template_and_its_kernel_stay() {
    let bench = Bench::new();
    bench.create("t", Source::KernelOnly).unwrap();
    let hold = template::hold(&bench.store, &name("t")).unwrap();
    let second = template::hold(&bench.store, &name("t")).unwrap();
    assert_eq!(hold.template, second.template);
    assert_eq!(hold.kernel.release, "6.1.0-test");
    drop(second);
    let err = template::remove(&bench.store, &name("t"), &job()).unwrap_err();
    assert!(matches!(err, ImageError::InUse { .. }), "{err}");
    let vmlinux = bench.path("vmlinux");
    let kernel_name = "default".parse().unwrap();
    let err = kernel::import(&bench.store, &kernel_name, &vmlinux, None, true, &job()).unwrap_err();
    assert!(matches!(err, ImageError::InUse { .. }), "{err}");
    drop(hold);
    kernel::import(&bench.store, &kernel_name, &vmlinux, None, true, &job()).unwrap();
    template::remove(&bench.store, &name("t"), &job()).unwrap();
}

#[test]
fn replacing_under_readers_never_shows_a_gap() {
    let bench = Bench::new();
    bench.create("t", Source::KernelOnly).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let mut holds = 0;
            while !done.load(Ordering::Relaxed) {
                template::hold(&bench.store, &name("t")).unwrap();
                holds += 1;
                // Leaves the writer a moment to get its exclusive lock.
                std::thread::sleep(Duration::from_millis(2));
            }
            holds
        });
        let mut replaced = 0;
        let end = Instant::now() + Duration::from_secs(20);
        while replaced < 20 && Instant::now() < end {
            replaced += usize::from(bench.create_with("t", Source::KernelOnly, &force()).is_ok());
        }
        done.store(true, Ordering::Relaxed);
        assert!(reader.join().unwrap() > 0);
        assert!(replaced > 0);
    });
}

#[test]
fn a_second_builder_is_told_to_wait() {
    let bench = Bench::new();
    let dir = bench.state("tmp/template.t");
    std::fs::create_dir(&dir).unwrap();
    let lock = std::fs::File::open(&dir).unwrap();
    lock.lock().unwrap();
    std::fs::write(dir.join("half"), "x").unwrap();
    let err = bench.create("t", Source::KernelOnly).unwrap_err();
    assert_eq!(err.class(), ErrorClass::Busy);
    assert!(dir.join("half").exists(), "the other builder's files were touched");
    // Another name is free.
    bench.create("u", Source::KernelOnly).unwrap();
    assert!(dir.join("half").exists());
    drop(lock);
    bench.create("t", Source::KernelOnly).unwrap();
    assert!(!dir.exists());
}

#[test]
fn a_child_that_outlives_its_builder_keeps_the_area() {
    let bench = Bench::new();
    let dir = bench.state("tmp/template.t");
    std::fs::create_dir(&dir).unwrap();
    let lock = std::fs::File::create(dir.join("lock")).unwrap();
    lock.lock().unwrap();
    let mut child = std::process::Command::new("sleep").arg("60").stdin(lock).spawn().unwrap();
    let err = bench.create("t", Source::KernelOnly).unwrap_err();
    assert_eq!(err.class(), ErrorClass::Busy);
    child.kill().unwrap();
    child.wait().unwrap();
    bench.create("t", Source::KernelOnly).unwrap();
    assert!(!dir.exists());
}

#[test]
fn what_a_crash_left_is_swept_by_any_later_build() {
    let bench = Bench::new();
    bench.create("t", Source::KernelOnly).unwrap();
    bench.create("gone", Source::KernelOnly).unwrap();
    let tmp = bench.state("tmp");
    std::fs::create_dir_all(tmp.join("template.half/root/bin")).unwrap();
    // Died between the two renames of a replacement: the old one comes back.
    std::fs::create_dir(tmp.join("template.t")).unwrap();
    std::fs::rename(bench.state("templates/t"), tmp.join("template.t/replaced")).unwrap();
    // Died inside a removal: it does not.
    std::fs::create_dir(tmp.join("template.gone")).unwrap();
    std::fs::rename(bench.state("templates/gone"), tmp.join("template.gone/removed")).unwrap();
    // Not of our making.
    std::fs::create_dir(tmp.join("template.Not Ours")).unwrap();
    std::fs::write(tmp.join("note"), "mine").unwrap();
    bench.create("other", Source::KernelOnly).unwrap();
    assert!(template::get(&bench.store, &name("t")).is_ok());
    assert!(template::get(&bench.store, &name("gone")).is_err());
    let mut left: Vec<_> = std::fs::read_dir(&tmp).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["note", "template.Not Ours"]);
    // A damaged one is listed as such and can be made again.
    std::fs::write(bench.state("templates/t/template.json"), "{}").unwrap();
    let listing = template::list(&bench.store).unwrap();
    assert_eq!((listing.found.len(), listing.broken.len()), (1, 1));
    assert!(listing.broken[0].contains("templates/t/template.json"));
    bench.create_with("t", Source::KernelOnly, &force()).unwrap();
    assert!(template::list(&bench.store).unwrap().broken.is_empty());
}

#[test]
fn a_stop_at_any_moment_leaves_nothing() {
    if skip("a_stop_at_any_moment_leaves_nothing", &["mke2fs", "tar"]) {
        return;
    }
    let bench = Bench::new();
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = crate::common::tar_header(tar::EntryType::Regular, "big", 8 << 20);
    header.set_cksum();
    builder.append(&header, &vec![5; 8 << 20][..]).unwrap();
    let path = bench.input("big.tar", &builder.into_inner().unwrap());
    let before = bench.listing();
    let mut moment = 0;
    let reports = loop {
        let stop = AtomicBool::new(false);
        let seen = Cell::new(0);
        let progress = |_: Progress<'_>| {
            seen.set(seen.get() + 1);
            if seen.get() > moment {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let job = Job { progress: &progress, stop: &stop };
        let start = Instant::now();
        let made = template::create(&bench.store, &name("t"), tar_file(&path), &Options::default(), &job);
        assert!(start.elapsed() < Duration::from_secs(20));
        match made {
            Err(ImageError::Stopped) => assert_eq!(bench.listing(), before, "stopped at report {moment}"),
            Err(other) => panic!("at report {moment}: {other}"),
            Ok(_) => break seen.get(),
        }
        moment += 1 + moment / 2;
    };
    assert!(reports > 10, "only {reports} reports were made");
    template::remove(&bench.store, &name("t"), &job()).unwrap();
    assert_eq!(bench.listing(), before);
}

#[test]
fn progress_grows_and_names_its_steps() {
    if skip("progress_grows_and_names_its_steps", &["mke2fs", "tar"]) {
        return;
    }
    let bench = Bench::new();
    let path = bench.input("d.tar", &docker_like_tar());
    let steps = std::cell::RefCell::new(Vec::new());
    let progress = |p: Progress<'_>| {
        assert!(p.total.is_none_or(|t| p.done <= t), "{p:?}");
        let mut steps = steps.borrow_mut();
        if steps.last().is_none_or(|s: &String| s != p.step) {
            steps.push(p.step.to_owned());
        }
    };
    let stop = AtomicBool::new(false);
    let job = Job { progress: &progress, stop: &stop };
    template::create(&bench.store, &name("t"), tar_file(&path), &Options::default(), &job).unwrap();
    assert_eq!(*steps.borrow(), ["checking the archive", "unpacking", "measuring", "writing the image"]);
}
