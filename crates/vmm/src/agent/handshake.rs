//! Hello and welcome. The hello is repeated because a guest that boots may not have opened its port yet; the
//! agent skips the repetitions. Whatever else is in the pipe belongs to an earlier session and is skipped.

use std::task::Poll;
use std::time::Duration;

use hearth_core::agent::{HELLO, WELCOME};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep, sleep_until};

use super::AgentClientError;
use super::transport::Transport;

/// Pause between two hellos.
const REPEAT: Duration = Duration::from_millis(100);

/// Returns once the agent answered this very hello; the transport then stands at the first byte after it.
pub(super) async fn shake<S>(transport: &mut Transport<S>, deadline: Instant) -> Result<(), AgentClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let nonce = nonce();
    let hello = [HELLO.as_slice(), &nonce].concat();
    let welcome = [WELCOME.as_slice(), &nonce].concat();
    let mut seen = Vec::with_capacity(welcome.len());
    let mut skipped = 0u64;
    let pause = sleep(Duration::ZERO);
    tokio::pin!(pause);
    loop {
        tokio::select! {
            biased;
            () = sleep_until(deadline) => return Err(AgentClientError::HandshakeTimeout { skipped }),
            found = find(transport, &welcome, &mut seen, &mut skipped) => return found,
            () = &mut pause => {
                send(transport, &hello).await?;
                pause.as_mut().reset(Instant::now() + REPEAT);
            }
        }
    }
}

/// Lets a hello flow as far as it goes. It is written whole into the buffer, and none is added while one is
/// there: a hello cut short would cost the agent its place.
async fn send<S>(transport: &mut Transport<S>, hello: &[u8]) -> Result<(), AgentClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    if transport.get_ref().buffer().is_empty() {
        transport.write_all(hello).await.map_err(AgentClientError::Transport)?;
    }
    let mut flush = std::pin::pin!(transport.flush());
    // One poll: what does not flow now flows at the next repetition.
    match std::future::poll_fn(|cx| Poll::Ready(flush.as_mut().poll(cx))).await {
        Poll::Ready(result) => result.map_err(AgentClientError::Transport),
        Poll::Pending => Ok(()),
    }
}

/// Reads up to and including the welcome. Cancel-safe: what was read is in `seen`.
async fn find<S>(
    transport: &mut Transport<S>,
    welcome: &[u8],
    seen: &mut Vec<u8>,
    skipped: &mut u64,
) -> Result<(), AgentClientError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let available = transport.fill_buf().await.map_err(AgentClientError::Transport)?;
        if available.is_empty() {
            let ended = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
            return Err(AgentClientError::Transport(ended));
        }
        let mut used = 0;
        let mut found = false;
        for byte in available {
            used += 1;
            if seen.len() == welcome.len() {
                seen.remove(0);
                *skipped += 1;
            }
            seen.push(*byte);
            if seen == welcome {
                found = true;
                break;
            }
        }
        transport.consume(used);
        if found {
            return Ok(());
        }
    }
}

/// Eight bytes that no earlier session had. They need not be secret: the standard library's per-instance
/// random keys are enough.
fn nonce() -> [u8; 8] {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish().to_ne_bytes()
}
