//! One index as sysfs shows it, whether it is quiet, and its lock: `flock` on its directory in sysfs, which leaves no file
//! and which every process of the host's sees.

use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use hearth_core::host::{ErrorClass, HostError};

use super::{Device, LOOK};
use crate::error;

const SYS_BLOCK: &str = "/sys/block";
const SYS_MODULE: &str = "/sys/module/nbd";

/// What the kernel says of one index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The task that connected it, maybe long gone; there while it is connected, or somebody still has it open.
    pub task: Option<u32>,
    /// Its backend identifier.
    pub backend: Option<String>,
    /// Bytes.
    pub size: u64,
    /// Requests that the kernel has not ended.
    pub in_flight: u64,
    /// Devices above it.
    pub holders: Vec<String>,
}

impl Seen {
    /// Why the index must not be used; nothing: it is proven quiet.
    #[must_use]
    pub fn unquiet(&self) -> Option<String> {
        let quiet = self.task.is_none() && self.size == 0 && self.in_flight == 0 && self.holders.is_empty();
        (!quiet).then(|| self.to_string())
    }

    /// Connected, by the owner, and by its task if that is known.
    #[must_use]
    pub fn is_of(&self, device: &Device) -> bool {
        self.task.is_some()
            && self.backend.as_deref() == Some(device.owner.as_str())
            && (device.task.is_none() || device.task == self.task)
    }

    /// The task of a device that is connected without any name.
    pub(super) fn nameless(&self) -> Option<u32> {
        self.task.filter(|_| self.backend.is_none() && self.size > 0)
    }

    /// Connected by somebody else.
    pub(super) fn is_anothers(&self, device: &Device) -> bool {
        // Without a backend while there is a pid it may be on its way out: not proven to be anybody's.
        self.task.is_some() && self.backend.is_some() && !self.is_of(device)
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.task {
            Some(task) => write!(f, "connected by task {task}")?,
            None => f.write_str("not connected")?,
        }
        match self.backend.as_deref() {
            Some(backend) => write!(f, ", backend {backend:?}")?,
            None => f.write_str(", no backend")?,
        }
        write!(f, ", {} bytes, {} in flight", self.size, self.in_flight)?;
        if !self.holders.is_empty() {
            write!(f, ", below {}", self.holders.join(", "))?;
        }
        Ok(())
    }
}

fn directory(index: u32) -> PathBuf {
    Path::new(SYS_BLOCK).join(format!("nbd{index}"))
}

/// The device itself.
#[must_use]
pub fn path(index: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// Processes that have the device open, as far as that can be seen; for an operator, nothing is decided by it.
pub(crate) fn openers(index: u32) -> Vec<u32> {
    let device = path(index);
    let has = |pid: u32| {
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        open.flatten().any(|entry| fs::read_link(entry.path()).is_ok_and(|file| file == device))
    };
    let Ok(all) = fs::read_dir("/proc") else { return Vec::new() };
    all.flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| has(*pid))
        .collect()
}

/// Whether the kernel has this index.
pub(super) fn exists(index: u32) -> bool {
    !matches!(fs::symlink_metadata(directory(index)), Err(e) if e.kind() == io::ErrorKind::NotFound)
}

/// Looks at one index; never opens the device.
///
/// # Errors
/// If there is no such index (the module is not loaded, or with a smaller `nbds_max`), or a fact cannot be read: then it
/// is not quiet.
pub fn look(index: u32) -> io::Result<Seen> {
    look_in(&directory(index))
}

fn look_in(dir: &Path) -> io::Result<Seen> {
    // First, so that an index that is not there is an error and not quiet.
    let size: u64 = number(&fs::read_to_string(dir.join("size"))?)?;
    let in_flight = fs::read_to_string(dir.join("inflight"))?;
    let in_flight = in_flight.split_whitespace().map(number).sum::<io::Result<u64>>()?;
    let mut holders = Vec::new();
    for entry in fs::read_dir(dir.join("holders"))? {
        holders.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let task = optional(dir, "pid")?.map(|text| number(&text)).transpose()?;
    let task = task.map(|task| u32::try_from(task).map_err(io::Error::other)).transpose()?;
    // sysfs counts in sectors of 512 bytes whatever the block size is.
    Ok(Seen { task, backend: optional(dir, "backend")?, size: size * 512, in_flight, holders })
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{text:?}: {e}")))
}

fn optional(dir: &Path, file: &str) -> io::Result<Option<String>> {
    match fs::read_to_string(dir.join(file)) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        // The file was opened and its device went away.
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The indexes there are, in order. Empty without the module.
///
/// # Errors
/// If `/sys/block` cannot be read.
pub fn indexes() -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(SYS_BLOCK)? {
        let name = entry?.file_name();
        found.extend(name.to_str().and_then(|n| n.strip_prefix("nbd")?.parse::<u32>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

/// What the module was loaded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// `nbds_max`: indexes made when it was loaded.
    pub most: u32,
}

/// The module's limits; nothing if it is not there.
///
/// # Errors
/// If they cannot be read.
pub fn limits() -> io::Result<Option<Limits>> {
    if !Path::new(SYS_MODULE).exists() {
        return Ok(None);
    }
    let most = number(&fs::read_to_string(Path::new(SYS_MODULE).join("parameters/nbds_max"))?)?;
    Ok(Some(Limits { most: u32::try_from(most).map_err(io::Error::other)? }))
}

/// The lock of one index, held until dropped. Whoever changes an index has it, from the look at its owner to the kernel's
/// answer.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn take(verb: &'static str, device: &Device, deadline: Instant) -> Result<Self, HostError> {
        let file = File::open(directory(device.index)).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                let why = "there is no such device: load nbd, or load it with a greater nbds_max";
                error::plain(verb, device, ErrorClass::Refused, why)
            }
            _ => error::os(verb, device, "open it in sysfs", e),
        })?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOOK),
                Err(TryLockError::WouldBlock) => {
                    let why = "another command on it has not ended";
                    return Err(error::plain(verb, device, ErrorClass::Busy, why));
                }
                Err(TryLockError::Error(e)) => return Err(error::os(verb, device, "lock it", e)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(task: Option<u32>) -> Device {
        Device { index: 3, owner: "abcdefghijkmnpqr".parse().unwrap(), task }
    }

    #[test]
    fn an_index_is_quiet_only_if_everything_about_it_was_seen_to_be() {
        let sys = tempfile::tempdir().unwrap();
        let dir = sys.path();
        assert!(look_in(dir).is_err(), "what is not there is not quiet");
        fs::write(dir.join("size"), "0\n").unwrap();
        fs::write(dir.join("inflight"), "       0        0\n").unwrap();
        assert!(look_in(dir).is_err(), "holders were not seen");
        fs::create_dir(dir.join("holders")).unwrap();
        assert_eq!(look_in(dir).unwrap().unquiet(), None);
        fs::write(dir.join("inflight"), "       0        1\n").unwrap();
        assert!(look_in(dir).unwrap().unquiet().unwrap().contains("1 in flight"));
        fs::write(dir.join("inflight"), "0 0\n").unwrap();
        fs::write(dir.join("size"), "8\n").unwrap();
        assert_eq!(look_in(dir).unwrap().size, 4096);
        assert!(look_in(dir).unwrap().unquiet().is_some());
        fs::write(dir.join("size"), "0\n").unwrap();
        fs::write(dir.join("holders/dm-0"), "").unwrap();
        assert!(look_in(dir).unwrap().unquiet().unwrap().contains("below dm-0"));
        fs::remove_file(dir.join("holders/dm-0")).unwrap();
        fs::write(dir.join("pid"), "77\n").unwrap();
        assert!(look_in(dir).unwrap().unquiet().is_some());
        fs::write(dir.join("pid"), "x\n").unwrap();
        assert!(look_in(dir).is_err(), "a pid that cannot be read is not none");
    }

    #[test]
    fn the_owner_is_the_backend_and_the_task_where_that_is_known() {
        let seen = |task, backend: Option<&str>| Seen {
            task,
            backend: backend.map(str::to_owned),
            size: 0,
            in_flight: 0,
            holders: vec![],
        };
        let (mine, other) = (Some("abcdefghijkmnpqr"), Some("abcdefghijkmnpqs"));
        assert!(seen(Some(7), mine).is_of(&device(None)) && seen(Some(7), mine).is_of(&device(Some(7))));
        // The number came round, or the id did: neither alone is proof.
        assert!(!seen(Some(8), mine).is_of(&device(Some(7))));
        for (task, backend) in [(Some(7), other), (Some(7), None), (None, mine), (Some(7), Some(""))] {
            assert!(!seen(task, backend).is_of(&device(Some(7))), "{task:?} {backend:?}");
            assert!(!seen(task, backend).is_of(&device(None)), "{task:?} {backend:?}");
        }
        assert!(seen(Some(7), other).is_anothers(&device(None)));
        assert!(!seen(Some(7), None).is_anothers(&device(None)));
        assert!(!seen(None, None).is_anothers(&device(None)));
        let sized = |seen: Seen| Seen { size: 512, ..seen };
        assert_eq!(sized(seen(Some(7), None)).nameless(), Some(7));
        assert_eq!(sized(seen(Some(7), mine)).nameless(), None);
        assert_eq!(seen(Some(7), None).nameless(), None);
    }
}
