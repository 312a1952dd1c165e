//! The journal of what happened: every change of state, in order, with a number that goes on over restarts of the
//! daemon.
//!
//! Whoever tells of an event waits for nothing: it goes into a bounded queue, and what does not fit is counted. One
//! thread of its own gives the numbers, writes, and only then shows the event to readers, so that a number a reader
//! has seen is never another event's after `kill -9`. What cannot be written is shown all the same; the file then
//! notes how far its numbers may have gone. Readers come at their own pace: from memory, further back from the
//! files, and what is in neither is told as a gap.

mod reader;
mod segments;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::event::{Event, EventKind};
use hearth_core::record::Record;
use tokio::sync::watch;

use crate::engine::now_ms;
pub use reader::{From, Item, NotKept, Reader};
use segments::Segments;

/// Events that wait for the writer; what comes while so many wait is dropped.
const QUEUE: usize = 8192;
/// Events kept in memory for readers that keep up.
const RING: usize = 2048;
/// Between two tries to open the journal.
const REOPEN: Duration = Duration::from_secs(1);

/// Where the journal is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalConfig {
    /// Its directory.
    pub dir: PathBuf,
    /// Most bytes of it that are kept.
    pub keep_bytes: u64,
    /// This boot of the host.
    pub boot_id: String,
}

/// The journal; cheap to clone.
#[derive(Debug, Clone)]
pub struct Events(Arc<Shared>);

/// What became of the events so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Told since the start of the daemon.
    pub told: u64,
    /// Of these, dropped since too many waited.
    pub dropped: u64,
    /// Of these, shown to readers and not written.
    pub unwritten: u64,
    /// Number of the last one; 0 if none.
    pub last: u64,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    wake: Condvar,
    /// Number of the last event that may be read; `None` while the journal is not open.
    last: watch::Sender<Option<u64>>,
    config: Option<JournalConfig>,
}

#[derive(Debug, Default)]
struct Inner {
    /// With each, how many were dropped right before it.
    queue: VecDeque<(u64, Event)>,
    dropped_now: u64,
    ring: VecDeque<Arc<Event>>,
    counts: EventCounts,
    /// Number of the oldest event there is.
    oldest: u64,
    closed: bool,
    ended: bool,
}

impl Events {
    /// A journal that is in memory alone.
    #[must_use]
    pub fn in_memory() -> Self {
        let inner = Inner { oldest: 1, ..Inner::default() };
        Self(Arc::new(Shared {
            inner: Mutex::new(inner),
            wake: Condvar::new(),
            last: watch::Sender::new(Some(0)),
            config: None,
        }))
    }

    /// A journal in files. Nothing is touched here: its thread opens them, and may wait for the disk.
    #[must_use]
    pub fn in_files(config: JournalConfig) -> Self {
        let events = Self(Arc::new(Shared {
            inner: Mutex::default(),
            wake: Condvar::new(),
            last: watch::Sender::new(None),
            config: Some(config.clone()),
        }));
        let shared = Arc::clone(&events.0);
        let thread = std::thread::Builder::new().name("events".into());
        if let Err(e) = thread.spawn(move || write_all(&shared, &config)) {
            tracing::error!("no thread for the journal, events are dropped: {e}");
            events.0.lock().ended = true;
        }
        events
    }

    /// Tells of an event. Waits for nothing.
    pub fn tell(&self, event: Event) {
        let mut inner = self.0.lock();
        inner.counts.told += 1;
        if self.0.config.is_none() {
            let seq = inner.counts.last + 1;
            self.0.show(inner, vec![Event { seq, ..event }], false);
        } else if inner.queue.len() >= QUEUE || inner.ended {
            inner.counts.dropped += 1;
            inner.dropped_now += 1;
        } else {
            let dropped = std::mem::take(&mut inner.dropped_now);
            inner.queue.push_back((dropped, event));
            drop(inner);
            self.0.wake.notify_one();
        }
    }

    /// An event that happens now.
    #[must_use]
    pub fn now(kind: EventKind) -> Event {
        Event::new(kind, now_ms())
    }

    /// Tells of an event about a sandbox that happens now.
    pub(crate) fn about(&self, kind: EventKind, record: &Record, reason: impl Into<String>) {
        self.tell(Self::now(kind).about(record).because(reason));
    }

    /// What became of the events so far.
    #[must_use]
    pub fn counts(&self) -> EventCounts {
        self.0.lock().counts
    }

    /// Writes what waits and takes nothing more; waits at most `within`. Blocks. False if something is left.
    #[must_use]
    pub fn close(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        let mut inner = self.0.lock();
        inner.closed = true;
        inner.ended |= self.0.config.is_none();
        self.0.wake.notify_all();
        while !inner.ended {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            inner = self.0.wake.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Counters and queues: a panic elsewhere leaves them whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets readers have these.
    fn show(&self, mut inner: MutexGuard<'_, Inner>, events: Vec<Event>, unwritten: bool) {
        let Some(last) = events.last().map(|e| e.seq) else { return };
        if unwritten {
            inner.counts.unwritten += events.len() as u64;
        }
        inner.counts.last = last;
        for event in events {
            inner.ring.push_back(Arc::new(event));
            if inner.ring.len() > RING {
                inner.ring.pop_front();
            }
        }
        if self.config.is_none() {
            inner.oldest = inner.ring.front().map_or(1, |e| e.seq);
        }
        drop(inner);
        self.last.send_replace(Some(last));
    }

    /// What waits; `None` when there is nothing and the journal is closed.
    fn take(&self) -> Option<Vec<(u64, Event)>> {
        let mut inner = self.lock();
        while inner.queue.is_empty() {
            if inner.closed {
                return None;
            }
            inner = self.wake.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        Some(inner.queue.drain(..).collect())
    }

    /// Waits a while, unless the journal is closed. True if it is.
    fn pause(&self) -> bool {
        let inner = self.lock();
        let closed = |inner: &mut Inner| !inner.closed;
        let (inner, _) =
            self.wake.wait_timeout_while(inner, REOPEN, closed).unwrap_or_else(PoisonError::into_inner);
        inner.closed
    }
}

/// The writer's thread.
fn write_all(shared: &Shared, config: &JournalConfig) {
    if let Some(segments) = open(shared, config) {
        write_on(shared, segments);
    }
    let mut inner = shared.lock();
    inner.ended = true;
    drop(inner);
    shared.wake.notify_all();
}

/// Opens the files, if need be again and again: without them no number is known.
fn open(shared: &Shared, config: &JournalConfig) -> Option<Segments> {
    let mut told = false;
    loop {
        match Segments::open(&config.dir, config.keep_bytes, &config.boot_id) {
            Ok(segments) => {
                let (mut inner, last) = (shared.lock(), segments.next() - 1);
                inner.counts.last = last;
                inner.oldest = segments.oldest();
                drop(inner);
                shared.last.send_replace(Some(last));
                return Some(segments);
            }
            Err(e) => {
                if !std::mem::replace(&mut told, true) {
                    let dir = config.dir.display();
                    tracing::warn!("the journal in {dir} cannot be opened, trying again: {e}");
                }
            }
        }
        if shared.pause() {
            return None;
        }
    }
}

fn write_on(shared: &Shared, mut segments: Segments) {
    let mut failing = false;
    let mut next = segments.next();
    while let Some(queued) = shared.take() {
        let mut events = Vec::with_capacity(queued.len());
        for (dropped, event) in queued {
            let seq = next + dropped;
            next = seq + 1;
            events.push(Event { seq, ..event });
        }
        let written = segments.append(&events);
        match &written {
            Ok(()) if std::mem::take(&mut failing) => tracing::info!("events are written again"),
            Err(e) if !std::mem::replace(&mut failing, true) => {
                tracing::warn!("events are not written to {}: {e}", segments.dir().display());
            }
            _ => {}
        }
        let mut inner = shared.lock();
        inner.oldest = segments.oldest();
        shared.show(inner, events, written.is_err());
    }
    if let Err(e) = segments.sync() {
        tracing::warn!("the journal may not outlive a power cut: {e}");
    }
}
