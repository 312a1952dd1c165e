//! Device nodes, for kernels without devtmpfs: `/dev` is then a tmpfs and the nodes are made here, from a
//! short fixed list and from what `/sys` shows of disks and virtio ports. Links every `/dev` should have.

use std::io;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::MountFlags;

use crate::ignore;

/// Character devices with fixed numbers.
const FIXED: [(&str, u32, u32, u32); 8] = [
    ("null", 1, 3, 0o666),
    ("zero", 1, 5, 0o666),
    ("full", 1, 7, 0o666),
    ("random", 1, 8, 0o666),
    ("urandom", 1, 9, 0o666),
    ("tty", 5, 0, 0o666),
    ("console", 5, 1, 0o600),
    ("ptmx", 5, 2, 0o666),
];
/// Classes whose devices are needed, and their type.
const CLASSES: [(&str, FileType); 3] = [
    ("/sys/class/block", FileType::BlockDevice),
    ("/sys/class/virtio-ports", FileType::CharacterDevice),
    ("/sys/class/misc", FileType::CharacterDevice),
];

/// Mounts `/dev`; `/sys` must be mounted for the fallback.
pub(crate) fn mount() -> io::Result<()> {
    std::fs::create_dir_all("/dev")?;
    let flags = MountFlags::NOSUID;
    if rustix::mount::mount(c"devtmpfs", c"/dev", c"devtmpfs", flags, c"mode=755").is_err() {
        rustix::mount::mount(c"tmpfs", c"/dev", c"tmpfs", flags, c"mode=755,size=1m")?;
        make_nodes();
    }
    Ok(())
}

/// Makes missing nodes. On a devtmpfs there are none missing; an error shows as a missing device later.
pub(crate) fn make_nodes() {
    for (name, major, minor, mode) in FIXED {
        node(name, FileType::CharacterDevice, mode, makedev(major, minor));
    }
    for (class, kind) in CLASSES {
        let Ok(entries) = std::fs::read_dir(class) else { continue };
        for entry in entries.flatten() {
            let numbers = std::fs::read_to_string(entry.path().join("dev")).unwrap_or_default();
            let numbers = numbers.trim().split_once(':');
            let numbers = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
            if let (Some((major, minor)), Some(name)) = (numbers, entry.file_name().to_str()) {
                node(name, kind, 0o600, makedev(major, minor));
            }
        }
    }
}

fn node(name: &str, kind: FileType, mode: u32, dev: u64) {
    let path = Path::new("/dev").join(name);
    if mknodat(CWD, &path, kind, Mode::from_raw_mode(mode), dev).is_ok() {
        // The umask took bits away. Cosmetic if it fails.
        ignore(rustix::fs::chmod(&path, Mode::from_raw_mode(mode)));
    }
}

/// The links that shells and programs expect.
pub(crate) fn make_links() {
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        // There already on some kernels.
        ignore(std::os::unix::fs::symlink(target, link));
    }
}
