//! Reads a VMM's metrics FIFO into sums.
//!
//! It is opened for reading and writing, so neither side ever waits for the other: not to open (a VMM that never
//! opens it is none of our business), and not to write (a full pipe refuses, and Firecracker says so). Memory is one
//! line of bounded length and one buffer, whatever comes. The reader ends with the VMM: once `vmm_dead` is set, which
//! is after the reap, nobody writes any more; what the pipe still holds is read, and that is all there ever will be.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::AsFd as _;
use std::path::Path;

use hearth_core::usage::VmmSample;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::line;
use crate::end_time::now_ms;

/// Longest line that is kept; Firecracker's have about 6 KiB with a few devices.
pub const MAX_LINE: usize = 1024 * 1024;
/// Bytes read at once: what a pipe holds (pipe(7)).
const BUFFER: usize = 64 * 1024;

/// A FIFO being read.
#[derive(Debug)]
pub struct FifoReader {
    receiver: pipe::Receiver,
    /// The same pipe, to be read without asking the runtime whether it is ready: after the exit that answer may be
    /// older than the last line.
    direct: File,
    lines: Lines,
    sums: watch::Sender<VmmSample>,
}

impl FifoReader {
    /// Opens the FIFO at `path`; what comes is added to `sums`. A second reader after the first goes on where that
    /// one ended.
    ///
    /// # Errors
    /// If it is no FIFO, or cannot be opened.
    pub fn open(path: &Path, sums: watch::Sender<VmmSample>) -> io::Result<Self> {
        let receiver = pipe::OpenOptions::new().read_write(true).open_receiver(path)?;
        let direct = File::from(receiver.as_fd().try_clone_to_owned()?);
        Ok(Self { receiver, direct, lines: Lines::default(), sums })
    }

    /// Reads until `vmm_dead` is set and the pipe is empty.
    pub async fn run(mut self, vmm_dead: CancellationToken) {
        let mut buffer = vec![0; BUFFER];
        loop {
            let read = tokio::select! {
                biased;
                () = vmm_dead.cancelled() => break,
                read = self.receiver.read(&mut buffer) => read,
            };
            match read {
                Ok(n) => self.take(&buffer[..n]),
                Err(e) => {
                    tracing::warn!(error = %e, "the metrics FIFO cannot be read; only its rest will be");
                    vmm_dead.cancelled().await;
                    break;
                }
            }
        }
        self.drain(&mut buffer);
    }

    /// Bounded: without a writer there is one pipe's content.
    fn drain(&mut self, buffer: &mut [u8]) {
        loop {
            match self.direct.read(buffer) {
                Ok(0) => break,
                Ok(n) => self.take(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Empty, which is what ends a pipe that is open for writing here too.
                Err(_) => break,
            }
        }
        if let Some(rest) = self.lines.rest() {
            self.sums.send_modify(|sums| add(sums, &rest));
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        let (lines, sums) = (&mut self.lines, &self.sums);
        lines.feed(bytes, |line| {
            sums.send_modify(|sums| match line {
                Some(line) => add(sums, line),
                None => {
                    tracing::debug!("a line of metrics over {MAX_LINE} bytes is dropped");
                    sums.missed += 1;
                }
            });
        });
    }
}

fn add(sums: &mut VmmSample, line: &[u8]) {
    if let Err(e) = line::add(sums, line, now_ms()) {
        // A guest may drive its VMM to this; counted, and shown by `hearth stats`.
        tracing::debug!(error = %e, "metrics");
        sums.missed += 1;
    }
}

/// Cuts bytes into lines.
#[derive(Debug, Default)]
struct Lines {
    partial: Vec<u8>,
    /// Within a line that is too long.
    skipping: bool,
}

impl Lines {
    /// Calls `each` with every line that is whole now; with `None` for one that was too long.
    fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(Option<&[u8]>)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            let (line, after) = (&rest[..end], &rest[end + 1..]);
            rest = after;
            self.grow(line);
            if std::mem::take(&mut self.skipping) {
                each(None);
            } else if !self.partial.is_empty() {
                each(Some(&self.partial));
            }
            self.partial.clear();
        }
        self.grow(rest);
    }

    fn grow(&mut self, bytes: &[u8]) {
        if self.skipping || self.partial.len() + bytes.len() > MAX_LINE {
            self.skipping = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }

    /// A last line without an end, if any.
    fn rest(&mut self) -> Option<Vec<u8>> {
        let rest = std::mem::take(&mut self.partial);
        (std::mem::take(&mut self.skipping) || !rest.is_empty()).then_some(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write as _;
    use std::path::PathBuf;
    use std::time::Duration;
    use tempfile::TempDir;
    use tokio::task::JoinSet;
    use tokio::time::timeout;

    const LINE: &[u8] = b"{\"utc_timestamp_ms\":1,\"block\":{\"read_bytes\":1}}\n";
    const SOON: Duration = Duration::from_secs(20);

    struct Reading {
        path: PathBuf,
        sums: watch::Receiver<VmmSample>,
        sender: watch::Sender<VmmSample>,
        dead: CancellationToken,
        task: JoinSet<()>,
        _dir: TempDir,
    }

    impl Reading {
        fn start() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("metrics.fifo");
            hearth_host::fifo::ensure(&path).unwrap();
            let (sender, sums) = watch::channel(VmmSample::default());
            let mut reading =
                Self { path, sums, sender, dead: CancellationToken::new(), task: JoinSet::new(), _dir: dir };
            reading.restart();
            reading
        }

        fn restart(&mut self) {
            let reader = FifoReader::open(&self.path, self.sender.clone()).unwrap();
            self.task.spawn(reader.run(self.dead.clone()));
        }

        /// The VMM's end, opened as Firecracker does: for reading and writing.
        fn writer(&self) -> std::fs::File {
            OpenOptions::new().read(true).write(true).open(&self.path).unwrap()
        }

        async fn until(&mut self, what: impl FnMut(&VmmSample) -> bool) -> VmmSample {
            *timeout(SOON, self.sums.wait_for(what)).await.expect("the samples come").unwrap()
        }

        async fn end(mut self) -> VmmSample {
            self.dead.cancel();
            timeout(SOON, self.task.join_next())
                .await
                .expect("the reader ends with the VMM")
                .unwrap()
                .unwrap();
            *self.sums.borrow()
        }
    }

    #[tokio::test]
    async fn a_vmm_that_never_opens_it_costs_nothing_and_the_reader_ends() {
        let reading = Reading::start();
        assert_eq!(reading.end().await, VmmSample::default());
    }

    #[tokio::test]
    async fn what_was_written_just_before_the_end_is_kept() {
        let reading = Reading::start();
        // The runtime has not looked at the pipe when the VMM is dead: nothing was awaited in between.
        let mut vmm = reading.writer();
        vmm.write_all(&LINE.repeat(3)).unwrap();
        vmm.write_all(&LINE[..LINE.len() - 1]).unwrap();
        drop(vmm);
        let last = reading.end().await;
        assert_eq!((last.samples, last.missed, last.disk.read_bytes), (4, 0, 4));
    }

    #[tokio::test]
    async fn parts_are_put_together_and_a_torn_last_line_is_missed() {
        let mut reading = Reading::start();
        let mut vmm = reading.writer();
        for byte in LINE {
            vmm.write_all(&[*byte]).unwrap();
            tokio::task::yield_now().await;
        }
        reading.until(|s| s.samples == 1).await;
        vmm.write_all(&LINE[..20]).unwrap();
        let last = reading.end().await;
        assert_eq!((last.samples, last.missed), (1, 1));
    }

    #[tokio::test]
    async fn a_line_over_a_mebibyte_is_dropped_and_the_next_is_read() {
        let mut reading = Reading::start();
        let vmm = reading.writer();
        let writer = std::thread::spawn(move || {
            let mut vmm = vmm;
            let long = vec![b'x'; 3 * MAX_LINE];
            vmm.write_all(&long)?;
            vmm.write_all(b"\n")?;
            vmm.write_all(LINE)
        });
        let seen = reading.until(|s| s.samples == 1).await;
        assert_eq!(seen.missed, 1);
        writer.join().unwrap().unwrap();
        reading.end().await;
    }

    #[tokio::test]
    async fn a_flood_holds_nobody_up_and_ends_with_the_vmm() {
        let mut reading = Reading::start();
        let stop = CancellationToken::new();
        let (vmm, told) = (reading.writer(), stop.clone());
        let writer = std::thread::spawn(move || {
            let mut vmm = vmm;
            let chunk = LINE.repeat(200);
            while !told.is_cancelled() && vmm.write_all(&chunk).is_ok() {}
        });
        reading.until(|s| s.samples > 20_000).await;
        stop.cancel();
        // It may be within a write that waits for room: the reader must make some.
        while !writer.is_finished() {
            tokio::task::yield_now().await;
        }
        writer.join().unwrap();
        assert_eq!(reading.end().await.missed, 0);
    }

    #[tokio::test]
    async fn another_reader_goes_on_where_the_first_ended() {
        let mut reading = Reading::start();
        let mut vmm = reading.writer();
        vmm.write_all(LINE).unwrap();
        reading.until(|s| s.samples == 1).await;
        reading.task.shutdown().await;
        vmm.write_all(&LINE.repeat(2)).unwrap();
        reading.restart();
        reading.until(|s| s.samples == 3).await;
        assert_eq!(reading.end().await.missed, 0);
    }

    #[test]
    fn only_a_fifo_is_opened() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _in = runtime.enter();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "x").unwrap();
        let sums = watch::Sender::new(VmmSample::default());
        assert!(FifoReader::open(&path, sums).is_err());
    }
}
