//! Keys and answers as changes of the model.

use super::*;

fn sandbox(name: &str, state: &str, created_at_ms: u64) -> Sandbox {
    Sandbox {
        id: format!("id-{name}"),
        name: name.into(),
        state: state.into(),
        template: "base".into(),
        created_at_ms,
        ..Sandbox::default()
    }
}

fn model(sandboxes: Vec<Sandbox>) -> Model {
    let mut model = Model::new("127.0.0.1:5008".into(), false);
    answer(&mut model, sandboxes);
    model
}

fn answer(model: &mut Model, sandboxes: Vec<Sandbox>) {
    let answer = Answer { info: InfoResponse::default(), sandboxes: Ok(sandboxes) };
    assert_eq!(model.update(Event::Answer(Box::new(answer))), None);
}

fn three() -> Vec<Sandbox> {
    vec![sandbox("b", "running", 300), sandbox("a", "stuck", 100), sandbox("c", "running", 200)]
}

fn press(model: &mut Model, keys: &str) -> Vec<Effect> {
    keys.chars()
        .filter_map(|c| {
            let key = match c {
                '\n' => Key::Enter,
                '\t' => Key::Tab,
                '\u{1b}' => Key::Escape,
                '\u{8}' => Key::Backspace,
                c => Key::Char(c),
            };
            model.update(Event::Key(key))
        })
        .collect()
}

fn names(model: &Model) -> Vec<&str> {
    model.shown().into_iter().map(|s| s.name.as_str()).collect()
}

#[test]
fn the_list_is_sorted_in_every_way_and_back() {
    let mut model = model(three());
    let mut orders = Vec::new();
    for _ in 0..5 {
        orders.push(names(&model).concat());
        press(&mut model, "s");
    }
    assert_eq!(orders, ["abc", "bca", "abc", "bca", "abc"]);
    assert_eq!(model.sort, Sort::Name);
    press(&mut model, "r");
    assert_eq!(names(&model), ["c", "b", "a"]);
    // One without an end is after those that have one.
    let mut some = three();
    (some[0].ends_at_ms, some[2].ends_at_ms) = (50, 20);
    let mut model = self::model(some);
    press(&mut model, "ssss");
    assert_eq!((model.sort, names(&model)), (Sort::Ends, vec!["c", "b", "a"]));
}

#[test]
fn the_filter_takes_letters_that_are_keys_elsewhere() {
    let mut model = model(three());
    assert_eq!(press(&mut model, "/stuckq"), []);
    assert_eq!((model.filter.as_str(), names(&model).len()), ("stuckq", 0));
    press(&mut model, "\u{8}");
    assert_eq!((names(&model), model.selected.as_deref()), (vec!["a"], Some("id-a")));
    press(&mut model, "\n");
    assert_eq!((&model.mode, model.filter.as_str()), (&Mode::List, "stuck"));
    press(&mut model, "\u{1b}");
    assert_eq!(names(&model), ["a", "b", "c"]);
}

#[test]
fn what_is_selected_stays_selected_when_the_list_changes() {
    let mut model = model(three());
    press(&mut model, "jj");
    assert_eq!(model.selected.as_deref(), Some("id-c"));
    press(&mut model, "jjjj");
    assert_eq!(model.selected.as_deref(), Some("id-c"), "below the last is the last");
    let mut more = three();
    more.insert(0, sandbox("aa", "running", 1));
    answer(&mut model, more);
    assert_eq!((model.selected.as_deref(), model.position(&model.shown())), (Some("id-c"), 3));
    press(&mut model, "g");
    assert_eq!(model.selected.as_deref(), Some("id-a"));
    press(&mut model, "G");
    answer(&mut model, vec![sandbox("b", "running", 300)]);
    assert_eq!(model.selected.as_deref(), Some("id-b"));
    answer(&mut model, vec![]);
    assert_eq!(model.selected, None);
    assert_eq!(press(&mut model, "jkdG\n"), [], "nothing to do with nothing");
    assert_eq!(model.mode, Mode::List);
}

#[test]
fn only_yes_deletes_and_it_deletes_the_life_that_was_shown() {
    let mut model = model(three());
    for no in ["dn", "d\u{1b}", "dx", "d\n"] {
        assert_eq!(press(&mut model, no), [], "{no:?}");
        assert_eq!(model.mode, Mode::List);
    }
    let effects = press(&mut model, "\ndy");
    assert_eq!(effects, [Effect::Delete { id: "id-a".into(), name: "a".into() }]);
    assert!(matches!(&model.mode, Mode::Inspect(id) if id == "id-a"));
    // Not twice.
    assert_eq!(press(&mut model, "\u{1b}dy"), []);
    assert!(model.note.as_deref().is_none_or(|n| n.contains("already")));
    model.update(Event::Deleted { id: "id-a".into(), name: "a".into(), failed: Some("busy".into()) });
    assert!(model.deleting.is_empty() && model.note.as_deref() == Some("a is not deleted: busy"));
    // It goes by itself while it is asked about, and another one takes its name: that one is not meant.
    press(&mut model, "d");
    assert!(matches!(model.mode, Mode::Confirm { .. }));
    let next = Sandbox { id: "id-next".into(), ..sandbox("a", "running", 9) };
    answer(&mut model, vec![next]);
    assert_eq!((press(&mut model, "y"), &model.mode), (vec![], &Mode::List));
}

#[test]
fn a_daemon_that_goes_is_told_with_the_time_and_forgotten_when_it_is_back() {
    let mut model = model(three());
    model.update(Event::Now(5_000));
    model.update(Event::Silent("refused".into()));
    model.update(Event::Now(9_000));
    model.update(Event::Silent("no route".into()));
    assert_eq!(model.silent, Some((5_000, "no route".into())));
    assert_eq!(model.all().len(), 3, "what was known stays");
    answer(&mut model, three());
    assert_eq!(model.silent, None);
    // A list that is not known yet is not an empty one: what is looked at stays.
    press(&mut model, "\n");
    let starting = Answer { info: InfoResponse::default(), sandboxes: Err("taking the census".into()) };
    model.update(Event::Answer(Box::new(starting)));
    assert!(matches!(model.mode, Mode::Inspect(_)));
}

#[test]
fn every_key_has_an_end() {
    let mut model = model(three());
    assert_eq!(press(&mut model, "?x\t\t"), []);
    assert_eq!((&model.mode, model.view), (&Mode::List, View::Sandboxes));
    // In the other view nothing can be deleted that is not seen.
    assert_eq!(press(&mut model, "\tdy\n"), []);
    assert_eq!(model.mode, Mode::List);
    assert_eq!(press(&mut model, "q"), [Effect::Quit]);
    for keys in ["/abc", "\n", "d", "?"] {
        press(&mut model, keys);
        assert_eq!(model.update(Event::Key(Key::Interrupt)), Some(Effect::Quit), "{keys:?}");
    }
}
