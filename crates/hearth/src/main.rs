//! One binary: `serve` is the node daemon, `shim` runs one microVM, everything else is the operator's tool
//! and client. No runtime is started here: the shim must build its own on the main thread, since the VMM
//! dies with the thread that started it.

mod cli;
mod config;
mod doctor;
mod logging;
mod reclaim;
mod serve;
mod shim;

fn main() -> std::process::ExitCode {
    cli::main()
}
