//! A real Linux guest on QEMU: boot, a command, pause, the ways to end. Needs `qemu-system-x86_64`, and in the
//! state directory `$HEARTH_TEST_STATE` the kernel `default`, an initramfs of it (made with a first sandbox) and
//! the template `busybox`; `mke2fs` makes the writable disk.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Place, Running, assert_gone, identity, skipped};
use hearth_core::agent::ExecRequest;
use hearth_core::exit::ExitReason;
use hearth_core::shim::ShimSpec;
use hearth_core::spec::VmmKind;
use hearth_vmm::agent::{AgentClient, ExecEvent};
use hearth_vmm::machine::Phase;

/// Kernel, initramfs and root disk of the prepared state, or what is missing.
fn boot_files() -> Result<[PathBuf; 3], String> {
    let state = std::env::var_os("HEARTH_TEST_STATE").filter(|s| !s.is_empty());
    let state = PathBuf::from(state.ok_or("HEARTH_TEST_STATE is not set: run scripts/test")?);
    let kernel = state.join("kernels/default");
    let initramfs = newest_initramfs(&kernel)
        .ok_or_else(|| format!("no initramfs in {}: no sandbox ran there yet", kernel.display()))?;
    let files = [kernel.join("vmlinux"), initramfs, state.join("templates/busybox/rootfs.ext4")];
    match files.iter().find(|f| std::fs::File::open(f).is_err()) {
        Some(missing) => Err(format!("{} cannot be read", missing.display())),
        None => Ok(files),
    }
}

fn newest_initramfs(kernel: &Path) -> Option<PathBuf> {
    let ours = |name: &str| name.starts_with("initramfs-") && name.ends_with(".cpio");
    let entries = std::fs::read_dir(kernel).ok()?.filter_map(Result::ok);
    let found = entries.filter(|e| e.file_name().to_str().is_some_and(ours));
    found.max_by_key(|e| e.metadata().and_then(|m| m.modified()).ok()).map(|e| e.path())
}

fn place() -> Option<(Place, ShimSpec)> {
    let Some(program) = common::program("HEARTH_QEMU", "qemu-system-x86_64") else {
        skipped("no qemu-system-x86_64 in PATH");
        return None;
    };
    let [kernel, initramfs, rootfs] = match boot_files() {
        Ok(files) => files,
        Err(why) => {
            skipped(&why);
            return None;
        }
    };
    let place = Place::new();
    let overlay = place.dir.path().join("overlay.ext4");
    std::fs::File::create(&overlay).unwrap().set_len(64 << 20).unwrap();
    let made = Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4"]).arg(&overlay).status();
    match made {
        Ok(status) => assert!(status.success(), "mke2fs: {status}"),
        Err(e) => {
            skipped(&format!("/sbin/mke2fs: {e}"));
            return None;
        }
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
