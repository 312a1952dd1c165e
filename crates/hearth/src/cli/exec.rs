//! `hearth exec`: one more command in a sandbox that runs.

use hearth_api::v1::{ExecStart, GetRequest};
use hearth_core::id::SandboxName;
use serde_json::json;

use super::Context;
use super::client::{Client, Sandboxes};
use super::error::{self, CliError};
use super::out;
use super::parse;
use super::signals::Signals;
use super::stream::{self, Captured, Ended, Plan};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth exec web-1 -- ps aux
  hearth exec -t web-1 -- sh
  hearth exec --user nobody --workdir /tmp --env LANG=C web-1 -- env
  hearth exec web-1 -- sh -c 'cat > /etc/motd' < motd

Exit code, stdin, Ctrl-C and --json are as with `hearth run`; the sandbox stays.";

/// How a command runs; the same for `run` and `exec`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct CommandArgs {
    /// Forward stdin even if it is a terminal
    #[arg(long, short)]
    interactive: bool,
    /// Give the command a terminal; stdin is forwarded
    #[arg(long, short)]
    tty: bool,
    /// Working directory of the command; its user's home if absent
    #[arg(long, short, value_name = "DIR", default_value = "", hide_default_value = true)]
    pub(super) workdir: String,
    /// Who runs it: name, uid, name:group or uid:gid; root if absent
    #[arg(long, short, default_value = "", hide_default_value = true)]
    pub(super) user: String,
}

impl CommandArgs {
    /// The plan for one command.
    pub(super) fn plan(&self, start: ExecStart, context: &Context) -> Plan {
        Plan { start, tty: self.tty, interactive: self.interactive, capture: context.json }
    }
}

/// Arguments of `hearth exec`.
#[derive(Debug, clap::Args)]
pub(super) struct ExecArgs {
    /// Name or id of the sandbox
    name: SandboxName,
    /// Variable of the command; NAME alone takes the value from here; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = parse::env)]
    env: Vec<(String, String)>,
    #[command(flatten)]
    command: CommandArgs,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    argv: Vec<String>,
}

/// Runs it; the result is the exit code.
pub(super) async fn run(args: ExecArgs, context: &Context) -> Result<u8, CliError> {
    if args.argv.is_empty() {
        return Err(CliError::usage("exec", "no command is given")
            .todo(format!("write one after the name, such as `hearth exec {} -- uname -a`", args.name)));
    }
    let mut signals = Signals::new()?;
    let client = Client::connect(&context.addr, context.json).await?;
    // Waits for a daemon that is starting, which the stream itself could not without losing input.
    let get = |mut sandboxes: Sandboxes| {
        let sandbox = args.name.to_string();
        async move { sandboxes.get(GetRequest { sandbox, ..Default::default() }).await }
    };
    let what = format!("cannot use sandbox {:?}", args.name.as_str());
    tokio::select! {
        found = client.call(&what, get) => drop(found?),
        number = signals.next() => return Err(CliError::interrupted(number, what, "stopped")),
    }
    let start = ExecStart {
        sandbox: args.name.to_string(),
        argv: args.argv.clone(),
        env: args.env.iter().cloned().collect(),
        workdir: args.command.workdir.clone(),
        user: args.command.user.clone(),
        ..ExecStart::default()
    };
    let (ended, captured) = stream::run(&client, args.command.plan(start, context), &mut signals).await?;
    let code = status_of(&ended);
    if context.json {
        let mut object = ended_json(&ended, code, &captured);
        object["sandbox"] = json!({ "name": args.name.as_str() });
        out::json(&object)?;
    }
    code_of(ended, code)
}

/// The exit code that an end stands for.
pub(super) fn status_of(ended: &Ended) -> u8 {
    match ended {
        Ended::Exit(exit) => u8::try_from(exit.status).unwrap_or(error::FAILED),
        Ended::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(error::FAILED),
        Ended::BrokenPipe => error::BROKEN_PIPE,
        Ended::OutputFailed(_) => error::FAILED,
    }
}

/// The same as a result.
pub(super) fn code_of(ended: Ended, code: u8) -> Result<u8, CliError> {
    match ended {
        Ended::OutputFailed(why) => Err(CliError::failed("cannot write the command's output", why)),
        _ => Ok(code),
    }
}

/// The object of `--json`.
pub(super) fn ended_json(ended: &Ended, code: u8, captured: &Captured) -> serde_json::Value {
    let signal = match ended {
        Ended::Exit(exit) if exit.signal != 0 => Some(exit.signal),
        Ended::Interrupted(_) => Some(9),
        _ => None,
    };
    json!({
        "exit_code": code,
        "signal": signal,
        "stdout": String::from_utf8_lossy(&captured.stdout),
        "stderr": String::from_utf8_lossy(&captured.stderr),
        "truncated": captured.truncated,
    })
}
