//! The machine around the `process` back end: boot, commands, stop, failures. Needs the `hearth-guest`
//! program beside this one (or `$HEARTH_GUEST`).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::{Duration, Instant};

use common::{Place, Running, assert_gone, identity, skipped, until};
use hearth_core::agent::ExecRequest;
use hearth_core::block::BlockSpec;
use hearth_core::exit::ExitReason;
use hearth_core::shim::ShimSpec;
use hearth_core::spec::VmmKind;
use hearth_vmm::agent::{AgentClient, ExecEvent};
use hearth_vmm::machine::{MachineError, Phase};

fn place() -> Option<(Place, ShimSpec)> {
    let Some(program) = common::guest() else {
        skipped("no hearth-guest beside this test: build it, or set HEARTH_GUEST");
        return None;
    };
    let place = Place::new();
    let env = vec![("COLOUR".to_owned(), "blue".to_owned())];
    let spec = ShimSpec { agent: true, env, ..place.spec(VmmKind::Process, &program) };
    Some((place, spec))
}

fn agent(running: &Running) -> AgentClient {
    match running.handle.phase() {
        Phase::Running { agent: Some(agent), .. } => agent,
        other => panic!("it does not run: {other:?}"),
    }
}

async fn output(agent: &AgentClient, argv: &[&str]) -> (String, i32) {
    let argv = argv.iter().map(|a| (*a).to_owned()).collect();
    let mut exec = agent.exec(ExecRequest { id: "x1".into(), argv, ..Default::default() }).await.unwrap();
    let mut text = Vec::new();
    loop {
        match exec.output.next().await.unwrap().unwrap() {
            ExecEvent::Stdout(bytes) => text.extend_from_slice(&bytes),
            ExecEvent::Exit(exit) => return (String::from_utf8(text).unwrap(), exit.status()),
            ExecEvent::Started(_) | ExecEvent::Stderr(_) => {}
        }
    }
}

#[tokio::test]
async fn a_command_runs_with_the_sandboxs_environment_and_stop_asks_the_guest() {
    let Some((place, spec)) = place() else { return };
    let running = Running::new(spec);
    let start = Instant::now();
    let pid = running.handle.boot().await.unwrap();
    println!("MEASURED: process spawn to ready {:?}", start.elapsed());
    let vmm = identity(pid);
    let (text, status) = output(&agent(&running), &["sh", "-c", "echo $COLOUR; exit 7"]).await;
    assert_eq!((text.as_str(), status), ("blue\n", 7));
    let record = running.handle.stop(Duration::from_secs(20)).await.unwrap();
    assert_eq!(record.reason, ExitReason::Stopped);
    assert_eq!(record.signal, None, "the guest ended by itself within the grace time: {record:?}");
    assert_gone(&vmm).await;
    assert_eq!(running.ended().await, record);
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_stop_while_stopping_shortens_the_grace() {
    let Some((_place, spec)) = place() else { return };
    let running = Running::new(spec);
    let pid = running.handle.boot().await.unwrap();
    // A stopped process answers nothing, so the long grace would be waited for.
    let pidfd = hearth_host::process::open(&identity(pid)).unwrap();
    hearth_host::process::signal(std::os::fd::AsFd::as_fd(&pidfd), hearth_host::process::Signal::STOP)
        .unwrap();
    let start = Instant::now();
    let patient = running.handle.stop(Duration::from_secs(600));
    let hasty = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        running.handle.stop(Duration::ZERO).await
    };
    let (patient, hasty) = tokio::join!(patient, hasty);
    assert_eq!(patient.unwrap(), hasty.unwrap());
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn the_end_time_holds_during_boot_too() {
    let Some((place, spec)) = place() else { return };
    // `sleep` says nothing to the hello: booting would go on for two minutes.
    let script = place.dir.path().join("mute");
    std::fs::write(&script, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ends_at_ms = Some(hearth_vmm::end_time::now_ms() + 300);
    let running = Running::new(ShimSpec { program: script, ends_at_ms, ..spec });
    let error = running.handle.boot().await.unwrap_err();
    assert!(matches!(&error, MachineError::Exited(r) if r.reason == ExitReason::EndTime), "{error}");
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_vmm_that_dies_while_booting_is_reported_at_once_with_its_last_words() {
    let Some((place, spec)) = place() else { return };
    let script = place.dir.path().join("dying");
    std::fs::write(&script, "#!/bin/sh\necho 'no memory left' >&2\nexit 3\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let running = Running::new(ShimSpec { program: script, ..spec });
    let start = Instant::now();
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("vmm-failed") && error.contains("no memory left"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(place.record().code, Some(3));
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn what_cannot_be_started_is_an_exit_too() {
    let place = Place::new();
    let running = Running::new(place.spec(VmmKind::Process, "/nonexistent/program".as_ref()));
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent/program"), "{error}");
    assert_eq!(place.record().reason, ExitReason::VmmFailed);

    let place = Place::new();
    let running = Running::new(place.spec(VmmKind::Process, "/bin/true".as_ref()));
    assert!(matches!(running.handle.pause().await, Err(MachineError::NotRunning)));
    let record = running.handle.stop(Duration::from_secs(5)).await.unwrap();
    assert_eq!((record.reason, record.code, record.signal), (ExitReason::Stopped, None, None));
    let again = running.handle.boot().await;
    assert!(matches!(again, Err(MachineError::Exited(_))), "a stopped machine does not boot: {again:?}");
}

#[tokio::test]
async fn pause_stops_the_process_and_stopping_a_paused_one_needs_no_grace() {
    let Some((_place, spec)) = place() else { return };
    let running = Running::new(spec);
    running.handle.boot().await.unwrap();
    running.handle.pause().await.unwrap();
    let silent = agent(&running).ping(Duration::from_millis(200)).await;
    assert!(silent.is_err());
    running.handle.resume().await.unwrap();
    agent(&running).ping(Duration::from_secs(10)).await.unwrap();
    running.handle.pause().await.unwrap();
    let start = Instant::now();
    let record = running.handle.stop(Duration::from_secs(60)).await.unwrap();
    assert_eq!((record.reason, record.signal), (ExitReason::Stopped, Some(9)));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[tokio::test]
async fn a_disk_that_cannot_be_a_device_ends_the_boot_with_the_reason_and_leaves_no_file_open() {
    let place = Place::new();
    let base = place.dir.path().join("base");
    std::fs::File::create(&base).unwrap().set_len(16 << 20).unwrap();
    // Beyond any that a kernel has by itself.
    let block = BlockSpec {
        base,
        rootfs: None,
        rate: Default::default(),
        failpoints: String::new(),
        nbd: Some(4_000),
    };
    let overlay = place.dir.path().join("overlay");
    let spec = place.spec(VmmKind::Process, std::path::Path::new("/bin/true"));
    let running = Running::new(ShimSpec { overlay: Some(overlay.clone()), block: Some(block), ..spec });
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("the disk overlay cannot be a device: ") && error.contains("nbds_max"), "{error}");
    assert_eq!(running.ended().await.reason, ExitReason::BlockFailed);
    until("the overlay is free", || std::fs::File::open(&overlay).unwrap().try_lock().is_ok()).await;
    place.assert_only_logs_are_left();
}
