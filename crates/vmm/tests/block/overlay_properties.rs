//! The overlay against its model, with random operations and crashes, and what the model does not cover.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use hearth_vmm::block::{
    Answer, Backend, BlockError, Extent, FileBackend, Limit, Overlay, OverlayError, Pool, Zeroes,
};
use proptest::prelude::*;

use crate::fault::Pattern;
use crate::overlay::{Op, exercise};

fn op() -> impl Strategy<Value = Op> {
    let range = || (any::<u32>(), prop_oneof![0..600_u32, 0..12_288_u32, Just(4096), Just(8192)]);
    // Aligned ones take other ways through the code.
    let range = move || {
        prop_oneof![
            range(),
            range().prop_map(|(at, len)| (at / 4096 * 4096, len)),
            range().prop_map(|(at, _)| (at / 4096 % 20 * 4096, 8192))
        ]
    };
    prop_oneof![
        2 => range().prop_map(|(at, len)| Op::Read { at, len }),
        6 => (range(), any::<u8>()).prop_map(|((at, len), byte)| Op::Write { at, len, byte }),
        2 => (range(), any::<u32>(), any::<u8>())
            .prop_map(|((at, len), second, byte)| Op::Pair { at, len, second, byte }),
        1 => (range(), any::<u8>(), 0..12_u8)
            .prop_map(|((at, len), byte, polls)| Op::Dropped { at, len, byte, polls }),
        2 => range().prop_map(|(at, len)| Op::Discard { at, len }),
        2 => (range(), any::<bool>()).prop_map(|((at, len), keep)| Op::Zero { at, len, keep }),
        3 => prop_oneof![4 => Just(0), 1 => Just(1), 2 => Just(2)].prop_map(|fails| Op::Flush { fails }),
        1 => (0..12_u8).prop_map(|polls| Op::DroppedFlush { polls }),
        2 => any::<u64>().prop_map(|seed| Op::Crash { seed }),
        1 => Just(Op::Diff),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_overlay_equals_its_model_through_crashes(ops in prop::collection::vec(op(), 1..50)) {
        exercise(&ops);
    }
}

fn limit() -> Limit {
    Limit::within(Duration::from_secs(600))
}

fn pool() -> Pool {
    Pool::new("test", 4)
}

async fn create(path: &Path, base: u64) -> Result<Overlay, OverlayError> {
    Overlay::create(path, Arc::new(Pattern(base)), 1 << 20, pool(), &limit()).await
}

async fn open(path: &Path, base: u64, read_only: bool) -> Result<Overlay, OverlayError> {
    Overlay::open(path, Arc::new(Pattern(base)), read_only, pool(), &limit()).await
}

#[tokio::test]
async fn an_overlay_file_is_made_once_and_opened_by_one_and_above_its_base_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.overlay");
    let first = create(&path, 500_000).await.unwrap();
    assert!(matches!(create(&path, 500_000).await, Err(OverlayError::Io { .. })));
    assert!(matches!(open(&path, 500_000, false).await, Err(OverlayError::InUse { .. })));
    first.write_at(5000, Bytes::from_static(b"kept"), &limit()).await.unwrap();
    first.flush(&limit()).await.unwrap();
    assert_eq!(first.changed(), (1, 0));
    drop(first);
    assert!(matches!(open(&path, 500_001, false).await, Err(OverlayError::OtherBase { .. })));
    let again = open(&path, 500_000, true).await.unwrap();
    let seen = again.read_at(5000, 4, BytesMut::new(), &limit()).await.unwrap();
    assert_eq!(&seen[..], b"kept");
    let refused = again.write_at(0, Bytes::from_static(b"x"), &limit()).await;
    assert!(matches!(refused, Err(BlockError::ReadOnly)));
    assert!(std::fs::read_dir(dir.path()).unwrap().count() == 1, "something was left beside it");
}

#[tokio::test]
async fn what_is_no_overlay_or_damaged_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.overlay");
    drop(create(&path, 500_000).await.unwrap());
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    // Both copies of the only map page.
    file.write_all_at(b"garbage", 4096).unwrap();
    drop(open(&path, 500_000, false).await.expect("one torn copy is what a crash leaves"));
    file.write_all_at(b"garbage", 8192).unwrap();
    let error = open(&path, 500_000, false).await.err().expect("both are torn").to_string();
    assert!(error.contains("page 0 of its map is damaged"), "{error}");
    file.set_len(0).unwrap();
    assert!(matches!(open(&path, 500_000, false).await, Err(OverlayError::Unusable { .. })));
}

/// A disk whose next write the kernel keeps until it is told.
struct Stalling {
    file: Arc<std::fs::File>,
    disk: FileBackend,
    pool: Pool,
    kernel: Mutex<Option<Receiver<()>>>,
}

impl Backend for Stalling {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_only(&self) -> bool {
        false
    }

    fn read_at<'a>(&'a self, at: u64, len: usize, buf: BytesMut, limit: &'a Limit) -> Answer<'a, BytesMut> {
        self.disk.read_at(at, len, buf, limit)
    }

    fn write_at<'a>(&'a self, at: u64, data: Bytes, limit: &'a Limit) -> Answer<'a, ()> {
        let Some(kernel) = self.kernel.lock().expect("not poisoned").take() else {
            return self.disk.write_at(at, data, limit);
        };
        let file = self.file.clone();
        Box::pin(self.pool.run(limit, move |_| {
            kernel.recv().ok();
            file.write_all_at(&data, at).expect("write");
        }))
    }

    fn flush<'a>(&'a self, limit: &'a Limit) -> Answer<'a, ()> {
        self.disk.flush(limit)
    }

    fn discard<'a>(&'a self, at: u64, len: u64, limit: &'a Limit) -> Answer<'a, ()> {
        self.disk.discard(at, len, limit)
    }

    fn write_zeroes<'a>(&'a self, at: u64, len: u64, how: Zeroes, limit: &'a Limit) -> Answer<'a, ()> {
        self.disk.write_zeroes(at, len, how, limit)
    }

    fn extents<'a>(&'a self, at: u64, len: u64, most: usize, limit: &'a Limit) -> Answer<'a, Vec<Extent>> {
        self.disk.extents(at, len, most, limit)
    }

    fn close(&self, within: Duration) -> BoxFuture<'_, usize> {
        self.disk.close(within)
    }
}

#[tokio::test]
async fn a_block_whose_write_was_given_up_is_not_written_until_the_kernel_is_done() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(Overlay::file_size(1 << 20)).unwrap();
    let pool = Pool::new("test", 4);
    let disk = FileBackend::new(file.try_clone().unwrap(), "test", false, pool.clone()).unwrap();
    Overlay::format(&disk, &Pattern(0), 1 << 20, &limit()).await.unwrap();
    let disk = Arc::new(Stalling { file: Arc::new(file), disk, pool, kernel: Mutex::default() });
    let overlay = Overlay::load(disk.clone(), Arc::new(Pattern(0)), &limit()).await.unwrap();

    let (release, kernel) = std::sync::mpsc::channel();
    *disk.kernel.lock().unwrap() = Some(kernel);
    let short = Limit::within(Duration::from_millis(20));
    let refused = overlay.write_at(0, Bytes::from_static(&[1; 4096]), &short).await;
    assert!(matches!(refused, Err(BlockError::Deadline)));
    assert_eq!(disk.pool.running(), 1, "the kernel has it still");
    // The next write of the block waits, one of another block does not.
    let long = limit();
    let mut next = overlay.write_at(0, Bytes::from_static(&[2; 4096]), &long);
    assert!(futures::poll!(&mut next).is_pending());
    overlay.write_at(4096, Bytes::from_static(&[3; 4096]), &long).await.unwrap();
    assert!(futures::poll!(&mut next).is_pending());
    drop(release);
    next.await.unwrap();
    let seen = overlay.read_at(0, 8192, BytesMut::new(), &long).await.unwrap();
    assert!(seen[..4096].iter().all(|b| *b == 2) && seen[4096..].iter().all(|b| *b == 3));
    assert_eq!(overlay.close(Duration::from_secs(60)).await, 0);
}
