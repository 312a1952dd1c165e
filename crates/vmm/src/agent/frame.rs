//! Frames on one yamux stream. Lengths are checked before memory is taken.

use bytes::Bytes;
use hearth_core::agent::{FRAME_HEAD, FrameKind, MAX_FRAME};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::AgentClientError;

/// Why no frame could be read.
#[derive(Debug)]
pub(super) enum FrameError {
    /// The stream ended inside a frame.
    Io,
    /// The bytes are not a frame.
    Broken(String),
}

/// One frame ready to be written.
pub(super) fn encode(kind: FrameKind, payload: &[u8]) -> Result<Vec<u8>, AgentClientError> {
    let too_large = AgentClientError::TooLarge { bytes: payload.len() };
    if payload.len() > MAX_FRAME {
        return Err(too_large);
    }
    let len = u32::try_from(payload.len()).map_err(|_| too_large)?;
    let mut frame = Vec::with_capacity(FRAME_HEAD + payload.len());
    frame.push(kind as u8);
    frame.extend_from_slice(&len.to_le_bytes());
    frame.extend_from_slice(payload);
    Ok(frame)
}

/// One JSON frame ready to be written.
pub(super) fn encode_json(kind: FrameKind, value: &impl Serialize) -> Result<Vec<u8>, AgentClientError> {
    let payload =
        serde_json::to_vec(value).map_err(|e| AgentClientError::Protocol { what: e.to_string() })?;
    encode(kind, &payload)
}

/// The message of a JSON frame.
pub(super) fn decode_json<T: DeserializeOwned>(payload: &[u8]) -> Result<T, AgentClientError> {
    serde_json::from_slice(payload)
        .map_err(|e| AgentClientError::Protocol { what: format!("a message does not parse: {e}") })
}

/// The next frame; `None` if the stream ended before one began. Not cancel-safe.
pub(super) async fn read<R>(from: &mut R) -> Result<Option<(FrameKind, Bytes)>, FrameError>
where
    R: AsyncRead + Unpin,
{
    let mut head = [0u8; FRAME_HEAD];
    if from.read(&mut head[..1]).await.map_err(|_| FrameError::Io)? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut head[1..]).await.map_err(|_| FrameError::Io)?;
    let [kind, len @ ..] = head;
    let kind =
        FrameKind::from_byte(kind).ok_or_else(|| FrameError::Broken(format!("frame of kind {kind}")))?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(FrameError::Broken(format!("frame of {len} bytes")));
    }
    let mut payload = vec![0u8; len];
    from.read_exact(&mut payload).await.map_err(|_| FrameError::Io)?;
    Ok(Some((kind, Bytes::from(payload))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_round_trip_and_bad_ones_are_named() {
        let bytes = encode(FrameKind::Stdout, b"\xff\0x").unwrap();
        let (kind, payload) = read(&mut &bytes[..]).await.unwrap().unwrap();
        assert_eq!((kind, &payload[..]), (FrameKind::Stdout, &b"\xff\0x"[..]));

        assert!(read(&mut &b""[..]).await.unwrap().is_none());
        assert!(matches!(read(&mut &bytes[..6]).await, Err(FrameError::Io)));
        assert!(matches!(read(&mut &b"\x63\0\0\0\0"[..]).await, Err(FrameError::Broken(_))));
        assert!(matches!(read(&mut &b"\x05\xff\xff\xff\xff"[..]).await, Err(FrameError::Broken(_))));
        let large = vec![0; MAX_FRAME + 1];
        assert!(matches!(encode(FrameKind::Stdin, &large), Err(AgentClientError::TooLarge { .. })));
    }
}
