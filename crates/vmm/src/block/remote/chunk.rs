//! A chunk in a file: its bytes, then a checksum for each 4 KiB of them, then a foot. Each read checks what it read, and no
//! more than that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use hearth_host::positional;
use tokio::time::Instant;

/// Bytes under one checksum.
const PART: usize = 4096;
/// Bytes of the foot: kind, version, length, number, checksum of all after the chunk's bytes.
const FOOT: usize = 8 + 4 + 4 + 8 + 4;
const KIND: &[u8; 8] = b"HEARTHCK";
const VERSION: u32 = 1;

/// A chunk of the cache, opened. It stays readable when it was removed, until it is cut.
#[derive(Debug)]
pub(super) struct CachedChunk {
    file: File,
    len: usize,
    sums: Box<[u32]>,
    pub(super) opened: Instant,
}

/// What came of a read.
#[derive(Debug)]
pub(super) enum Found {
    Bytes(BytesMut),
    /// It was given up by whoever needed its room; the buffer is as it was.
    Gone(BytesMut),
    /// It is not what was written; the buffer is as it was.
    Damaged(BytesMut),
    /// Not in memory: it takes a call that may wait.
    Later(BytesMut),
}

/// Bytes of the file of a chunk of `len` bytes.
pub(super) fn file_size(len: u64) -> u64 {
    len + len.div_ceil(PART as u64) * 4 + FOOT as u64
}

fn sums(data: &[u8]) -> Box<[u32]> {
    data.chunks(PART).map(crc32fast::hash).collect()
}

impl CachedChunk {
    /// Writes a chunk into an empty file. Nothing is synced: what a crash of the host leaves is told by the checksums.
    pub(super) fn write(file: File, number: u64, data: &Bytes) -> io::Result<Self> {
        let sums = sums(data);
        let mut tail = Vec::with_capacity(sums.len() * 4 + FOOT);
        sums.iter().for_each(|sum| tail.put_u32_le(*sum));
        tail.put_slice(KIND);
        tail.put_u32_le(VERSION);
        tail.put_u32_le(u32::try_from(data.len()).map_err(io::Error::other)?);
        tail.put_u64_le(number);
        tail.put_u32_le(crc32fast::hash(&tail));
        file.write_all_at(data, 0)?;
        file.write_all_at(&tail, data.len() as u64)?;
        Ok(Self { file, len: data.len(), sums, opened: Instant::now() })
    }

    /// Takes a file as the chunk of that number and length. `None`: it is no such chunk.
    pub(super) fn open(file: File, number: u64, len: u64) -> io::Result<Option<Self>> {
        let size = file_size(len);
        if file.metadata()?.len() != size {
            return Ok(None);
        }
        let mut tail = BytesMut::new();
        let wanted = usize::try_from(size - len).map_err(io::Error::other)?;
        if positional::read(&file, &mut tail, wanted, len)? < wanted {
            return Ok(None);
        }
        let sum = (&tail[wanted - 4..]).get_u32_le();
        let mut foot = &tail[wanted - FOOT..wanted - 4];
        let mut kind = [0; 8];
        foot.copy_to_slice(&mut kind);
        let fits = foot.get_u32_le() == VERSION
            && u64::from(foot.get_u32_le()) == len
            && foot.get_u64_le() == number
            && kind == *KIND
            && crc32fast::hash(&tail[..wanted - 4]) == sum;
        let sums = tail[..wanted - FOOT].chunks_exact(4).map(|mut sum| sum.get_u32_le()).collect();
        let len = usize::try_from(len).map_err(io::Error::other)?;
        Ok(fits.then(|| Self { file, len, sums, opened: Instant::now() }))
    }

    /// Appends `len` bytes from `at` to `buf`; without `wait` only if they are in memory.
    pub(super) fn read(&self, at: usize, len: usize, mut buf: BytesMut, wait: bool) -> io::Result<Found> {
        let (first, last) = (at / PART, (at + len).div_ceil(PART));
        let (from, to) = (first * PART, (last * PART).min(self.len));
        let begin = buf.len();
        let whole = from == at && to == at + len;
        let mut parts = if whole { std::mem::take(&mut buf) } else { BytesMut::new() };
        let start = parts.len();
        let read = if wait { positional::read } else { positional::read_cached };
        let got = read(&self.file, &mut parts, to - from, from as u64)?;
        let seen = &parts[start..];
        let good = got == to - from && sums_match(seen, &self.sums[first..last]);
        if good && !whole {
            buf.extend_from_slice(&seen[at - from..at - from + len]);
        } else if whole {
            buf = parts;
        }
        if good {
            return Ok(Found::Bytes(buf));
        }
        buf.truncate(begin);
        if got < to - from && !wait {
            return Ok(Found::Later(buf));
        }
        // Whoever removes a chunk cuts it first; a read that was under way may see zeroes where it was cut.
        let gone = self.file.metadata()?.len() < file_size(self.len as u64);
        Ok(if gone { Found::Gone(buf) } else { Found::Damaged(buf) })
    }
}

fn sums_match(data: &[u8], sums: &[u32]) -> bool {
    data.chunks(PART).zip(sums).all(|(part, sum)| crc32fast::hash(part) == *sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(len: usize) -> (CachedChunk, Vec<u8>) {
        let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        let written = CachedChunk::write(tempfile::tempfile().unwrap(), 7, &data.clone().into()).unwrap();
        (written, data)
    }

    fn bytes(found: Found) -> Vec<u8> {
        match found {
            Found::Bytes(buf) => buf.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn any_part_of_a_chunk_is_read_back_and_another_chunk_is_refused() {
        let (written, data) = chunk(10_000);
        for (at, len) in [(0, 10_000), (0, 4096), (4096, 4096), (1, 1), (4095, 2), (8192, 1808), (9999, 1)] {
            let before = BytesMut::from(&b"x"[..]);
            let seen = bytes(written.read(at, len, before, true).unwrap());
            assert_eq!(seen[0], b'x');
            assert_eq!(seen[1..], data[at..at + len], "{at} {len}");
        }
        let again = |number, len| CachedChunk::open(written.file.try_clone().unwrap(), number, len).unwrap();
        let opened = again(7, 10_000).unwrap();
        assert_eq!(bytes(opened.read(5, 9000, BytesMut::new(), true).unwrap()), data[5..9005]);
        assert!(again(8, 10_000).is_none() && again(7, 9_999).is_none());
    }

    #[test]
    fn what_is_damaged_or_cut_is_not_read_and_what_lies_beside_it_is() {
        let (written, data) = chunk(10_000);
        written.file.write_all_at(b"!", 5000).unwrap();
        let read = |at, len| written.read(at, len, BytesMut::from(&b"abc"[..]), true).unwrap();
        assert!(matches!(read(4096, 10), Found::Damaged(buf) if &buf[..] == b"abc"));
        assert!(matches!(read(0, 10_000), Found::Damaged(_)));
        assert_eq!(bytes(read(0, 4096))[3..], data[..4096]);
        written.file.write_all_at(b"!", 10_001).unwrap();
        assert!(CachedChunk::open(written.file.try_clone().unwrap(), 7, 10_000).unwrap().is_none());
        written.file.set_len(0).unwrap();
        assert!(matches!(read(0, 100), Found::Gone(buf) if &buf[..] == b"abc"));
    }
}
