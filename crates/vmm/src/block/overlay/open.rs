//! Makes and opens overlays: files on disk with a lock, or above any two backends.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use bytes::BytesMut;

use super::format::{Header, PAGE};
use super::map::{self, Map};
use super::{Overlay, Ranges};
use crate::block::backend::{Backend, BlockError, Limit};
use crate::block::{FileBackend, Pool};

/// Of the base's begin and end, to know it again. An ext4 has its identifier in there.
const PRINT: u64 = 64 * 1024;
/// Map pages read at once.
const PAGES_AT_ONCE: usize = 128;

/// Why there is no overlay.
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    /// A system call failed.
    #[error("{doing} overlay {file}: {source}")]
    Io {
        /// The verb.
        doing: &'static str,
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// Base or file could not be read or written.
    #[error("the overlay cannot be read or written: {0}")]
    Block(#[from] BlockError),
    /// Somebody else has it.
    #[error("overlay {file} is in use: only one server at a time may have it")]
    InUse {
        /// The file.
        file: String,
    },
    /// Not an overlay, or one that cannot be used.
    #[error("the overlay cannot be used: {why}")]
    Unusable {
        /// What is wrong.
        why: String,
    },
    /// Made above another base.
    #[error(
        "the overlay was made above another base: that had {expected} bytes, this one has {found}, or other content"
    )]
    OtherBase {
        /// Bytes of its base.
        expected: u64,
        /// Bytes of this one.
        found: u64,
    },
    /// A size that cannot be.
    #[error("a disk of {size} bytes is not possible: at least 1 and at most 64 TiB")]
    Size {
        /// Bytes.
        size: u64,
    },
}

impl Overlay {
    /// Makes an overlay file (0600) of a disk of `size` bytes above `base`, all of it as in the base, and opens it. It is
    /// there whole or not at all, whenever this is cut short; a half-made one has `.new` at the end of its name.
    ///
    /// # Errors
    /// If it exists, or cannot be written.
    pub async fn create(
        path: &Path,
        base: Arc<dyn Backend>,
        size: u64,
        pool: Pool,
        limit: &Limit,
    ) -> Result<Self, OverlayError> {
        let fail = |doing, source| OverlayError::Io { doing, file: path.display().to_string(), source };
        let header = header_for(&*base, size, limit).await?;
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let new = Path::new(&name);
        let written = (|| {
            write_new(new, &header, true)?;
            // A link never replaces what is there.
            std::fs::hard_link(new, path)?;
            remove_if_there(new)?;
            let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(dir)?.sync_all()
        })();
        if let Err(e) = written {
            // The first error is the one that matters.
            drop(remove_if_there(new));
            return Err(fail("create", e));
        }
        Self::open(path, base, false, pool, limit).await
    }

    /// Opens an overlay file, made if there is none, of a disk that is worth nothing without its process's host: no flush
    /// syncs it. What was flushed outlives the process, however that ends, and not a crash of the host.
    ///
    /// # Errors
    /// As [`Overlay::open`], or if it cannot be made.
    pub async fn scratch(
        path: &Path,
        base: Arc<dyn Backend>,
        size: u64,
        pool: Pool,
        limit: &Limit,
    ) -> Result<Self, OverlayError> {
        let name = path.display().to_string();
        let fail = |doing, source| OverlayError::Io { doing, file: name.clone(), source };
        let open = |path: &Path| File::options().read(true).write(true).open(path);
        let file = match open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let header = header_for(&*base, size, limit).await?;
                let mut new = path.as_os_str().to_owned();
                new.push(".new");
                // Whole under its name or not there, whenever this process ends.
                write_new(Path::new(&new), &header, false)
                    .and_then(|()| std::fs::rename(&new, path))
                    .and_then(|()| open(path))
                    .map_err(|e| fail("create", e))?
            }
            other => other.map_err(|e| fail("open", e))?,
        };
        lock(&file, false, &name)?;
        let cow = FileBackend::new(file, &name, false, pool).map_err(|e| fail("open", e))?;
        Self::load(Arc::new(cow.without_sync()), base, limit).await
    }

    /// Opens an overlay file above the base it was made for. The lock on it (flock(2)) is held as long as the overlay is.
    ///
    /// # Errors
    /// If it is in use, is no overlay, is damaged, or its base is another.
    pub async fn open(
        path: &Path,
        base: Arc<dyn Backend>,
        read_only: bool,
        pool: Pool,
        limit: &Limit,
    ) -> Result<Self, OverlayError> {
        let name = path.display().to_string();
        let fail = |doing, source| OverlayError::Io { doing, file: name.clone(), source };
        let file = File::options().read(true).write(!read_only).open(path).map_err(|e| fail("open", e))?;
        lock(&file, read_only, &name)?;
        let cow = FileBackend::new(file, &name, read_only, pool).map_err(|e| fail("open", e))?;
        Self::load(Arc::new(cow), base, limit).await
    }

    /// Makes `cow` an overlay of a disk of `size` bytes above `base`. It must be all zeroes and have
    /// [`Overlay::file_size`] bytes.
    ///
    /// # Errors
    /// From the backends, or if the size is not possible.
    pub async fn format(
        cow: &dyn Backend,
        base: &dyn Backend,
        size: u64,
        limit: &Limit,
    ) -> Result<(), OverlayError> {
        let header = header_for(base, size, limit).await?;
        cow.write_at(0, header.encode(), limit).await?;
        Ok(cow.flush(limit).await?)
    }

    /// Bytes of the file of a disk of `size` bytes; most of them stay a hole.
    #[must_use]
    pub fn file_size(size: u64) -> u64 {
        Header { size, base_size: 0, base_print: 0 }.file_size()
    }

    /// Opens what [`Overlay::format`] made, as it was after the last flush or with some of what was written since.
    ///
    /// # Errors
    /// If it is no overlay, is damaged, or its base is another.
    pub async fn load(
        cow: Arc<dyn Backend>,
        base: Arc<dyn Backend>,
        limit: &Limit,
    ) -> Result<Self, OverlayError> {
        let unusable = |why: &str| OverlayError::Unusable { why: why.to_owned() };
        if cow.size() < PAGE as u64 {
            return Err(unusable("it is no overlay"));
        }
        let bytes = cow.read_at(0, PAGE, BytesMut::new(), limit).await?;
        let header = Header::decode(&bytes).map_err(unusable)?;
        if cow.size() < header.file_size() {
            return Err(unusable("it is shorter than its header says"));
        }
        if header_for(&*base, header.size, limit).await? != header {
            return Err(OverlayError::OtherBase { expected: header.base_size, found: base.size() });
        }
        let map = load_map(&*cow, &header, limit).await?;
        Ok(Self {
            cow,
            base,
            header,
            map: Arc::new(Mutex::new(map)),
            ranges: Ranges::default(),
            flushing: Arc::default(),
            begun: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
        })
    }
}

/// Writes an overlay in which all is as in the base; what is left of an earlier try gives way.
fn write_new(path: &Path, header: &Header, sync: bool) -> io::Result<()> {
    remove_if_there(path)?;
    let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.set_len(header.file_size())?;
    file.write_all_at(&header.encode(), 0)?;
    if sync { file.sync_all() } else { Ok(()) }
}

fn lock(file: &File, shared: bool, name: &str) -> Result<(), OverlayError> {
    match if shared { file.try_lock_shared() } else { file.try_lock() } {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(OverlayError::InUse { file: name.to_owned() }),
        Err(TryLockError::Error(source)) => {
            Err(OverlayError::Io { doing: "lock", file: name.to_owned(), source })
        }
    }
}

async fn header_for(base: &dyn Backend, size: u64, limit: &Limit) -> Result<Header, OverlayError> {
    if size == 0 || !Header::fits(size) {
        return Err(OverlayError::Size { size });
    }
    let base_size = base.size();
    let part = base_size.min(PRINT);
    let mut sum = crc32fast::Hasher::new();
    for at in [0, base_size - part] {
        sum.update(&base.read_at(at, part as usize, BytesMut::new(), limit).await?);
    }
    Ok(Header { size, base_size, base_print: sum.finalize() })
}

async fn load_map(cow: &dyn Backend, header: &Header, limit: &Limit) -> Result<Map, OverlayError> {
    let mut map = Map::new(header.pages());
    let mut buf = BytesMut::new();
    for first in (0..header.pages()).step_by(PAGES_AT_ONCE) {
        let count = PAGES_AT_ONCE.min(header.pages() - first);
        buf.clear();
        buf = cow.read_at(Header::page_at(first, 0), count * 2 * PAGE, buf, limit).await?;
        for (page, bytes) in (first..).zip(buf.chunks_exact(2 * PAGE)) {
            if !map.load(page, map::copies(page, bytes)) {
                return Err(OverlayError::Unusable { why: format!("page {page} of its map is damaged") });
            }
        }
    }
    Ok(map)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
