//! `hearth node`: the node's status, and whether it takes sandboxes.

use std::io::Write as _;
use std::time::Duration;

use clap::Subcommand;
use hearth_api::v1::{
    ActivateRequest, DrainRequest, InfoRequest, InfoResponse, NodeStatus, StandbyRequest, UndrainRequest,
    WatchRequest, Work,
};
use serde_json::{Value, json};
use tokio::time::Instant;
use tonic::Streaming;

use super::Context;
use super::client::Client;
use super::error::{self, CliError};
use super::{out, parse, reconcile, view};

/// The commands.
#[derive(Debug, Subcommand)]
pub(super) enum NodeCommand {
    /// Show the node's status. Exit code 1 if it is starting or unhealthy
    #[command(
        after_help = "Examples:\n  hearth node status\n  hearth node status --watch\n  hearth node status --json | jq -r .status"
    )]
    Status {
        /// Go on with a line per change until the daemon ends
        #[arg(long)]
        watch: bool,
    },
    /// Take no new sandboxes; those there are go on
    #[command(after_help = "Examples:\n  hearth node drain\n  hearth node drain --wait --timeout 10m")]
    Drain {
        /// Until no sandbox is left. Exit code 1 if some are after --timeout
        #[arg(long)]
        wait: bool,
        /// Wait no longer: 30s, 5m, 2h
        #[arg(long, value_name = "TIME", value_parser = parse::timeout, requires = "wait")]
        timeout: Option<u64>,
    },
    /// Take back a drain: the node is what it was before
    #[command(after_help = "Example:\n  hearth node undrain")]
    Undrain,
    /// Be ready to take over, but take no new sandboxes
    #[command(after_help = "Example:\n  hearth node standby")]
    Standby,
    /// Leave standby and take sandboxes
    #[command(after_help = "Example:\n  hearth node activate")]
    Activate,
    /// Look for what nobody owns now, as the daemon does every so often. Exit code 1 if something stays
    #[command(
        after_help = "Examples:\n  hearth node reconcile --dry-run\n  hearth node reconcile\n\nWhat leaked is released by the second pass that sees it, when it is old enough (reconcile.min_age_seconds)."
    )]
    Reconcile {
        /// Show what a pass would do; change nothing
        #[arg(long)]
        dry_run: bool,
    },
}

/// Runs one.
pub(super) async fn run(command: NodeCommand, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let mut nodes = client.nodes();
    let (what, answer) = match command {
        NodeCommand::Status { watch: false } => {
            let failed = |s| CliError::from_status("cannot ask for the status", &s);
            let info = nodes.info(InfoRequest {}).await.map_err(failed)?.into_inner();
            return show_info(&info, context);
        }
        NodeCommand::Status { watch: true } => {
            let failed = |s| CliError::from_status("cannot watch the node", &s);
            let mut stream = nodes.watch(WatchRequest {}).await.map_err(failed)?.into_inner();
            while let Some(status) = stream.message().await.map_err(failed)? {
                show_change(&status, context)?;
            }
            return Ok(error::OK);
        }
        NodeCommand::Drain { wait, timeout } => {
            let failed = |s| CliError::from_status("cannot drain the node", &s);
            let stream = nodes.drain(DrainRequest { wait }).await.map_err(failed)?.into_inner();
            return drain(stream, wait, timeout.map(Duration::from_secs), context).await;
        }
        NodeCommand::Reconcile { dry_run } => return reconcile::run(&client, dry_run, context).await,
        NodeCommand::Undrain => ("cannot undrain the node", nodes.undrain(UndrainRequest {}).await),
        NodeCommand::Standby => ("cannot put the node into standby", nodes.standby(StandbyRequest {}).await),
        NodeCommand::Activate => ("cannot activate the node", nodes.activate(ActivateRequest {}).await),
    };
    let status = answer.map_err(|s| CliError::from_status(what, &s))?.into_inner();
    if context.json {
        out::json(&status_json(&status))?;
    } else {
        out::line(&line(&status))?;
    }
    Ok(error::OK)
}

/// Follows a drain to its end, if asked to. What is left when that does not come is said.
async fn drain(
    mut stream: Streaming<NodeStatus>,
    wait: bool,
    timeout: Option<Duration>,
    context: &Context,
) -> Result<u8, CliError> {
    const WHAT: &str = "drain";
    let end = timeout.map(|t| Instant::now() + t);
    let mut last: Option<NodeStatus> = None;
    loop {
        let next = match end {
            None => stream.message().await,
            Some(end) => match tokio::time::timeout_at(end, stream.message()).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        let Some(status) = next.map_err(|s| CliError::from_status(WHAT, &s))? else { break };
        if wait && !context.json && left(last.as_ref()) != left(Some(&status)) {
            out::note(&format!("{}: {}", status.desired, left(Some(&status))));
        }
        last = Some(status);
    }
    let Some(last) = last else { return Err(CliError::failed(WHAT, "the daemon's answer is empty")) };
    if context.json {
        out::json(&status_json(&last))?;
    } else {
        out::line(&line(&last))?;
    }
    if !wait || last.drained {
        return Ok(error::OK);
    }
    Err(match last.desired.as_str() {
        "draining" => CliError::failed(WHAT, format!("not drained yet: {}", left(Some(&last))))
            .todo("`hearth ls` shows the sandboxes, `hearth rm` ends them; the node goes on draining"),
        other => CliError::failed(WHAT, format!("the drain was taken back: the node is {other} again")),
    })
}

/// What keeps a node from being drained, in words.
fn left(status: Option<&NodeStatus>) -> String {
    let Some(work) = status.and_then(|s| s.work) else { return "not known yet what is left".into() };
    let Work { creating, live, deleting, stuck } = work;
    let counts = [(live, "live"), (creating, "creating"), (deleting, "deleting"), (stuck, "stuck")];
    let some: Vec<String> =
        counts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
    match some.is_empty() {
        true => "no sandboxes left".into(),
        false => format!("sandboxes left: {}", some.join(", ")),
    }
}

/// One line for one status.
fn line(status: &NodeStatus) -> String {
    let mut text = status.status.clone();
    if !status.reason.is_empty() {
        text.push_str(": ");
        text.push_str(&status.reason);
    }
    if status.desired == "draining" {
        text.push_str(if status.drained { " (drained)" } else { "" });
    }
    text
}

fn show_change(status: &NodeStatus, context: &Context) -> Result<(), CliError> {
    if context.json {
        // One object per line: there is no end to wait for.
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(format!("{}\n", status_json(status)).as_bytes())?;
        return Ok(stdout.flush()?);
    }
    out::line(&format!(
        "{}; sandboxes: {}; leftovers: {}",
        line(status),
        sandboxes(status),
        leftovers(status)
    ))
}

/// `hearth node status`.
/// Everything the daemon says of itself.
pub(super) fn info_json(info: &InfoResponse) -> Value {
    let mut object = status_json(&info.node.clone().unwrap_or_default());
    let more = json!({
        "version": info.version,
        "instance": info.instance,
        "pid": info.pid,
        "started_at_ms": info.started_at_ms,
        "state_dir": info.state_dir,
        "run_dir": info.run_dir,
        "vmm": info.vmm,
        "vmm_reason": info.vmm_reason,
        "slots": info.slots,
        "slot_capacity": info.slot_capacity,
    });
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

fn show_info(info: &InfoResponse, context: &Context) -> Result<u8, CliError> {
    let status = info.node.clone().unwrap_or_default();
    if context.json {
        out::json(&info_json(info))?;
    } else {
        let ago = |ms: u64| view::span(view::now_ms().saturating_sub(ms));
        let mut slots: Vec<(&String, &u32)> = info.slots.iter().filter(|(_, n)| **n > 0).collect();
        slots.sort();
        let slots: Vec<String> = slots.iter().map(|(state, n)| format!("{n} {state}")).collect();
        let mut rows = vec![("STATUS", status.status.clone())];
        if !status.reason.is_empty() {
            rows.push(("REASON", status.reason.clone()));
        }
        rows.extend([
            ("SINCE", format!("{} ago", ago(status.since_ms))),
            ("DESIRED", status.desired.clone()),
            ("SANDBOXES", sandboxes(&status)),
            ("SLOTS", slots.join(", ")),
            ("LEFTOVERS", leftovers(&status)),
            ("VMM", format!("{} ({})", info.vmm, info.vmm_reason)),
            (
                "DAEMON",
                format!(
                    "{} {}, pid {}, up {}",
                    info.instance,
                    info.version,
                    info.pid,
                    ago(info.started_at_ms)
                ),
            ),
        ]);
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let table: String = rows.iter().map(|(name, value)| format!("{name:<width$}  {value}\n")).collect();
        out::print(&table)?;
    }
    let ready = !matches!(status.status.as_str(), "starting" | "unhealthy");
    Ok(if ready { error::OK } else { error::FAILED })
}

fn sandboxes(status: &NodeStatus) -> String {
    match &status.work {
        None => "not known yet".into(),
        Some(w) => {
            format!("{} live, {} creating, {} deleting, {} stuck", w.live, w.creating, w.deleting, w.stuck)
        }
    }
}

fn leftovers(status: &NodeStatus) -> String {
    let Some(r) = &status.reclaim else { return "not known yet".into() };
    let mut text = match r.state.as_str() {
        "scanning" => return "not known yet".into(),
        "off" => format!("{} found, reclaim is off", r.total),
        _ => format!("{} of {} released", r.done, r.total),
    };
    if r.failed > 0 {
        text.push_str(&format!(", {} failed and tried again", r.failed));
    }
    if let Some(ms) = r.estimate_ms {
        text.push_str(&format!(", about {} to go", view::span(ms)));
    }
    let mut leaked: Vec<String> = r
        .kinds
        .iter()
        .filter(|(_, k)| k.leaked > 0)
        .map(|(kind, k)| format!("{} {kind}", k.leaked))
        .collect();
    leaked.sort();
    if !leaked.is_empty() {
        text.push_str(&format!("; leaked: {}", leaked.join(", ")));
    }
    text
}

/// A status as JSON.
fn status_json(status: &NodeStatus) -> Value {
    let reclaim = status.reclaim.as_ref().map(|r| {
        let kinds: serde_json::Map<String, Value> = r
            .kinds
            .iter()
            .map(|(kind, k)| {
                let leftovers = json!({
                    "leaked": k.leaked,
                    "stuck": k.stuck,
                    "reclaimed": k.reclaimed,
                    "failures": k.failures,
                });
                (kind.clone(), leftovers)
            })
            .collect();
        json!({
            "state": r.state,
            "total": r.total,
            "done": r.done,
            "failed": r.failed,
            "estimate_ms": r.estimate_ms,
            "kinds": kinds,
        })
    });
    let work = status
        .work
        .as_ref()
        .map(|w| json!({ "creating": w.creating, "live": w.live, "deleting": w.deleting, "stuck": w.stuck }));
    json!({
        "status": status.status,
        "reason": status.reason,
        "since_ms": status.since_ms,
        "desired": status.desired,
        "phase": status.phase,
        "drained": status.drained,
        "sandboxes": work,
        "reclaim": reclaim,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_said_and_unknown_is_not_nothing() {
        let with = |work| NodeStatus { work, ..NodeStatus::default() };
        assert_eq!(left(Some(&with(None))), "not known yet what is left");
        assert_eq!(left(Some(&with(Some(Work::default())))), "no sandboxes left");
        let work = Work { live: 2, stuck: 1, ..Work::default() };
        assert_eq!(left(Some(&with(Some(work)))), "sandboxes left: 2 live, 1 stuck");
    }
}
