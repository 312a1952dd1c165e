//! The guest's console on disk: [`CappedLog`] keeps the newest output in two parts, neither larger than the
//! cap, and [`pump`] moves bytes from the VMM into it. The VMM's own log, which it writes itself, is kept small
//! by [`keep_small`].
//!
//! A guest may print for ever and as fast as it can: memory is one buffer, disk is two parts, and a log that
//! cannot be written loses bytes rather than hold up the VMM. Writes go straight to the page cache of the run
//! directory (a tmpfs), so that they need no thread.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Bytes read at once, and all the memory a console takes.
const BUFFER: usize = 16 * 1024;
/// After the VMM's end: silence this long means that its console was drained.
const SILENCE: Duration = Duration::from_millis(100);
/// A smaller cap would turn the log over with each line.
const SMALLEST_CAP: u64 = 4096;
/// Between two looks at a log that somebody else writes.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// A log file of bounded size; the part before it is kept under the same name with `.1` added.
#[derive(Debug)]
pub struct CappedLog {
    path: PathBuf,
    older: PathBuf,
    file: File,
    len: u64,
    cap: u64,
}

impl CappedLog {
    /// Opens the log for appending and makes it if absent. Caps below 4 KiB count as 4 KiB.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(path: &Path, cap: u64) -> io::Result<Self> {
        let file = Self::append_to(path)?;
        let len = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), older: older_part(path), file, len, cap: cap.max(SMALLEST_CAP) })
    }

    fn append_to(path: &Path) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).mode(0o600).open(path)
    }

    /// Appends, turning the log over as often as the cap asks for.
    ///
    /// # Errors
    /// If the file system refuses (full, say); what was not written is lost, the log stays usable.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut room = self.cap.saturating_sub(self.len);
            if room == 0 {
                self.turn_over()?;
                room = self.cap;
            }
            let now = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
            let written = self.file.write(&bytes[..now])?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.len += written as u64;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// A follower that has the file open keeps reading it under its new name.
    fn turn_over(&mut self) -> io::Result<()> {
        std::fs::rename(&self.path, &self.older)?;
        self.file = Self::append_to(&self.path)?;
        self.len = self.file.metadata()?.len();
        Ok(())
    }
}

/// Name of the older part.
#[must_use]
pub fn older_part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    PathBuf::from(name)
}

/// Moves the console into the log until its end, or, once `vmm_dead` is set, until nothing more comes. Says
/// how many bytes were lost because the log could not be written.
pub async fn pump<R>(mut source: R, mut log: CappedLog, vmm_dead: CancellationToken) -> u64
where
    R: AsyncRead + Unpin,
{
    let mut buffer = vec![0; BUFFER];
    let mut lost = 0u64;
    loop {
        let read = tokio::select! {
            biased;
            read = source.read(&mut buffer) => read,
            () = vmm_dead.cancelled() => match timeout(SILENCE, source.read(&mut buffer)).await {
                Ok(read) => read,
                Err(_) => break,
            },
        };
        let n = match read {
            Ok(0) => break,
            Ok(n) => n,
            // A VMM killed with unread input resets its socket: the same end in other words.
            Err(e) => {
                tracing::debug!(error = %e, "the console ended");
                break;
            }
        };
        if let Err(e) = log.write(&buffer[..n]) {
            if lost == 0 {
                tracing::warn!(error = %e, file = %log.path.display(), "console output is lost");
            }
            lost += n as u64;
        }
    }
    lost
}

/// Looks at a log that a VMM appends to, and turns it over when it is larger than the cap: a guest can make
/// its VMM complain without end. Ends once `vmm_dead` is set, and leaves nothing under way then. The copy runs
/// on a thread that may wait: this one serves the VM's connections.
pub async fn keep_small(path: PathBuf, cap: u64, vmm_dead: CancellationToken) {
    while vmm_dead.run_until_cancelled(tokio::time::sleep(LOOK_AGAIN)).await.is_some() {
        let log = path.clone();
        let done = tokio::task::spawn_blocking(move || cut(&log, cap)).await;
        if let Err(e) = done.unwrap_or_else(|e| Err(io::Error::other(e))) {
            tracing::warn!(error = %e, file = %path.display(), "the log was not turned over");
        }
    }
}

/// The writer keeps the file, so its newest part is copied and it is emptied; that it appends (`O_APPEND`) makes
/// this sound. Lines written between the two calls are lost, and so is what is older than the cap.
fn cut(path: &Path, cap: u64) -> io::Result<()> {
    let cap = cap.max(SMALLEST_CAP);
    let mut log = OpenOptions::new().read(true).write(true).open(path)?;
    let len = log.metadata()?.len();
    if len <= cap {
        return Ok(());
    }
    log.seek(SeekFrom::Start(len - cap))?;
    let older = older_part(path);
    let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(older)?;
    io::copy(&mut (&log).take(cap), &mut copy)?;
    log.set_len(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(path: &Path) -> (u64, u64) {
        let len = |p: &Path| std::fs::metadata(p).map_or(0, |m| m.len());
        (len(path), len(&older_part(path)))
    }

    #[test]
    fn two_parts_are_kept_and_neither_is_over_the_cap() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = CappedLog::open(&path, 4096).unwrap();
        log.write(&[b'a'; 4096]).unwrap();
        assert_eq!(sizes(&path), (4096, 0), "a full log is turned over by the next byte only");
        log.write(b"b").unwrap();
        assert_eq!(sizes(&path), (1, 4096));
        log.write(&[b'c'; 10_000]).unwrap();
        assert_eq!(sizes(&path), (10_001 - 8192, 4096));
        let both = [std::fs::read(older_part(&path)).unwrap(), std::fs::read(&path).unwrap()].concat();
        assert!(both.iter().all(|b| *b == b'c'), "the newest output is kept");
    }

    #[test]
    fn a_log_opened_again_goes_on_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        CappedLog::open(&path, 0).unwrap().write(&[b'a'; 4000]).unwrap();
        let mut log = CappedLog::open(&path, 0).unwrap();
        log.write(&[b'b'; 100]).unwrap();
        assert_eq!(sizes(&path), (4, 4096));
    }

    #[test]
    fn a_log_of_another_writer_is_cut_under_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmm.log");
        let mut writer = CappedLog::append_to(&path).unwrap();
        writer.write_all(&[b'a'; 4096]).unwrap();
        cut(&path, 4096).unwrap();
        assert_eq!(sizes(&path), (4096, 0));
        writer.write_all(b"b").unwrap();
        cut(&path, 4096).unwrap();
        writer.write_all(b"c").unwrap();
        assert_eq!(sizes(&path), (1, 4096));
        assert!(std::fs::read(older_part(&path)).unwrap().ends_with(b"ab"), "the newest bytes are kept");
        writer.write_all(&[b'd'; 100_000]).unwrap();
        cut(&path, 4096).unwrap();
        assert_eq!(sizes(&path), (0, 4096), "however large it grew");
    }

    #[tokio::test]
    async fn a_large_log_is_cut_soon_and_the_keeper_ends_with_the_vmm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmm.log");
        std::fs::write(&path, [b'a'; 10_000]).unwrap();
        let dead = CancellationToken::new();
        let keeper = keep_small(path.clone(), 4096, dead.clone());
        let seen = async {
            while sizes(&path) != (0, 4096) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            dead.cancel();
        };
        timeout(Duration::from_secs(10), async { tokio::join!(keeper, seen) }).await.unwrap();
    }

    #[tokio::test]
    async fn a_pump_drains_what_a_dead_vmm_left_and_ends_without_an_end_of_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (&theirs).write_all(&[b'x'; 50_000]).unwrap();
        let dead = CancellationToken::new();
        dead.cancel();
        let source = tokio::net::UnixStream::from_std(ours).unwrap();
        let log = CappedLog::open(&path, 1 << 20).unwrap();
        assert_eq!(pump(source, log, dead).await, 0);
        assert_eq!(sizes(&path), (50_000, 0));
        drop(theirs);
    }
}
