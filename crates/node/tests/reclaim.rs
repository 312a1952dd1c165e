//! Starts on a host that is not clean, on the fake host: what is released, what is left alone, and what is tried
//! again.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Bench, create};
use hearth_core::host::ErrorClass;
use hearth_core::network::SlotIndex;
use hearth_core::resource::{Kind, Resource};
use hearth_node::{Engine, EngineError, Failpoints, Phase, ReclaimMode, ReclaimState};
use hearth_testkit::fake_host::{FakeHost, Fault, Verb};
use tokio::task::JoinSet;

fn slot(n: u32) -> SlotIndex {
    SlotIndex::new(n).unwrap()
}

fn plant_slots(bench: &Bench, numbers: impl Iterator<Item = u32>) {
    for n in numbers {
        Resource::of_slot(slot(n)).into_iter().for_each(|part| bench.host.plant(part));
    }
}

async fn until(what: &str, mut good: impl FnMut() -> bool) {
    let wait = async {
        while !good() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "never came: {what}");
}

/// A start that goes on while the test does.
fn start(engine: &Arc<Engine<FakeHost>>) -> JoinSet<Result<(), EngineError>> {
    let engine = Arc::clone(engine);
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { engine.start().await });
    tasks
}

fn counts(engine: &Engine<FakeHost>, state: &str) -> u32 {
    engine.slot_counts().get(state).copied().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_cut_short_is_taken_again_and_frees_nothing() {
    for kind in [Kind::Netns, Kind::Veth, Kind::Cgroup, Kind::Directory] {
        let bench = Bench::sized("10.12.0.0/24", 0);
        plant_slots(&bench, 1..=3);
        bench.host.fail_always(Verb::Census, kind, Fault::Incomplete);
        let engine = Engine::new(Arc::clone(&bench.host), bench.config(Failpoints::default()));
        let mut starting = start(&engine);
        let told = |engine: &Engine<FakeHost>| match &*engine.phase().borrow() {
            Phase::Starting(why) => why.contains("is incomplete and taken again: ordered by the test"),
            other => panic!("{other:?}"),
        };
        until("a second try", || told(&engine) && bench.host.count(Verb::Census, kind) >= 2).await;
        assert!(matches!(create(&engine, "a").await, Err(EngineError::Starting(_))));
        assert_eq!(bench.host.count(Verb::Release, Kind::Netns), 0);
        bench.host.heal();
        starting.join_next().await.unwrap().unwrap().unwrap();
        until("the end", || engine.reclaim().state == ReclaimState::Done).await;
        assert_eq!(bench.leftovers(), []);
        engine.detach().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_told_to_end_does_not_wait_for_a_scan() {
    let bench = Bench::new();
    bench.host.fail_always(Verb::Census, Kind::Veth, Fault::Incomplete);
    let engine = Engine::new(Arc::clone(&bench.host), bench.config(Failpoints::default()));
    let mut starting = start(&engine);
    until("a try", || bench.host.count(Verb::Census, Kind::Veth) >= 1).await;
    engine.detach().await;
    assert!(starting.join_next().await.unwrap().unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_ends_the_start_before_anything_is_released() {
    let bench = Bench::new();
    plant_slots(&bench, 1..=3);
    bench.host.plant_conflict("network.cidr 10.12.0.0/24 overlaps a route");
    let engine = Engine::new(Arc::clone(&bench.host), bench.config(Failpoints::default()));
    let error = engine.start().await.unwrap_err();
    assert!(error.to_string().contains("overlaps a route"), "{error}");
    assert!(matches!(&*engine.phase().borrow(), Phase::Failed(why) if why.contains("overlaps a route")));
    engine.detach().await;
    assert_eq!(bench.leftovers().len(), 3 * 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_go_is_told_apart_and_tried_again() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    plant_slots(&bench, 1..=20);
    bench.host.plant_foreign(Resource::Netns { slot: slot(30) }, "a file");
    bench.host.fail(Verb::Release, Kind::Netns, 5, Fault::Error(ErrorClass::Foreign));
    bench.host.fail(Verb::Release, Kind::Netns, 6, Fault::Error(ErrorClass::Busy));
    let engine = bench.engine().await;
    until("the first round", || engine.reclaim().state == ReclaimState::Done).await;
    let progress = engine.reclaim();
    assert_eq!((progress.total, progress.done, progress.failed), (20, 18, 2));
    let netns = progress.kinds[&Kind::Netns];
    assert_eq!((netns.leaked, netns.stuck, netns.reclaimed, netns.failures), (2, 2, 18, 2));
    // One fault each, and what was foreign by itself.
    assert_eq!((counts(&engine, "foreign"), counts(&engine, "stuck")), (1, 1));
    assert_eq!(counts(&engine, "leaked"), 0);
    until("a second round", || engine.reclaim().done == 20).await;
    let netns = engine.reclaim().kinds[&Kind::Netns];
    assert_eq!((netns.leaked, netns.stuck, netns.reclaimed), (0, 0, 20));
    assert_eq!((counts(&engine, "foreign"), counts(&engine, "stuck")), (0, 0));
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_count_budget_ends_the_wait_and_not_the_work() {
    let mut bench = Bench::sized("10.12.0.0/24", 0);
    bench.reclaim = ReclaimMode::Blocking;
    plant_slots(&bench, 1..=40);
    let mut config = bench.config(Failpoints::default());
    config.reclaim.budget_count = Some(10);
    // The eleventh takes so long that the start is over before it.
    bench.host.fail(Verb::Release, Kind::Netns, 15, Fault::Slow(Duration::from_secs(2)));
    let engine = Engine::new(Arc::clone(&bench.host), config);
    engine.start().await.unwrap();
    let progress = engine.reclaim();
    assert_eq!(progress.state, ReclaimState::Running);
    assert!((10..40).contains(&progress.done), "{progress:?}");
    assert!(progress.estimate().is_some());
    until("the rest", || engine.reclaim().state == ReclaimState::Done).await;
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_in_the_middle_lose_nothing_and_repeat_nothing() {
    let mut bench = Bench::sized("10.12.0.0/22", 0);
    // A few go at a time from the first moment on, and the start is over after twice so many.
    bench.reclaim = ReclaimMode::Blocking;
    plant_slots(&bench, 1..=400);
    let mut starts = 0;
    let mut total = 400;
    loop {
        starts += 1;
        // Stops the release somewhere among the next few.
        bench.host.fail(Verb::Release, Kind::Netns, 40, Fault::Slow(Duration::from_millis(50)));
        let mut config = bench.config(Failpoints::default());
        config.reclaim.budget_count = Some(20);
        let engine = Engine::new(Arc::clone(&bench.host), config);
        engine.start().await.unwrap();
        assert_eq!(engine.reclaim().total, total, "start {starts} sees what the former left");
        until("some", || engine.reclaim().done >= total.min(20)).await;
        engine.detach().await;
        let done = engine.reclaim().done;
        assert_eq!(engine.reclaim().failed, 0);
        total -= done;
        bench.host.heal();
        if total == 0 {
            break;
        }
    }
    assert!(starts > 2, "the reclaim was over before it could be cut: {starts} starts");
    assert_eq!(bench.leftovers(), []);
    // Each namespace was released once.
    assert_eq!(bench.host.count(Verb::Release, Kind::Netns), 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_go_as_configured() {
    let leftovers = || {
        let slot = SlotIndex::new(77).unwrap();
        [Resource::Netns { slot }, Resource::Cgroup { name: "zzzzzzzzzzzzzzzz".into() }]
    };
    for mode in [ReclaimMode::Off, ReclaimMode::Blocking, ReclaimMode::Background] {
        let mut bench = Bench::sized("10.12.0.0/24", 0);
        bench.reclaim = mode;
        for leftover in leftovers() {
            bench.host.plant(leftover);
        }
        let engine = bench.engine().await;
        match mode {
            ReclaimMode::Off => {
                assert_eq!(engine.reclaim().state, ReclaimState::Off);
                assert_eq!(engine.slot_counts()["leaked"], 1);
            }
            ReclaimMode::Blocking => {
                assert_eq!(bench.leftovers(), [], "ready before the leftovers were gone");
                assert_eq!((engine.reclaim().total, engine.reclaim().done), (2, 2));
            }
            ReclaimMode::Background => {
                let done = async {
                    while engine.reclaim().state != ReclaimState::Done {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(5), done).await.unwrap();
                assert_eq!(bench.leftovers(), []);
            }
        }
        engine.detach().await;
        assert_eq!(bench.leftovers().len(), if mode == ReclaimMode::Off { 2 } else { 0 });
    }
}
