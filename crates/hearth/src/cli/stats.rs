//! `hearth stats`: what sandboxes use, once or again and again.

use std::collections::HashMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use hearth_api::v1::{SandboxStats, StatsRequest, Usage};
use hearth_core::id::SandboxName;
use serde_json::{Value, json};

use super::Context;
use super::client::{Client, Sandboxes};
use super::error::{self, CliError};
use super::out;
use super::signals::Signals;
use super::view::{bytes, table};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth stats
  hearth stats web-1 --watch
  hearth stats --json | jq '.[] | {name, cpu: .usage.cpu_us}'";

/// Arguments of `hearth stats`.
#[derive(Debug, clap::Args)]
pub(super) struct StatsArgs {
    /// Name or id of a sandbox; all that run if none is given
    name: Option<SandboxName>,
    /// Go on until interrupted, with the share of the CPUs between two looks
    #[arg(long, short)]
    watch: bool,
    /// Seconds between two looks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600), requires = "watch")]
    interval: u64,
}

/// `hearth stats`.
pub(super) async fn run(args: StatsArgs, context: &Context) -> Result<u8, CliError> {
    let mut signals = Signals::new()?;
    let client = Client::connect(&context.addr, context.json).await?;
    let mut before = HashMap::new();
    loop {
        let now = ask(&client, args.name.as_ref()).await?;
        show(&now, &before, &args, context)?;
        if !args.watch {
            return Ok(error::OK);
        }
        before = now.into_iter().filter_map(|s| Some((s.id, s.usage?))).collect();
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(args.interval)) => {}
            // An interrupt is how it is meant to end.
            _ = signals.next() => return Ok(error::OK),
        }
    }
}

async fn ask(client: &Client, name: Option<&SandboxName>) -> Result<Vec<SandboxStats>, CliError> {
    let what = match name {
        Some(name) => format!("cannot tell what sandbox {:?} uses", name.as_str()),
        None => "cannot tell what sandboxes use".to_owned(),
    };
    let call = |mut s: Sandboxes| {
        let sandbox = name.map(ToString::to_string).unwrap_or_default();
        async move { s.stats(StatsRequest { sandbox }).await }
    };
    let mut all = client.call(&what, call).await?.into_inner().sandboxes;
    all.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    Ok(all)
}

fn show(
    now: &[SandboxStats],
    before: &HashMap<String, Usage>,
    args: &StatsArgs,
    context: &Context,
) -> Result<(), CliError> {
    if context.json {
        let all = Value::Array(now.iter().map(object).collect());
        if args.watch {
            // One look per line: there is no end to wait for.
            return out::line(&all.to_string());
        }
        return out::json(&all);
    }
    let text = text(now, before);
    let mut stdout = std::io::stdout().lock();
    if args.watch && stdout.is_terminal() {
        // Home, and what is left of the look before goes (ECMA-48 CUP, ED).
        write!(stdout, "\x1b[H\x1b[J{text}")?;
        stdout.flush()?;
        return Ok(());
    }
    drop(stdout);
    out::print(&text)
}

/// Usage as JSON.
pub(super) fn usage(u: &Usage) -> Value {
    json!({
        "at_ms": u.at_ms,
        "cpu_us": u.cpu_us,
        "memory_bytes": u.memory_bytes,
        "memory_peak_bytes": u.memory_peak_bytes,
        "disk": u.disk.map(|d| json!({
            "read_bytes": d.read_bytes, "written_bytes": d.written_bytes, "reads": d.reads, "writes": d.writes,
        })),
        "net": u.net.map(|n| json!({
            "received_bytes": n.received_bytes, "sent_bytes": n.sent_bytes,
            "received_packets": n.received_packets, "sent_packets": n.sent_packets,
        })),
        "vmm_at_ms": u.vmm_at_ms,
        "vmm_samples": u.vmm_samples,
        "vmm_missed": u.vmm_missed,
    })
}

fn object(s: &SandboxStats) -> Value {
    json!({
        "id": s.id,
        "name": s.name,
        "cpus": s.cpus,
        "memory_mib": s.memory_mib,
        "usage": s.usage.as_ref().map(usage),
        "error": (!s.error.is_empty()).then_some(&s.error),
    })
}

fn text(now: &[SandboxStats], before: &HashMap<String, Usage>) -> String {
    const HEADER: [&str; 9] =
        ["NAME", "CPU", "CPU TIME", "MEMORY", "PEAK", "DISK READ", "DISK WRITTEN", "NET IN", "NET OUT"];
    let amount = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), bytes);
    let rows = now.iter().filter(|s| s.error.is_empty()).map(|s| {
        let u = s.usage.unwrap_or_default();
        vec![
            s.name.clone(),
            share(before.get(&s.id), &u).unwrap_or_else(|| "-".into()),
            u.cpu_us.map_or_else(|| "-".into(), seconds),
            amount(u.memory_bytes),
            amount(u.memory_peak_bytes),
            amount(u.disk.map(|d| d.read_bytes)),
            amount(u.disk.map(|d| d.written_bytes)),
            amount(u.net.map(|n| n.received_bytes)),
            amount(u.net.map(|n| n.sent_bytes)),
        ]
    });
    let mut text = table(&HEADER, rows);
    for s in now.iter().filter(|s| !s.error.is_empty()) {
        text.push_str(&format!("{}: {}\n", s.name, s.error));
    }
    text
}

/// Of one CPU, in percent, since the look before.
fn share(before: Option<&Usage>, now: &Usage) -> Option<String> {
    let before = before?;
    let used_us = now.cpu_us?.checked_sub(before.cpu_us?)?;
    let passed_ms = now.at_ms.checked_sub(before.at_ms).filter(|ms| *ms > 0)?;
    Some(format!("{}%", used_us / (passed_ms * 10)))
}

/// Microseconds as seconds with two decimals.
fn seconds(us: u64) -> String {
    format!("{}.{:02}s", us / 1_000_000, us / 10_000 % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_needs_two_looks_and_what_is_absent_is_a_dash() {
        let at = |at_ms, cpu_us| Usage { at_ms, cpu_us: Some(cpu_us), ..Usage::default() };
        assert_eq!(share(Some(&at(1_000, 500_000)), &at(3_000, 1_500_000)).as_deref(), Some("50%"));
        assert_eq!(share(None, &at(3_000, 1)), None);
        assert_eq!(share(Some(&at(3_000, 1)), &at(3_000, 2)), None, "no time passed");
        assert_eq!(share(Some(&at(1_000, 9)), &at(3_000, 2)), None, "another life");
        assert_eq!(seconds(12_345_678), "12.34s");
        let stats = |name: &str, usage, error: &str| SandboxStats {
            name: name.into(),
            usage,
            error: error.into(),
            ..SandboxStats::default()
        };
        let text = text(&[stats("a", Some(at(1, 2)), ""), stats("b", None, "no shim")], &HashMap::new());
        assert_eq!(text.lines().count(), 3);
        assert!(text.contains("0.00s") && text.ends_with("b: no shim\n"), "{text}");
    }
}
