//! A remote disk behind the server, with the clients that people use.

use std::sync::Arc;

use hearth_vmm::block::nbd::Limits;
use hearth_vmm::block::{ChunkCache, LEAST_CACHE, Limit, Overlay, Pool, RemoteBackend, RemoteOptions};

use crate::served::{LONG, Running, have, pattern, run};
use crate::store::Store;

const SIZE: usize = 9 << 20;

async fn disk(store: &Store, cache: &std::path::Path) -> Arc<RemoteBackend> {
    let cache = Arc::new(ChunkCache::open(cache, LEAST_CACHE).expect("as it should"));
    let (pool, limit) = (Pool::new("cache", 4), Limit::within(LONG));
    let url = store.url();
    let disk = RemoteBackend::open(&url, RemoteOptions::default(), Some(cache), pool, &limit);
    Arc::new(disk.await.expect("as it should"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nbdinfo_and_nbdcopy_see_the_object() {
    if !have("nbdinfo_and_nbdcopy_see_the_object", &["nbdinfo", "nbdcopy"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(SIZE);
    let store = Store::of(image.clone());
    let server = Running::of(vec![("disk", disk(&store, dir.path()).await)], Limits::default());
    let text = run("nbdinfo", &[&server.uri()]).await;
    assert!(text.contains("export-size: 9437184") && text.contains("is_read_only: true"), "{text}");
    let copy = dir.path().join("copy");
    run("nbdcopy", &["--connections=4", &server.uri(), copy.to_str().unwrap()]).await;
    assert!(std::fs::read(copy).unwrap() == image);
    assert_eq!(store.asked(), 9);
    assert_eq!(server.end().await.leaked, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qemu_img_and_qemu_io_use_an_overlay_above_the_object() {
    let test = "qemu_img_and_qemu_io_use_an_overlay_above_the_object";
    if !have(test, &["qemu-img", "qemu-io"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = pattern(SIZE);
    let store = Store::of(image.clone());
    let base = disk(&store, &dir.path().join("cache")).await;
    let (path, limit) = (dir.path().join("overlay"), Limit::within(LONG));
    let overlay = Overlay::create(&path, base, SIZE as u64, Pool::new("overlay", 4), &limit);
    let server = Running::of(vec![("disk", Arc::new(overlay.await.unwrap()))], Limits::default());
    let source = dir.path().join("source");
    std::fs::write(&source, &image).unwrap();
    let (source, uri) = (source.to_str().unwrap(), server.uri());
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, &uri]).await;
    let write =
        ["-f", "raw", "-c", "write -P 7 1000 70000", "-c", "flush", "-c", "read -P 7 1000 70000", &uri];
    let text = run("qemu-io", &write).await;
    assert!(!text.contains("failed"), "{text}");
    assert_eq!(store.asked(), 9);
    assert_eq!(server.end().await.leaked, 0);
}
