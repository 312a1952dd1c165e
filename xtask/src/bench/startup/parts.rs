//! The parts that run at one count: the kernel's floor, and the daemon in its modes.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use hearth_core::network::{SlotIndex, SlotLayout};

use super::Args;
use crate::bench::creates;
use crate::bench::daemon::{Daemon, Ground};
use crate::bench::http::Connection;
use crate::bench::stats::{falls, flips, ms, percentile};
use crate::bench::table::{Table, Target, Unit};
use crate::bench::watch::{Sample, Seen, Watch};
use crate::dirty::hearth::Leftovers;
use crate::dirty::sweep;
use crate::program;
use crate::stop::Stop;

/// Budget of the blocking mode, seconds.
const BUDGET_SECONDS: u32 = 2;
/// How long a daemon may take to be ready, whatever the target is.
const READY: Duration = Duration::from_secs(120);
/// How long a gauge may lag behind.
const GAUGE: Duration = Duration::from_secs(2);

/// One column of the table while it is filled.
pub(super) struct Count<'a> {
    pub(super) args: &'a Args,
    pub(super) count: u32,
    pub(super) table: &'a mut Table,
    pub(super) stop: &'a Stop,
    /// Times of the undisturbed reclaim, from exec to done, one a round.
    pub(super) reclaim: Vec<Duration>,
    /// Times of the kernel's floor.
    pub(super) floor: Vec<Duration>,
}

/// One part: it finds the leftovers made, and may leave some.
pub(super) type Run = fn(&mut Count<'_>, &Ground, &Leftovers) -> Result<()>;

impl Count<'_> {
    pub(super) fn set(
        &mut self,
        measure: &'static str,
        unit: Unit,
        target: Option<Target>,
        value: impl Into<Option<f64>>,
    ) {
        self.table.set(measure, unit, target, self.count, value.into());
    }

    /// The same for a value that each round makes more certain.
    fn set_anew(&mut self, measure: &'static str, unit: Unit, target: Option<Target>, value: Option<f64>) {
        self.table.forget(measure, self.count);
        self.set(measure, unit, target, value);
    }

    fn say(&self, what: &str) {
        eprintln!("{} slots: {what}", self.count);
    }
}

/// Slots as they were made, told apart from later ones of the same name.
struct Made {
    namespaces: Vec<(PathBuf, Identity)>,
    /// Name and index.
    links: HashSet<(String, String)>,
}

type Identity = (u64, i64, i64);

/// The kernel gives inode numbers of dead namespaces to new ones; the time of the bind tells them apart.
fn identity(path: &PathBuf) -> Option<Identity> {
    fs::symlink_metadata(path).ok().map(|m| (m.ino(), m.mtime(), m.mtime_nsec()))
}

impl Made {
    fn look(layout: &SlotLayout, count: u32) -> Result<Self> {
        let paths = (1..=count).filter_map(SlotIndex::new).map(|slot| layout.netns_path(slot));
        let namespaces: Vec<_> = paths.filter_map(|p| identity(&p).map(|id| (p, id))).collect();
        anyhow::ensure!(
            namespaces.len() == count as usize,
            "{} of {count} namespaces are there",
            namespaces.len()
        );
        Ok(Self { namespaces, links: veths()? })
    }

    /// Namespaces and links of these that are still there.
    fn left(&self) -> Result<(usize, usize)> {
        let namespaces = self.namespaces.iter().filter(|(path, id)| identity(path) == Some(*id)).count();
        Ok((namespaces, veths()?.intersection(&self.links).count()))
    }
}

fn veths() -> Result<HashSet<(String, String)>> {
    // `7: hbv1@if2: <BROADCAST…`
    let list = program::run("ip", &["-o", "link", "show", "type", "veth"], "")?;
    let parse = |line: &str| {
        let (index, rest) = line.split_once(": ")?;
        let (name, _) = rest.split_once('@')?;
        Some((name.to_owned(), index.to_owned()))
    };
    Ok(list.lines().filter_map(parse).collect())
}

/// Unmount and unlink of all, until every link is gone.
pub(super) fn floor(bench: &mut Count<'_>, _: &Ground, leftovers: &Leftovers) -> Result<()> {
    bench.say("the kernel's floor");
    let began = Instant::now();
    leftovers.drop_namespaces(bench.stop)?;
    let ours = |name: &str| leftovers.layout.slot_of_veth(name).is_some();
    sweep::wait_until_gone(ours, sweep::patience(bench.count), bench.stop)?;
    let took = began.elapsed();
    bench.floor.push(took);
    bench.say(&format!("the kernel's floor: {:.2} s", took.as_secs_f64()));
    bench.set("kernel's floor", Unit::S, None, percentile(&bench.floor, 50).map(|t| t.as_secs_f64()));
    Ok(())
}

/// Starts a daemon, lets `f` measure, and ends the daemon whatever happened.
fn with_daemon(
    ground: &Ground,
    lines: &str,
    f: impl FnOnce(&mut Daemon, &Watch) -> Result<()>,
) -> Result<()> {
    let mut daemon = ground.start(lines)?;
    let measured = Watch::start(&daemon).and_then(|watch| {
        let measured = f(&mut daemon, &watch);
        measured.and(watch.end())
    });
    let ended = daemon.end();
    measured.and(ended)
}

fn wait_until_done(bench: &Count<'_>, daemon: &mut Daemon, watch: &Watch) -> Result<Duration> {
    let within = sweep::patience(bench.count);
    watch.wait_for("the reclaim's end", within, daemon, bench.stop, Seen::done)
}

/// Start and reclaim with nothing else to do.
pub(super) fn reclaim(bench: &mut Count<'_>, ground: &Ground, leftovers: &Leftovers) -> Result<()> {
    let made = Made::look(&leftovers.layout, bench.count)?;
    bench.say("start and reclaim");
    with_daemon(ground, "", |daemon, watch| {
        let done = wait_until_done(bench, daemon, watch)?;
        let (namespaces, links) = made.left()?;
        let leaked = leaked(daemon)?;
        let seen = watch.seen();
        start(bench, &seen);
        let until_done: Vec<&Sample> = seen.samples.iter().filter(|s| s.at <= done).collect();
        let latencies: Vec<Duration> = until_done.iter().map(|s| s.latency).collect();
        let percent = |p| percentile(&latencies, p).map(ms);
        bench.set("/health during the reclaim, p50", Unit::Ms, None, percent(50));
        bench.set("/health during the reclaim, p99", Unit::Ms, Some(Target::Below(50.0)), percent(99));
        bench.set("/health during the reclaim, longest", Unit::Ms, None, percent(100));
        bench.say(&format!("released after how long: {}", course(&until_done)));
        let steps = until_done.iter().map(|s| s.done).collect::<HashSet<u64>>().len();
        bench.set("counts of released seen", Unit::Count, Some(Target::AtLeast(3.0)), steps as f64);
        let fell = falls(seen.samples.iter().map(|s| s.done));
        bench.set("times that count fell", Unit::Count, Some(Target::Is(0.0)), f64::from(fell));
        let failed = seen.samples.last().map(|s| s.failed as f64);
        bench.set("releases that failed", Unit::Count, Some(Target::Is(0.0)), failed);
        bench.say(&format!("reclaim done after {:.2} s", done.as_secs_f64()));
        bench.reclaim.push(done);
        let median = |times: &[Duration]| percentile(times, 50).map(|t| t.as_secs_f64());
        let (ours, floor) = (median(&bench.reclaim), median(&bench.floor));
        bench.set("exec to reclaim done", Unit::S, None, ours);
        let ratio = ours.zip(floor).map(|(ours, floor)| ours / floor);
        if bench.floor.len() == bench.reclaim.len() {
            bench.set_anew("reclaim / floor", Unit::Times, Some(Target::AtMost(1.5)), ratio);
        }
        bench.set("leaked namespaces left", Unit::Count, Some(Target::Is(0.0)), namespaces as f64);
        bench.set("leaked links left", Unit::Count, Some(Target::Is(0.0)), links as f64);
        bench.set("hearth_leaked", Unit::Count, Some(Target::Is(0.0)), leaked);
        Ok(())
    })
}

/// When each tenth was released, for people: where the time goes.
fn course(samples: &[&Sample]) -> String {
    let total = samples.last().map_or(0, |s| s.done);
    let tenth = |n: u64| {
        let first = samples.iter().find(|s| s.done * 10 >= total * n)?;
        Some(format!("{}0 % {:.1} s", n, first.at.as_secs_f64()))
    };
    (1..=10).filter_map(tenth).collect::<Vec<_>>().join(", ")
}

/// What a supervisor sees of the start.
fn start(bench: &mut Count<'_>, seen: &Seen) {
    bench.set("exec to port accepts", Unit::Ms, Some(Target::AtMost(100.0)), seen.accepted.map(ms));
    bench.set("exec to /health/live 200", Unit::Ms, None, seen.live.map(ms));
    bench.set("exec to ready", Unit::Ms, Some(Target::AtMost(1000.0)), seen.ready().map(ms));
    let flips = flips(seen.samples.iter().map(|s| s.code));
    bench.set("/health turned to 200", Unit::Count, Some(Target::Is(1.0)), f64::from(flips.to_ready));
    bench.set("/health turned back", Unit::Count, Some(Target::Is(0.0)), f64::from(flips.back));
}

/// Creates from the moment the daemon is ready, and as many when the reclaim is over.
pub(super) fn creates(bench: &mut Count<'_>, ground: &Ground, leftovers: &Leftovers) -> Result<()> {
    let made = Made::look(&leftovers.layout, bench.count)?;
    bench.say("reclaim while creating");
    with_daemon(ground, "", |daemon, watch| {
        watch.wait_for("ready", READY, daemon, bench.stop, Seen::ready)?;
        let (args, address) = (bench.args, daemon.address);
        let run = |label| creates::run(address, &args.template, label, args.creates, bench.stop);
        let during = run("during")?;
        let done = wait_until_done(bench, daemon, watch)?;
        let (namespaces, links) = made.left()?;
        let seen = watch.seen();
        let idle = run("idle")?;
        bench.say(&format!("steps during the reclaim, p50: {}", during.steps()));
        bench.say(&format!("slowest create during the reclaim: {}", during.slowest()));
        bench.say(&format!("steps when idle, p50: {}", idle.steps()));
        for why in during.failed.iter().chain(&idle.failed) {
            bench.say(&format!("a create failed: {why}"));
        }
        let failed = during.failed.len() + idle.failed.len();
        let inside = during.ended.iter().filter(|at| at.duration_since(daemon.began) <= done).count();
        bench.set("creates that failed", Unit::Count, Some(Target::Is(0.0)), failed as f64);
        bench.set("creates within the reclaim", Unit::Count, None, inside as f64);
        // Those after its end would flatter the numbers.
        let during = &during.took[..inside];
        let of = |list: &[Duration], p| percentile(list, p);
        bench.set("create when idle, p50", Unit::Ms, None, of(&idle.took, 50).map(ms));
        bench.set("create when idle, p99", Unit::Ms, None, of(&idle.took, 99).map(ms));
        bench.set("create during the reclaim, p50", Unit::Ms, None, of(during, 50).map(ms));
        let most = Some(Target::AtMost(100.0));
        bench.set("create during the reclaim, p99", Unit::Ms, most, of(during, 99).map(ms));
        bench.set("create during the reclaim, longest", Unit::Ms, None, of(during, 100).map(ms));
        let ratio = of(during, 50).zip(of(&idle.took, 50)).map(|(d, i)| d.as_secs_f64() / i.as_secs_f64());
        bench.set("create during / idle, p50", Unit::Times, Some(Target::AtMost(2.0)), ratio);
        let latencies: Vec<Duration> =
            seen.samples.iter().filter(|s| s.at <= done).map(|s| s.latency).collect();
        let p99 = percentile(&latencies, 99).map(ms);
        bench.set("/health while creating, p99", Unit::Ms, Some(Target::Below(50.0)), p99);
        bench.set("exec to reclaim done while creating", Unit::S, None, done.as_secs_f64());
        let left = (namespaces + links) as f64;
        bench.set("leaked things left after creating", Unit::Count, Some(Target::Is(0.0)), left);
        Ok(())
    })
}

/// Mode `blocking`: ready when the budget is spent, the rest finished later.
pub(super) fn blocking(bench: &mut Count<'_>, ground: &Ground, leftovers: &Leftovers) -> Result<()> {
    let made = Made::look(&leftovers.layout, bench.count)?;
    bench.say("blocking mode");
    let lines = format!("[reclaim]\nmode = \"blocking\"\nbudget_seconds = {BUDGET_SECONDS}\n");
    with_daemon(ground, &lines, |daemon, watch| {
        let ready = watch.wait_for("ready", READY, daemon, bench.stop, Seen::ready)?;
        let done = wait_until_done(bench, daemon, watch)?;
        let (namespaces, links) = made.left()?;
        let seen = watch.seen();
        // Nothing to judge where all was released within the budget.
        let target = (done > ready).then(|| Target::About(f64::from(BUDGET_SECONDS), 0.5));
        bench.set("blocking, 2 s budget: exec to ready", Unit::S, target, ready.as_secs_f64());
        let before: HashSet<u64> = seen.samples.iter().filter(|s| s.code == 503).map(|s| s.done).collect();
        let rising = Some(Target::AtLeast(3.0));
        bench.set("blocking: counts of released seen with 503", Unit::Count, rising, before.len() as f64);
        let flips = flips(seen.samples.iter().map(|s| s.code));
        let turns = f64::from(flips.to_ready + flips.back);
        bench.set("blocking: changes of /health", Unit::Count, Some(Target::Is(1.0)), turns);
        bench.set("blocking: exec to reclaim done", Unit::S, None, done.as_secs_f64());
        let left = (namespaces + links) as f64;
        bench.set("blocking: leaked things left", Unit::Count, Some(Target::Is(0.0)), left);
        Ok(())
    })
}

/// Sum of `hearth_leaked` over all kinds; `None` if there is no such metric. A gauge may lag for a moment.
fn leaked(daemon: &Daemon) -> Result<Option<f64>> {
    let end = Instant::now() + GAUGE;
    loop {
        let answer = Connection::open(daemon.address).context("connect")?.get("/metrics")?;
        let sum = (answer.code == 200).then(|| sum_of(&answer.body, "hearth_leaked")).flatten();
        if sum.is_none_or(|sum| sum == 0.0) || Instant::now() >= end {
            return Ok(sum);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Sum of one metric's samples in Prometheus' text format.
fn sum_of(text: &str, metric: &str) -> Option<f64> {
    let values: Vec<f64> = text
        .lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(metric)?;
            let value = match rest.strip_prefix('{') {
                Some(labels) => labels.rsplit_once('}')?.1,
                None => rest.strip_prefix(' ')?,
            };
            value.split_whitespace().next()?.parse().ok()
        })
        .collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_only() {
        let text = "# TYPE hearth_leaked gauge\nhearth_leaked{kind=\"netns\"} 3\nhearth_leaked{kind=\"a} b\"} 2\n\
                    hearth_leaked_total 9\nhearth_slots 5 1700000000\n";
        assert_eq!(sum_of(text, "hearth_leaked"), Some(5.0));
        assert_eq!(sum_of(text, "hearth_slots"), Some(5.0));
        assert_eq!(sum_of(text, "hearth_stuck"), None);
    }
}
