//! `bench block`: our NBD server against qemu-nbd and nbdkit, on the same file with the same client (fio's nbd engine): what
//! gets through, and the CPU time it takes each server. The servers take turns within each round, so that the machine's
//! other load hits all alike.

mod remote;
mod servers;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::daemon;
use super::table::{Table, Target, Unit};
use crate::program;
use crate::stop::Stop;
use servers::{Kind, Server};

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The server; a release build if there is one.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Seconds of each measurement.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// How often each is taken; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Requests in flight, one column each.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 32])]
    depths: Vec<u32>,
    /// MiB of the file, which is in the page cache.
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = clap::value_parser!(u32).range(64..))]
    size: u32,
    /// Directory for the file and the sockets.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Only rows with this in their name, such as "randread 4k".
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Where to write the numbers as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A target that is not met is a failure.
    #[arg(long)]
    strict: bool,
}

const PATTERNS: [&str; 4] = ["read", "randread", "write", "randwrite"];
const SIZES: [&str; 2] = ["4k", "1m"];

/// One measurement.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    /// Bytes a second.
    rate: f64,
    /// CPU seconds of the server per GiB.
    cpu: f64,
}

/// Whether the run counts as good.
pub(crate) fn run(args: &Args, stop: &Stop) -> Result<bool> {
    let binary = daemon::binary(args.binary.as_deref())?;
    let engines = program::run("fio", &["--enghelp"], "").context("fio makes the load: install it")?;
    ensure!(
        engines.lines().any(|l| l.trim() == "nbd"),
        "this fio has no nbd engine: take one built with libnbd"
    );
    let mut builder = tempfile::Builder::new();
    builder.prefix("hb");
    let dir = match &args.dir {
        Some(dir) => builder.tempdir_in(dir),
        None => builder.tempdir(),
    }
    .context("make a directory")?;
    let file = dir.path().join("disk");
    fill(&file, args.size)?;
    eprintln!("binary: {}", binary.display());
    let mut table = Table::new(&args.depths);
    let idle = servers::idle(&binary, &file, dir.path())?;
    let target = Some(Target::AtMost(1.0));
    table.set("memory of an idle server and disk, MiB", Unit::Times, target, args.depths[0], Some(idle));
    if remote::NAME.contains(&args.only) {
        remote::measure(&binary, &file, dir.path(), &mut table, args.depths[0], stop)?;
    }
    let mut raw = vec![];
    let measured = measure_all(args, &binary, &file, dir.path(), &mut table, &mut raw, stop);
    // What was measured before an error is worth as much.
    println!("{}", table.text());
    println!(
        "Ratios are of one run on one machine: medians of {} rounds of {} s.",
        args.rounds, args.seconds
    );
    if let Some(path) = &args.json {
        let all = json!({
            "bench": "block",
            "counts": args.depths,
            "complete": measured.is_ok(),
            "binary": binary,
            "kernel": fs::read_to_string("/proc/sys/kernel/osrelease")?.trim(),
            "cpus": std::thread::available_parallelism()?.get(),
            "client": program::run("fio", &["--version"], "")?.trim(),
            "rows": table.json(),
            "samples": raw,
        });
        fs::write(path, serde_json::to_string_pretty(&all)?)
            .with_context(|| format!("write {}", path.display()))?;
    }
    measured?;
    Ok(!args.strict || table.all_met())
}

/// A file of data that no server can shorten.
fn fill(path: &Path, mib: u32) -> Result<()> {
    let mut file = File::create_new(path).with_context(|| format!("make {}", path.display()))?;
    for number in 0..mib {
        let byte = number as u8 | 1;
        file.write_all(&vec![byte; 1 << 20]).context("fill the file")?;
    }
    file.sync_all().context("sync the file")
}

fn measure_all(
    args: &Args,
    binary: &Path,
    file: &Path,
    dir: &Path,
    table: &mut Table,
    raw: &mut Vec<Value>,
    stop: &Stop,
) -> Result<()> {
    for pattern in PATTERNS {
        for size in SIZES {
            let name = format!("{pattern} {size}");
            for depth in args.depths.iter().copied().filter(|_| name.contains(&args.only)) {
                let mut samples: BTreeMap<Kind, Vec<Sample>> = BTreeMap::new();
                for round in 0..args.rounds {
                    for kind in Kind::ALL {
                        stop.check()?;
                        let server = Server::start(kind, binary, file, dir)?;
                        let sample = measure(args, &server, pattern, size, depth);
                        server.end()?;
                        let sample = sample?;
                        raw.push(json!({
                            "server": kind.name(), "pattern": pattern, "block": size, "depth": depth, "round": round,
                            "bytes_per_second": sample.rate, "cpu_seconds_per_gib": sample.cpu,
                        }));
                        samples.entry(kind).or_default().push(sample);
                    }
                }
                note(table, &name, depth, &samples);
                eprintln!("{name}, depth {depth}: done");
            }
        }
    }
    Ok(())
}

/// Rows of one load: rates, then ratios and what they should be.
fn note(table: &mut Table, name: &str, depth: u32, samples: &BTreeMap<Kind, Vec<Sample>>) {
    let of = |kind: Kind, part: fn(&Sample) -> f64| median(samples.get(&kind)?.iter().map(part).collect());
    for kind in Kind::ALL {
        let rate = of(kind, |s| s.rate).map(|bytes| bytes / f64::from(1 << 20));
        table.set(format!("{name}: {}, MiB/s", kind.name()), Unit::Count, None, depth, rate);
    }
    let ratio = |kind, part| Some(of(Kind::Hearth, part)? / of(kind, part)?);
    for (other, least) in [(Kind::QemuNbd, 0.9), (Kind::Nbdkit, 1.0)] {
        let row = format!("{name}: hearth / {}", other.name());
        table.set(row, Unit::Times, Some(Target::AtLeast(least)), depth, ratio(other, |s| s.rate));
    }
    for other in [Kind::QemuNbd, Kind::Nbdkit] {
        let row = format!("{name}: CPU per byte, hearth / {}", other.name());
        table.set(row, Unit::Times, Some(Target::AtMost(1.0)), depth, ratio(other, |s| s.cpu));
    }
}

fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}

fn measure(args: &Args, server: &Server, pattern: &str, size: &str, depth: u32) -> Result<Sample> {
    let before = server.cpu_seconds()?;
    let output = program::run(
        "fio",
        &[
            "--ioengine=nbd",
            &format!("--uri=nbd+unix:///?socket={}", server.socket().display()),
            &format!("--rw={pattern}"),
            &format!("--bs={size}"),
            &format!("--iodepth={depth}"),
            &format!("--runtime={}", args.seconds),
            &format!("--size={}m", args.size),
            "--time_based",
            "--randrepeat=1",
            "--norandommap",
            "--name=bench",
            "--output-format=json",
        ],
        "",
    )?;
    let used = server.cpu_seconds()? - before;
    let (bytes, seconds) = done(&output, pattern.ends_with("read"))?;
    ensure!(bytes > 0.0 && seconds > 0.0, "fio moved nothing:\n{output}");
    Ok(Sample { rate: bytes / seconds, cpu: used / (bytes / f64::from(1 << 30)) })
}

/// Bytes and seconds out of fio's answer, before which it may put words.
fn done(output: &str, read: bool) -> Result<(f64, f64)> {
    let from = output.find('{').context("fio gave no JSON")?;
    let all: Value = serde_json::from_str(&output[from..]).context("fio's JSON")?;
    let job = &all["jobs"][0][if read { "read" } else { "write" }];
    let bytes = job["io_bytes"].as_f64().context("no io_bytes in fio's JSON")?;
    let millis = job["runtime"].as_f64().context("no runtime in fio's JSON")?;
    Ok((bytes, millis / 1000.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn what_fio_says_is_found_behind_its_words() {
        let output = r#"note: x
{"jobs": [{"read": {"io_bytes": 4096, "runtime": 500}, "write": {"io_bytes": 8192, "runtime": 1000}}]}"#;
        assert_eq!(done(output, true).unwrap(), (4096.0, 0.5));
        assert_eq!(done(output, false).unwrap(), (8192.0, 1.0));
        assert!(done("{}", true).is_err() && done("nothing", true).is_err());
    }
}
