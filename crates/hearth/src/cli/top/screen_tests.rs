//! Screens as text: what is on them, and that it fits.

use std::collections::HashMap;

use hearth_api::v1::{Holder, Left, Leftovers, Reclaim, Stuck, Work};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::model::{Answer, Event, Key};
use super::*;

const NOW: u64 = 1_700_000_000_000;

fn sandbox(n: usize) -> Sandbox {
    Sandbox {
        id: format!("id{n:014}"),
        name: format!("sb-{n:03}"),
        template: "base".into(),
        state: "running".into(),
        vmm: "firecracker".into(),
        address: format!("10.12.0.{}", 2 * n + 1),
        slot: u32::try_from(n).unwrap_or_default() + 1,
        created_at_ms: NOW - 61_000,
        ends_at_ms: NOW + 3_600_000,
        cpus: 2,
        memory_mib: 512,
        disk_mib: 1024,
        net: true,
        resources: vec!["netns hearth-default-1".into(), "cgroup id".into()],
        ..Sandbox::default()
    }
}

fn stuck(n: usize) -> Sandbox {
    let holder = Holder {
        pid: 812,
        name: "dd".into(),
        state: "D".into(),
        wchan: "nbd_wait".into(),
        ..Holder::default()
    };
    let left = Left {
        kind: "cgroup".into(),
        what: format!("cgroup c{n}"),
        why: "3 processes stay in it after SIGKILL".into(),
        holders: vec![holder],
    };
    let details = Stuck { left: vec![left], since_ms: NOW - 20_000, tries: 4, next_try_ms: NOW + 8_000 };
    Sandbox { state: "stuck".into(), stuck_details: Some(details), ..sandbox(n) }
}

fn info() -> InfoResponse {
    let kinds = HashMap::from([
        ("netns".to_owned(), Leftovers { leaked: 12, stuck: 0, reclaimed: 40, failures: 1 }),
        ("cgroup".to_owned(), Leftovers { leaked: 3, stuck: 1, reclaimed: 0, failures: 0 }),
    ]);
    let reclaim =
        Reclaim { state: "running".into(), total: 55, done: 40, failed: 1, estimate_ms: Some(4_000), kinds };
    InfoResponse {
        version: "0.1.0".into(),
        instance: "default".into(),
        pid: 4711,
        slots: HashMap::from([
            ("ready".to_owned(), 8),
            ("assigned".to_owned(), 3),
            ("free".to_owned(), 32_756),
        ]),
        slot_capacity: 32_767,
        node: Some(NodeStatus {
            status: "healthy".into(),
            since_ms: NOW - 180_000,
            reclaim: Some(reclaim),
            work: Some(Work { live: 3, creating: 1, deleting: 0, stuck: 1 }),
            ..NodeStatus::default()
        }),
        ..InfoResponse::default()
    }
}

fn model(sandboxes: Result<Vec<Sandbox>, String>) -> Model {
    let mut model = Model::new("127.0.0.1:5008".into(), false);
    model.update(Event::Now(NOW));
    model.update(Event::Answer(Box::new(Answer { info: info(), sandboxes })));
    let load = Load {
        average: ["0.52".into(), "0.61".into(), "0.70".into()],
        cpus: 2,
        memory_total_kib: 8 << 20,
        memory_available_kib: 6 << 20,
        pressure: [Some(12.4), Some(0.0), None],
    };
    model.update(Event::Load(Some(load)));
    model
}

fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

fn press(model: &mut Model, keys: &str) {
    for c in keys.chars() {
        let key = if c == '\n' {
            Key::Enter
        } else if c == '\t' {
            Key::Tab
        } else {
            Key::Char(c)
        };
        model.update(Event::Key(key));
    }
}

#[test]
fn all_values_are_on_a_screen_of_80_by_24() {
    let model = model(Ok(vec![sandbox(0), stuck(1), sandbox(2)]));
    let lines = screen(&model, 80, 24);
    let expected = "\
hearth top  default 0.1.0, pid 4711  healthy for 3m
Sandboxes  3 live  1 creating  0 deleting  1 stuck
Slots      3 assigned  8 ready  of 32767
Leaked     3 cgroup  12 netns
Reclaim    [########----] 40 of 55 released, 1 failed and tried again, about 4s~
Host       load 0.52 0.61 0.70 of 2 cpus  memory 2.0 GiB of 8.0 GiB
Pressure   cpu 12%  memory 0%  of the last 10 s somebody waited for it
Stuck      sb-001: next try in 8s: cgroup c1: 3 processes stay in it after SIGK~

 NAME+                       STATE     TEMPLATE     AGE   ENDS  ADDRESS
>sb-000                      running   base         1m    1h    10.12.0.1
 sb-001                      stuck     base         1m    1h    10.12.0.3
 sb-002                      running   base         1m    1h    10.12.0.5";
    assert_eq!(lines[..13].join("\n"), expected);
    assert_eq!(lines[23], "3 of 3  enter inspect  d delete  / filter  s sort  tab leftovers  ? help  q quit");
    // With room for them there are more columns.
    let wide = screen(&model, 140, 30).join("\n");
    for word in ["SLOT", "VMM", "firecracker", "about 4s to go"] {
        assert!(wide.contains(word), "{word}: {wide}");
    }
}

#[test]
fn no_sandbox_and_a_thousand_fit() {
    let none = screen(&model(Ok(vec![])), 80, 24);
    assert_eq!(none[9], "No sandboxes.");
    let mut many = model(Ok((0..1000).map(sandbox).collect()));
    let lines = screen(&many, 80, 24);
    assert!(lines[9].starts_with(">sb-000") && lines[22].starts_with(" sb-013"), "{lines:#?}");
    press(&mut many, "G");
    let lines = screen(&many, 80, 24);
    assert!(lines[22].starts_with(">sb-999") && lines[23].starts_with("1000 of 1000"), "{lines:#?}");
    many.update(Event::Key(Key::PageUp));
    let shown = screen(&many, 80, 24);
    assert!(shown.iter().any(|l| l.starts_with(">sb-989")), "{shown:#?}");
}

#[test]
fn long_names_are_cut_and_shown_to_be_and_no_byte_reaches_the_terminal_as_an_order() {
    let mut long = sandbox(0);
    long.name = "n".repeat(63);
    long.template = "t".repeat(63);
    let mut odd = stuck(1);
    odd.name = "odd".into();
    odd.stuck_details.as_mut().unwrap().left[0].why = "\u{1b}[2Jwiped\nover".into();
    let lines = screen(&model(Ok(vec![long, odd])), 80, 24);
    let row = lines.iter().find(|l| l.starts_with(">nnn")).unwrap();
    assert!(row.contains("nnn~ running") && row.contains("ttt~ ") && row.contains("10.12.0.1"), "{row}");
    assert!(lines.iter().any(|l| l.contains("[2Jwiped over")), "{lines:#?}");
    assert!(!lines.concat().contains('\u{1b}'));
}

#[test]
fn many_stuck_ones_leave_room_and_all_are_told_with_their_reasons() {
    let mut model = model(Ok((0..9).map(stuck).collect()));
    let lines = screen(&model, 80, 24);
    assert_eq!(lines.iter().filter(|l| l.starts_with("Stuck ")).count(), 3);
    assert!(lines.iter().any(|l| l.contains("and 6 more, see tab")), "{lines:#?}");
    assert!(lines.iter().filter(|l| l.contains("stuck     base")).count() == 9, "{lines:#?}");
    press(&mut model, "\t");
    let all = screen(&model, 80, 60).join("\n");
    assert!(all.contains("netns                     12         0          40         1"), "{all}");
    assert_eq!(all.matches("Stuck for 20s, tried 4 times, next in 8s").count(), 9, "{all}");
    assert!(all.contains("held by 812 (dd), state D in nbd_wait"), "{all}");
    // On a small screen one scrolls there.
    assert!(!screen(&model, 80, 24).join("\n").contains("c8"));
    press(&mut model, &"j".repeat(100));
    assert!(screen(&model, 80, 24).join("\n").contains("cgroup c8"));
}

#[test]
fn one_sandbox_is_shown_with_all_that_is_known() {
    let mut model = model(Ok(vec![stuck(0)]));
    press(&mut model, "\n");
    let text = screen(&model, 80, 40).join("\n");
    for word in [
        "Id           id00000000000000",
        "2 cpus, 512 MiB memory, 1024 MiB disk",
        "slot 1, address 10.12.0.1",
        "1m ago",
        "3 processes stay in it after SIGKILL",
        "  netns hearth-default-1",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    press(&mut model, "d");
    let asked = screen(&model, 80, 24);
    assert_eq!(asked[23], "Delete sb-000 and everything it owns? [y]es, any other key is no");
}

#[test]
fn a_daemon_that_is_away_starting_or_slow_is_told() {
    let mut away = Model::new("127.0.0.1:5008".into(), false);
    away.update(Event::Now(NOW));
    away.update(Event::Silent("Connection refused".into()));
    away.update(Event::Now(NOW + 7_000));
    let lines = screen(&away, 80, 24);
    assert_eq!(
        lines[..2].join("\n"),
        "hearth top  127.0.0.1:5008\nno answer for 7s, trying again: Connection refused"
    );
    assert!(lines[23].starts_with("not known  enter"), "{}", lines[23]);
    let mut lost = model(Ok(vec![sandbox(0)]));
    lost.update(Event::Silent("Connection refused".into()));
    let text = screen(&lost, 80, 24).join("\n");
    assert!(text.contains("pid 4711  no answer\n"), "{text}");
    assert!(text.contains("below is what was last known") && text.contains("sb-000"), "{text}");
    let starting = screen(&model(Err("taking the census".into())), 80, 24).join("\n");
    assert!(starting.contains("Which sandboxes there are is not known yet: taking the census"), "{starting}");
    assert!(!starting.contains("No sandboxes"), "{starting}");
}

#[test]
fn every_mode_is_drawn_on_every_size() {
    for keys in ["", "/sb", "?", "\n", "d", "\t", "sr"] {
        let mut model = model(Ok((0..40).map(|n| if n % 3 == 0 { stuck(n) } else { sandbox(n) }).collect()));
        press(&mut model, keys);
        for (width, height) in [(1, 1), (10, 3), (40, 10), (80, 24), (300, 100)] {
            assert_eq!(screen(&model, width, height).len(), usize::from(height), "{keys:?}");
        }
    }
}

#[test]
fn without_colour_there_is_none() {
    let mut model = model(Ok(vec![sandbox(0), stuck(1)]));
    let colours = |model: &Model| {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, model)).unwrap();
        let cells = terminal.backend().buffer().content().iter();
        cells.filter(|c| c.fg != Color::Reset || c.bg != Color::Reset).count()
    };
    assert_eq!(colours(&model), 0);
    model.colour = true;
    assert!(colours(&model) > 0);
}
