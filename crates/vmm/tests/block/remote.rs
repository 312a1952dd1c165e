//! Objects of a store as disks: what is read, how often it is fetched, what becomes of failures, and what several processes
//! make of one cache.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use hearth_vmm::block::{
    Backend, BlockError, ChunkCache, Limit, Pool, RemoteBackend, RemoteOptions, Tries, Zeroes,
};
use tokio::io::AsyncReadExt as _;
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

use crate::served::{LONG, pattern};
use crate::store::{Fault, Store};

const CHUNK: u64 = 64 << 10;
const LEAST: u64 = 16 << 20;

fn options() -> RemoteOptions {
    // As patient as a test may be; those about time say theirs.
    let tries = Tries {
        silence: LONG,
        whole: LONG,
        pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(5),
    };
    RemoteOptions { chunk: CHUNK, tries }
}

fn hasty() -> RemoteOptions {
    let tries = Tries { silence: Duration::from_millis(100), ..options().tries };
    RemoteOptions { tries, ..options() }
}

async fn open_with(
    url: &str,
    cache: Option<&Path>,
    options: RemoteOptions,
) -> Result<RemoteBackend, BlockError> {
    let cache = cache.map(|dir| Arc::new(ChunkCache::open(dir, LEAST).expect("cache")));
    RemoteBackend::open(url, options, cache, Pool::new("cache", 4), &Limit::within(LONG)).await
}

async fn open(url: &str, cache: Option<&Path>) -> RemoteBackend {
    open_with(url, cache, options()).await.expect("open")
}

async fn read(disk: &RemoteBackend, at: u64, len: usize) -> Vec<u8> {
    disk.read_at(at, len, BytesMut::new(), &Limit::within(LONG)).await.expect("read").to_vec()
}

async fn fails(disk: &RemoteBackend, at: u64, limit: &Limit) -> String {
    disk.read_at(at, 100, BytesMut::new(), limit).await.expect_err("it cannot be read").to_string()
}

#[tokio::test]
async fn any_range_is_read_from_a_file_and_from_a_server_with_and_without_a_cache() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 5 + 777);
    std::fs::write(dir.path().join("disk.img"), &image).unwrap();
    let store = Store::of(image.clone());
    let cache = dir.path().join("cache");
    for url in [format!("file://{}/disk.img", dir.path().display()), store.url()] {
        for cache in [None, Some(&*cache), Some(&*cache)] {
            let disk = open(&url, cache).await;
            assert_eq!((disk.size(), disk.read_only()), (image.len() as u64, true));
            for (at, len) in
                [(0, 1), (4095, 2), (65_535, 2), (100, 200_000), (image.len() - 1, 1), (0, image.len())]
            {
                assert!(read(&disk, at as u64, len).await == image[at..at + len], "{url} {at} {len}");
            }
            let limit = Limit::within(LONG);
            let beyond = disk.read_at(image.len() as u64, 1, BytesMut::new(), &limit).await;
            assert!(matches!(beyond, Err(BlockError::Range { .. })));
            assert!(matches!(
                disk.write_at(0, Bytes::from_static(b"x"), &limit).await,
                Err(BlockError::ReadOnly)
            ));
            assert!(matches!(disk.discard(0, 1, &limit).await, Err(BlockError::ReadOnly)));
            assert!(matches!(
                disk.write_zeroes(0, 1, Zeroes::default(), &limit).await,
                Err(BlockError::ReadOnly)
            ));
            disk.flush(&limit).await.unwrap();
            assert_eq!(disk.extents(5, 100, 9, &limit).await.unwrap().len(), 1);
            assert_eq!(disk.close(LONG).await, 0);
            assert!(matches!(disk.read_at(0, 1, BytesMut::new(), &limit).await, Err(BlockError::Stopped)));
        }
    }
    // Without a cache each chunk once and those again that did not stay in memory; then each once; then none.
    let asked = store.asked();
    assert!((12..=18).contains(&asked), "{asked}");
}

#[tokio::test]
async fn one_fetch_however_many_ask_and_none_when_nobody_waits() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 2);
    let store = Store::of(image.clone());
    let disk = open(&store.url(), Some(dir.path())).await;
    store.fail([Fault::Slow(Duration::from_millis(500))]);
    let mut early = Box::pin(join_all((0..10).map(|n| read(&disk, n * 10, 10))));
    tokio::select! {
        _ = &mut early => panic!("it is not there yet"),
        () = store.until_asked(1) => {}
    }
    // Those who came first go away; the fetch is not theirs alone.
    let mut late = Box::pin(join_all((0..20).map(|n| read(&disk, n * 100, 100))));
    for _ in 0..20 {
        assert!(futures::poll!(&mut late).is_pending());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(early);
    let seen = late.await;
    for (n, bytes) in seen.iter().enumerate() {
        assert_eq!(bytes, &image[n * 100..n * 100 + 100]);
    }
    assert_eq!(store.asked(), 1);
    // All go away: the chunk is anybody's again at once, and the request has ended.
    store.fail([Fault::Hang]);
    let mut alone = Box::pin(read(&disk, CHUNK, 10));
    while store.asked() < 2 {
        assert!(futures::poll!(&mut alone).is_pending());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(alone);
    assert_eq!(read(&disk, CHUNK, 10).await, image[CHUNK as usize..CHUNK as usize + 10]);
    assert_eq!(store.asked(), 3);
    assert_eq!(disk.close(LONG).await, 0);
}

#[tokio::test]
async fn what_has_come_is_read_before_the_rest_has() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize);
    let store = Store::of(image.clone());
    store.fail([Fault::Half(None)]);
    let disk = open(&store.url(), Some(dir.path())).await;
    for at in [0, 100, 20_000] {
        assert_eq!(read(&disk, at as u64, 10).await, image[at..at + 10]);
    }
    let error = fails(&disk, CHUNK - 100, &Limit::within(Duration::from_millis(50))).await;
    assert_eq!(error, BlockError::Deadline.to_string());
    assert_eq!(store.asked(), 1, "all of it is one fetch, whoever left");
    assert_eq!(disk.close(LONG).await, 0);
    // When nobody waits any more the try goes on, and what it brings is kept.
    store.fail([Fault::Half(Some(Duration::from_millis(200)))]);
    let disk = open(&store.url(), Some(dir.path())).await;
    assert_eq!(read(&disk, 0, 10).await, image[..10]);
    until_kept(dir.path(), 1).await;
    let stats = disk.remote_stats().unwrap();
    assert_eq!((stats.hits, stats.misses, stats.fetches, store.asked()), (0, 1, 1, 2));
    assert_eq!(read(&disk, CHUNK - 10, 10).await, image[CHUNK as usize - 10..]);
    assert_eq!(disk.remote_stats().unwrap().hits, 1);
    assert_eq!(disk.close(LONG).await, 0);
    // And when it fails there is no other, until somebody asks.
    let cold = tempfile::tempdir().unwrap();
    store.fail([Fault::Half(None)]);
    let disk = open_with(&store.url(), Some(cold.path()), hasty()).await.unwrap();
    assert_eq!(read(&disk, 0, 10).await, image[..10]);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(store.asked(), 3);
    assert_eq!(read(&disk, CHUNK - 10, 10).await, image[CHUNK as usize - 10..]);
    assert_eq!(store.asked(), 4);
    assert_eq!(disk.close(LONG).await, 0);
}

#[tokio::test]
async fn what_may_pass_is_tried_again_and_what_may_not_is_told_at_once() {
    let image = pattern(CHUNK as usize * 4);
    let store = Store::of(image.clone());
    let disk = open_with(&store.url(), None, hasty()).await.unwrap();
    let passing =
        [Fault::Status(500), Fault::Status(503), Fault::Status(429), Fault::Close, Fault::Cut, Fault::Hang];
    store.fail(passing);
    // The end of a chunk, which is here only when all of it is.
    let end = CHUNK as usize - 100;
    assert_eq!(read(&disk, end as u64, 100).await, image[end..][..100]);
    let stats = disk.remote_stats().unwrap();
    assert_eq!((stats.retries, stats.fetches), (6, 1));
    for (fault, word) in [
        (Fault::Status(403), "403"),
        (Fault::Status(404), "404"),
        (Fault::Status(400), "400"),
        (Fault::Fewer, "32768 bytes came for the 65536"),
    ] {
        store.fail([fault]);
        let before = store.asked();
        let error = fails(&disk, 2 * CHUNK - 100, &Limit::within(LONG)).await;
        assert!(error.contains(word) && error.contains(&store.url()), "{error}");
        assert_eq!(store.asked(), before + 1, "{error}");
    }
    // It is asked for again by the next who reads it.
    assert_eq!(read(&disk, CHUNK, 10).await, image[CHUNK as usize..CHUNK as usize + 10]);
    let missing = store.url().replace("disk.img", "other.img");
    let error = open_with(&missing, None, options()).await.err().unwrap().to_string();
    assert!(error.contains("other.img") && error.contains("404"), "{error}");
}

#[tokio::test]
async fn a_store_that_never_answers_costs_no_more_than_the_limit() {
    let store = Store::of(pattern(CHUNK as usize * 4));
    let disk = open_with(&store.url(), None, hasty()).await.unwrap();
    store.fail([Fault::Hang; 100]);
    let error = fails(&disk, 0, &Limit::within(Duration::from_millis(350))).await;
    assert!(error.contains("deadline") && error.contains("silent for 100ms"), "{error}");
    let patient = open_with(&store.url(), None, options()).await.unwrap();
    let error = fails(&patient, 0, &Limit::within(Duration::from_millis(50))).await;
    assert_eq!(error, BlockError::Deadline.to_string());
    let stop = CancellationToken::new();
    let limit = Limit::new(stop.clone(), tokio::time::Instant::now() + LONG);
    let (error, ()) = tokio::join!(fails(&patient, 0, &limit), async {
        tokio::task::yield_now().await;
        stop.cancel();
    });
    assert_eq!(error, BlockError::Stopped.to_string());
    assert_eq!(patient.close(LONG).await, 0);
    // Nobody listens there.
    drop(store);
    let gone = "http://127.0.0.1:1/disk.img";
    let limit = Limit::within(Duration::from_millis(200));
    let error = RemoteBackend::open(gone, options(), None, Pool::new("cache", 1), &limit).await;
    let error = error.err().unwrap().to_string();
    assert!(error.contains(gone) && error.contains("deadline") && error.contains("refused"), "{error}");
}

#[tokio::test]
async fn an_object_that_changes_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 3);
    let store = Store::of(image.clone());
    let disk = open(&store.url(), Some(dir.path())).await;
    assert_eq!(read(&disk, 0, 10).await, image[..10]);
    store.replace(vec![1; image.len()], "\"second\"");
    let error = fails(&disk, CHUNK, &Limit::within(LONG)).await;
    assert!(error.contains("has changed") && error.contains(&store.url()), "{error}");
    // What was fetched before is still the disk that was opened; who opens it now has another.
    assert_eq!(read(&disk, 0, 10).await, image[..10]);
    let other = open(&store.url(), Some(dir.path())).await;
    assert_eq!(read(&other, 0, 10).await, [1; 10]);
    assert_ne!(other.version(), disk.version());
    // A file is known by its inode, its size and its time.
    let file = dir.path().join("disk.img");
    std::fs::write(&file, &image).unwrap();
    let disk = open(&format!("file://{}", file.display()), None).await;
    std::fs::write(&file, &image[1..]).unwrap();
    let error = fails(&disk, 0, &Limit::within(LONG)).await;
    assert!(error.contains("has changed") && error.contains("disk.img"), "{error}");
}

#[tokio::test]
async fn a_damaged_chunk_of_the_cache_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 2);
    let store = Store::of(image.clone());
    assert!(read(&open(&store.url(), Some(dir.path())).await, 0, image.len()).await == image);
    until_kept(dir.path(), 2).await;
    for path in chunks(dir.path()) {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[5000] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let disk = open(&store.url(), Some(dir.path())).await;
    assert!(read(&disk, 0, image.len()).await == image);
    let stats = disk.remote_stats().unwrap();
    assert_eq!((stats.damaged, stats.fetches, store.asked()), (2, 2, 4));
}

#[tokio::test]
async fn a_cache_that_cannot_be_used_costs_fetches_and_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 2);
    let store = Store::of(image.clone());
    let disk = open(&store.url(), Some(dir.path())).await;
    std::fs::remove_dir_all(dir.path()).unwrap();
    std::fs::write(dir.path(), b"no directory").unwrap();
    assert!(read(&disk, 0, image.len()).await == image);
    let stats = disk.remote_stats().unwrap();
    assert_eq!((stats.uncached, stats.fetches), (2, 2));
    std::fs::remove_file(dir.path()).unwrap();
    std::fs::create_dir(dir.path()).unwrap();
}

#[tokio::test]
async fn the_cache_stays_within_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(3 * LEAST as usize);
    let store = Store::of(image.clone());
    let disk = open(&store.url(), Some(dir.path())).await;
    for round in 0..2 {
        for at in (0..image.len()).step_by(1 << 20) {
            assert!(read(&disk, at as u64, 1 << 20).await == image[at..at + (1 << 20)], "{round} {at}");
            let size: u64 =
                chunks(dir.path()).iter().filter_map(|p| p.metadata().ok()).map(|m| m.len()).sum();
            assert!(size <= LEAST, "{size}");
        }
    }
    let stats = disk.remote_stats().unwrap();
    assert!(stats.evicted > 256 && stats.uncached == 0, "{stats:?}");
    assert_eq!(disk.close(LONG).await, 0);
}

fn chunks(cache: &Path) -> Vec<std::path::PathBuf> {
    let mut found = vec![];
    for object in std::fs::read_dir(cache).expect("as it should").flatten().filter(|e| e.path().is_dir()) {
        found.extend(std::fs::read_dir(object.path()).expect("as it should").flatten().map(|e| e.path()));
    }
    found.retain(|path| path.extension().is_none());
    found
}

async fn until_kept(cache: &Path, count: usize) {
    let waiting = async {
        while chunks(cache).len() < count {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, waiting).await.expect("it is not kept");
}

/// Reads all of a disk in a process of its own.
fn reader(url: &str, cache: &Path) -> Child {
    Command::new(std::env::current_exe().expect("as it should"))
        .args(["--exact", "remote::reads_all_as_a_process_of_its_own", "--ignored", "--nocapture"])
        .env("HEARTH_TEST_URL", url)
        .env("HEARTH_TEST_CACHE", cache)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("start")
}

#[tokio::test]
#[ignore = "other tests run it, as a process of its own"]
async fn reads_all_as_a_process_of_its_own() {
    let (Ok(url), Ok(cache)) = (std::env::var("HEARTH_TEST_URL"), std::env::var("HEARTH_TEST_CACHE")) else {
        hearth_testkit::skip("reads_all_as_a_process_of_its_own", "it is run by other tests");
        return;
    };
    let disk = open(&url, Some(Path::new(&cache))).await;
    let bytes = read(&disk, 0, usize::try_from(disk.size()).expect("as it should")).await;
    println!(
        "sum={:08x};fetches={};",
        crc32fast::hash(&bytes),
        disk.remote_stats().expect("as it should").fetches
    );
    disk.close(LONG).await;
}

async fn printed(mut child: Child) -> String {
    let mut text = String::new();
    let mut out = child.stdout.take().expect("as it should");
    tokio::time::timeout(LONG, out.read_to_string(&mut text)).await.expect("it ends").expect("as it should");
    assert!(child.wait().await.expect("as it should").success(), "{text}");
    text
}

#[tokio::test]
async fn of_several_processes_one_fetches_each_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize * 12);
    let store = Store::of(image.clone());
    store.fail([Fault::Slow(Duration::from_millis(100)); 12]);
    let readers: Vec<Child> = (0..3).map(|_| reader(&store.url(), dir.path())).collect();
    for text in join_all(readers.into_iter().map(printed)).await {
        assert!(text.contains(&format!("sum={:08x};", crc32fast::hash(&image))), "{text}");
    }
    assert_eq!(store.asked(), 12);
}

#[tokio::test]
async fn a_process_killed_while_it_fetches_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(CHUNK as usize);
    let store = Store::of(image.clone());
    store.fail([Fault::Hang]);
    let mut first = reader(&store.url(), dir.path());
    store.until_asked(1).await;
    let disk = open(&store.url(), Some(dir.path())).await;
    let mut second = Box::pin(read(&disk, 0, image.len()));
    // It waits for the other process, and asks nothing of its own.
    for _ in 0..20 {
        assert!(futures::poll!(&mut second).is_pending());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(store.asked(), 1);
    first.kill().await.unwrap();
    assert!(second.await == image);
    assert_eq!(store.asked(), 2);
}
