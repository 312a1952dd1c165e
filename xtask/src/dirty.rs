//! Leftovers on purpose: what a killed daemon leaves, in an instance of its own, for tests and benchmarks; and
//! their removal. It acts on the network namespace it runs in.
//!
//! What is about to be made is noted in a record first, and only what a record names is removed: an instance that
//! a real daemon serves is never touched.

pub(crate) mod e2b;
mod e2b_processes;
pub(crate) mod e2b_rules;
pub(crate) mod hearth;
mod record;
pub(crate) mod resident;
pub(crate) mod sweep;

use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use hearth_core::id::{InstanceName, VethPrefix};
use hearth_core::network::{Cidr, SlotLayout};
use serde::{Deserialize, Serialize};

use crate::stop::Stop;
use record::{Place, Record};

/// What to make or remove.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Slots to make.
    #[arg(long, value_name = "N", default_value_t = 100)]
    slots: u32,
    /// Whose leftovers.
    #[arg(long, value_enum, default_value_t = Layout::Hearth)]
    layout: Layout,
    /// Also firewall rules of the host: hearth's one table, or e2b's rules per slot.
    #[arg(long)]
    rules: bool,
    /// Processes in cgroups and slots of their own; e2b's have sockets and FIFOs too.
    #[arg(long, value_name = "K", default_value_t = 0)]
    processes: u32,
    /// Tag of what is made; no real daemon may have it.
    #[arg(long, value_name = "NAME", default_value = "dirty")]
    instance: InstanceName,
    /// First part of host link names (hearth).
    #[arg(long, value_name = "PREFIX", default_value = "dty")]
    veth_prefix: VethPrefix,
    /// IPv4 network of the slots (hearth).
    #[arg(long, value_name = "CIDR", default_value = "10.213.0.0/16")]
    cidr: Cidr,
    /// First slot number (e2b).
    #[arg(long, value_name = "N", default_value_t = 1)]
    from: u32,
    /// Where sockets and FIFOs go (e2b); a directory of the tool's own by default.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Remove what earlier calls with this layout and instance made.
    #[arg(long)]
    clean: bool,
}

/// Whose way of naming and building.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Layout {
    /// This project's own.
    Hearth,
    /// The e2b orchestrator's, first generation.
    E2b,
}

/// Makes or removes, as asked.
pub(crate) fn run(args: &Args, stop: &Stop) -> Result<()> {
    ensure!(hearth_host::test_support::is_root(), "dirty-host makes namespaces and links: run it as root");
    let place = Place::of(args.layout, &args.instance);
    let record = place.load()?;
    if args.clean {
        let Some(mut record) = record else {
            println!("nothing to remove: dirty-host made nothing of {}", place.name());
            return Ok(());
        };
        if record.network != record::network()? {
            // Rules of the same names here would be somebody else's.
            eprintln!("made in another network namespace; rules there stay, and die with it");
            record.rules = false;
        }
        let removed = match record.layout {
            Layout::Hearth => hearth(&record, &place).clean()?.to_string(),
            Layout::E2b => e2b(&record, &place).clean()?.to_string(),
        };
        place.forget()?;
        println!("removed of {}: {removed}", place.name());
        return Ok(());
    }
    ensure!(args.processes <= args.slots, "--processes is at most --slots: each lives in a slot of its own");
    let known = record.is_some();
    let record = wanted(args, record, &place)?;
    match record.layout {
        Layout::Hearth => {
            let leftovers = hearth(&record, &place);
            if !known {
                leftovers.refuse_if_in_use()?;
            }
            place.save(&record)?;
            leftovers.make(stop)?;
        }
        Layout::E2b => {
            let leftovers = e2b(&record, &place);
            if !known {
                leftovers.refuse_if_in_use()?;
            }
            place.save(&record)?;
            leftovers.make(stop)?;
        }
    }
    println!(
        "made of {}: {} slots, {} processes, rules: {}; remove them with --clean",
        place.name(),
        record.slots,
        record.processes,
        if record.rules { "yes" } else { "no" }
    );
    Ok(())
}

/// The record after this call: what was there and what is asked for.
fn wanted(args: &Args, earlier: Option<Record>, place: &Place) -> Result<Record> {
    let new = Record {
        layout: args.layout,
        instance: args.instance.clone(),
        veth_prefix: args.veth_prefix.clone(),
        cidr: args.cidr,
        from: args.from,
        slots: args.slots,
        rules: args.rules,
        processes: args.processes,
        gateway: e2b_rules::gateway()?,
        dir: args.dir.clone().unwrap_or_else(|| place.dir().to_owned()),
        own_cgroup_root: !e2b_processes::cgroup_root()?.exists(),
        network: record::network()?,
    };
    let Some(earlier) = earlier else { return Ok(new) };
    let same = (&new.veth_prefix, new.cidr, new.from, &new.dir, new.network)
        == (&earlier.veth_prefix, earlier.cidr, earlier.from, &earlier.dir, earlier.network);
    if !same || new.slots < earlier.slots {
        bail!("{} was made with other values, more slots or elsewhere; run --clean first", place.name());
    }
    Ok(Record {
        rules: new.rules || earlier.rules,
        processes: new.processes.max(earlier.processes),
        gateway: earlier.gateway,
        own_cgroup_root: earlier.own_cgroup_root,
        ..new
    })
}

fn hearth(record: &Record, place: &Place) -> hearth::Leftovers {
    hearth::Leftovers {
        layout: SlotLayout {
            instance: record.instance.clone(),
            veth_prefix: record.veth_prefix.clone(),
            cidr: record.cidr,
        },
        slots: record.slots,
        rules: record.rules,
        processes: record.processes,
        dir: place.dir().to_owned(),
    }
}

fn e2b(record: &Record, place: &Place) -> e2b::Leftovers {
    e2b::Leftovers {
        instance: record.instance.clone(),
        from: record.from,
        slots: record.slots,
        rules: record.rules.then(|| record.gateway.clone()),
        processes: record.processes,
        own_cgroup_root: record.own_cgroup_root,
        files: record.dir.clone(),
        dir: place.dir().to_owned(),
    }
}
