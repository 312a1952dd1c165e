//! Files with holes: copying only what is there, and how much room is left.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use hearth_core::host::HostError;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::error;

/// Bytes that an unprivileged writer may still use on the file system of `dir`.
///
/// # Errors
/// From statvfs(3).
pub fn free_bytes(dir: &Path) -> Result<u64, HostError> {
    let fs = rustix::fs::statvfs(dir)
        .map_err(|e| error::os("look at", format_args!("space in {}", dir.display()), "statvfs", e.into()))?;
    Ok(fs.f_bavail.saturating_mul(fs.f_frsize))
}

/// Makes `to` (0600) a copy of `from` with the same holes: shared blocks where the file system can share, else
/// the data between holes (lseek(2), SEEK_DATA).
///
/// # Errors
/// If `to` exists or cannot be written; nothing is left of it then.
pub fn copy(from: &File, to: &Path) -> Result<(), HostError> {
    let fail = |doing: &str, e| error::os("copy", format_args!("to {}", to.display()), doing, e);
    let mut options = fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(to).map_err(|e| fail("create it", e))?;
    let copied = fill(from, &file);
    if copied.is_err() {
        drop(file);
        // The error that matters is the first one.
        drop(fs::remove_file(to));
    }
    copied.map_err(|e| fail("write it", e))
}

fn fill(from: &File, to: &File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let len = from.metadata()?.len();
    to.set_len(len)?;
    let mut at = 0;
    while at < len {
        let begin = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            // No data from here on.
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(begin))?;
        range(from, to, begin, end)?;
        at = end;
    }
    Ok(())
}

fn range(from: &File, to: &File, begin: u64, end: u64) -> io::Result<()> {
    let (mut read, mut write) = (begin, begin);
    while read < end {
        let want = usize::try_from(end - read).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut write), want) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::INTR) => {}
            // Not between these file systems.
            Err(Errno::XDEV | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => {
                return by_hand(from, to, read, end);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn by_hand(from: &File, to: &File, begin: u64, end: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let mut buffer = vec![0; 1 << 20];
    let mut at = begin;
    while at < end {
        let want = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let part = &mut buffer[..want];
        from.read_exact_at(part, at)?;
        to.write_all_at(part, at)?;
        at += want as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_copy_has_the_data_and_the_holes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("from");
        let from = File::create_new(&path).unwrap();
        from.set_len(64 << 20).unwrap();
        from.write_all_at(b"head", 0).unwrap();
        from.write_all_at(&[7; 10_000], 33 << 20).unwrap();
        let from = File::open(&path).unwrap();
        let to = dir.path().join("to");
        copy(&from, &to).unwrap();
        assert!(fs::read(&to).unwrap() == fs::read(&path).unwrap());
        let blocks = fs::metadata(&to).unwrap().blocks();
        assert!(blocks * 512 < 1 << 20, "the holes were filled: {blocks} blocks");
        // A second one is refused and spoils nothing.
        assert!(copy(&from, &to).is_err());
        assert_eq!(fs::metadata(&to).unwrap().len(), 64 << 20);
        let by_hand_to = File::create_new(dir.path().join("by-hand")).unwrap();
        by_hand_to.set_len(64 << 20).unwrap();
        by_hand(&from, &by_hand_to, 33 << 20, (33 << 20) + 10_000).unwrap();
        let mut seen = vec![0; 10_000];
        File::open(dir.path().join("by-hand")).unwrap().read_exact_at(&mut seen, 33 << 20).unwrap();
        assert!(seen.iter().all(|b| *b == 7));
    }

    #[test]
    fn room_is_told_and_an_absent_directory_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(dir.path()).unwrap() > 0);
        assert!(free_bytes(&dir.path().join("absent")).is_err());
    }
}
