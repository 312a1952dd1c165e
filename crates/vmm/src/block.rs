//! The disks of one VM, served by its shim: [`Backend`] is what a disk can do, [`FileBackend`] a local file,
//! [`RemoteBackend`] an object of a store, [`Overlay`] a read-only base with a copy-on-write file above it, [`nbd`] the server.
//!
//! Every call takes a stop and a deadline, dropping it cancels it, and what the kernel still works on stays alive
//! until the kernel is done. Nothing here may block the thread that polls: file I/O is on threads of its own
//! ([`Pool`]), so that a disk that stalls takes nobody else's with it.

mod backend;
mod faults;
mod file;
mod limit;
mod meter;
pub mod nbd;
mod overlay;
mod pool;
mod remote;
mod wrap;

pub use backend::{Answer, Backend, BlockError, Extent, ExtentKind, Hold, Limit, Zeroes};
pub use faults::BlockFaults;
pub use file::FileBackend;
pub use limit::RateLimiter;
pub use overlay::{BLOCK, Overlay, OverlayError, diff};
pub use pool::Pool;
pub use remote::{ChunkCache, LEAST_CACHE, RemoteBackend, RemoteError, RemoteOptions, Tries, Version};
pub use wrap::{Around, Call, Wrapped};
