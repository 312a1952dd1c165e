//! Benchmarks of the product as it is built, on the machine they run on. This file and `table`, `stats`, `daemon`
//! and `http` serve every benchmark; each benchmark has a module of its own.

mod block;
mod creates;
pub(crate) mod daemon;
mod http;
mod scrape;
mod startup;
mod stats;
mod table;
mod watch;

use anyhow::Result;

use crate::stop::Stop;

/// Which benchmark.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// The start of the daemon on a host full of leftovers.
    Startup(startup::Args),
    /// The block server against others with the same client (needs fio, qemu-nbd and nbdkit, no root).
    Block(block::Args),
    /// A scrape of `/metrics` of a node with many sandboxes.
    Scrape(scrape::Args),
}

/// Whether the run counts as good: it measured, and with `--strict` every target was met.
pub(crate) fn run(bench: &Bench, stop: &Stop) -> Result<bool> {
    match bench {
        Bench::Startup(args) => startup::run(args, stop),
        Bench::Block(args) => block::run(args, stop),
        Bench::Scrape(args) => scrape::run(args, stop),
    }
}
