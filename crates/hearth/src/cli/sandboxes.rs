//! `create`, `ls`, `inspect`, `logs`, `rm`: what a client does with sandboxes besides running commands.

use std::io::{IsTerminal, Write};

use hearth_api::v1::{DeleteRequest, GetRequest, ListRequest, LogsRequest, Sandbox};
use hearth_core::id::{SandboxName, TemplateName};
use serde_json::json;
use tokio::task::JoinSet;

use super::Context;
use super::client::{Client, Sandboxes};
use super::creating::{self, SandboxArgs};
use super::error::{self, CliError};
use super::out;
use super::progress::{Progress, Show};
use super::signals::Signals;
use super::view;

/// Deletes at once in `rm`.
const AT_ONCE: usize = 16;

/// Arguments of `hearth create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// Template to start from; see `hearth template ls`
    template: TemplateName,
    #[command(flatten)]
    sandbox: SandboxArgs,
    /// Print a line per step with its time on stderr
    #[arg(long, short)]
    verbose: bool,
}

/// Arguments of `hearth ls`.
#[derive(Debug, clap::Args)]
pub(super) struct LsArgs {
    /// Also those that are gone and whose end is still kept
    #[arg(long, short)]
    all: bool,
}

/// Arguments of `hearth inspect`.
#[derive(Debug, clap::Args)]
pub(super) struct InspectArgs {
    /// Name or id of the sandbox; one that is gone is found as long as its end is kept
    name: SandboxName,
}

/// Arguments of `hearth logs`.
#[derive(Debug, clap::Args)]
pub(super) struct LogsArgs {
    /// Name or id of the sandbox
    name: SandboxName,
    /// Go on until the sandbox ends
    #[arg(long, short)]
    follow: bool,
}

/// Arguments of `hearth rm`.
#[derive(Debug, clap::Args)]
pub(super) struct RmArgs {
    /// Names or ids of the sandboxes
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<SandboxName>,
    /// Every sandbox of the daemon
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

/// `hearth create`: prints the name.
pub(super) async fn create(args: CreateArgs, context: &Context) -> Result<u8, CliError> {
    let mut signals = Signals::new()?;
    let client = Client::connect(&context.addr, context.json).await?;
    let mut progress = Progress::new(Show::for_steps(context.json, args.verbose));
    let request = args.sandbox.request(&args.template);
    let sandbox = creating::create(&client, request, &mut progress, &mut signals).await?;
    if context.json {
        out::json(&view::sandbox(&sandbox))?;
    } else {
        out::line(&sandbox.name)?;
    }
    Ok(error::OK)
}

async fn all(client: &Client, ended: bool) -> Result<Vec<Sandbox>, CliError> {
    let list = |mut s: Sandboxes| async move { s.list(ListRequest { ended }).await };
    let mut found = client.call("cannot list sandboxes", list).await?.into_inner().sandboxes;
    found.sort_by(|a, b| (a.created_at_ms, &a.id).cmp(&(b.created_at_ms, &b.id)));
    Ok(found)
}

/// `hearth ls`.
pub(super) async fn ls(args: LsArgs, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let found = all(&client, args.all).await?;
    if context.json {
        out::json(&found.iter().map(view::sandbox).collect::<Vec<_>>())?;
    } else {
        let on_terminal = std::io::stdout().is_terminal();
        let width = if on_terminal { crossterm::terminal::size().ok().map(|(cols, _)| cols) } else { None };
        out::print(&view::sandboxes(&found, width))?;
    }
    Ok(error::OK)
}

/// `hearth inspect`: JSON, with and without `--json`.
pub(super) async fn inspect(args: InspectArgs, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let what = format!("cannot inspect sandbox {:?}", args.name.as_str());
    let get = |mut s: Sandboxes| {
        let sandbox = args.name.to_string();
        async move { s.get(GetRequest { sandbox, ended: true }).await }
    };
    let Some(sandbox) = client.call(&what, get).await?.into_inner().sandbox else {
        return Err(CliError::failed(what, "the daemon's answer is empty"));
    };
    out::json(&view::sandbox(&sandbox))?;
    Ok(error::OK)
}

/// `hearth logs`: the console's bytes as they are.
pub(super) async fn logs(args: LogsArgs, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let what = format!("cannot read the console of sandbox {:?}", args.name.as_str());
    let call = |mut s: Sandboxes| {
        let request = LogsRequest { sandbox: args.name.to_string(), follow: args.follow };
        async move { s.logs(request).await }
    };
    let mut stream = client.call(&what, call).await?.into_inner();
    let mut kept = Vec::new();
    while let Some(chunk) = stream.message().await.map_err(|s| CliError::from_status(&what, &s))? {
        if context.json && !args.follow {
            kept.extend_from_slice(&chunk.data);
            continue;
        }
        let mut stdout = std::io::stdout().lock();
        if context.json {
            // One object per line: there is no end to wait for.
            let line = json!({ "data": String::from_utf8_lossy(&chunk.data) });
            stdout.write_all(format!("{line}\n").as_bytes())?;
        } else {
            stdout.write_all(&chunk.data)?;
        }
        stdout.flush()?;
    }
    if context.json && !args.follow {
        out::json(&json!({ "data": String::from_utf8_lossy(&kept) }))?;
    }
    Ok(error::OK)
}

/// `hearth rm`: tries all, reports each.
pub(super) async fn rm(args: RmArgs, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let names: Vec<String> = if args.all {
        // By id: a name could be another life's by the time its turn comes.
        all(&client, false).await?.into_iter().map(|s| s.id).collect()
    } else {
        args.names.iter().map(SandboxName::to_string).collect()
    };
    let mut tasks = JoinSet::new();
    let mut waiting = names.iter().cloned().enumerate();
    let mut results: Vec<Option<Result<(), CliError>>> = names.iter().map(|_| None).collect();
    loop {
        while tasks.len() < AT_ONCE {
            let Some((i, name)) = waiting.next() else { break };
            let client = client.clone();
            tasks.spawn(async move { (i, delete_one(&client, &name).await) });
        }
        match tasks.join_next().await {
            Some(Ok((i, result))) => {
                match &result {
                    Ok(()) if !context.json => out::line(&names[i])?,
                    Ok(()) => {}
                    Err(e) => e.report(context.json),
                }
                results[i] = Some(result);
            }
            Some(Err(e)) => return Err(CliError::failed("rm", e.to_string())),
            None => break,
        }
    }
    if context.json {
        let object = |(name, result): (&String, &Option<Result<(), CliError>>)| {
            let error = result.as_ref().and_then(|r| r.as_ref().err()).map(CliError::to_json);
            json!({ "sandbox": name, "deleted": error.is_none(), "error": error })
        };
        out::json(&names.iter().zip(&results).map(object).collect::<Vec<_>>())?;
    }
    let failed = results.iter().flatten().any(Result::is_err);
    Ok(if failed { error::FAILED } else { error::OK })
}

async fn delete_one(client: &Client, name: &str) -> Result<(), CliError> {
    let call = |mut s: Sandboxes| {
        let sandbox = name.to_owned();
        async move { s.delete(DeleteRequest { sandbox }).await }
    };
    client.call(&format!("cannot delete sandbox {name:?}"), call).await.map(drop)
}
