//! Disks in memory for the overlay: one that loses what was not synced, as a power cut does, and a base that is a pattern.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use hearth_vmm::block::{Answer, Backend, BlockError, Extent, ExtentKind, Limit, Zeroes};

/// What reaches a disk as a whole or not at all.
const SECTOR: u64 = 512;

type Sectors = HashMap<u64, [u8; SECTOR as usize]>;

/// A sparse disk whose writes are in doubt until a flush.
pub struct FaultyDisk {
    size: u64,
    inner: Mutex<Inner>,
    /// The flush of this number from now on fails, and makes nothing durable; 0: none does.
    pub fail_flush: AtomicU8,
}

#[derive(Default)]
struct Inner {
    durable: Sectors,
    now: Sectors,
    /// Since the last flush, in order, each within one sector.
    pending: Vec<(u64, Bytes)>,
}

impl FaultyDisk {
    /// All zeroes.
    pub fn new(size: u64) -> Self {
        Self { size, inner: Mutex::default(), fail_flush: AtomicU8::new(0) }
    }

    /// The disk after a crash: of the writes in doubt those that `keep` picks, in order.
    pub fn crash(&self, mut keep: impl FnMut() -> bool) -> Self {
        let mut inner = self.inner.lock().expect("not poisoned");
        let mut after = std::mem::take(&mut inner.durable);
        for (at, bytes) in &inner.pending {
            if keep() {
                put(&mut after, *at, bytes);
            }
        }
        let inner = Inner { now: after.clone(), durable: after, pending: vec![] };
        Self { size: self.size, inner: Mutex::new(inner), fail_flush: AtomicU8::new(0) }
    }

    fn write(&self, at: u64, data: &Bytes) {
        let mut inner = self.inner.lock().expect("not poisoned");
        let mut done = 0;
        while done < data.len() {
            let here = at + done as u64;
            let len = ((SECTOR - here % SECTOR) as usize).min(data.len() - done);
            let part = data.slice(done..done + len);
            put(&mut inner.now, here, &part);
            inner.pending.push((here, part));
            done += len;
        }
    }
}

fn put(sectors: &mut Sectors, at: u64, bytes: &[u8]) {
    let from = (at % SECTOR) as usize;
    sectors.entry(at / SECTOR).or_insert([0; SECTOR as usize])[from..from + bytes.len()]
        .copy_from_slice(bytes);
}

fn get(sectors: &Sectors, at: u64, len: u64, buf: &mut BytesMut) {
    let (mut here, end) = (at, at + len);
    while here < end {
        let stop = (here / SECTOR * SECTOR + SECTOR).min(end);
        let (from, now) = ((here % SECTOR) as usize, (stop - here) as usize);
        match sectors.get(&(here / SECTOR)) {
            Some(sector) => buf.extend_from_slice(&sector[from..from + now]),
            None => buf.resize(buf.len() + now, 0),
        }
        here = stop;
    }
}

/// Lets others run, and the caller drop the call, as a real disk does.
async fn wait() {
    tokio::task::yield_now().await;
}

impl Backend for FaultyDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, mut buf: BytesMut, _: &'a Limit) -> Answer<'a, BytesMut> {
        Box::pin(async move {
            wait().await;
            let inner = self.inner.lock().expect("not poisoned");
            get(&inner.now, at, len as u64, &mut buf);
            Ok(buf)
        })
    }

    fn write_at<'a>(&'a self, at: u64, data: Bytes, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            assert!(at + data.len() as u64 <= self.size, "a write outside the file");
            wait().await;
            // Half of it, so that a call that is dropped here leaves half a write.
            let half = data.len() / 2;
            self.write(at, &data.slice(..half));
            wait().await;
            self.write(at + half as u64, &data.slice(half..));
            Ok(())
        })
    }

    fn flush<'a>(&'a self, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async move {
            wait().await;
            let left = self.fail_flush.load(Ordering::Relaxed);
            self.fail_flush.store(left.saturating_sub(1), Ordering::Relaxed);
            if left == 1 {
                return Err(BlockError::Deadline);
            }
            let mut inner = self.inner.lock().expect("not poisoned");
            inner.pending.clear();
            inner.durable = inner.now.clone();
            Ok(())
        })
    }

    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()> {
        self.write_zeroes(at, len, Zeroes::default(), limit)
    }

    fn write_zeroes<'a>(&'a self, at: u64, len: u64, _: Zeroes, limit: &'a Limit) -> Answer<'a, ()> {
        self.write_at(at, vec![0; len as usize].into(), limit)
    }

    fn extents<'a>(&'a self, _: u64, len: u64, _: usize, _: &'a Limit) -> Answer<'a, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { len, kind: ExtentKind::Data }]) })
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, usize> {
        Box::pin(async { 0 })
    }
}

/// A read-only disk of that many bytes, each made of its position.
pub struct Pattern(pub u64);

impl Pattern {
    /// The byte at a position; zero past the end.
    pub fn byte(&self, at: u64) -> u8 {
        if at < self.0 { (at / 512 * 7 + at % 251) as u8 | 1 } else { 0 }
    }
}

impl Backend for Pattern {
    fn size(&self) -> u64 {
        self.0
    }

    fn read_only(&self) -> bool {
        true
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, mut buf: BytesMut, _: &'a Limit) -> Answer<'a, BytesMut> {
        Box::pin(async move {
            assert!(at + len as u64 <= self.0, "a read past the base");
            wait().await;
            buf.extend((at..at + len as u64).map(|at| self.byte(at)));
            Ok(buf)
        })
    }

    fn write_at<'a>(&'a self, _: u64, _: Bytes, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async { Err(BlockError::ReadOnly) })
    }

    fn flush<'a>(&'a self, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async { Err(BlockError::ReadOnly) })
    }

    fn discard<'a>(&'a self, _: u64, _: u64, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async { Err(BlockError::ReadOnly) })
    }

    fn write_zeroes<'a>(&'a self, _: u64, _: u64, _: Zeroes, _: &'a Limit) -> Answer<'a, ()> {
        Box::pin(async { Err(BlockError::ReadOnly) })
    }

    fn extents<'a>(&'a self, _: u64, len: u64, _: usize, _: &'a Limit) -> Answer<'a, Vec<Extent>> {
        Box::pin(async move { Ok(vec![Extent { len, kind: ExtentKind::Data }]) })
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, usize> {
        Box::pin(async { 0 })
    }
}
