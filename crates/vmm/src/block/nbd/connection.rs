//! One connection: bytes in, requests to the backend, replies out in the order in which they get done. One future does all
//! of it; a slow reader, a slow writer and a slow disk hold up nothing but themselves, and what is in flight is bounded.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use super::handshake::{Chosen, Handshake, Progress};
use super::intake::{Ask, Intake, Taken};
use super::proto::{self, Errno, Frame, STATE_HOLE, STATE_ZERO};
use super::{Export, Limits, MOST_EXTENTS};
use crate::block::meter::Operation;
use crate::block::{BlockError, ExtentKind, Limit};

/// Bytes read at once where no payload waits for more.
const INBOX: usize = 32 * 1024;
/// Parts given to one write.
const MOST_PARTS: usize = 64;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    /// The client has gone, or said that it goes; all that was in flight was answered.
    #[error("the client is done")]
    Done,
    /// No export was chosen in time, or the client gave up.
    #[error("the handshake came to nothing")]
    NoHandshake,
    /// The server stops.
    #[error("the server stops")]
    Stopped,
    /// The client does not keep to the protocol.
    #[error("the client sent what is no request")]
    Garbage,
    /// The socket.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// A reply, and what it takes of the room until it is sent.
struct Reply {
    frame: Frame,
    cost: usize,
}

/// Serves one client until it goes, or until `stop`; then all that is in flight is answered with an error.
///
/// # Errors
/// None: how it ended is the value.
pub async fn serve<R, W>(
    mut read: R,
    mut write: W,
    exports: Arc<[Arc<Export>]>,
    limits: Limits,
    stop: CancellationToken,
) -> Ended
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut inbox = BytesMut::new();
    let shake = shake_hands(&mut read, &mut write, exports, &mut inbox);
    let chosen = tokio::select! {
        () = stop.cancelled() => return Ended::Stopped,
        done = timeout(limits.handshake, shake) => match done {
            Ok(Ok(Some(chosen))) => chosen,
            Ok(Ok(None)) | Err(_) => return Ended::NoHandshake,
            Ok(Err(e)) => return Ended::Io(e),
        },
    };
    Connection::new(chosen, inbox, limits, stop).transmit(read, write).await
}

/// As [`serve`], without a handshake: for the kernel's client, which is told of the disk and its
/// [`flags`](Export::flags) another way and takes plain replies only.
///
/// # Errors
/// None: how it ended is the value.
pub async fn serve_attached<R, W>(
    read: R,
    write: W,
    export: Arc<Export>,
    limits: Limits,
    stop: CancellationToken,
) -> Ended
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let chosen = Chosen { export, structured: false, allocation: false };
    Connection::new(chosen, BytesMut::new(), limits, stop).transmit(read, write).await
}

async fn shake_hands(
    read: &mut (impl AsyncRead + Unpin),
    write: &mut (impl AsyncWrite + Unpin),
    exports: Arc<[Arc<Export>]>,
    inbox: &mut BytesMut,
) -> io::Result<Option<Chosen>> {
    let mut out = BytesMut::new();
    let mut handshake = Handshake::new(exports, &mut out);
    loop {
        write.write_all_buf(&mut out).await?;
        // Bounded by the longest option: more is taken or thrown away before the next read.
        inbox.reserve(4096);
        if read.read_buf(inbox).await? == 0 {
            return Ok(None);
        }
        let progress = handshake.feed(inbox, &mut out);
        write.write_all_buf(&mut out).await?;
        match progress {
            Progress::More => {}
            Progress::Chosen(chosen) => return Ok(Some(chosen)),
            Progress::Over => return Ok(None),
        }
    }
}

/// A request at work.
type Running = FuturesUnordered<BoxFuture<'static, Reply>>;

struct Connection {
    chosen: Chosen,
    intake: Intake,
    /// Read and not yet taken.
    inbox: BytesMut,
    outbox: VecDeque<Reply>,
    /// Bytes of the first reply that were sent.
    sent: usize,
    /// Bytes that further requests may cost.
    room: usize,
    limits: Limits,
    stop: CancellationToken,
}

/// Whether more is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Yes,
    /// The next request waits until another is answered.
    NoRoom,
    /// Nothing more is to come; what is in flight is answered.
    Over,
}

impl Connection {
    fn new(chosen: Chosen, inbox: BytesMut, limits: Limits, stop: CancellationToken) -> Self {
        Self {
            intake: Intake::new(chosen.clone()),
            chosen,
            inbox,
            outbox: VecDeque::new(),
            sent: 0,
            room: limits.in_flight_bytes,
            limits,
            stop,
        }
    }

    async fn transmit(
        &mut self,
        mut read: impl AsyncRead + Unpin,
        mut write: impl AsyncWrite + Unpin,
    ) -> Ended {
        let stop = self.stop.clone();
        let mut running = Running::new();
        let mut garbage = false;
        let mut reading = self.take_all(&mut running, &mut garbage);
        while reading != Reading::Over || !running.is_empty() || !self.outbox.is_empty() {
            tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.answer_all(running, write).await;
                    return Ended::Stopped;
                }
                Some(reply) = running.next(), if !running.is_empty() => {
                    self.outbox.push_back(reply);
                    // Whatever else is done by now goes out in the same write.
                    while let Some(Some(reply)) = running.next().now_or_never() {
                        self.outbox.push_back(reply);
                    }
                }
                sent = send(&mut write, &self.outbox, self.sent), if !self.outbox.is_empty() => match sent {
                    Ok(bytes) => {
                        self.was_sent(bytes);
                        if reading == Reading::NoRoom {
                            reading = self.take_all(&mut running, &mut garbage);
                        }
                    }
                    // Nobody will hear the answers: what is in flight is given up.
                    Err(e) => return Ended::Io(e),
                },
                got = fill(&mut read, &mut self.intake, &mut self.inbox), if reading == Reading::Yes => match got {
                    Ok(0) => reading = Reading::Over,
                    Ok(_) => reading = self.take_all(&mut running, &mut garbage),
                    Err(e) => return Ended::Io(e),
                },
            }
        }
        if garbage { Ended::Garbage } else { Ended::Done }
    }

    /// Takes requests as long as there are whole ones and there is room, and starts them.
    fn take_all(&mut self, running: &mut Running, garbage: &mut bool) -> Reading {
        // Refusals count too: a client that sends them and reads no answers must not make the outbox grow.
        while running.len() + self.outbox.len() < self.limits.in_flight {
            match self.intake.take(&mut self.inbox, self.room) {
                Taken::More => return Reading::Yes,
                Taken::NoRoom(_) => return Reading::NoRoom,
                Taken::Disconnect => return Reading::Over,
                Taken::Garbage => {
                    *garbage = true;
                    return Reading::Over;
                }
                Taken::Refused { cookie, read, why } => {
                    let frame = self.chosen.failure(cookie, read, why.errno(), &why.to_string());
                    self.outbox.push_back(Reply { frame, cost: 0 });
                }
                Taken::Request { cookie, ask, cost } => {
                    self.room -= cost;
                    let (chosen, stop, within) =
                        (self.chosen.clone(), self.stop.clone(), self.limits.request);
                    running.push(Box::pin(async move {
                        Reply { frame: answer(&chosen, cookie, ask, within, stop).await, cost }
                    }));
                }
            }
        }
        Reading::NoRoom
    }

    fn was_sent(&mut self, bytes: usize) {
        self.sent += bytes;
        while let Some(first) = self.outbox.front()
            && self.sent >= first.frame.len()
        {
            self.sent -= first.frame.len();
            self.room += first.cost;
            self.outbox.pop_front();
        }
    }

    /// The server stops: every request ends at once, by its limit, and the client is told if it listens.
    async fn answer_all(&mut self, mut running: Running, mut write: impl AsyncWrite + Unpin) {
        let answered = timeout(self.limits.farewell, async {
            while let Some(reply) = running.next().await {
                self.outbox.push_back(reply);
            }
            while !self.outbox.is_empty() {
                match send(&mut write, &self.outbox, self.sent).await {
                    Ok(bytes) => self.was_sent(bytes),
                    Err(_) => return,
                }
            }
        });
        if answered.await.is_err() {
            tracing::info!(export = %self.chosen.export.name(), "a client did not fetch its last answers");
        }
    }
}

/// Reads what there is: into the payload that waits for it, if that is large, else into the inbox.
async fn fill(
    read: &mut (impl AsyncRead + Unpin),
    intake: &mut Intake,
    inbox: &mut BytesMut,
) -> io::Result<usize> {
    if let Some((body, missing)) = intake.payload()
        && missing > INBOX
    {
        return read.take(missing as u64).read_buf(body).await;
    }
    if inbox.capacity() - inbox.len() < INBOX / 4 {
        inbox.reserve(INBOX.saturating_sub(inbox.len()).max(INBOX / 4));
    }
    read.read_buf(inbox).await
}

/// Sends as much as the socket takes at once; `sent` bytes of the first reply are out already.
async fn send(
    write: &mut (impl AsyncWrite + Unpin),
    outbox: &VecDeque<Reply>,
    mut sent: usize,
) -> io::Result<usize> {
    let mut parts = [IoSlice::new(&[]); MOST_PARTS];
    let mut count = 0;
    for part in outbox.iter().flat_map(|reply| [&reply.frame.head[..], &reply.frame.body[..]]) {
        let skip = sent.min(part.len());
        sent -= skip;
        if skip < part.len() {
            parts[count] = IoSlice::new(&part[skip..]);
            count += 1;
        }
        if count == MOST_PARTS {
            break;
        }
    }
    match write.write_vectored(&parts[..count]).await? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        bytes => Ok(bytes),
    }
}

/// Does what was asked, once the rate limit lets it, and makes the reply. Its time begins then: a guest that is made to wait
/// must not be told that its disk is broken.
async fn answer(chosen: &Chosen, cookie: u64, ask: Ask, within: Duration, stop: CancellationToken) -> Frame {
    let reads = matches!(ask, Ask::Read { .. } | Ask::Status { .. });
    let (operation, bytes) = weight(&ask);
    let export = &chosen.export;
    let mut request = operation.map(|operation| export.meter.begin(operation));
    let mut limit = Limit::new(stop, Instant::now() + within);
    let outcome = match wait_for_rate(export, bytes, &limit.stop).await {
        Ok(waited) => {
            limit.deadline += waited;
            if let Some(request) = &mut request {
                request.waited(waited);
            }
            limit.run(perform(chosen, cookie, ask, &limit)).await
        }
        Err(stopped) => Err(stopped),
    };
    if let Some(request) = request {
        request.end(bytes, &outcome);
    }
    outcome.unwrap_or_else(|error| {
        export.note(&error);
        chosen.failure(cookie, reads, errno(&error), &error.to_string())
    })
}

async fn wait_for_rate(
    export: &Export,
    bytes: u64,
    stop: &CancellationToken,
) -> Result<Duration, BlockError> {
    let Some(rate) = &export.rate else { return Ok(Duration::ZERO) };
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(BlockError::Stopped),
        waited = rate.wait(bytes) => Ok(waited),
    }
}

/// What a request counts as, and the bytes it moves.
fn weight(ask: &Ask) -> (Option<Operation>, u64) {
    match ask {
        Ask::Read { len, .. } => (Some(Operation::Read), *len as u64),
        Ask::Write { data, .. } => (Some(Operation::Write), data.len() as u64),
        Ask::Flush => (Some(Operation::Flush), 0),
        Ask::Trim { .. } => (Some(Operation::Discard), 0),
        // Written out only where they must take room.
        Ask::Zero { len, how, .. } => (Some(Operation::Zeroes), if how.keep_allocated { *len } else { 0 }),
        Ask::Status { .. } => (None, 0),
    }
}

async fn perform(chosen: &Chosen, cookie: u64, ask: Ask, limit: &Limit) -> Result<Frame, BlockError> {
    let disk = chosen.export.backend();
    let durable = match ask {
        Ask::Read { at, len } => {
            let body = disk.read_at(at, len, BytesMut::with_capacity(len), limit).await?;
            return Ok(proto::data(cookie, at, body, chosen.structured));
        }
        Ask::Status { at, len, one } => {
            let most = if one { 1 } else { MOST_EXTENTS };
            let extents = disk.extents(at, len, most, limit).await?;
            let flags = |kind| if kind == ExtentKind::Hole { STATE_HOLE | STATE_ZERO } else { 0 };
            // A request has 32 bits of length, so its parts have.
            let extents = extents.iter().map(|e| (u32::try_from(e.len).unwrap_or(u32::MAX), flags(e.kind)));
            return Ok(proto::block_status(cookie, extents));
        }
        Ask::Flush => true,
        Ask::Write { at, data, fua } => {
            disk.write_at(at, data, limit).await?;
            fua
        }
        Ask::Trim { at, len, fua } => {
            disk.discard(at, len, limit).await?;
            fua
        }
        Ask::Zero { at, len, how, fua } => {
            disk.write_zeroes(at, len, how, limit).await?;
            fua
        }
    };
    if durable && !disk.read_only() {
        disk.flush(limit).await?;
    }
    Ok(proto::simple(cookie, None))
}

fn errno(error: &BlockError) -> Errno {
    match error {
        BlockError::Stopped => Errno::Shutdown,
        BlockError::Range { .. } => Errno::Inval,
        BlockError::ReadOnly => Errno::Perm,
        BlockError::NotFast => Errno::NotSup,
        BlockError::Io { source, .. } => match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Errno::NoSpace,
            _ => Errno::Io,
        },
        BlockError::Deadline | BlockError::Lost { .. } => Errno::Io,
    }
}

impl Chosen {
    fn failure(&self, cookie: u64, reads: bool, errno: Errno, text: &str) -> Frame {
        match self.structured && reads {
            true => proto::error_chunk(cookie, errno, text),
            false => proto::simple(cookie, Some(errno)),
        }
    }
}
