//! A supervisor's view of a starting daemon: a thread that asks it all the time and notes every answer.

use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;

use super::daemon::Daemon;
use super::http::Connection;
use crate::stop::Stop;

/// Time between two questions.
const EVERY: Duration = Duration::from_millis(5);

/// One answer to `GET /health`. Times count from the daemon's start.
#[derive(Debug, Clone)]
pub(crate) struct Sample {
    /// When it was answered.
    pub(crate) at: Duration,
    /// How long that took.
    pub(crate) latency: Duration,
    /// Status code; 0 if the connection broke.
    pub(crate) code: u16,
    /// `reclaim.state`, empty if the body has none.
    pub(crate) reclaim: String,
    /// `reclaim.done`.
    pub(crate) done: u64,
    /// `reclaim.failed`.
    pub(crate) failed: u64,
}

/// All that was seen so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// When the port first took a connection.
    pub(crate) accepted: Option<Duration>,
    /// When `/health/live` first answered 200.
    pub(crate) live: Option<Duration>,
    /// Answers of `/health`, in order.
    pub(crate) samples: Vec<Sample>,
}

/// The thread that asks. End it with [`Watch::end`].
#[derive(Debug)]
pub(crate) struct Watch {
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Seen {
    /// When `/health` first answered 200.
    pub(crate) fn ready(&self) -> Option<Duration> {
        self.samples.iter().find(|s| s.code == 200).map(|s| s.at)
    }

    /// When the reclaim was first said to be done.
    pub(crate) fn done(&self) -> Option<Duration> {
        self.samples.iter().find(|s| s.reclaim == "done").map(|s| s.at)
    }
}

impl Watch {
    /// Begins at once, in the network namespace of the calling thread.
    pub(crate) fn start(daemon: &Daemon) -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let (began, address) = (daemon.began, daemon.address);
        let (to, until) = (Arc::clone(&seen), Arc::clone(&stop));
        let ask = move || ask(address, began, &to, &until);
        let thread = std::thread::Builder::new().name("watch".into()).spawn(ask).context("start a thread")?;
        Ok(Self { seen, stop, thread })
    }

    /// Waits until `find` finds something in what was seen.
    pub(crate) fn wait_for<T>(
        &self,
        what: &str,
        within: Duration,
        daemon: &mut Daemon,
        stop: &Stop,
        find: impl Fn(&Seen) -> Option<T>,
    ) -> Result<T> {
        let end = Instant::now() + within;
        loop {
            if let Some(found) = find(&lock(&self.seen)) {
                return Ok(found);
            }
            stop.check()?;
            daemon.check()?;
            ensure!(
                Instant::now() < end,
                "{what}: not within {} s; the daemon's last words:\n{}",
                within.as_secs(),
                daemon.last_words()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// What was seen so far.
    pub(crate) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// Stops asking.
    pub(crate) fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the thread that asks panicked"))
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ask(address: SocketAddr, began: Instant, seen: &Mutex<Seen>, stop: &AtomicBool) {
    let stopped = || stop.load(Ordering::Relaxed);
    while !stopped() && TcpStream::connect(address).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    lock(seen).accepted = Some(began.elapsed());
    let live = || Connection::open(address).ok()?.get("/health/live").ok().filter(|a| a.code == 200);
    while !stopped() && live().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    lock(seen).live = Some(began.elapsed());
    let mut connection = None;
    while !stopped() {
        let asked = Instant::now();
        let mut open = connection.take().or_else(|| Connection::open(address).ok());
        let answer = open.as_mut().and_then(|c| c.get("/health").ok());
        let (at, latency) = (began.elapsed(), asked.elapsed());
        // A connection that broke is opened anew.
        connection = open.filter(|_| answer.is_some());
        let body: Value =
            answer.as_ref().and_then(|a| serde_json::from_str(&a.body).ok()).unwrap_or_default();
        let reclaim = &body["reclaim"];
        lock(seen).samples.push(Sample {
            at,
            latency,
            code: answer.map_or(0, |a| a.code),
            reclaim: reclaim["state"].as_str().unwrap_or_default().to_owned(),
            done: reclaim["done"].as_u64().unwrap_or_default(),
            failed: reclaim["failed"].as_u64().unwrap_or_default(),
        });
        std::thread::sleep(EVERY.saturating_sub(asked.elapsed()));
    }
}
