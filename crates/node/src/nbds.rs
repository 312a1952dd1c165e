//! The indexes of the kernel's NBD client as this node hands them out: one for each sandbox whose VMM takes its disk as a
//! device. Which comes next decides the pure pool; here is who has which, and the looks at the host. The lock is never
//! held across a call of the host.
//!
//! An index is connected by a shim and released by the sandbox's release, both under its name in the record and with the
//! sandbox's id on the device. So two records that name one index harm nobody, and a late release never touches its next
//! owner.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::host::{Host, HostError, NbdSeen};
use hearth_core::id::SandboxId;
use hearth_core::nbd_pool::{Counts, NbdPool, Proof};
use tokio_util::sync::CancellationToken;

use crate::blocking::on_host;
use crate::config::{EngineConfig, FirecrackerDisk};
use crate::error::{EngineError, chain};

/// Between two looks at indexes that are not proven quiet.
const LOOK: Duration = Duration::from_secs(2);
/// Of them, so many are looked at in one go.
const AT_ONCE: u32 = 64;

/// All indexes, and who has which.
#[derive(Debug)]
pub(crate) struct Nbds {
    mode: FirecrackerDisk,
    /// Most that are used; 0: all there are.
    most: u32,
    /// Nothing while there is no such client that can be used.
    inner: Mutex<Option<Inner>>,
    /// What records name, until it can be looked at.
    named: Mutex<BTreeMap<u32, SandboxId>>,
    /// Looks at many go one after the other: what one sees must not be taken for old by what another sees.
    looking: tokio::sync::Mutex<()>,
    /// Why there is none, as last seen.
    unusable: Mutex<String>,
}

#[derive(Debug)]
struct Inner {
    pool: NbdPool,
    /// Of those used, and of those in quarantine whose it was.
    owners: HashMap<u32, SandboxId>,
}

impl Inner {
    fn proof(&self, index: u32, seen: &Result<NbdSeen, String>) -> Proof {
        match seen {
            Ok(NbdSeen::Quiet) => Proof::Quiet,
            // Connected for somebody else meanwhile, or always.
            Ok(NbdSeen::Unquiet { owner: Some(owner), .. }) if self.owners.get(&index) != Some(owner) => {
                Proof::Foreign
            }
            // Never one of ours: those that name nobody too.
            Ok(NbdSeen::Unquiet { .. }) if !self.owners.contains_key(&index) => Proof::Foreign,
            Ok(NbdSeen::Unquiet { .. }) | Err(_) => Proof::Unproven,
        }
    }

    /// Takes an index back from its owner; another's is left alone.
    fn give_back(&mut self, index: u32, owner: &SandboxId, proof: Proof) {
        if self.owners.get(&index) == Some(owner) && self.pool.give_back(index, proof) {
            if proof == Proof::Unproven {
                tracing::warn!(sandbox = %owner, "nbd{index} is not proven quiet and stays out of use until it is");
            } else {
                self.owners.remove(&index);
            }
        }
    }

    fn looked(&mut self, index: u32, proof: Proof) {
        if self.pool.looked(index, proof) && proof != Proof::Unproven {
            self.owners.remove(&index);
        }
    }
}

fn seen_of<H: Host>(host: &H, index: u32) -> Result<NbdSeen, String> {
    host.look_at_nbd(index).map_err(|e| chain(&e))
}

impl Nbds {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        Self {
            mode: config.firecracker_disk,
            most: config.nbd_devices,
            inner: Mutex::default(),
            named: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            unusable: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Inner>> {
        // Each change leaves pool and owners whole before anything else can panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a sandbox on Firecracker gets a device now, were there a free one. The module may come at any time.
    pub(crate) async fn serve<H: Host>(&self, host: &Arc<H>) -> bool {
        if self.mode == FirecrackerDisk::File {
            return false;
        }
        self.fill(host).await;
        self.mode == FirecrackerDisk::Nbd || self.lock().is_some()
    }

    /// Begins with what records name: those are their sandboxes', whatever they look like.
    pub(crate) async fn begin<H: Host>(&self, host: &Arc<H>, named: BTreeMap<u32, SandboxId>) {
        *self.named() = named;
        self.fill(host).await;
    }

    fn named(&self) -> MutexGuard<'_, BTreeMap<u32, SandboxId>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at all indexes, once there is such a client that can be used.
    async fn fill<H: Host>(&self, host: &Arc<H>) {
        if self.lock().is_some() {
            return;
        }
        let _looking = self.looking.lock().await;
        // Devices may be left of a time in which they were wanted.
        if self.lock().is_some() || (self.mode == FirecrackerDisk::File && self.named().is_empty()) {
            return;
        }
        let most = self.most;
        let looked = on_host(host, move |host| {
            let limit = host.nbd_limit()?;
            let limit = if most == 0 { limit } else { limit.min(most) };
            Ok::<_, HostError>((limit, (0..limit).map(|index| seen_of(host, index)).collect::<Vec<_>>()))
        });
        let (limit, seen) = match looked.await {
            Ok(looked) => looked,
            Err(e) => return self.note_unusable(e.why),
        };
        let first = |index: u32| match seen.get(index as usize) {
            Some(Ok(NbdSeen::Quiet)) => Proof::Quiet,
            Some(Ok(NbdSeen::Unquiet { .. })) => Proof::Foreign,
            _ => Proof::Unproven,
        };
        let mut pool = NbdPool::new(limit, first);
        // Held to the end: a sandbox that goes meanwhile is forgotten here or there.
        let mut named = self.named();
        let owners = std::mem::take(&mut *named).into_iter().filter(|(index, _)| pool.hold(*index)).collect();
        let Counts { used, foreign, limit, .. } = pool.counts();
        tracing::info!(used, foreign, limit, "network block devices for the disks of Firecracker");
        *self.lock() = Some(Inner { pool, owners });
    }

    /// Told when it is another reason than before.
    fn note_unusable(&self, why: String) {
        let mut unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        if *unusable != why {
            match self.mode {
                FirecrackerDisk::Nbd => tracing::warn!("no disks for Firecracker: {why}"),
                _ => tracing::info!("disks of Firecracker are files: {why}"),
            }
            *unusable = why;
        }
    }

    /// Whether there are any at all, where [`serve`](Self::serve) said that a sandbox gets one.
    ///
    /// # Errors
    /// [`EngineError::Precondition`] with what to do.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        if self.lock().is_some() { Ok(()) } else { Err(self.none()) }
    }

    fn none(&self) -> EngineError {
        let why = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        EngineError::Precondition(format!("disk.firecracker is nbd: {why}; or set it to auto or file"))
    }

    /// An index for a sandbox, just seen to be quiet.
    ///
    /// # Errors
    /// [`EngineError::Exhausted`] with what there is of what.
    pub(crate) async fn acquire<H: Host>(&self, host: &Arc<H>, id: &SandboxId) -> Result<u32, EngineError> {
        let mut again = true;
        loop {
            let taken = match self.lock().as_mut() {
                Some(Inner { pool, owners }) => {
                    pool.acquire().inspect(|index| drop(owners.insert(*index, id.clone())))
                }
                None => return Err(self.none()),
            };
            match taken {
                Ok(index) => {
                    let seen = on_host(host, move |host| seen_of(host, index)).await;
                    let mut inner = self.lock();
                    let Some(inner) = inner.as_mut() else { continue };
                    let proof = match seen {
                        Ok(NbdSeen::Quiet) => return Ok(index),
                        // It was quiet when it was given back: somebody who asks nobody has it now.
                        Ok(NbdSeen::Unquiet { .. }) => Proof::Foreign,
                        Err(_) => Proof::Unproven,
                    };
                    inner.give_back(index, id, proof);
                }
                // What was not quiet may be by now.
                Err(_) if std::mem::take(&mut again) => self.look_again(host).await,
                Err(why) => {
                    let why = format!(
                        "{why}, raise disk.nbd_devices if that is set, or set disk.firecracker to file"
                    );
                    return Err(EngineError::Exhausted(why));
                }
            }
        }
    }

    /// Takes an index back after its release was tried: it is free if it is seen to be quiet. May be repeated.
    pub(crate) async fn settle<H: Host>(&self, host: &Arc<H>, index: u32, id: &SandboxId) {
        let seen = on_host(host, move |host| seen_of(host, index)).await;
        if let Some(inner) = self.lock().as_mut() {
            let proof = inner.proof(index, &seen);
            inner.give_back(index, id, proof);
        }
    }

    /// Takes back whatever a sandbox still has of which nothing is left, for the case that its record never said so.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.named().retain(|_, owner| owner != id);
        let mut inner = self.lock();
        let Some(inner) = inner.as_mut() else { return };
        let theirs: Vec<u32> =
            inner.owners.iter().filter(|(_, o)| *o == id).map(|(index, _)| *index).collect();
        for index in theirs {
            inner.give_back(index, id, Proof::Unproven);
        }
    }

    /// Looks at what is not proven quiet again and again.
    pub(crate) async fn watch<H: Host>(&self, host: &Arc<H>, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(LOOK)).await.is_some() {
            self.look_again(host).await;
        }
    }

    async fn look_again<H: Host>(&self, host: &Arc<H>) {
        let _looking = self.looking.lock().await;
        let due = self.counts().map_or(0, |counts| (counts.quarantined + counts.foreign).min(AT_ONCE));
        for _ in 0..due {
            let suspect = self.lock().as_mut().and_then(|inner| inner.pool.suspect());
            let Some(index) = suspect else { return };
            let seen = on_host(host, move |host| seen_of(host, index)).await;
            if let Some(inner) = self.lock().as_mut() {
                let proof = inner.proof(index, &seen);
                inner.looked(index, proof);
            }
        }
    }

    /// How many there are of what; nothing where there is no such client, or none is wanted.
    pub(crate) fn counts(&self) -> Option<Counts> {
        self.lock().as_ref().map(|inner| inner.pool.counts())
    }
}
