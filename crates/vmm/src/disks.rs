//! The disks of one VM while it lives: opened before the VMM is started, served to it by NBD over a pair of sockets each,
//! watched, and closed after it. One end of a pair goes to the VMM as a descriptor: no path leads to it, nobody else can
//! connect, and nothing of it is left. A VMM that takes no sockets has the writable disk as a device of the kernel's
//! ([`attached`]).
//!
//! Order at the end (DESIGN, docs/block.md): the VMM is dead, then the sockets are shut, what is in flight ends, a device is
//! disconnected and seen to be quiet, the files are closed. A VMM that was killed and waits for its disk ends only by that.
//! Only after an orderly end of the VMM is the disk flushed; what a crashed guest left is nobody's to complete.

mod attached;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::block::{BlockSpec, DiskStats, RemoteRootfs};
use hearth_core::shim::ShimSpec;
use hearth_core::steps::BlockPlace;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::backend::{VmmError, socket_pair};
use crate::block::nbd::{Ended, Export, Limits, serve, serve_attached};
use crate::block::{
    Backend, BlockFaults, ChunkCache, FileBackend, Limit, Overlay, Pool, RateLimiter, RemoteBackend,
    RemoteOptions, Version, Wrapped,
};
use attached::Attached;

/// Names of the disks: of the exports, and of the nodes in the VMM.
pub(crate) const ROOTFS: &str = "rootfs";
pub(crate) const OVERLAY: &str = "overlay";
/// Threads for the system calls of one disk. They end when there is nothing to do.
const THREADS: usize = 8;
/// To open the disks, and to flush them at the end.
const PATIENCE: Duration = Duration::from_secs(10);
/// To find an object of a store, with as many tries as that takes.
const REMOTE_PATIENCE: Duration = Duration::from_secs(30);
/// After an orderly end of the VMM: for its connections to end by themselves.
const GOODBYE: Duration = Duration::from_secs(1);

/// Why there are no disks.
#[derive(Debug, thiserror::Error)]
pub enum DisksError {
    /// One could not be opened.
    #[error("the disk {disk} cannot be served: {why}")]
    Open {
        /// Which.
        disk: &'static str,
        /// In words, with the file.
        why: String,
    },
    /// It could not be made a device of the kernel's.
    #[error("the disk {disk} cannot be a device: {why}")]
    Attach {
        /// Which.
        disk: &'static str,
        /// In words, with the device.
        why: String,
    },
    /// What a test ordered makes no sense.
    #[error("block failpoints: {0}")]
    Failpoints(String),
}

/// What everybody may know of the disks: their counters. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskBook(Arc<Mutex<Vec<Arc<Export>>>>);

impl DiskBook {
    /// What was counted so far; empty where no disks are served.
    pub(crate) fn stats(&self) -> Vec<DiskStats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|e| e.stats()).collect()
    }
}

/// How the server of a disk ended while it should not have.
#[derive(Debug)]
pub(crate) struct Failure {
    /// In words.
    pub(crate) why: String,
    /// The VMM hung up: mostly the first sign of its own end.
    pub(crate) hung_up: bool,
}

/// The disks; none of them where the VMM opens files itself.
pub(crate) struct Disks {
    exports: Vec<Arc<Export>>,
    faults: Option<BlockFaults>,
    servers: JoinSet<(String, Ended)>,
    stop: CancellationToken,
    /// The writable disk's device, if the VMM has it that way.
    attached: Option<Attached>,
}

impl Disks {
    /// Opens what the spec names, and makes the overlay if there is none. Dropped on the way, it leaves an overlay whole or
    /// none.
    ///
    /// # Errors
    /// Names the disk and says why.
    pub(crate) async fn open(spec: &ShimSpec, book: &DiskBook) -> Result<Self, DisksError> {
        let mut disks = Self {
            exports: vec![],
            faults: None,
            servers: JoinSet::new(),
            stop: CancellationToken::new(),
            attached: None,
        };
        let Some(block) = &spec.block else { return Ok(disks) };
        disks.faults = BlockFaults::parse(&block.failpoints).map_err(DisksError::Failpoints)?;
        let opened = open_all(spec, block, disks.faults.as_ref());
        let opened = match &disks.faults {
            Some(faults) => {
                let failed = |why| DisksError::Open { disk: OVERLAY, why };
                faults.at(BlockPlace::Open, failed, opened).await?
            }
            None => opened.await?,
        };
        let rate = RateLimiter::new(block.rate).map(Arc::new);
        let export = |(name, disk)| Export::limited(name, disk, rate.clone());
        disks.exports = opened.into_iter().map(export).collect();
        *book.0.lock().unwrap_or_else(PoisonError::into_inner) = disks.exports.clone();
        if let Some(index) = block.nbd {
            disks.attach(spec, block, index).await?;
        }
        Ok(disks)
    }

    /// Serves the writable disk to the kernel.
    async fn attach(&mut self, spec: &ShimSpec, block: &BlockSpec, index: u32) -> Result<(), DisksError> {
        let failed = |why| DisksError::Attach { disk: OVERLAY, why };
        let export = self.exports.iter().find(|export| export.name() == OVERLAY).cloned();
        let export = export.ok_or_else(|| failed("there is no such disk".into()))?;
        let order = attached::order(index, &spec.id, &export, block.rate);
        let (ours, theirs) = socket_pair("disk").map_err(|e| failed(e.to_string()))?;
        let (read, write) = ours.into_split();
        // It answers while the device is being connected: whoever looks for partitions reads at once.
        self.watch(OVERLAY, serve_attached(read, write, export, Limits::default(), self.stop.clone()));
        let (request, dead) = (order.timeouts.request.as_secs(), order.timeouts.dead_connection.as_secs());
        self.attached = Some(Attached::connect(order, theirs).await.map_err(failed)?);
        tracing::info!(
            device = %hearth_host::nbd::path(index).display(),
            request_timeout_seconds = request,
            dead_connection_timeout_seconds = dead,
            "the writable disk is connected"
        );
        Ok(())
    }

    /// Begins to release the writable disk's device, so that a VMM that was killed and waits for it can end. False if there
    /// is none, or that has begun before.
    pub(crate) fn let_go(&mut self) -> bool {
        self.attached.as_mut().is_some_and(Attached::let_go)
    }

    /// Whether the VMM's end may have to wait for [`let_go`](Self::let_go).
    pub(crate) fn may_hold_up(&self) -> bool {
        self.attached.is_some()
    }

    /// Runs a server until it ends; the next [`failed`](Self::failed) tells.
    fn watch(&mut self, name: &'static str, served: impl Future<Output = Ended> + Send + 'static) {
        let faults = self.faults.clone().filter(|_| name == OVERLAY);
        self.servers.spawn(async move {
            let ended = match faults {
                Some(faults) => tokio::select! {
                    ended = served => ended,
                    why = faults.end_of(BlockPlace::Serve) => Ended::Io(io::Error::other(why)),
                },
                None => served.await,
            };
            (name.to_owned(), ended)
        });
    }

    /// Starts a server for each disk that has none yet: the VMM's ends, in the order of the guest's disks.
    ///
    /// # Errors
    /// If there are no descriptors.
    pub(crate) fn serve(&mut self) -> Result<Vec<OwnedFd>, VmmError> {
        let mut ends = Vec::with_capacity(self.exports.len());
        if self.attached.is_some() {
            return Ok(ends);
        }
        for export in self.exports.clone() {
            let (ours, theirs) = socket_pair("disk")?;
            let (read, write) = ours.into_split();
            let name = if export.name() == OVERLAY { OVERLAY } else { ROOTFS };
            let (exports, stop) = (Arc::from([export]), self.stop.clone());
            self.watch(name, serve(read, write, exports, Limits::default(), stop));
            ends.push(theirs);
        }
        Ok(ends)
    }

    /// Waits for a server that ends before it should; for ever where there is none. May be dropped and called again.
    pub(crate) async fn failed(&mut self) -> Failure {
        match self.servers.join_next().await {
            None => std::future::pending().await,
            Some(Ok((disk, ended))) => {
                let hung_up = match &ended {
                    // It is the kernel that hangs up, and not since the VMM ends.
                    _ if self.attached.is_some() => false,
                    Ended::Done => true,
                    Ended::Io(e) => matches!(
                        e.kind(),
                        io::ErrorKind::ConnectionReset
                            | io::ErrorKind::BrokenPipe
                            | io::ErrorKind::UnexpectedEof
                    ),
                    _ => false,
                };
                Failure { why: format!("block server failed: {disk}: {ended}"), hung_up }
            }
            Some(Err(e)) => Failure { why: format!("block server failed: {e}"), hung_up: false },
        }
    }

    /// Ends all of it, in bounded time; the VMM is dead. What went wrong is returned, and logged.
    pub(crate) async fn close(&mut self, orderly: bool) -> Vec<String> {
        let mut notes = vec![];
        if self.exports.is_empty() {
            return notes;
        }
        // A device that was let go before the VMM ended has not all that its guest wrote, however well the VMM ended then.
        if orderly && self.attached.as_ref().is_some_and(Attached::is_let_go) {
            notes.push(format!(
                "not all that the guest wrote was kept: {OVERLAY} was let go before the VMM ended"
            ));
        } else if orderly {
            // The VMM has said goodbye, and what it asked for before is still being done. Its last close of a device waited
            // for all of it.
            let ended = timeout(GOODBYE, async { while self.servers.join_next().await.is_some() {} });
            if self.attached.is_none() && ended.await.is_err() {
                tracing::warn!("the VMM has ended and its requests have not");
            }
            for export in self.exports.iter().filter(|e| !e.backend().read_only()) {
                if let Err(e) = export.backend().flush(&Limit::within(PATIENCE)).await {
                    notes.push(format!(
                        "not all that the guest wrote was kept: flush of {}: {e}",
                        export.name()
                    ));
                }
            }
        }
        // The socket is shut before anything else, then both ends are seen to end.
        self.let_go();
        self.stop.cancel();
        let limits = Limits::default();
        let ended = timeout(limits.farewell * 2, async { while self.servers.join_next().await.is_some() {} });
        if ended.await.is_err() {
            notes.push("a block server did not end when it was told to".to_owned());
            self.servers.shutdown().await;
        }
        if let Some(attached) = &mut self.attached
            && let Err(why) = attached.released().await
        {
            notes.push(format!("the device of {OVERLAY} is left to the daemon: {why}"));
        }
        for export in &self.exports {
            let kept = export.backend().close(limits.quiet).await;
            if kept > 0 {
                notes.push(format!("the kernel still has {kept} requests to {}", export.name()));
            }
        }
        for note in &notes {
            tracing::error!("{note}");
        }
        notes
    }
}

async fn open_all(
    spec: &ShimSpec,
    block: &BlockSpec,
    faults: Option<&BlockFaults>,
) -> Result<Vec<(&'static str, Arc<dyn Backend>)>, DisksError> {
    let mut disks: Vec<(&'static str, Arc<dyn Backend>)> = vec![];
    if let Some(rootfs) = &block.rootfs {
        disks.push((ROOTFS, open_remote(rootfs).await?));
    // Where the kernel has one disk, the VMM opens the other's file itself: many read it, and from one cache.
    } else if let Some(path) = spec.rootfs.as_ref().filter(|_| block.nbd.is_none()) {
        disks.push((ROOTFS, open_file(ROOTFS, path)?));
    }
    if let Some(path) = &spec.overlay {
        let base = open_file(OVERLAY, &block.base)?;
        let size = base.size();
        let pool = Pool::new(OVERLAY, THREADS);
        let disk = Overlay::scratch(path, base, size, pool, &Limit::within(PATIENCE))
            .await
            .map_err(|e| DisksError::Open { disk: OVERLAY, why: e.to_string() })?;
        let disk: Arc<dyn Backend> = Arc::new(disk);
        disks.push((
            OVERLAY,
            match faults {
                Some(faults) => Arc::new(Wrapped::new(disk, faults.clone())),
                None => disk,
            },
        ));
    }
    Ok(disks)
}

/// The object, in the version that the template was made of.
async fn open_remote(rootfs: &RemoteRootfs) -> Result<Arc<dyn Backend>, DisksError> {
    let open = |why| DisksError::Open { disk: ROOTFS, why };
    let (url, wanted) = (&rootfs.disk.url, &rootfs.disk);
    let cache = ChunkCache::open(&rootfs.cache, rootfs.cache_mib << 20);
    let cache = cache.map_err(|e| open(format!("cache {}: {e}", rootfs.cache.display())))?;
    let (pool, limit) = (Pool::new("the cache", THREADS), Limit::within(REMOTE_PATIENCE));
    let disk = RemoteBackend::open(url, RemoteOptions::default(), Some(Arc::new(cache)), pool, &limit);
    let disk = disk.await.map_err(|e| open(e.to_string()))?;
    let Version { size, mark } = disk.version();
    if (size, &mark) != (wanted.bytes, &wanted.mark) {
        let why = format!(
            "{url} is no longer what the template was made of: it had {} bytes and was {}, and has {size} and is {mark}; \
             make the template again",
            wanted.bytes, wanted.mark
        );
        return Err(open(why));
    }
    Ok(Arc::new(disk))
}

fn open_file(disk: &'static str, path: &std::path::Path) -> Result<Arc<dyn Backend>, DisksError> {
    let opened = FileBackend::open(path, true, Pool::new(disk, THREADS));
    match opened {
        Ok(file) => Ok(Arc::new(file)),
        Err(e) => Err(DisksError::Open { disk, why: format!("open {}: {e}", path.display()) }),
    }
}
