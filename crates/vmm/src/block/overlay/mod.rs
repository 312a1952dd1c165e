//! A disk above a read-only base: what is written goes to a file of its own, and a map says per block of 4 KiB whether
//! its bytes are in the base, in the file, or zeroes.
//!
//! Data is written to its place first, and only a flush makes the map say so: data synced, then the changed map pages,
//! each over the older of its two copies, then synced again. So after a crash every block is as the last flush left it or
//! as something written since, and nothing else. Discards and zeroes change the map; their room is given back besides.
//! Writers of one block take turns; reads wait for nobody.

pub mod diff;
mod flush;
mod format;
mod map;
mod open;
mod ranges;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::{BoxFuture, try_join_all};
use hearth_core::block::RemoteStats;

use super::backend::{
    Answer, Backend, BlockError, Extent, ExtentKind, Limit, Zeroes, check_range, push_extent,
};
pub use format::BLOCK;
use format::{Header, State};
use map::Map;
pub use open::OverlayError;
use ranges::{Locked, Ranges};

/// The disk. Made by [`Overlay::create`] and [`Overlay::open`], or above any backends by [`Overlay::format`] and
/// [`Overlay::load`].
pub struct Overlay {
    cow: Arc<dyn Backend>,
    base: Arc<dyn Backend>,
    header: Header,
    /// Held for moments only, never across an await.
    map: Arc<Mutex<Map>>,
    ranges: Ranges,
    /// One flush at a time.
    flushing: Arc<tokio::sync::Mutex<()>>,
    /// Flushes that have begun, and the last of them that made all durable.
    begun: AtomicU64,
    flushed: AtomicU64,
}

/// Blocks that one call may change, until its last system call has returned.
struct Changing {
    map: Arc<Mutex<Map>>,
    /// The map says all of it.
    noted: AtomicBool,
    _locked: Locked,
}

impl Drop for Changing {
    fn drop(&mut self) {
        // A write that was given up may have reached the file, and be read: then the next flush is to cover it.
        if !self.noted.load(Ordering::SeqCst) {
            lock(&self.map).touch();
        }
    }
}

fn lock(map: &Mutex<Map>) -> MutexGuard<'_, Map> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Overlay {
    /// Blocks of [`BLOCK`] bytes that differ from the base: those with data, and those that were made zero.
    #[must_use]
    pub fn changed(&self) -> (u64, u64) {
        self.map().count()
    }

    fn map(&self) -> MutexGuard<'_, Map> {
        lock(&self.map)
    }

    fn place(&self, at: u64) -> u64 {
        self.header.data_at() + at
    }

    fn check(&self, at: u64, len: u64, write: bool) -> Result<(), BlockError> {
        if write && self.cow.read_only() {
            return Err(BlockError::ReadOnly);
        }
        check_range(at, len, self.header.size)
    }

    /// Runs of one state that make up a range, as byte ranges.
    fn runs(&self, at: u64, end: u64, most: usize) -> Vec<(State, Range<u64>)> {
        let map = self.map();
        let (mut runs, mut here) = (vec![], at);
        while here < end && runs.len() < most {
            let (state, stop) = map.run(here / BLOCK..end.div_ceil(BLOCK));
            let stop = (stop * BLOCK).min(end);
            runs.push((state, here..stop));
            here = stop;
        }
        runs
    }

    async fn read(
        &self,
        at: u64,
        len: usize,
        mut buf: BytesMut,
        limit: &Limit,
    ) -> Result<BytesMut, BlockError> {
        buf.reserve(len);
        let end = at + len as u64;
        let (state, stop) = match len {
            0 => return Ok(buf),
            _ => self.map().run(at / BLOCK..end.div_ceil(BLOCK)),
        };
        if stop * BLOCK >= end {
            return self.read_run(state, at, len, buf, limit).await;
        }
        // Each run is read into its own part of the buffer, all at once.
        let mut rest = buf.split_off(buf.len());
        let runs = self.runs(at, end, usize::MAX);
        let mut reads = Vec::with_capacity(runs.len());
        for (state, run) in runs {
            let len = (run.end - run.start) as usize;
            let after = rest.split_off(len.min(rest.capacity()));
            reads.push(self.read_run(state, run.start, len, std::mem::replace(&mut rest, after), limit));
        }
        for part in try_join_all(reads).await? {
            buf.unsplit(part);
        }
        Ok(buf)
    }

    async fn read_run(
        &self,
        state: State,
        at: u64,
        len: usize,
        mut buf: BytesMut,
        limit: &Limit,
    ) -> Result<BytesMut, BlockError> {
        match state {
            State::Data => return self.cow.read_at(self.place(at), len, buf, limit).await,
            State::Zero => buf.resize(buf.len() + len, 0),
            State::Base => {
                let in_base = (self.header.base_size.saturating_sub(at)).min(len as u64) as usize;
                let want = buf.len() + len;
                if in_base > 0 {
                    buf = self.base.read_at(at, in_base, buf, limit).await?;
                }
                buf.resize(want, 0);
            }
        }
        Ok(buf)
    }

    /// Locks the blocks that a range touches, then does `change`, whose limit keeps them locked while the kernel works.
    async fn change<'a, F>(
        &'a self,
        at: u64,
        end: u64,
        limit: &Limit,
        change: impl FnOnce(Limit) -> F,
    ) -> Result<(), BlockError>
    where
        F: Future<Output = Result<(), BlockError>> + 'a,
    {
        let locked = limit.bound(self.ranges.lock(at / BLOCK..end.div_ceil(BLOCK))).await?;
        let changing =
            Arc::new(Changing { map: self.map.clone(), noted: AtomicBool::new(false), _locked: locked });
        let changed = change(limit.holding(changing.clone())).await;
        changing.noted.store(changed.is_ok(), Ordering::SeqCst);
        changed
    }

    /// Writes blocks that are locked. A block that is not in the file yet is written whole, with what it had before
    /// around the new bytes.
    async fn write_locked(&self, at: u64, data: Bytes, limit: &Limit) -> Result<(), BlockError> {
        let end = at + data.len() as u64;
        let blocks = at / BLOCK..end.div_ceil(BLOCK);
        let whole_end = (blocks.end * BLOCK).min(self.header.size);
        let (head, tail) = {
            let map = self.map();
            let absent = |block| map.state(block) != State::Data;
            (
                !at.is_multiple_of(BLOCK) && absent(blocks.start),
                // A block that begins with old bytes may end with them.
                end != whole_end && absent(blocks.end - 1),
            )
        };
        if head || tail {
            let from = if head { blocks.start * BLOCK } else { at };
            let to = if tail { whole_end } else { end };
            let mut whole = BytesMut::with_capacity((to - from) as usize);
            whole = self.read(from, (at - from) as usize, whole, limit).await?;
            whole.extend_from_slice(&data);
            whole = self.read(end, (to - end) as usize, whole, limit).await?;
            self.cow.write_at(self.place(from), whole.freeze(), limit).await?;
        } else {
            self.cow.write_at(self.place(at), data, limit).await?;
        }
        self.map().set(blocks, State::Data);
        Ok(())
    }

    /// Makes whole blocks that are locked zeroes, and gives back their room.
    async fn zero_locked(&self, blocks: Range<u64>, limit: &Limit) {
        let runs = self.runs(blocks.start * BLOCK, blocks.end * BLOCK, usize::MAX);
        // From here on nobody reads the old bytes. What a crash brings back is either the old map with the old bytes
        // or with a hole, and both are allowed until a flush.
        self.map().set(blocks, State::Zero);
        for (_, run) in runs.into_iter().filter(|(state, _)| *state == State::Data) {
            let punched = self.cow.discard(self.place(run.start), run.end - run.start, limit).await;
            if let Err(error) = punched {
                tracing::debug!(%error, "the room of discarded blocks is not given back");
                // The rest would end alike, and the map has it already.
                return;
            }
        }
    }

    /// The whole blocks within a range; the last block is whole where the disk ends.
    fn whole_blocks(&self, at: u64, end: u64) -> Range<u64> {
        let last = if end == self.header.size { end.div_ceil(BLOCK) } else { end / BLOCK };
        let first = at.div_ceil(BLOCK);
        first..last.max(first)
    }

    async fn zero(&self, at: u64, end: u64, how: Zeroes, limit: &Limit) -> Result<(), BlockError> {
        let whole = self.whole_blocks(at, end);
        let edges = if whole.is_empty() {
            [at..end, end..end]
        } else {
            [at..whole.start * BLOCK, (whole.end * BLOCK).min(end)..end]
        };
        if !whole.is_empty() {
            if how.keep_allocated {
                let range = whole.start * BLOCK..(whole.end * BLOCK);
                self.cow.write_zeroes(self.place(range.start), range.end - range.start, how, limit).await?;
                self.map().set(whole, State::Data);
            } else {
                self.zero_locked(whole, limit).await;
            }
        }
        for edge in edges.into_iter().filter(|e| !e.is_empty()) {
            for (state, run) in self.runs(edge.start, edge.end, usize::MAX) {
                if state != State::Zero || how.keep_allocated {
                    let zeroes = Bytes::from(vec![0; (run.end - run.start) as usize]);
                    self.write_locked(run.start, zeroes, limit).await?;
                }
            }
        }
        Ok(())
    }

    async fn map_of(&self, at: u64, len: u64, most: usize, limit: &Limit) -> Result<Vec<Extent>, BlockError> {
        let most = most.max(1);
        let mut found = vec![];
        for (state, run) in self.runs(at, at + len, most) {
            if found.len() >= most {
                break;
            }
            match state {
                State::Data => push_extent(&mut found, run.end - run.start, ExtentKind::Data),
                State::Zero => push_extent(&mut found, run.end - run.start, ExtentKind::Hole),
                State::Base => {
                    let in_base = self.header.base_size.clamp(run.start, run.end) - run.start;
                    if in_base > 0 {
                        let below = self.base.extents(run.start, in_base, most - found.len(), limit).await?;
                        let mapped: u64 = below.iter().map(|e| e.len).sum();
                        below.into_iter().for_each(|e| push_extent(&mut found, e.len, e.kind));
                        if mapped < in_base {
                            break;
                        }
                    }
                    push_extent(&mut found, run.end - run.start - in_base, ExtentKind::Hole);
                }
            }
        }
        found.truncate(most);
        Ok(found)
    }
}

impl Backend for Overlay {
    fn size(&self) -> u64 {
        self.header.size
    }

    fn read_only(&self) -> bool {
        self.cow.read_only()
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, buf: BytesMut, limit: &'a Limit) -> Answer<'a, BytesMut> {
        Box::pin(async move {
            self.check(at, len as u64, false)?;
            self.read(at, len, buf, limit).await
        })
    }

    fn write_at<'a>(&'a self, at: u64, data: Bytes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            let len = data.len() as u64;
            self.check(at, len, true)?;
            if len == 0 {
                return Ok(());
            }
            self.change(at, at + len, limit, |limit| async move { self.write_locked(at, data, &limit).await })
                .await
        })
    }

    fn flush<'a>(&'a self, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(self.sync(limit))
    }

    /// Whole blocks read as zeroes afterwards; what is less than a block stays as it is.
    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            self.check(at, len, true)?;
            let whole = self.whole_blocks(at, at + len);
            if whole.is_empty() {
                return Ok(());
            }
            let blocks = whole.clone();
            let change = |limit| async move {
                self.zero_locked(blocks, &limit).await;
                Ok(())
            };
            self.change(whole.start * BLOCK, whole.end * BLOCK, limit, change).await
        })
    }

    fn write_zeroes<'a>(&'a self, at: u64, len: u64, how: Zeroes, limit: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            self.check(at, len, true)?;
            if len == 0 {
                return Ok(());
            }
            self.change(
                at,
                at + len,
                limit,
                |limit| async move { self.zero(at, at + len, how, &limit).await },
            )
            .await
        })
    }

    fn extents<'a>(&'a self, at: u64, len: u64, most: usize, limit: &'a Limit) -> Answer<'a, Vec<Extent>> {
        Box::pin(async move {
            self.check(at, len, false)?;
            self.map_of(at, len, most, limit).await
        })
    }

    /// Does not flush: whether that is wanted depends on why it is closed.
    fn close(&self, within: Duration) -> BoxFuture<'_, usize> {
        Box::pin(async move {
            let (cow, base) = tokio::join!(self.cow.close(within), self.base.close(within));
            cow + base
        })
    }

    fn remote_stats(&self) -> Option<RemoteStats> {
        self.base.remote_stats()
    }
}
