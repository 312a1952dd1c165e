//! The directories of the store, and the work areas in which everything is built.
//!
//! A work area is `<state>/tmp/<what>.<name>`, held by a flock on the directory itself and one on a file in
//! it that its child processes inherit. The name makes two builders of one thing meet, the locks say whether
//! its owner or a child of it lives, so what a crash left is known without guessing. Files in `tmp` of any
//! other name are not ours and stay.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{ImageError, io};
use super::job::Job;
use super::mounts::remove_tree;

/// Where kernels and templates are kept.
#[derive(Debug, Clone)]
pub struct Store {
    state: PathBuf,
}

/// What a directory of the store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing<T> {
    /// Those that can be used, by name.
    pub found: Vec<T>,
    /// Those that cannot: path and reason in words.
    pub broken: Vec<String>,
}

/// Kinds of things built in a work area.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Kernel,
    Template,
    Initramfs,
}

const WHATS: [What; 3] = [What::Kernel, What::Template, What::Initramfs];
/// Entry of a work area: what was in the target's place until the replacement is there.
const REPLACED: &str = "replaced";
/// Entry of a work area: something on its way out.
const REMOVED: &str = "removed";
/// Entry of a work area: the lock that children have as stdin.
const CHILDREN: &str = "lock";
/// How long another short operation on the same name is waited for.
const PATIENCE: Duration = Duration::from_secs(2);

impl What {
    pub(super) fn word(self) -> &'static str {
        match self {
            What::Kernel => "kernel",
            What::Template => "template",
            What::Initramfs => "initramfs",
        }
    }
}

/// A work area, locked.
pub(super) struct Work {
    dir: PathBuf,
    _own: File,
    children: File,
}

impl Store {
    /// Opens the store of a state directory and makes what is missing of it.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, ImageError> {
        std::fs::create_dir_all(state_dir).map_err(io("create", state_dir))?;
        let state = state_dir.canonicalize().map_err(io("resolve", state_dir))?;
        let store = Self { state };
        // Unpacked templates have setuid files: nobody but root may reach the work area.
        for (dir, mode) in [(store.kernels(), 0o755), (store.templates(), 0o700), (store.tmp(), 0o700)] {
            match std::fs::DirBuilder::new().mode(mode).create(&dir) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(io("create", &dir)(e)),
                _ => {}
            }
        }
        let tmp = store.tmp();
        let meta = std::fs::metadata(&tmp).map_err(io("inspect", &tmp))?;
        if meta.permissions().mode() & 0o077 != 0 {
            std::fs::set_permissions(&tmp, PermissionsExt::from_mode(0o700)).map_err(io("protect", &tmp))?;
        }
        Ok(store)
    }

    /// The state directory, resolved.
    #[must_use]
    pub fn state_dir(&self) -> &Path {
        &self.state
    }

    pub(super) fn kernels(&self) -> PathBuf {
        self.state.join("kernels")
    }

    pub(super) fn templates(&self) -> PathBuf {
        self.state.join("templates")
    }

    pub(super) fn tmp(&self) -> PathBuf {
        self.state.join("tmp")
    }

    fn target(&self, what: What, name: &str) -> Option<PathBuf> {
        match what {
            What::Kernel => Some(self.kernels().join(name)),
            What::Template => Some(self.templates().join(name)),
            What::Initramfs => None,
        }
    }

    /// Runs `f` with the work area of one name. Whatever `f` leaves in it is removed. With `wait`, another
    /// owner is waited for, else [`ImageError::Busy`] says so after two seconds.
    pub(super) fn work<T>(
        &self,
        what: What,
        name: &str,
        wait: bool,
        job: &Job<'_>,
        f: impl FnOnce(&Work) -> Result<T, ImageError>,
    ) -> Result<T, ImageError> {
        self.sweep();
        let work = self.begin(what, name, wait, job)?;
        let result = f(&work);
        if let Err(error) = remove_tree(&work.dir) {
            // The next build of anything sweeps it.
            tracing::warn!(error = &error as &dyn std::error::Error, "a work area is left");
        }
        result
    }

    fn begin(&self, what: What, name: &str, wait: bool, job: &Job<'_>) -> Result<Work, ImageError> {
        let dir = self.tmp().join(format!("{}.{name}", what.word()));
        let end = Instant::now() + PATIENCE;
        loop {
            job.check()?;
            match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(io("create", &dir)(e)),
                _ => {}
            }
            if let Some(work) = Work::try_lock(&dir).map_err(io("lock", &dir))? {
                self.recover(what, name, &work.dir)?;
                return Ok(work);
            }
            if !wait && Instant::now() > end {
                return Err(ImageError::Busy { what: what.word(), name: name.to_owned() });
            }
            job.report("waiting for another process", 0, None);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Empties a work area just locked. If its last owner died between the two renames of a replacement,
    /// the old thing goes back into its place.
    fn recover(&self, what: What, name: &str, dir: &Path) -> Result<(), ImageError> {
        let old = dir.join(REPLACED);
        if let Some(target) = self.target(what, name)
            && old.exists()
            && !target.exists()
        {
            std::fs::rename(&old, &target).map_err(io("put back", &target))?;
        }
        for entry in std::fs::read_dir(dir).map_err(io("list", dir))? {
            let entry = entry.map_err(io("list", dir))?;
            let path = entry.path();
            if entry.file_name() == CHILDREN {
                continue;
            }
            if entry.file_type().map_err(io("inspect", &path))?.is_dir() {
                remove_tree(&path)?;
            } else {
                std::fs::remove_file(&path).map_err(io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Removes what crashed builds left. An error costs only disk space and is retried by the next build.
    pub(super) fn sweep(&self) {
        let Ok(entries) = std::fs::read_dir(self.tmp()) else { return };
        for entry in entries.flatten() {
            let file_name = entry.file_name();
            let Some((word, name)) = file_name.to_str().and_then(|n| n.split_once('.')) else { continue };
            let Some(what) = WHATS.into_iter().find(|w| w.word() == word) else { continue };
            if name.parse::<hearth_core::id::TemplateName>().is_err() {
                continue;
            }
            let dir = entry.path();
            let Ok(Some(_work)) = Work::try_lock(&dir) else { continue };
            let swept = self.recover(what, name, &dir).and_then(|()| remove_tree(&dir));
            if let Err(error) = swept {
                tracing::warn!(error = &error as &dyn std::error::Error, "a leftover of a build stays");
            }
        }
    }
}

/// Tries to lock an opened file; the inner error is "somebody has it, or the path is another file now".
pub(super) fn try_lock(file: File, path: &Path, exclusive: bool) -> std::io::Result<Result<File, ()>> {
    match if exclusive { file.try_lock() } else { file.try_lock_shared() } {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Err(())),
        Err(TryLockError::Error(e)) => return Err(e),
    }
    let mine = file.metadata()?;
    // Its last owner may have removed or replaced it between our open and our lock.
    let same = std::fs::metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == (mine.dev(), mine.ino()));
    Ok(if same { Ok(file) } else { Err(()) })
}

impl Work {
    /// The area, or `None` if somebody has it or it was removed meanwhile.
    fn try_lock(dir: &Path) -> std::io::Result<Option<Self>> {
        let own = match File::open(dir) {
            Ok(f) => f,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let Ok(own) = try_lock(own, dir, true)? else { return Ok(None) };
        let path = dir.join(CHILDREN);
        let children = File::options().read(true).append(true).create(true).open(&path)?;
        // Its owner is gone, but a child of it may still write here.
        let Ok(children) = try_lock(children, &path, true)? else { return Ok(None) };
        Ok(Some(Self { dir: dir.to_owned(), _own: own, children }))
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// An empty file for a child's stdin that carries the lock: while that child lives, even without us,
    /// the area is held and no sweep removes it under the child.
    pub(super) fn lock_for_child(&self) -> Result<File, ImageError> {
        self.children.try_clone().map_err(io("share the lock of", &self.dir))
    }

    /// Puts `new` (a directory in this area) at `target`, replacing what is there.
    pub(super) fn place(&self, new: &Path, target: &Path) -> Result<(), ImageError> {
        sync_dir(new)?;
        if target.exists() {
            std::fs::rename(target, self.dir.join(REPLACED)).map_err(io("set aside", target))?;
        }
        std::fs::rename(new, target).map_err(io("put in place", target))?;
        target.parent().map_or(Ok(()), sync_dir)
    }

    /// Takes `target` out of its place; it is deleted with the area.
    pub(super) fn take_out(&self, target: &Path) -> Result<(), ImageError> {
        std::fs::rename(target, self.dir.join(REMOVED)).map_err(io("remove", target))?;
        target.parent().map_or(Ok(()), sync_dir)
    }
}

pub(super) fn sync_dir(dir: &Path) -> Result<(), ImageError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(io("sync", dir))
}

/// Writes a file and syncs it.
pub(super) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    let write = || -> std::io::Result<()> {
        let mut f = File::create_new(path)?;
        f.write_all(bytes)?;
        f.sync_all()
    };
    write().map_err(io("write", path))
}

pub(super) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), ImageError> {
    let mut text = serde_json::to_vec_pretty(value).map_err(|e| io("encode", path)(e.into()))?;
    text.push(b'\n');
    write_synced(path, &text)
}

/// Reads a metadata file; `Ok(None)` if it is absent.
pub(super) fn read_json<T: DeserializeOwned>(what: What, path: &Path) -> Result<Option<T>, ImageError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(|e| ImageError::Metadata {
            what: what.word(),
            path: path.to_owned(),
            why: e.to_string(),
        }),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(io("read", path)(e)),
    }
}

/// Reads the metadata of everything in `dir`, sorted by name.
pub(super) fn list_json<T: DeserializeOwned>(
    what: What,
    dir: &Path,
    file: &str,
    check: impl Fn(&str, &T) -> Result<(), String>,
) -> Result<Listing<T>, ImageError> {
    let mut listing = Listing { found: Vec::new(), broken: Vec::new() };
    let entries = std::fs::read_dir(dir).map_err(io("list", dir))?;
    let mut names =
        entries.map(|e| e.map(|e| e.file_name())).collect::<Result<Vec<_>, _>>().map_err(io("list", dir))?;
    names.sort();
    for name in names {
        let path = dir.join(&name).join(file);
        match read_json::<T>(what, &path) {
            Ok(Some(value)) => match check(&name.to_string_lossy(), &value) {
                Ok(()) => listing.found.push(value),
                Err(why) => listing.broken.push(format!("{}: {why}", path.display())),
            },
            Ok(None) => listing.broken.push(format!("{} is missing", path.display())),
            Err(ImageError::Io { source, .. }) => {
                listing.broken.push(format!("{}: {source}", path.display()));
            }
            Err(e) => listing.broken.push(e.to_string()),
        }
    }
    Ok(listing)
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
