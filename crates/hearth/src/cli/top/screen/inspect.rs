//! The texts of the screen: all that is known of one sandbox, and leftovers with what is stuck.

use hearth_api::v1::{Left, Sandbox};
use ratatui::text::Line;

use super::super::super::view;
use super::super::model::{Model, title};
use super::{Look, fit};

/// Why a sandbox is stuck, in one line.
pub(super) fn stuck(s: &Sandbox, now_ms: u64) -> String {
    let Some(stuck) = &s.stuck_details else { return String::new() };
    let next = view::span(stuck.next_try_ms.saturating_sub(now_ms));
    let left: Vec<String> = stuck.left.iter().map(|l| format!("{}: {}", l.what, l.why)).collect();
    format!("next try in {next}: {}", left.join("; "))
}

/// All that is known of one.
pub(super) fn lines(model: &Model, id: &str, width: usize, look: &Look) -> Vec<Line<'static>> {
    let Some(s) = model.find(id) else { return vec![Line::from("That sandbox is gone.")] };
    let ago = |ms: u64| view::span(model.now_ms.saturating_sub(ms));
    let time = |ms: u64, text: String| if ms == 0 { "-".to_owned() } else { text };
    let net = match (s.net, s.slot) {
        (false, _) => "none".to_owned(),
        (true, 0) => "no slot".to_owned(),
        (true, slot) => format!("slot {slot}, address {}", s.address),
    };
    let rows = [
        ("Name", title(s).to_owned()),
        ("Id", s.id.clone()),
        ("State", s.state.clone()),
        ("Template", s.template.clone()),
        ("VMM", format!("{}, shim {}", s.vmm, s.shim_pid)),
        ("Size", format!("{} cpus, {} MiB memory, {} MiB disk", s.cpus, s.memory_mib, s.disk_mib)),
        ("Network", net),
        ("Created", time(s.created_at_ms, format!("{} ago", ago(s.created_at_ms)))),
        ("Ends", time(s.ends_at_ms, format!("in {}", view::span(s.ends_at_ms.saturating_sub(model.now_ms))))),
        ("Unknown", s.unknown.clone()),
        ("Unreachable", s.unreachable.clone()),
    ];
    let mut lines: Vec<Line<'static>> = Vec::new();
    for (name, value) in rows.into_iter().filter(|(_, value)| !value.is_empty()) {
        let mut parts = folded(&value, width.saturating_sub(13)).into_iter();
        let first = parts.next().unwrap_or_default();
        lines.push(Line::from(format!("{name:<13}{first}")));
        lines.extend(parts.map(|part| Line::from(format!("{:13}{part}", ""))));
    }
    lines.extend(stuck_lines(model, s, width, look));
    lines.push(Line::styled("Owns", look.head()));
    lines.extend(s.resources.iter().map(|r| Line::from(fit(&format!("  {r}"), width))));
    if !s.steps.is_empty() {
        lines.push(Line::styled("Steps of its creation", look.head()));
        let step = |t: &hearth_api::v1::StepTime| {
            let (ms, part) = (t.micros / 1000, t.micros % 1000 / 100);
            Line::from(fit(&format!("  {:<16} {ms}.{part} ms", t.step), width))
        };
        lines.extend(s.steps.iter().map(step));
    }
    lines
}

/// What is left of a sandbox, why, and who holds it.
fn stuck_lines(model: &Model, s: &Sandbox, width: usize, look: &Look) -> Vec<Line<'static>> {
    let Some(stuck) = &s.stuck_details else { return vec![] };
    let span = |ms: u64| view::span(ms);
    let head = format!(
        "Stuck for {}, tried {} times, next in {}",
        span(model.now_ms.saturating_sub(stuck.since_ms)),
        stuck.tries,
        span(stuck.next_try_ms.saturating_sub(model.now_ms))
    );
    let mut lines = vec![Line::styled(fit(&head, width), look.bad())];
    for Left { what, why, holders, .. } in &stuck.left {
        let told = folded(&format!("{what}: {why}"), width.saturating_sub(2));
        lines.extend(told.into_iter().map(|part| Line::from(format!("  {part}"))));
        for h in holders {
            let asleep = if h.wchan.is_empty() { String::new() } else { format!(" in {}", h.wchan) };
            let held = format!("    held by {} ({}), state {}{asleep}", h.pid, h.name, h.state);
            lines.push(Line::from(fit(&held, width)));
        }
    }
    lines
}

/// What the daemon found beside its sandboxes, and what does not go.
pub(super) fn leftovers(model: &Model, width: usize, look: &Look) -> Vec<Line<'static>> {
    let node = model.answer.as_ref().and_then(|a| a.info.node.clone()).unwrap_or_default();
    let head = format!("{:<18}{:>10}{:>10}{:>12}{:>10}", "KIND", "LEAKED", "STUCK", "RECLAIMED", "FAILURES");
    let mut lines = vec![Line::styled(fit(&head, width), look.head())];
    let kinds = node.reclaim.map(|r| r.kinds).unwrap_or_default();
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by(|a, b| a.0.cmp(&b.0));
    for (kind, k) in kinds {
        let row = format!("{kind:<18}{:>10}{:>10}{:>12}{:>10}", k.leaked, k.stuck, k.reclaimed, k.failures);
        let style = if k.leaked + k.stuck > 0 { look.bad() } else { ratatui::style::Style::new() };
        lines.push(Line::styled(fit(&row, width), style));
    }
    if lines.len() == 1 {
        lines.push(Line::from("Nothing was found yet."));
    }
    let stuck: Vec<&Sandbox> = model.all().iter().filter(|s| s.stuck_details.is_some()).collect();
    for s in &stuck {
        lines.push(Line::default());
        lines.push(Line::styled(fit(title(s), width), look.head()));
        lines.extend(stuck_lines(model, s, width, look));
    }
    if stuck.is_empty() {
        lines.extend([Line::default(), Line::from("No sandbox is stuck.")]);
    }
    lines
}

/// A text in lines of a width, broken between words where there are any.
fn folded(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last().map_or(0, |l| l.chars().count());
        match lines.last_mut() {
            Some(line) if last == 0 => line.push_str(&fit(word, width)),
            Some(line) if last + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(&fit(word, width));
            }
            _ => lines.push(fit(word, width)),
        }
    }
    lines
}
