//! A real Linux guest on QEMU: boot, a command, pause, the ways to end. Needs `qemu-system-x86_64` in PATH, and
//! what the environment names: `$HEARTH_TEST_KERNEL` (ELF), `$HEARTH_TEST_INITRAMFS` (with hearth-guest as
//! init), `$HEARTH_TEST_ROOTFS` (ext4 with a shell); `mke2fs` makes the writable disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Place, Running, assert_gone, identity, skipped};
use hearth_core::agent::ExecRequest;
use hearth_core::exit::ExitReason;
use hearth_core::shim::ShimSpec;
use hearth_core::spec::VmmKind;
use hearth_vmm::agent::{AgentClient, ExecEvent};
use hearth_vmm::machine::Phase;

fn place() -> Option<(Place, ShimSpec)> {
    let named = |variable: &str| {
        let path = std::env::var_os(variable).map(PathBuf::from).filter(|p| p.is_file());
        if path.is_none() {
            skipped(&format!("{variable} names no file"));
        }
        path
    };
    let Some(program) = common::program("HEARTH_QEMU", "qemu-system-x86_64") else {
        skipped("no qemu-system-x86_64 in PATH");
        return None;
    };
    let (kernel, initramfs) = (named("HEARTH_TEST_KERNEL")?, named("HEARTH_TEST_INITRAMFS")?);
    let rootfs = named("HEARTH_TEST_ROOTFS")?;
    let place = Place::new();
    let overlay = place.dir.path().join("overlay.ext4");
    std::fs::File::create(&overlay).unwrap().set_len(64 << 20).unwrap();
    let made = Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4"]).arg(&overlay).status();
    if !made.is_ok_and(|s| s.success()) {
        skipped("mke2fs");
        return None;
    }
    let spec = ShimSpec {
        kernel,
        initramfs: Some(initramfs),
        rootfs: Some(rootfs),
        overlay: Some(overlay),
        memory_mib: 256,
        agent: true,
        ..place.spec(VmmKind::Qemu, &program)
    };
    Some((place, spec))
}

async fn boot(spec: ShimSpec) -> (Running, u32, AgentClient) {
    let running = Running::new(spec);
    let start = Instant::now();
    let pid = running.handle.boot().await.unwrap();
    println!("MEASURED: qemu spawn to ready {:?}", start.elapsed());
    match running.handle.phase() {
        Phase::Running { agent: Some(agent), .. } => (running, pid, agent),
        other => panic!("it does not run: {other:?}"),
    }
}

async fn output(agent: &AgentClient, script: &str) -> String {
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    let mut exec = agent.exec(ExecRequest { id: "x1".into(), argv, ..Default::default() }).await.unwrap();
    let mut text = Vec::new();
    loop {
        match exec.output.next().await.unwrap().unwrap() {
            ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => text.extend_from_slice(&bytes),
            ExecEvent::Exit(_) => return String::from_utf8(text).unwrap(),
            ExecEvent::Started(_) => {}
        }
    }
}

#[tokio::test]
async fn a_linux_guest_runs_a_command_pauses_and_shuts_down_when_asked() {
    let Some((place, spec)) = place() else { return };
    let (running, pid, agent) = boot(spec).await;
    let vmm = identity(pid);
    let text = output(&agent, "hostname; echo kept > /mark && cat /mark").await;
    assert_eq!(text, "box\nkept\n");
    let start = Instant::now();
    running.handle.pause().await.unwrap();
    println!("MEASURED: qemu pause {:?}", start.elapsed());
    assert!(agent.ping(Duration::from_millis(500)).await.is_err());
    let start = Instant::now();
    running.handle.resume().await.unwrap();
    println!("MEASURED: qemu resume {:?}", start.elapsed());
    agent.ping(Duration::from_secs(10)).await.unwrap();
    let start = Instant::now();
    let record = running.handle.stop(Duration::from_secs(60)).await.unwrap();
    println!("MEASURED: qemu stop with the guest's help {:?}", start.elapsed());
    assert_eq!(
        (record.reason, record.code, record.signal),
        (ExitReason::Stopped, Some(0), None),
        "{record:?}"
    );
    assert_gone(&vmm).await;
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_guest_that_powers_off_has_shut_down() {
    let Some((place, spec)) = place() else { return };
    let (running, _, agent) = boot(spec).await;
    agent.shutdown().await.unwrap();
    let record = running.ended().await;
    assert_eq!((record.reason, record.code), (ExitReason::GuestShutdown, Some(0)), "{record:?}");
    assert!(record.detail.starts_with("guest-"), "QEMU's own word for it: {record:?}");
    place.assert_only_logs_are_left();
}

#[tokio::test]
async fn a_machine_that_cannot_be_built_says_why() {
    let Some((place, spec)) = place() else { return };
    let running = Running::new(ShimSpec { rootfs: Some("/nonexistent/rootfs".into()), ..spec });
    let error = running.handle.boot().await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent/rootfs"), "{error}");
    assert_eq!(running.ended().await.reason, ExitReason::VmmFailed);
    place.assert_only_logs_are_left();
}
