//! The requests we send, field for field as Firecracker's swagger file names them. Firecracker refuses
//! unknown fields, so a wrong name here is an error at once.

use std::path::Path;

use hearth_core::block::DiskRate;
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
    #[serde(skip_serializing_if = "Option::is_none")]
    rate_limiter: Option<RateLimiter>,
}

/// `rate_limiter` of a drive; what is absent is not limited.
#[derive(Debug, Serialize)]
struct RateLimiter {
    #[serde(skip_serializing_if = "Option::is_none")]
    bandwidth: Option<TokenBucket>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ops: Option<TokenBucket>,
}

/// Begins full, holds `size` at most and gets that much anew within `refill_time`.
#[derive(Debug, Serialize)]
struct TokenBucket {
    size: u64,
    /// Milliseconds.
    refill_time: u64,
}

/// Firecracker looks at a bucket that ran empty no sooner than after this time, milliseconds: one that holds less than
/// its refill until then would be slower than its rate.
const SHORTEST_BURST: u64 = 100;

impl RateLimiter {
    /// A bucket holds what the burst time allows, which is what a limit of ours lets through at once after a pause.
    /// Firecracker lets a request through that is larger than the bucket, and later ones pay for it, as ours does.
    fn new(rate: DiskRate) -> Option<Self> {
        let bucket = |per_second: u64| {
            // At least one token in at least a millisecond: a bucket with a 0 in it is taken for no limit.
            let exact = u128::from(per_second) * u128::from(rate.burst().max(SHORTEST_BURST));
            let size = u64::try_from(exact.div_ceil(1000)).unwrap_or(u64::MAX);
            let refill_time = u64::try_from(u128::from(size) * 1000 / u128::from(per_second.max(1)));
            (per_second > 0)
                .then(|| TokenBucket { size, refill_time: refill_time.unwrap_or(u64::MAX).max(1) })
        };
        let bandwidth = bucket(rate.mib_per_second.saturating_mul(1 << 20));
        let ops = bucket(rate.iops);
        (bandwidth.is_some() || ops.is_some()).then_some(Self { bandwidth, ops })
    }
}

impl<'a> Drive<'a> {
    /// The template's disk. Firecracker locks no file: many VMs read it at once.
    pub(super) fn root(path: &'a Path, rate: DiskRate) -> Self {
        Self {
            drive_id: "rootfs",
            path_on_host: path,
            is_root_device: true,
            is_read_only: true,
            io_engine: "Sync",
            cache_type: None,
            rate_limiter: RateLimiter::new(rate),
        }
    }

    /// The sandbox's own disk. `Async` would keep the file busy for up to 50 ms after the VMM's end.
    pub(super) fn writable(path: &'a Path, rate: DiskRate) -> Self {
        Self {
            drive_id: "overlay",
            path_on_host: path,
            is_root_device: false,
            is_read_only: false,
            io_engine: "Sync",
            cache_type: None,
            rate_limiter: RateLimiter::new(rate),
        }
    }

    /// The same as a block device. The guest's flushes are asked for: what is in the cache of a device goes with its server.
    pub(super) fn device(path: &'a Path) -> Self {
        Self { cache_type: Some("Writeback"), ..Self::writable(path, DiskRate::default()) }
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
            json(&Drive::root(Path::new("/t/rootfs.ext4"), DiskRate::default())),
            r#"{"drive_id":"rootfs","path_on_host":"/t/rootfs.ext4","is_root_device":true,"is_read_only":true,"io_engine":"Sync"}"#
        );
        assert_eq!(
            json(&Drive::writable(Path::new("/s/disk"), DiskRate::default())),
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
    #[test]
    fn a_limit_becomes_buckets_that_hold_the_burst_and_are_refilled_at_the_rate() {
        let limiter = |mib_per_second, iops, burst_ms| {
            json(&Drive::writable(Path::new("/d"), DiskRate { mib_per_second, iops, burst_ms }).rate_limiter)
        };
        assert_eq!(
            limiter(4, 2000, 0),
            r#"{"bandwidth":{"size":4194304,"refill_time":1000},"ops":{"size":2000,"refill_time":1000}}"#
        );
        assert_eq!(limiter(4, 0, 500), r#"{"bandwidth":{"size":2097152,"refill_time":500}}"#);
        // A bucket that would be looked at too seldom, and one of less than a request.
        assert_eq!(limiter(0, 5000, 1), r#"{"ops":{"size":500,"refill_time":100}}"#);
        assert_eq!(limiter(0, 4, 1), r#"{"ops":{"size":1,"refill_time":250}}"#);
        assert_eq!(limiter(0, 0, 700), "null");
        assert_eq!(limiter(0, 100_000_000, 60_000), r#"{"ops":{"size":6000000000,"refill_time":60000}}"#);
    }
}
