//! `hearth run`: a sandbox for one command, gone afterwards.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hearth_api::v1::{ExecStart, Sandbox};
use hearth_core::id::TemplateName;
use serde_json::json;

use super::Context;
use super::client::Client;
use super::configured::{self, ConfigFile};
use super::creating::{self, SandboxArgs};
use super::error::{self, CliError};
use super::exec::{self, CommandArgs};
use super::out;
use super::progress::{Progress, Show};
use super::signals::Signals;
use super::stream::{self, Ended};
use super::view;
use crate::config::{LogConfig, LogFormat};
use crate::serve::Standalone;

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth run base -- uname -a
  hearth run base -- sh -c 'exit 7'; echo $?
  hearth run --cpus 2 --memory 1G --timeout 5m base -- python3 -c 'print(6*7)'
  tar c src | hearth run --net off base -- tar t
  hearth run -t base -- sh
  hearth run --standalone base -- true       no daemon needed; as root

The exit code is the command's, or 128 + signal if a signal ended it. Stdin is
forwarded if it is a pipe or a file (use < /dev/null against that), or with -i.
The first Ctrl-C is sent to the command; the second, or 5 seconds, end it and
the sandbox. With --json, output is kept (text, 8 MiB of each stream) and shown
in one object at the end.";

/// Arguments of `hearth run`.
#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    /// Template to start from; see `hearth template ls`
    template: TemplateName,
    #[command(flatten)]
    sandbox: SandboxArgs,
    #[command(flatten)]
    command: CommandArgs,
    /// Do not delete the sandbox afterwards; its name is printed on stderr
    #[arg(long, conflicts_with = "standalone")]
    keep: bool,
    /// Start a private daemon for this one command
    #[arg(long)]
    standalone: bool,
    #[command(flatten)]
    config: ConfigFile,
    /// Print a line per step with its time on stderr
    #[arg(long, short)]
    verbose: bool,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    argv: Vec<String>,
}

/// Runs it on its own runtime; the result is the exit code.
pub(super) fn run(args: &RunArgs, context: &Context) -> Result<u8, CliError> {
    if args.argv.is_empty() {
        return Err(CliError::usage("run", "no command is given").todo(format!(
            "write one after the template, such as `hearth run {} -- uname -a`",
            args.template
        )));
    }
    if !args.standalone {
        return super::block_on(async {
            with_daemon(args, &context.addr, context, &mut Signals::new()?).await
        });
    }
    let config = args.config.load(&[])?.config;
    // Errors alone, for the person at the terminal.
    let log = LogConfig { format: LogFormat::Human, file: None, file_mib: 1 };
    let _log = configured::start_log(&log, "error")?;
    let runtime = super::runtime()?;
    // Before the daemon makes anything: from here on a signal is a value, so that all of it is removed.
    let mut signals = runtime.block_on(async { Signals::new() })?;
    let begin = Instant::now();
    // Has a runtime of its own, so not inside ours.
    let daemon = Standalone::start(&config)
        .map_err(|e| CliError::failed("cannot start a private daemon", format!("{e:#}")))?;
    if args.verbose && !context.json {
        out::note(&format!("private daemon: {} ms", begin.elapsed().as_millis()));
    }
    let addr = daemon.address.to_string();
    let result = runtime.block_on(with_daemon(args, &addr, context, &mut signals));
    // Whatever happened: nothing may stay.
    let gone = daemon.end();
    runtime.shutdown_background();
    let gone =
        gone.map_err(|e| CliError::failed("cannot remove the private daemon's things", format!("{e:#}")));
    prefer_first(result, gone, context)
}

async fn with_daemon(
    args: &RunArgs,
    addr: &str,
    context: &Context,
    signals: &mut Signals,
) -> Result<u8, CliError> {
    let client = Client::connect(addr, context.json).await?;
    let mut progress = Progress::new(Show::for_steps(context.json, args.verbose));
    let sandbox =
        creating::create(&client, args.sandbox.request(&args.template), &mut progress, signals).await?;
    let begin = Instant::now();
    let result = command(args, &client, &sandbox, context, signals).await;
    let command_ms = millis(begin);
    let begin = Instant::now();
    let gone = if args.keep {
        if !context.json {
            out::note(&format!("sandbox {} is kept; remove it by `hearth rm {0}`", sandbox.name));
        }
        Ok(())
    } else {
        creating::delete(&client, &sandbox.id, &sandbox.name, signals).await
    };
    let delete_ms = millis(begin);
    if args.verbose && !context.json {
        out::note(&format!("command: {command_ms:.0} ms"));
        out::note(&format!("delete: {delete_ms:.0} ms"));
    }
    let (code, ended, captured) = match result {
        Ok(done) => done,
        Err(e) => return prefer_first(Err(e), gone, context),
    };
    if context.json {
        let mut object = exec::ended_json(&ended, code, &captured);
        object["sandbox"] = view::sandbox(&sandbox);
        object["kept"] = json!(args.keep);
        let mut steps = view::steps(&sandbox);
        steps["command"] = json!(command_ms);
        steps["delete"] = json!(delete_ms);
        object["steps"] = steps;
        out::json(&object)?;
    }
    prefer_first(exec::code_of(ended, code), gone, context)
}

type Done = (u8, Ended, stream::Captured);

async fn command(
    args: &RunArgs,
    client: &Client,
    sandbox: &Sandbox,
    context: &Context,
    signals: &mut Signals,
) -> Result<Done, CliError> {
    let start = ExecStart {
        sandbox: sandbox.id.clone(),
        argv: args.argv.clone(),
        workdir: args.command.workdir.clone(),
        user: args.command.user.clone(),
        ..ExecStart::default()
    };
    let plan = args.command.plan(start, context);
    let (ended, captured) = stream::run(client, plan, signals).await.map_err(|e| end_time(e, sandbox))?;
    Ok((exec::status_of(&ended), ended, captured))
}

/// The end of the sandbox's life explains why its command was cut off.
fn end_time(error: CliError, sandbox: &Sandbox) -> CliError {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis());
    if sandbox.ends_at_ms == 0 || now < u128::from(sandbox.ends_at_ms) {
        return error;
    }
    CliError::failed("the command did not end", "the sandbox's end time came first")
        .todo("give a longer --timeout")
}

/// The code of the command, unless something of ours is left; the later error is told if it is not the one
/// returned.
fn prefer_first(
    result: Result<u8, CliError>,
    after: Result<(), CliError>,
    context: &Context,
) -> Result<u8, CliError> {
    match (result, after) {
        (result, Ok(())) => result,
        (Ok(code), Err(after)) if code == error::OK => Err(after),
        (result, Err(after)) => {
            after.report(context.json);
            result
        }
    }
}

fn millis(since: Instant) -> f64 {
    // Whole microseconds are plenty.
    (since.elapsed().as_secs_f64() * 1e6).round() / 1e3
}
