//! The overlay file's form: header, map pages, where the data is. Pure: bytes in, values out. `docs/block.md` tells why
//! it survives a crash; all numbers are little-endian.

use bytes::{BufMut as _, Bytes, BytesMut};

/// Bytes of a block: what is copied, zeroed and discarded as one.
pub const BLOCK: u64 = 4096;
/// Bytes of the header and of a map page.
pub(super) const PAGE: usize = 4096;
/// The data begins at a multiple of this.
const ALIGN: u64 = 1 << 20;

const MAGIC: &[u8; 8] = b"HEARTHOV";
const VERSION: u32 = 1;
const PAGE_MAGIC: u32 = u32::from_le_bytes(*b"HMAP");
/// Magic, index, sequence, checksum, and room.
const PAGE_HEAD: usize = 32;
/// Blocks whose state is in one page, two bits each.
pub(super) const PER_PAGE: u64 = ((PAGE - PAGE_HEAD) * 4) as u64;
/// A disk beyond this has no use, and its map no room.
const LARGEST: u64 = 1 << 46;

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// In the base; zeroes past its end.
    Base = 0,
    /// In the overlay.
    Data = 1,
    /// Nowhere: zeroes.
    Zero = 2,
}

/// What the header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the disk.
    pub(super) size: u64,
    /// Bytes of the base.
    pub(super) base_size: u64,
    /// Checksum of the base's first and last bytes, so that another base is refused.
    pub(super) base_print: u32,
}

impl Header {
    pub(super) fn blocks(&self) -> u64 {
        self.size.div_ceil(BLOCK)
    }

    pub(super) fn pages(&self) -> usize {
        // LARGEST keeps it within any usize.
        usize::try_from(self.blocks().div_ceil(PER_PAGE)).unwrap_or(usize::MAX)
    }

    /// Where a copy of a map page is; each has two, written in turn.
    pub(super) fn page_at(page: usize, copy: u8) -> u64 {
        (PAGE * (1 + 2 * page + usize::from(copy))) as u64
    }

    /// Where block 0 is.
    pub(super) fn data_at(&self) -> u64 {
        Self::page_at(self.pages(), 0).next_multiple_of(ALIGN)
    }

    /// Bytes of the whole file, most of them a hole.
    pub(super) fn file_size(&self) -> u64 {
        self.data_at() + self.blocks() * BLOCK
    }

    pub(super) fn fits(size: u64) -> bool {
        size <= LARGEST
    }

    pub(super) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(PAGE);
        out.put_slice(MAGIC);
        out.put_u32_le(VERSION);
        out.put_u32_le(BLOCK as u32);
        out.put_u64_le(self.size);
        out.put_u64_le(self.base_size);
        out.put_u32_le(self.base_print);
        out.resize(PAGE - 4, 0);
        let sum = crc32fast::hash(&out);
        out.put_u32_le(sum);
        out.freeze()
    }

    /// What is wrong with it, if it cannot be used.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() != PAGE || &bytes[..8] != MAGIC {
            return Err("it is no overlay");
        }
        if u32_at(bytes, 8) != VERSION {
            return Err("its version is not known here: use the hearth that made it");
        }
        if crc32fast::hash(&bytes[..PAGE - 4]) != u32_at(bytes, PAGE - 4) {
            return Err("its header is damaged");
        }
        let header =
            Self { size: u64_at(bytes, 16), base_size: u64_at(bytes, 24), base_print: u32_at(bytes, 32) };
        if u64::from(u32_at(bytes, 12)) != BLOCK || !Self::fits(header.size) {
            return Err("its header makes no sense");
        }
        Ok(header)
    }
}

/// One copy of a map page, as found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Copy {
    /// Never written.
    Empty,
    /// Written in part, or damaged.
    Torn,
    /// Whole.
    Good {
        /// The higher of two is newer.
        sequence: u64,
        /// Two bits a block, the first in the lowest.
        states: Box<[u8]>,
    },
}

pub(super) fn encode_page(page: usize, sequence: u64, states: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(PAGE);
    out.put_u32_le(PAGE_MAGIC);
    out.put_u32_le(page as u32);
    out.put_u64_le(sequence);
    out.put_u32_le(0);
    out.resize(PAGE_HEAD, 0);
    out.put_slice(states);
    let sum = crc32fast::hash(&out);
    out[16..20].copy_from_slice(&sum.to_le_bytes());
    out.freeze()
}

pub(super) fn decode_page(page: usize, bytes: &[u8]) -> Copy {
    if bytes.iter().all(|b| *b == 0) {
        return Copy::Empty;
    }
    if bytes.len() != PAGE || u32_at(bytes, 0) != PAGE_MAGIC || u32_at(bytes, 4) as usize != page {
        return Copy::Torn;
    }
    let mut sum = crc32fast::Hasher::new();
    sum.update(&bytes[..16]);
    sum.update(&[0; 4]);
    sum.update(&bytes[20..]);
    // 3 is no state.
    let states = &bytes[PAGE_HEAD..];
    if sum.finalize() != u32_at(bytes, 16) || states.iter().any(|b| b & (b >> 1) & 0x55 != 0) {
        return Copy::Torn;
    }
    Copy::Good { sequence: u64_at(bytes, 8), states: states.into() }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(out)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_and_every_damage_is_seen() {
        let header = Header { size: 5_000_000, base_size: 4_000_000, base_print: 7 };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        for at in [0, 9, 17, 40, PAGE - 1] {
            let mut bad = bytes.to_vec();
            bad[at] ^= 1;
            assert!(Header::decode(&bad).is_err(), "byte {at}");
        }
        assert!(Header::decode(&bytes[1..]).is_err());
        let huge = Header { size: LARGEST + 1, ..header };
        assert!(Header::decode(&huge.encode()).is_err());
    }

    #[test]
    fn a_page_comes_back_and_every_torn_one_is_seen() {
        let states = vec![0b01_10_00_01; PAGE - PAGE_HEAD];
        let bytes = encode_page(3, 9, &states);
        assert_eq!(decode_page(3, &bytes), Copy::Good { sequence: 9, states: states.into() });
        assert_eq!(decode_page(4, &bytes), Copy::Torn);
        assert_eq!(decode_page(3, &[0; PAGE]), Copy::Empty);
        for at in (0..PAGE).step_by(512) {
            let mut torn = bytes.to_vec();
            torn[at..at + 512].fill(0);
            assert_eq!(decode_page(3, &torn), Copy::Torn, "sector at {at}");
        }
        let no_state = encode_page(3, 9, &[0b11; PAGE - PAGE_HEAD]);
        assert_eq!(decode_page(3, &no_state), Copy::Torn);
    }

    #[test]
    fn the_parts_do_not_overlap() {
        for size in [1, BLOCK, PER_PAGE * BLOCK, PER_PAGE * BLOCK + 1, 1 << 40] {
            let header = Header { size, base_size: 0, base_print: 0 };
            let last = Header::page_at(header.pages() - 1, 1) + PAGE as u64;
            assert!(last <= header.data_at() && header.data_at() + size <= header.file_size(), "{size}");
        }
    }
}
