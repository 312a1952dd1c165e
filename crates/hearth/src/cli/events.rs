//! `hearth events`: the journal of the node.

use hearth_api::v1::WatchEventsRequest;
use hearth_api::v1::event_message::Message;
use serde_json::{Value, json};

use super::Context;
use super::client::Client;
use super::error::{self, CliError};
use super::{out, view};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth events                       all that are kept
  hearth events --follow              those that come from now on
  hearth events --since 1200 --follow --json   one object per line, after number 1200

Numbers go on over restarts of the daemon. What is not there any more is told as
a gap, on stderr or as an object with \"gap\".";

/// Arguments of `hearth events`.
#[derive(Debug, clap::Args)]
pub(super) struct EventsArgs {
    /// Only those after the event of this number; 0 for all
    #[arg(long, value_name = "SEQ")]
    since: Option<u64>,
    /// Go on with those that come
    #[arg(long, short)]
    follow: bool,
}

/// `hearth events`. With `--json` one object per line: with `--follow` there is no end to wait for.
pub(super) async fn run(args: EventsArgs, context: &Context) -> Result<u8, CliError> {
    let client = Client::connect(&context.addr, context.json).await?;
    let what = "cannot read events";
    let request = WatchEventsRequest { since: args.since, follow: args.follow };
    let stream = client.events().watch(request).await.map_err(|s| CliError::from_status(what, &s))?;
    let mut stream = stream.into_inner();
    while let Some(message) = stream.message().await.map_err(|s| CliError::from_status(what, &s))? {
        match message.message {
            Some(Message::Event(event)) if context.json => out::line(&json_of(&event).to_string())?,
            Some(Message::Event(event)) => out::line(&line(&event))?,
            Some(Message::Gap(gap)) if context.json => {
                out::line(&json!({ "gap": { "first": gap.first, "last": gap.last } }).to_string())?;
            }
            Some(Message::Gap(gap)) => {
                let missed = gap.last - gap.first + 1;
                out::note(&format!("{missed} events are not there: {} to {}", gap.first, gap.last));
            }
            None => {}
        }
    }
    Ok(error::OK)
}

fn json_of(e: &hearth_api::v1::Event) -> Value {
    let sorted: std::collections::BTreeMap<_, _> = e.evidence.iter().collect();
    json!({
        "seq": e.seq,
        "at_ms": e.at_ms,
        "kind": e.kind,
        "sandbox": (!e.sandbox.is_empty()).then_some(&e.sandbox),
        "name": (!e.name.is_empty()).then_some(&e.name),
        "reason": e.reason,
        "evidence": sorted,
    })
}

/// `12  2026-01-02T03:04:05Z  sandbox-running  web-1 (id)  reason  took_ms=12`
fn line(e: &hearth_api::v1::Event) -> String {
    let mut parts = vec![e.seq.to_string(), view::utc(e.at_ms), e.kind.clone()];
    match (e.name.as_str(), e.sandbox.as_str()) {
        ("", "") => {}
        (name, id) if name == id => parts.push(id.to_owned()),
        (name, id) => parts.push(format!("{name} ({id})")),
    }
    if !e.reason.is_empty() {
        parts.push(e.reason.replace('\n', " "));
    }
    let mut facts: Vec<_> = e.evidence.iter().collect();
    facts.sort();
    parts.extend(facts.into_iter().map(|(name, value)| format!("{name}={}", value.replace('\n', " "))));
    parts.join("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_is_one_line() {
        let event = hearth_api::v1::Event {
            seq: 7,
            at_ms: 1_767_323_045_678,
            kind: "sandbox-exited".into(),
            sandbox: "a1b2c3d4e5f6g7h8".into(),
            name: "web".into(),
            reason: "vmm-failed\nsignal 9".into(),
            evidence: [("signal".to_owned(), "9".to_owned())].into(),
        };
        assert_eq!(
            line(&event),
            "7  2026-01-02T03:04:05.678Z  sandbox-exited  web (a1b2c3d4e5f6g7h8)  vmm-failed signal 9  signal=9"
        );
    }
}
