//! A FIFO in a directory of ours: made fresh, for its owner alone. Opening it is no matter of this file: a reader
//! opens it for reading and writing, which never blocks and sees no end of file while writers come and go (fifo(7)).

use std::io;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Makes the FIFO. What has its place gives way: the directory is ours.
///
/// # Errors
/// If the kernel refuses, or a directory has its place.
pub fn ensure(path: &Path) -> io::Result<()> {
    release(path)?;
    Ok(mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?)
}

/// Removes it; absent is success.
///
/// # Errors
/// If the kernel refuses.
pub fn release(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};

    #[test]
    fn it_takes_the_place_of_what_was_there_and_goes_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.fifo");
        std::fs::write(&path, "an older file").unwrap();
        ensure(&path).unwrap();
        let seen = std::fs::metadata(&path).unwrap();
        assert!(seen.file_type().is_fifo());
        assert_eq!(seen.permissions().mode() & 0o777, 0o600);
        release(&path).unwrap();
        release(&path).unwrap();
        assert!(!path.exists());
    }
}
