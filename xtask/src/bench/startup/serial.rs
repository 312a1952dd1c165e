//! The serial way, replayed: per slot one program for each rule, one for the link, one for the namespace, with the
//! rules of all slots in place. Timed on a sample and scaled up linearly, which favours it: its time per slot grows
//! with the number of slots.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::parts::Count;
use crate::bench::stats::percentile;
use crate::bench::table::{Target, Unit};
use crate::dirty::e2b::{self, Leftovers};
use crate::dirty::e2b_rules;
use crate::program;

/// The way out that the rules name; it need not exist.
const GATEWAY: &str = "eth0";

pub(super) fn measure(bench: &mut Count<'_>) -> Result<()> {
    let sample = bench.args.sample.min(bench.count);
    let leftovers = Leftovers {
        instance: "bench".parse()?,
        from: 1,
        slots: sample,
        rules: None,
        processes: 0,
        own_cgroup_root: false,
        files: PathBuf::new(),
        dir: PathBuf::new(),
    };
    leftovers.make(bench.stop)?;
    e2b_rules::add(1..bench.count + 1, GATEWAY)?;
    eprintln!("{} slots: the serial way on {sample} of them", bench.count);
    let limit = Duration::from_secs(bench.args.serial_limit);
    let began = Instant::now();
    let mut replayed = 0;
    while replayed < sample && began.elapsed() < limit {
        bench.stop.check()?;
        replayed += 1;
        remove(replayed)?;
        if replayed % 10 == 0 {
            eprintln!("{replayed} of {sample} replayed, {:.0} s", began.elapsed().as_secs_f64());
        }
    }
    let each = began.elapsed().as_secs_f64() / f64::from(replayed);
    let all = each * f64::from(bench.count);
    bench.set("serial way: slots replayed", Unit::Count, None, f64::from(replayed));
    bench.set("serial way: each slot", Unit::Ms, None, each * 1000.0);
    bench.set("serial way: all slots, extrapolated", Unit::S, None, all);
    if let Some(ours) = percentile(&bench.reclaim, 50) {
        let ratio = all / ours.as_secs_f64();
        bench.set("serial way / reclaim", Unit::Times, Some(Target::AtLeast(100.0)), ratio);
    }
    // Rules die with the host; so would the rest, were its names not removed.
    leftovers.clean().map(drop)
}

fn remove(n: u32) -> Result<()> {
    for rule in e2b_rules::of_slot(n, GATEWAY) {
        let mut args = vec!["-w", "-t", rule.table, "-D"];
        args.extend(rule.text.split_whitespace());
        program::run("iptables", &args, "")?;
    }
    program::run("ip", &["link", "del", &e2b::veth(n)], "")?;
    program::run("ip", &["netns", "del", &format!("ns-{n}")], "").map(drop)
}
