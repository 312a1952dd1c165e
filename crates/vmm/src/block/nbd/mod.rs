//! The NBD server: fixed newstyle handshake, structured replies, over any stream. What a client can do to it is bounded:
//! frames are judged before anything is allocated, requests and replies in flight have a limit in number and bytes, and an
//! error is an answer, not the end of a connection.
//!
//! [`Handshake`] and [`Intake`] are the parser: no I/O, so that a fuzzer can have them.

mod connection;
mod handshake;
mod intake;
mod proto;
mod server;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use connection::{Ended, serve, serve_attached};
pub use handshake::{Chosen, Handshake, Progress};
pub use intake::{Ask, Intake, Refusal, Taken};
pub use server::{Served, Server};

use hearth_core::block::DiskStats;

use crate::block::limit::RateLimiter;
use crate::block::meter::Meter;
use crate::block::{BLOCK, Backend, BlockError};

/// Bytes of the largest read or write, as announced.
pub const MAX_REQUEST: u32 = 32 << 20;
/// Bytes of the block size that suits best, as announced. Any other works.
const PREFERRED: u32 = BLOCK as u32;
/// Extents in one answer to BLOCK_STATUS.
const MOST_EXTENTS: usize = 4096;
/// Beyond this a name does not fit the protocol.
const LONGEST_NAME: usize = proto::LONGEST_STRING;

/// What one server allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Clients at once; one more is let in and closed.
    pub connections: usize,
    /// Requests in flight per connection, answers that were not fetched included.
    pub in_flight: usize,
    /// Their bytes; at least one request of [`MAX_REQUEST`] must fit.
    pub in_flight_bytes: usize,
    /// Until an export is chosen.
    pub handshake: Duration,
    /// Until a request is answered; longer, and it is answered with an error. A wait for the rate limit comes before.
    pub request: Duration,
    /// After the stop: for clients to fetch their last answers.
    pub farewell: Duration,
    /// After the stop: for the kernel to give back what it still works on.
    pub quiet: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            in_flight: 128,
            in_flight_bytes: MAX_REQUEST as usize + (8 << 20),
            handshake: Duration::from_secs(10),
            request: Duration::from_secs(60),
            farewell: Duration::from_secs(1),
            quiet: Duration::from_secs(2),
        }
    }
}

/// A disk under a name.
pub struct Export {
    name: String,
    backend: Arc<dyn Backend>,
    rate: Option<Arc<RateLimiter>>,
    meter: Arc<Meter>,
    errors: AtomicU64,
}

impl Export {
    /// A name is at most 4,096 bytes; what is longer is cut.
    #[must_use]
    pub fn new(name: &str, backend: Arc<dyn Backend>) -> Arc<Self> {
        Self::limited(name, backend, None)
    }

    /// Like [`Export::new`], as fast as `rate` allows, which other exports may share.
    #[must_use]
    pub fn limited(name: &str, backend: Arc<dyn Backend>, rate: Option<Arc<RateLimiter>>) -> Arc<Self> {
        let name = name.chars().scan(0, |len, c| {
            *len += c.len_utf8();
            (*len <= LONGEST_NAME).then_some(c)
        });
        let meter = Arc::default();
        Arc::new(Self { name: name.collect(), backend, rate, meter, errors: AtomicU64::new(0) })
    }

    /// As clients ask for it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Requests that failed in the backend.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// What was counted of it.
    #[must_use]
    pub fn stats(&self) -> DiskStats {
        DiskStats { remote: self.backend.remote_stats(), ..self.meter.stats(&self.name) }
    }

    /// The disk.
    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    fn size(&self) -> u64 {
        self.backend.size()
    }

    fn read_only(&self) -> bool {
        self.backend.read_only()
    }

    /// What it can do, as transmission flags of the protocol.
    ///
    /// A flush covers the writes of all connections, and nothing is kept per connection, so many may be used at once.
    #[must_use]
    pub fn flags(&self) -> u16 {
        let always =
            proto::FLAG_HAS_FLAGS | proto::FLAG_SEND_FLUSH | proto::FLAG_SEND_DF | proto::FLAG_CAN_MULTI_CONN;
        always
            | match self.read_only() {
                true => proto::FLAG_READ_ONLY,
                false => {
                    proto::FLAG_SEND_FUA
                        | proto::FLAG_SEND_TRIM
                        | proto::FLAG_SEND_WRITE_ZEROES
                        | proto::FLAG_SEND_FAST_ZERO
                }
            }
    }

    /// Counts an error; a disk that fails all the time is told of with a growing distance.
    fn note(&self, error: &BlockError) {
        if matches!(error, BlockError::Stopped | BlockError::NotFast) {
            return;
        }
        let count = self.errors.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(export = %self.name, %error, count, "a request to the disk failed");
        }
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export").field("name", &self.name).field("size", &self.size()).finish_non_exhaustive()
    }
}
