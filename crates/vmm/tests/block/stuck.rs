//! Threads that are really stuck in the kernel: calls end for those who wait, what the kernel still has is kept and counted,
//! nobody else is held up, and all is given back when the kernel comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use hearth_vmm::block::{Backend, BlockError, FileBackend, Limit, Pool};

use crate::fuse::Stuck;
use crate::served::LONG;

const MIB: u64 = 1 << 20;

/// Bytes that tell when they are freed.
struct Told(Vec<u8>, Arc<AtomicBool>);

impl AsRef<[u8]> for Told {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_thread_stuck_in_the_kernel_is_counted_and_what_it_has_is_kept() {
    const NAME: &str = "a_thread_stuck_in_the_kernel_is_counted_and_what_it_has_is_kept";
    let mut mount = match Stuck::mount(MIB) {
        Ok(mount) => mount,
        Err(why) => return hearth_testkit::skip(NAME, &why),
    };
    let pool = Pool::new("stuck disk", 4);
    let stuck = FileBackend::open(&mount.file(), false, pool.clone()).expect("open");
    let file = tempfile::tempfile().expect("file");
    file.set_len(MIB).expect("length");
    let other = FileBackend::new(file, "other disk", false, Pool::new("other disk", 2)).expect("open");
    let long = Limit::within(LONG);

    let (freed, held) = (Arc::new(AtomicBool::new(false)), Arc::new(()));
    let data = Bytes::from_owner(Told(vec![7; 4096], freed.clone()));
    let deadline = Duration::from_millis(300);
    let limit = Limit::within(deadline).holding(held.clone());
    let begun = Instant::now();
    let (write, read, ()) = tokio::join!(
        stuck.write_at(0, data, &limit),
        stuck.read_at(512 << 10, 4096, BytesMut::new(), &limit),
        async {
            // Both are in the kernel, which has passed them on.
            while mount.waiting() < 2 || pool.running() < 2 {
                assert!(begun.elapsed() < LONG, "{} requests came", mount.waiting());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // Others are served meanwhile.
            other.write_at(0, Bytes::from_static(b"well"), &long).await.expect("write");
            assert_eq!(&other.read_at(0, 4, BytesMut::new(), &long).await.expect("read")[..], b"well");
            other.flush(&long).await.expect("flush");
        }
    );
    assert!(matches!(write, Err(BlockError::Deadline)) && matches!(read, Err(BlockError::Deadline)));
    hearth_testkit::report(&format!(
        "with {} ms to go, requests stuck in the kernel ended after {} ms",
        deadline.as_millis(),
        begun.elapsed().as_millis()
    ));
    drop(limit);
    assert_eq!(stuck.close(Duration::from_millis(100)).await, 2, "both are counted");
    assert!(!freed.load(Ordering::SeqCst), "a buffer was freed that the kernel has");
    assert_eq!(Arc::strong_count(&held), 3, "what belongs to the requests is kept");
    assert_eq!(other.close(LONG).await, 0);

    mount.let_go();
    assert_eq!(stuck.close(LONG).await, 0);
    assert!(freed.load(Ordering::SeqCst));
    assert_eq!((Arc::strong_count(&held), pool.running()), (1, 0));
}
