//! What shims have counted of the disks they serve, summed by disk and kind of request for `/metrics`. It comes with the
//! usage (`crate::usage`), and its sums grow in the same way.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::block::{DiskStats, LATENCY_BUCKETS_MICROS, OperationStats};
use hearth_core::id::SandboxId;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::usage::Shown;

/// Disks that have values from the start: then the first error shows as a rise.
const ALWAYS: [&str; 2] = ["rootfs", "overlay"];
/// Disks with a sum of their own, those that were seen first; others have one together.
const DISKS: usize = 8;
/// Its name.
const OTHERS: &str = "(others)";

#[derive(Debug)]
struct Sums {
    /// What was counted of each sandbox's disks when it was last asked.
    last: HashMap<SandboxId, Vec<DiskStats>>,
    by_disk: BTreeMap<String, DiskStats>,
}

/// The sums of one engine.
#[derive(Debug)]
pub(crate) struct DiskSums(Mutex<Sums>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDisk {
    disk: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOperation {
    disk: String,
    operation: &'static str,
}

impl Default for DiskSums {
    fn default() -> Self {
        let by_disk = ALWAYS.map(|disk| (disk.to_owned(), DiskStats::default()));
        Self(Mutex::new(Sums { last: HashMap::new(), by_disk: by_disk.into() }))
    }
}

/// Adds what came since `former`. A counter that fell is of another shim than it should be, and adds nothing.
fn add(sum: &mut u64, now: u64, former: u64) {
    *sum = sum.saturating_add(now.saturating_sub(former));
}

fn add_operation(sum: &mut OperationStats, now: &OperationStats, former: &OperationStats) {
    add(&mut sum.requests, now.requests, former.requests);
    add(&mut sum.bytes, now.bytes, former.bytes);
    add(&mut sum.errors, now.errors, former.errors);
    add(&mut sum.cancelled, now.cancelled, former.cancelled);
    add(&mut sum.micros, now.micros, former.micros);
    sum.buckets.resize(LATENCY_BUCKETS_MICROS.len() + 1, 0);
    for (i, sum) in sum.buckets.iter_mut().enumerate() {
        let of = |stats: &OperationStats| stats.buckets.get(i).copied().unwrap_or(0);
        add(sum, of(now), of(former));
    }
}

fn add_disk(sum: &mut DiskStats, now: &DiskStats, former: &DiskStats) {
    add(&mut sum.limited, now.limited, former.limited);
    add(&mut sum.limited_micros, now.limited_micros, former.limited_micros);
    add_operation(&mut sum.read, &now.read, &former.read);
    add_operation(&mut sum.write, &now.write, &former.write);
    add_operation(&mut sum.flush, &now.flush, &former.flush);
    add_operation(&mut sum.discard, &now.discard, &former.discard);
    add_operation(&mut sum.zeroes, &now.zeroes, &former.zeroes);
}

impl DiskSums {
    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sandbox begins under this daemon: all that is counted of it counts.
    pub(crate) fn began(&self, id: &SandboxId) {
        self.lock().last.insert(id.clone(), vec![]);
    }

    /// What was counted of a sandbox's disks. Of one that began under an earlier daemon what follows counts.
    pub(crate) fn seen(&self, id: &SandboxId, disks: Vec<DiskStats>) {
        let mut sums = self.lock();
        let Some(former) = sums.last.get_mut(id) else {
            sums.last.insert(id.clone(), disks);
            return;
        };
        let former = std::mem::replace(former, disks.clone());
        for now in &disks {
            let own = sums.by_disk.contains_key(&now.disk) || sums.by_disk.len() < DISKS;
            let name = if own { now.disk.as_str() } else { OTHERS };
            let unseen = DiskStats::default();
            let former = former.iter().find(|d| d.disk == now.disk).unwrap_or(&unseen);
            add_disk(sums.by_disk.entry(name.to_owned()).or_default(), now, former);
        }
    }

    /// Nothing more will be heard of this one.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.lock().last.remove(id);
    }

    /// Adds the sums to a registry.
    pub(crate) fn register(&self, registry: &mut Registry) {
        let by_disk = self.lock().by_disk.clone();
        let counters: [Shown<OperationStats>; 3] = [
            ("disk_bytes", "Bytes of requests to served disks that went well", |o| o.bytes),
            ("disk_errors", "Requests to served disks answered with an error", |o| o.errors),
            ("disk_cancelled", "Requests to served disks that were given up", |o| o.cancelled),
        ];
        for (name, help, value) in counters {
            let family = Family::<OfOperation, Counter>::default();
            for (disk, stats) in &by_disk {
                for (operation, stats) in stats.operations() {
                    family.get_or_create(&OfOperation { disk: disk.clone(), operation }).inc_by(value(stats));
                }
            }
            registry.register(name, help, family);
        }
        let limited = Family::<OfDisk, Counter>::default();
        let waited = Family::<OfDisk, Counter<f64, std::sync::atomic::AtomicU64>>::default();
        for (disk, stats) in &by_disk {
            let of = OfDisk { disk: disk.clone() };
            limited.get_or_create(&of).inc_by(stats.limited);
            waited.get_or_create(&of).inc_by(Duration::from_micros(stats.limited_micros).as_secs_f64());
        }
        registry.register("disk_limited", "Requests that had to wait for the rate limit", limited);
        let help = "How long requests waited for the rate limit, all together";
        registry.register("disk_limited_seconds", help, waited);
        let help = "From a request to a served disk to its answer, without waits for the rate limit";
        registry.register("disk_request_seconds", help, Latencies(by_disk));
    }
}

/// Latencies as a histogram for each disk and kind of request.
#[derive(Debug)]
struct Latencies(BTreeMap<String, DiskStats>);

impl EncodeMetric for Latencies {
    fn encode(&self, mut encoder: MetricEncoder) -> fmt::Result {
        for (disk, stats) in &self.0 {
            for (operation, stats) in stats.operations() {
                let bounds = LATENCY_BUCKETS_MICROS.map(|micros| Duration::from_micros(micros).as_secs_f64());
                let bounds = bounds.into_iter().chain([f64::INFINITY]);
                let counts = stats.buckets.iter().copied().chain(std::iter::repeat(0));
                let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
                let of = OfOperation { disk: disk.clone(), operation };
                // The buckets' own sum: a scrape must not show a count that they do not have.
                let count = buckets.iter().map(|(_, n)| n).sum();
                let sum = Duration::from_micros(stats.micros).as_secs_f64();
                encoder.encode_family(&of)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: usize) -> SandboxId {
        format!("sandbox{n:09}").parse().unwrap()
    }

    /// So many writes of 4 KiB, half of them within 100 µs and half beyond the last bound.
    fn writes(disk: &str, pairs: u64) -> DiskStats {
        let mut buckets = vec![0; LATENCY_BUCKETS_MICROS.len() + 1];
        buckets[1] = pairs;
        buckets[LATENCY_BUCKETS_MICROS.len()] = pairs;
        let write = OperationStats {
            requests: 2 * pairs,
            bytes: 8192 * pairs,
            cancelled: pairs,
            micros: 11_000_100 * pairs,
            buckets,
            ..OperationStats::default()
        };
        DiskStats {
            disk: disk.into(),
            limited: pairs,
            limited_micros: 500_000 * pairs,
            write,
            ..DiskStats::default()
        }
    }

    fn text(sums: &DiskSums) -> String {
        let mut registry = Registry::with_prefix("hearth");
        sums.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn sums_grow_by_what_is_new_and_keep_what_went() {
        let sums = DiskSums::default();
        let lines = text(&sums).lines().count();
        assert!(text(&sums).contains("hearth_disk_errors_total{disk=\"rootfs\",operation=\"flush\"} 0\n"));
        sums.began(&id(1));
        sums.seen(&id(1), vec![writes("overlay", 1)]);
        sums.seen(&id(1), vec![writes("overlay", 3)]);
        // It began under an earlier daemon.
        sums.seen(&id(2), vec![writes("overlay", 100)]);
        sums.seen(&id(2), vec![writes("overlay", 101)]);
        sums.forget(&id(1));
        let text = text(&sums);
        let of = "disk=\"overlay\",operation=\"write\"";
        for line in [
            format!("hearth_disk_bytes_total{{{of}}} 32768"),
            format!("hearth_disk_cancelled_total{{{of}}} 4"),
            format!("hearth_disk_request_seconds_count{{{of}}} 8"),
            format!("hearth_disk_request_seconds_sum{{{of}}} 44.0004"),
            format!("hearth_disk_request_seconds_bucket{{le=\"0.00005\",{of}}} 0"),
            format!("hearth_disk_request_seconds_bucket{{le=\"0.0001\",{of}}} 4"),
            format!("hearth_disk_request_seconds_bucket{{le=\"10.0\",{of}}} 4"),
            format!("hearth_disk_request_seconds_bucket{{le=\"+Inf\",{of}}} 8"),
            "hearth_disk_limited_total{disk=\"overlay\"} 4".into(),
            "hearth_disk_limited_seconds_total{disk=\"overlay\"} 2.0".into(),
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in {text}");
        }
        assert_eq!(text.lines().count(), lines, "sandboxes make no series");
        assert_eq!(sums.lock().last.len(), 1);
    }

    #[test]
    fn disks_beyond_the_bound_are_summed_together() {
        let sums = DiskSums::default();
        for n in 0..DISKS + 5 {
            sums.began(&id(n));
            sums.seen(&id(n), vec![writes(&format!("d{n}"), 1)]);
        }
        let by_disk = &sums.lock().by_disk;
        assert_eq!((by_disk.len(), by_disk[OTHERS].write.requests), (DISKS + 1, 14));
    }
}
