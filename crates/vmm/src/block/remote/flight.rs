//! One fetch per chunk, however many ask. Whoever asks may go away; the fetch goes on for the others, and ends when nobody
//! waits any more. One that had a part of the chunk before the rest has a share in it as well: it goes on to the end of the try.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::arrival::Arrival;
use super::object::RemoteError;
use super::source::Source;

/// What a fetch ended with.
pub(super) type Outcome = Result<Source, RemoteError>;

/// What a waiter gets.
#[derive(Debug)]
pub(super) enum Got {
    Chunk(Source),
    /// The part that was asked for, before the rest was there.
    Part(Bytes),
}

/// Fetches under way, by the chunk's number.
#[derive(Debug, Default)]
pub(super) struct Flights(Mutex<HashMap<u64, Entry>>);

#[derive(Debug)]
struct Entry {
    flight: Arc<Flight>,
    waiters: usize,
}

/// One fetch.
#[derive(Debug)]
pub(super) struct Flight {
    outcome: watch::Sender<Option<Outcome>>,
    pub(super) arrival: Arrival,
    /// Nobody waits any more.
    pub(super) abandoned: CancellationToken,
    last_error: Mutex<Option<String>>,
    /// The chunk was not here.
    missed: AtomicBool,
    /// Somebody had a part.
    served: AtomicBool,
}

impl Flight {
    pub(super) fn miss(&self) {
        self.missed.store(true, Ordering::Relaxed);
    }

    pub(super) fn missed(&self) -> bool {
        self.missed.load(Ordering::Relaxed)
    }

    pub(super) fn last_error(&self) -> Option<String> {
        lock(&self.last_error).clone()
    }

    pub(super) fn land(&self, outcome: Outcome) {
        self.outcome.send_replace(Some(outcome));
    }
}

/// Somebody who waits.
pub(super) struct Waiter<'a> {
    flights: &'a Flights,
    number: u64,
    pub(super) flight: Arc<Flight>,
}

impl Waiter<'_> {
    /// Waits for the end, or until `part` (where it begins in the chunk, and its length) is there; `None` if the fetch was
    /// given up.
    pub(super) async fn get(&self, part: Option<(usize, usize)>) -> Option<Result<Got, RemoteError>> {
        let flight = &self.flight;
        let mut outcome = flight.outcome.subscribe();
        let early = async {
            match part {
                Some((at, len)) => flight.arrival.part(at, len).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            landed = outcome.wait_for(Option::is_some) => landed.ok()?.clone().map(|done| done.map(Got::Chunk)),
            part = early => {
                flight.served.store(true, Ordering::Relaxed);
                Some(Ok(Got::Part(part)))
            }
            () = flight.abandoned.cancelled() => None,
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut flights = lock(&self.flights.0);
        let Some(entry) = flights.get_mut(&self.number) else { return };
        if !Arc::ptr_eq(&entry.flight, &self.flight) {
            return;
        }
        entry.waiters -= 1;
        // What has landed is being kept, and goes when that is done.
        let goes_on = entry.flight.outcome.borrow().is_some() || entry.flight.served.load(Ordering::Relaxed);
        if entry.waiters == 0 && !goes_on {
            entry.flight.abandoned.cancel();
            flights.remove(&self.number);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change of these is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Flights {
    /// Waits with the others for a chunk; the first has it fetched by `begin`, which must not wait. `early`: whether parts of
    /// it may be used before all of it is here.
    pub(super) fn join(&self, number: u64, early: bool, begin: impl FnOnce(Arc<Flight>)) -> Waiter<'_> {
        let mut flights = lock(&self.0);
        let entry = flights.entry(number).or_insert_with(|| {
            let flight = Arc::new(Flight {
                outcome: watch::Sender::new(None),
                arrival: Arrival::new(early),
                abandoned: CancellationToken::new(),
                last_error: Mutex::new(None),
                missed: AtomicBool::new(false),
                served: AtomicBool::new(false),
            });
            begin(flight.clone());
            Entry { flight, waiters: 0 }
        });
        entry.waiters += 1;
        Waiter { flights: self, number, flight: entry.flight.clone() }
    }
}

/// The task that fetches. However it ends, nobody waits for it any more, and the next who asks begins anew.
pub(super) struct Pilot<'a> {
    pub(super) flights: &'a Flights,
    pub(super) number: u64,
    pub(super) flight: Arc<Flight>,
}

impl Pilot<'_> {
    /// A try has failed: why is kept for those whose time ends before a better one. If nobody waits there is no other.
    pub(super) fn failed(&self, why: String) {
        *lock(&self.flight.last_error) = Some(why);
        let mut flights = lock(&self.flights.0);
        let ours = |entry: &&Entry| Arc::ptr_eq(&entry.flight, &self.flight);
        if flights.get(&self.number).filter(ours).is_some_and(|entry| entry.waiters == 0) {
            flights.remove(&self.number);
            self.flight.abandoned.cancel();
        }
    }
}

impl Drop for Pilot<'_> {
    fn drop(&mut self) {
        let mut flights = lock(&self.flights.0);
        if flights.get(&self.number).is_some_and(|entry| Arc::ptr_eq(&entry.flight, &self.flight)) {
            flights.remove(&self.number);
        }
        self.flight.abandoned.cancel();
    }
}
