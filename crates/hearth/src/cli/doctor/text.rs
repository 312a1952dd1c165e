//! A diagnosis as text that is readable in 80 columns and without colour.

use std::collections::HashSet;

use hearth_core::doctor::{Disagreement, Item, ItemKind, Limit, Room, State};
use hearth_core::stuck::Holder;

use super::super::{out, terminal, view};
use crate::doctor::Diagnosis;

/// Clears the screen and goes to its first line.
pub(super) const CLEAR: &str = "\x1b[2J\x1b[H";
/// Where the second line of an item begins.
const INDENT: &str = "         ";
/// Stack lines shown of one task.
const FRAMES: usize = 4;

/// Columns to wrap at; none where nobody looks.
pub(in crate::cli) fn width() -> Option<usize> {
    out::is_terminal().then(|| usize::try_from(terminal::size().cols).unwrap_or(80).clamp(40, 160))
}

/// The whole text.
pub(super) fn diagnosis(d: &Diagnosis, all: bool, width: Option<usize>) -> String {
    let mut text = heading(d, width);
    let states: Vec<String> = State::ALL.iter().map(|s| s.as_str().to_uppercase()).collect();
    let mut header = vec!["KIND"];
    header.extend(states.iter().map(String::as_str));
    let rows = d.counts.iter().map(|(kind, counts)| {
        let number = |s: &State| counts.get(s).map_or("-".to_owned(), usize::to_string);
        std::iter::once(kind.to_string()).chain(State::ALL.iter().map(number)).collect()
    });
    if d.counts.is_empty() {
        text.push_str("\nNothing of it is on this host.\n");
    } else {
        text.push('\n');
        text.push_str(&view::table(&header, rows));
    }
    let slots: HashSet<_> =
        d.items.iter().filter(|i| i.kind == ItemKind::Netns).map(|i| (i.owner.slot, i.state)).collect();
    // What lives and dies with a namespace is one finding with it to a reader.
    let inside = |i: &Item| {
        matches!(i.kind, ItemKind::Tap | ItemKind::SandboxFirewall)
            && slots.contains(&(i.owner.slot, i.state))
    };
    let shown: Vec<&Item> = d.items.iter().filter(|i| all || (i.state.is_finding() && !inside(i))).collect();
    section(&mut text, "Findings", !all && !shown.is_empty());
    section(&mut text, "Everything", all && !shown.is_empty());
    for item in shown {
        text.push_str(&one(item, d.taken_at_ms, width));
    }
    section(&mut text, "Record, kernel and daemon disagree", !d.disagreements.is_empty());
    for disagreement in &d.disagreements {
        text.push_str(&differing(disagreement, width));
    }
    let limits: Vec<&Limit> = d.limits.iter().filter(|l| all || l.result != Room::Ok).collect();
    section(&mut text, "Limits of the host", !limits.is_empty());
    text.push_str(&limits_table(&limits, width));
    section(&mut text, "Could not be seen", !d.unseen.is_empty());
    for why in &d.unseen {
        text.push_str(&wrapped("  ", "    ", why, width));
    }
    text.push('\n');
    text.push_str(&wrapped("", "", &summary(d), width));
    text
}

fn heading(d: &Diagnosis, width: Option<usize>) -> String {
    let pid = d.daemon.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
    let state = match (d.daemon.state, &d.daemon.why) {
        ("up", _) if d.daemon.address.is_empty() => format!("up{pid}"),
        ("up", _) => format!("up{pid} at {}", d.daemon.address),
        ("down", _) if d.instance.is_empty() => "down: no process of its name runs".to_owned(),
        ("down", _) => "down: nobody holds the instance's lock".to_owned(),
        (_, why) => format!("silent: {}", why.as_deref().unwrap_or("it does not answer")),
    };
    let whose = match d.instance.as_str() {
        "" => format!("Layout {}.", d.layout),
        instance => format!("Instance {instance}, layout {}.", d.layout),
    };
    let mut text = wrapped("", "", &whose, width);
    text.push_str(&wrapped("", "", &format!("Daemon {state}."), width));
    text
}

fn section(text: &mut String, title: &str, wanted: bool) {
    if wanted {
        text.push_str(&format!("\n{title}\n"));
    }
}

/// Two lines or more: what, then whose and why.
pub(in crate::cli) fn one(item: &Item, now_ms: u64, width: Option<usize>) -> String {
    let mut text = format!("{} {:<9}  {}\n", coloured(item.state), item.kind.as_str(), item.name);
    let mut about = Vec::new();
    let owner = &item.owner;
    about.extend(owner.sandbox.as_ref().map(|id| format!("sandbox {id}")));
    about.extend(owner.slot.map(|n| format!("slot {n}")));
    about.extend(owner.pid.zip(owner.start_time).map(|(pid, start)| format!("pid {pid} of tick {start}")));
    about.extend(item.since_ms.map(|at| format!("{} old", view::span(now_ms.saturating_sub(at)))));
    let evidence = item.evidence.join("; ");
    let line = if about.is_empty() { evidence } else { format!("{}: {evidence}", about.join(", ")) };
    text.push_str(&wrapped(INDENT, INDENT, &line, width));
    for holder in &item.tasks {
        text.push_str(&task(holder, width));
    }
    text
}

fn task(holder: &Holder, width: Option<usize>) -> String {
    let Holder { pid, task, name, state, wchan, stack } = holder;
    let place = wchan.as_ref().map(|w| format!(", sleeps in {w}")).unwrap_or_default();
    let frames = match stack.is_empty() {
        true => String::new(),
        false => format!(", stack {}", stack.iter().take(FRAMES).cloned().collect::<Vec<_>>().join(" < ")),
    };
    let line = format!("task {task} of pid {pid} ({name}) is in state {state}{place}{frames}");
    wrapped(INDENT, INDENT, &line, width)
}

fn differing(d: &Disagreement, width: Option<usize>) -> String {
    let mut text = format!("  {}\n", d.what);
    for (who, says) in [("record", &d.record), ("kernel", &d.kernel), ("daemon", &d.daemon)] {
        if !says.is_empty() {
            text.push_str(&wrapped(&format!("    {who}: "), "            ", says, width));
        }
    }
    text
}

fn limits_table(limits: &[&Limit], width: Option<usize>) -> String {
    let mut text = String::new();
    for limit in limits {
        let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
        let mut line = format!("{}: {} used of {}", limit.limit, number(limit.used), number(limit.max));
        if let Some(wanted) = limit.wanted {
            line.push_str(&format!(", {wanted} wanted"));
        }
        for more in [&limit.why, &limit.todo].into_iter().filter(|m| !m.is_empty()) {
            line.push_str(&format!("; {more}"));
        }
        text.push_str(&wrapped(&format!("{:<8} ", limit.result.as_str()), INDENT, &line, width));
    }
    text
}

fn summary(d: &Diagnosis) -> String {
    let looks = if d.looks == 1 { "one look" } else { "two looks" };
    let passing = match d.passing {
        0 => String::new(),
        n => format!(" {n} more came or went meanwhile and are not listed."),
    };
    let found = match (d.findings, d.unseen.is_empty()) {
        (0, true) => "Clean".to_owned(),
        (0, false) => "Nothing found in what could be seen".to_owned(),
        (1, _) => "1 finding".to_owned(),
        (n, _) => format!("{n} findings"),
    };
    let root = if d.host.root || d.unseen.is_empty() { "" } else { " As root more can be seen." };
    format!("{found}; {looks}, {} ms.{passing}{root}", d.took_ms)
}

/// The word, eight columns wide, red for what is wrong and yellow for what is not known.
fn coloured(state: State) -> String {
    let word = format!("{:<8}", state.as_str());
    if !out::colour() {
        return word;
    }
    match state {
        State::Leaked | State::Stuck => format!("\x1b[31m{word}\x1b[0m"),
        State::Unknown => format!("\x1b[33m{word}\x1b[0m"),
        State::Live => format!("\x1b[32m{word}\x1b[0m"),
        State::Foreign => word,
    }
}

/// Words in lines of at most `width` columns; one longer than that has a line of its own.
pub(in crate::cli) fn wrapped(first: &str, rest: &str, text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return format!("{first}{text}\n") };
    let (mut out, mut line, mut fresh) = (String::new(), first.to_owned(), true);
    for word in text.split_whitespace() {
        let gap = usize::from(!fresh);
        if !fresh && line.chars().count() + gap + word.chars().count() > width {
            out.push_str(line.trim_end());
            out.push('\n');
            line = rest.to_owned();
            fresh = true;
        }
        if !fresh {
            line.push(' ');
        }
        line.push_str(word);
        fresh = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{DaemonSeen, HostSeen};
    use hearth_core::doctor::{Identity, Owner};

    fn sample() -> Diagnosis {
        let id = "abcdefghijkmnpqr";
        let item = Item {
            kind: ItemKind::Directory,
            name: format!("/run/hearth/default/sandboxes/{id}"),
            state: State::Leaked,
            owner: Owner { sandbox: Some(id.into()), slot: None, pid: Some(7), start_time: Some(9) },
            evidence: vec!["no record names it, and no daemon runs".into(), "directory".into()],
            since_ms: Some(1_000),
            identity: Identity::Name,
            tasks: vec![],
        };
        let live = Item { state: State::Live, name: "x".into(), ..item.clone() };
        Diagnosis {
            schema: 1,
            layout: "hearth".into(),
            instance: "default".into(),
            taken_at_ms: 61_000,
            took_ms: 12,
            looks: 2,
            passing: 0,
            host: HostSeen { kernel: "6.1".into(), boot_id: None, root: false },
            daemon: DaemonSeen { state: "down", pid: None, address: "127.0.0.1:5008".into(), why: None },
            counts: [(ItemKind::Directory, [(State::Live, 1), (State::Leaked, 1)].into())].into(),
            findings: 1,
            items: vec![item, live],
            disagreements: vec![Disagreement {
                what: "slot 3".into(),
                record: String::new(),
                kernel: "veth is gone".into(),
                daemon: "ready".into(),
            }],
            limits: vec![Limit::counted("neighbour table", Some(7), Some(1024), Some(65_534), "raise it")],
            unseen: vec![
                "host-firewall: not permitted, and a long explanation of what to do about it follows".into(),
            ],
        }
    }

    #[test]
    fn it_fits_80_columns_and_says_all() {
        let text = diagnosis(&sample(), false, Some(80));
        assert!(text.lines().all(|l| l.chars().count() <= 80), "{text}");
        for word in [
            "Daemon down",
            "1m old",
            "pid 7 of tick 9",
            "kernel: veth is gone",
            "65534 wanted",
            "1 finding;",
            "As root",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!text.contains("live     directory"), "{text}");
        assert!(diagnosis(&sample(), true, Some(80)).contains("live     directory  x"));
    }

    #[test]
    fn words_are_wrapped_and_none_is_lost() {
        assert_eq!(wrapped("a: ", "   ", "bb cc dd", Some(8)), "a: bb cc\n   dd\n");
        assert_eq!(wrapped("", " ", "aaaaaaaaaaaa b", Some(5)), "aaaaaaaaaaaa\n b\n");
        assert_eq!(wrapped("", "", "", Some(5)), "\n");
    }
}
