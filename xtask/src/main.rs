//! Repository chores. `cargo xtask check` is what a commit must pass. Nothing here ships.

mod bench;
mod check;
mod dirty;
mod lab;
mod program;
mod soak;
mod stop;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Repository chores of hearth")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Format, lints, crate direction, kernel access, paths and links in documents, scripts.
    Check {
        /// Without clippy, which takes by far the longest.
        #[arg(long)]
        fast: bool,
        /// Checkout to look at; this one by default.
        #[arg(long, value_name = "DIR")]
        root: Option<PathBuf>,
    },
    /// Make leftovers as a killed daemon leaves them, or remove those made so (needs root).
    DirtyHost(dirty::Args),
    /// Run tests as root in a throwaway virtual machine (needs no root).
    Lab(lab::Args),
    /// Make and delete sandboxes for minutes, with random kills, and count what stays (needs root).
    Soak(soak::Args),
    /// Measure the product on this machine (most of them need root).
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> anyhow::Result<ExitCode> {
    if dirty::resident::is_one() {
        dirty::resident::stay();
    }
    let good = match Args::parse().chore {
        Chore::Check { fast, root } => check::run(&root.unwrap_or_else(own_checkout), fast)?,
        Chore::DirtyHost(args) => stop::watching_signals(|stop| dirty::run(&args, stop)).map(|()| true)?,
        Chore::Lab(args) => {
            return Ok(stop::watching_signals(|stop| lab::run(&args, &own_checkout(), stop))?.into());
        }
        Chore::Soak(args) => stop::watching_signals(|stop| soak::run(&args, stop))?,
        Chore::Bench(bench) => stop::watching_signals(|stop| bench::run(&bench, stop))?,
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The checkout this program was built from.
fn own_checkout() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}
