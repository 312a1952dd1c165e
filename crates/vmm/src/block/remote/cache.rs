//! The chunks that are kept on this node: a directory that all its processes share, of a size that is kept.
//!
//! | file | what |
//! |---|---|
//! | `<object>/<number>` | a chunk, whole: it came there by a rename |
//! | `<object>/<number>.part` | one being written |
//! | `claims` | nothing: whoever fetches a chunk has the lock on its byte, and dead it has it no more. A file for each would have to be made before the fetch |
//! | `books` | bytes that all chunks take, at least; and which boot of the host they were counted in |
//! | `evict` | its lock is for whoever makes room; shared, for whoever keeps a chunk: what is being kept is not overlooked |
//!
//! Bytes are put into the books before a chunk gets its name, so that a process that dies makes them too many, never too
//! few; making room counts them anew, and so does the first to come after a boot of the host, whose crash may have lost
//! them. What has no such name is not ours and stays. All calls may block: they are for threads of a pool.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use hearth_host::positional;

use super::chunk::{CachedChunk, file_size};
use super::counters::Counters;

/// Least size of a cache: fewer chunks would only be carried in and out.
pub const LEAST_CACHE: u64 = 16 << 20;
/// Locks are held for microseconds; whoever does not get one by then goes on without.
const PATIENCE: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(2);
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Where it is in the books.
const BOOT_AT: u64 = 8;
/// Digits of an object's directory, and of a chunk's number.
const OBJECT: usize = 32;
const NUMBER: usize = 8;

/// The directory.
#[derive(Debug)]
pub struct ChunkCache {
    directory: PathBuf,
    bytes: u64,
}

/// A chunk that is ours to fetch, as long as this is kept.
#[derive(Debug)]
pub(super) struct Part {
    /// Has the lock.
    _claim: File,
    path: PathBuf,
    /// Its name once it is whole.
    to: PathBuf,
    number: u64,
}

/// What came of a claim.
#[derive(Debug)]
pub(super) enum Claim {
    /// It is there.
    Have(CachedChunk),
    Ours(Part),
    /// Another process or disk fetches it.
    Busy,
}

impl ChunkCache {
    /// Takes a directory (made 0700 if it is not there), to be filled with up to so many bytes.
    ///
    /// # Errors
    /// If it cannot be made or written, is too small, belongs to others, or has other things in it.
    pub fn open(directory: &Path, bytes: u64) -> io::Result<Self> {
        if bytes < LEAST_CACHE {
            let why = format!("a cache of {bytes} bytes is too small: give it at least {LEAST_CACHE}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        check_ours(directory)?;
        let cache = Self { directory: directory.to_owned(), bytes };
        cache.open_file("books")?;
        cache.open_file("evict")?;
        cache.open_file("claims")?;
        cache.count_after_boot()?;
        Ok(cache)
    }

    /// Counts anew what another boot of the host has counted: of what it wrote last, any may be lost.
    fn count_after_boot(&self) -> io::Result<()> {
        let boot = fs::read(BOOT_ID)?;
        let counted_now = || -> io::Result<bool> {
            let mut counted_in = vec![0; boot.len()];
            let got = self.open_file("books")?.read_at(&mut counted_in, BOOT_AT)?;
            Ok(got == boot.len() && counted_in == boot)
        };
        if counted_now()? {
            return Ok(());
        }
        let turn = self.open_file("evict")?;
        // Whoever has it counts as well.
        if !lock_soon(|| turn.try_lock())? || counted_now()? {
            return Ok(());
        }
        let size = self.chunks()?.iter().map(|chunk| chunk.size).sum();
        if self.change_books(|_| Some(size))? {
            self.open_file("books")?.write_all_at(&boot, BOOT_AT)?;
        }
        Ok(())
    }

    fn open_file(&self, name: &str) -> io::Result<File> {
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.directory.join(name))
    }

    fn place(&self, object: &str, number: u64) -> PathBuf {
        self.directory.join(object).join(format!("{number:08x}"))
    }

    /// The chunk, if it is there. One that cannot be used is removed, and counted.
    pub(super) fn find(
        &self,
        object: &str,
        number: u64,
        len: u64,
        counters: &Counters,
    ) -> io::Result<Option<CachedChunk>> {
        let path = self.place(object, number);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        // When it was used last, for whoever makes room. Nothing depends on it that could not bear it wrong.
        drop(file.set_modified(SystemTime::now()));
        let meta = file.metadata()?;
        let gone = meta.nlink() == 0 || meta.len() == 0;
        match CachedChunk::open(file, number, len)? {
            None if gone => Ok(None),
            None => {
                counters.damaged();
                self.discard(object, number)?;
                Ok(None)
            }
            found => Ok(found),
        }
    }

    /// Removes a chunk. Its bytes stay in the books until they are counted anew.
    pub(super) fn discard(&self, object: &str, number: u64) -> io::Result<()> {
        remove(&self.place(object, number)).map(drop)
    }

    /// Whose it is to fetch a chunk. Does not wait.
    pub(super) fn claim(
        &self,
        object: &str,
        number: u64,
        len: u64,
        counters: &Counters,
    ) -> io::Result<Claim> {
        if let Some(chunk) = self.find(object, number, len, counters)? {
            return Ok(Claim::Have(chunk));
        }
        let claim = self.open_file("claims")?;
        if !positional::try_lock_byte(&claim, byte_of(object, number))? {
            return Ok(Claim::Busy);
        }
        // It may have got its name between our look and our lock.
        if let Some(chunk) = self.find(object, number, len, counters)? {
            return Ok(Claim::Have(chunk));
        }
        let to = self.place(object, number);
        Ok(Claim::Ours(Part { _claim: claim, path: to.with_extension("part"), to, number }))
    }

    /// Gives a chunk that was fetched to all. `None`: there is no room for it, and none could be made.
    pub(super) fn keep(
        &self,
        part: Part,
        data: &Bytes,
        counters: &Counters,
    ) -> io::Result<Option<CachedChunk>> {
        let size = file_size(data.len() as u64);
        let mut kept = self.reserve(size)?;
        if kept.is_none() {
            self.make_room(size, counters)?;
            kept = self.reserve(size)?;
        }
        let Some(_until_named) = kept else { return Ok(None) };
        let stored = part
            .create()
            .and_then(|file| CachedChunk::write(file, part.number, data))
            .and_then(|chunk| fs::rename(&part.path, &part.to).map(|()| chunk));
        if stored.is_err() {
            // What it still took is given back; its bytes in the books go with the next count.
            drop(fs::remove_file(&part.path));
        }
        stored.map(Some)
    }

    /// Bytes by the books.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn used(&self) -> io::Result<u64> {
        read_books(&self.open_file("books")?)
    }

    /// Puts a chunk into the books, if it fits. Nobody makes room while what is given is kept.
    fn reserve(&self, size: u64) -> io::Result<Option<File>> {
        let turn = self.open_file("evict")?;
        if !lock_soon(|| turn.try_lock_shared())? {
            return Ok(None);
        }
        let reserved = self.change_books(|used| {
            let after = used.saturating_add(size);
            (after <= self.bytes).then_some(after)
        })?;
        Ok(reserved.then_some(turn))
    }

    fn change_books(&self, change: impl FnOnce(u64) -> Option<u64>) -> io::Result<bool> {
        let books = self.open_file("books")?;
        if !lock_soon(|| books.try_lock())? {
            return Ok(false);
        }
        let Some(after) = change(read_books(&books)?) else { return Ok(false) };
        books.write_all_at(&after.to_le_bytes(), 0)?;
        Ok(true)
    }

    /// Removes what was used longest ago, until an eighth is free and so is what is asked for, and counts anew. One at a
    /// time: a second waits for the first, and looks for itself.
    fn make_room(&self, size: u64, counters: &Counters) -> io::Result<()> {
        let turn = self.open_file("evict")?;
        if !lock_soon(|| turn.try_lock())? {
            return Ok(());
        }
        if self.used()?.saturating_add(size) <= self.bytes {
            return Ok(());
        }
        let mut chunks = self.chunks()?;
        chunks.sort_unstable_by_key(|chunk| chunk.used);
        let mut left: u64 = chunks.iter().map(|chunk| chunk.size).sum();
        let goal = (self.bytes - self.bytes / 8).min(self.bytes.saturating_sub(size));
        let mut evicted = 0;
        for chunk in &chunks {
            if left <= goal {
                break;
            }
            if remove(&chunk.path)? {
                evicted += 1;
            }
            left -= chunk.size;
        }
        counters.evicted(evicted);
        self.change_books(|_| Some(left))?;
        Ok(())
    }

    /// All chunks. What nobody fetches any more and empty directories are removed on the way.
    fn chunks(&self) -> io::Result<Vec<Seen>> {
        let mut seen = vec![];
        for object in fs::read_dir(&self.directory)? {
            let object = object?;
            if !object.file_type()?.is_dir() || !is_hex(&object.file_name(), OBJECT) {
                continue;
            }
            let before = seen.len();
            for entry in fs::read_dir(object.path())? {
                let path = entry?.path();
                // Gone meanwhile is nothing to count.
                let Ok(meta) = fs::symlink_metadata(&path) else { continue };
                if !meta.is_file() || !path.file_stem().is_some_and(|name| is_hex(name, NUMBER)) {
                    continue;
                }
                match path.extension() {
                    None => seen.push(Seen { size: meta.len(), used: meta.modified()?, path }),
                    Some(end) if end == "part" => self.remove_if_nobodys(&object.file_name(), &path)?,
                    Some(_) => {}
                }
            }
            if seen.len() == before {
                // Not empty, or no longer there: then it is not for us.
                drop(fs::remove_dir(object.path()));
            }
        }
        Ok(seen)
    }

    /// Removes what somebody who is gone was writing.
    fn remove_if_nobodys(&self, object: &OsStr, part: &Path) -> io::Result<()> {
        let number = part.file_stem().and_then(OsStr::to_str).and_then(|n| u64::from_str_radix(n, 16).ok());
        let (Some(object), Some(number)) = (object.to_str(), number) else { return Ok(()) };
        let claim = self.open_file("claims")?;
        if positional::try_lock_byte(&claim, byte_of(object, number))? {
            remove(part)?;
        }
        Ok(())
    }
}

impl Part {
    /// A new file. What whoever claimed it before us left is thrown away.
    fn create(&self) -> io::Result<File> {
        let create = || {
            File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&self.path)
        };
        match (create(), self.path.parent()) {
            // The first chunk of its object; nobody removes a directory while a chunk is being kept.
            (Err(e), Some(directory)) if e.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
                create()
            }
            (created, _) => created,
        }
    }
}

/// Where the lock on a chunk is. Objects are named by a hash, so that two chunks do not meet.
fn byte_of(object: &str, number: u64) -> u64 {
    let object = object.get(..15).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0);
    object + number
}

struct Seen {
    path: PathBuf,
    size: u64,
    used: SystemTime,
}

fn is_hex(name: &OsStr, digits: usize) -> bool {
    let name = name.as_encoded_bytes();
    name.len() == digits && name.iter().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(b))
}

/// That nobody else can put anything in, and that it is a cache or empty.
fn check_ours(directory: &Path) -> io::Result<()> {
    let refuse = |why: &str| {
        let why = format!("{} {why}; name another directory for the cache", directory.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    };
    let meta = fs::metadata(directory)?;
    if meta.uid() != fs::metadata("/proc/self")?.uid() {
        return refuse("belongs to another user");
    }
    if meta.mode() & 0o022 != 0 {
        return refuse("can be written by others");
    }
    if !directory.join("books").exists() {
        // Another process may just have made it.
        let other = fs::read_dir(directory)?.filter_map(Result::ok).find(|e| e.file_name() != "books");
        if other.is_some() {
            return refuse("is no cache, and not empty");
        }
    }
    Ok(())
}

fn read_books(books: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    // New ones are empty.
    match books.read_at(&mut bytes, 0)? {
        8 => Ok(u64::from_le_bytes(bytes)),
        _ => Ok(0),
    }
}

/// Cut first: its room is free at once, whoever has it open.
fn remove(path: &Path) -> io::Result<bool> {
    let cut = File::options().write(true).open(path).and_then(|file| file.set_len(0));
    match cut.and_then(|()| fs::remove_file(path)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

fn lock_soon(lock: impl Fn() -> Result<(), TryLockError>) -> io::Result<bool> {
    let begun = std::time::Instant::now();
    loop {
        match lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(e)) => return Err(e),
            Err(TryLockError::WouldBlock) if begun.elapsed() > PATIENCE => return Ok(false),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const CHUNK: usize = 1 << 20;
    const DISK: &str = "0123456789abcdef0123456789abcdef";

    fn cache(mib: u64) -> (tempfile::TempDir, ChunkCache, Counters) {
        let dir = tempfile::tempdir().unwrap();
        let cache = ChunkCache::open(&dir.path().join("cache"), mib << 20).unwrap();
        (dir, cache, Counters::default())
    }

    fn put(cache: &ChunkCache, number: u64, counters: &Counters) -> Option<CachedChunk> {
        match cache.claim(DISK, number, CHUNK as u64, counters).unwrap() {
            Claim::Ours(part) => cache.keep(part, &vec![number as u8; CHUNK].into(), counters).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn on_disk(cache: &ChunkCache) -> u64 {
        cache.chunks().unwrap().iter().map(|chunk| chunk.size).sum()
    }

    #[test]
    fn the_size_is_kept_and_what_was_used_last_stays() {
        let (_dir, cache, counters) = cache(16);
        let first = put(&cache, 0, &counters).unwrap();
        for number in 1..100 {
            put(&cache, number, &counters).expect("there is always room for one");
            assert!(cache.find(DISK, 1, CHUNK as u64, &counters).unwrap().is_some(), "{number}");
            assert!(on_disk(&cache) <= 16 << 20 && on_disk(&cache) <= cache.used().unwrap());
        }
        assert!(counters.stats().evicted > 80, "{:?}", counters.stats());
        // Whoever had it open sees that it is gone, and holds no room.
        let read = first.read(0, 10, bytes::BytesMut::new(), true).unwrap();
        assert!(matches!(read, super::super::chunk::Found::Gone(_)));
    }

    #[test]
    fn a_claim_is_for_one_and_ends_with_its_holder() {
        let (_dir, cache, counters) = cache(16);
        let claim = || cache.claim(DISK, 3, CHUNK as u64, &counters).unwrap();
        let Claim::Ours(part) = claim() else { panic!("nobody else is here") };
        assert!(matches!(claim(), Claim::Busy));
        drop(part);
        let Claim::Ours(part) = claim() else { panic!("it was let go") };
        cache.keep(part, &vec![1; CHUNK].into(), &counters).unwrap().unwrap();
        assert!(matches!(claim(), Claim::Have(_)));
    }

    #[test]
    fn room_that_cannot_be_made_means_not_kept_and_leftovers_go() {
        let (_dir, cache, counters) = cache(16);
        // Somebody was stopped while it kept a chunk.
        let turn = cache.open_file("evict").unwrap();
        turn.lock_shared().unwrap();
        let kept = (0..20).filter(|number| put(&cache, *number, &counters).is_some()).count();
        assert_eq!(kept, 15);
        assert!(on_disk(&cache) <= 16 << 20);
        drop(turn);
        let part = cache.directory.join(DISK).join("000000ff.part");
        fs::write(&part, b"half").unwrap();
        assert!(put(&cache, 77, &counters).is_some());
        assert!(!part.exists());
    }

    #[test]
    fn what_is_not_the_caches_is_refused_or_stays() {
        let (dir, cache, counters) = cache(16);
        let open = |path: &Path| ChunkCache::open(path, LEAST_CACHE);
        fs::write(dir.path().join("data.db"), b"precious").unwrap();
        assert!(open(dir.path()).unwrap_err().to_string().contains("not empty"));
        let shared = dir.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(open(&shared).unwrap_err().to_string().contains("by others"));
        put(&cache, 0, &counters).unwrap();
        let inside = cache.directory.join(DISK);
        fs::create_dir(cache.directory.join("private")).unwrap();
        let others = ["private/00000000", "private/key.part"].map(|name| cache.directory.join(name));
        let others = others.into_iter().chain(["notes", "0000000x", "00000007.db"].map(|n| inside.join(n)));
        let others: Vec<PathBuf> = others.collect();
        others.iter().for_each(|path| fs::write(path, b"precious").unwrap());
        for number in 1..40 {
            put(&cache, number, &counters).unwrap();
        }
        assert!(counters.stats().evicted > 0);
        for path in others {
            assert_eq!(fs::read(&path).unwrap(), b"precious", "{}", path.display());
        }
    }

    #[test]
    fn what_another_boot_has_counted_is_counted_anew() {
        let (_dir, cache, counters) = cache(16);
        put(&cache, 0, &counters).unwrap();
        let used = cache.used().unwrap();
        for lost in [&0_u64.to_le_bytes()[..], b"", b"\0\0\0\0\0\0\0\0another boot"] {
            fs::write(cache.directory.join("books"), lost).unwrap();
            let again = ChunkCache::open(&cache.directory, LEAST_CACHE).unwrap();
            assert_eq!(again.used().unwrap(), used);
        }
        cache.change_books(|used| Some(used + 5)).unwrap();
        assert_eq!(ChunkCache::open(&cache.directory, LEAST_CACHE).unwrap().used().unwrap(), used + 5);
    }

    #[test]
    fn a_file_that_is_no_chunk_is_removed_and_counted() {
        let (_dir, cache, counters) = cache(16);
        put(&cache, 5, &counters).unwrap();
        File::options().write(true).open(cache.place(DISK, 5)).unwrap().set_len(1000).unwrap();
        assert!(matches!(cache.claim(DISK, 5, CHUNK as u64, &counters).unwrap(), Claim::Ours(_)));
        assert_eq!(counters.stats().damaged, 1);
    }
}
