//! The command line of QEMU: a plain value, made from the spec alone.
//!
//! q35 and not microvm: under emulation microvm hangs in the guest's timer calibration three times in four.
//! `-nodefaults -no-user-config`: nothing is there that is not named here. No socket files: monitor, console
//! and agent are socket pairs inherited as descriptors 3, 4 and 5, and the disks that are served are those after them.

use std::ffi::OsString;
use std::path::Path;

use hearth_core::agent::SERIAL_PORT;
use hearth_core::shim::ShimSpec;

use crate::disks::{OVERLAY, ROOTFS};

/// What the machine runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Accelerator {
    /// The CPU's own virtualization.
    Kvm,
    /// Emulation.
    Tcg,
}

/// Descriptor of the monitor in QEMU.
const QMP_FD: u32 = 3;
/// Descriptor of the serial console in QEMU.
const CONSOLE_FD: u32 = 4;
/// Descriptor of the agent's port in QEMU.
const AGENT_FD: u32 = 5;

/// A panic or a reboot resets the machine (`reboot=t`, a triple fault, works on every one), which ends QEMU
/// (`-no-reboot`).
const KERNEL_LINE: &str = "console=ttyS0 quiet panic=1 reboot=t random.trust_cpu=on";
/// Under emulation these cost seconds and protect nothing: the guest's CPU has no speculation.
const KERNEL_LINE_TCG: &str = "mitigations=off nokaslr no_timer_check cryptomgr.notests";

/// Translated code of one VM, MiB; QEMU's own default is a gigabyte.
const TB_SIZE: u32 = 256;

/// All arguments. `tsc_khz` saves an emulated guest the calibration of its clock.
pub(super) fn build(spec: &ShimSpec, accelerator: Accelerator, tsc_khz: Option<u64>) -> Vec<OsString> {
    let mut args = Args::default();
    args.flag("-nodefaults").flag("-no-user-config").flag("-no-reboot");
    args.pair("-name", format!("hearth-{}", spec.id)).pair("-display", "none");
    args.pair("-M", "q35,smm=off,vmport=off,sata=off,smbus=off");
    let line = match accelerator {
        Accelerator::Kvm => {
            args.pair("-accel", "kvm").pair("-cpu", "host");
            KERNEL_LINE.to_owned()
        }
        Accelerator::Tcg => {
            args.pair("-accel", format!("tcg,tb-size={TB_SIZE}")).pair("-cpu", "qemu64");
            let tsc = tsc_khz.map_or_else(String::new, |khz| format!(" tsc_early_khz={khz}"));
            format!("{KERNEL_LINE} {KERNEL_LINE_TCG}{tsc}")
        }
    };
    args.pair("-smp", spec.cpus.to_string()).pair("-m", format!("{}M", spec.memory_mib));
    args.pair("-kernel", &spec.kernel).pair("-append", line);
    if let Some(initramfs) = &spec.initramfs {
        args.pair("-initrd", initramfs);
    }
    args.pair("-chardev", format!("socket,id=qmp,fd={QMP_FD}")).pair("-mon", "chardev=qmp,mode=control");
    args.pair("-chardev", format!("socket,id=console,fd={CONSOLE_FD}"));
    args.pair("-device", "isa-serial,chardev=console").pair("-device", "virtio-rng-pci");
    if spec.agent {
        args.pair("-chardev", format!("socket,id=agent,fd={AGENT_FD}"));
        args.pair("-device", "virtio-serial-pci,max_ports=2");
        args.pair("-device", format!("virtserialport,chardev=agent,name={SERIAL_PORT}"));
    }
    let mut served = (AGENT_FD + u32::from(spec.agent)..).take(if spec.block.is_some() { 2 } else { 0 });
    let remote = spec.block.as_ref().and_then(|block| block.rootfs.as_ref());
    if let Some(path) = spec.rootfs.as_deref().or(remote.map(|rootfs| Path::new(&rootfs.disk.url))) {
        args.disk(ROOTFS, path, served.next(), "read-only=on");
    }
    if let (Some(path), Some(_)) = (&spec.overlay, &spec.block) {
        // Flushes reach the server, to which they cost little.
        args.disk(OVERLAY, path, served.next(), "read-only=off,discard=unmap");
    } else if let Some(path) = &spec.overlay {
        // A sandbox's disk does not outlive a crash of the host, so flushes of the guest need not reach it;
        // the same as Firecracker's default.
        args.disk(OVERLAY, path, None, "read-only=off,discard=unmap,cache.no-flush=on");
    }
    if let Some(net) = &spec.net {
        args.pair("-netdev", format!("tap,id=net0,ifname={},script=no,downscript=no", net.tap));
        args.pair("-device", format!("virtio-net-pci,netdev=net0,mac={},romfile=", net.mac));
    }
    args.0
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, name: &str) -> &mut Self {
        self.0.push(name.into());
        self
    }

    fn pair(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.0.push(name.into());
        self.0.push(value.into());
        self
    }

    /// A raw image, a file or served on a descriptor: its content never chooses the format. Disks show in the guest in the
    /// order given. An error is the guest's to hear: QEMU's default stops the VM where there is no space.
    fn disk(&mut self, name: &str, path: &Path, served: Option<u32>, options: &str) {
        let mut text = OsString::from(format!("node-name={name},{options},"));
        match served {
            // No reconnect-delay: a dead server is an error at once, and the end of the VM.
            Some(fd) => text.push(format!("driver=nbd,export={name},server.type=fd,server.str={fd}")),
            None => {
                text.push("driver=raw,file.driver=file,file.filename=");
                // A comma in a value is written twice.
                text.push(doubled_commas(path));
            }
        }
        self.pair("-blockdev", text);
        self.pair("-device", format!("virtio-blk-pci,drive={name},rerror=report,werror=report"));
    }
}

fn doubled_commas(path: &Path) -> OsString {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    let bytes = path.as_os_str().as_bytes();
    OsString::from_vec(
        bytes.iter().flat_map(|b| std::iter::repeat_n(*b, if *b == b',' { 2 } else { 1 })).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::block::{BlockSpec, DiskRate};
    use hearth_core::shim::GuestNetSpec;
    use hearth_core::spec::VmmKind;

    fn spec() -> ShimSpec {
        ShimSpec {
            protocol: 1,
            instance: "a".parse().unwrap(),
            id: "abcdefghijkmnpqr".parse().unwrap(),
            name: "box".parse().unwrap(),
            vmm: VmmKind::Qemu,
            program: "/usr/bin/qemu-system-x86_64".into(),
            kernel: "/k/vmlinux".into(),
            initramfs: Some("/k/initramfs".into()),
            rootfs: Some("/t/a,b/rootfs.ext4".into()),
            overlay: Some("/s/overlay.ext4".into()),
            block: None,
            drive_rate: Default::default(),
            cpus: 2,
            memory_mib: 256,
            netns: None,
            net: Some(GuestNetSpec { tap: "tap0".into(), mac: "06:00:ac:10:00:02".into(), dns: vec![] }),
            agent: true,
            env: vec![],
            ends_at_ms: None,
            run_dir: "/r".into(),
            state_dir: "/s".into(),
            console_cap_bytes: 1 << 20,
            stats_interval_ms: 0,
        }
    }

    fn line(spec: &ShimSpec, accelerator: Accelerator) -> String {
        let args = build(spec, accelerator, Some(2_000_000));
        args.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn disks_come_in_order_and_commas_in_paths_are_doubled() {
        let line = line(&spec(), Accelerator::Tcg);
        let root = line.find("file.filename=/t/a,,b/rootfs.ext4").unwrap();
        assert!(root < line.find("file.filename=/s/overlay.ext4").unwrap());
        assert!(line.contains("-accel tcg,tb-size=256 -cpu qemu64"), "{line}");
        assert!(line.contains("tsc_early_khz=2000000"), "{line}");
        assert!(line.contains("ifname=tap0,script=no,downscript=no"), "{line}");
    }

    #[test]
    fn served_disks_are_the_descriptors_after_the_agents() {
        let block = Some(BlockSpec {
            rootfs: None,
            base: "/s/disk.base".into(),
            rate: DiskRate::default(),
            failpoints: String::new(),
            nbd: None,
        });
        let with_agent = line(&ShimSpec { block: block.clone(), ..spec() }, Accelerator::Tcg);
        assert!(with_agent.contains("export=rootfs,server.type=fd,server.str=6"), "{with_agent}");
        assert!(with_agent.contains("export=overlay,server.type=fd,server.str=7"), "{with_agent}");
        assert!(!with_agent.contains("no-flush") && !with_agent.contains("filename"), "{with_agent}");
        let alone = line(&ShimSpec { block, agent: false, rootfs: None, ..spec() }, Accelerator::Tcg);
        assert!(alone.contains("export=overlay,server.type=fd,server.str=5"), "{alone}");
    }

    #[test]
    fn a_kernel_alone_gets_no_agent_disk_or_card() {
        let spec =
            ShimSpec { agent: false, rootfs: None, overlay: None, net: None, initramfs: None, ..spec() };
        let line = line(&spec, Accelerator::Kvm);
        assert!(line.contains("-accel kvm -cpu host"), "{line}");
        for absent in ["virtio-serial", "virtio-blk", "virtio-net", "-initrd", "tsc_early_khz"] {
            assert!(!line.contains(absent), "{absent} in {line}");
        }
    }
}
