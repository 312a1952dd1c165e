//! The guest agent's binary on disk. Its hash names initramfs files, and every creation asks for it; the binary is
//! read again only when the file changed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

/// A hash of the binary.
pub(super) type Digest = [u8; 32];
/// Replacements during one read after which it is given up.
const TRIES: usize = 5;

/// The guest agent, as one daemon knows it.
#[derive(Debug)]
pub struct GuestProgram {
    path: PathBuf,
    known: Mutex<Option<(Stamp, Digest)>>,
    /// Held while it is read for its hash: all who ask at once wait for one read.
    reading: Mutex<()>,
    #[cfg(test)]
    reads: std::sync::atomic::AtomicU32,
}

/// What tells that a file is still the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    changed: (i64, i64),
}

impl Stamp {
    fn of(path: &Path) -> io::Result<Self> {
        let m = fs::metadata(path)?;
        Ok(Self {
            device: m.dev(),
            inode: m.ino(),
            size: m.size(),
            // Not the time of modification, which anybody may set.
            changed: (m.ctime(), m.ctime_nsec()),
        })
    }
}

impl GuestProgram {
    /// The binary at `path`; nothing is read yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            known: Mutex::new(None),
            reading: Mutex::new(()),
            #[cfg(test)]
            reads: std::sync::atomic::AtomicU32::new(0),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its hash: one look at the file's metadata while that is the same.
    pub(super) fn digest(&self) -> io::Result<Digest> {
        if let Some(digest) = self.known()? {
            return Ok(digest);
        }
        let _one = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        match self.known()? {
            Some(digest) => Ok(digest),
            None => self.read().map(|(_, digest)| digest),
        }
    }

    /// What it was last, if it is still the same.
    fn known(&self) -> io::Result<Option<Digest>> {
        let known = *self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known {
            Some((stamp, digest)) if Stamp::of(&self.path)? == stamp => Ok(Some(digest)),
            _ => Ok(None),
        }
    }

    /// Its contents, with their hash.
    pub(super) fn read(&self) -> io::Result<(Vec<u8>, Digest)> {
        for _ in 0..TRIES {
            #[cfg(test)]
            self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let before = Stamp::of(&self.path)?;
            let bytes = fs::read(&self.path)?;
            if Stamp::of(&self.path)? == before {
                let digest = Sha256::digest(&bytes).into();
                *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some((before, digest));
                return Ok((bytes, digest));
            }
        }
        Err(io::Error::other("it keeps changing while it is read"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn a_replaced_or_rewritten_binary_has_another_hash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest");
        let guest = GuestProgram::new(path.clone());
        assert_eq!(guest.digest().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "one").unwrap();
        let one = guest.digest().unwrap();
        assert_eq!(guest.digest().unwrap(), one);
        assert_eq!(guest.read().unwrap(), (b"one".to_vec(), one));
        fs::write(dir.path().join("new"), "two").unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        let two = guest.digest().unwrap();
        assert_ne!(two, one);
        fs::write(&path, "longer").unwrap();
        assert_ne!(guest.digest().unwrap(), two);
    }

    #[test]
    fn all_who_ask_at_once_wait_for_one_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest");
        fs::write(&path, vec![7; 4 << 20]).unwrap();
        let guest = GuestProgram::new(path);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| guest.digest().unwrap());
            }
        });
        assert_eq!(guest.reads.load(Ordering::Relaxed), 1);
    }
}
