//! Pid 1 from the kernel's hand-over to the new root: devices, modules, root disk and overlay, switch, mounts.
//!
//! Kernel command line: `hearth.root=DEV` (default `/dev/vda`, ext4, mounted read-only), `hearth.overlay=DEV`
//! (default `/dev/vdb`, ext4, holds what the guest writes; `none`, or a default that is not there: memory),
//! `hearth.poweroff=off|reboot` (how the VM ends; default: restart if the machine has no virtio ports, which is
//! Firecracker).
//!
//! Nothing of the root file system is needed: missing directories are made in the overlay.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_move, unmount};

use crate::{dev, ignore, modules, net, say};

/// How long a disk may take to appear.
const PATIENCE: Duration = Duration::from_secs(10);
/// How much longer a default overlay may take once the root disk is there.
const GRACE: Duration = Duration::from_millis(100);
/// Where the new root is put together, in the initramfs.
const LOWER: &str = "/hearth/lower";
const OVER: &str = "/hearth/over";
const ROOT: &str = "/hearth/root";

/// What later steps need of the boot.
#[derive(Debug)]
struct Booted {
    /// Root of the overlay disk's mount, which no path reaches any more.
    overlay: Option<File>,
    poweroff: Option<String>,
}

static BOOTED: OnceLock<Booted> = OnceLock::new();

/// A step that failed, with its object.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub(crate) struct BootError {
    what: String,
    source: io::Error,
}

fn step(what: impl Into<String>, result: Result<(), impl Into<io::Error>>) -> Result<(), BootError> {
    result.map_err(|e| BootError { what: what.into(), source: e.into() })
}

/// Boots up to the point where commands can run.
pub(crate) fn boot() -> Result<(), BootError> {
    for dir in ["/proc", "/sys"] {
        step(dir, std::fs::create_dir_all(dir))?;
    }
    step("mount /proc", mount(c"proc", c"/proc", c"proc", MountFlags::empty(), None))?;
    step("mount /sys", mount(c"sysfs", c"/sys", c"sysfs", MountFlags::empty(), None))?;
    step("mount /dev", dev::mount())?;
    open_console();
    modules::load();
    let cmdline = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let overlay = assemble_root(&cmdline)?;
    step("move to the new root", switch_root())?;
    mount_all()?;
    // Commands inherit it: as elsewhere, few unless asked for, and room to ask.
    let files = rustix::process::Rlimit { current: Some(1024), maximum: Some(1 << 20) };
    if let Err(e) = rustix::process::setrlimit(rustix::process::Resource::Nofile, files) {
        say!("limit of open files: {e}");
    }
    if let Err(e) = net::loopback_up() {
        say!("loopback: {e}");
    }
    check_random();
    let booted = Booted { overlay, poweroff: option(&cmdline, "hearth.poweroff").map(str::to_owned) };
    // Set once: this is called once.
    ignore(BOOTED.set(booted));
    Ok(())
}

/// Without a source the kernel makes every reader of random numbers wait, this agent included; on an emulated
/// CPU that has none it was seen to take over ten seconds.
fn check_random() {
    let mut byte = [0u8; 1];
    // SAFETY: the kernel writes at most the one byte.
    let got = unsafe { libc::getrandom(byte.as_mut_ptr().cast(), 1, libc::GRND_NONBLOCK) };
    if got < 0 {
        say!("waiting for random numbers: give the VM a virtio-rng device or a CPU with rdrand");
    }
}

/// The last value of a kernel option.
fn option<'a>(cmdline: &'a str, name: &str) -> Option<&'a str> {
    cmdline.split_whitespace().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

/// Standard descriptors on the console, or where the guest has none on `/dev/null`.
fn open_console() {
    for path in [c"/dev/console", c"/dev/null"] {
        // SAFETY: a terminated path and plain numbers; nothing else uses 0 to 2 yet.
        let done = unsafe {
            let fd = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
            let done = fd >= 0 && (0..=2).all(|target| libc::dup2(fd, target) >= 0);
            if fd > 2 {
                libc::close(fd);
            }
            done
        };
        if done {
            return;
        }
    }
}

/// Waits for a disk; on failure the error says which disks are there.
fn wait_for(device: &str, limit: Duration) -> io::Result<()> {
    let start = Instant::now();
    loop {
        if Path::new(device).exists() {
            return Ok(());
        }
        // Does nothing on a devtmpfs.
        dev::make_nodes();
        if start.elapsed() > limit {
            let disks: Vec<String> = std::fs::read_dir("/sys/class/block")
                .map(|dir| dir.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
                .unwrap_or_default();
            let there = if disks.is_empty() { "there are no disks".to_owned() } else { disks.join(" ") };
            return Err(io::Error::other(format!("did not appear in {limit:?} ({there})")));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Root disk below, overlay disk or memory above, at [`ROOT`]. Returns the overlay disk's root.
fn assemble_root(cmdline: &str) -> Result<Option<File>, BootError> {
    for dir in [LOWER, OVER, ROOT] {
        step(dir, std::fs::create_dir_all(dir))?;
    }
    let root = option(cmdline, "hearth.root").unwrap_or("/dev/vda");
    step(format!("root disk {root}"), wait_for(root, PATIENCE))?;
    let flags = MountFlags::RDONLY;
    // A disk that was not cleanly unmounted and cannot be written mounts only without its journal.
    let mounted =
        mount(root, LOWER, "ext4", flags, None).or_else(|_| mount(root, LOWER, "ext4", flags, c"noload"));
    step(format!("mount root disk {root} as ext4"), mounted)?;
    let (overlay, limit) = match option(cmdline, "hearth.overlay") {
        Some("none") => (None, Duration::ZERO),
        Some(device) => (Some(device), PATIENCE),
        None => (Some("/dev/vdb"), GRACE),
    };
    let disk = match overlay.map(|device| (device, wait_for(device, limit))) {
        Some((device, Ok(()))) => {
            // No background work on a disk that may live for seconds.
            let mounted = mount(device, OVER, "ext4", MountFlags::NOATIME, c"noinit_itable");
            step(format!("mount overlay disk {device} as ext4"), mounted)?;
            Some(File::open(OVER).map_err(|source| BootError { what: OVER.to_owned(), source })?)
        }
        Some((device, Err(e))) if limit == PATIENCE => {
            return step(format!("overlay disk {device}"), Err(e)).map(|()| None);
        }
        _ => {
            say!("no overlay disk: what the guest writes is kept in memory");
            step("mount tmpfs", mount(c"tmpfs", OVER, c"tmpfs", MountFlags::empty(), c"mode=755"))?;
            None
        }
    };
    for dir in ["upper", "work"] {
        let path = Path::new(OVER).join(dir);
        step(path.display().to_string(), std::fs::create_dir_all(&path))?;
    }
    let data = format!("lowerdir={LOWER},upperdir={OVER}/upper,workdir={OVER}/work\0");
    let data = std::ffi::CStr::from_bytes_until_nul(data.as_bytes()).unwrap_or_default();
    let mounted = mount(c"overlay", ROOT, c"overlay", MountFlags::empty(), data);
    step("mount overlay (is the overlay module there?)", mounted)?;
    Ok(disk)
}

/// Makes [`ROOT`] the root, and frees what the initramfs holds. Root and overlay disk stay mounted below it,
/// out of reach.
fn switch_root() -> io::Result<()> {
    for dir in ["/proc", "/sys", "/dev"] {
        unmount(dir, UnmountFlags::DETACH)?;
    }
    empty_initramfs(Path::new("/"), std::fs::metadata("/")?.dev());
    std::env::set_current_dir(ROOT)?;
    mount_move(c".", c"/")?;
    rustix::process::chroot(c".")?;
    std::env::set_current_dir("/")
}

/// Removes files, never crossing into another file system. What cannot be removed stays.
fn empty_initramfs(dir: &Path, device: u64) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        match path.symlink_metadata() {
            Ok(m) if m.dev() != device => {}
            Ok(m) if m.is_dir() => {
                empty_initramfs(&path, device);
                ignore(std::fs::remove_dir(&path));
            }
            Ok(_) => ignore(std::fs::remove_file(&path)),
            Err(_) => {}
        }
    }
}

/// The mounts every Linux program may expect. Only `/proc`, `/sys` and `/dev` are essential.
fn mount_all() -> Result<(), BootError> {
    // A umask of ours would narrow the modes below.
    rustix::process::umask(rustix::fs::Mode::empty());
    for dir in ["/proc", "/sys", "/dev", "/run", "/tmp", "/etc", "/root"] {
        make_dir(dir, if dir == "/tmp" { 0o1777 } else { 0o755 });
    }
    let plain = MountFlags::NOSUID | MountFlags::NODEV;
    let strict = plain | MountFlags::NOEXEC;
    step("mount /proc", mount(c"proc", c"/proc", c"proc", strict, None))?;
    step("mount /sys", mount(c"sysfs", c"/sys", c"sysfs", strict, None))?;
    step("mount /dev", dev::mount())?;
    dev::make_links();
    make_dir("/dev/pts", 0o755);
    make_dir("/dev/shm", 0o1777);
    let pts = c"gid=5,mode=620,ptmxmode=666";
    let optional = [
        ("/dev/pts", mount(c"devpts", c"/dev/pts", c"devpts", MountFlags::NOSUID | MountFlags::NOEXEC, pts)),
        ("/dev/shm", mount(c"tmpfs", c"/dev/shm", c"tmpfs", plain, c"mode=1777")),
        ("/run", mount(c"tmpfs", c"/run", c"tmpfs", plain, c"mode=755")),
        ("/sys/fs/cgroup", mount(c"cgroup2", c"/sys/fs/cgroup", c"cgroup2", strict, None)),
    ];
    for (path, result) in optional {
        if let Err(e) = result {
            say!("mount {path}: {e}");
        }
    }
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    Ok(())
}

/// Makes a directory if there is none. Something else of that name stays and shows when it is used.
fn make_dir(path: &str, mode: u32) {
    if Path::new(path).metadata().is_ok_and(|m| m.is_dir()) {
        return;
    }
    let made = DirBuilder::new().mode(mode).create(path);
    // The sticky bit is not always taken at creation.
    let made = made.and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)));
    if let Err(e) = made {
        say!("directory {path}: {e}");
    }
}

/// Whether power-off ends this VM. No interface tells; see the head of this file.
pub(crate) fn can_power_off() -> bool {
    match BOOTED.get().and_then(|b| b.poweroff.as_deref()) {
        Some("off") => true,
        Some("reboot") => false,
        _ => std::fs::read_dir("/sys/class/virtio-ports").is_ok_and(|mut ports| ports.next().is_some()),
    }
}

/// Before power-off: the overlay's journal is then empty, so the next mount replays nothing. Best effort, all
/// data is synced already.
pub(crate) fn remount_read_only() {
    let flags = MountFlags::RDONLY;
    ignore(rustix::mount::mount_remount(c"/", flags, c""));
    if let Some(overlay) = BOOTED.get().and_then(|b| b.overlay.as_ref()) {
        let path = format!("/proc/self/fd/{}", overlay.as_raw_fd());
        if let Err(e) = rustix::mount::mount_remount(path, flags, c"") {
            say!("overlay disk stays writable: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_kernel_option_counts() {
        let line = "quiet hearth.root=/dev/a x.hearth.root=/dev/b hearth.root=/dev/c hearth.rootless=1\n";
        assert_eq!(option(line, "hearth.root"), Some("/dev/c"));
        assert_eq!(option(line, "hearth.overlay"), None);
    }
}
