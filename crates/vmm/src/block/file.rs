//! A local file as a disk. Reads that the page cache can answer are answered at once; all else is done by the pool.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use hearth_host::positional;

use super::backend::{
    Answer, Backend, BlockError, Extent, ExtentKind, Limit, Zeroes, check_range, push_extent,
};
use super::pool::Pool;

/// Larger reads are never done on the polling thread: copying would hold up the others.
const INLINE: usize = 256 * 1024;
/// Zeroes written at once where they must be written.
const ZEROES: usize = 256 * 1024;

/// A file, or a block device.
pub struct FileBackend {
    inner: Arc<Inner>,
    pool: Pool,
    size: u64,
    read_only: bool,
    sync: bool,
}

struct Inner {
    file: File,
    name: Arc<str>,
    /// A sync failed. The kernel tells that once; whoever syncs later would hear that all is well.
    lost: AtomicBool,
}

impl FileBackend {
    /// Opens a file of a fixed size; `read_only` opens it so.
    ///
    /// # Errors
    /// From open(2) and lseek(2).
    pub fn open(path: &Path, read_only: bool, pool: Pool) -> io::Result<Self> {
        let file = File::options().read(true).write(!read_only).open(path)?;
        Self::new(file, &path.display().to_string(), read_only, pool)
    }

    /// Takes an open file; `name` is for errors.
    ///
    /// # Errors
    /// From lseek(2).
    pub fn new(mut file: File, name: &str, read_only: bool, pool: Pool) -> io::Result<Self> {
        // A block device has no length but an end.
        let size = io::Seek::seek(&mut file, io::SeekFrom::End(0))?;
        let inner = Arc::new(Inner { file, name: name.into(), lost: AtomicBool::new(false) });
        Ok(Self { inner, pool, size, read_only, sync: true })
    }

    /// A flush of it syncs nothing: what was written outlives this process and not a crash of the host.
    #[must_use]
    pub fn without_sync(self) -> Self {
        Self { sync: false, ..self }
    }

    async fn run<T: Send + 'static>(
        &self,
        doing: &'static str,
        limit: &Limit,
        work: impl FnOnce(&Inner, &AtomicBool) -> io::Result<T> + Send + 'static,
    ) -> Result<T, BlockError> {
        let inner = self.inner.clone();
        let done = self.pool.run(limit, move |given_up| work(&inner, given_up)).await?;
        done.map_err(|e| self.error(doing, e))
    }

    fn error(&self, doing: &'static str, source: io::Error) -> BlockError {
        BlockError::Io { doing, file: self.inner.name.clone(), source }
    }

    fn check(&self, at: u64, len: u64, write: bool) -> Result<(), BlockError> {
        if write && self.read_only {
            return Err(BlockError::ReadOnly);
        }
        check_range(at, len, self.size)
    }
}

impl Backend for FileBackend {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn read_at<'a>(
        &'a self,
        at: u64,
        len: usize,
        mut buf: BytesMut,
        limit: &'a Limit,
    ) -> Answer<'a, BytesMut> {
        Box::pin(async move {
            self.check(at, len as u64, false)?;
            let mut done = 0;
            if len <= INLINE {
                done = positional::read_cached(&self.inner.file, &mut buf, len, at)
                    .map_err(|e| self.error("read", e))?;
            }
            if done == len {
                return Ok(buf);
            }
            self.run("read", limit, move |inner, _| {
                let (len, at) = (len - done, at + done as u64);
                if positional::read(&inner.file, &mut buf, len, at)? < len {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file has become shorter"));
                }
                Ok(buf)
            })
            .await
        })
    }

    fn write_at<'a>(&'a self, at: u64, data: Bytes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            self.check(at, data.len() as u64, true)?;
            // File systems let one writer at a time into a file; a second would only spin for the lock.
            let inner = self.inner.clone();
            let written = self.pool.run_in_turn(limit, move |_| inner.file.write_all_at(&data, at)).await?;
            written.map_err(|e| self.error("write", e))
        })
    }

    fn flush<'a>(&'a self, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            if self.read_only || !self.sync {
                return Ok(());
            }
            let synced = self.run("sync", limit, |inner, _| {
                let synced = inner.file.sync_data();
                // Noted here: the caller may have gone.
                if synced.is_err() {
                    inner.lost.store(true, Ordering::SeqCst);
                }
                synced
            });
            synced.await?;
            match self.inner.lost.load(Ordering::SeqCst) {
                true => Err(BlockError::Lost { file: self.inner.name.clone() }),
                false => Ok(()),
            }
        })
    }

    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            self.check(at, len, true)?;
            if len == 0 {
                return Ok(());
            }
            // Without holes the hint is not taken.
            self.run("discard", limit, move |inner, _| positional::punch(&inner.file, at, len))
                .await
                .map(|_| ())
        })
    }

    fn write_zeroes<'a>(&'a self, at: u64, len: u64, how: Zeroes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            self.check(at, len, true)?;
            if len == 0 {
                return Ok(());
            }
            let fast_enough = self.run("write zeroes to", limit, move |inner, given_up| {
                let done = (!how.keep_allocated && positional::punch(&inner.file, at, len)?)
                    || positional::zero(&inner.file, at, len)?;
                if !done && !how.fast {
                    zero_by_hand(&inner.file, at, len, given_up)?;
                }
                Ok(done || !how.fast)
            });
            if fast_enough.await? { Ok(()) } else { Err(BlockError::NotFast) }
        })
    }

    fn extents<'a>(&'a self, at: u64, len: u64, most: usize, limit: &'a Limit) -> Answer<'a, Vec<Extent>> {
        Box::pin(async move {
            self.check(at, len, false)?;
            self.run("map", limit, move |inner, _| extents(&inner.file, at, len, most)).await
        })
    }

    fn close(&self, within: Duration) -> BoxFuture<'_, usize> {
        Box::pin(self.pool.close(within))
    }
}

fn zero_by_hand(file: &File, at: u64, len: u64, given_up: &AtomicBool) -> io::Result<()> {
    let zeroes = vec![0; ZEROES.min(usize::try_from(len).unwrap_or(ZEROES))];
    let mut done = 0;
    while done < len && !given_up.load(Ordering::Relaxed) {
        let now = zeroes.len().min(usize::try_from(len - done).unwrap_or(usize::MAX));
        file.write_all_at(&zeroes[..now], at + done)?;
        done += now as u64;
    }
    Ok(())
}

fn extents(file: &File, at: u64, len: u64, most: usize) -> io::Result<Vec<Extent>> {
    let (mut found, mut here, end) = (vec![], at, at + len);
    while here < end && found.len() < most.max(1) {
        let (begin, stop) = positional::next_data(file, here)?.unwrap_or((end, end));
        let (begin, stop) = (begin.min(end), stop.min(end));
        push_extent(&mut found, begin - here, ExtentKind::Hole);
        push_extent(&mut found, stop - begin, ExtentKind::Data);
        here = stop;
    }
    found.truncate(most.max(1));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn disk(len: u64, read_only: bool) -> (FileBackend, Limit) {
        let file = tempfile::tempfile().expect("temporary file");
        file.set_len(len).expect("length");
        let disk = FileBackend::new(file, "disk", read_only, Pool::new("disk", 2)).expect("open");
        (disk, Limit::within(LONG))
    }

    async fn read(disk: &FileBackend, at: u64, len: usize) -> Vec<u8> {
        disk.read_at(at, len, BytesMut::new(), &Limit::within(LONG)).await.expect("read").to_vec()
    }

    #[tokio::test]
    async fn what_is_written_zeroed_and_discarded_is_read_back() {
        let (disk, limit) = disk(1 << 20, false);
        disk.write_at(4000, Bytes::from_static(&[7; 9000]), &limit).await.unwrap();
        for how in [Zeroes::default(), Zeroes { keep_allocated: true, fast: false }] {
            disk.write_zeroes(5000, 100, how, &limit).await.unwrap();
        }
        let seen = read(&disk, 4000, 9000).await;
        assert!(seen.iter().enumerate().all(|(i, b)| *b == if (1000..1100).contains(&i) { 0 } else { 7 }));
        disk.flush(&limit).await.unwrap();
        let map = disk.extents(0, 1 << 20, 100, &limit).await.unwrap();
        assert_eq!(map.iter().map(|e| e.len).sum::<u64>(), 1 << 20);
        assert_eq!(disk.extents(0, 1 << 20, 1, &limit).await.unwrap().len(), 1);
        disk.discard(0, 1 << 20, &limit).await.unwrap();
        assert_eq!(disk.close(LONG).await, 0);
    }

    #[tokio::test]
    async fn what_is_outside_or_not_allowed_is_refused() {
        let (disk, limit) = disk(8192, true);
        assert!(matches!(
            disk.write_at(0, Bytes::from_static(b"x"), &limit).await,
            Err(BlockError::ReadOnly)
        ));
        assert!(matches!(disk.discard(0, 1, &limit).await, Err(BlockError::ReadOnly)));
        let beyond = disk.read_at(8000, 193, BytesMut::new(), &limit).await;
        assert!(matches!(beyond, Err(BlockError::Range { .. })));
        disk.flush(&limit).await.unwrap();
        assert_eq!(read(&disk, 8000, 192).await, [0; 192]);
    }

    #[tokio::test]
    async fn a_file_that_has_become_shorter_is_an_error_that_names_it() {
        let (disk, limit) = disk(8192, false);
        disk.inner.file.set_len(100).unwrap();
        let error = disk.read_at(0, 200, BytesMut::new(), &limit).await.unwrap_err().to_string();
        assert!(error.contains("read disk") && error.contains("shorter"), "{error}");
    }

    #[test]
    fn zeroes_written_by_hand_end_when_nobody_waits() {
        let (disk, _) = disk(1 << 20, false);
        disk.inner.file.write_all_at(&[7; 1 << 20], 0).unwrap();
        zero_by_hand(&disk.inner.file, 0, 1 << 20, &AtomicBool::new(true)).unwrap();
        zero_by_hand(&disk.inner.file, 10, 600_000, &AtomicBool::new(false)).unwrap();
        let mut seen = vec![1; 1 << 20];
        disk.inner.file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen.iter().enumerate().all(|(i, b)| *b == if (10..600_010).contains(&i) { 0 } else { 7 }));
    }
}
