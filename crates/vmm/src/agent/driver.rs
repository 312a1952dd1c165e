//! The driver: the one task that polls the yamux connection, opens streams and owns the tasks of commands.
//! It ends when the transport ends, when it is told to close, or when the client is dropped (which aborts it).

use std::task::{Context, Poll};

use hearth_core::agent::MAX_STREAMS;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::compat::{Compat, TokioAsyncReadCompatExt};
use yamux::{Config, Connection, Mode, Stream};

use super::exec::Pump;
use super::transport::{Blocked, CHUNK, Transport};

/// What a handle asks of the driver.
#[derive(Debug)]
pub(super) enum Command {
    /// A stream for a small request.
    Open(oneshot::Sender<Stream>),
    /// A stream for a command, and the task that serves it; answered when that task begins.
    Exec(Pump, oneshot::Sender<()>),
    /// Says goodbye and ends.
    Close,
}

impl Command {
    /// Whether nobody waits for the answer any more.
    fn is_given_up(&self) -> bool {
        match self {
            Self::Open(answer) => answer.is_closed(),
            Self::Exec(_, answer) => answer.is_closed(),
            Self::Close => false,
        }
    }
}

/// yamux keeps a stream that was dropped until its reset is written, and *ends the connection* when one more
/// is opened than allowed. The semaphores of the client hold to [`MAX_STREAMS`]; this leaves room for the
/// dropped ones. Each stream has the 256 KiB it starts with; all together may grow by [`GROWTH`].
fn config() -> Config {
    let streams = 4 * MAX_STREAMS;
    let mut config = Config::default();
    config.set_max_num_streams(streams);
    config.set_max_connection_receive_window(Some(streams * yamux::DEFAULT_CREDIT as usize));
    config.set_split_send_size(CHUNK - 12);
    config
}

/// Runs until the connection is over, then says why.
pub(super) async fn drive<S>(
    transport: Transport<S>,
    blocked: Blocked,
    inbox: mpsc::Receiver<Command>,
    closed: watch::Sender<Option<String>>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let connection = Connection::new(transport.compat(), config(), Mode::Client);
    let mut driver = Driver { connection, blocked, inbox, tasks: JoinSet::new(), closing: false };
    let reason = std::future::poll_fn(|cx| driver.poll(cx)).await;
    // Streams fail from here on; the tasks see it and end, so that their callers learn of it.
    drop(driver.connection);
    closed.send_replace(Some(reason));
    while driver.tasks.join_next().await.is_some() {}
}

struct Driver<S> {
    connection: Connection<Compat<Transport<S>>>,
    blocked: Blocked,
    inbox: mpsc::Receiver<Command>,
    tasks: JoinSet<()>,
    closing: bool,
}

impl<S> Driver<S>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        loop {
            if self.closing {
                return self.connection.poll_close(cx).map(|_| "closed by this side".to_owned());
            }
            match self.connection.poll_next_inbound(cx) {
                // Agents open no streams; dropping it resets it.
                Poll::Ready(Some(Ok(_))) => continue,
                Poll::Ready(Some(Err(e))) => return Poll::Ready(format!("the transport failed: {e}")),
                Poll::Ready(None) => {
                    return Poll::Ready("the guest's end of the transport closed".to_owned());
                }
                Poll::Pending => {}
            }
            while let Poll::Ready(Some(_)) = self.tasks.poll_join_next(cx) {}
            // A blocked transport also delays the removal of dropped streams, so none is opened then; the
            // connection has asked to be woken when it flows again.
            if self.blocked.get() {
                return Poll::Pending;
            }
            let Some(command) = std::task::ready!(self.inbox.poll_recv(cx)) else {
                // The last handle went; its drop aborts this task anyway.
                self.closing = true;
                continue;
            };
            // A caller that gave up while it waited opens nothing.
            if command.is_given_up() {
                continue;
            }
            if matches!(command, Command::Close) {
                self.closing = true;
                continue;
            }
            let stream = match self.connection.poll_new_outbound(cx) {
                Poll::Ready(Ok(stream)) => stream,
                Poll::Ready(Err(e)) => return Poll::Ready(format!("no stream could be opened: {e}")),
                // Only with 256 streams unacknowledged, which the semaphores rule out.
                Poll::Pending => return Poll::Ready("the agent acknowledges no streams".to_owned()),
            };
            match command {
                // Unsent because the caller gave up just now: the stream is dropped, which resets it.
                Command::Open(reply) => drop(reply.send(stream)),
                Command::Exec(pump, begun) => {
                    if begun.send(()).is_ok() {
                        self.tasks.spawn(pump.run(stream));
                    }
                }
                Command::Close => {}
            }
        }
    }
}
