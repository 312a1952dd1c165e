//! `bench startup`: how a daemon starts on a host that is full of leftovers, against the kernel's floor and the
//! serial way. Each count gets a host of its own: network and mount namespaces that end with the thread.

mod parts;
mod serial;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum;
use hearth_host::test_support::{in_private_namespaces, is_root};
use serde_json::json;

use super::daemon::{self, Ground};
use super::table::Table;
use crate::dirty::hearth::Leftovers;
use crate::program;
use crate::stop::Stop;

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leaked slots, one column each.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [4000, 10000])]
    slots: Vec<u32>,
    /// The daemon; a release build if there is one.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// State directory with kernel and template, for creates.
    #[arg(long, value_name = "DIR", env = "HEARTH_TEST_STATE")]
    state: Option<PathBuf>,
    /// The template to create from.
    #[arg(long, value_name = "NAME", default_value = "busybox")]
    template: String,
    /// Creates during the reclaim, and as many afterwards.
    #[arg(long, value_name = "N", default_value_t = 50)]
    creates: u32,
    /// Slots of which the serial removal is replayed.
    #[arg(long, value_name = "N", default_value_t = 100)]
    sample: u32,
    /// Seconds after which that replay ends; the rest of its sample counts as equally slow.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    serial_limit: u64,
    /// How often floor and reclaim are measured, in turn; their ratio is that of the medians.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
    /// Parts to run; all by default.
    #[arg(long, value_name = "PART,…", value_delimiter = ',', value_enum)]
    only: Vec<Part>,
    /// Where to write the numbers as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A target that is not met is a failure.
    #[arg(long)]
    strict: bool,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Bare unmount and unlink of as many namespaces.
    Floor,
    /// The daemon's start and reclaim with nothing else to do.
    Reclaim,
    /// The same with creates from the moment it is ready.
    Creates,
    /// Mode `blocking` with a budget, at the largest count.
    Blocking,
    /// One program per rule, link and namespace, replayed on a sample.
    Serial,
}

impl Args {
    fn wants(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// Whether the run counts as good.
pub(crate) fn run(args: &Args, stop: &Stop) -> Result<bool> {
    ensure!(is_root(), "the benchmark makes namespaces and links: run it as root");
    ensure!(!args.slots.is_empty() && !args.slots.contains(&0), "--slots: at least one, each at least 1");
    ensure!(
        args.creates > 0 && args.sample > 0 && args.rounds > 0,
        "--creates, --sample and --rounds are at least 1"
    );
    let daemons = [Part::Reclaim, Part::Creates, Part::Blocking].into_iter().any(|part| args.wants(part));
    let binary = daemons.then(|| daemon::binary(args.binary.as_deref())).transpose()?;
    if args.wants(Part::Creates) {
        let state = args.state.as_deref().context(
            "creates need a kernel and a template: give --state or HEARTH_TEST_STATE (scripts/test makes one in \
             target/test-state), or leave the part out with --only",
        )?;
        let template = state.join("templates").join(&args.template);
        ensure!(template.exists(), "{} is not there", template.display());
    }
    let shown = binary.as_ref().map_or_else(|| "none".to_owned(), |b| b.display().to_string());
    eprintln!("binary: {shown}");
    let mut table = Table::new(&args.slots);
    let measured =
        args.slots.iter().try_for_each(|count| measure(args, *count, binary.as_deref(), &mut table, stop));
    // What was measured before an error is worth as much.
    println!("{}", table.text());
    println!("Ratios are of one run on one machine. Binary: {shown}");
    if let Some(path) = &args.json {
        let all = json!({
            "bench": "startup",
            "counts": args.slots,
            "complete": measured.is_ok(),
            "binary": binary,
            "kernel": fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
            "cpus": std::thread::available_parallelism()?.get(),
            "iptables": program::run("iptables", &["-V"], "").unwrap_or_default().trim(),
            "rows": table.json(),
        });
        fs::write(path, serde_json::to_string_pretty(&all)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    measured?;
    Ok(!args.strict || table.all_met())
}

/// All parts at one count, each on a fresh host: a namespace in which thousands of links died before is up to twice
/// as slow.
fn measure(args: &Args, count: u32, binary: Option<&Path>, table: &mut Table, stop: &Stop) -> Result<()> {
    let mut bench = parts::Count { args, count, table, stop, reclaim: vec![], floor: vec![] };
    let largest = args.slots.iter().max() == Some(&count);
    let in_turn: [(bool, parts::Run); 2] =
        [(args.wants(Part::Floor), parts::floor), (args.wants(Part::Reclaim), parts::reclaim)];
    let once: [(bool, parts::Run); 2] = [
        (args.wants(Part::Creates), parts::creates),
        (args.wants(Part::Blocking) && largest, parts::blocking),
    ];
    let rounds = (0..args.rounds).flat_map(|_| in_turn);
    for (_, part) in rounds.chain(once).filter(|(wanted, _)| *wanted) {
        on_a_host(|| with_leftovers(&mut bench, binary, part))?;
    }
    if args.wants(Part::Serial) {
        on_a_host(|| serial::measure(&mut bench))?;
    }
    Ok(())
}

/// Runs `f` on a host of its own.
fn on_a_host(f: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    in_private_namespaces(|| {
        program::run("ip", &["link", "set", "lo", "up"], "")?;
        f()
    })
    .context("make namespaces")?
}

/// One part among leftovers. What it leaves is removed, whatever happened.
fn with_leftovers(bench: &mut parts::Count<'_>, binary: Option<&Path>, part: parts::Run) -> Result<()> {
    let ground = Ground::new(binary, bench.args.state.as_deref())?;
    let leftovers = Leftovers {
        layout: ground.layout.clone(),
        slots: bench.count,
        rules: true,
        processes: 0,
        dir: ground.dir().join("dirty"),
    };
    // The daemon must be gone first, which each part sees to.
    let measured = leftovers.make(bench.stop).and_then(|()| part(bench, &ground, &leftovers));
    let cleaned = leftovers.clean().and_then(|_| ground.clean());
    match (measured, cleaned) {
        (Ok(()), cleaned) => cleaned,
        (Err(e), Ok(())) => Err(e),
        (Err(e), Err(left)) => Err(anyhow!("{e:#}; and not all was removed: {left:#}")),
    }
}
