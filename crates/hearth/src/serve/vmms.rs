//! Which VMMs this node can run, and what `auto` stands for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hearth_core::spec::VmmKind;
use hearth_host::facts;
use hearth_node::Vmms;

use crate::config::{Config, VmmChoice};

/// Looks for the programs and judges KVM. Reads only.
pub(crate) fn find(config: &Config) -> Vmms {
    let kvm = ordinary_guests_on_kvm();
    let firecracker = program(
        config.firecracker.as_deref(),
        "firecracker",
        "install Firecracker into PATH or set HEARTH_FIRECRACKER",
    )
    .and_then(|path| facts::kvm_usable().map(|()| path).map_err(|e| e.to_string()));
    let qemu = program(
        config.qemu.as_deref(),
        "qemu-system-x86_64",
        "install the package qemu-system-x86 or set HEARTH_QEMU",
    );
    let (auto, auto_reason) = match (config.vmm, &firecracker, &kvm) {
        (VmmChoice::Only(kind), ..) => (kind, "configured".to_owned()),
        (VmmChoice::Auto, Ok(_), Ok(())) => {
            (VmmKind::Firecracker, "KVM runs ordinary guests here".to_owned())
        }
        (VmmChoice::Auto, Ok(_), Err(why)) | (VmmChoice::Auto, Err(why), _) => {
            (VmmKind::Qemu, format!("not firecracker: {why}"))
        }
    };
    let mut programs =
        BTreeMap::from([(VmmKind::Firecracker.as_str(), firecracker), (VmmKind::Qemu.as_str(), qemu)]);
    if config.process_vmm {
        programs.insert(VmmKind::Process.as_str(), Ok(guest_program(config)));
    }
    Vmms { auto, auto_reason, programs, kvm }
}

/// Whether KVM runs an ordinary Linux guest: a CPU without vmx or svm can still have a (paravirtual)
/// `/dev/kvm` on which such a guest never comes up.
fn ordinary_guests_on_kvm() -> Result<(), String> {
    facts::kvm_usable().map_err(|e| e.to_string())?;
    match facts::cpu_virtualization() {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err("the CPU has neither vmx nor svm".into()),
        Err(e) => Err(format!("/proc/cpuinfo: {e}")),
    }
}

/// The guest agent's binary: configured, or beside this one.
pub(crate) fn guest_program(config: &Config) -> PathBuf {
    config.guest.clone().unwrap_or_else(|| {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name("hearth-guest")
    })
}

fn program(configured: Option<&Path>, name: &str, remedy: &str) -> Result<PathBuf, String> {
    if let Some(path) = configured {
        return match path.is_file() {
            true => Ok(path.to_owned()),
            false => Err(format!("{} is not there; {remedy}", path.display())),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| format!("{name} is not in PATH; {remedy}"))
}
