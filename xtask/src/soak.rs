//! The soak: a daemon on a host of its own makes and deletes sandboxes for minutes while daemon, shims and VMMs are
//! killed at random. It counts what there is of every kind, and fails unless all of it comes back to where it was.
//!
//! Sandboxes have the VMM `process`: what is tried is the keeping of books, not a guest.

mod chaos;
mod churn;
mod counts;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use hearth_host::cgroup::Cgroups;
use hearth_host::test_support::{in_private_namespaces, is_root};
use tokio::task::JoinSet;

use crate::bench::daemon::{self, Daemon, Ground};
use crate::program;
use crate::stop::Stop;
use chaos::{Chaos, Victim};
use churn::{Lives, Outcome};
use counts::Counts;

/// How long a daemon may take to be ready, and everything to come to rest.
const WITHIN: Duration = Duration::from_secs(120);
/// Lives before the baseline: what is made once, such as the pool and its threads, is there then.
const WARM_UP: u64 = 20;
/// Between two looks.
const ROUND: Duration = Duration::from_millis(200);

/// Arguments of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How long to go on
    #[arg(long, default_value_t = 10.0, value_name = "N")]
    minutes: f64,
    /// Creates per second, if the machine keeps up
    #[arg(long, default_value_t = 10, value_name = "R")]
    rate: u32,
    /// Something is killed about once in so many creates; 0: nothing ever
    #[arg(long, default_value_t = 20, value_name = "N")]
    kill_every: u32,
    /// Decides what is killed and when; taken from the clock if absent, and printed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Seconds between two lines of the table
    #[arg(long, default_value_t = 10, value_name = "N")]
    every: u64,
    /// State directory with a kernel and the template
    #[arg(long, env = "HEARTH_TEST_STATE", value_name = "DIR")]
    state: PathBuf,
    /// Template of the sandboxes
    #[arg(long, default_value = "busybox", value_name = "NAME")]
    template: String,
    /// The program to try; the release build beside this one by default
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Whether every count came back.
pub(crate) fn run(args: &Args, stop: &Stop) -> Result<bool> {
    ensure!(is_root(), "the soak makes namespaces and links: run it as root");
    let time = Duration::try_from_secs_f64(60.0 * args.minutes).context("--minutes")?;
    ensure!(args.rate > 0 && args.every > 0, "--rate and --every are at least 1");
    let template = args.state.join("templates").join(&args.template);
    ensure!(template.exists(), "{} is not there; scripts/test makes one", template.display());
    let binary = daemon::binary(args.binary.as_deref())?;
    let on_a_host = || {
        program::run("ip", &["link", "set", "lo", "up"], "")?;
        let ground = Ground::new(Some(&binary), Some(&args.state))?;
        let mut node = Node::start(&ground)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let good = runtime.block_on(soak(args, time, &ground, &mut node, stop));
        // Whatever happened: nothing of it may stay.
        let ended = node.end().and_then(|()| clear(&ground));
        let good = good?;
        ended?;
        Ok(good)
    };
    in_private_namespaces(on_a_host).context("make namespaces")?
}

/// The daemon that runs now.
struct Node<'a> {
    ground: &'a Ground,
    daemon: Option<Daemon>,
}

impl<'a> Node<'a> {
    fn start(ground: &'a Ground) -> Result<Self> {
        Ok(Self { ground, daemon: Some(ground.start("")?) })
    }

    fn daemon(&mut self) -> Result<&mut Daemon> {
        self.daemon.as_mut().context("no daemon runs")
    }

    /// SIGKILL, and a new one.
    fn replace(&mut self) -> Result<()> {
        if let Some(daemon) = self.daemon.take() {
            daemon.kill()?;
        }
        self.daemon = Some(self.ground.start("")?);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.daemon.take().map_or(Ok(()), Daemon::end)
    }
}

/// Lives and kills until the time is over, then rest. Whether all counts came back.
async fn soak(
    args: &Args,
    time: Duration,
    ground: &Ground,
    node: &mut Node<'_>,
    stop: &Stop,
) -> Result<bool> {
    let seed = args.seed.unwrap_or_else(clock);
    println!("seed {seed}");
    let lives = Lives::new(node.daemon()?.address, &args.template)?;
    lives.wait_ready(WITHIN).await?;
    for n in 0..WARM_UP {
        stop.check()?;
        let outcome = lives.one(format!("warm-{n}"), Duration::ZERO).await?;
        ensure!(outcome == Outcome::Whole, "a create failed before anything was killed");
    }
    let baseline = rest(ground, node, &lives, None, stop).await?;
    println!("{}", Counts::heading());
    println!("{}", baseline.row("baseline"));

    let mut chaos = Chaos::new(seed, args.kill_every);
    let mut tally = Tally::default();
    let mut running: JoinSet<Result<Outcome>> = JoinSet::new();
    let began = Instant::now();
    let (end, gap) = (began + time, Duration::from_secs(1) / args.rate);
    let (mut next_life, mut next_row) = (began, began + Duration::from_secs(args.every));
    while Instant::now() < end {
        stop.check()?;
        tokio::time::sleep_until(next_life.into()).await;
        next_life = (next_life + gap).max(Instant::now());
        while let Some(outcome) = running.try_join_next() {
            tally.note(outcome??);
        }
        node.daemon()?.check()?;
        // A bound on what lives at once, should deletes not keep up.
        if running.len() < churn::AT_ONCE {
            tally.begun += 1;
            let (lives, name) = (lives.clone(), format!("soak-{}", tally.begun));
            let stay = chaos.stay();
            running.spawn(async move { lives.one(name, stay).await });
            match chaos.victim() {
                Some(Victim::Daemon) => {
                    node.replace()?;
                    tally.daemons += 1;
                }
                Some(victim) => tally.count(victim, chaos.kill(victim, ground)?),
                None => {}
            }
        }
        if Instant::now() >= next_row {
            next_row += Duration::from_secs(args.every);
            println!("{} {tally}", Counts::take(ground, node.daemon()?)?.row(&elapsed(began)));
        }
    }
    while let Some(outcome) = running.join_next().await {
        tally.note(outcome??);
    }
    let last = rest(ground, node, &lives, Some(&baseline), stop).await?;
    println!("{} {tally}", last.row("at rest"));
    let left = last.beyond(&baseline);
    for line in &left {
        println!("not back: {line}");
    }
    println!("{}", if left.is_empty() { "every count is back" } else { "something stayed" });
    Ok(left.is_empty())
}

/// Waits until the counts are those of before, or until time is over; without any before, until they stay the same.
async fn rest(
    ground: &Ground,
    node: &mut Node<'_>,
    lives: &Lives,
    before: Option<&Counts>,
    stop: &Stop,
) -> Result<Counts> {
    lives.wait_ready(WITHIN).await?;
    // Idle threads of the daemon end after ten seconds.
    let steady = Duration::from_secs(12);
    let (end, mut since) = (Instant::now() + WITHIN, Instant::now());
    let mut last = Counts::take(ground, node.daemon()?)?;
    loop {
        stop.check()?;
        tokio::time::sleep(ROUND).await;
        let mut now = Counts::take(ground, node.daemon()?)?;
        now.ready = lives.ready_slots().await?;
        if !now.same_things(&last) {
            since = Instant::now();
        }
        last = now;
        let back = before.map_or(since.elapsed() >= steady, |before| last.beyond(before).is_empty());
        if back || Instant::now() >= end {
            return Ok(last);
        }
    }
}

/// Removes what the instance has on disk and in the cgroup file system; the rest ends with the namespaces.
fn clear(ground: &Ground) -> Result<()> {
    let cgroups = Cgroups::locate(&ground.layout.instance)?;
    for id in chaos::ids(&cgroups)? {
        cgroups.release(&id, WITHIN)?;
    }
    cgroups.remove_root()?;
    ground.clean()
}

/// What happened so far.
#[derive(Debug, Default)]
struct Tally {
    begun: u64,
    whole: u64,
    cut: u64,
    daemons: u64,
    shims: u64,
    vmms: u64,
}

impl Tally {
    fn note(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Whole => self.whole += 1,
            Outcome::Cut => self.cut += 1,
        }
    }

    fn count(&mut self, victim: Victim, killed: bool) {
        match victim {
            Victim::Shim => self.shims += u64::from(killed),
            Victim::Vmm => self.vmms += u64::from(killed),
            Victim::Daemon => self.daemons += u64::from(killed),
        }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { begun, whole, cut, daemons, shims, vmms } = self;
        write!(
            f,
            " lives {begun} ({whole} whole, {cut} cut), killed: daemon {daemons}, shim {shims}, vmm {vmms}"
        )
    }
}

fn elapsed(since: Instant) -> String {
    format!("{} s", since.elapsed().as_secs())
}

/// A seed that differs from run to run.
fn clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::from(now.subsec_nanos()) ^ now.as_secs()
}
