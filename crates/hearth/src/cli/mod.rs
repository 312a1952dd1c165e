//! The command line: parses it, runs one subcommand, turns its end into output and an exit code. Nothing here
//! touches the host; that is the daemon's work, and for templates and kernels the engine's library's.

mod block;
mod client;
mod configured;
mod creating;
mod doctor;
mod error;
mod events;
mod exec;
mod images;
mod node;
mod out;
mod parse;
mod preflight;
mod progress;
mod reclaim;
mod reconcile;
mod run;
mod sandboxes;
mod signals;
mod stats;
mod stdio;
mod stream;
mod terminal;
mod top;
mod view;

use std::ffi::OsString;
use std::future::Future;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub(crate) use client::Client;
use error::CliError;
pub(crate) use view::now_ms;

const EXAMPLES: &str = "\
Examples:
  hearth serve                        start the daemon (as root)
  hearth run base -- uname -a         run a command in a fresh sandbox
  hearth run --standalone base -- ls  the same without a daemon
  hearth preflight                    see whether this host can run sandboxes

Exit codes: 0 ok; 1 failed, or a check found something; 2 wrong usage or input;
3 no daemon answers. `run` and `exec` return the code of the command.";

/// Firecracker microVM sandboxes that leave nothing behind.
#[derive(Debug, Parser)]
#[command(name = "hearth", version, after_help = EXAMPLES, max_term_width = 110)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
struct Cli {
    /// Address of the daemon, if neither HEARTH_ADDR nor 127.0.0.1:5008
    #[arg(long, global = true, value_name = "ADDR:PORT")]
    addr: Option<String>,
    /// Print one JSON object or array, errors too
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the node daemon
    #[command(after_help = configured::SERVE_EXAMPLES)]
    Serve(Box<configured::ServeArgs>),
    /// Run a command in a fresh sandbox and remove the sandbox
    #[command(after_help = run::EXAMPLES)]
    Run(Box<run::RunArgs>),
    /// Create a sandbox and print its name
    #[command(
        after_help = "Examples:\n  hearth create base\n  hearth create --name web-1 --memory 1G --timeout 2h base"
    )]
    Create(sandboxes::CreateArgs),
    /// List sandboxes
    #[command(
        visible_alias = "list",
        after_help = "Examples:\n  hearth ls\n  hearth ls --all\n  hearth ls --json | jq -r '.[].name'"
    )]
    Ls(sandboxes::LsArgs),
    /// Show all that is known of a sandbox, as JSON
    #[command(after_help = "Examples:\n  hearth inspect web-1\n  hearth inspect web-1 | jq .resources")]
    Inspect(sandboxes::InspectArgs),
    /// Run a command in a sandbox
    #[command(after_help = exec::EXAMPLES)]
    Exec(exec::ExecArgs),
    /// Print a sandbox's console
    #[command(after_help = "Examples:\n  hearth logs web-1\n  hearth logs -f web-1")]
    Logs(sandboxes::LogsArgs),
    /// Print what happened on the node, and go on with what happens
    #[command(after_help = events::EXAMPLES)]
    Events(events::EventsArgs),
    /// Show what sandboxes use: CPU, memory, disk, network
    #[command(after_help = stats::EXAMPLES)]
    Stats(stats::StatsArgs),
    /// Delete sandboxes; ends when everything they owned is gone
    #[command(after_help = "Examples:\n  hearth rm web-1 web-2\n  hearth rm --all")]
    Rm(sandboxes::RmArgs),
    /// Make, list and remove templates (as root, no daemon needed)
    #[command(subcommand)]
    Template(images::TemplateCommand),
    /// Import, list and remove guest kernels (as root, no daemon needed)
    #[command(subcommand)]
    Kernel(images::KernelCommand),
    /// Show the node's status, and let it take sandboxes or not
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Check whether this host can run sandboxes, and say what to do
    #[command(after_help = preflight::EXAMPLES)]
    Preflight(preflight::PreflightArgs),
    /// Show what there is of an instance, whose it is and why; changes nothing
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Plan and remove what is nobody's, also on hosts of another orchestrator
    #[command(subcommand)]
    Reclaim(reclaim::ReclaimCommand),
    /// Watch the node in the terminal; inspect and delete sandboxes
    #[command(after_help = top::EXAMPLES)]
    Top(top::TopArgs),
    /// Look into a disk without its VM: serve it, or take out what differs from its base
    #[command(subcommand)]
    Block(block::BlockCommand),
    /// Print a completion script for a shell
    #[command(
        after_help = "Examples:\n  hearth completions bash > /etc/bash_completion.d/hearth\n  hearth completions zsh > ~/.zfunc/_hearth\n  hearth completions fish > ~/.config/fish/completions/hearth.fish"
    )]
    Completions {
        /// Which shell
        #[arg(value_parser = ["bash", "zsh", "fish"])]
        shell: String,
    },
    /// Run one microVM; started by the daemon
    #[command(hide = true)]
    Shim {
        /// The sandbox's run directory
        #[arg(long)]
        dir: PathBuf,
    },
}

/// What all client commands are told.
#[derive(Debug, Clone)]
struct Context {
    addr: String,
    /// Whether somebody said so; else it is only the default.
    addr_given: bool,
    json: bool,
}

/// Everything `main` does.
pub(crate) fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(e) => return refuse(&e, &args),
    };
    let (addr, addr_given) = client::address(cli.addr.as_deref());
    let context = Context { addr, addr_given, json: cli.json };
    let result = match (&cli.addr, cli.command) {
        (Some(_), Command::Serve(_)) => {
            let why = "--addr names a daemon to clients";
            Err(CliError::usage("serve", why).todo("use --listen for the address to serve on"))
        }
        (_, command) => dispatch(command, &context),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            e.report(context.json);
            ExitCode::from(e.code)
        }
    }
}

fn dispatch(command: Command, context: &Context) -> Result<ExitCode, CliError> {
    let code = match command {
        Command::Serve(args) => return configured::serve(&args, context),
        Command::Shim { dir } => {
            return crate::shim::run(&dir).map_err(|e| CliError::failed("shim", format!("{e:#}")));
        }
        Command::Completions { shell } => completions(&shell),
        Command::Run(args) => run::run(&args, context),
        Command::Create(args) => block_on(sandboxes::create(args, context)),
        Command::Ls(args) => block_on(sandboxes::ls(args, context)),
        Command::Stats(args) => block_on(stats::run(args, context)),
        Command::Inspect(args) => block_on(sandboxes::inspect(args, context)),
        Command::Exec(args) => block_on(exec::run(args, context)),
        Command::Logs(args) => block_on(sandboxes::logs(args, context)),
        Command::Events(args) => block_on(events::run(args, context)),
        Command::Rm(args) => block_on(sandboxes::rm(args, context)),
        Command::Template(command) => block_on(images::template(command, context)),
        Command::Kernel(command) => block_on(images::kernel(command, context)),
        Command::Node(command) => block_on(node::run(command, context)),
        Command::Preflight(args) => preflight::run(&args, context),
        Command::Doctor(args) => block_on(doctor::run(args, context)),
        Command::Block(command) => block::run(command, context),
        Command::Reclaim(command) => block_on(reclaim::run(command, context)),
        Command::Top(args) => block_on(top::run(args, context)),
    };
    code.map(ExitCode::from)
}

fn block_on(work: impl Future<Output = Result<u8, CliError>>) -> Result<u8, CliError> {
    let runtime = runtime()?;
    let result = runtime.block_on(work);
    // All that matters was awaited; a name look-up that still blocks must not hold us up.
    runtime.shutdown_background();
    result
}

fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| CliError::failed("cannot start", e.to_string()))
}

fn completions(shell: &str) -> Result<u8, CliError> {
    let shell: clap_complete::Shell = shell.parse().map_err(|e: String| CliError::usage("completions", e))?;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "hearth", &mut script);
    out::print(&String::from_utf8_lossy(&script))?;
    Ok(error::OK)
}

/// Usage errors, `--help` and `--version`.
fn refuse(e: &clap::Error, args: &[OsString]) -> ExitCode {
    if !e.use_stderr() {
        // Help is what was asked for. If nobody reads it, nobody misses it.
        drop(e.print());
        return ExitCode::SUCCESS;
    }
    // Parsing failed, so the flag is looked for by hand, and not in a command behind `--`.
    let json = args.iter().take_while(|a| *a != "--").any(|a| a == "--json");
    if json {
        let text = e.render().to_string();
        let text = text.trim().strip_prefix("error: ").unwrap_or(text.trim());
        CliError::usage("usage", text).report(true);
    } else {
        drop(e.print());
    }
    ExitCode::from(error::USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_needs_no_dashes_and_may_have_them() {
        for line in ["run base --cpus 2 -- ls -l", "run --cpus 2 base ls -l", "run base --cpus 2 ls -l"] {
            let cli = Cli::try_parse_from(std::iter::once("hearth").chain(line.split(' '))).unwrap();
            let text = format!("{:?}", cli.command);
            assert!(text.contains(r#"argv: ["ls", "-l"]"#) && text.contains("cpus: 2"), "{line}: {text}");
        }
    }
}
