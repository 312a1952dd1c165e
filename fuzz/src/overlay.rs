//! The overlay against a plain model: bytes, and per byte all values it may have after a crash. The same function is fed by
//! a fuzzer and by property tests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hearth_vmm::block::{Backend, ExtentKind, Limit, Overlay, Zeroes, diff};

use crate::fault::{FaultyDisk, Pattern};

/// Bytes of each of the two parts of the disk that are used: the begin, and around the border of two map pages.
const WINDOW: u64 = 10 * 4096;
/// The first byte of the second map page.
const BORDER: u64 = 16_256 * 4096;
/// The disk ends within the second part, and within a block.
const SIZE: u64 = BORDER + WINDOW / 2 - 700;
/// The base ends before it.
const BASE: u64 = BORDER + 6000;
/// Bytes that the model has.
const MODEL: u64 = 2 * WINDOW - 700;

/// What is done to the overlay. Positions and lengths are made to fit.
#[derive(Debug, Clone)]
pub enum Op {
    Read {
        at: u32,
        len: u32,
    },
    Write {
        at: u32,
        len: u32,
        byte: u8,
    },
    /// Two writes that meet, at the same time.
    Pair {
        at: u32,
        len: u32,
        second: u32,
        byte: u8,
    },
    /// A write that is given up after some polls.
    Dropped {
        at: u32,
        len: u32,
        byte: u8,
        polls: u8,
    },
    Discard {
        at: u32,
        len: u32,
    },
    Zero {
        at: u32,
        len: u32,
        keep: bool,
    },
    /// The data is synced first, then the map: one of them may fail.
    Flush {
        fails: u8,
    },
    /// A flush that is given up after some polls.
    DroppedFlush {
        polls: u8,
    },
    Crash {
        seed: u64,
    },
    /// Everything different from the base, applied to a fresh overlay, makes the same disk.
    Diff,
}

/// Reads operations out of bytes.
pub fn ops(mut data: &[u8]) -> Vec<Op> {
    fn take(data: &mut &[u8], n: usize) -> u32 {
        let (now, rest) = data.split_at(n.min(data.len()));
        *data = rest;
        now.iter().fold(0, |sum, b| sum << 8 | u32::from(*b))
    }
    let mut ops = vec![];
    while !data.is_empty() && ops.len() < 200 {
        let data = &mut data;
        let kind = take(data, 1);
        let (at, len) = (take(data, 3), take(data, 2));
        let (byte, polls) = ((len as u8).wrapping_mul(31) ^ at as u8, at as u8 % 12);
        ops.push(match kind % 12 {
            0 | 1 => Op::Write { at, len, byte },
            2 => Op::Pair { at, len, second: take(data, 2), byte },
            3 => Op::Dropped { at, len, byte, polls },
            4 => Op::Discard { at, len },
            5 => Op::Zero { at, len, keep: kind & 128 != 0 },
            6 | 7 => Op::Flush { fails: (kind >> 6).saturating_sub(1) as u8 },
            8 => Op::DroppedFlush { polls },
            9 | 10 => Op::Crash { seed: u64::from(at) << 16 | u64::from(len) },
            _ if kind & 224 == 224 => Op::Diff,
            _ => Op::Read { at, len },
        });
    }
    ops
}

struct Run {
    disk: Arc<FaultyDisk>,
    overlay: Overlay,
    /// As the disk should be, and as it was at each moment since the last flush, that one first.
    model: Vec<u8>,
    history: Vec<Vec<u8>>,
    limit: Limit,
}

/// Does all of them and compares.
///
/// # Panics
/// If the overlay differs from the model.
pub fn exercise(ops: &[Op]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
    runtime.block_on(async {
        let mut run = Run::new().await;
        for op in ops {
            run.step(op).await;
        }
        run.compare(0, MODEL).await;
    });
}

/// A range within one of the two parts, and where it is on the disk.
fn fit(at: u32, len: u32) -> (u64, u64, u64) {
    let at = u64::from(at) % MODEL;
    let end = if at < WINDOW { WINDOW } else { MODEL };
    let len = (u64::from(len) % (3 * 4096)).min(end - at);
    (at, len, on_disk(at))
}

fn on_disk(at: u64) -> u64 {
    if at < WINDOW { at } else { BORDER - WINDOW / 2 + (at - WINDOW) }
}

impl Run {
    async fn new() -> Self {
        let limit = Limit::within(Duration::from_secs(3600));
        let disk = Arc::new(FaultyDisk::new(Overlay::file_size(SIZE)));
        Overlay::format(&*disk, &Pattern(BASE), SIZE, &limit).await.expect("format");
        let overlay = Overlay::load(disk.clone(), Arc::new(Pattern(BASE)), &limit).await.expect("load");
        let model: Vec<u8> = (0..MODEL).map(|at| Pattern(BASE).byte(on_disk(at))).collect();
        Self { disk, overlay, history: vec![model.clone()], model, limit }
    }

    async fn read(&self, at: u64, len: u64) -> BytesMut {
        let buf = BytesMut::with_capacity(len as usize);
        self.overlay.read_at(on_disk(at), len as usize, buf, &self.limit).await.expect("read")
    }

    async fn compare(&self, at: u64, len: u64) {
        for (at, end) in [(at, (at + len).min(WINDOW)), (at.max(WINDOW), at + len)] {
            if at < end {
                let seen = self.read(at, end - at).await;
                let expected = &self.model[at as usize..end as usize];
                let differs = seen.iter().zip(expected).position(|(a, b)| a != b);
                assert_eq!((differs, seen.len()), (None, expected.len()), "from {at}");
            }
        }
    }

    /// The bytes of a range are as they should be, from now on.
    fn set(&mut self, at: u64, bytes: &[u8]) {
        self.model[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        self.history.push(self.model.clone());
    }

    /// A call was given up, so each byte is the old or the new one.
    async fn accept(&mut self, at: u64, new: &[u8]) {
        let seen = self.read(at, new.len() as u64).await;
        for (i, byte) in seen.iter().enumerate() {
            assert!(
                *byte == new[i] || *byte == self.model[at as usize + i],
                "byte {} is {byte}",
                at as usize + i
            );
        }
        // What was written in part may still come to light where the map does not show it yet.
        self.set(at, new);
        self.set(at, &seen);
    }

    async fn step(&mut self, op: &Op) {
        let limit = self.limit.clone();
        match *op {
            Op::Read { at, len } => {
                let (at, len, _) = fit(at, len);
                self.compare(at, len).await;
            }
            Op::Write { at, len, byte } => {
                let (at, _, place) = fit(at, len);
                let data = bytes_of(at, fit(at as u32, len).1, byte);
                self.overlay.write_at(place, data.clone(), &limit).await.expect("write");
                self.set(at, &data);
            }
            Op::Pair { at, len, second, byte } => {
                let (at, len, place) = fit(at, len);
                let data = bytes_of(at, len, byte);
                let middle = (u64::from(second) % (len + 1)) as usize;
                let (first, second) = (data.slice(..middle), data.slice(middle..));
                let both = futures::join!(
                    self.overlay.write_at(place, first, &limit),
                    self.overlay.write_at(place + middle as u64, second, &limit),
                );
                both.0.and(both.1).expect("two writes");
                self.set(at, &data);
            }
            Op::Dropped { at, len, byte, polls } => {
                let (at, len, place) = fit(at, len);
                let data = bytes_of(at, len, byte);
                give_up(self.overlay.write_at(place, data.clone(), &limit), polls).await;
                self.accept(at, &data).await;
            }
            Op::Discard { at, len } => {
                let (at, len, place) = fit(at, len);
                self.overlay.discard(place, len, &limit).await.expect("discard");
                // Whole blocks are zeroes now, the rest is as it was.
                let end = if place + len == SIZE { SIZE.next_multiple_of(4096) } else { place + len };
                let (first, last) = (place.next_multiple_of(4096), end / 4096 * 4096);
                if first < last {
                    let last = last.min(SIZE);
                    self.set(at + (first - place), &vec![0; (last - first) as usize]);
                }
            }
            Op::Zero { at, len, keep } => {
                let (at, len, place) = fit(at, len);
                let how = Zeroes { keep_allocated: keep, fast: false };
                self.overlay.write_zeroes(place, len, how, &limit).await.expect("zero");
                self.set(at, &vec![0; len as usize]);
                self.check_extents(place, len, keep).await;
            }
            Op::Flush { fails } => {
                self.disk.fail_flush.store(fails, Ordering::Relaxed);
                if self.overlay.flush(&limit).await.is_ok() {
                    self.history = vec![self.model.clone()];
                }
                self.disk.fail_flush.store(0, Ordering::Relaxed);
            }
            Op::DroppedFlush { polls } => {
                if give_up(self.overlay.flush(&limit), polls).await {
                    self.history = vec![self.model.clone()];
                }
            }
            Op::Crash { seed } => self.crash(seed).await,
            Op::Diff => self.diff().await,
        }
    }

    /// What was made zeroes is not said to be data, and what is to be kept is not said to be a hole.
    async fn check_extents(&self, place: u64, len: u64, keep: bool) {
        let found = self.overlay.extents(place, len, 1000, &self.limit).await.expect("extents");
        assert_eq!(found.iter().map(|e| e.len).sum::<u64>(), len);
        let hole = found.iter().any(|e| e.kind == ExtentKind::Hole);
        assert!(!(keep && hole), "a hole in what was to be allocated");
        assert!(keep || len < 2 * 4096 || hole, "no hole in zeroes");
    }

    async fn crash(&mut self, seed: u64) {
        let mut state = seed | 1;
        // Some crashes keep almost nothing or almost all, which random bits alone would not.
        let bias = (seed % 5) as u32 * 64;
        let disk = self.disk.crash(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 32) as u32 % 256) < bias
        });
        self.disk = Arc::new(disk);
        self.overlay =
            Overlay::load(self.disk.clone(), Arc::new(Pattern(BASE)), &self.limit).await.expect("load again");
        let mut seen = self.read(0, WINDOW).await;
        seen.extend_from_slice(&self.read(WINDOW, MODEL - WINDOW).await);
        for at in (0..MODEL as usize).step_by(512) {
            let part = at..(at + 512).min(seen.len());
            let whole = |moment: &Vec<u8>| moment[part.clone()] == seen[part.clone()];
            let each = |at: usize| self.history.iter().any(|moment| moment[at] == seen[at]);
            if !self.history.iter().rev().any(whole) {
                let strange = part.clone().find(|at| !each(*at));
                assert_eq!(strange, None, "that byte never was so since the last flush");
            }
        }
        self.model = seen.to_vec();
        // What was seen after the crash is on the disk.
        self.history = vec![self.model.clone()];
    }

    async fn diff(&mut self) {
        let mut stream = vec![];
        diff::export(&self.overlay, &mut stream, &self.limit).await.expect("export");
        let mut other = Self::new().await;
        let mut from = &stream[..];
        diff::apply(&mut from, &other.overlay, &self.limit).await.expect("apply");
        assert!(from.is_empty(), "bytes after the end of the diff");
        other.model.clone_from(&self.model);
        other.compare(0, MODEL).await;
    }
}

/// Polls a call so many times, then drops it. Whether it had ended, and well.
async fn give_up<E>(call: impl Future<Output = Result<(), E>>, polls: u8) -> bool {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        if let Poll::Ready(done) = futures::poll!(&mut call) {
            return done.is_ok();
        }
    }
    false
}

fn bytes_of(at: u64, len: u64, byte: u8) -> Bytes {
    (at..at + len).map(|at| byte.wrapping_add((at / 512) as u8)).collect()
}
