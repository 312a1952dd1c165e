//! One fetch per chunk, however many ask. Whoever asks may go away; the fetch goes on for the others, and ends when nobody
//! waits any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::object::RemoteError;
use super::source::Source;

/// What a fetch ended with.
pub(super) type Outcome = Result<Source, RemoteError>;

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
    /// Nobody waits any more.
    pub(super) abandoned: CancellationToken,
    last_error: Mutex<Option<String>>,
}

impl Flight {
    /// Why the last try failed, for those whose time ends before a better one.
    pub(super) fn note(&self, why: String) {
        *lock(&self.last_error) = Some(why);
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
    /// Waits for the end; `None` if the fetch was given up.
    pub(super) async fn outcome(&self) -> Option<Outcome> {
        let mut outcome = self.flight.outcome.subscribe();
        tokio::select! {
            biased;
            landed = outcome.wait_for(Option::is_some) => landed.ok()?.clone(),
            () = self.flight.abandoned.cancelled() => None,
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
        if entry.waiters == 0 && entry.flight.outcome.borrow().is_none() {
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
    /// Waits with the others for a chunk; the first has it fetched by `begin`, which must not wait.
    pub(super) fn join(&self, number: u64, begin: impl FnOnce(Arc<Flight>)) -> Waiter<'_> {
        let mut flights = lock(&self.0);
        let entry = flights.entry(number).or_insert_with(|| {
            let flight = Arc::new(Flight {
                outcome: watch::Sender::new(None),
                abandoned: CancellationToken::new(),
                last_error: Mutex::new(None),
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

impl Drop for Pilot<'_> {
    fn drop(&mut self) {
        let mut flights = lock(&self.flights.0);
        if flights.get(&self.number).is_some_and(|entry| Arc::ptr_eq(&entry.flight, &self.flight)) {
            flights.remove(&self.number);
        }
        self.flight.abandoned.cancel();
    }
}
