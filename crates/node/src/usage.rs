//! What sandboxes use, summed by template for `/metrics`: shims are asked now and then, and what a VM used last is in its
//! exit record. A sum only grows, also when a sandbox goes; a daemon that starts again begins at 0, with what its
//! sandboxes use from then on.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use hearth_core::exit::ExitRecord;
use hearth_core::host::Host;
use hearth_core::id::{SandboxId, TemplateName};
use hearth_core::lifecycle::SandboxState;
use hearth_core::usage::Usage;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::disk_sums::DiskSums;
use crate::engine::Engine;
use crate::shim_client;

/// Templates with a sum of their own, those that were used first; the others have one together.
const TEMPLATES: usize = 50;
/// Its name; no template can be called so.
const OTHERS: &str = "(others)";
/// Shims asked at once.
const AT_ONCE: usize = 16;
/// Shortest time between two rounds: a thousand shims are asked in each.
const SHORTEST: Duration = Duration::from_secs(1);

/// A counter's name, help and value.
pub(crate) type Shown<T> = (&'static str, &'static str, fn(&T) -> u64);

/// Counters since the VMM's start, or sums of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Totals {
    cpu_us: u64,
    disk_read: u64,
    disk_written: u64,
    net_received: u64,
    net_sent: u64,
}

impl Totals {
    /// What is not told is as it was.
    fn of(usage: &Usage, former: Totals) -> Self {
        Self {
            cpu_us: usage.cpu_us.unwrap_or(former.cpu_us),
            disk_read: usage.disk.map_or(former.disk_read, |d| d.read_bytes),
            disk_written: usage.disk.map_or(former.disk_written, |d| d.written_bytes),
            net_received: usage.net.map_or(former.net_received, |n| n.received_bytes),
            net_sent: usage.net.map_or(former.net_sent, |n| n.sent_bytes),
        }
    }

    /// Adds what came since `former`.
    fn add(&mut self, now: Totals, former: Totals) {
        self.cpu_us += now.cpu_us.saturating_sub(former.cpu_us);
        self.disk_read += now.disk_read.saturating_sub(former.disk_read);
        self.disk_written += now.disk_written.saturating_sub(former.disk_written);
        self.net_received += now.net_received.saturating_sub(former.net_received);
        self.net_sent += now.net_sent.saturating_sub(former.net_sent);
    }
}

#[derive(Debug, Default)]
struct Sums {
    /// What each sandbox had used when it was last seen.
    last: HashMap<SandboxId, Totals>,
    by_template: BTreeMap<String, Totals>,
}

/// The sums of one engine.
#[derive(Debug, Default)]
pub(crate) struct UsageSums {
    sums: Mutex<Sums>,
    disks: DiskSums,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTemplate {
    template: String,
}

impl UsageSums {
    fn lock(&self) -> MutexGuard<'_, Sums> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sandbox begins under this daemon: all it uses counts.
    pub(crate) fn began(&self, id: &SandboxId) {
        self.lock().last.insert(id.clone(), Totals::default());
        self.disks.began(id);
    }

    /// What a sandbox has used. Of one that began under an earlier daemon what follows counts.
    fn seen(&self, id: &SandboxId, template: &TemplateName, usage: &Usage) {
        let mut sums = self.lock();
        let Some(former) = sums.last.get(id).copied() else {
            sums.last.insert(id.clone(), Totals::of(usage, Totals::default()));
            return;
        };
        let now = Totals::of(usage, former);
        sums.last.insert(id.clone(), now);
        let full = sums.by_template.len() >= TEMPLATES;
        let name = match sums.by_template.contains_key(template.as_str()) || !full {
            true => template.as_str(),
            false => OTHERS,
        };
        sums.by_template.entry(name.to_owned()).or_default().add(now, former);
    }

    /// A VM ended; its last use counts, and it is forgotten.
    pub(crate) fn ended(&self, id: &SandboxId, template: &TemplateName, exit: &ExitRecord) {
        if let Some(usage) = &exit.usage {
            let cpu_us = exit.cpu_us.or(usage.cpu_us);
            self.seen(id, template, &Usage { cpu_us, ..**usage });
        }
        self.disks.seen(id, exit.disks.clone());
        self.forget(id);
    }

    /// Nothing more will be heard of this one.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.lock().last.remove(id);
        self.disks.forget(id);
    }

    /// Adds the sums to a registry.
    pub(crate) fn register(&self, registry: &mut Registry) {
        self.disks.register(registry);
        let by_template = self.lock().by_template.clone();
        let cpu = Family::<OfTemplate, Counter<f64, std::sync::atomic::AtomicU64>>::default();
        for (template, totals) in &by_template {
            let seconds = Duration::from_micros(totals.cpu_us).as_secs_f64();
            cpu.get_or_create(&OfTemplate { template: template.clone() }).inc_by(seconds);
        }
        registry.register("vmm_cpu_seconds", "CPU time of sandboxes by template", cpu);
        let bytes: [Shown<Totals>; 4] = [
            ("vmm_disk_read_bytes", "Read by guests from their disks", |t| t.disk_read),
            ("vmm_disk_written_bytes", "Written by guests to their disks", |t| t.disk_written),
            ("vmm_network_received_bytes", "Received by guests", |t| t.net_received),
            ("vmm_network_sent_bytes", "Sent by guests", |t| t.net_sent),
        ];
        for (name, help, value) in bytes {
            let family = Family::<OfTemplate, Counter>::default();
            for (template, totals) in &by_template {
                family.get_or_create(&OfTemplate { template: template.clone() }).inc_by(value(totals));
            }
            registry.register(name, format!("{help}, by template"), family);
        }
    }
}

impl<H: Host> Engine<H> {
    /// Asks all shims at the interval of their samples, until the engine ends.
    pub(crate) async fn sum_usage(&self) {
        let every = self.context.config.stats_interval;
        if every.is_zero() {
            return;
        }
        let sums = &self.context.meters.usage;
        while self.stop.run_until_cancelled(tokio::time::sleep(every.max(SHORTEST))).await.is_some() {
            let running = self.list().unwrap_or_default();
            let running = running.into_iter().filter(|v| v.state == SandboxState::Running);
            let asked = running.filter_map(|view| {
                let shim = view.shim?;
                Some(async move {
                    let asked = futures::join!(shim_client::usage(&shim), shim_client::disks(&shim));
                    (view.record, asked)
                })
            });
            let mut asked = futures::stream::iter(asked).buffer_unordered(AT_ONCE);
            while let Some(Some((record, (usage, disks)))) = self.stop.run_until_cancelled(asked.next()).await
            {
                // One that ended while it was asked is forgotten, and stays so.
                let runs = self.context.books.find(record.id.as_str());
                let runs = runs.is_ok_and(|h| h.view.borrow().state == SandboxState::Running);
                if let Some(usage) = usage.filter(|_| runs) {
                    sums.seen(&record.id, &record.spec.template, &usage);
                }
                if let Some(disks) = disks.filter(|_| runs) {
                    sums.disks.seen(&record.id, disks);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hearth_core::exit::ExitReason;
    use hearth_core::usage::{DiskCounters, NetCounters};

    use super::*;

    fn id(n: usize) -> SandboxId {
        format!("sandbox{n:09}").parse().unwrap()
    }

    fn template(name: &str) -> TemplateName {
        name.parse().unwrap()
    }

    fn used(cpu_us: u64, written_bytes: u64, sent_bytes: Option<u64>) -> Usage {
        Usage {
            cpu_us: Some(cpu_us),
            disk: Some(DiskCounters { written_bytes, ..DiskCounters::default() }),
            net: sent_bytes.map(|sent_bytes| NetCounters { sent_bytes, ..NetCounters::default() }),
            ..Usage::default()
        }
    }

    fn sum(sums: &UsageSums, template: &str) -> (u64, u64, u64) {
        let t = sums.lock().by_template.get(template).copied().unwrap_or_default();
        (t.cpu_us, t.disk_written, t.net_sent)
    }

    #[test]
    fn sums_grow_by_what_is_new_and_keep_what_went() {
        let sums = UsageSums::default();
        let base = template("base");
        sums.began(&id(1));
        sums.seen(&id(1), &base, &used(100, 10, Some(1)));
        sums.seen(&id(1), &base, &used(150, 10, None));
        assert_eq!(sum(&sums, "base"), (150, 10, 1));
        // It began under an earlier daemon.
        sums.seen(&id(2), &base, &used(5000, 500, Some(50)));
        assert_eq!(sum(&sums, "base"), (150, 10, 1));
        sums.seen(&id(2), &base, &used(5001, 502, Some(53)));
        assert_eq!(sum(&sums, "base"), (151, 12, 4));
        let mut exit = ExitRecord::new(ExitReason::Stopped, 1, "");
        exit.usage = Some(Box::new(used(160, 11, Some(1))));
        exit.cpu_us = Some(170);
        sums.ended(&id(1), &base, &exit);
        assert_eq!(sum(&sums, "base"), (171, 13, 4));
        assert_eq!(sums.lock().last.len(), 1, "one that ended is forgotten");
    }

    #[test]
    fn templates_beyond_the_bound_are_summed_together() {
        let sums = UsageSums::default();
        for n in 0..TEMPLATES + 5 {
            sums.began(&id(n));
            sums.seen(&id(n), &template(&format!("t{n}")), &used(2, 0, None));
        }
        assert_eq!(sums.lock().by_template.len(), TEMPLATES + 1);
        assert_eq!(sum(&sums, OTHERS), (10, 0, 0));
        assert_eq!(sum(&sums, "t0"), (2, 0, 0));
        let mut registry = Registry::with_prefix("hearth");
        sums.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("hearth_vmm_cpu_seconds_total{template=\"(others)\"} 0.00001\n"), "{text}");
    }
}
