//! Disks of Firecracker as devices of the kernel's NBD client, on the fake host: who gets which index, when it is given
//! back, and what is told of it.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::{Duration, Instant};

use common::{Bench, create};
use hearth_core::block::DiskRate;
use hearth_core::host::{ErrorClass, Host as _};
use hearth_core::id::SandboxId;
use hearth_core::nbd_pool::Counts;
use hearth_core::resource::{Kind, Resource};
use hearth_core::shim::ShimSpec;
use hearth_node::{Engine, EngineError, Failpoints, FirecrackerDisk, NewSandbox, View};
use hearth_testkit::fake_host::{FakeHost, Fault, Verb};

const BOUND: Duration = Duration::from_secs(10);

fn bench(limit: u32) -> Bench {
    Bench::sized("10.12.0.0/24", 0).with_devices(limit)
}

/// The index that the record names.
fn index(view: &View) -> Option<u32> {
    view.record.resources.iter().find_map(|r| match r {
        Resource::Nbd { index, sandbox } if *sandbox == view.record.id => Some(*index),
        _ => None,
    })
}

/// What the shim is told.
fn spec(bench: &Bench, view: &View) -> ShimSpec {
    let path = bench.tmp.path().join("run/t/sandboxes").join(view.record.id.as_str()).join("spec.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn counts(engine: &Engine<FakeHost>) -> (u32, u32, u32, u32) {
    let Counts { used, quarantined, foreign, limit } = engine.nbd_counts().unwrap();
    (used, quarantined, foreign, limit)
}

async fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let end = Instant::now() + BOUND;
    while !seen() {
        assert!(Instant::now() < end, "not within {BOUND:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn somebody() -> SandboxId {
    "zzzzzzzzzzzzzzzz".parse().unwrap()
}

#[tokio::test]
async fn each_sandbox_has_an_index_of_its_own_and_an_exhausted_pool_says_what_there_is() {
    let bench = bench(3);
    bench.host.plant(Resource::Nbd { index: 1, sandbox: somebody() });
    let engine = bench.engine().await;
    assert_eq!(counts(&engine), (0, 0, 1, 3));
    let a = create(&engine, "a").await.unwrap();
    let b = create(&engine, "b").await.unwrap();
    assert_eq!((index(&a), index(&b)), (Some(0), Some(2)));
    let told = spec(&bench, &a);
    assert_eq!(told.block.unwrap().nbd, Some(0));
    assert!(told.overlay.unwrap().ends_with("disk.overlay"));
    let error = create(&engine, "c").await.unwrap_err();
    assert!(matches!(error, EngineError::Exhausted(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("2 used, 0 quarantined, 1 of others, limit 3"), "{text}");
    assert!(text.contains("nbds_max") && text.contains("disk.firecracker"), "{text}");
    assert!(engine.get("c").is_err());
    // What another lets go of is found when it is needed.
    bench.host.vanish(&Resource::Nbd { index: 1, sandbox: somebody() });
    let c = create(&engine, "c").await.unwrap();
    assert_eq!(index(&c), Some(1));
    for name in ["a", "b", "c"] {
        engine.delete(name).await.unwrap();
    }
    assert_eq!(counts(&engine), (0, 0, 0, 3));
    assert!(bench.leftovers().is_empty(), "{:?}", bench.leftovers());
}

#[tokio::test]
async fn an_index_that_does_not_get_quiet_is_quarantined_until_it_is() {
    let bench = bench(1);
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    bench.host.fail_always(Verb::Release, Kind::Nbd, Fault::Error(ErrorClass::Busy));
    let error = engine.delete("a").await.unwrap_err();
    assert!(matches!(error, EngineError::Stuck { .. }), "{error}");
    assert!(error.to_string().contains("nbd0 of "), "{error}");
    assert_eq!(counts(&engine), (0, 1, 0, 1));
    let error = create(&engine, "b").await.unwrap_err().to_string();
    assert!(error.contains("0 used, 1 quarantined"), "{error}");
    bench.host.heal();
    engine.delete("a").await.unwrap();
    // It is looked at again by itself.
    until("it is free", || counts(&engine) == (0, 0, 0, 1)).await;
    create(&engine, "b").await.unwrap();
    engine.delete("b").await.unwrap();
    assert!(bench.leftovers().is_empty());
}

#[tokio::test]
async fn what_a_record_names_stays_used_over_a_restart_and_a_late_release_takes_nothing_from_its_next_owner()
{
    let bench = bench(2);
    let engine = bench.engine().await;
    let a = create(&engine, "a").await.unwrap();
    engine.detach().await;
    let engine = bench.engine().await;
    assert_eq!(counts(&engine), (1, 0, 0, 2));
    let b = create(&engine, "b").await.unwrap();
    assert_ne!(index(&a), index(&b));
    // Somebody disconnects a's device, and its index is another's by the time of the release.
    let index_of_a = index(&a).unwrap();
    bench.host.vanish(&Resource::Nbd { index: index_of_a, sandbox: a.record.id.clone() });
    let theirs = Resource::Nbd { index: index_of_a, sandbox: somebody() };
    bench.host.plant(theirs.clone());
    engine.delete("a").await.unwrap();
    assert_eq!(counts(&engine), (1, 0, 1, 2));
    assert!(bench.leftovers().contains(&theirs));
    engine.delete("b").await.unwrap();
    bench.host.release(&theirs, BOUND).unwrap();
    assert!(bench.leftovers().is_empty());
}

#[tokio::test]
async fn a_create_that_fails_at_any_step_gives_its_index_back() {
    for step in hearth_core::steps::Step::ALL {
        let bench = bench(1);
        let faults = format!("{step}=error-after");
        let faults = Failpoints::parse([faults.split_once('=').unwrap()]).unwrap();
        let engine = bench.engine_with(faults).await;
        create(&engine, "a").await.unwrap_err();
        assert_eq!(counts(&engine), (0, 0, 0, 1), "{step}");
        assert!(bench.leftovers().is_empty(), "{step}: {:?}", bench.leftovers());
    }
}

#[tokio::test]
async fn a_shim_that_dies_leaves_its_index_free() {
    let bench = bench(2);
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    for process in bench.host.running() {
        process.kill();
    }
    until("it is released", || engine.list().unwrap().is_empty()).await;
    assert_eq!(counts(&engine), (0, 0, 0, 2));
    assert!(bench.leftovers().is_empty());
}

#[tokio::test]
async fn without_a_client_of_the_kernels_the_disk_is_a_file_or_there_is_no_sandbox() {
    let mut bench = Bench::sized("10.12.0.0/24", 0).on_firecracker();
    let engine = bench.engine().await;
    let a = create(&engine, "a").await.unwrap();
    let told = spec(&bench, &a);
    assert!(told.block.is_none() && told.overlay.unwrap().ends_with("disk.ext4"));
    assert_eq!((index(&a), engine.nbd_counts()), (None, None));
    let new =
        || NewSandbox { disk_rate: DiskRate { iops: 5, ..DiskRate::default() }, ..NewSandbox::default() };
    let (progress, _steps) = tokio::sync::mpsc::channel(16);
    let limited = engine.create(common::TEMPLATE.parse().unwrap(), new(), progress).await.unwrap();
    let told = spec(&bench, &limited);
    assert!(told.block.is_none() && told.drive_rate.iops == 5, "Firecracker limits its file itself");
    // The module comes while the daemon runs.
    bench.host.load_nbd(1);
    let (progress, _steps) = tokio::sync::mpsc::channel(16);
    let b = engine.create(common::TEMPLATE.parse().unwrap(), new(), progress).await.unwrap();
    assert_eq!((index(&b), spec(&bench, &b).block.unwrap().rate.iops), (Some(0), 5));
    for sandbox in [a, b, limited] {
        engine.delete(sandbox.record.id.as_str()).await.unwrap();
    }
    engine.detach().await;
    assert!(bench.leftovers().is_empty());

    bench = Bench { disk: FirecrackerDisk::Nbd, ..Bench::sized("10.12.0.0/24", 0).on_firecracker() };
    let engine = bench.engine().await;
    let error = create(&engine, "a").await.unwrap_err();
    assert!(matches!(error, EngineError::Precondition(_)), "{error}");
    assert!(error.to_string().contains("modprobe nbd"), "{error}");
    bench.host.load_nbd(8);
    bench.nbd_devices = 2;
    engine.detach().await;
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    assert_eq!(counts(&engine), (1, 0, 0, 2));
    engine.delete("a").await.unwrap();
    assert!(bench.leftovers().is_empty());
}
