//! An object of a store as a disk that is only read: in chunks, each fetched once and kept on this node for all who read it.
//!
//! A read looks at the chunks at hand, then joins the one fetch of the chunk ([`flight`]). That fetch is a task of the disk's
//! own: it takes the chunk from the cache, or claims it there against the other processes ([`cache`]), gets it with as many
//! tries as it takes ([`object`]), gives it to all who wait, and only then puts it into the cache. A small read has its bytes
//! as soon as they have come ([`arrival`]). The fetch has no deadline; those who wait have theirs, and without them it ends.

mod arrival;
mod cache;
mod chunk;
mod client;
mod counters;
mod flight;
mod object;
mod source;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, try_join_all};
use hearth_core::block::RemoteStats;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use cache::{ChunkCache, LEAST_CACHE};
pub use object::{RemoteError, Tries, Version};

use self::arrival::Arrival;
use self::cache::{Claim, Part};
use self::chunk::Found;
use self::counters::Counters;
use self::flight::{Flight, Flights, Got, Pilot};
use self::object::Object;
use self::source::{AtHand, Source};
use super::backend::{
    Answer, Backend, BlockError, Extent, ExtentKind, Limit, Zeroes, check_range, push_extent,
};
use super::pool::Pool;

/// Chunks fetched at once for one disk: what bounds its memory.
const AT_ONCE: usize = 8;
/// A cache that does not answer by then is not waited for.
const CACHE_PATIENCE: Duration = Duration::from_secs(5);
/// How often one looks whether another process is done: at first, and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));
/// Larger reads are never done on the polling thread, and wait for the whole chunk.
const INLINE: usize = 64 * 1024;
/// Times a chunk may be gone or damaged under one read.
const ROUNDS: usize = 4;
/// Fetches that a reader joins one after the other: one may end just as it comes, if all others have left.
const FLIGHTS: usize = 16;

/// How a remote disk is read.
#[derive(Debug, Clone, Copy)]
pub struct RemoteOptions {
    /// Bytes of a chunk: a power of two, 64 KiB to 64 MiB.
    pub chunk: u64,
    /// How long tries may take.
    pub tries: Tries,
}

impl RemoteOptions {
    /// Bytes of a chunk if nothing is said. A store takes tens of milliseconds to begin and then gives tens of MiB a second, so
    /// that a chunk of 1 MiB costs little more than one of 4 KiB, and a guest that boots reads most of what is around.
    pub const CHUNK: u64 = 1 << 20;
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { chunk: Self::CHUNK, tries: Tries::default() }
    }
}

/// The disk.
pub struct RemoteBackend {
    shared: Arc<Shared>,
    tasks: TaskTracker,
}

struct Shared {
    object: Object,
    /// Of the object in the cache.
    key: String,
    chunk: u64,
    tries: Tries,
    cache: Option<Arc<ChunkCache>>,
    pool: Pool,
    at_hand: AtHand,
    flights: Flights,
    permits: Semaphore,
    counters: Counters,
    closing: CancellationToken,
}

/// A part of a read within one chunk.
#[derive(Debug, Clone, Copy)]
struct Piece {
    number: u64,
    at: usize,
    len: usize,
}

impl RemoteBackend {
    /// Finds the object and pins its version: size and etag, or time of change. Credentials are those that `object_store` reads from
    /// the environment. Without a cache a few chunks are kept in memory.
    ///
    /// # Errors
    /// Those of the object, which name it; [`BlockError::Deadline`] comes with the last try's.
    pub async fn open(
        url: &str,
        options: RemoteOptions,
        cache: Option<Arc<ChunkCache>>,
        pool: Pool,
        limit: &Limit,
    ) -> Result<Self, BlockError> {
        let (counters, last) = (Counters::default(), Mutex::new(None));
        let name = object::shown(url);
        let note = |why| *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        let opened = limit.bound(Object::open(url, options.tries, &counters, &note)).await;
        let why = last.lock().unwrap_or_else(PoisonError::into_inner).take();
        let object = match opened {
            Ok(object) => object.map_err(|e| refused("open", &name, &e))?,
            Err(BlockError::Deadline) => return Err(late(&name, why)),
            Err(e) => return Err(e),
        };
        let range = 64 << 10..=64 << 20;
        if !options.chunk.is_power_of_two() || !range.contains(&options.chunk) {
            let why = format!("chunks of {} bytes: take a power of two from 64 KiB to 64 MiB", options.chunk);
            let source = io::Error::new(io::ErrorKind::InvalidInput, why);
            return Err(BlockError::Io { doing: "open", file: name, source });
        }
        let shared = Arc::new(Shared {
            key: object.key(options.chunk),
            object,
            chunk: options.chunk,
            tries: options.tries,
            cache,
            pool,
            at_hand: AtHand::default(),
            flights: Flights::default(),
            permits: Semaphore::new(AT_ONCE),
            counters,
            closing: CancellationToken::new(),
        });
        Ok(Self { shared, tasks: TaskTracker::new() })
    }

    /// Which version of the object it is.
    #[must_use]
    pub fn version(&self) -> Version {
        self.shared.object.version()
    }

    async fn read(
        &self,
        at: u64,
        len: usize,
        mut buf: BytesMut,
        limit: &Limit,
    ) -> Result<BytesMut, BlockError> {
        buf.reserve(len);
        let mut pieces = self.shared.pieces(at, len);
        if let [piece] = pieces[..] {
            return self.piece(piece, None, buf, limit).await;
        }
        // All are on their way before the first is read.
        let chunks = try_join_all(pieces.iter().map(|piece| self.get(piece.number, None, limit))).await?;
        for (piece, chunk) in pieces.drain(..).zip(chunks) {
            buf = self.piece(piece, Some(chunk), buf, limit).await?;
        }
        Ok(buf)
    }

    /// Reads what is within a chunk, from what was got of it if anything was.
    async fn piece(
        &self,
        piece: Piece,
        mut got: Option<Got>,
        mut buf: BytesMut,
        limit: &Limit,
    ) -> Result<BytesMut, BlockError> {
        let shared = &self.shared;
        for _ in 0..ROUNDS {
            let chunk = match got.take() {
                Some(got) => got,
                None => {
                    let part = (piece.len <= INLINE).then_some((piece.at, piece.len));
                    self.get(piece.number, part, limit).await?
                }
            };
            let chunk = match chunk {
                Got::Part(data) => {
                    buf.extend_from_slice(&data);
                    return Ok(buf);
                }
                Got::Chunk(Source::Memory(data)) => {
                    buf.extend_from_slice(&data[piece.at..piece.at + piece.len]);
                    return Ok(buf);
                }
                Got::Chunk(Source::File(chunk)) => chunk,
            };
            // What fails takes no more with it than the room behind what was read before.
            let room = buf.split_off(buf.len());
            let mut found = match piece.len <= INLINE {
                true => chunk.read(piece.at, piece.len, room, false),
                false => Ok(Found::Later(room)),
            };
            if let Ok(Found::Later(later)) = found {
                let read = move |_: &_| chunk.read(piece.at, piece.len, later, true);
                let terms = limit.no_later_than(Instant::now() + CACHE_PATIENCE);
                found = match shared.pool.run(&terms, read).await {
                    Err(BlockError::Deadline) if Instant::now() < limit.deadline => {
                        Err(io::Error::new(io::ErrorKind::TimedOut, "no answer from the cache"))
                    }
                    read => read?,
                };
            }
            match found {
                Ok(Found::Bytes(done)) => {
                    buf.unsplit(done);
                    return Ok(buf);
                }
                Ok(Found::Gone(back) | Found::Later(back)) => buf.unsplit(back),
                // A cache that does not work is one that has nothing.
                Err(error) => {
                    shared.counters.damaged();
                    tracing::warn!(object = %shared.object.url, chunk = piece.number, %error, "a chunk of the cache cannot be read; it is fetched round it");
                    shared.at_hand.forget(piece.number);
                    break;
                }
                Ok(Found::Damaged(back)) => {
                    buf.unsplit(back);
                    shared.counters.damaged();
                    tracing::warn!(object = %shared.object.url, chunk = piece.number, "a chunk of the cache is damaged; it is fetched again");
                    let (shared, number) = (shared.clone(), piece.number);
                    let discard =
                        move |_: &_| shared.cache.as_ref().map(|cache| cache.discard(&shared.key, number));
                    if let Some(Err(error)) = self.shared.pool.run(limit, discard).await? {
                        tracing::warn!(%error, "a damaged chunk cannot be removed");
                    }
                }
            }
            shared.at_hand.forget(piece.number);
        }
        // The cache does not keep what it is given: go round it.
        let (number, len) = (piece.number, shared.len_of(piece.number));
        let arrival = Arrival::new(false);
        let fetch = shared.object.fetch(number * shared.chunk, len, &arrival, &shared.counters, &|_| {});
        let data = limit.bound(fetch).await?.map_err(|e| refused("fetch from", &shared.object.url, &e))?;
        buf.extend_from_slice(&data[piece.at..piece.at + piece.len]);
        Ok(buf)
    }

    /// A chunk, fetched if need be, or only `part` of it (where it begins, and its length) if that is there earlier.
    async fn get(&self, number: u64, part: Option<(usize, usize)>, limit: &Limit) -> Result<Got, BlockError> {
        let shared = &self.shared;
        if shared.closing.is_cancelled() {
            return Err(BlockError::Stopped);
        }
        if let Some(source) = shared.at_hand.get(number) {
            shared.counters.hit();
            return Ok(Got::Chunk(source));
        }
        for _ in 0..FLIGHTS {
            if shared.closing.is_cancelled() {
                return Err(BlockError::Stopped);
            }
            let waiter = shared.flights.join(number, shared.object.early(), |flight| {
                self.tasks.spawn(shared.clone().fly(number, flight));
            });
            let got = limit.bound(waiter.get(part)).await;
            if waiter.flight.missed() {
                shared.counters.missed();
            } else if let Ok(Some(Ok(_))) = got {
                shared.counters.hit();
            }
            match got {
                Ok(Some(got)) => {
                    return got.map_err(|error| refused("fetch from", &shared.object.url, &error));
                }
                // Its last waiter left as we came, or the disk is being closed.
                Ok(None) => {}
                Err(BlockError::Deadline) => {
                    return Err(late(&shared.object.url, waiter.flight.last_error()));
                }
                Err(e) => return Err(e),
            }
        }
        let source = io::Error::other(format!("{FLIGHTS} fetches of chunk {number} ended without an answer"));
        Err(BlockError::Io { doing: "fetch from", file: shared.object.url.clone(), source })
    }
}

impl Shared {
    fn len_of(&self, number: u64) -> u64 {
        self.chunk.min(self.object.size() - number * self.chunk)
    }

    fn pieces(&self, at: u64, len: usize) -> Vec<Piece> {
        let (mut here, end) = (at, at + len as u64);
        let mut pieces = Vec::with_capacity(1);
        while here < end {
            let number = here / self.chunk;
            let stop = ((number + 1) * self.chunk).min(end);
            // A chunk fits in memory.
            pieces.push(Piece {
                number,
                at: (here - number * self.chunk) as usize,
                len: (stop - here) as usize,
            });
            here = stop;
        }
        pieces
    }

    /// The terms of a call to the cache on behalf of all who wait.
    fn cache_limit(&self) -> Limit {
        Limit::new(self.closing.clone(), Instant::now() + CACHE_PATIENCE)
    }

    /// The one fetch of a chunk, from claim to keeping.
    async fn fly(self: Arc<Self>, number: u64, flight: Arc<Flight>) {
        let pilot = Pilot { flights: &self.flights, number, flight };
        let flight = &pilot.flight;
        let work = async {
            // Kept until the chunk is: it is what bounds the memory.
            let (outcome, part, _permit) = self.obtain(&pilot).await;
            let data = match &outcome {
                Ok(Source::Memory(data)) => Some(data.clone()),
                _ => None,
            };
            if let Ok(source) = &outcome {
                self.at_hand.put(number, source.clone());
            }
            flight.land(outcome);
            if let (Some(part), Some(data)) = (part, data) {
                self.keep(number, part, data).await;
            }
        };
        tokio::select! {
            biased;
            () = self.closing.cancelled() => {}
            () = flight.abandoned.cancelled() => {}
            () = work => {}
        }
    }

    async fn obtain(
        self: &Arc<Self>,
        pilot: &Pilot<'_>,
    ) -> (flight::Outcome, Option<Part>, Option<SemaphorePermit<'_>>) {
        let (number, flight) = (pilot.number, &pilot.flight);
        let part = match self.claim(number, flight).await {
            Ok(Some(Claim::Have(chunk))) => return (Ok(Source::File(Arc::new(chunk))), None, None),
            Ok(Some(Claim::Ours(part))) => Some(part),
            Ok(Some(Claim::Busy)) => {
                // Stopped, or as slow as the store: no reason to wait for it longer than for a try of our own.
                self.counters.uncached();
                None
            }
            Ok(None) => None,
            Err(error) => {
                self.counters.uncached();
                tracing::debug!(%error, "the cache cannot be used");
                None
            }
        };
        flight.miss();
        // Never closed; without a permit it would only be one more.
        let permit = self.permits.acquire().await.ok();
        let (at, len) = (number * self.chunk, self.len_of(number));
        let failed = |why| pilot.failed(why);
        let fetched = self.object.fetch(at, len, &flight.arrival, &self.counters, &failed).await;
        (fetched.map(Source::Memory), part, permit)
    }

    /// Claims a chunk, or waits until it is there, up to the time of a try.
    async fn claim(self: &Arc<Self>, number: u64, flight: &Flight) -> Result<Option<Claim>, String> {
        if self.cache.is_none() {
            return Ok(None);
        }
        let (begun, mut pause) = (Instant::now(), LOOK.0);
        loop {
            let shared = self.clone();
            let claim = move |_: &_| {
                let len = shared.len_of(number);
                shared.cache.as_ref().map(|cache| cache.claim(&shared.key, number, len, &shared.counters))
            };
            let claimed = self.pool.run(&self.cache_limit(), claim).await.map_err(|e| e.to_string())?;
            match claimed.transpose().map_err(|e| e.to_string())? {
                Some(Claim::Busy) if begun.elapsed() < self.tries.whole => {
                    flight.miss();
                    sleep(pause).await;
                    pause = (pause * 2).min(LOOK.1);
                }
                done => return Ok(done),
            }
        }
    }

    async fn keep(self: &Arc<Self>, number: u64, part: Part, data: Bytes) {
        let shared = self.clone();
        let keep = move |_: &_| shared.cache.as_ref().map(|cache| cache.keep(part, &data, &shared.counters));
        match self.pool.run(&self.cache_limit(), keep).await {
            Ok(Some(Ok(Some(chunk)))) => self.at_hand.put(number, Source::File(Arc::new(chunk))),
            kept => {
                self.counters.uncached();
                let why = match kept {
                    Ok(Some(Err(e))) => e.to_string(),
                    Err(e) => e.to_string(),
                    _ => "the cache is full of what is in use".to_owned(),
                };
                tracing::debug!(object = %self.object.url, chunk = number, why, "a chunk is not kept");
            }
        }
    }
}

fn refused(doing: &'static str, url: &Arc<str>, error: &RemoteError) -> BlockError {
    let (file, why) = match error {
        RemoteError::Store { url, why } => (url.clone(), why.clone()),
        other => (url.clone(), other.to_string()),
    };
    BlockError::Io { doing, file, source: io::Error::other(why) }
}

/// The deadline, with what the tries before it ended with.
fn late(url: &Arc<str>, last: Option<String>) -> BlockError {
    match last {
        None => BlockError::Deadline,
        Some(why) => {
            let why = format!("not within the deadline; the last try: {why}");
            BlockError::Io {
                doing: "fetch from",
                file: url.clone(),
                source: io::Error::new(io::ErrorKind::TimedOut, why),
            }
        }
    }
}

impl Backend for RemoteBackend {
    fn size(&self) -> u64 {
        self.shared.object.size()
    }

    fn read_only(&self) -> bool {
        true
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, buf: BytesMut, limit: &'a Limit) -> Answer<'a, BytesMut> {
        Box::pin(async move {
            check_range(at, len as u64, self.size())?;
            self.read(at, len, buf, limit).await
        })
    }

    fn write_at<'a>(&'a self, _: u64, _: Bytes, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Err(BlockError::ReadOnly)))
    }

    fn flush<'a>(&'a self, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn discard<'a>(&'a self, _: u64, _: u64, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Err(BlockError::ReadOnly)))
    }

    fn write_zeroes<'a>(&'a self, _: u64, _: u64, _: Zeroes, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(std::future::ready(Err(BlockError::ReadOnly)))
    }

    /// Stores do not tell where nothing is: all of it is data.
    fn extents<'a>(&'a self, at: u64, len: u64, _: usize, _: &'a Limit) -> Answer<'a, Vec<Extent>> {
        let checked = check_range(at, len, self.size());
        Box::pin(std::future::ready(checked.map(|()| {
            let mut all = vec![];
            push_extent(&mut all, len, ExtentKind::Data);
            all
        })))
    }

    fn close(&self, within: Duration) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let deadline = Instant::now() + within;
            self.shared.closing.cancel();
            self.tasks.close();
            // They end at their next await; what they left in the kernel is the pool's.
            if timeout(within, self.tasks.wait()).await.is_err() {
                tracing::error!(object = %self.shared.object.url, "fetches did not end");
            }
            self.shared.pool.close(deadline.saturating_duration_since(Instant::now())).await
        })
    }

    fn remote_stats(&self) -> Option<RemoteStats> {
        Some(self.shared.counters.stats())
    }
}
