//! First pass over a tar archive: everything is checked before anything is unpacked.
//!
//! Its own walk over the headers rather than the tar crate's iterator, for three reasons: an archive cut
//! between two entries must be told from a whole one, a length field must not make us allocate, and names
//! must be judged exactly as GNU tar, which unpacks afterwards, will read them.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};

use tar::{EntryType, Header};

use super::error::ImageError;
use super::job::Job;

const BLOCK: usize = 512;
/// Fields of a header.
const NAME: std::ops::Range<usize> = 0..100;
const LINK: std::ops::Range<usize> = 157..257;
const MAGIC: std::ops::Range<usize> = 257..263;
const PREFIX: std::ops::Range<usize> = 345..500;
/// Longest GNU long name taken.
const MAX_NAME: u64 = 64 * 1024;
/// Largest pax header taken; extended attributes live in it.
const MAX_PAX: u64 = 8 << 20;
/// Symlinks followed in one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// What an archive holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) entries: u64,
    /// Bytes of files as unpacked, each rounded up to a block of 4 KiB.
    pub(super) bytes: u64,
}

/// An archive that must not be unpacked.
#[derive(Debug)]
pub(super) enum Fault {
    Bad { entry: Option<String>, why: String },
    Stopped,
}

impl Fault {
    fn archive(why: impl Into<String>) -> Self {
        Fault::Bad { entry: None, why: why.into() }
    }

    fn entry(name: &[u8], why: impl Into<String>) -> Self {
        Fault::Bad { entry: Some(String::from_utf8_lossy(name).into_owned()), why: why.into() }
    }

    pub(super) fn at(self, archive: &str) -> ImageError {
        match self {
            Fault::Bad { entry, why } => ImageError::Tar { archive: archive.to_owned(), entry, why },
            Fault::Stopped => ImageError::Stopped,
        }
    }
}

/// Values that headers of their own give to the entry after them.
#[derive(Default)]
struct Pending {
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    pax: HashMap<Vec<u8>, Vec<u8>>,
}

struct Scan<'a, R> {
    input: R,
    job: &'a Job<'a>,
    summary: Summary,
    /// Every path seen, in its plain form.
    paths: HashSet<Vec<u8>>,
    /// Every path that was a symlink at some time, with its last target.
    links: HashMap<Vec<u8>, Vec<u8>>,
    last: Vec<u8>,
}

/// Reads the whole archive.
pub(super) fn scan(input: impl Read, job: &Job<'_>) -> Result<Summary, Fault> {
    let mut scan = Scan {
        input,
        job,
        summary: Summary::default(),
        paths: HashSet::new(),
        links: HashMap::new(),
        last: Vec::new(),
    };
    scan.headers()?;
    // The end of a compressed stream carries its checksum.
    scan.skip(None)?;
    Ok(scan.summary)
}

impl<R: Read> Scan<'_, R> {
    fn headers(&mut self) -> Result<(), Fault> {
        let mut pending = Pending::default();
        let mut block = [0_u8; BLOCK];
        let mut first = true;
        loop {
            self.fill(&mut block, "no end mark after it")?;
            if block.iter().all(|b| *b == 0) {
                return if first { Err(Fault::archive("it is empty")) } else { Ok(()) };
            }
            let header = Header::from_byte_slice(&block);
            if header.cksum().ok() != Some(checksum(&block)) {
                return Err(if first {
                    Fault::archive("it is not a tar archive (plain, gzip, xz or zstd)")
                } else {
                    Fault::archive(format!("it is damaged after entry {:?}", self.last_name()))
                });
            }
            first = false;
            let size = header
                .entry_size()
                .map_err(|e| Fault::entry(&header_name(&block), format!("its size cannot be read: {e}")))?;
            let kind = header.entry_type();
            match kind {
                EntryType::GNULongName => pending.long_name = Some(self.text(size, MAX_NAME)?),
                EntryType::GNULongLink => pending.long_link = Some(self.text(size, MAX_NAME)?),
                EntryType::XHeader => {
                    let data = self.data(size, MAX_PAX)?;
                    // GNU tar forgets the first of two; others add them up.
                    if !pending.pax.is_empty() {
                        return Err(Fault::archive("it has two pax headers before one entry"));
                    }
                    pending.pax.extend(pax(&data).ok_or_else(|| Fault::archive("a pax header is damaged"))?);
                }
                EntryType::XGlobalHeader => {
                    let data = self.data(size, MAX_PAX)?;
                    let records = pax(&data).ok_or_else(|| Fault::archive("a pax header is damaged"))?;
                    let names = |k: &[u8]| {
                        matches!(k, b"path" | b"linkpath" | b"size") || k.starts_with(b"GNU.sparse")
                    };
                    if records.iter().any(|(k, _)| names(k)) {
                        return Err(Fault::archive("a global pax header sets names or sizes"));
                    }
                }
                _ => {
                    self.entry(&block, kind, size, std::mem::take(&mut pending))?;
                }
            }
        }
    }

    fn entry(
        &mut self,
        block: &[u8; BLOCK],
        kind: EntryType,
        size: u64,
        mut given: Pending,
    ) -> Result<(), Fault> {
        // GNU tar lets pax win over its own long names, and both over the header; the name of a sparse file wins
        // over all, whatever the entry's type and the order of the records.
        let path = given.pax.remove(&b"path"[..]);
        let raw = given
            .pax
            .remove(&b"GNU.sparse.name"[..])
            .or(path)
            .or(given.long_name)
            .unwrap_or_else(|| header_name(block));
        let name = plain(&raw).map_err(|why| Fault::entry(&raw, why))?;
        let size = match given.pax.get(&b"size"[..]) {
            None => size,
            Some(text) => number(text).ok_or_else(|| Fault::entry(&raw, "its size cannot be read"))?,
        };
        let target = given
            .pax
            .remove(&b"linkpath"[..])
            .or(given.long_link)
            .unwrap_or_else(|| until_zero(&block[LINK]).to_vec());
        if target.contains(&0) {
            return Err(Fault::entry(&raw, "the name it links to has a zero byte in it"));
        }
        if name.is_empty() && kind != EntryType::Directory {
            return Err(Fault::entry(&raw, "it has no name"));
        }
        let real = self.resolve(&name, &raw)?;
        let with_data = matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse);
        if !with_data && size != 0 {
            return Err(Fault::entry(&raw, format!("it is a {kind:?} and yet has {size} bytes of data")));
        }
        let mut unpacked = size;
        match kind {
            EntryType::Regular | EntryType::Continuous => {
                let real_size =
                    given.pax.get(&b"GNU.sparse.realsize"[..]).or(given.pax.get(&b"GNU.sparse.size"[..]));
                unpacked = real_size.and_then(|t| number(t)).unwrap_or(size).max(size);
            }
            EntryType::GNUSparse => self.sparse_map(Header::from_byte_slice(block))?,
            EntryType::Link => {
                let to = plain(&target).map_err(|why| {
                    let target = String::from_utf8_lossy(&target).into_owned();
                    Fault::entry(&raw, format!("it is a hard link to {target:?}: {why}"))
                })?;
                let to = self.resolve(&to, &raw)?;
                if !self.paths.contains(&to) {
                    let target = String::from_utf8_lossy(&target).into_owned();
                    let why = format!("it is a hard link to {target:?}, which no entry before it is");
                    return Err(Fault::entry(&raw, why));
                }
            }
            EntryType::Symlink => {
                if target.is_empty() {
                    return Err(Fault::entry(&raw, "it is a symbolic link without a target"));
                }
                self.links.insert(real.clone(), target);
            }
            EntryType::Char | EntryType::Block | EntryType::Directory | EntryType::Fifo => {}
            other => {
                let why = format!("its type {:?} is not supported", char::from(other.as_byte()));
                return Err(Fault::entry(&raw, why));
            }
        }
        self.paths.insert(real);
        self.last = raw;
        self.summary.entries += 1;
        self.summary.bytes = self.summary.bytes.saturating_add(unpacked.saturating_add(4095) & !4095);
        let padded = size
            .checked_next_multiple_of(BLOCK as u64)
            .ok_or_else(|| Fault::entry(&self.last, "its size is impossible"))?;
        self.skip(Some(padded))
    }

    /// Follows the symlinks of the archive in all but the last part of `path`.
    fn resolve(&self, path: &[u8], entry: &[u8]) -> Result<Vec<u8>, Fault> {
        let mut todo: Vec<Vec<u8>> = parts(path).rev().map(<[u8]>::to_vec).collect();
        let mut done: Vec<Vec<u8>> = Vec::new();
        let mut followed = 0;
        while let Some(part) = todo.pop() {
            if part == b".." {
                if done.pop().is_none() {
                    return Err(Fault::entry(entry, "its path leads out of the archive by a symbolic link"));
                }
                continue;
            }
            done.push(part);
            if todo.is_empty() {
                break;
            }
            let here = done.join(&b'/');
            if let Some(target) = self.links.get(&here) {
                followed += 1;
                if target.starts_with(b"/") || followed > MAX_LINKS {
                    return Err(Fault::entry(
                        entry,
                        format!(
                            "its path goes through {:?}, a symbolic link to {:?} in the same archive",
                            String::from_utf8_lossy(&here),
                            String::from_utf8_lossy(target)
                        ),
                    ));
                }
                done.pop();
                todo.extend(parts(target).rev().map(<[u8]>::to_vec));
            }
        }
        Ok(done.join(&b'/'))
    }

    /// Passes the extension blocks of an old GNU sparse entry, which come before its data.
    fn sparse_map(&mut self, header: &Header) -> Result<(), Fault> {
        let mut more = header.as_gnu().is_some_and(tar::GnuHeader::is_extended);
        let mut block = [0_u8; BLOCK];
        while more {
            self.fill(&mut block, "cut short inside an entry")?;
            more = block[504] != 0;
        }
        Ok(())
    }

    fn last_name(&self) -> String {
        String::from_utf8_lossy(&self.last).into_owned()
    }

    /// Reads one block.
    fn fill(&mut self, block: &mut [u8], lacks: &str) -> Result<(), Fault> {
        self.job.check().map_err(|_| Fault::Stopped)?;
        self.input.read_exact(block).map_err(|e| self.read_fault(&e, lacks))
    }

    fn read_fault(&self, error: &std::io::Error, lacks: &str) -> Fault {
        if self.job.stopped() {
            return Fault::Stopped;
        }
        let place = if self.last.is_empty() {
            "before its first entry".to_owned()
        } else {
            format!("at entry {:?}", self.last_name())
        };
        if error.kind() == ErrorKind::UnexpectedEof {
            Fault::archive(format!("it is truncated {place} ({lacks})"))
        } else {
            Fault::archive(format!("it cannot be read {place}: {error}"))
        }
    }

    /// Data of a header that is kept, without its padding.
    fn data(&mut self, size: u64, max: u64) -> Result<Vec<u8>, Fault> {
        if size > max {
            return Err(Fault::archive(format!(
                "a header after entry {:?} has {size} bytes",
                self.last_name()
            )));
        }
        let mut data = vec![0; usize::try_from(size).unwrap_or(0)];
        self.fill(&mut data, "cut short inside a header")?;
        let padding = size.next_multiple_of(BLOCK as u64) - size;
        self.skip(Some(padding))?;
        Ok(data)
    }

    fn text(&mut self, size: u64, max: u64) -> Result<Vec<u8>, Fault> {
        let mut data = self.data(size, max)?;
        let end = data.iter().position(|b| *b == 0).unwrap_or(data.len());
        data.truncate(end);
        Ok(data)
    }

    /// Passes `count` bytes, or all that are left.
    fn skip(&mut self, count: Option<u64>) -> Result<(), Fault> {
        let mut buf = vec![0; 64 * 1024];
        let mut left = count;
        while left != Some(0) {
            self.job.check().map_err(|_| Fault::Stopped)?;
            let want = left.map_or(buf.len(), |l| usize::try_from(l).unwrap_or(buf.len()).min(buf.len()));
            match self.input.read(&mut buf[..want]) {
                Ok(0) if count.is_none() => return Ok(()),
                Ok(0) => return Err(self.read_fault(&ErrorKind::UnexpectedEof.into(), "cut short inside it")),
                Ok(n) => left = left.map(|l| l - n as u64),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.read_fault(&e, "cut short inside it")),
            }
        }
        Ok(())
    }
}

fn checksum(block: &[u8; BLOCK]) -> u32 {
    let blank = u32::from(b' ') * 8;
    block[..148].iter().chain(&block[156..]).map(|b| u32::from(*b)).sum::<u32>() + blank
}

/// The name in the header as GNU tar reads it: the prefix of a ustar header counts whatever its version says.
fn header_name(block: &[u8; BLOCK]) -> Vec<u8> {
    let (name, prefix) = (until_zero(&block[NAME]), until_zero(&block[PREFIX]));
    if block[MAGIC] == *b"ustar\0" && !prefix.is_empty() {
        return [prefix, name].join(&b'/');
    }
    name.to_vec()
}

fn until_zero(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or_default()
}

/// Parts of a path without empty ones and dots.
fn parts(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".")
}

/// The name without dots and doubled slashes; the root of the archive is empty.
fn plain(name: &[u8]) -> Result<Vec<u8>, String> {
    if name.starts_with(b"/") {
        return Err("its name is absolute".into());
    }
    // GNU tar would read it up to there.
    if name.contains(&0) {
        return Err("its name has a zero byte in it".into());
    }
    if parts(name).any(|p| p == b"..") {
        return Err("its name has '..' in it".into());
    }
    if parts(name).any(|p| p.len() > 255) {
        return Err("a part of its name has more than 255 bytes".into());
    }
    Ok(parts(name).collect::<Vec<_>>().join(&b'/'))
}

fn number(text: &[u8]) -> Option<u64> {
    // parse() would take a sign.
    if !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Records of a pax header: `<length> <key>=<value>\n`, the value being any bytes.
fn pax(mut data: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut records = Vec::new();
    while data.first().is_some_and(|b| *b != 0) {
        let blank = data.iter().take(20).position(|b| *b == b' ')?;
        let length = usize::try_from(number(&data[..blank])?).ok()?;
        let record = data.get(blank + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|b| *b == b'=')?;
        records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        data = &data[length..];
    }
    Some(records)
}

#[cfg(test)]
#[path = "tarscan_tests.rs"]
mod tests;
