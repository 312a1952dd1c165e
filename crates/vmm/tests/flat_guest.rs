//! The life of a machine on a real Firecracker with a guest of a few bytes: an ELF made here, which needs no
//! operating system and boots where no Linux does. Needs `$HEARTH_FIRECRACKER` or `firecracker` in PATH, and
//! a `/dev/kvm` that opens.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::flat::{HELLO, Then, elf, firecracker};
use common::{Place, Running, assert_gone, identity, until};
use hearth_core::block::DiskRate;
use hearth_core::exit::ExitReason;
use hearth_core::shim::{GuestNetSpec, ShimSpec};
use hearth_core::spec::VmmKind;
use hearth_host::process::Signal;
use hearth_vmm::machine::{MachineError, Phase};

fn place(then: &Then) -> Option<(Place, ShimSpec)> {
    let program = firecracker()?;
    let place = Place::new();
    let kernel = place.dir.path().join("flat.elf");
    std::fs::write(&kernel, elf(then)).unwrap();
    let spec = ShimSpec { kernel, ..place.spec(VmmKind::Firecracker, &program) };
    Some((place, spec))
}

#[tokio::test]
async fn it_boots_prints_and_stops_on_demand() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    let running = Running::new(spec);
    let start = Instant::now();
    let pid = running.handle.boot().await.unwrap();
    let program = firecracker().unwrap_or_default();
    hearth_testkit::report(&format!(
        "Firecracker ({}) ran a guest of a few bytes on this KVM, ready after {:?}; that is no Linux guest",
        program.display(),
        start.elapsed()
    ));
    let vmm = identity(pid);
    until("the greeting", || place.console() == HELLO).await;
    assert_eq!(running.handle.boot().await.unwrap(), pid, "booting again is the same boot");
    let start = Instant::now();
    let record = running.handle.stop(Duration::ZERO).await.unwrap();
    println!("MEASURED: firecracker stop {:?}", start.elapsed());
    assert_eq!((record.reason, record.signal), (ExitReason::Stopped, Some(9)));
    assert_eq!(place.record(), record);
    assert_gone(&vmm).await;
    assert_eq!(running.ended().await, record);
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_guest_that_resets_has_shut_down() {
    let Some((place, spec)) = place(&Then::Reset) else { return };
    let running = Running::new(spec);
    // It may be over before it counts as running.
    drop(running.handle.boot().await);
    let record = running.ended().await;
    assert_eq!((record.reason, record.code, record.signal), (ExitReason::GuestShutdown, Some(0), None));
    assert_eq!(place.console(), HELLO, "the console is drained before the record");
    assert_eq!(place.record(), record);
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_vmm_killed_from_outside_is_told_from_one_that_failed() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    let running = Running::new(spec);
    let pid = running.handle.boot().await.unwrap();
    let pidfd = hearth_host::process::open(&identity(pid)).unwrap();
    hearth_host::process::signal(std::os::fd::AsFd::as_fd(&pidfd), Signal::KILL).unwrap();
    let record = running.handle.exited().await.unwrap();
    assert_eq!((record.reason, record.signal), (ExitReason::Killed, Some(9)));
    let after = running.handle.pause().await;
    assert!(matches!(after, Err(MachineError::Exited(_))), "{after:?}");
    let again = running.handle.stop(Duration::from_secs(5)).await.unwrap();
    assert_eq!(again, record, "stopping what ended tells how it ended");
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_paused_guest_prints_nothing_and_goes_on_when_resumed() {
    let Some((place, spec)) = place(&Then::Tick) else { return };
    let running = Running::new(spec);
    running.handle.boot().await.unwrap();
    until("dots", || place.console().ends_with("..")).await;
    running.handle.pause().await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    let len = place.console().len();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(place.console().len(), len);
    running.handle.resume().await.unwrap();
    until("more dots", || place.console().len() > len).await;
    running.handle.stop(Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn a_flood_on_the_console_stays_under_the_cap_and_stop_works() {
    let Some((place, spec)) = place(&Then::Flood) else { return };
    let running = Running::new(ShimSpec { console_cap_bytes: 8192, ..spec });
    running.handle.boot().await.unwrap();
    let older = hearth_vmm::console::older_part(&place.run().join("console.log"));
    until("the log is turned over", || older.exists()).await;
    assert!(place.console().len() <= 8192 && std::fs::metadata(&older).unwrap().len() <= 8192);
    let record = running.handle.stop(Duration::ZERO).await.unwrap();
    assert_eq!(record.reason, ExitReason::Stopped);
}

#[tokio::test]
async fn the_vmm_dies_with_the_thread_that_started_it() {
    let Some((_place, spec)) = place(&Then::Halt) else { return };
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let running = Running::new(spec);
            identity(running.handle.boot().await.unwrap())
        })
    });
    assert_gone(&thread.join().unwrap()).await;
}

#[tokio::test]
async fn the_end_time_ends_it_without_anybody_asking() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    let ends_at_ms = Some(hearth_vmm::end_time::now_ms() + 700);
    let running = Running::new(ShimSpec { ends_at_ms, ..spec });
    running.handle.boot().await.unwrap();
    assert!(matches!(running.handle.phase(), Phase::Running { agent: None, .. }));
    let record = running.ended().await;
    assert_eq!((record.reason, record.signal), (ExitReason::EndTime, Some(9)));
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn bad_kernels_and_taps_fail_with_firecrackers_words_and_leave_nothing() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    std::fs::write(&spec.kernel, "not a kernel").unwrap();
    let running = Running::new(spec);
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("vmm-failed") && error.contains("refused with 400"), "{error}");
    assert_eq!(running.ended().await.reason, ExitReason::VmmFailed);
    place.assert_only_logs_are_left();

    let Some((place, spec)) = self::place(&Then::Halt) else { return };
    let net = Some(GuestNetSpec { tap: "no-such-tap".into(), mac: "06:00:ac:10:00:02".into(), dns: vec![] });
    let running = Running::new(ShimSpec { net, ..spec });
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("no interface no-such-tap"), "{error}");
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_run_directory_too_deep_for_a_socket_is_named() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    let run_dir = place.run().join("x".repeat(100));
    std::fs::create_dir(&run_dir).unwrap();
    let running = Running::new(ShimSpec { run_dir, ..spec });
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("at most 107"), "{error}");
}

#[tokio::test]
async fn drives_with_a_rate_limit_are_taken() {
    let Some((place, spec)) = place(&Then::Halt) else { return };
    let disk = |name: &str| {
        let path = place.dir.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        Some(path)
    };
    let (rootfs, overlay) = (disk("rootfs"), disk("disk"));
    for drive_rate in [
        DiskRate { mib_per_second: 4, iops: 2000, burst_ms: 0 },
        DiskRate { mib_per_second: 0, iops: 1, burst_ms: 1 },
        DiskRate {
            mib_per_second: *DiskRate::MIB_PER_SECOND.end(),
            iops: *DiskRate::IOPS.end(),
            burst_ms: *DiskRate::BURST_MS.end(),
        },
    ] {
        let spec = ShimSpec { rootfs: rootfs.clone(), overlay: overlay.clone(), drive_rate, ..spec.clone() };
        let running = Running::new(spec);
        running.handle.boot().await.unwrap();
        let record = running.handle.stop(Duration::ZERO).await.unwrap();
        assert_eq!(record.reason, ExitReason::Stopped);
        running.ended().await;
    }
}
