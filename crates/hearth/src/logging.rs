//! The daemon's own log. Whoever logs never waits for whoever reads: lines go through a bounded queue to a thread of
//! its own, and what cannot be queued or written is counted.

use std::io::{self, IsTerminal as _, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hearth_vmm::console::CappedLog;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{LogConfig, LogFormat};

/// Lines that wait to be written.
const QUEUE: usize = 16 * 1024;

/// The log while it is kept. What waits is written when this is dropped, within about a second.
#[derive(Debug)]
pub(crate) struct Log {
    _writer: WorkerGuard,
    lines: LogLines,
}

/// What became of the log's lines.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogLines {
    queue: Option<ErrorCounter>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Handed to the queue.
    told: AtomicU64,
    /// Taken from it, whatever came of the writing.
    taken: AtomicU64,
    unwritten: AtomicU64,
}

impl LogLines {
    /// Dropped since too many waited.
    pub(crate) fn dropped(&self) -> u64 {
        self.queue.as_ref().map_or(0, |q| u64::try_from(q.dropped_lines()).unwrap_or(u64::MAX))
    }

    /// Lines that could not be written.
    pub(crate) fn unwritten(&self) -> u64 {
        self.counts.unwritten.load(Ordering::Relaxed)
    }

    /// Blocks until what was logged before is written, or `within` has passed: for whoever ends the process without
    /// dropping the log.
    pub(crate) fn settle(&self, within: Duration) {
        let end = Instant::now() + within;
        let waits = || {
            let told = self.counts.told.load(Ordering::SeqCst).saturating_sub(self.dropped());
            self.counts.taken.load(Ordering::SeqCst) < told
        };
        while waits() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Log {
    /// Starts logging. `filter` says what is logged.
    ///
    /// # Errors
    /// If the log file cannot be opened, or logging was started before.
    pub(crate) fn start(config: &LogConfig, filter: Targets) -> anyhow::Result<Self> {
        let sink = match &config.file {
            Some(path) => Sink::open(path, config.file_mib << 20)?,
            None => Sink::Stderr,
        };
        let ansi = config.file.is_none() && io::stderr().is_terminal();
        let counts = Arc::<Counts>::default();
        let counted = Counted { sink, counts: Arc::clone(&counts) };
        let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(QUEUE);
        let (writer, guard) = builder.thread_name("log").finish(counted);
        let queue = Some(writer.error_counter());
        let told = Arc::clone(&counts);
        let writer = move || Queued { writer: writer.clone(), counts: Arc::clone(&told) };
        let layer = tracing_subscriber::fmt::layer().with_writer(writer);
        match config.format {
            LogFormat::Json => {
                let layer = layer.json().flatten_event(true).with_filter(filter);
                tracing_subscriber::registry().with(layer).try_init()?;
            }
            LogFormat::Human => {
                let layer = layer.with_ansi(ansi).with_filter(filter);
                tracing_subscriber::registry().with(layer).try_init()?;
            }
        }
        Ok(Self { _writer: guard, lines: LogLines { queue, counts } })
    }

    /// What becomes of its lines.
    pub(crate) fn lines(&self) -> LogLines {
        self.lines.clone()
    }
}

#[derive(Debug)]
enum Sink {
    Stderr,
    File(CappedLog),
}

impl Sink {
    fn open(path: &Path, cap: u64) -> anyhow::Result<Self> {
        let log = CappedLog::open(path, cap).with_context(|| format!("log file {}", path.display()))?;
        Ok(Sink::File(log))
    }
}

/// The end of the queue where lines go in.
#[derive(Debug)]
struct Queued {
    writer: NonBlocking,
    counts: Arc<Counts>,
}

impl Write for Queued {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.counts.told.fetch_add(1, Ordering::SeqCst);
        self.writer.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Counts what cannot be written, and goes on.
#[derive(Debug)]
struct Counted {
    sink: Sink,
    counts: Arc<Counts>,
}

impl Write for Counted {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let written = match &mut self.sink {
            Sink::Stderr => io::stderr().write_all(line),
            Sink::File(log) => log.write(line),
        };
        if written.is_err() {
            self.counts.unwritten.fetch_add(1, Ordering::Relaxed);
        }
        self.counts.taken.fetch_add(1, Ordering::SeqCst);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_written_is_counted_and_a_full_file_is_turned_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let lines = LogLines::default();
        let mut log = Counted { sink: Sink::open(&path, 4096).unwrap(), counts: Arc::clone(&lines.counts) };
        for n in 0..1000 {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        assert_eq!(lines.unwritten(), 0);
        let older = std::fs::metadata(dir.path().join("log.1")).unwrap().len();
        assert!(older <= 4096 && std::fs::metadata(&path).unwrap().len() <= 4096);
        // A device that is always full.
        let sink = Sink::open(Path::new("/dev/full"), 1 << 20).unwrap();
        let mut log = Counted { sink, counts: Arc::clone(&lines.counts) };
        for _ in 0..3 {
            log.write_all(b"lost\n").unwrap();
        }
        assert_eq!(lines.unwritten(), 3);
    }

    #[test]
    fn whoever_ends_the_process_can_wait_for_the_lines_before() {
        struct Slow(Arc<Counts>, Arc<AtomicU64>);
        impl Write for Slow {
            fn write(&mut self, line: &[u8]) -> io::Result<usize> {
                std::thread::sleep(Duration::from_millis(5));
                self.1.fetch_add(1, Ordering::SeqCst);
                self.0.taken.fetch_add(1, Ordering::SeqCst);
                Ok(line.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (counts, written) = (Arc::<Counts>::default(), Arc::<AtomicU64>::default());
        let slow = Slow(Arc::clone(&counts), Arc::clone(&written));
        let (writer, _guard) = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(4).finish(slow);
        let lines = LogLines { queue: Some(writer.error_counter()), counts: Arc::clone(&counts) };
        let mut queued = Queued { writer, counts };
        // More than there is room for: what was dropped is not waited for.
        for n in 0..20 {
            queued.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        lines.settle(Duration::from_secs(60));
        assert_eq!(written.load(Ordering::SeqCst) + lines.dropped(), 20);
        assert!(lines.dropped() > 0);
    }
}
