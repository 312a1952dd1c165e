//! The journal on disk: files of one JSON object per line, each named by the first number in it. The newest is
//! appended to; when it is full the next one begins and the oldest go. Only the daemon that holds the instance's
//! lock writes here; readers may come at any time.
//!
//! The first line of a file is a head of fixed length. Its field `reserved` is overwritten in place, for which a full
//! disk has room too: numbers below it may have been shown to readers without being written.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use hearth_core::event::Event;
use serde::{Deserialize, Serialize};

/// Version of the files' form.
const FORM: u32 = 1;
/// The journal is kept in so many files, so that a part of it can go.
const FILES: u64 = 8;
/// No file is smaller.
const SMALLEST: u64 = 16 * 1024;
/// After a boot of the host: what was shown and not yet on the disk is within so many numbers.
const BOOT_SKIP: u64 = 10_000;
/// Numbers reserved when writing fails.
const RESERVE: u64 = 1_000_000;
const PREFIX: &str = "events-";
const SUFFIX: &str = ".jsonl";
/// Digits of a number in names and heads: as many as the largest has.
const DIGITS: usize = 20;

#[derive(Debug, Serialize, Deserialize)]
struct Head {
    journal: u32,
    boot: String,
    /// Twenty digits.
    reserved: String,
}

impl Head {
    fn line(boot: &str) -> io::Result<String> {
        let head = Head { journal: FORM, boot: boot.to_owned(), reserved: format!("{:020}", 0) };
        Ok(serde_json::to_string(&head)? + "\n")
    }
}

/// The files, open for appending.
#[derive(Debug)]
pub(super) struct Segments {
    dir: PathBuf,
    keep: u64,
    boot: String,
    /// First number in each file, oldest first; with the bytes of each but the newest.
    older: Vec<(u64, u64)>,
    current: Option<Current>,
    next: u64,
}

#[derive(Debug)]
struct Current {
    first: u64,
    file: File,
    len: u64,
    /// A write ended within a line and could not be taken back.
    torn: bool,
    reserved: u64,
}

impl Segments {
    /// Opens the journal, and makes it if there is none. A line that was cut short is taken off.
    ///
    /// # Errors
    /// From the file system.
    pub(super) fn open(dir: &Path, keep: u64, boot: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let mut firsts = list(dir)?;
        let mut segments =
            Self { dir: dir.to_owned(), keep, boot: boot.to_owned(), older: vec![], current: None, next: 1 };
        if let Some(newest) = firsts.pop() {
            segments.take_up(newest)?;
        }
        for first in firsts {
            let len = fs::metadata(path_of(dir, first))?.len();
            segments.older.push((first, len));
        }
        segments.older.sort_unstable();
        Ok(segments)
    }

    fn take_up(&mut self, first: u64) -> io::Result<()> {
        let file = OpenOptions::new().read(true).write(true).open(path_of(&self.dir, first))?;
        let mut text = vec![];
        (&file).read_to_end(&mut text)?;
        let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        let mut lines = text[..whole].split(|b| *b == b'\n');
        let head: Option<Head> = lines.next().and_then(|line| serde_json::from_slice(line).ok());
        let seqs = lines.filter_map(|line| Some(serde_json::from_slice::<Event>(line).ok()?.seq));
        self.next = seqs.max().map_or(first, |last| last + 1);
        match head {
            Some(head) if head.boot == self.boot && head.journal == FORM => {
                let reserved = head.reserved.parse().unwrap_or(0);
                if reserved > self.next {
                    // What follows is in a file of its own, whose numbers are all written again.
                    self.next = reserved;
                    self.older.push((first, whole as u64));
                    return Ok(());
                }
                if whole < text.len() {
                    file.set_len(whole as u64)?;
                }
                self.current = Some(Current { first, file, len: whole as u64, torn: false, reserved: 0 });
            }
            head => {
                let reserved = head.and_then(|h| h.reserved.parse().ok()).unwrap_or(0);
                self.next = reserved.max(self.next + BOOT_SKIP);
                self.older.push((first, text.len() as u64));
            }
        }
        Ok(())
    }

    /// The number after the last one there may be.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The first number that is kept.
    pub(super) fn oldest(&self) -> u64 {
        let first = self.older.first().map(|(first, _)| *first);
        first.or(self.current.as_ref().map(|c| c.first)).unwrap_or(self.next)
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Appends these, all or none.
    ///
    /// # Errors
    /// From the file system; numbers that are shown all the same are then reserved.
    pub(super) fn append(&mut self, events: &[Event]) -> io::Result<()> {
        let Some(last) = events.last().map(|e| e.seq) else { return Ok(()) };
        let written = self.try_append(events);
        self.next = last + 1;
        if written.is_err()
            && let Some(current) = &mut self.current
            && let Err(e) = current.reserve(self.next)
        {
            tracing::debug!("numbers of events cannot be reserved: {e}");
        }
        written
    }

    fn try_append(&mut self, events: &[Event]) -> io::Result<()> {
        let mut text = vec![];
        for event in events {
            serde_json::to_writer(&mut text, event)?;
            text.push(b'\n');
        }
        let largest = (self.keep / FILES).max(SMALLEST);
        match &mut self.current {
            Some(current) if current.len + text.len() as u64 <= largest => current.write(&text),
            _ => {
                let first = events.first().map_or(self.next, |e| e.seq);
                self.begin(first, &text)
            }
        }
    }

    /// Begins the next file with these lines.
    fn begin(&mut self, first: u64, text: &[u8]) -> io::Result<()> {
        let path = path_of(&self.dir, first);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let mut current = Current { first, file, len: 0, torn: false, reserved: 0 };
        let head = Head::line(&self.boot)?;
        if let Err(e) = current.write(&[head.as_bytes(), text].concat()) {
            // Without a head it must not be taken for the newest.
            fs::remove_file(&path)?;
            return Err(e);
        }
        if let Some(former) = self.current.replace(current) {
            self.older.push((former.first, former.len));
        }
        if let Err(e) = self.forget() {
            tracing::warn!("old events stay in {}: {e}", self.dir.display());
        }
        Ok(())
    }

    /// Removes the oldest files beyond what is kept.
    fn forget(&mut self) -> io::Result<()> {
        let of = |older: &[(u64, u64)]| older.iter().map(|(_, len)| len).sum::<u64>();
        let newest = (self.keep / FILES).max(SMALLEST);
        while !self.older.is_empty() && of(&self.older) + newest > self.keep {
            let (first, _) = self.older.remove(0);
            match fs::remove_file(path_of(&self.dir, first)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Has the disk take what was written.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.current.as_ref().map_or(Ok(()), |c| c.file.sync_data())
    }
}

impl Current {
    fn write(&mut self, text: &[u8]) -> io::Result<()> {
        let written = match self.torn {
            // The end of a line that was cut short: it is then one that cannot be read, and no other's begin.
            true => self.file.write_all_at(&[b"\n", text].concat(), self.len),
            false => self.file.write_all_at(text, self.len),
        };
        match written {
            Ok(()) => {
                self.len += text.len() as u64 + u64::from(std::mem::take(&mut self.torn));
                Ok(())
            }
            Err(e) => {
                if self.file.set_len(self.len).is_err() {
                    self.torn = true;
                    self.len = self.file.metadata()?.len();
                }
                Err(e)
            }
        }
    }

    /// Notes in place that numbers up to well beyond `next` may have been shown.
    fn reserve(&mut self, next: u64) -> io::Result<()> {
        if next < self.reserved {
            return Ok(());
        }
        let reserved = next + RESERVE;
        let mut head = vec![0; 256];
        let read = self.file_head(&mut head)?;
        let at = find(&head[..read], b"\"reserved\":\"").ok_or(io::ErrorKind::InvalidData)?;
        self.file.write_all_at(format!("{reserved:020}").as_bytes(), at as u64)?;
        self.reserved = reserved;
        Ok(())
    }

    fn file_head(&self, into: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(into, 0)
    }
}

/// Just behind `what`.
fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|w| w == what).map(|at| at + what.len())
}

fn path_of(dir: &Path, first: u64) -> PathBuf {
    dir.join(format!("{PREFIX}{first:020}{SUFFIX}"))
}

/// First numbers of all files, rising.
fn list(dir: &Path) -> io::Result<Vec<u64>> {
    let mut firsts = vec![];
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|n| n.strip_prefix(PREFIX)?.strip_suffix(SUFFIX));
        firsts.extend(number.filter(|n| n.len() == DIGITS).and_then(|n| n.parse::<u64>().ok()));
    }
    firsts.sort_unstable();
    Ok(firsts)
}

/// At most `limit` events from number `from` on, as the files have them. Lines that cannot be read are left out.
///
/// # Errors
/// From the file system. A file that goes meanwhile is none: its events are not kept any more.
pub(super) fn read(dir: &Path, from: u64, limit: usize) -> io::Result<Vec<Event>> {
    let firsts = list(dir)?;
    let begin = firsts.partition_point(|first| *first <= from).saturating_sub(1);
    let mut events = Vec::new();
    for first in &firsts[begin..] {
        let file = match File::open(path_of(dir, *first)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for line in BufReader::new(file).split(b'\n').skip(1) {
            let Ok(event) = serde_json::from_slice::<Event>(&line?) else { continue };
            if event.seq >= from {
                events.push(event);
            }
            if events.len() == limit {
                return Ok(events);
            }
        }
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::event::EventKind;

    const KEEP: u64 = 8 * SMALLEST;

    fn event(seq: u64) -> Event {
        Event { seq, ..Event::new(EventKind::SandboxRunning, seq) }
    }

    fn seqs(dir: &Path, from: u64) -> Vec<u64> {
        read(dir, from, 1_000_000).unwrap().iter().map(|e| e.seq).collect()
    }

    #[test]
    fn numbers_go_on_and_a_torn_line_is_taken_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = Segments::open(dir.path(), KEEP, "b").unwrap();
        first.append(&[event(1), event(2)]).unwrap();
        drop(first);
        let file = path_of(dir.path(), 1);
        let mut text = fs::read(&file).unwrap();
        text.extend_from_slice(b"{\"seq\":3,\"at_ms\":");
        fs::write(&file, text).unwrap();
        let mut again = Segments::open(dir.path(), KEEP, "b").unwrap();
        assert_eq!((again.next(), again.oldest()), (3, 1));
        again.append(&[event(3)]).unwrap();
        assert_eq!(seqs(dir.path(), 0), [1, 2, 3]);
        assert_eq!(seqs(dir.path(), 3), [3]);
    }

    #[test]
    fn another_boot_skips_what_may_have_been_lost() {
        let dir = tempfile::tempdir().unwrap();
        Segments::open(dir.path(), KEEP, "b").unwrap().append(&[event(1)]).unwrap();
        let mut again = Segments::open(dir.path(), KEEP, "c").unwrap();
        assert_eq!(again.next(), 2 + BOOT_SKIP);
        again.append(&[event(2 + BOOT_SKIP)]).unwrap();
        assert_eq!(Segments::open(dir.path(), KEEP, "c").unwrap().next(), 3 + BOOT_SKIP);
        assert_eq!(seqs(dir.path(), 0), [1, 2 + BOOT_SKIP]);
    }

    #[test]
    fn the_oldest_files_go_and_the_rest_stays_within_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let mut segments = Segments::open(dir.path(), KEEP, "b").unwrap();
        for seq in 1..=10_000 {
            segments.append(&[event(seq)]).unwrap();
        }
        let kept: u64 = list(dir.path()).unwrap().iter().map(|f| path_of(dir.path(), *f)).map(len).sum();
        assert!(kept <= KEEP, "{kept}");
        assert!(kept > KEEP / 2, "{kept}");
        let seqs = seqs(dir.path(), 0);
        assert_eq!(seqs.first(), Some(&segments.oldest()));
        assert!(segments.oldest() > 1);
        let expected: Vec<u64> = (segments.oldest()..=10_000).collect();
        assert_eq!(seqs, expected);
        assert_eq!(Segments::open(dir.path(), KEEP, "b").unwrap().oldest(), segments.oldest());
    }

    fn len(path: PathBuf) -> u64 {
        fs::metadata(path).unwrap().len()
    }

    #[test]
    fn numbers_shown_and_not_written_are_never_given_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut segments = Segments::open(dir.path(), KEEP, "b").unwrap();
        segments.append(&[event(1)]).unwrap();
        // As on a full disk: nothing can be appended, what is there can be overwritten.
        segments.current.as_mut().unwrap().reserve(51).unwrap();
        drop(segments);
        let mut again = Segments::open(dir.path(), KEEP, "b").unwrap();
        assert_eq!(again.next(), 51 + RESERVE);
        again.append(&[event(51 + RESERVE)]).unwrap();
        assert_eq!(Segments::open(dir.path(), KEEP, "b").unwrap().next(), 52 + RESERVE);
        assert_eq!(seqs(dir.path(), 0), [1, 51 + RESERVE]);
    }

    #[test]
    fn a_failed_write_is_told_and_leaves_the_file_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut segments = Segments::open(dir.path(), KEEP, "b").unwrap();
        segments.append(&[event(1)]).unwrap();
        // A file that takes nothing more.
        let whole = segments.current.as_mut().unwrap();
        whole.file = File::open(path_of(dir.path(), 1)).unwrap();
        assert!(segments.append(&[event(2)]).is_err());
        assert_eq!(segments.next(), 3);
        assert_eq!(seqs(dir.path(), 0), [1]);
    }
}
