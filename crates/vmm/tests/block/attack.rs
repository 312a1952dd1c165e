//! Clients that mean harm or are broken, and a disk that stalls: the server stays as it is, others are served, and what is
//! stopped ends in time.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use hearth_vmm::block::nbd::Limits;
use hearth_vmm::block::{Answer, Around, Backend, Call, FileBackend, Limit, Pool, Wrapped};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::served::{LONG, Running, pattern};

const MIB: u64 = 1 << 20;

/// A client by hand, on the transmission of the named export, with simple replies.
struct Client(UnixStream);

impl Client {
    async fn greet(server: &Running) -> Self {
        let mut stream = UnixStream::connect(server.socket()).await.expect("connect");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).await.expect("greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        Self(stream)
    }

    async fn open(server: &Running, export: &str) -> Self {
        let mut client = Self::greet(server).await;
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(1_u32.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        client.send(&hello).await;
        let mut chosen = [0; 10];
        client.0.read_exact(&mut chosen).await.expect("export");
        client
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.expect("send");
    }

    async fn ask(&mut self, kind: u16, cookie: u64, at: u64, len: u32) {
        self.send(&request(kind, cookie, at, len)).await;
    }

    /// Cookie and error of the next reply.
    async fn reply(&mut self) -> (u64, u32) {
        let mut head = [0; 16];
        timeout(LONG, self.0.read_exact(&mut head)).await.expect("no reply came").expect("reply");
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().expect("four bytes"));
        (u64::from_be_bytes(head[8..].try_into().expect("eight bytes")), error)
    }

    async fn read(&mut self, at: u64, len: u32) -> Vec<u8> {
        self.ask(0, 77, at, len).await;
        assert_eq!(self.reply().await, (77, 0));
        let mut data = vec![0; len as usize];
        self.0.read_exact(&mut data).await.expect("data");
        data
    }

    async fn is_closed(&mut self) {
        let mut rest = vec![];
        let closed = timeout(LONG, self.0.read_to_end(&mut rest)).await.expect("it is not closed");
        // A reset is an end as well.
        closed.ok();
    }
}

fn request(kind: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let mut frame = 0x2560_9513_u32.to_be_bytes().to_vec();
    frame.extend(0_u16.to_be_bytes());
    frame.extend(kind.to_be_bytes());
    frame.extend(cookie.to_be_bytes());
    frame.extend(at.to_be_bytes());
    frame.extend(len.to_be_bytes());
    frame
}

/// The resident memory of this process, in bytes.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: usize = status.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("resident pages");
    pages * 4096
}

#[tokio::test]
async fn every_error_is_an_answer_and_the_connection_goes_on() {
    let server = Running::overlay(100_000, MIB).await;
    let mut client = Client::open(&server, "disk").await;
    for (kind, at, len, error) in [
        (0, MIB, 1, 22),
        (0, u64::MAX, 2, 22),
        (0, 0, u32::MAX, 22),
        (4, MIB - 1, 2, 22),
        (6, MIB - 1, 2, 28),
        (7, 0, 4096, 22),
        (5, 0, 1, 22),
        (999, 0, 0, 22),
        (3, u64::MAX, u32::MAX, 0),
    ] {
        client.ask(kind, 5, at, len).await;
        assert_eq!(client.reply().await, (5, error), "command {kind} at {at}, {len}");
    }
    // A payload that is refused is thrown away, however large.
    client.ask(1, 6, 0, 40 << 20).await;
    for _ in 0..40 {
        client.send(&vec![0x25; 1 << 20]).await;
    }
    assert_eq!(client.reply().await, (6, 22));
    client.ask(1, 7, MIB - 2, 3).await;
    client.send(b"abc").await;
    assert_eq!(client.reply().await, (7, 28));
    assert_eq!(client.read(0, 100_000).await, pattern(100_000));
    assert_eq!(server.end().await.connections, 1);
}

#[tokio::test]
async fn garbage_and_halves_end_their_own_connection_only() {
    let server = Running::overlay(100_000, MIB).await;
    let mut good = Client::open(&server, "disk").await;
    let mut client = Client::greet(&server).await;
    client.send(b"GET / HTTP/1.1\r\nHost: disk\r\n\r\n").await;
    client.is_closed().await;
    let mut client = Client::open(&server, "disk").await;
    client.send(&[0xff; 100]).await;
    client.is_closed().await;
    let mut client = Client::open(&server, "disk").await;
    let whole = request(1, 1, 0, 4096);
    client.send(&whole).await;
    client.send(&[9; 4095]).await;
    drop(client);
    let mut client = Client::open(&server, "disk").await;
    client.send(&whole[..27]).await;
    client.0.shutdown().await.unwrap();
    client.is_closed().await;
    assert_eq!(good.read(0, 4096).await, pattern(4096), "half a write was done");
    assert_eq!(server.end().await.leaked, 0);
}

#[tokio::test]
async fn a_client_that_never_reads_makes_nothing_grow_and_holds_up_nobody() {
    let server = Running::overlay(0, 64 * MIB).await;
    let mut good = Client::open(&server, "disk").await;
    let before = memory();
    let mut greedy = vec![];
    for kind in [0, 7, 0] {
        let mut client = Client::open(&server, "disk").await;
        // Reads of 1 MiB, and requests that are refused: as many as it takes.
        let frames: Vec<u8> = (0..20_000).flat_map(|i| request(kind, i, 0, 1 << 20)).collect();
        let sent = timeout(Duration::from_millis(500), client.0.write_all(&frames)).await;
        assert!(sent.is_err(), "all was taken, though nothing was fetched");
        greedy.push(client);
    }
    assert_eq!(good.read(0, 4096).await, [0; 4096]);
    // Per connection 40 MiB at most, and other tests run in this process.
    assert!(memory() < before + (400 << 20), "{} MiB more", (memory() - before) >> 20);
    let began = Instant::now();
    assert_eq!(server.end().await.leaked, 0);
    assert!(began.elapsed() < Duration::from_secs(30), "the stop waited for clients that do not read");
}

#[tokio::test]
async fn of_a_thousand_connections_the_limit_is_served_and_the_rest_turned_away() {
    let server = Running::overlay(10_000, MIB).await;
    let mut good = Client::open(&server, "disk").await;
    let mut all = vec![];
    for _ in 0..1000 {
        // A full backlog is an answer as well.
        if let Ok(Ok(stream)) = timeout(LONG, UnixStream::connect(server.socket())).await {
            all.push(stream);
        }
    }
    assert_eq!(good.read(0, 10_000).await, pattern(10_000));
    drop(all);
    // Their places are free again, once the server has seen them go.
    let again = async {
        loop {
            let mut stream = UnixStream::connect(server.socket()).await.expect("connect");
            if stream.read_exact(&mut [0; 18]).await.is_ok() {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, again).await.expect("no place became free");
    let served = server.end().await;
    assert!(served.refused >= 900 && served.leaked == 0, "{served:?}");
}

#[tokio::test]
async fn who_does_not_choose_an_export_is_sent_away() {
    let limits = Limits { handshake: Duration::from_millis(50), ..Limits::default() };
    let file = tempfile::tempfile().unwrap();
    let disk = FileBackend::new(file, "empty", false, Pool::new("empty", 1)).unwrap();
    let server = Running::of(vec![("disk", Arc::new(disk))], limits);
    let mut client = Client::greet(&server).await;
    client.send(&[0, 0, 0, 3, b'I']).await;
    client.is_closed().await;
    server.end().await;
}

/// Reads stall as if their kernel calls did not come back until they are let go; all else works.
struct Stalled {
    pool: Pool,
    kernel: Arc<Mutex<Receiver<()>>>,
}

impl Around for Stalled {
    fn before<'a>(&'a self, call: Call, limit: &'a Limit) -> Answer<'a, u64> {
        let kernel = self.kernel.clone();
        Box::pin(async move {
            if call == Call::Read {
                // Ends when the other end is dropped.
                self.pool.run(limit, move |_| kernel.lock().expect("not poisoned").recv().ok()).await?;
            }
            Ok(0)
        })
    }
}

/// A disk that stalls, the pool of its threads, and what lets it go.
fn stalled() -> (Wrapped<Stalled>, Pool, Sender<()>) {
    let file = tempfile::tempfile().expect("file");
    file.set_len(MIB).expect("length");
    let pool = Pool::new("stalled disk", 2);
    let disk = FileBackend::new(file, "stalled disk", false, pool.clone()).expect("open");
    let (release, kernel) = channel();
    let stalled = Stalled { pool: pool.clone(), kernel: Arc::new(Mutex::new(kernel)) };
    (Wrapped::new(Arc::new(disk), stalled), pool, release)
}

fn well() -> FileBackend {
    let file = tempfile::tempfile().expect("file");
    file.set_len(MIB).expect("length");
    FileBackend::new(file, "good disk", false, Pool::new("good disk", 2)).expect("open")
}

#[tokio::test]
async fn a_stalled_disk_fails_its_own_requests_by_the_deadline_and_no_others() {
    let (stalled, _, release) = stalled();
    let limits = Limits { request: Duration::from_millis(200), ..Limits::default() };
    let disks: Vec<(&str, Arc<dyn Backend>)> =
        vec![("stalled", Arc::new(stalled)), ("good", Arc::new(well()))];
    let server = Running::of(disks, limits);
    let mut stuck = Client::open(&server, "stalled").await;
    let mut good = Client::open(&server, "good").await;
    for cookie in 0..20 {
        stuck.ask(0, cookie, 0, 4096).await;
    }
    for _ in 0..50 {
        assert_eq!(good.read(0, 4096).await, [0; 4096]);
    }
    let mut answered: Vec<u64> = vec![];
    for _ in 0..20 {
        let (cookie, error) = stuck.reply().await;
        assert_eq!(error, 5);
        answered.push(cookie);
    }
    answered.sort_unstable();
    assert_eq!(answered, (0..20).collect::<Vec<u64>>());
    // The connection goes on, and so does the disk when the kernel does.
    drop(release);
    assert_eq!(stuck.read(0, 4096).await, [0; 4096]);
    assert_eq!(server.end().await.leaked, 0);
}

#[tokio::test]
async fn a_stop_answers_what_a_stalled_disk_holds_and_counts_what_the_kernel_keeps() {
    let (stalled, pool, release) = stalled();
    let limits = Limits { quiet: Duration::from_millis(100), ..Limits::default() };
    let server = Running::of(vec![("stalled", Arc::new(stalled))], limits);
    let mut stuck = Client::open(&server, "stalled").await;
    for cookie in 0..20 {
        stuck.ask(0, cookie, 0, 4096).await;
    }
    while pool.running() < 2 {
        tokio::task::yield_now().await;
    }
    let began = Instant::now();
    let ((), served) = tokio::join!(
        async {
            for _ in 0..20 {
                assert_eq!(stuck.reply().await.1, 108, "not told that the server stops");
            }
            stuck.is_closed().await;
        },
        server.end(),
    );
    assert!(began.elapsed() < Duration::from_secs(5), "the stop took {:?}", began.elapsed());
    assert_eq!(served.leaked, 2, "both threads are in the kernel");
    drop(release);
    assert_eq!(pool.close(LONG).await, 0);
}
