//! The screen as a function of the model. Made for 80 columns and 24 lines; more room shows more rows and columns, and
//! less cuts lines off and breaks nothing. Colour says nothing that words do not say.

mod inspect;

use hearth_api::v1::{InfoResponse, NodeStatus, Sandbox};
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph};

use super::super::view;
use super::model::{Load, Mode, Model, Sort, View, title};

/// Stuck sandboxes named above the list; the leftovers have them all.
const STUCK: usize = 3;
const HELP: [&str; 14] = [
    "up, down, j, k    select           page up, page down, home, end, g, G",
    "enter             all that is known of the selected sandbox",
    "d, delete         delete it, after a question",
    "s                 sort by the next column        r  the other way round",
    "/                 show only what has this text   esc  everything again",
    "tab               leftovers by kind, and what is stuck with its reasons",
    "q, ctrl-c         leave; sandboxes go on",
    "",
    "Leaked is what no record names and nobody has; the daemon releases it. Stuck is",
    "what does not go though it was released; it is tried again. `hearth doctor` says",
    "more of both. Pressure is the share of the last 10 s in which somebody had to",
    "wait for the processor, memory or the disk.",
    "",
    "Any key goes back.",
];

/// Draws it all.
pub(super) fn draw(frame: &mut Frame<'_>, model: &Model) {
    let area = frame.area();
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let look = Look { colour: model.colour };
    let mut lines = top(model, width, &look);
    let bottom = bottom(model, &look);
    let room = height.saturating_sub(lines.len() + 1);
    match &model.mode {
        Mode::Help => lines.extend(HELP.iter().map(|l| Line::from(*l))),
        Mode::Inspect(id) => lines.extend(text(inspect::lines(model, id, width, &look), model.scroll, room)),
        _ => match model.view {
            View::Sandboxes => lines.extend(list(model, width, room, &look)),
            View::Leftovers => {
                lines.extend(text(inspect::leftovers(model, width, &look), model.scroll, room))
            }
        },
    }
    lines.truncate(height.saturating_sub(1));
    frame.render_widget(Paragraph::new(lines), area);
    let last = Rect { y: area.y + area.height.saturating_sub(1), height: area.height.min(1), ..area };
    frame.render_widget(Clear, last);
    frame.render_widget(Paragraph::new(bottom), last);
}

/// Part of a text that may be longer than its room.
fn text(all: Vec<Line<'static>>, scroll: usize, room: usize) -> Vec<Line<'static>> {
    let from = scroll.min(all.len().saturating_sub(room));
    all.into_iter().skip(from).take(room).collect()
}

/// How things look.
struct Look {
    colour: bool,
}

impl Look {
    fn style(&self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn bad(&self) -> Style {
        self.style(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Of a state of a node or a sandbox.
    fn of_state(&self, state: &str) -> Style {
        match state {
            "stuck" | "unknown" | "unhealthy" => self.bad(),
            "exited" | "starting" | "draining" | "standby" => self.style(Color::Yellow),
            "running" | "healthy" => self.style(Color::Green),
            _ => Style::new(),
        }
    }

    fn head(&self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
}

fn top(model: &Model, width: usize, look: &Look) -> Vec<Line<'static>> {
    let mut lines = vec![first(model, width, look)];
    if let Some((since, why)) = &model.silent {
        let ago = view::span(model.now_ms.saturating_sub(*since));
        let old = if model.answer.is_some() { "; below is what was last known" } else { "" };
        let told = format!("no answer for {ago}, trying again{old}: {why}");
        lines.push(Line::styled(fit(&told, width), look.bad()));
    }
    let Some(answer) = &model.answer else { return lines };
    let node = answer.info.node.clone().unwrap_or_default();
    if !node.reason.is_empty() && node.status != "healthy" {
        lines.push(labelled("Reason", &node.reason, width));
    }
    lines.push(labelled("Sandboxes", &counts(&node), width));
    lines.push(labelled("Slots", &slots(&answer.info), width));
    let leaked = leaked(&node);
    let style = if leaked.starts_with("none") { Style::new() } else { look.bad() };
    lines.push(styled("Leaked", &leaked, width, style));
    lines.push(labelled("Reclaim", &reclaim(&node), width));
    lines.push(labelled("Host", &model.load.as_ref().map_or_else(|| "not this one".into(), load), width));
    lines.extend(model.load.as_ref().and_then(pressure).map(|text| labelled("Pressure", &text, width)));
    let stuck: Vec<&Sandbox> = model.all().iter().filter(|s| s.stuck_details.is_some()).collect();
    for s in stuck.iter().take(STUCK) {
        let told = format!("{}: {}", title(s), inspect::stuck(s, model.now_ms));
        lines.push(styled("Stuck", &told, width, look.bad()));
    }
    if stuck.len() > STUCK {
        lines.push(labelled("", &format!("and {} more, see tab", stuck.len() - STUCK), width));
    }
    lines.push(Line::default());
    lines
}

fn first(model: &Model, width: usize, look: &Look) -> Line<'static> {
    let Some(answer) = &model.answer else {
        return Line::styled(fit(&format!("hearth top  {}", model.address), width), look.head());
    };
    let InfoResponse { instance, version, pid, node, .. } = &answer.info;
    let node = node.clone().unwrap_or_default();
    let (status, since) = match model.silent {
        Some(_) => ("no answer".to_owned(), String::new()),
        None => {
            let ago = view::span(model.now_ms.saturating_sub(node.since_ms));
            (node.status.clone(), format!(" for {ago}"))
        }
    };
    let style = if model.silent.is_some() { look.bad() } else { look.of_state(&status) };
    Line::from(vec![
        Span::styled(format!("hearth top  {instance} {version}, pid {pid}  "), look.head()),
        Span::styled(status, style.add_modifier(Modifier::BOLD)),
        Span::raw(since),
    ])
}

fn labelled(label: &str, text: &str, width: usize) -> Line<'static> {
    styled(label, text, width, Style::new())
}

fn styled(label: &str, text: &str, width: usize, style: Style) -> Line<'static> {
    let label = format!("{label:<11}");
    let rest = fit(text, width.saturating_sub(label.len()));
    Line::from(vec![
        Span::styled(label, Style::new().add_modifier(Modifier::BOLD)),
        Span::styled(rest, style),
    ])
}

fn counts(node: &NodeStatus) -> String {
    match &node.work {
        None => "not known yet".into(),
        Some(w) => {
            format!("{} live  {} creating  {} deleting  {} stuck", w.live, w.creating, w.deleting, w.stuck)
        }
    }
}

fn slots(info: &InfoResponse) -> String {
    let mut some: Vec<(&String, &u32)> =
        info.slots.iter().filter(|(state, n)| **n > 0 && *state != "free").collect();
    some.sort();
    let some: Vec<String> = some.iter().map(|(state, n)| format!("{n} {state}")).collect();
    let some = if some.is_empty() { "none in use".to_owned() } else { some.join("  ") };
    format!("{some}  of {}", info.slot_capacity)
}

fn leaked(node: &NodeStatus) -> String {
    let Some(reclaim) = &node.reclaim else { return "not known yet".into() };
    if reclaim.state == "scanning" {
        return "not known yet".into();
    }
    let mut some: Vec<(&String, u64)> =
        reclaim.kinds.iter().filter(|(_, k)| k.leaked > 0).map(|(kind, k)| (kind, k.leaked)).collect();
    some.sort();
    match some.is_empty() {
        true => "none".into(),
        false => some.iter().map(|(kind, n)| format!("{n} {kind}")).collect::<Vec<_>>().join("  "),
    }
}

fn reclaim(node: &NodeStatus) -> String {
    const BAR: u64 = 12;
    let Some(r) = &node.reclaim else { return "not known yet".into() };
    let failed = if r.failed > 0 { format!(", {} failed and tried again", r.failed) } else { String::new() };
    let to_go = r.estimate_ms.map(|ms| format!(", about {} to go", view::span(ms))).unwrap_or_default();
    match r.state.as_str() {
        "scanning" => "looking for leftovers".into(),
        "off" => format!("off, {} found", r.total),
        "running" => {
            let full = (r.done * BAR).checked_div(r.total).unwrap_or(BAR).min(BAR);
            let bar: String = (0..BAR).map(|n| if n < full { '#' } else { '-' }).collect();
            format!("[{bar}] {} of {} released{failed}{to_go}", r.done, r.total)
        }
        _ => format!("done, {} of {} released{failed}", r.done, r.total),
    }
}

fn load(load: &Load) -> String {
    let used = load.memory_total_kib.saturating_sub(load.memory_available_kib);
    let bytes = |kib: u64| view::bytes(kib.saturating_mul(1024));
    format!(
        "load {} of {} cpus  memory {} of {}",
        load.average.join(" "),
        load.cpus,
        bytes(used),
        bytes(load.memory_total_kib)
    )
}

/// How much of the time somebody had to wait; nothing where the kernel does not say.
fn pressure(load: &Load) -> Option<String> {
    let named = ["cpu", "memory", "disk"].into_iter().zip(load.pressure);
    let some: Vec<String> = named.filter_map(|(name, p)| Some(format!("{name} {:.0}%", p?))).collect();
    (!some.is_empty()).then(|| format!("{}  of the last 10 s somebody waited for it", some.join("  ")))
}

/// Name, width, and by what it sorts; columns that go first on a narrow screen have the higher rank.
struct Column {
    name: &'static str,
    width: usize,
    rank: u8,
    sort: Option<Sort>,
    value: fn(&Model, &Sandbox) -> String,
}

const COLUMNS: [Column; 8] = [
    Column { name: "NAME", width: 20, rank: 0, sort: Some(Sort::Name), value: |_, s| title(s).to_owned() },
    Column { name: "STATE", width: 9, rank: 0, sort: Some(Sort::State), value: state },
    Column {
        name: "TEMPLATE",
        width: 12,
        rank: 1,
        sort: Some(Sort::Template),
        value: |_, s| s.template.clone(),
    },
    Column { name: "VMM", width: 11, rank: 3, sort: None, value: |_, s| s.vmm.clone() },
    Column { name: "AGE", width: 5, rank: 1, sort: Some(Sort::Age), value: age },
    Column { name: "ENDS", width: 5, rank: 1, sort: Some(Sort::Ends), value: ends },
    Column { name: "SLOT", width: 6, rank: 4, sort: None, value: |_, s| or_dash(s.slot) },
    Column { name: "ADDRESS", width: 15, rank: 2, sort: None, value: |_, s| s.address.clone() },
];

fn or_dash(n: u32) -> String {
    if n == 0 { "-".into() } else { n.to_string() }
}

fn state(model: &Model, s: &Sandbox) -> String {
    if model.deleting.contains_key(&s.id) { "deleting".into() } else { s.state.clone() }
}

fn age(model: &Model, s: &Sandbox) -> String {
    if s.created_at_ms == 0 { "-".into() } else { view::span(model.now_ms.saturating_sub(s.created_at_ms)) }
}

fn ends(model: &Model, s: &Sandbox) -> String {
    if s.ends_at_ms == 0 { "-".into() } else { view::span(s.ends_at_ms.saturating_sub(model.now_ms)) }
}

/// The list around what is selected.
fn list(model: &Model, width: usize, room: usize, look: &Look) -> Vec<Line<'static>> {
    match &model.answer {
        None => return vec![],
        Some(answer) => {
            if let Err(why) = &answer.sandboxes {
                return vec![Line::from(fit(
                    &format!("Which sandboxes there are is not known yet: {why}"),
                    width,
                ))];
            }
        }
    }
    let shown = model.shown();
    let mut columns: Vec<&Column> = COLUMNS.iter().collect();
    let needed = |columns: &[&Column]| columns.iter().map(|c| c.width + 1).sum::<usize>() + 1;
    for rank in (1..=4).rev() {
        if needed(&columns) > width {
            columns.retain(|c| c.rank != rank);
        }
    }
    // What is left over is the name's.
    let wider = width.saturating_sub(needed(&columns));
    let width_of = |c: &Column| if c.name == "NAME" { c.width + wider } else { c.width };
    let mut head = " ".to_owned();
    for column in &columns {
        let mark = match column.sort == Some(model.sort) {
            true if model.reversed => "-",
            true => "+",
            false => "",
        };
        head.push_str(&format!("{:<1$} ", format!("{}{mark}", column.name), width_of(column)));
    }
    let mut lines = vec![Line::styled(head, look.head())];
    let (at, rows) = (model.position(&shown), room.saturating_sub(1));
    let from = at.saturating_sub(rows / 2).min(shown.len().saturating_sub(rows));
    for (n, s) in shown.iter().enumerate().skip(from).take(rows) {
        let selected = n == at;
        let mut spans = vec![Span::raw(if selected { ">" } else { " " })];
        for column in &columns {
            let value = (column.value)(model, s);
            let value = if value.is_empty() { "-".to_owned() } else { value };
            let style = if column.name == "STATE" { look.of_state(&value) } else { Style::new() };
            let width = width_of(column);
            spans.push(Span::styled(format!("{:<width$} ", fit(&value, width)), style));
        }
        let line = Line::from(spans);
        lines.push(if selected { line.style(Style::new().add_modifier(Modifier::REVERSED)) } else { line });
    }
    if shown.is_empty() {
        let why = if model.filter.is_empty() { "No sandboxes." } else { "No sandbox has this text." };
        lines.push(Line::from(why));
    }
    lines
}

fn bottom(model: &Model, look: &Look) -> Line<'static> {
    let known = model.answer.as_ref().is_some_and(|a| a.sandboxes.is_ok());
    let shown = || match known {
        true => format!("{} of {}", model.shown().len(), model.all().len()),
        false => "not known".to_owned(),
    };
    if let Mode::Confirm { name, .. } = &model.mode {
        let asked = format!("Delete {name} and everything it owns? [y]es, any other key is no");
        return Line::styled(asked, look.bad().add_modifier(Modifier::REVERSED));
    }
    if let Mode::Filter = &model.mode {
        return Line::from(format!(
            "Show only: {}_  ({}; enter keeps it, esc does not)",
            model.filter,
            shown()
        ));
    }
    if let Some(note) = &model.note {
        return Line::styled(note.clone(), look.head());
    }
    Line::from(match (&model.mode, model.view) {
        (Mode::Inspect(_), _) => "esc back  d delete  up, down scroll".to_owned(),
        (Mode::Help, _) => String::new(),
        (_, View::Leftovers) => "tab sandboxes  up, down scroll  ? help  q quit".to_owned(),
        _ => {
            let filter = if model.filter.is_empty() {
                String::new()
            } else {
                format!("  only \"{}\", esc all", model.filter)
            };
            format!(
                "{}{filter}  enter inspect  d delete  / filter  s sort  tab leftovers  ? help  q quit",
                shown()
            )
        }
    })
}

/// Cuts a text to a width and shows that it was cut; control characters are not the terminal's to act on.
fn fit(text: &str, width: usize) -> String {
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if plain.chars().count() <= width {
        return plain;
    }
    let cut: String = plain.chars().take(width.saturating_sub(1)).collect();
    format!("{cut}~")
}

#[cfg(test)]
#[path = "screen_tests.rs"]
mod tests;
