//! Metrics of what the daemon tells others: events, webhook, traces, its log. Each has a count of what was lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hearth_node::events::EventCounts;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::OfReason;
use crate::logging::LogLines;
use crate::serve::{traces, webhook};

/// What is counted by those who tell.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) webhook: Arc<webhook::Counts>,
    pub(crate) traces: Arc<traces::Counts>,
    pub(crate) log: LogLines,
}

impl Told {
    /// Nothing told yet.
    pub(crate) fn new(log: LogLines) -> Self {
        Self { webhook: Arc::default(), traces: Arc::default(), log }
    }
}

pub(super) fn register(registry: &mut Registry, events: EventCounts, told: &Told) {
    let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let mut counter = |name: &str, help: &str, n: u64| registry.register(name, help, ConstCounter::new(n));
    counter("events", "Events told, those that were dropped too", events.told);
    counter("webhook_delivered", "Events that the webhook's address took", read(&told.webhook.delivered));
    counter("webhook_failures", "Tries to post events that failed", read(&told.webhook.failures));
    counter(
        "webhook_missed",
        "Events not kept until their turn came to be posted",
        read(&told.webhook.missed),
    );
    let help = "Events that were refused for so long that they were given up";
    counter("webhook_dropped", help, read(&told.webhook.dropped));
    counter("traces_sent", "Spans that the collector took", read(&told.traces.sent));
    counter(
        "traces_dropped",
        "Spans dropped since the collector is slow or away",
        read(&told.traces.dropped),
    );
    let mut lost = |name: &str, help: &str, dropped: u64, unwritten: u64| {
        let family = Family::<OfReason, Counter>::default();
        family.get_or_create(&OfReason { reason: "queue-full" }).inc_by(dropped);
        family.get_or_create(&OfReason { reason: "not-written" }).inc_by(unwritten);
        registry.register(name, help, family);
    };
    let help = "Events lost: dropped, or shown to watchers and not written to the journal";
    lost("events_lost", help, events.dropped, events.unwritten);
    lost(
        "log_lines_lost",
        "Lines of the daemon's log that were lost",
        told.log.dropped(),
        told.log.unwritten(),
    );
    registry.register("events_last_number", "Number of the last event", ConstGauge::new(events.last));
}
