//! Firecracker's vsock as the host sees it: a unix socket on which `CONNECT <port>\n` is answered by
//! `OK <number>\n` once the guest accepted. If the guest does not listen (yet), the connection is closed.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// Between attempts.
const RETRY: Duration = Duration::from_millis(50);
/// One attempt: a request that the guest's driver has not seen yet is held without an answer.
const ATTEMPT: Duration = Duration::from_secs(2);
/// `OK 4294967295\n` and some room.
const MAX_ANSWER: usize = 32;

/// Connects to a port of the guest, again and again until it listens. The caller bounds this and races it
/// with the VMM's end.
pub(super) async fn connect(socket: &Path, port: u32) -> UnixStream {
    loop {
        match timeout(ATTEMPT, attempt(socket, port)).await {
            Ok(Ok(stream)) => return stream,
            Ok(Err(e)) => tracing::trace!(error = %e, "the guest does not listen yet"),
            Err(_) => tracing::trace!("the guest does not answer yet"),
        }
        sleep(RETRY).await;
    }
}

async fn attempt(socket: &Path, port: u32) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).await?;
    // In one write: Firecracker reads the line from one read.
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    // Byte by byte: what follows the line belongs to the agent.
    let mut line = Vec::with_capacity(MAX_ANSWER);
    loop {
        match stream.read_u8().await? {
            b'\n' if line.starts_with(b"OK ") => return Ok(stream),
            byte if byte != b'\n' && line.len() < MAX_ANSWER => line.push(byte),
            _ => {
                let text = format!("answer {:?} to CONNECT", String::from_utf8_lossy(&line));
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    #[tokio::test]
    async fn it_tries_until_the_guest_listens_and_swallows_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = async {
            for answer in ["", "NO\n", "OK 1073741824\nhello"] {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut seen = [0; 13];
                stream.read_exact(&mut seen).await.unwrap();
                assert_eq!(&seen, b"CONNECT 1024\n");
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        };
        let ((), mut stream) = tokio::join!(server, connect(&path, 1024));
        let mut rest = String::new();
        stream.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "hello");
    }
}
