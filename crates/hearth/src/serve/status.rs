//! The node's status: one value, and what it is called on each interface.

use serde::Serialize;
use tokio::sync::watch;

/// Where the node is in its own life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Status {
    /// The census is not done; requests are refused with a reason.
    Starting,
    /// Requests are served.
    Healthy,
    /// No new sandboxes; the others go on.
    Draining,
    /// Something the node needs fails.
    Unhealthy,
}

impl Status {
    /// The word for it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Status::Starting => "starting",
            Status::Healthy => "healthy",
            Status::Draining => "draining",
            Status::Unhealthy => "unhealthy",
        }
    }

    /// Whether `GET /health` answers 200.
    pub(crate) fn is_ready(self) -> bool {
        matches!(self, Status::Healthy | Status::Draining)
    }
}

/// A status with its reason.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    pub(crate) status: Status,
    pub(crate) reason: String,
    /// When it became so, milliseconds since the Unix epoch.
    pub(crate) since_ms: u64,
}

/// The one writer of the status.
#[derive(Debug)]
pub(crate) struct StatusCell(watch::Sender<Report>);

impl StatusCell {
    /// Begins as `starting`, never as anything better.
    pub(crate) fn new() -> Self {
        let reason = "not begun".to_owned();
        Self(watch::Sender::new(Report { status: Status::Starting, reason, since_ms: super::now_ms() }))
    }

    /// A reader; costs nothing to read.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Report> {
        self.0.subscribe()
    }

    /// Changes the status.
    pub(crate) fn set(&self, status: Status, reason: impl Into<String>) {
        let reason = reason.into();
        self.0.send_if_modified(|now| {
            // A node that drains serves no new sandboxes again.
            if now.status == Status::Draining && status != Status::Draining {
                return false;
            }
            if now.status != status {
                now.since_ms = super::now_ms();
                tracing::info!(status = status.as_str(), "{reason}");
            }
            *now = Report { status, reason, since_ms: now.since_ms };
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_not_ready_and_never_leaves_draining() {
        let cell = StatusCell::new();
        assert!(!cell.subscribe().borrow().status.is_ready());
        cell.set(Status::Healthy, "");
        cell.set(Status::Draining, "asked to");
        cell.set(Status::Healthy, "");
        assert_eq!(cell.subscribe().borrow().status, Status::Draining);
    }
}
