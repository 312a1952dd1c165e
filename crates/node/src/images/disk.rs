//! Writable disks: a sparse ext4 per sandbox that takes the overlay of its root.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::{ImageError, io};
use super::ext4::MKE2FS;
use super::job::Job;
use super::program::Limit;
use super::{program, space};

/// Room left to the host: a disk that fills the last byte would stop records from being written.
const MARGIN: u64 = 16 << 20;

/// What a disk of this size needs to be held full, bytes.
#[must_use]
pub fn room(size_mib: u64) -> u64 {
    size_mib.saturating_mul(1 << 20).saturating_add(MARGIN)
}

/// Blank disks of different sizes kept: each takes a few MiB and a descriptor.
const KEPT: usize = 16;

/// Directory of the blank disks in a state directory.
const DIR: &str = "blanks";

/// How the blank disks of this build are made. Another way of making them is another name.
const FORM: u32 = 1;

/// Making one takes 20 ms on a disk that is well.
const FORMAT: Limit = Limit {
    after: Duration::from_secs(60),
    remedy: "The disk under the state directory is very slow or stalls: look in `dmesg` and at the load, then try again.",
};

/// A disk just made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Its size.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
}

/// Empty disks, one per size, to copy from or to put an overlay on: making one by mke2fs(8) takes 10 ms, and 40 on a host
/// with thousands of mounts, all of which it reads. They stay in the state directory and all instances share them.
#[derive(Debug)]
pub struct Blanks {
    dir: PathBuf,
    /// What this instance calls one while it makes it.
    unfinished: String,
    made: Mutex<HashMap<u64, Arc<Blank>>>,
}

/// An empty disk.
#[derive(Debug)]
pub struct Blank {
    /// Open to be read.
    pub file: File,
    /// Where it is, unless somebody removed it.
    pub path: PathBuf,
}

impl Blank {
    /// Gives it another name, as which it stays whatever becomes of this one. False where there can be none: on another file
    /// system, or because somebody removed it.
    #[must_use]
    pub fn link(&self, to: &Path) -> bool {
        let linked = std::fs::hard_link(&self.path, to);
        if let Err(e) = &linked {
            tracing::debug!("a blank disk is copied, as it cannot be linked: {}: {e}", to.display());
        }
        linked.is_ok()
    }
}

impl Blanks {
    /// Below the state directory that all instances share; `instance` is whose daemon this is.
    #[must_use]
    pub fn new(state_dir: &Path, instance: &str) -> Self {
        Self { dir: state_dir.join(DIR), unfinished: format!(".{instance}.new"), made: Mutex::default() }
    }

    /// Removes what a daemon of this instance left that was killed while it made one.
    ///
    /// # Errors
    /// If it is there and cannot be removed.
    pub fn sweep(&self) -> Result<(), ImageError> {
        let path = self.dir.join(&self.unfinished);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(io("remove", &path)(e)),
            _ => Ok(()),
        }
    }

    /// An empty disk of this size. All that are made from it share its UUID; no two of them are ever in one guest.
    ///
    /// # Errors
    /// As for [`create`].
    pub fn get(&self, size_mib: u64, job: &Job<'_>) -> Result<Arc<Blank>, ImageError> {
        // Held while one is made: the others want the same.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.len() >= KEPT && !made.contains_key(&size_mib) {
            for (_, blank) in made.drain() {
                // A sandbox that has it has its own name for it.
                if let Err(e) = std::fs::remove_file(&blank.path) {
                    tracing::debug!("a blank disk stays: {}: {e}", blank.path.display());
                }
            }
        }
        match made.entry(size_mib) {
            Entry::Occupied(known) => Ok(Arc::clone(known.get())),
            Entry::Vacant(place) => {
                let path = self.dir.join(format!("{size_mib}.{FORM}.ext4"));
                let file = match File::open(&path) {
                    Ok(file) => file,
                    Err(e) if e.kind() == ErrorKind::NotFound => self.make(&path, size_mib, job)?,
                    Err(e) => return Err(io("open", &path)(e)),
                };
                Ok(Arc::clone(place.insert(Arc::new(Blank { file, path }))))
            }
        }
    }

    fn make(&self, path: &Path, size_mib: u64, job: &Job<'_>) -> Result<File, ImageError> {
        std::fs::create_dir_all(&self.dir).map_err(io("create", &self.dir))?;
        let new = self.dir.join(&self.unfinished);
        create(&new, size_mib, job)?;
        let file = File::open(&new).map_err(io("open", &new))?;
        // It outlives a crash of the host, so it must be whole after one.
        file.sync_all().map_err(io("sync", &new))?;
        std::fs::set_permissions(&new, PermissionsExt::from_mode(0o400)).map_err(io("protect", &new))?;
        std::fs::rename(&new, path).map_err(io("name", path))?;
        Ok(file)
    }
}

/// Makes an empty writable ext4 of `size_mib` at `path`; what a broken attempt left there is replaced. The
/// file is sparse: it takes a few MiB until the guest writes.
///
/// # Errors
/// [`ImageError::NoSpace`] if the disk under it is full. Nothing is left then.
pub fn create(path: &Path, size_mib: u64, job: &Job<'_>) -> Result<Made, ImageError> {
    let start = Instant::now();
    let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let bytes = size_mib.checked_mul(1 << 20).filter(|b| i64::try_from(*b).is_ok()).ok_or_else(|| {
        ImageError::Option { field: "disk", why: format!("{size_mib} MiB is more than any disk holds") }
    })?;
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(io("replace", path)(e)),
        _ => {}
    }
    let made = format(path, dir, bytes, job);
    if let Err(error) = made {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                tracing::warn!(error = &e as &dyn std::error::Error, path = %path.display(), "a disk half made is left");
            }
            _ => {}
        }
        return Err(space::explain(error, dir, "the writable disk", bytes));
    }
    Ok(Made { bytes, took: start.elapsed() })
}

fn format(path: &Path, dir: &Path, bytes: u64, job: &Job<'_>) -> Result<(), ImageError> {
    let file = File::create_new(path).map_err(io("create", path))?;
    file.set_len(bytes).map_err(io("size", path))?;
    drop(file);
    let mut cmd = MKE2FS.command()?;
    // Room to grow the descriptor table is not needed, and zeroing it costs four times the rest.
    cmd.args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", "hearth-data", "-O", "^resize_inode"]);
    cmd.args(["-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"]).arg(path);
    let ended = program::run(MKE2FS, cmd, dir, FORMAT, job)?;
    if ended.success() { Ok(()) } else { Err(ended.failure("")) }
}
