//! What is counted as it happens, for `/metrics`: how long each step of a life takes, and how VMs end. What can be
//! looked at when asked is not counted here.

use std::time::Duration;

use hearth_core::exit::{ExitReason, ExitRecord};
use hearth_core::steps::{ReleaseStep, Step};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::usage::UsageSums;

/// Bounds in seconds: a slot is reset in a millisecond, a guest under plain emulation boots in a minute.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStep {
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    reason: &'static str,
}

/// Counters and histograms of one engine.
#[derive(Debug)]
pub struct Meters {
    create: Histogram,
    create_steps: Family<OfStep, Histogram>,
    create_failures: Family<OfReason, Counter>,
    delete: Histogram,
    delete_steps: Family<OfStep, Histogram>,
    exits: Family<OfReason, Counter>,
    pub(crate) usage: UsageSums,
}

fn histogram() -> Histogram {
    Histogram::new(BOUNDS)
}

impl Default for Meters {
    fn default() -> Self {
        let meters = Self {
            create: histogram(),
            create_steps: Family::new_with_constructor(histogram),
            create_failures: Family::default(),
            delete: histogram(),
            delete_steps: Family::new_with_constructor(histogram),
            exits: Family::default(),
            usage: UsageSums::default(),
        };
        for step in Step::ALL {
            drop(meters.create_steps.get_or_create(&OfStep { step: step.as_str() }));
            drop(meters.create_failures.get_or_create(&OfReason { reason: step.as_str() }));
        }
        for reason in ["cancelled", "exhausted"] {
            drop(meters.create_failures.get_or_create(&OfReason { reason }));
        }
        for step in ReleaseStep::ALL {
            drop(meters.delete_steps.get_or_create(&OfStep { step: word(step) }));
        }
        // A value from the start: then the first one shows as a rise.
        for reason in ExitReason::ALL {
            drop(meters.exits.get_or_create(&OfReason { reason: reason.as_str() }));
        }
        meters
    }
}

/// The word for a part of the release, as a label.
fn word(step: ReleaseStep) -> &'static str {
    let place = hearth_core::steps::Place::Release(step).as_str();
    place.strip_prefix("release.").unwrap_or(place)
}

impl Meters {
    /// Adds them to a registry; it shows what they are at the time of the scrape.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("create_seconds", "From admission to a running guest", self.create.clone());
        let help = "Time of each step of creations";
        registry.register("create_step_seconds", help, self.create_steps.clone());
        let help = "Creations that ended early, by the step that failed, or why none did";
        registry.register("create_failures", help, self.create_failures.clone());
        let help = "From the begin of a release until nothing of the sandbox is left";
        registry.register("delete_seconds", help, self.delete.clone());
        let help = "Time of each part of releases, failed tries too";
        registry.register("delete_step_seconds", help, self.delete_steps.clone());
        registry.register("vmm_exits", "VMs that ended, by why", self.exits.clone());
        self.usage.register(registry);
    }

    pub(crate) fn created(&self, took: Duration) {
        self.create.observe(took.as_secs_f64());
    }

    pub(crate) fn create_step(&self, step: Step, took: Duration) {
        self.create_steps.get_or_create(&OfStep { step: step.as_str() }).observe(took.as_secs_f64());
    }

    pub(crate) fn create_failed(&self, reason: &'static str) {
        self.create_failures.get_or_create(&OfReason { reason }).inc();
    }

    pub(crate) fn deleted(&self, took: Duration) {
        self.delete.observe(took.as_secs_f64());
    }

    pub(crate) fn release_step(&self, step: ReleaseStep, took: Duration) {
        self.delete_steps.get_or_create(&OfStep { step: word(step) }).observe(took.as_secs_f64());
    }

    pub(crate) fn exited(&self, exit: &ExitRecord) {
        self.exits.get_or_create(&OfReason { reason: exit.reason.as_str() }).inc();
    }
}
