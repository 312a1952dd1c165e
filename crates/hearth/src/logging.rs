//! The daemon's own log. Whoever logs never waits for whoever reads: lines go through a bounded queue to a thread of
//! its own, and what cannot be queued or written is counted.

use std::io::{self, IsTerminal as _, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use hearth_vmm::console::CappedLog;
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
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
    lost: Lost,
}

/// Lines that nobody will read.
#[derive(Debug, Clone)]
pub(crate) struct Lost {
    queue: Option<ErrorCounter>,
    unwritten: Arc<AtomicU64>,
}

impl Lost {
    /// Where logging is not ours.
    pub(crate) fn none() -> Self {
        Self { queue: None, unwritten: Arc::default() }
    }

    /// Lines dropped since too many waited.
    pub(crate) fn dropped(&self) -> u64 {
        self.queue.as_ref().map_or(0, |q| u64::try_from(q.dropped_lines()).unwrap_or(u64::MAX))
    }

    /// Lines that could not be written.
    pub(crate) fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
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
        let unwritten = Arc::<AtomicU64>::default();
        let counted = Counted { sink, unwritten: Arc::clone(&unwritten) };
        let builder = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(QUEUE);
        let (writer, guard) = builder.thread_name("log").finish(counted);
        let queue = Some(writer.error_counter());
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
        Ok(Self { _writer: guard, lost: Lost { queue, unwritten } })
    }

    /// Counts what is lost.
    pub(crate) fn lost(&self) -> Lost {
        self.lost.clone()
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

/// Counts what cannot be written, and goes on.
#[derive(Debug)]
struct Counted {
    sink: Sink,
    unwritten: Arc<AtomicU64>,
}

impl Write for Counted {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let written = match &mut self.sink {
            Sink::Stderr => io::stderr().write_all(line),
            Sink::File(log) => log.write(line),
        };
        if written.is_err() {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
        }
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
        let unwritten = Arc::<AtomicU64>::default();
        let mut log = Counted { sink: Sink::open(&path, 4096).unwrap(), unwritten: Arc::clone(&unwritten) };
        for n in 0..1000 {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        assert_eq!(unwritten.load(Ordering::Relaxed), 0);
        let older = std::fs::metadata(dir.path().join("log.1")).unwrap().len();
        assert!(older <= 4096 && std::fs::metadata(&path).unwrap().len() <= 4096);
        // A device that is always full.
        let sink = Sink::open(Path::new("/dev/full"), 1 << 20).unwrap();
        let mut log = Counted { sink, unwritten: Arc::clone(&unwritten) };
        for _ in 0..3 {
            log.write_all(b"lost\n").unwrap();
        }
        assert_eq!(unwritten.load(Ordering::Relaxed), 3);
    }
}
