//! Sandboxes as JSON and as a table.

use std::time::{SystemTime, UNIX_EPOCH};

use comfy_table::{Cell, Color, ContentArrangement, Table};
use hearth_api::v1::{CgroupCounters, Exit, Holder, Left, Sandbox, Stuck};
use hearth_core::block::DiskStats;
use serde_json::{Value, json};

use super::{out, stats};

/// A sandbox as JSON.
pub(super) fn sandbox(s: &Sandbox) -> Value {
    json!({
        "id": s.id,
        "name": s.name,
        "template": s.template,
        "state": s.state,
        "created_at_ms": s.created_at_ms,
        "ends_at_ms": (s.ends_at_ms != 0).then_some(s.ends_at_ms),
        "cpus": s.cpus,
        "memory_mib": s.memory_mib,
        "disk_mib": s.disk_mib,
        "net": s.net,
        "vmm": s.vmm,
        "slot": (s.slot != 0).then_some(s.slot),
        "address": (!s.address.is_empty()).then_some(&s.address),
        "shim_pid": (s.shim_pid != 0).then_some(s.shim_pid),
        "stuck": s.stuck_details.as_ref().map(|details| stuck(&s.stuck, details)),
        "unknown": (!s.unknown.is_empty()).then_some(&s.unknown),
        "unreachable": (!s.unreachable.is_empty()).then_some(&s.unreachable),
        "disk_rate": disk_rate(s),
        "disks": disks(&s.disk_stats),
        "exit": s.exit.as_ref().map(exit),
        "resources": s.resources,
        "steps": steps(s),
    })
}

fn disk_rate(s: &Sandbox) -> Value {
    if (s.disk_mib_per_second, s.disk_iops) == (0, 0) {
        return Value::Null;
    }
    let some = |n: u64| (n != 0).then_some(n);
    json!({
        "mib_per_second": some(s.disk_mib_per_second),
        "iops": some(s.disk_iops),
        "burst_ms": some(s.disk_burst_ms),
    })
}

/// What was counted of its disks, in short: kinds of requests that never came are left out.
fn disks(stats: &str) -> Value {
    let stats: Vec<DiskStats> = match serde_json::from_str(stats) {
        Ok(stats) => stats,
        // A daemon or a shim that does not say.
        Err(_) => return Value::Null,
    };
    let disk = |disk: &DiskStats| {
        let mut object = json!({ "disk": disk.disk, "in_flight": disk.in_flight });
        if disk.limited > 0 {
            object["limited"] = json!({ "requests": disk.limited, "ms": disk.limited_micros / 1000 });
        }
        if let Some(remote) = &disk.remote {
            object["remote"] = json!(remote);
        }
        for (word, op) in disk.operations() {
            if op.requests + op.cancelled > 0 {
                object[word] = json!({
                    "requests": op.requests,
                    "bytes": op.bytes,
                    "errors": op.errors,
                    "cancelled": op.cancelled,
                    "mean_micros": op.micros / op.requests.max(1),
                });
            }
        }
        object
    };
    Value::Array(stats.iter().map(disk).collect())
}

fn exit(e: &Exit) -> Value {
    let cgroup = |c: &CgroupCounters| {
        json!({
            "cpu_us": c.cpu_us,
            "memory_bytes": c.memory_bytes,
            "memory_peak_bytes": c.memory_peak_bytes,
            "oom_kills": c.oom_kills,
            "read_bytes": c.read_bytes,
            "written_bytes": c.written_bytes,
        })
    };
    json!({
        "reason": e.reason,
        "code": e.code,
        "signal": e.signal,
        "at_ms": e.at_ms,
        "detail": e.detail,
        "wall_ms": e.wall_ms,
        "cpu_us": e.cpu_us,
        "usage": e.usage.as_ref().map(stats::usage),
        "cgroup": e.cgroup.as_ref().map(cgroup),
        "guest_oom_kills": e.guest_oom_kills,
        "disks": disks(&e.disks),
    })
}

/// How and when it ended, in a few words; empty while it runs.
fn ended(s: &Sandbox, now: u64) -> String {
    s.exit
        .as_ref()
        .map_or_else(String::new, |e| format!("{} {} ago", e.reason, span(now.saturating_sub(e.at_ms))))
}

fn stuck(why: &str, stuck: &Stuck) -> Value {
    let holder = |h: &Holder| {
        json!({
            "pid": h.pid,
            "task": h.task,
            "name": h.name,
            "state": h.state,
            "wchan": (!h.wchan.is_empty()).then_some(&h.wchan),
            "stack": h.stack,
        })
    };
    let left = |l: &Left| {
        let holders: Vec<Value> = l.holders.iter().map(holder).collect();
        json!({ "kind": l.kind, "what": l.what, "why": l.why, "holders": holders })
    };
    json!({
        "why": why,
        "left": stuck.left.iter().map(left).collect::<Vec<_>>(),
        "since_ms": stuck.since_ms,
        "tries": stuck.tries,
        "next_try_ms": stuck.next_try_ms,
    })
}

/// What of a sandbox needs a look, in a few words; empty if nothing does.
fn trouble(s: &Sandbox, now: u64) -> String {
    if !s.unknown.is_empty() {
        return "record unusable".into();
    }
    let Some(stuck) = &s.stuck_details else {
        return if s.unreachable.is_empty() { String::new() } else { "shim unreachable".into() };
    };
    let first = stuck.left.first().map_or("something", |l| l.what.as_str());
    let more = match stuck.left.len() {
        0 | 1 => String::new(),
        n => format!(" and {} more", n - 1),
    };
    format!("{first}{more} stays, next try in {}", span(stuck.next_try_ms.saturating_sub(now)))
}

/// Step → milliseconds.
pub(super) fn steps(s: &Sandbox) -> Value {
    #[allow(clippy::cast_precision_loss)] // Exact up to centuries.
    let ms = |micros: u64| json!(micros as f64 / 1e3);
    Value::Object(s.steps.iter().map(|t| (t.step.clone(), ms(t.micros))).collect())
}

/// A time of day as RFC 3339 has it, in UTC.
pub(super) fn utc(at_ms: u64) -> String {
    let seconds = i64::try_from(at_ms / 1000).unwrap_or(i64::MAX);
    let nanos = i32::try_from(at_ms % 1000).unwrap_or(0) * 1_000_000;
    prost_types::Timestamp { seconds, nanos }.to_string()
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A span in its largest unit: `45s`, `3m`, `2h`, `5d`.
pub(super) fn span(ms: u64) -> String {
    match ms / 1000 {
        s @ 0..60 => format!("{s}s"),
        s @ 60..3600 => format!("{}m", s / 60),
        s @ 3600..86_400 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

/// Bytes with a unit, one decimal.
pub(super) fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut tenths = n.saturating_mul(10) / 1024;
    while tenths >= 10_240 && unit < UNITS.len() - 1 {
        tenths /= 1024;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// The table of `hearth ls`.
pub(super) fn sandboxes(list: &[Sandbox], width: Option<u16>) -> String {
    let now = now_ms();
    let header = ["NAME", "ID", "TEMPLATE", "STATE", "VMM", "AGE", "ENDS", "ADDRESS", "ENDED", "TROUBLE"];
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let rows: Vec<Vec<String>> = list
        .iter()
        .map(|s| {
            let ends = match s.ends_at_ms {
                0 => "-".to_owned(),
                at => span(at.saturating_sub(now)),
            };
            let age = match s.created_at_ms {
                0 => "-".to_owned(),
                at => span(now.saturating_sub(at)),
            };
            vec![
                // Of an unknown one only the id is known.
                if s.name.is_empty() { s.id.clone() } else { s.name.clone() },
                s.id.clone(),
                or_dash(&s.template),
                s.state.clone(),
                or_dash(&s.vmm),
                age,
                ends,
                or_dash(&s.address),
                ended(s, now),
                trouble(s, now),
            ]
        })
        .collect();
    // On a narrow terminal whole columns go, the least needed first: a wrapped table cannot be read.
    const LEAST_NEEDED: [&str; 5] = ["ID", "VMM", "TEMPLATE", "ADDRESS", "ENDS"];
    let mut shown: Vec<usize> = (0..header.len()).collect();
    for empty in ["TROUBLE", "ENDED"] {
        let column = header.iter().position(|h| *h == empty);
        if let Some(i) = column.filter(|&i| rows.iter().all(|row| row[i].is_empty())) {
            shown.retain(|&shown| shown != i);
        }
    }
    for name in LEAST_NEEDED {
        if width.is_some_and(|w| usize::from(w) < needed(&header, &rows, &shown)) {
            shown.retain(|&i| header[i] != name);
        }
    }
    let head: Vec<&str> = shown.iter().map(|&i| header[i]).collect();
    let pick = |row: &Vec<String>| shown.iter().map(|&i| row[i].clone()).collect();
    table(&head, rows.iter().map(pick))
}

fn needed(header: &[&str], rows: &[Vec<String>], shown: &[usize]) -> usize {
    let column = |i: usize| rows.iter().map(|r| r[i].len()).max().unwrap_or(0).max(header[i].len());
    shown.iter().map(|&i| column(i) + GAP).sum::<usize>().saturating_sub(GAP)
}

const GAP: usize = 2;

/// A table without borders. Words that mean trouble are red, those that ask for a look yellow.
pub(super) fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let colour = out::colour();
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if colour {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row.into_iter().map(|text| match text.as_str() {
            "stuck" | "unknown" | "fail" => Cell::new(text).fg(Color::Red),
            "warn" | "exited" => Cell::new(text).fg(Color::Yellow),
            "ok" | "running" => Cell::new(text).fg(Color::Green),
            _ => Cell::new(text),
        }));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> Sandbox {
        Sandbox {
            id: "abcdefghijkmnpqr".into(),
            name: "sb-0123456789".into(),
            template: "base".into(),
            state: "running".into(),
            vmm: "firecracker".into(),
            address: "10.12.255.255".into(),
            created_at_ms: now_ms() - 5_000,
            ..Sandbox::default()
        }
    }

    #[test]
    fn the_list_fits_80_columns_without_wrapping() {
        let text = sandboxes(&[one()], Some(80));
        assert!(text.lines().all(|l| l.len() <= 80), "{text}");
        assert_eq!(text.lines().count(), 2);
        assert!(text.contains("sb-0123456789") && text.contains("10.12.255.255"));
        assert!(sandboxes(&[one()], None).contains("abcdefghijkmnpqr"));
    }

    #[test]
    fn what_is_stuck_or_unknown_is_told_in_a_few_words() {
        let left = |what: &str| Left { kind: "cgroup".into(), what: what.into(), ..Left::default() };
        let details = Stuck { left: vec![left("cgroup a"), left("slot 7")], ..Stuck::default() };
        let stuck =
            Sandbox { state: "stuck".into(), stuck: "x; y".into(), stuck_details: Some(details), ..one() };
        let unknown = Sandbox {
            id: "zzzzzzzzzzzzzzzz".into(),
            state: "unknown".into(),
            unknown: "record.json: it is empty; put back a copy".into(),
            ..Sandbox::default()
        };
        let text = sandboxes(&[one(), stuck.clone(), unknown.clone()], Some(100));
        assert!(text.contains("cgroup a and 1 more stays, next try in 0s"), "{text}");
        assert!(text.contains("zzzzzzzzzzzzzzzz") && text.contains("record unusable"), "{text}");
        assert!(!sandboxes(&[one()], None).contains("TROUBLE"));
        let json = sandbox(&stuck);
        assert_eq!(
            (&json["stuck"]["why"], &json["stuck"]["left"][1]["what"]),
            (&json!("x; y"), &json!("slot 7"))
        );
        assert!(sandbox(&unknown)["unknown"].as_str().unwrap().contains("put back"));
        assert_eq!(sandbox(&one())["stuck"], Value::Null);
    }

    #[test]
    fn spans_and_sizes() {
        assert_eq!([span(0), span(61_000), span(7_200_000), span(200_000_000)], ["0s", "1m", "2h", "2d"]);
        assert_eq!(bytes(1536 << 20), "1.5 GiB");
        assert_eq!(bytes(0), "0.0 KiB");
    }
}
