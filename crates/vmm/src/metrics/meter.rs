//! What one sandbox uses: the kernel's counters put together with what its VMM told, and the last of it kept for
//! after the end, when most of these files are gone.

use std::path::PathBuf;
use std::time::Instant;

use hearth_core::exit::ExitRecord;
use hearth_core::shim::ShimSpec;
use hearth_core::usage::{CgroupCounters, DiskCounters, Usage, VmmSample};
use hearth_host::process::Ended;
use hearth_host::usage;
use tokio::sync::watch;

use crate::end_time::now_ms;

/// SIGKILL, the only signal of an OOM killer.
const SIGKILL: i32 = 9;

/// The meter of one VMM, from its start.
#[derive(Debug)]
pub(crate) struct Meter {
    pid: u32,
    tap: Option<String>,
    cgroup: Option<PathBuf>,
    started: Instant,
    oom_kills_before: Option<u64>,
    host_oom_kills_before: Option<u64>,
    sums: watch::Sender<VmmSample>,
    /// Samples, missed ones included, that there must be once the last flush has come through.
    announced: u64,
    last: Usage,
}

impl Meter {
    /// Of a VMM just started; takes the first sample, so that there is a last one however short the life.
    pub(crate) fn start(spec: &ShimSpec, pid: u32, sums: watch::Sender<VmmSample>) -> Self {
        let cgroup = usage::own_cgroup(pid, spec.id.as_str());
        let mut meter = Self {
            pid,
            tap: spec.net.as_ref().map(|net| net.tap.clone()),
            oom_kills_before: cgroup.as_deref().and_then(|dir| usage::cgroup(dir).oom_kills),
            cgroup,
            started: Instant::now(),
            host_oom_kills_before: usage::host_oom_kills(),
            sums,
            announced: 0,
            last: Usage::default(),
        };
        meter.sample();
        meter
    }

    /// Reads everything now.
    pub(crate) fn sample(&mut self) -> Usage {
        let process = usage::process(self.pid);
        let cgroup = self.cgroup.as_deref().map(usage::cgroup).unwrap_or_default();
        let net = self.tap.as_deref().and_then(|tap| usage::tap(self.pid, tap).ok());
        let last = self.last;
        let vmm = self.told();
        self.last = Usage {
            at_ms: now_ms(),
            cpu_us: cgroup.cpu_us.or(process.cpu_us).or(last.cpu_us),
            memory_bytes: cgroup.memory_bytes.or(process.resident_bytes).or(last.memory_bytes),
            memory_peak_bytes: process.resident_peak_bytes.or(last.memory_peak_bytes),
            disk: vmm.map(|v| v.disk).or(process.disk).or(last.disk),
            net: net.or(last.net),
            vmm,
        };
        self.last
    }

    /// A flush is about to be asked for: what the one before announced has come by now, or is missed.
    pub(crate) fn about_to_flush(&mut self) {
        self.settle();
    }

    /// The VMM said that a sample is on its way through the FIFO. `seen` is [`Self::counted`] before it was asked.
    pub(crate) fn announced(&mut self, seen: u64) {
        self.announced = seen + 1;
    }

    /// The VMM told its counters in the answer.
    pub(crate) fn answered(&mut self, disk: DiskCounters) {
        self.sums.send_modify(|sums| {
            sums.disk = disk;
            sums.at_ms = now_ms();
            sums.samples += 1;
        });
    }

    /// Samples so far, missed ones included.
    pub(crate) fn counted(&self) -> u64 {
        let sums = self.sums.borrow();
        sums.samples + sums.missed
    }

    /// Whether the host's kernel killed the VMM for want of memory; its words. The cgroup's own count is the best
    /// evidence; without that controller the kernel's messages are looked at, and only if it killed anybody since.
    pub(crate) fn oom(&self, ended: Ended) -> Option<String> {
        if ended.signal != Some(SIGKILL) {
            return None;
        }
        let now = self.cgroup.as_deref().and_then(|dir| usage::cgroup(dir).oom_kills);
        if let (Some(before), Some(now)) = (self.oom_kills_before, now) {
            return (now > before).then(|| {
                let said = hearth_host::kmsg::oom_kill_of(self.pid);
                said.unwrap_or_else(|| format!("memory.events of its cgroup: oom_kill {}", now - before))
            });
        }
        if usage::host_oom_kills() <= self.host_oom_kills_before {
            return None;
        }
        hearth_host::kmsg::oom_kill_of(self.pid)
    }

    /// Enters into the record what is known after the reap and after the FIFO was drained.
    pub(crate) fn finish(self, record: &mut ExitRecord) {
        self.settle();
        let counters = self.cgroup.as_deref().map(usage::cgroup);
        let counters = counters.filter(|c| *c != CgroupCounters::default());
        let vmm = self.told();
        let mut usage = self.last;
        usage.vmm = vmm;
        usage.disk = vmm.map(|v| v.disk).or(usage.disk);
        record.wall_ms = Some(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX));
        record.cpu_us = counters.and_then(|c| c.cpu_us).or(usage.cpu_us);
        record.usage = Some(Box::new(usage));
        record.cgroup = counters.map(Box::new);
    }

    fn told(&self) -> Option<VmmSample> {
        let sums = *self.sums.borrow();
        (sums.samples + sums.missed > 0).then_some(sums)
    }

    fn settle(&self) {
        let lacking = self.announced.saturating_sub(self.counted());
        if lacking > 0 {
            self.sums.send_modify(|sums| sums.missed += lacking);
        }
    }
}
