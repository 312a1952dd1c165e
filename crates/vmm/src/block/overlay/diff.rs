//! What differs from the base, as a stream: to keep a disk without its base, or to bring it elsewhere. The form is in
//! `docs/block.md`. A stream that was cut short or damaged is told; nothing of a damaged record is applied.

use std::io;

use bytes::{BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::format::{BLOCK, State};
use super::{Overlay, check_range};
use crate::block::backend::{Backend, BlockError, Limit, Zeroes};

const MAGIC: &[u8; 8] = b"HEARTHDF";
const VERSION: u32 = 1;
/// Bytes of a record before its data.
const HEAD: usize = 24;
/// Bytes of data in one record.
const MOST: u64 = 1 << 20;

const END: u32 = 0;
const DATA: u32 = 1;
const ZERO: u32 = 2;

/// Why a diff could not be written or applied.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The stream.
    #[error("the stream of the diff failed: {0}")]
    Stream(#[from] io::Error),
    /// The disk.
    #[error("{0}")]
    Block(#[from] BlockError),
    /// Not a diff, or damaged.
    #[error("the diff cannot be used: {0}")]
    Unusable(&'static str),
}

/// Writes what differs from the base; gives the bytes of data and of zeroes. It is of one moment only if nobody writes
/// meanwhile.
///
/// # Errors
/// From the disk, the stream, or `limit`.
pub async fn export(
    overlay: &Overlay,
    out: &mut (impl AsyncWrite + Unpin),
    limit: &Limit,
) -> Result<(u64, u64), DiffError> {
    let size = overlay.size();
    let mut head = BytesMut::new();
    head.put_slice(MAGIC);
    head.put_u32_le(VERSION);
    head.put_u32_le(BLOCK as u32);
    head.put_u64_le(size);
    limit.bound(out.write_all(&head)).await??;
    let (mut at, mut data, mut zero) = (0, 0, 0);
    while at < size {
        let Some((state, run)) = overlay.runs(at, size, 1).pop() else { break };
        let len = run.end - run.start;
        match state {
            State::Base => {}
            State::Zero => {
                write_record(out, ZERO, at, len, &[], limit).await?;
                zero += len;
            }
            State::Data => {
                let len = len.min(MOST);
                let bytes = overlay.read_at(at, len as usize, BytesMut::new(), limit).await?;
                write_record(out, DATA, at, len, &bytes, limit).await?;
                data += len;
                at += len;
                continue;
            }
        }
        at = run.end;
    }
    write_record(out, END, data, zero, &[], limit).await?;
    limit.bound(out.flush()).await??;
    Ok((data, zero))
}

async fn write_record(
    out: &mut (impl AsyncWrite + Unpin),
    kind: u32,
    at: u64,
    len: u64,
    bytes: &[u8],
    limit: &Limit,
) -> Result<(), DiffError> {
    let mut head = BytesMut::with_capacity(HEAD);
    head.put_u32_le(kind);
    head.put_u64_le(at);
    head.put_u64_le(len);
    let sum = sum(&head, bytes);
    head.put_u32_le(sum);
    limit.bound(out.write_all(&head)).await??;
    Ok(limit.bound(out.write_all(bytes)).await??)
}

fn sum(head: &[u8], bytes: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    sum.update(head);
    sum.update(bytes);
    sum.finalize()
}

/// Applies a diff to a disk that is as its base was, and flushes it.
///
/// # Errors
/// From the disk, the stream, or `limit`; if the diff is damaged, ends early, or is larger than the disk. What came before
/// has been applied then.
pub async fn apply(
    from: &mut (impl AsyncRead + Unpin),
    disk: &dyn Backend,
    limit: &Limit,
) -> Result<(u64, u64), DiffError> {
    let mut head = [0; 24];
    limit.bound(from.read_exact(&mut head)).await??;
    if &head[..8] != MAGIC || head[8..12] != VERSION.to_le_bytes() {
        return Err(DiffError::Unusable("it is no diff of a version known here"));
    }
    let (mut data, mut zero) = (0, 0);
    loop {
        let mut head = [0; HEAD];
        limit.bound(from.read_exact(&mut head)).await??;
        let mut fields = &head[..];
        let (kind, at, len) = {
            use bytes::Buf as _;
            (fields.get_u32_le(), fields.get_u64_le(), fields.get_u64_le())
        };
        if kind > ZERO || (kind == DATA && len > MOST) {
            return Err(DiffError::Unusable("a record makes no sense"));
        }
        // The length is bounded by now, whatever the checksum will say.
        let mut bytes = vec![0; if kind == DATA { len as usize } else { 0 }];
        limit.bound(from.read_exact(&mut bytes)).await??;
        if sum(&head[..HEAD - 4], &bytes).to_le_bytes() != head[HEAD - 4..] {
            return Err(DiffError::Unusable("a record is damaged"));
        }
        if kind == END {
            if (at, len) != (data, zero) {
                return Err(DiffError::Unusable("records are missing"));
            }
            disk.flush(limit).await?;
            return Ok((data, zero));
        }
        check_range(at, len, disk.size())?;
        if kind == DATA {
            disk.write_at(at, Bytes::from(bytes), limit).await?;
            data += len;
        } else {
            disk.write_zeroes(at, len, Zeroes::default(), limit).await?;
            zero += len;
        }
    }
}
