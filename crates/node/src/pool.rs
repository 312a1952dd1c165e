//! The slot pool: which numbers are whose, and a few slots kept ready. Taking and giving back cost O(1)
//! under the lock; no kernel call is made while it is held.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::event::EventKind;
use hearth_core::host::{ErrorClass, Host, HostError, Pace, SlotRelease};
use hearth_core::lifecycle::SlotState;
use hearth_core::network::SlotIndex;
use hearth_core::resource::Resource;
use tokio::sync::Notify;

use crate::blocking::on_host;
use crate::config::EngineConfig;
use crate::error::{EngineError, chain};
use crate::events::Events;

/// Back-off of the filler while slots cannot be made.
const FILL_RETRY: std::ops::RangeInclusive<Duration> = Duration::from_secs(5)..=Duration::from_secs(120);

/// Slots of one instance. Numbers that are in no state are free.
#[derive(Debug)]
pub(crate) struct SlotPool<H> {
    host: Arc<H>,
    inner: Mutex<Inner>,
    target: usize,
    /// Wakes the filler.
    wanted: Notify,
    release_deadline: Duration,
    /// Time between SIGTERM and SIGKILL for processes of ours in a slot.
    grace: Duration,
    events: Events,
}

/// A slot between two owners.
#[derive(Debug)]
pub(crate) struct Retired {
    slot: SlotIndex,
    /// Reset and reusable; otherwise removed.
    whole: bool,
}

#[derive(Debug)]
struct Inner {
    states: HashMap<SlotIndex, SlotState>,
    ready: VecDeque<SlotIndex>,
    /// Free numbers that were used before; the oldest is used first, since a fresh number is cheaper for the
    /// kernel than one whose namespace just died.
    freed: VecDeque<SlotIndex>,
    /// Lowest number never used.
    next: u32,
    capacity: u32,
    closed: bool,
    /// Slots that could not be removed and have no owner who tries again.
    unowned: Vec<SlotIndex>,
    /// Why the last slot could not be made; nothing if it could.
    trouble: Option<String>,
}

impl Inner {
    fn take_free(&mut self) -> Option<SlotIndex> {
        while self.next <= self.capacity {
            let slot = SlotIndex::new(self.next)?;
            self.next += 1;
            if !self.states.contains_key(&slot) {
                return Some(slot);
            }
        }
        self.freed.pop_front()
    }

    /// Takes these numbers out of what is free or prepared, into another state.
    fn claim(&mut self, slots: &BTreeSet<SlotIndex>, state: &SlotState) {
        self.freed.retain(|slot| !slots.contains(slot));
        self.ready.retain(|slot| !slots.contains(slot));
        self.states.extend(slots.iter().map(|slot| (*slot, state.clone())));
    }

    fn free(&mut self, slot: SlotIndex) {
        if self.states.remove(&slot).is_some() && slot.get() < self.next {
            self.freed.push_back(slot);
        }
    }
}

impl<H: Host> SlotPool<H> {
    pub(crate) fn new(host: Arc<H>, config: &EngineConfig, events: Events) -> Arc<Self> {
        let inner = Inner {
            states: HashMap::new(),
            ready: VecDeque::new(),
            freed: VecDeque::new(),
            next: 1,
            capacity: config.layout.cidr.slot_capacity(),
            closed: false,
            unowned: Vec::new(),
            trouble: None,
        };
        Arc::new(Self {
            host,
            inner: Mutex::new(inner),
            target: config.slot_pool,
            wanted: Notify::new(),
            release_deadline: config.release_deadline,
            grace: config.reclaim.grace,
            events,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every change under the lock is one insertion or removal: a panic elsewhere leaves it whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the census saw, before the first slot is handed out.
    pub(crate) fn mark(&self, slot: SlotIndex, state: SlotState) {
        self.lock().states.insert(slot, state);
    }

    /// A slot for a sandbox: from the pool, or built now.
    pub(crate) async fn acquire(&self) -> Result<SlotIndex, EngineError> {
        let slot = {
            let mut inner = self.lock();
            if let Some(slot) = inner.ready.pop_front() {
                inner.states.insert(slot, SlotState::Assigned);
                self.wanted.notify_one();
                return Ok(slot);
            }
            match inner.take_free() {
                Some(slot) => {
                    inner.states.insert(slot, SlotState::Building);
                    slot
                }
                None => return Err(self.exhausted(&inner)),
            }
        };
        self.build(slot).await?;
        self.lock().states.insert(slot, SlotState::Assigned);
        self.wanted.notify_one();
        Ok(slot)
    }

    fn exhausted(&self, inner: &Inner) -> EngineError {
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        for state in inner.states.values() {
            *counts.entry(state.as_str()).or_default() += 1;
        }
        let counts: Vec<String> = counts.iter().map(|(s, n)| format!("{n} {s}")).collect();
        EngineError::Exhausted(format!(
            "no free network slot: the limit is {} ({}); delete a sandbox or give network.cidr a shorter prefix",
            inner.capacity,
            counts.join(", ")
        ))
    }

    async fn build(&self, slot: SlotIndex) -> Result<(), EngineError> {
        let made = on_host(&self.host, move |host| {
            Resource::of_slot(slot).iter().try_for_each(|part| host.ensure(part))
        })
        .await;
        self.lock().trouble = made.as_ref().err().map(|e| chain(e));
        if let Err(e) = made {
            let why = chain(&e);
            // What cannot be taken back is Stuck in the pool's own books.
            return Err(match self.release(slot).await {
                Ok(()) => EngineError::Failed(why),
                Err(left) => {
                    self.lock().unowned.push(slot);
                    EngineError::Failed(format!("{why}; and it could not be taken back: {left}"))
                }
            });
        }
        Ok(())
    }

    /// First half of giving a slot back: resets it for the next owner, or removes it. The caller has seen
    /// every process of the owner gone. The slot is nobody's until [`put`](Self::put), so that the owner can
    /// first strike it from its record: two records must never name one slot.
    pub(crate) async fn retire(&self, slot: SlotIndex) -> Result<Retired, String> {
        let keep = {
            let mut inner = self.lock();
            let keep = !inner.closed && inner.ready.len() < self.target;
            inner.states.insert(slot, if keep { SlotState::Resetting } else { SlotState::Releasing });
            keep
        };
        if keep {
            match on_host(&self.host, move |host| host.reset_slot(slot)).await {
                Ok(()) => return Ok(Retired { slot, whole: true }),
                Err(e) => tracing::info!(%slot, why = %chain(&e), "slot is not reusable, releasing it"),
            }
        }
        self.remove(slot).await?;
        Ok(Retired { slot, whole: false })
    }

    /// Second half of giving a slot back.
    pub(crate) fn put(&self, retired: &Retired) {
        let mut inner = self.lock();
        if retired.whole && !inner.closed {
            inner.states.insert(retired.slot, SlotState::Ready);
            inner.ready.push_back(retired.slot);
        } else if !retired.whole {
            inner.free(retired.slot);
        } else {
            // The pool was closed meanwhile; the next start finds the slot by its name.
            inner.states.insert(retired.slot, SlotState::Leaked);
        }
    }

    /// Of these numbers, claims those that are free for a release: from here on nobody else gets one of them.
    pub(crate) fn claim_free(&self, slots: &BTreeSet<SlotIndex>) -> BTreeSet<SlotIndex> {
        let mut inner = self.lock();
        let mut free = slots.clone();
        free.retain(|slot| !inner.states.contains_key(slot));
        inner.claim(&free, &SlotState::Leaked);
        free
    }

    /// Of these slots, claims those that wait prepared for a release: none of them is handed out any more.
    pub(crate) fn claim_ready(&self, slots: &BTreeSet<SlotIndex>) -> BTreeSet<SlotIndex> {
        let mut inner = self.lock();
        let mut ready = slots.clone();
        ready.retain(|slot| inner.states.get(slot) == Some(&SlotState::Ready));
        inner.claim(&ready, &SlotState::Releasing);
        drop(inner);
        self.wanted.notify_one();
        ready
    }

    /// All numbers that are not free.
    pub(crate) fn states(&self) -> BTreeMap<SlotIndex, SlotState> {
        self.lock().states.iter().map(|(slot, state)| (*slot, state.clone())).collect()
    }

    /// How many numbers are not free: each stands for a namespace, or soon will.
    pub(crate) fn there(&self) -> usize {
        self.lock().states.len()
    }

    /// The slots that somebody should try to release again.
    pub(crate) fn take_unowned(&self) -> Vec<SlotIndex> {
        std::mem::take(&mut self.lock().unowned)
    }

    /// Removes a slot from the host and frees its number.
    pub(crate) async fn release(&self, slot: SlotIndex) -> Result<(), String> {
        self.remove(slot).await?;
        self.lock().free(slot);
        Ok(())
    }

    /// Removes a slot from the host. What cannot be removed stays out of the pool.
    async fn remove(&self, slot: SlotIndex) -> Result<(), String> {
        let former = self.lock().states.insert(slot, SlotState::Releasing);
        let again = matches!(former, Some(SlotState::Stuck(_) | SlotState::Foreign(_)));
        let (within, grace) = (self.release_deadline, self.grace);
        let released = on_host(&self.host, move |host| {
            // Its owner is gone, so nobody in it is to be spared.
            let (spared, pace) = (BTreeSet::new(), || Pace::AtMost(1));
            let order = SlotRelease { within, grace, spared: &spared, pace: &pace };
            let mut released = Ok(());
            host.release_slots(&[slot], &order, &mut |_, result| released = result);
            released
        });
        released.await.map_err(|e| self.stays(slot, &e, again))
    }

    /// Notes a slot that did not go, and tells why.
    fn stays(&self, slot: SlotIndex, e: &HostError, again: bool) -> String {
        let why = chain(e);
        let state = match e.class {
            ErrorClass::Foreign => SlotState::Foreign(why.clone()),
            _ => SlotState::Stuck(why.clone()),
        };
        let event = Events::now(EventKind::SlotStuck).because(why.as_str());
        let event = event.with("slot", slot).with("state", state.as_str());
        let former = self.lock().states.insert(slot, state);
        if !again && !matches!(former, Some(SlotState::Stuck(_) | SlotState::Foreign(_))) {
            self.events.tell(event);
        }
        why
    }

    /// Removes slots from the host, at the pace that is told when asked, and frees the number of each that went.
    /// Blocks.
    pub(crate) fn release_many(
        &self,
        slots: &[SlotIndex],
        spared: &BTreeSet<String>,
        pace: &(dyn Fn() -> Pace + Sync),
        seen: &mut dyn FnMut(SlotIndex, Result<(), String>),
    ) {
        let order = SlotRelease { within: self.release_deadline, grace: self.grace, spared, pace };
        self.host.release_slots(slots, &order, &mut |slot, result| {
            let result = result.map_err(|e| self.stays(slot, &e, false));
            if result.is_ok() {
                self.lock().free(slot);
            }
            seen(slot, result);
        });
    }

    /// Keeps the pool filled until `stop`. One slot at a time: more threads only queue in the kernel.
    pub(crate) async fn fill(&self, stop: tokio_util::sync::CancellationToken) {
        let mut wait = *FILL_RETRY.start();
        while !stop.is_cancelled() {
            let slot = {
                let mut inner = self.lock();
                if inner.ready.len() < self.target && !inner.closed {
                    let slot = inner.take_free();
                    if let Some(slot) = slot {
                        inner.states.insert(slot, SlotState::Building);
                    }
                    slot
                } else {
                    None
                }
            };
            let Some(slot) = slot else {
                tokio::select! {
                    () = self.wanted.notified() => continue,
                    () = stop.cancelled() => return,
                }
            };
            match self.build(slot).await {
                Ok(()) => {
                    wait = *FILL_RETRY.start();
                    let mut inner = self.lock();
                    inner.states.insert(slot, SlotState::Ready);
                    inner.ready.push_back(slot);
                }
                Err(e) => {
                    if wait == *FILL_RETRY.start() {
                        tracing::warn!(%slot, "cannot prepare a slot: {e}");
                    }
                    tokio::select! {
                        () = tokio::time::sleep(wait) => wait = (wait * 2).min(*FILL_RETRY.end()),
                        () = stop.cancelled() => return,
                    }
                }
            }
        }
    }

    /// Stops keeping slots and releases the ready ones. Call after [`fill`](Self::fill) ended.
    pub(crate) async fn close(&self) -> Vec<String> {
        let ready: Vec<SlotIndex> = {
            let mut inner = self.lock();
            inner.closed = true;
            inner.ready.drain(..).collect()
        };
        let mut left = Vec::new();
        for slot in ready {
            left.extend(self.release(slot).await.err());
        }
        left
    }

    /// Why the last slot that was begun could not be made; nothing if it could.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.lock().trouble.clone()
    }

    /// Slots by state.
    pub(crate) fn counts(&self) -> BTreeMap<String, u32> {
        let mut counts = BTreeMap::new();
        let inner = self.lock();
        for state in inner.states.values() {
            *counts.entry(state.as_str().to_owned()).or_default() += 1;
        }
        let used = u32::try_from(inner.states.len()).unwrap_or(u32::MAX);
        counts.insert("free".into(), inner.capacity.saturating_sub(used));
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(numbers: &[u32]) -> BTreeSet<SlotIndex> {
        numbers.iter().filter_map(|n| SlotIndex::new(*n)).collect()
    }

    fn inner(capacity: u32) -> Inner {
        Inner {
            states: HashMap::new(),
            ready: VecDeque::new(),
            freed: VecDeque::new(),
            next: 1,
            capacity,
            closed: false,
            unowned: Vec::new(),
            trouble: None,
        }
    }

    fn all_free(inner: &mut Inner) -> Vec<u32> {
        std::iter::from_fn(|| inner.take_free()).map(SlotIndex::get).collect()
    }

    #[test]
    fn a_claimed_number_is_handed_out_once_it_is_free_again_and_only_once() {
        // Used before, never used, and prepared.
        let mut pool = inner(4);
        for slot in [pool.take_free(), pool.take_free()].into_iter().flatten() {
            pool.states.insert(slot, SlotState::Assigned);
        }
        pool.free(SlotIndex::new(1).unwrap());
        pool.states.insert(SlotIndex::new(2).unwrap(), SlotState::Ready);
        pool.ready.push_back(SlotIndex::new(2).unwrap());
        let claimed = slots(&[1, 2, 4]);
        pool.claim(&claimed, &SlotState::Leaked);
        assert!(pool.ready.is_empty());
        assert_eq!(all_free(&mut pool), [3]);
        for slot in claimed {
            pool.free(slot);
        }
        assert_eq!(all_free(&mut pool), [1, 2, 4]);
        assert_eq!(all_free(&mut pool), [0; 0]);
    }
}
