//! One transport, session after session: wait for a hello, answer it, speak yamux until that ends.
//!
//! A host that restarts may go on using the same byte stream: what it sends then looks broken to the old
//! session, which ends, and the next hello is found by scanning. Hellos are repeated, so none is waited for.

use std::io;
use std::sync::Arc;

use hearth_core::agent::{HELLO, MAX_STREAMS, WELCOME};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio_util::compat::TokioAsyncReadCompatExt;
use yamux::{Config, Connection, Mode};

use crate::agent::Agent;

/// What the kernel's virtio-serial driver takes in one write; a yamux frame with its head is made to fit.
const CHUNK: usize = 32 * 1024;
/// A hello or welcome: magic and eight random bytes.
const GREETING: usize = 16;

type Transport<T> = BufReader<BufWriter<T>>;

/// Serves sessions until the transport ends or fails.
pub(crate) async fn serve<T>(io: T, agent: &Arc<Agent>)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut transport = BufReader::with_capacity(CHUNK, BufWriter::with_capacity(CHUNK, io));
    while shake(&mut transport).await.is_ok() {
        let mut connection = Connection::new((&mut transport).compat(), config(), Mode::Server);
        // Ends by the host's goodbye, by bytes that are not yamux, or with the transport; in the last case the
        // next handshake fails at once.
        while let Some(Ok(stream)) = std::future::poll_fn(|cx| connection.poll_next_inbound(cx)).await {
            agent.accept(stream);
            // A buffer may hold many streams that the host opened and dropped: their tasks must see that before
            // more of them are counted.
            tokio::task::yield_now().await;
        }
    }
}

/// The host opens at most [`MAX_STREAMS`]; yamux ends the connection at its own limit and counts streams that
/// the host dropped until it heard of it, hence the room. The total window is the guaranteed part, so that
/// none grows: in an emulated guest 4 MiB more brought no speed.
fn config() -> Config {
    let streams = 4 * MAX_STREAMS;
    let mut config = Config::default();
    config.set_max_num_streams(streams);
    config.set_max_connection_receive_window(Some(streams * yamux::DEFAULT_CREDIT as usize));
    config.set_split_send_size(CHUNK - 12);
    config
}

/// Answers hellos until the first byte of a session follows one. Repetitions of a hello that was answered are
/// skipped (a second welcome would look broken to the host); another hello is a newer host's and is answered.
async fn shake<T>(transport: &mut Transport<T>) -> io::Result<()>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut answered = None;
    'scan: loop {
        // What an earlier session left over, then the magic.
        let mut nonce = find_hello(transport).await?;
        loop {
            if answered != Some(nonce) {
                let welcome: Vec<u8> = WELCOME.iter().chain(&nonce).copied().collect();
                transport.write_all(&welcome).await?;
                transport.flush().await?;
                answered = Some(nonce);
            }
            // Every yamux frame begins with its version, 0.
            match peek(transport).await? {
                0 => return Ok(()),
                first if first == HELLO[0] => {
                    let mut block = [0; GREETING];
                    tokio::io::AsyncReadExt::read_exact(transport, &mut block).await?;
                    let (magic, rest) = block.split_at(HELLO.len());
                    if magic != HELLO {
                        continue 'scan;
                    }
                    nonce.copy_from_slice(rest);
                }
                _ => continue 'scan,
            }
        }
    }
}

async fn peek<T>(transport: &mut Transport<T>) -> io::Result<u8>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    transport.fill_buf().await?.first().copied().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Skips to a hello and returns its random bytes.
async fn find_hello<T>(transport: &mut Transport<T>) -> io::Result<[u8; 8]>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    // The last bytes read: magic and nonce once complete.
    let mut last = [0u8; GREETING];
    loop {
        let available = transport.fill_buf().await?;
        if available.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut used = 0;
        let mut found = false;
        for byte in available {
            used += 1;
            last.rotate_left(1);
            last[GREETING - 1] = *byte;
            if last.starts_with(HELLO) {
                found = true;
                break;
            }
        }
        transport.consume(used);
        if found {
            let mut nonce = [0; 8];
            nonce.copy_from_slice(&last[HELLO.len()..]);
            return Ok(nonce);
        }
    }
}
