//! A store of one object over HTTP, which fails as it is told. It has threads of its own, so that nothing of a test holds it up.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// What happens to the next request for bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// It comes later.
    Slow(Duration),
    /// It never comes.
    Hang,
    /// With this answer.
    Status(u16),
    /// The connection ends.
    Close,
    /// It ends in the middle of the bytes.
    Cut,
    /// The second half of the bytes comes later; without a time never.
    Half(Option<Duration>),
    /// Fewer bytes, which are said to be all of them.
    Fewer,
}

struct State {
    object: Mutex<(Arc<Vec<u8>>, String)>,
    faults: Mutex<VecDeque<Fault>>,
    /// Ranges that were asked for, as they came.
    asked: Mutex<Vec<String>>,
    stop: AtomicBool,
}

pub(crate) struct Store {
    state: Arc<State>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
}

impl Store {
    pub(crate) fn of(data: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let state = Arc::new(State {
            object: Mutex::new((Arc::new(data), "\"first\"".to_owned())),
            faults: Mutex::default(),
            asked: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        // Who ends it may be in another network namespace, and cannot wake it by a connection.
        listener.set_nonblocking(true).expect("nonblocking");
        let address = listener.local_addr().expect("address");
        let shared = state.clone();
        let accepting = std::thread::spawn(move || {
            let mut threads = vec![];
            while !shared.stop.load(Ordering::SeqCst) {
                let Ok((stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                };
                let shared = shared.clone();
                threads.push(std::thread::spawn(move || drop(shared.serve(&stream))));
            }
            threads.into_iter().for_each(|thread| thread.join().expect("it did not panic"));
        });
        Self { state, address, accepting: Some(accepting) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/images/disk.img", self.address)
    }

    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.faults.lock().expect("not poisoned").extend(faults);
    }

    /// Another version of the object.
    pub(crate) fn replace(&self, data: Vec<u8>, etag: &str) {
        *self.state.object.lock().expect("not poisoned") = (Arc::new(data), etag.to_owned());
    }

    /// Requests for bytes so far.
    pub(crate) fn asked(&self) -> usize {
        self.state.asked.lock().expect("not poisoned").len()
    }

    /// Waits until that many requests for bytes have come.
    pub(crate) async fn until_asked(&self, count: usize) {
        let waiting = async {
            while self.asked() < count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), waiting).await.expect("no request came");
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        if let Some(accepting) = self.accepting.take() {
            accepting.join().expect("it did not panic");
        }
    }
}

impl State {
    fn wait(&self, time: Option<Duration>) {
        let begun = std::time::Instant::now();
        while !self.stop.load(Ordering::SeqCst) && time.is_none_or(|time| begun.elapsed() < time) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn serve(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        // To see a stop while nothing is asked.
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        let mut reader = BufReader::new(stream);
        loop {
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                match reader.read_line(&mut head) {
                    Ok(0) => return Ok(()),
                    Ok(_) => {}
                    Err(e)
                        if matches!(
                            e.kind(),
                            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                        ) =>
                    {
                        if self.stop.load(Ordering::SeqCst) {
                            return Ok(());
                        }
                    }
                    Err(e) => return Err(e),
                }
            }
            if !self.answer(&head, stream)? {
                return Ok(());
            }
        }
    }

    /// Whether the connection goes on.
    fn answer(&self, head: &str, mut stream: &TcpStream) -> std::io::Result<bool> {
        let header = |name: &str| {
            let line = head.lines().find(|l| l.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let (data, etag) = self.object.lock().expect("not poisoned").clone();
        let plain = |status: u16, more: &str| {
            format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{more}", more.len())
        };
        if !head.contains("/images/disk.img ") {
            stream.write_all(plain(404, if head.starts_with("HEAD") { "" } else { "nothing" }).as_bytes())?;
            return Ok(true);
        }
        if head.starts_with("HEAD") {
            let text = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\netag: {etag}\r\n\r\n", data.len());
            stream.write_all(text.as_bytes())?;
            return Ok(true);
        }
        let range = header("range").unwrap_or_default();
        self.asked.lock().expect("not poisoned").push(range.clone());
        let fault = self.faults.lock().expect("not poisoned").pop_front();
        match fault {
            Some(Fault::Slow(time)) => self.wait(Some(time)),
            Some(Fault::Hang) => {
                self.wait(None);
                return Ok(false);
            }
            Some(Fault::Close) => return Ok(false),
            Some(Fault::Status(status)) => {
                stream.write_all(plain(status, "on purpose").as_bytes())?;
                return Ok(true);
            }
            Some(Fault::Cut | Fault::Half(_) | Fault::Fewer) | None => {}
        }
        if header("if-match").is_some_and(|wanted| wanted != etag) {
            stream.write_all(plain(412, "").as_bytes())?;
            return Ok(true);
        }
        let (from, to) = range.trim_start_matches("bytes=").split_once('-').expect("a range");
        let (from, to): (usize, usize) = (from.parse().expect("from"), to.parse().expect("to"));
        let mut body = &data[from..=to];
        if matches!(fault, Some(Fault::Fewer)) {
            body = &body[..body.len() / 2];
        }
        let text = format!(
            "HTTP/1.1 206 x\r\ncontent-length: {}\r\ncontent-range: bytes {from}-{to}/{}\r\netag: {etag}\r\n\r\n",
            body.len(),
            data.len()
        );
        stream.write_all(text.as_bytes())?;
        if matches!(fault, Some(Fault::Cut)) {
            stream.write_all(&body[..body.len() / 2])?;
            return Ok(false);
        }
        if let Some(Fault::Half(time)) = fault {
            let first;
            (first, body) = body.split_at(body.len() / 2);
            stream.write_all(first)?;
            self.wait(time);
        }
        stream.write_all(body)?;
        Ok(true)
    }
}
