//! The protocol's numbers and frames, as in `doc/proto.md` of the NBD project. Pure: bytes in, values out; all numbers are
//! big-endian.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

pub(super) const MAGIC: u64 = 0x4e42_444d_4147_4943;
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags: fixed newstyle, no zeroes after the export.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 2;

pub(super) const OPT_EXPORT_NAME: u32 = 1;
pub(super) const OPT_ABORT: u32 = 2;
pub(super) const OPT_LIST: u32 = 3;
pub(super) const OPT_INFO: u32 = 6;
pub(super) const OPT_GO: u32 = 7;
pub(super) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(super) const OPT_LIST_META_CONTEXT: u32 = 9;
pub(super) const OPT_SET_META_CONTEXT: u32 = 10;

pub(super) const REP_ACK: u32 = 1;
pub(super) const REP_SERVER: u32 = 2;
pub(super) const REP_INFO: u32 = 3;
pub(super) const REP_META_CONTEXT: u32 = 4;
pub(super) const REP_ERR_UNSUP: u32 = 1 << 31 | 1;
pub(super) const REP_ERR_INVALID: u32 = 1 << 31 | 3;
pub(super) const REP_ERR_UNKNOWN: u32 = 1 << 31 | 6;
pub(super) const REP_ERR_TOO_BIG: u32 = 1 << 31 | 9;

pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_NAME: u16 = 1;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// What an export can do.
pub(super) const FLAG_HAS_FLAGS: u16 = 1;
pub(super) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(super) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(super) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(super) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(super) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(super) const FLAG_SEND_DF: u16 = 1 << 7;
pub(super) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;
pub(super) const FLAG_SEND_FAST_ZERO: u16 = 1 << 11;

pub(super) const CMD_READ: u16 = 0;
pub(super) const CMD_WRITE: u16 = 1;
pub(super) const CMD_DISC: u16 = 2;
pub(super) const CMD_FLUSH: u16 = 3;
pub(super) const CMD_TRIM: u16 = 4;
pub(super) const CMD_WRITE_ZEROES: u16 = 6;
pub(super) const CMD_BLOCK_STATUS: u16 = 7;

pub(super) const CMD_FLAG_FUA: u16 = 1;
pub(super) const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub(super) const CMD_FLAG_DF: u16 = 1 << 2;
pub(super) const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub(super) const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;

const REPLY_FLAG_DONE: u16 = 1;
const REPLY_NONE: u16 = 0;
const REPLY_OFFSET_DATA: u16 = 1;
const REPLY_BLOCK_STATUS: u16 = 5;
const REPLY_ERROR: u16 = 1 << 15 | 1;

/// Flags of `base:allocation`.
pub(super) const STATE_HOLE: u32 = 1;
pub(super) const STATE_ZERO: u32 = 2;

/// The one meta context there is, and its number.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// A name or a query is no longer than this.
pub(super) const LONGEST_STRING: usize = 4096;

/// Errors as the client knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Errno {
    Perm = 1,
    Io = 5,
    Inval = 22,
    NoSpace = 28,
    NotSup = 95,
    Shutdown = 108,
}

/// The head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) flags: u16,
    pub(super) kind: u16,
    pub(super) cookie: u64,
    pub(super) at: u64,
    pub(super) len: u32,
}

/// Bytes of a request before its payload.
pub(super) const REQUEST_LEN: usize = 28;

impl Head {
    /// `None`: that is no request, and where the next begins cannot be told.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        if bytes.len() < REQUEST_LEN || bytes.get_u32() != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: bytes.get_u16(),
            kind: bytes.get_u16(),
            cookie: bytes.get_u64(),
            at: bytes.get_u64(),
            len: bytes.get_u32(),
        })
    }
}

/// A reply on its way: a head, and bytes that follow it.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) head: Bytes,
    pub(super) body: BytesMut,
}

impl Frame {
    pub(super) fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }
}

/// The head of a structured reply's only chunk.
fn chunk(kind: u16, cookie: u64, len: usize, room: usize) -> BytesMut {
    let mut head = BytesMut::with_capacity(20 + room);
    head.put_u32(STRUCTURED_REPLY_MAGIC);
    head.put_u16(REPLY_FLAG_DONE);
    head.put_u16(kind);
    head.put_u64(cookie);
    // Replies are as long as requests, which are bounded far below this.
    head.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    head
}

/// Done, or not.
pub(super) fn simple(cookie: u64, error: Option<Errno>) -> Frame {
    let mut head = BytesMut::with_capacity(16);
    head.put_u32(SIMPLE_REPLY_MAGIC);
    head.put_u32(error.map_or(0, |e| e as u32));
    head.put_u64(cookie);
    Frame { head: head.freeze(), body: BytesMut::new() }
}

/// An error where the client expects chunks, with words for its log.
pub(super) fn error_chunk(cookie: u64, error: Errno, text: &str) -> Frame {
    let text = &text.as_bytes()[..text.len().min(LONGEST_STRING)];
    let mut head = chunk(REPLY_ERROR, cookie, 6 + text.len(), 6 + text.len());
    head.put_u32(error as u32);
    head.put_u16(text.len() as u16);
    head.put_slice(text);
    Frame { head: head.freeze(), body: BytesMut::new() }
}

/// What was read.
pub(super) fn data(cookie: u64, at: u64, body: BytesMut, structured: bool) -> Frame {
    if !structured {
        return Frame { body, ..simple(cookie, None) };
    }
    let mut head = match body.is_empty() {
        // A chunk of data is never empty.
        true => chunk(REPLY_NONE, cookie, 0, 0),
        false => chunk(REPLY_OFFSET_DATA, cookie, 8 + body.len(), 8),
    };
    if !body.is_empty() {
        head.put_u64(at);
    }
    Frame { head: head.freeze(), body }
}

/// Lengths and flags.
pub(super) fn block_status(cookie: u64, extents: impl ExactSizeIterator<Item = (u32, u32)>) -> Frame {
    let len = 4 + 8 * extents.len();
    let mut head = chunk(REPLY_BLOCK_STATUS, cookie, len, 4);
    head.put_u32(BASE_ALLOCATION_ID);
    let mut body = BytesMut::with_capacity(len - 4);
    for (len, flags) in extents {
        body.put_u32(len);
        body.put_u32(flags);
    }
    Frame { head: head.freeze(), body }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_and_anything_else_is_not() {
        let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6];
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(4096_u64.to_be_bytes());
        bytes.extend(512_u32.to_be_bytes());
        let head = Head::decode(&bytes).unwrap();
        assert_eq!(head, Head { flags: CMD_FLAG_FUA, kind: CMD_WRITE_ZEROES, cookie: 7, at: 4096, len: 512 });
        bytes[0] ^= 1;
        assert_eq!(Head::decode(&bytes), None);
        assert_eq!(Head::decode(&bytes[..27]), None);
    }

    #[test]
    fn replies_are_as_long_as_their_heads_say() {
        let long = "x".repeat(10_000);
        for frame in [
            error_chunk(1, Errno::Io, &long),
            data(1, 0, BytesMut::from(&b"abc"[..]), true),
            data(1, 0, BytesMut::new(), true),
            block_status(1, [(1, 2), (3, 4)].into_iter()),
        ] {
            let said = (&frame.head[16..20]).get_u32() as usize;
            assert_eq!(frame.head.len() + frame.body.len(), 20 + said);
        }
        assert_eq!(simple(1, Some(Errno::Inval)).head.len(), 16);
    }
}
