//! `GET /metrics`: made anew for each scrape from what the engine shows, so that there is no second set of
//! books. Waits for nothing. What is not known yet has no value: 0 would be a claim.

pub(crate) mod classic;
mod told;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;

use hearth_core::host::Host;
use hearth_core::lifecycle::SlotState;
use hearth_core::nbd_pool::Counts;
use hearth_core::resource::Kind;
use hearth_node::{KindProgress, PassResult, ReclaimProgress, ReclaimState, ReconcileReport, Status};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use super::Node;
pub(crate) use told::Told;

/// Kinds that are reclaimed: they have a value even if nothing ever leaked.
const RECLAIMED: [Kind; 3] = [Kind::Netns, Kind::Cgroup, Kind::Directory];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStatus {
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfThing {
    kind: &'static str,
    whose: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfResult {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfFinding {
    finding: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfReason {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTemplate {
    template: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfSandbox {
    sandbox: String,
    name: String,
    template: String,
    state: &'static str,
    vmm: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Build {
    version: &'static str,
}

/// The text of a scrape.
pub(super) fn render<H: Host>(node: &Node<H>) -> String {
    let mut registry = Registry::with_prefix("hearth");
    registry.register("build", "Version", Info::new(Build { version: env!("CARGO_PKG_VERSION") }));

    let now = node.report().status;
    let family = Family::<OfStatus, Gauge>::default();
    for status in Status::ALL {
        family.get_or_create(&OfStatus { status: status.as_str() }).set(i64::from(status == now));
    }
    registry.register("status", "1 for the present status", family);

    if let Some(work) = node.engine.work() {
        let counts = [
            ("creating", work.creating),
            ("running", work.running),
            ("exited", work.exited),
            ("deleting", work.deleting),
            ("stuck", work.stuck),
            ("unknown", node.engine.unknown().map_or(0, |u| u32::try_from(u.len()).unwrap_or(u32::MAX))),
        ];
        states(&mut registry, "sandboxes", "Sandboxes by state", counts);
        let mut slots = node.engine.slot_counts();
        for state in SLOT_STATES {
            slots.entry(state.as_str().to_owned()).or_default();
        }
        states(&mut registry, "slots", "Network slots by state", slots);
        if let Some(counts) = node.engine.nbd_counts() {
            let Counts { used, quarantined, foreign, .. } = counts;
            let counts =
                [("free", counts.free()), ("used", used), ("quarantined", quarantined), ("foreign", foreign)];
            states(&mut registry, "nbds", "Network block devices by state", counts);
        }
    }
    sandboxes(&mut registry, node);
    let progress = node.engine.reclaim();
    reclaim(&mut registry, &progress);
    let scanned = progress.state != ReclaimState::Scanning;
    leftovers(&mut registry, scanned, &node.engine.leftovers(), &node.engine.stuck());
    reconcile(&mut registry, &node.engine.reconcile_report());
    node.engine.meters().register(&mut registry);
    told::register(&mut registry, node.engine.events().counts(), &node.told);

    let mut text = String::new();
    if let Err(e) = encode(&mut text, &registry) {
        tracing::error!("metrics: {e}");
    }
    text
}

/// Templates with a series of their own; what others have is counted together.
const TEMPLATES: usize = 50;

/// Sandboxes by template, the commonest first; and each of them, if that is wanted.
fn sandboxes<H: Host>(registry: &mut Registry, node: &Node<H>) {
    let mut by_template = BTreeMap::<String, i64>::new();
    let each = Family::<OfSandbox, Gauge>::default();
    let known = node.engine.each(|view| {
        let spec = &view.record.spec;
        match by_template.get_mut(spec.template.as_str()) {
            Some(n) => *n += 1,
            None => drop(by_template.insert(spec.template.to_string(), 1)),
        }
        if node.per_sandbox {
            let of = OfSandbox {
                sandbox: view.record.id.to_string(),
                name: view.record.name.to_string(),
                template: spec.template.to_string(),
                state: view.state.as_str(),
                vmm: spec.vmm.as_str(),
            };
            each.get_or_create(&of).set(i64::try_from(view.record.created_at_ms / 1000).unwrap_or(i64::MAX));
        }
    });
    if known.is_err() {
        return;
    }
    let mut by_template: Vec<_> = by_template.into_iter().collect();
    by_template.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let family = Family::<OfTemplate, Gauge>::default();
    for (i, (template, n)) in by_template.into_iter().enumerate() {
        let template = if i < TEMPLATES { template } else { "(others)".to_owned() };
        family.get_or_create(&OfTemplate { template }).inc_by(n);
    }
    registry.register("template_sandboxes", "Sandboxes by template, in any state", family);
    if node.per_sandbox {
        let help = "When the sandbox was created, since the Unix epoch";
        registry.register("sandbox_created_timestamp_seconds", help, each);
    }
}

/// How far the release of leftovers is, as in `/health`.
fn reclaim(registry: &mut Registry, progress: &ReclaimProgress) {
    let family = Family::<OfState, Gauge>::default();
    let all = [ReclaimState::Scanning, ReclaimState::Running, ReclaimState::Done, ReclaimState::Off];
    for state in all {
        let of = OfState { state: state.as_str().to_owned() };
        family.get_or_create(&of).set(i64::from(state == progress.state));
    }
    registry.register("reclaim_state", "1 for where the release of leftovers is", family);
    let counts = [
        ("found", progress.total),
        ("released", progress.done),
        ("failed", progress.failed),
        ("pending", progress.pending()),
    ];
    let counts = counts.map(|(state, n)| (state, u32::try_from(n).unwrap_or(u32::MAX)));
    states(registry, "reclaim_leftovers", "Leftovers of the first round and later passes", counts);
    if let Some(rest) = progress.estimate() {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(rest.as_secs_f64());
        let help = "Time to the end of the first round at the rate so far";
        registry.register("reclaim_estimate_seconds", help, gauge);
    }
    if !progress.census.is_empty() {
        let family = Family::<OfThing, Gauge>::default();
        for (kind, looked) in &progress.census {
            let all = [("named", looked.named), ("nameless", looked.nameless), ("foreign", looked.foreign)];
            for (whose, n) in all {
                let of = OfThing { kind: kind.as_str(), whose };
                family.get_or_create(&of).set(i64::try_from(n).unwrap_or(i64::MAX));
            }
        }
        registry.register("census_things", "What the census of the start looked at", family);
    }
}

/// Those without a reason inside; the others appear once there is one.
const SLOT_STATES: [SlotState; 7] = [
    SlotState::Free,
    SlotState::Building,
    SlotState::Ready,
    SlotState::Assigned,
    SlotState::Resetting,
    SlotState::Releasing,
    SlotState::Leaked,
];

fn states<S: Into<String>>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    counts: impl IntoIterator<Item = (S, u32)>,
) {
    let family = Family::<OfState, Gauge>::default();
    for (state, count) in counts {
        family.get_or_create(&OfState { state: state.into() }).set(i64::from(count));
    }
    registry.register(name, help, family);
}

fn leftovers(
    registry: &mut Registry,
    scanned: bool,
    progress: &BTreeMap<Kind, KindProgress>,
    of_sandboxes: &BTreeMap<Kind, u64>,
) {
    let seen = progress.keys().chain(of_sandboxes.keys()).copied();
    let kinds: BTreeSet<Kind> = RECLAIMED.into_iter().chain(seen).collect();
    let of = |kind: &Kind| progress.get(kind).copied().unwrap_or_default();
    if scanned {
        let mut gauge = |name: &str, help: &str, value: &dyn Fn(&Kind) -> u64| {
            let family = Family::<OfKind, Gauge>::default();
            for kind in &kinds {
                let value = i64::try_from(value(kind)).unwrap_or(i64::MAX);
                family.get_or_create(&OfKind { kind: kind.as_str() }).set(value);
            }
            registry.register(name, help, family);
        };
        gauge("leaked", "Leftovers without an owner; the only good value is 0", &|k| of(k).leaked);
        let of_sandbox = |kind: &Kind| of_sandboxes.get(kind).copied().unwrap_or(0);
        let stuck = |kind: &Kind| of(kind).stuck + of_sandbox(kind);
        gauge("stuck", "Tried to release without success: leftovers, and parts of stuck sandboxes", &stuck);
    }
    let mut counter = |name: &str, help: &str, value: fn(KindProgress) -> u64| {
        let family = Family::<OfKind, Counter>::default();
        for kind in &kinds {
            family.get_or_create(&OfKind { kind: kind.as_str() }).inc_by(value(of(kind)));
        }
        registry.register(name, help, family);
    };
    counter("reclaimed", "Leftovers released", |k| k.reclaimed);
    counter("reclaim_failures", "Tries to release a leftover without success", |k| k.failures);
}

/// Findings of reconcile passes by what they are.
const FINDINGS: [&str; 3] = ["leaked", "gone", "host-firewall"];

fn reconcile(registry: &mut Registry, report: &ReconcileReport) {
    let passes = Family::<OfResult, Counter>::default();
    for result in PassResult::ALL {
        let n = report.passes.get(&result).copied().unwrap_or(0);
        passes.get_or_create(&OfResult { result: result.as_str() }).inc_by(n);
    }
    registry.register("reconcile_passes", "Reconcile passes by how they ended", passes);
    let findings = Family::<OfFinding, Counter>::default();
    for finding in FINDINGS {
        let n = report.findings.get(finding).copied().unwrap_or(0);
        findings.get_or_create(&OfFinding { finding }).inc_by(n);
    }
    registry.register("reconcile_findings", "What was not as the books say, each counted once", findings);
    let Some((at_ms, took)) = report.last else { return };
    #[expect(clippy::cast_precision_loss, reason = "milliseconds stay exact for longer than this runs")]
    let at = at_ms as f64 / 1000.0;
    for (name, help, value) in [
        ("reconcile_last_timestamp_seconds", "End of the last pass, since the Unix epoch", at),
        ("reconcile_last_seconds", "How long the last pass took", took.as_secs_f64()),
    ] {
        let gauge = Gauge::<f64, AtomicU64>::default();
        gauge.set(value);
        registry.register(name, help, gauge);
    }
}
