//! Whose a thing is, for each way in which records and the daemon can speak or be silent.

use super::*;
use crate::doctor::Identity;

const ALIVE: &str = "alivexxxxxxxxxxx";
const DEAD: &str = "deadxxxxxxxxxxxx";
const NOBODY: &str = "nobodyxxxxxxxxxx";

fn recorded(state: SandboxState, slot: u32, alive: Liveness) -> Recorded {
    let shim = ProcessIdentity { pid: 40 + slot, start_time: 7, boot_id: "b".into(), cgroup: None };
    Recorded {
        name: format!("n{slot}"),
        state,
        slot: Some(slot),
        shim: Some(shim),
        alive,
        this_boot: true,
        stuck: None,
        created_at_ms: 1,
    }
}

fn claims() -> Claims {
    let records = [
        (ALIVE.to_owned(), recorded(SandboxState::Running, 1, Liveness::Alive)),
        (DEAD.to_owned(), recorded(SandboxState::Running, 2, Liveness::Gone)),
    ];
    Claims { records: Some(records.into()), ..Claims::default() }
}

fn books() -> Books {
    let slot = |state: &str| BookedSlot { state: state.into(), why: "w".into() };
    let booked = |slot| Booked { name: format!("n{slot}"), state: "running".into(), slot: Some(slot) };
    Books {
        slots: [(1, slot("assigned")), (2, slot("assigned")), (4, slot("ready")), (5, slot("leaked"))].into(),
        sandboxes: [(ALIVE.to_owned(), booked(1)), (DEAD.to_owned(), booked(2))].into(),
        releasing: BTreeSet::new(),
    }
}

fn scene() -> Scene {
    let slot = |kind, n: u32| Thing { slot: Some(n), ..Thing::new(kind, format!("{kind}-{n}")) };
    let cgroup = |id: &str| Thing { sandbox: Some(id.into()), ..Thing::new(ItemKind::Cgroup, id) };
    let mut things: Vec<Thing> = (1..=5).map(|n| slot(ItemKind::Netns, n)).collect();
    things.extend((1..=5).map(|n| slot(ItemKind::Veth, n)));
    things.extend([ALIVE, DEAD, NOBODY].map(cgroup));
    things.push(Thing { foreign: Some("no number".into()), ..Thing::new(ItemKind::Netns, "netns-x") });
    Scene { things, whole: [ItemKind::Netns, ItemKind::Veth, ItemKind::Cgroup].into() }
}

fn state_of(look: &Look, name: &str) -> State {
    look.items.iter().find(|i| i.name == name && i.kind != ItemKind::Record).unwrap().state
}

fn states(look: &Look) -> Vec<State> {
    let names = ["netns-1", "netns-2", "netns-3", "netns-4", "netns-5", ALIVE, DEAD, NOBODY, "netns-x"];
    names.iter().map(|n| state_of(look, n)).collect()
}

use State::{Foreign, Leaked, Live, Unknown};

#[test]
fn without_a_daemon_records_decide() {
    let look = judge(scene(), &claims(), &claims(), &Daemon::Down);
    assert_eq!(states(&look), [Live, Leaked, Leaked, Leaked, Leaked, Live, Leaked, Leaked, Foreign]);
    let record = |id: &str| look.items.iter().find(|i| i.kind == ItemKind::Record && i.name == id).unwrap();
    assert_eq!((record(ALIVE).state, record(DEAD).state), (Live, Leaked));
    assert!(record(DEAD).evidence[0].contains("pid 42) is gone"), "{:?}", record(DEAD).evidence);
    let netns = look.items.iter().find(|i| i.name == "netns-1").unwrap();
    assert_eq!((netns.owner.sandbox.as_deref(), netns.owner.pid), (Some(ALIVE), Some(41)));
}

#[test]
fn a_daemon_that_is_silent_may_have_prepared_a_slot_but_no_id() {
    let look = judge(scene(), &claims(), &claims(), &Daemon::Silent("it hangs".into()));
    assert_eq!(states(&look), [Live, Unknown, Unknown, Unknown, Unknown, Live, Unknown, Leaked, Foreign]);
}

#[test]
fn a_daemons_books_decide_beside_the_records() {
    let with = Claims { books: Some(books()), ..claims() };
    let look = judge(scene(), &with, &with, &Daemon::Up);
    assert_eq!(states(&look), [Live, Live, Leaked, Live, Leaked, Live, Live, Leaked, Foreign]);
    // Without root the books alone do.
    let alone = Claims { books: Some(books()), ..Claims::default() };
    let look = judge(scene(), &alone, &alone, &Daemon::Up);
    assert_eq!(states(&look), [Live, Live, Leaked, Live, Leaked, Live, Live, Leaked, Foreign]);
}

#[test]
fn what_came_or_went_meanwhile_is_somebodys() {
    let (mut before, mut after) = (claims(), claims());
    let made = recorded(SandboxState::Creating, 3, Liveness::Gone);
    after.records.as_mut().unwrap().insert(NOBODY.into(), made);
    before.books = Some(books());
    after.books = Some(Books {
        sandboxes: [(NOBODY.to_owned(), Booked { name: "n".into(), state: "creating".into(), slot: None })]
            .into(),
        ..books()
    });
    let look = judge(scene(), &before, &after, &Daemon::Up);
    assert_eq!((state_of(&look, NOBODY), state_of(&look, "netns-3")), (Live, Live));
    before.records.as_mut().unwrap().remove(ALIVE);
    let look = judge(scene(), &after, &before, &Daemon::Up);
    assert_eq!(state_of(&look, NOBODY), Live);
}

#[test]
fn nothing_is_leaked_while_somebody_could_not_be_asked() {
    let nothing = Claims::default();
    let look = judge(scene(), &nothing, &nothing, &Daemon::Silent("x".into()));
    assert!(look.items.iter().all(|i| matches!(i.state, Unknown | Foreign)), "{look:?}");
    let torn = Claims { unusable: [("torn".to_owned(), "it is empty".to_owned())].into(), ..claims() };
    let look = judge(scene(), &torn, &torn, &Daemon::Down);
    assert_eq!((state_of(&look, "netns-3"), state_of(&look, NOBODY)), (Unknown, Unknown));
    assert!(look.items.iter().any(|i| i.kind == ItemKind::Record && i.name == "torn" && i.state == Unknown));
}

#[test]
fn a_process_that_was_killed_and_stays_is_stuck_whoever_has_it() {
    let process = ProcessIdentity { pid: 41, start_time: 7, boot_id: "b".into(), cgroup: None };
    let thing = Thing {
        sandbox: Some(ALIVE.into()),
        identity: Identity::Process(process),
        undead: true,
        ..Thing::new(ItemKind::Process, "41")
    };
    let scene = Scene { things: vec![thing], whole: BTreeSet::new() };
    let look = judge(scene, &claims(), &claims(), &Daemon::Down);
    let item = look.items.iter().find(|i| i.kind == ItemKind::Process).unwrap();
    assert_eq!((item.state, item.owner.start_time), (State::Stuck, Some(7)));
    assert!(item.evidence.contains(&"the shim".to_owned()), "{:?}", item.evidence);
}

#[test]
fn the_views_are_held_against_each_other() {
    let mut with = Claims { books: Some(books()), ..claims() };
    let mut seen = scene();
    seen.things.retain(|t| t.name != "netns-1" && t.name != "veth-4");
    let look = judge(seen.clone(), &with, &with, &Daemon::Up);
    let words: Vec<&str> = look.disagreements.iter().map(|d| d.kernel.as_str()).collect();
    assert_eq!(words, ["netns is gone", "shim 42 is gone", "veth is gone"], "{:?}", look.disagreements);
    // A scan that was cut short says nothing of what is absent.
    seen.whole.clear();
    let look = judge(seen, &with, &with, &Daemon::Up);
    assert_eq!(look.disagreements.len(), 1);
    with.records.as_mut().unwrap().remove(ALIVE);
    let look = judge(scene(), &with, &with, &Daemon::Up);
    assert!(look.disagreements.iter().any(|d| d.record.starts_with("there is none")));
}
