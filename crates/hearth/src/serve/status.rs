//! The node's status as told to others: looked at, never pushed, so that it is true at the moment of the
//! question. The rules are in `hearth_node::shown`; this keeps what only the daemon knows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_core::event::EventKind;
pub(crate) use hearth_node::Status;
use hearth_node::{Desired, Events, Phase, shown};
use tokio::sync::watch;

/// The engine's loop stamps every second. Older than this, its threads are blocked.
const STALE: Duration = Duration::from_secs(5);

/// A status with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) status: Status,
    pub(crate) reason: String,
    /// When it became so, milliseconds since the Unix epoch.
    pub(crate) since_ms: u64,
}

/// The status of this daemon. Every method is short and waits for nobody who waits.
#[derive(Debug)]
pub(crate) struct StatusCell {
    last: watch::Sender<Report>,
    /// Why the daemon ends, if it does.
    ending: Mutex<Option<String>>,
    /// What the node needs and has not.
    broken: Mutex<Vec<String>>,
    beat: Heartbeat,
    events: Events,
}

impl StatusCell {
    /// Begins as `starting`, never as anything better.
    pub(crate) fn new(events: Events) -> Self {
        let reason = "not begun".to_owned();
        let report = Report { status: Status::Starting, reason, since_ms: super::now_ms() };
        Self {
            last: watch::Sender::new(report),
            ending: Mutex::default(),
            broken: Mutex::default(),
            beat: Heartbeat::new(),
            events,
        }
    }

    /// Follows the status as it was last looked at; the front looks a few times a second.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Report> {
        self.last.subscribe()
    }

    /// The status now.
    pub(crate) fn look(&self, phase: &Phase, desired: Desired) -> Report {
        let ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone();
        broken.extend(self.beat.stopped());
        let (status, reason) = shown(phase, desired, ending.as_deref(), &broken);
        let (mut changed, mut former) = (false, status);
        self.last.send_if_modified(|last| {
            if (last.status, &last.reason) == (status, &reason) {
                return false;
            }
            changed = last.status != status;
            former = last.status;
            if changed {
                last.since_ms = super::now_ms();
            }
            (last.status, last.reason) = (status, reason);
            true
        });
        let report = self.last.borrow().clone();
        if changed {
            let event = Events::now(EventKind::StatusChanged).because(report.reason.as_str());
            let event = event.with("status", status.as_str()).with("former", former.as_str());
            self.events.tell(event);
        }
        if changed && status == Status::Unhealthy {
            tracing::warn!(status = status.as_str(), "{}", report.reason);
        } else if changed {
            tracing::info!(status = status.as_str(), "{}", report.reason);
        }
        report
    }

    /// The daemon ends; there is no way back.
    pub(crate) fn end(&self, why: String) {
        *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// What the last checks found broken.
    pub(super) fn set_broken(&self, broken: Vec<String>) {
        *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = broken;
    }

    /// The engine's loop runs.
    pub(super) fn beat(&self) {
        self.beat.stamp(Instant::now());
    }
}

/// When the engine's loop last ran. One value, written there and read by the front.
#[derive(Debug)]
struct Heartbeat {
    began: Instant,
    /// Milliseconds from `began`.
    at: AtomicU64,
}

impl Heartbeat {
    fn new() -> Self {
        Self { began: Instant::now(), at: AtomicU64::new(0) }
    }

    fn stamp(&self, now: Instant) {
        let ms = now.saturating_duration_since(self.began).as_millis();
        self.at.store(u64::try_from(ms).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn stopped(&self) -> Option<String> {
        self.stopped_at(Instant::now())
    }

    fn stopped_at(&self, now: Instant) -> Option<String> {
        let last = Duration::from_millis(self.at.load(Ordering::Relaxed));
        let age = now.saturating_duration_since(self.began).saturating_sub(last);
        (age > STALE).then(|| format!("the engine's loop has not run for {} s", age.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_not_ready_and_heals_to_what_it_was() {
        let cell = StatusCell::new(Events::in_memory());
        assert!(!cell.subscribe().borrow().status.is_ready());
        let standby = || cell.look(&Phase::Ready, Desired::Standby);
        let first = standby();
        assert_eq!(first.status, Status::Standby);
        cell.set_broken(vec!["no disk".into()]);
        assert_eq!((standby().status, standby().reason.as_str()), (Status::Unhealthy, "no disk"));
        cell.set_broken(vec![]);
        assert_eq!((standby().status, standby().reason), (first.status, first.reason));
        cell.end("SIGTERM".into());
        assert_eq!(cell.look(&Phase::Ready, Desired::Active).status, Status::Draining);
    }

    #[test]
    fn since_changes_with_the_status_only() {
        let cell = StatusCell::new(Events::in_memory());
        let begun = cell.look(&Phase::Starting("a".into()), Desired::Active);
        let later = cell.look(&Phase::Starting("b".into()), Desired::Active);
        assert_eq!((later.since_ms, later.reason.as_str()), (begun.since_ms, "b"));
    }

    #[test]
    fn a_loop_that_stopped_is_noticed_and_forgiven() {
        let beat = Heartbeat::new();
        let at = |s| beat.began + Duration::from_secs(s);
        assert_eq!(beat.stopped_at(at(5)), None);
        assert_eq!(beat.stopped_at(at(7)).unwrap(), "the engine's loop has not run for 7 s");
        beat.stamp(at(7));
        assert_eq!(beat.stopped_at(at(8)), None);
    }
}
