//! Many lives over few indexes: none is handed out before it is proven quiet, and nothing is left.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use hearth_core::nbd_pool::{NbdPool, Proof};
use hearth_host::nbd::{self, Outcome, Server};

use crate::server::{Manner, TestServer};
use crate::{SOON, assert_quiet, nbd_or_skip, order};

const FIRST: u32 = 8;
const INDEXES: u32 = 8;
const TAKERS: u32 = 16;
const LIVES: u32 = 500;
const SIZE: u64 = 1 << 20;

/// The pool as a node would have it, and what was counted.
struct Bench {
    pool: Mutex<NbdPool>,
    changed: Condvar,
    next: AtomicU32,
    quarantines: AtomicU32,
}

impl Bench {
    /// Waits for an index; one that is in quarantine is looked at meanwhile.
    fn take(&self) -> u32 {
        let mut pool = self.pool.lock().expect("pool");
        loop {
            if let Some(index) = pool.suspect() {
                let proof = proof(index);
                assert!(pool.looked(index, proof), "it was named last");
            }
            match pool.acquire() {
                Ok(index) => return index,
                Err(_) => pool = self.changed.wait_timeout(pool, Duration::from_millis(20)).expect("pool").0,
            }
        }
    }

    fn give(&self, index: u32, proof: Proof) {
        if proof == Proof::Unproven {
            self.quarantines.fetch_add(1, Ordering::Relaxed);
        }
        assert!(self.pool.lock().expect("pool").give_back(index, proof), "{index} was not out");
        self.changed.notify_one();
    }

    /// One life. Every third leaves something behind for a while.
    fn live(&self, life: u32) {
        let index = self.take();
        assert_quiet(FIRST + index);
        let manner = if life % 5 == 4 { Manner::Mute } else { Manner::Good };
        let (_server, socket) = TestServer::new(SIZE, manner);
        let socket = OwnedFd::from(socket);
        let kept = [socket.try_clone().expect("clone")];
        let order = nbd::Order { size: SIZE, ..order(FIRST + index) };
        let device = match nbd::connect(&order, vec![socket], SOON) {
            Outcome::Done(device) => device,
            other => panic!("life {life}: {other:?}"),
        };
        let path = format!("/dev/nbd{}", device.index);
        let holder = (manner == Manner::Good && life.is_multiple_of(3)).then(|| {
            let file = File::open(&path).expect("open");
            file.read_exact_at(&mut [0; 4096], 0).expect("read");
            file
        });
        // With a mute server the opener itself hangs, with its request in flight, until the release.
        let late = (manner == Manner::Mute).then(|| std::thread::spawn(move || drop(File::open(path))));
        if late.is_some() {
            crate::until("the opener's request is in flight", || {
                nbd::look(device.index).expect("look").in_flight > 0
            });
        }
        let within = if holder.is_some() { Duration::from_millis(30) } else { SOON };
        let released = nbd::release(&device, &Server::Shut(&kept), within);
        assert!(released.is_ok() || holder.is_some(), "life {life}: {released:?}");
        // While it is held the index shows a task: never proven.
        assert!(holder.is_none() || proof(index) == Proof::Unproven, "life {life}");
        self.give(index, if released.is_ok() { Proof::Quiet } else { Proof::Unproven });
        drop(holder);
        if let Some(late) = late {
            late.join().expect("the opener");
        }
    }
}

fn proof(index: u32) -> Proof {
    match nbd::look(FIRST + index) {
        Ok(seen) if seen.unquiet().is_none() => Proof::Quiet,
        _ => Proof::Unproven,
    }
}

#[test]
fn no_index_is_handed_out_early_and_none_is_left_connected() {
    if !nbd_or_skip("no_index_is_handed_out_early_and_none_is_left_connected") {
        return;
    }
    let bench = Bench {
        pool: Mutex::new(NbdPool::new(INDEXES, proof)),
        changed: Condvar::new(),
        next: AtomicU32::new(0),
        quarantines: AtomicU32::new(0),
    };
    std::thread::scope(|scope| {
        for _ in 0..TAKERS {
            scope.spawn(|| {
                loop {
                    let life = bench.next.fetch_add(1, Ordering::Relaxed);
                    if life >= LIVES {
                        break;
                    }
                    bench.live(life);
                }
            });
        }
    });
    assert!(bench.quarantines.load(Ordering::Relaxed) > 0, "nothing was ever quarantined");
    (FIRST..FIRST + INDEXES).for_each(assert_quiet);
    let mut pool = bench.pool.into_inner().unwrap();
    // What is in quarantine still is let go by a look at each.
    for _ in 0..INDEXES {
        if let Some(index) = pool.suspect() {
            assert!(pool.looked(index, proof(index)));
        }
    }
    assert_eq!((pool.counts().used, pool.counts().quarantined), (0, 0));
}
