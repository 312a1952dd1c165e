//! Frames of the protocol on one stream. Lengths are checked before memory is taken.

use std::io;

use hearth_core::agent::{FRAME_HEAD, FrameKind, MAX_FRAME};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of output in one frame. With this frame's head and yamux's it is 32 KiB: what the kernel's
/// virtio-serial driver takes in one write.
pub(crate) const OUTPUT_CHUNK: usize = 32 * 1024 - FRAME_HEAD - 12;

/// Reads the next frame into `payload`; `None` if the stream ended before one began. Not cancel-safe.
pub(crate) async fn read<R>(from: &mut R, payload: &mut Vec<u8>) -> io::Result<Option<FrameKind>>
where
    R: AsyncRead + Unpin,
{
    let mut head = [0u8; FRAME_HEAD];
    if from.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..]).await?;
    let [kind, len @ ..] = head;
    let kind = FrameKind::from_byte(kind).ok_or_else(|| broken(format!("frame of kind {kind}")))?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(broken(format!("frame of {len} bytes, the most is {MAX_FRAME}")));
    }
    payload.clear();
    payload.resize(len, 0);
    from.read_exact(payload).await?;
    Ok(Some(kind))
}

fn broken(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Writes a frame whose payload lies in `buffer` after room for the head.
pub(crate) async fn write_in_place<W>(to: &mut W, kind: FrameKind, buffer: &mut [u8]) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let len = u32::try_from(buffer.len() - FRAME_HEAD).map_err(io::Error::other)?;
    buffer[0] = kind as u8;
    buffer[1..FRAME_HEAD].copy_from_slice(&len.to_le_bytes());
    to.write_all(buffer).await
}

/// Writes a JSON frame.
pub(crate) async fn write_json<W>(to: &mut W, kind: FrameKind, value: &impl Serialize) -> io::Result<()>
where
    W: AsyncWrite + Unpin,
{
    let mut buffer = vec![0; FRAME_HEAD];
    serde_json::to_writer(&mut buffer, value)?;
    write_in_place(to, kind, &mut buffer).await
}
