//! The requests we send, field for field as Firecracker's swagger file names them. Firecracker refuses
//! unknown fields, so a wrong name here is an error at once.

use std::path::Path;

use serde::Serialize;

/// `PUT /machine-config`.
#[derive(Debug, Serialize)]
pub(super) struct MachineConfig {
    vcpu_count: u32,
    mem_size_mib: u64,
    smt: bool,
}

impl MachineConfig {
    pub(super) fn new(cpus: u32, memory_mib: u64) -> Self {
        Self { vcpu_count: cpus, mem_size_mib: memory_mib, smt: false }
    }
}

/// `PUT /boot-source`.
#[derive(Debug, Serialize)]
pub(super) struct BootSource<'a> {
    pub(super) kernel_image_path: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) initrd_path: Option<&'a Path>,
    pub(super) boot_args: &'a str,
}

/// `PUT /drives/{drive_id}`.
#[derive(Debug, Serialize)]
pub(super) struct Drive<'a> {
    drive_id: &'static str,
    path_on_host: &'a Path,
    is_root_device: bool,
    is_read_only: bool,
    io_engine: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_type: Option<&'static str>,
}

impl<'a> Drive<'a> {
    /// The template's disk. Firecracker locks no file: many VMs read it at once.
    pub(super) fn root(path: &'a Path) -> Self {
        Self {
            drive_id: "rootfs",
            path_on_host: path,
            is_root_device: true,
            is_read_only: true,
            io_engine: "Sync",
            cache_type: None,
        }
    }

    /// The sandbox's own disk. `Async` would keep the file busy for up to 50 ms after the VMM's end.
    pub(super) fn writable(path: &'a Path) -> Self {
        Self {
            drive_id: "overlay",
            path_on_host: path,
            is_root_device: false,
            is_read_only: false,
            io_engine: "Sync",
            cache_type: None,
        }
    }

    /// The same as a block device. The guest's flushes are asked for: what is in the cache of a device goes with its server.
    pub(super) fn device(path: &'a Path) -> Self {
        Self { cache_type: Some("Writeback"), ..Self::writable(path) }
    }
}

/// `PUT /network-interfaces/{iface_id}`.
#[derive(Debug, Serialize)]
pub(super) struct NetworkInterface<'a> {
    pub(super) iface_id: &'static str,
    pub(super) guest_mac: &'a str,
    pub(super) host_dev_name: &'a str,
}

/// `PUT /vsock`.
#[derive(Debug, Serialize)]
pub(super) struct Vsock<'a> {
    pub(super) guest_cid: u32,
    pub(super) uds_path: &'a Path,
}

/// `PUT /serial`.
#[derive(Debug, Serialize)]
pub(super) struct Serial<'a> {
    pub(super) serial_out_path: &'a str,
}

/// `PUT /metrics`.
#[derive(Debug, Serialize)]
pub(super) struct Metrics<'a> {
    pub(super) metrics_path: &'a Path,
}

/// `PUT /actions`.
#[derive(Debug, Serialize)]
pub(super) struct Action {
    pub(super) action_type: &'static str,
}

/// `PATCH /vm`.
#[derive(Debug, Serialize)]
pub(super) struct VmState {
    pub(super) state: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(value: &impl Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }

    #[test]
    fn each_request_has_exactly_these_bytes() {
        assert_eq!(json(&MachineConfig::new(2, 256)), r#"{"vcpu_count":2,"mem_size_mib":256,"smt":false}"#);
        let mut boot = BootSource {
            kernel_image_path: Path::new("/k/vmlinux"),
            initrd_path: Some(Path::new("/k/initramfs")),
            boot_args: "quiet",
        };
        assert_eq!(
            json(&boot),
            r#"{"kernel_image_path":"/k/vmlinux","initrd_path":"/k/initramfs","boot_args":"quiet"}"#
        );
        boot.initrd_path = None;
        assert_eq!(json(&boot), r#"{"kernel_image_path":"/k/vmlinux","boot_args":"quiet"}"#);
        assert_eq!(
            json(&Drive::root(Path::new("/t/rootfs.ext4"))),
            r#"{"drive_id":"rootfs","path_on_host":"/t/rootfs.ext4","is_root_device":true,"is_read_only":true,"io_engine":"Sync"}"#
        );
        assert_eq!(
            json(&Drive::writable(Path::new("/s/disk"))),
            r#"{"drive_id":"overlay","path_on_host":"/s/disk","is_root_device":false,"is_read_only":false,"io_engine":"Sync"}"#
        );
        assert_eq!(
            json(&Drive::device(Path::new("/dev/nbd3"))),
            r#"{"drive_id":"overlay","path_on_host":"/dev/nbd3","is_root_device":false,"is_read_only":false,"io_engine":"Sync","cache_type":"Writeback"}"#
        );
        assert_eq!(
            json(&NetworkInterface {
                iface_id: "eth0",
                guest_mac: "06:00:ac:10:00:02",
                host_dev_name: "tap0"
            }),
            r#"{"iface_id":"eth0","guest_mac":"06:00:ac:10:00:02","host_dev_name":"tap0"}"#
        );
        assert_eq!(
            json(&Vsock { guest_cid: 3, uds_path: Path::new("/r/vsock.sock") }),
            r#"{"guest_cid":3,"uds_path":"/r/vsock.sock"}"#
        );
        assert_eq!(
            json(&Serial { serial_out_path: "/proc/self/fd/3" }),
            r#"{"serial_out_path":"/proc/self/fd/3"}"#
        );
        assert_eq!(
            json(&Metrics { metrics_path: Path::new("/r/metrics.fifo") }),
            r#"{"metrics_path":"/r/metrics.fifo"}"#
        );
        assert_eq!(json(&Action { action_type: "InstanceStart" }), r#"{"action_type":"InstanceStart"}"#);
        assert_eq!(json(&VmState { state: "Paused" }), r#"{"state":"Paused"}"#);
    }
}
