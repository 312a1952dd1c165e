//! Reading the journal, each reader at its own pace: what is in memory from there, what is older from the files, what
//! is in neither as a gap.

use std::collections::VecDeque;
use std::sync::Arc;

use hearth_core::event::Event;
use tokio::sync::watch;

use super::{Events, Shared, segments};
use crate::blocking::blocking;

/// Events fetched at once.
const BATCH: usize = 512;

/// What a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// The next event.
    Event(Arc<Event>),
    /// Events with the numbers `first` to `last` are not there: not kept any more, dropped, or not written.
    Gap {
        /// First missing number.
        first: u64,
        /// Last missing number.
        last: u64,
    },
}

/// Where to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// With the oldest event there is.
    Oldest,
    /// After the event of this number.
    After(u64),
    /// With the next one that comes.
    Now,
}

/// A number that this journal has not come to.
#[derive(Debug, thiserror::Error)]
#[error(
    "event {asked} is not of this journal, whose last one is {last}; leave the number out to read all there is"
)]
pub struct NotKept {
    asked: u64,
    last: u64,
}

/// One reader.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    /// Number of the next event.
    next: u64,
    items: VecDeque<Item>,
    last: watch::Receiver<Option<u64>>,
}

impl Events {
    /// A reader. Waits until the journal is open.
    ///
    /// # Errors
    /// If `from` is after the journal's end.
    pub async fn read(&self, from: From) -> Result<Reader, NotKept> {
        let mut last = self.0.last.subscribe();
        // The sender lives as long as this value.
        let open = last.wait_for(Option::is_some).await.map_or(0, |last| last.unwrap_or(0));
        let next = match from {
            From::Now => open + 1,
            From::Oldest => {
                // What could not be written is in memory alone.
                let inner = self.0.lock();
                inner.ring.front().map_or(inner.oldest, |e| e.seq.min(inner.oldest))
            }
            From::After(seq) if seq > open => return Err(NotKept { asked: seq, last: open }),
            From::After(seq) => seq + 1,
        };
        Ok(Reader { shared: Arc::clone(&self.0), next, items: VecDeque::new(), last })
    }
}

impl Reader {
    /// The next item, waited for.
    ///
    /// # Errors
    /// If the files cannot be read.
    pub async fn next(&mut self) -> std::io::Result<Item> {
        loop {
            if let Some(item) = self.ready().await? {
                return Ok(item);
            }
            if self.last.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// The next item, if it is there.
    ///
    /// # Errors
    /// If the files cannot be read.
    pub async fn ready(&mut self) -> std::io::Result<Option<Item>> {
        if self.items.is_empty() {
            self.fetch().await?;
        }
        Ok(self.items.pop_front())
    }

    async fn fetch(&mut self) -> std::io::Result<()> {
        // Seen before the look, so that what comes after it wakes.
        let last = self.last.borrow_and_update().unwrap_or(0);
        if self.next > last {
            return Ok(());
        }
        let (events, edge) = {
            let inner = self.shared.lock();
            match inner.ring.front().map(|e| e.seq) {
                Some(front) if front <= self.next => {
                    let begin = inner.ring.partition_point(|e| e.seq < self.next);
                    let events = inner.ring.iter().skip(begin).take(BATCH).cloned().collect();
                    (Some(events), last)
                }
                Some(front) => (None, front - 1),
                None => (None, last),
            }
        };
        let events: Vec<Arc<Event>> = match (events, &self.shared.config) {
            (Some(events), _) => events,
            (None, Some(config)) => {
                let (dir, from) = (config.dir.clone(), self.next);
                let read = blocking(move || segments::read(&dir, from, BATCH)).await?;
                read.into_iter().map(Arc::new).collect()
            }
            (None, None) => vec![],
        };
        for event in &events {
            self.missing_until(event.seq);
            self.items.push_back(Item::Event(Arc::clone(event)));
            self.next = event.seq + 1;
        }
        if events.is_empty() {
            self.missing_until(edge + 1);
        }
        Ok(())
    }

    /// Notes a gap if the next event there is has a later number.
    fn missing_until(&mut self, seq: u64) {
        if self.next < seq {
            self.items.push_back(Item::Gap { first: self.next, last: seq - 1 });
            self.next = seq;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use hearth_core::event::EventKind;

    use super::*;
    use crate::events::{JournalConfig, QUEUE, RING};

    fn config(dir: &Path) -> JournalConfig {
        JournalConfig { dir: dir.to_owned(), keep_bytes: 1 << 20, boot_id: "b".into() }
    }

    fn tell(events: &Events, n: usize) {
        for _ in 0..n {
            events.tell(Events::now(EventKind::SandboxRunning));
        }
    }

    async fn read_to(reader: &mut Reader, last: u64) -> Vec<Item> {
        let mut items = vec![];
        let all = async {
            loop {
                let item = reader.next().await.unwrap();
                let seq = match &item {
                    Item::Event(e) => e.seq,
                    Item::Gap { last, .. } => *last,
                };
                items.push(item);
                if seq >= last {
                    break;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), all).await.expect("all events in time");
        items
    }

    fn seqs(items: &[Item]) -> Vec<u64> {
        items.iter().map(|i| if let Item::Event(e) = i { e.seq } else { 0 }).collect()
    }

    #[tokio::test]
    async fn a_reader_resumes_over_a_restart_without_gap_or_duplicate() {
        let dir = tempfile::tempdir().unwrap();
        let first = Events::in_files(config(dir.path()));
        tell(&first, 5);
        let mut reader = first.read(From::Oldest).await.unwrap();
        assert_eq!(seqs(&read_to(&mut reader, 5).await), [1, 2, 3, 4, 5]);
        // As after kill -9: nobody closes it. Its thread has nothing more to write.
        let second = Events::in_files(config(dir.path()));
        tell(&second, 3);
        let mut resumed = second.read(From::After(5)).await.unwrap();
        assert_eq!(seqs(&read_to(&mut resumed, 8).await), [6, 7, 8]);
        assert!(second.read(From::After(9)).await.is_err());
        assert!(first.close(Duration::from_secs(10)) && second.close(Duration::from_secs(10)));
    }

    #[tokio::test]
    async fn a_slow_reader_gets_all_from_the_files_and_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let events = Events::in_files(config(dir.path()));
        let mut reader = events.read(From::Now).await.unwrap();
        let n = RING + 500;
        for _ in 0..n {
            tell(&events, 1);
            // Not faster than the writer.
            while events.counts().told - events.counts().last > (QUEUE / 2) as u64 {
                tokio::task::yield_now().await;
            }
        }
        let items = read_to(&mut reader, n as u64).await;
        assert_eq!(seqs(&items), (1..=n as u64).collect::<Vec<_>>());
        assert!(events.close(Duration::from_secs(10)));
    }

    #[tokio::test]
    async fn what_is_not_kept_is_told_as_a_gap() {
        let events = Events::in_memory();
        tell(&events, RING + 10);
        let mut reader = events.read(From::After(3)).await.unwrap();
        assert_eq!(reader.next().await.unwrap(), Item::Gap { first: 4, last: 10 });
        assert_eq!(seqs(&read_to(&mut reader, RING as u64 + 10).await)[0], 11);
        let mut oldest = events.read(From::Oldest).await.unwrap();
        assert!(matches!(oldest.next().await.unwrap(), Item::Event(e) if e.seq == 11));
    }

    #[tokio::test]
    async fn a_journal_that_cannot_be_opened_drops_and_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        std::fs::write(&path, "a file").unwrap();
        let events = Events::in_files(config(&path));
        tell(&events, QUEUE + 7);
        assert_eq!((events.counts().told, events.counts().dropped), (QUEUE as u64 + 7, 7));
        // Once it can be opened, what waited is there, and what was dropped is a gap.
        std::fs::remove_file(&path).unwrap();
        let mut reader = events.read(From::Oldest).await.unwrap();
        read_to(&mut reader, QUEUE as u64).await;
        tell(&events, 1);
        let next = QUEUE as u64 + 1;
        assert_eq!(reader.next().await.unwrap(), Item::Gap { first: next, last: next + 6 });
        assert!(matches!(reader.next().await.unwrap(), Item::Event(e) if e.seq == next + 7));
        assert!(events.close(Duration::from_secs(10)));
    }
}
