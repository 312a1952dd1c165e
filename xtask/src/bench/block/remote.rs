//! The first byte of a cold chunk: how much longer a read through our server takes than the one request for that chunk that it
//! makes. Both ask the same store, in this process, by turns; what is compared are medians of one run.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};

use super::median;
use super::servers::Server;
use crate::bench::table::{Table, Target, Unit};
use crate::stop::Stop;

/// Rows have this in their name.
pub(super) const NAME: &str = "cold chunk";
/// Bytes of a chunk, as the server has it.
const CHUNK: usize = 1 << 20;
/// Bytes of a guest's read.
const READ: u32 = 4096;

/// A store of one object, on loopback, for as long as the process lives.
struct Store(SocketAddr);

impl Store {
    fn start(object: File) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("bind the store")?;
        let address = listener.local_addr()?;
        let object = Arc::new(object);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let object = object.clone();
                std::thread::spawn(move || serve(&stream, &object));
            }
        });
        Ok(Self(address))
    }

    fn url(&self) -> String {
        format!("http://{}/disk", self.0)
    }
}

/// Answers until the client has gone.
fn serve(stream: &TcpStream, object: &File) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    loop {
        let (mut range, mut head) = (None, false);
        loop {
            let mut line = String::new();
            ensure!(reader.read_line(&mut line)? > 0, "gone");
            head |= line.starts_with("HEAD ");
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some((from, to)) = line.strip_prefix("range: bytes=").and_then(|r| r.split_once('-')) {
                range = Some((from.parse::<u64>()?, to.parse::<u64>()?));
            }
        }
        let size = object.metadata()?.len();
        let mut stream = stream;
        let Some((from, to)) = range.filter(|_| !head) else {
            write!(stream, "HTTP/1.1 200 x\r\ncontent-length: {size}\r\netag: \"bench\"\r\n\r\n")?;
            continue;
        };
        let mut body = vec![0; usize::try_from(to + 1 - from)?];
        object.read_exact_at(&mut body, from)?;
        write!(
            stream,
            "HTTP/1.1 206 x\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{to}/{size}\r\netag: \"bench\"\r\n\r\n",
            body.len()
        )?;
        stream.write_all(&body)?;
    }
}

/// One request for a chunk, over a connection that stays: milliseconds until all of it is there.
fn request(stream: &mut BufReader<TcpStream>, chunk: usize) -> Result<f64> {
    let from = chunk * CHUNK;
    let begun = Instant::now();
    let ask = format!("GET /disk HTTP/1.1\r\nhost: x\r\nrange: bytes={from}-{}\r\n\r\n", from + CHUNK - 1);
    stream.get_mut().write_all(ask.as_bytes())?;
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        ensure!(stream.read_line(&mut line)? > 0, "the store hung up");
    }
    let mut body = vec![0; CHUNK];
    stream.read_exact(&mut body)?;
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// A client of our server that has chosen its disk.
fn client(socket: &Path) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).context("connect")?;
    stream.read_exact(&mut [0; 18])?;
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
    stream.write_all(&hello)?;
    stream.read_exact(&mut [0; 10])?;
    Ok(stream)
}

/// A guest's read at the begin of a chunk: milliseconds.
fn read(stream: &mut UnixStream, chunk: usize) -> Result<f64> {
    let begun = Instant::now();
    let mut frame = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0];
    frame.extend(0_u64.to_be_bytes());
    frame.extend(((chunk * CHUNK) as u64).to_be_bytes());
    frame.extend(READ.to_be_bytes());
    stream.write_all(&frame)?;
    let mut answer = vec![0; 16 + READ as usize];
    stream.read_exact(&mut answer)?;
    ensure!(answer[4..8] == [0; 4], "a read failed");
    Ok(begun.elapsed().as_secs_f64() * 1e3)
}

/// Measures with all chunks of the file, each cold once.
pub(super) fn measure(
    binary: &Path,
    file: &Path,
    dir: &Path,
    table: &mut Table,
    column: u32,
    stop: &Stop,
) -> Result<()> {
    let object = File::open(file).context("open the object")?;
    let chunks = usize::try_from(object.metadata()?.len())? / CHUNK;
    let store = Store::start(object)?;
    let server = Server::remote(binary, &store.url(), dir)?;
    let measured = (|| -> Result<_> {
        let (mut direct, mut through, mut warm) = (vec![], vec![], vec![]);
        let mut store = BufReader::new(TcpStream::connect(store.0).context("connect to the store")?);
        store.get_ref().set_nodelay(true)?;
        let mut client = client(server.socket())?;
        // Both have their connections by the second.
        for chunk in 0..chunks {
            stop.check()?;
            direct.push(request(&mut store, chunk)?);
            through.push(read(&mut client, chunk)?);
            warm.push(read(&mut client, chunk)?);
        }
        Ok((median(direct), median(through), median(warm)))
    })();
    server.end()?;
    let (direct, through, warm) = measured?;
    let more = through.zip(direct).map(|(through, direct)| through - direct);
    for (row, target, value) in [
        ("one request to the store", None, direct),
        ("first byte, through the server", None, through),
        ("first byte, beyond one request", Some(Target::AtMost(1.0)), more),
        ("first byte once it is cached", None, warm),
    ] {
        table.set(format!("{NAME}: {row}"), Unit::Ms, target, column, value);
    }
    Ok(())
}
