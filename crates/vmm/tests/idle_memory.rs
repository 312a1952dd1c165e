//! What a served disk takes while nobody asks anything of it, after it was busy. A program of its own: no other test's memory
//! is in the count.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use hearth_vmm::block::nbd::{Export, Limits, Server};
use hearth_vmm::block::{FileBackend, Limit, Overlay, Pool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

const DISKS: usize = 16;
/// Of each disk.
const SIZE: u64 = 1 << 30;
/// Written to each before it rests, in requests of 1 MiB that are all in flight at once.
const REQUESTS: u64 = 24;
const MIB: usize = 1 << 20;
/// What a disk may take, bytes.
const ALLOWED: usize = MIB;
/// No wait is longer.
const LONG: Duration = Duration::from_secs(120);

/// A number after a name in `/proc/self/status`.
fn status(name: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_ascii_whitespace().next().unwrap().parse().unwrap()
}

/// A client that writes, takes all answers and stays.
async fn busy(socket: &std::path::Path, export: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.read_exact(&mut [0; 18]).await.unwrap();
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(1_u32.to_be_bytes());
    hello.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
    hello.extend(export.as_bytes());
    stream.write_all(&hello).await.unwrap();
    stream.read_exact(&mut [0; 10]).await.unwrap();
    let (mut from, mut to) = stream.split();
    let ask = async {
        let data = vec![7; MIB];
        for n in 0..REQUESTS {
            let mut frame = 0x2560_9513_u32.to_be_bytes().to_vec();
            frame.extend([0, 0, 0, 1]);
            frame.extend(n.to_be_bytes());
            frame.extend((n * MIB as u64).to_be_bytes());
            frame.extend(u32::try_from(MIB).unwrap().to_be_bytes());
            to.write_all(&frame).await.unwrap();
            to.write_all(&data).await.unwrap();
        }
    };
    let take = async {
        for _ in 0..REQUESTS {
            let mut reply = [0; 16];
            from.read_exact(&mut reply).await.unwrap();
            assert_eq!(reply[4..8], [0; 4], "a write failed");
        }
    };
    tokio::join!(ask, take);
    stream
}

#[tokio::test]
async fn an_idle_disk_takes_no_more_than_a_mebibyte() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("base");
    std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
    let (before, threads) = (status("RssAnon:"), status("Threads:"));
    let mut exports = vec![];
    for n in 0..DISKS {
        let base = FileBackend::open(&image, true, Pool::new("base", 8)).unwrap();
        let path = dir.path().join(format!("overlay-{n}"));
        let limit = Limit::within(LONG);
        let overlay = Overlay::create(&path, Arc::new(base), SIZE, Pool::new("overlay", 8), &limit);
        exports.push(Export::new(&format!("disk{n}"), Arc::new(overlay.await.unwrap())));
    }
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let stop = CancellationToken::new();
    let mut server = JoinSet::new();
    let token = stop.clone();
    let limits = Limits { connections: DISKS, ..Limits::default() };
    server.spawn(async move { Server::new(exports, limits).run(listener, token).await });
    let mut clients = vec![];
    for n in 0..DISKS {
        clients.push(tokio::time::timeout(LONG, busy(&socket, &format!("disk{n}"))).await.unwrap());
    }
    let rest = async {
        while status("Threads:") > threads {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(LONG, rest).await.expect("threads without work stay");
    let each = 1024 * status("RssAnon:").saturating_sub(before) / DISKS;
    hearth_testkit::report(&format!("an idle disk takes {} KiB of memory", each / 1024));
    assert!(each <= ALLOWED, "{each} bytes");
    drop(clients);
    stop.cancel();
    tokio::time::timeout(LONG, server.join_next()).await.unwrap().unwrap().unwrap();
}
