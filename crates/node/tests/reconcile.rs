//! Reconcile passes on the fake host: what they find, and every guard that keeps them from acting.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Bench, create};
use hearth_core::host::ErrorClass;
use hearth_core::network::SlotIndex;
use hearth_core::reconcile::Finding;
use hearth_core::resource::{Kind, Resource};
use hearth_node::{Engine, Outcome, Pass, PassResult, ReclaimState, ReconcileAction};
use hearth_testkit::fake_host::{FakeHost, Fault, Verb};
use tokio::task::JoinSet;

const NOBODY: &str = "zzzzzzzzzzzzzzzz";

fn slot(n: u32) -> SlotIndex {
    SlotIndex::new(n).unwrap()
}

fn plant_slot(bench: &Bench, n: u32) {
    Resource::of_slot(slot(n)).into_iter().for_each(|part| bench.host.plant(part));
}

fn cgroup() -> Resource {
    Resource::Cgroup { name: NOBODY.into() }
}

fn run_directory(bench: &Bench) -> Resource {
    Resource::Directory { path: bench.tmp.path().join("run/t/sandboxes").join(NOBODY) }
}

fn state_directory(bench: &Bench) -> Resource {
    Resource::Directory { path: bench.tmp.path().join("state/t/sandboxes").join(NOBODY) }
}

async fn until(what: &str, mut good: impl FnMut() -> bool) {
    let wait = async {
        while !good() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "never came: {what}");
}

/// An engine whose pool is full, so that nothing moves while a test looks.
async fn engine(bench: &Bench) -> Arc<Engine<FakeHost>> {
    let engine = bench.engine().await;
    let ready = u32::try_from(bench.slot_pool).unwrap();
    until("a full pool", || counts(&engine, "ready") == ready).await;
    engine
}

async fn pass(engine: &Engine<FakeHost>) -> Pass {
    engine.reconcile(false).await.unwrap()
}

fn outcomes(pass: &Pass) -> Vec<(String, Outcome)> {
    pass.findings.iter().map(|f| (f.finding.to_string(), f.outcome.clone())).collect()
}

fn only(pass: &Pass) -> Outcome {
    assert_eq!(pass.findings.len(), 1, "{pass:?}");
    pass.findings[0].outcome.clone()
}

fn counts(engine: &Engine<FakeHost>, state: &str) -> u32 {
    engine.slot_counts().get(state).copied().unwrap_or(0)
}

fn leaked(engine: &Engine<FakeHost>, kind: Kind) -> u64 {
    engine.leftovers().get(&kind).map_or(0, |k| k.leaked)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_leaks_under_a_living_daemon_goes_with_the_second_pass() {
    let bench = Bench::new();
    let engine = engine(&bench).await;
    create(&engine, "lives").await.unwrap();
    let before = bench.leftovers();
    assert_eq!(pass(&engine).await.findings, []);
    plant_slot(&bench, 9);
    let planted = [cgroup(), run_directory(&bench), state_directory(&bench)];
    planted.iter().for_each(|r| bench.host.plant(r.clone()));
    let first = pass(&engine).await;
    assert_eq!(first.result, PassResult::Ok);
    assert_eq!(first.findings.len(), 4);
    assert!(first.findings.iter().all(|f| f.outcome == Outcome::Waiting && f.sightings == 1), "{first:?}");
    assert_eq!(
        [Kind::Netns, Kind::Cgroup, Kind::Directory].map(|kind| leaked(&engine, kind)),
        [1, 1, 2],
        "what is seen leaked is shown before it goes"
    );
    let second = pass(&engine).await;
    assert!(second.findings.iter().all(|f| f.outcome == Outcome::Released && f.sightings == 2), "{second:?}");
    assert_eq!(bench.leftovers(), before);
    assert_eq!(pass(&engine).await.findings, []);
    let kinds = engine.leftovers();
    for (kind, n) in [(Kind::Netns, 1), (Kind::Cgroup, 1), (Kind::Directory, 2)] {
        assert_eq!((kinds[&kind].leaked, kinds[&kind].reclaimed, kinds[&kind].failures), (0, n, 0), "{kind}");
    }
    assert_eq!(engine.reconcile_report().findings["leaked"], 4);
    assert_eq!(engine.reconcile_report().passes[&PassResult::Ok], 4);
    assert_eq!(counts(&engine, "leaked"), 0);
    engine.delete("lives").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loop_passes_by_itself_and_ends_with_the_engine() {
    let mut bench = Bench::new();
    bench.reconcile.interval = Duration::from_millis(20);
    let engine = engine(&bench).await;
    plant_slot(&bench, 9);
    let planted = Resource::Netns { slot: slot(9) };
    until("the release", || !bench.host.leftovers().contains(&planted)).await;
    until("more passes", || engine.reconcile_report().passes[&PassResult::Ok] > 3).await;
    engine.detach().await;
    let passes = engine.reconcile_report().passes;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(engine.reconcile_report().passes, passes, "a pass after the end");
    assert_eq!(engine.reconcile_stopped(), None);
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_goes_before_its_age() {
    let mut bench = Bench::sized("10.12.0.0/24", 0);
    bench.reconcile.min_age = Duration::from_secs(3600);
    let engine = engine(&bench).await;
    bench.host.plant(cgroup());
    for sightings in 1..=4 {
        let pass = pass(&engine).await;
        assert_eq!((only(&pass), pass.findings[0].sightings), (Outcome::Waiting, sightings));
    }
    assert_eq!(bench.leftovers(), [cgroup()]);
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_that_is_not_whole_changes_nothing_and_says_why() {
    for kind in [Kind::Netns, Kind::Veth, Kind::Cgroup, Kind::Directory] {
        for fault in [Fault::Incomplete, Fault::Error(ErrorClass::Failed)] {
            let bench = Bench::new();
            let engine = engine(&bench).await;
            plant_slot(&bench, 9);
            bench.host.plant(cgroup());
            assert_eq!(pass(&engine).await.findings.len(), 2);
            let before = bench.leftovers();
            bench.host.fail_always(Verb::Census, kind, fault.clone());
            for _ in 0..3 {
                let pass = pass(&engine).await;
                assert_eq!((pass.result, pass.findings.len()), (PassResult::Incomplete, 0));
                assert!(pass.reason.contains(kind.as_str()), "{}", pass.reason);
            }
            assert_eq!(bench.leftovers(), before, "{kind} {fault:?}");
            assert_eq!(counts(&engine, "ready"), 2);
            bench.host.heal();
            // Whole passes in a row: the ones between count for nothing, neither way.
            let whole = pass(&engine).await;
            assert!(whole.findings.iter().all(|f| f.outcome == Outcome::Released), "{whole:?}");
            assert_eq!(engine.reconcile_report().passes[&PassResult::Incomplete], 3);
            engine.detach().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_record_that_cannot_be_used_nothing_is_leaked() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = engine(&bench).await;
    let Resource::Directory { path } = state_directory(&bench) else { unreachable!() };
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("record.json"), "{").unwrap();
    bench.host.plant(cgroup());
    for _ in 0..3 {
        let pass = pass(&engine).await;
        assert_eq!((pass.result, pass.findings.len()), (PassResult::Incomplete, 0));
        assert!(pass.reason.contains("record"), "{}", pass.reason);
    }
    assert_eq!(bench.leftovers().len(), 2);
    std::fs::remove_file(path.join("record.json")).unwrap();
    pass(&engine).await;
    assert_eq!(pass(&engine).await.findings.len(), 2);
    assert_eq!(bench.leftovers(), []);
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_that_wants_too_much_stops_and_changes_nothing() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = engine(&bench).await;
    (20..31).for_each(|n| plant_slot(&bench, n));
    let before = bench.leftovers();
    for result in [PassResult::Ok, PassResult::Capped, PassResult::Capped] {
        let pass = pass(&engine).await;
        assert_eq!(pass.result, result);
        assert!(pass.findings.iter().all(|f| f.outcome == Outcome::Waiting), "{pass:?}");
        assert_eq!(result == PassResult::Capped, pass.reason.starts_with("11 of 11 "), "{}", pass.reason);
    }
    assert_eq!(bench.leftovers(), before);
    assert_eq!((counts(&engine, "leaked"), leaked(&engine, Kind::Netns)), (0, 11));
    // One less is few enough.
    Resource::of_slot(slot(20)).iter().for_each(|part| bench.host.vanish(part));
    let pass = pass(&engine).await;
    assert_eq!((pass.result, pass.findings.len()), (PassResult::Ok, 10));
    assert_eq!(bench.leftovers(), []);
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn report_mode_and_dry_runs_change_nothing() {
    let mut bench = Bench::new();
    bench.reconcile.action = ReconcileAction::Report;
    let engine = engine(&bench).await;
    plant_slot(&bench, 9);
    bench.host.plant(cgroup());
    bench.host.plant(run_directory(&bench));
    bench.host.vanish(&Resource::Veth { slot: slot(1) });
    bench.host.vanish(&Resource::HostFirewall);
    let before = bench.host.leftovers();
    let ensured = bench.host.count(Verb::Ensure, Kind::HostFirewall);
    for expected in [Outcome::Waiting, Outcome::Reported, Outcome::Reported] {
        let dry = engine.reconcile(true).await.unwrap();
        assert_eq!(dry.findings.len(), 4);
        let pass = pass(&engine).await;
        assert!(pass.findings.iter().all(|f| f.outcome == expected), "{pass:?}");
        assert_eq!(pass.findings.len(), 4);
    }
    assert_eq!(bench.host.leftovers(), before);
    assert_eq!(bench.host.count(Verb::Ensure, Kind::HostFirewall), ensured);
    assert_eq!((counts(&engine, "ready"), counts(&engine, "leaked")), (2, 0));
    assert_eq!(engine.reconcile_report().findings, [("gone", 1), ("host-firewall", 1), ("leaked", 3)].into());
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_is_no_sighting() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = engine(&bench).await;
    bench.host.plant(cgroup());
    for _ in 0..3 {
        assert_eq!(only(&engine.reconcile(true).await.unwrap()), Outcome::Waiting);
    }
    assert_eq!(only(&pass(&engine).await), Outcome::Waiting);
    for _ in 0..3 {
        assert_eq!(only(&engine.reconcile(true).await.unwrap()), Outcome::Due);
    }
    assert_eq!(bench.leftovers(), [cgroup()]);
    assert_eq!(engine.reconcile_report().passes.values().sum::<u64>(), 1);
    assert_eq!(only(&pass(&engine).await), Outcome::Released);
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimed_slot_is_given_to_nobody_until_it_is_gone() {
    // All slots but one are used, so that a creation would have to take the leaked one.
    let bench = Bench::sized("10.12.0.0/29", 0);
    let engine = engine(&bench).await;
    let all: u32 = counts(&engine, "free");
    for n in 1..all {
        create(&engine, &format!("s{n}")).await.unwrap();
    }
    let last = all;
    plant_slot(&bench, last);
    assert_eq!(only(&pass(&engine).await), Outcome::Waiting);
    bench.host.fail(Verb::Release, Kind::Netns, 1, Fault::Slow(Duration::from_millis(300)));
    let mut passes = JoinSet::new();
    let other = Arc::clone(&engine);
    passes.spawn(async move { other.reconcile(false).await.unwrap() });
    until("the claim", || counts(&engine, "leaked") == 1).await;
    let refused = create(&engine, "late").await.unwrap_err().to_string();
    assert!(refused.contains("no free network slot"), "{refused}");
    assert_eq!(only(&passes.join_next().await.unwrap().unwrap()), Outcome::Released);
    create(&engine, "late").await.unwrap();
    let pass = pass(&engine).await;
    assert_eq!(pass.findings, []);
    engine.delete_all().await;
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_handed_out_during_a_pass_is_no_leak() {
    let bench = Bench::sized("10.12.0.0/29", 0);
    let engine = engine(&bench).await;
    plant_slot(&bench, 1);
    assert_eq!(only(&pass(&engine).await), Outcome::Waiting);
    // While the scans of the second pass go on a creation takes the number, and completes what is there.
    let scans = bench.host.count(Verb::Census, Kind::HostFirewall);
    bench.host.fail(Verb::Census, Kind::HostFirewall, 1, Fault::Slow(Duration::from_millis(300)));
    let mut passes = JoinSet::new();
    let other = Arc::clone(&engine);
    passes.spawn(async move { other.reconcile(false).await.unwrap() });
    until("the scan", || bench.host.count(Verb::Census, Kind::HostFirewall) > scans).await;
    let view = create(&engine, "takes").await.unwrap();
    assert_eq!(view.record.slot, Some(slot(1)));
    assert_eq!(passes.join_next().await.unwrap().unwrap().findings, []);
    assert_eq!(bench.host.count(Verb::Release, Kind::Netns), 0);
    assert_eq!(counts(&engine, "assigned"), 1);
    engine.delete("takes").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepared_slot_that_vanished_is_dropped_and_made_again() {
    for gone in Resource::of_slot(slot(1)).into_iter().take(2) {
        let bench = Bench::new();
        let engine = engine(&bench).await;
        bench.host.vanish(&gone);
        let first = pass(&engine).await;
        assert_eq!(
            (first.findings[0].finding.clone(), only(&first)),
            (Finding::Prepared(slot(1)), Outcome::Waiting)
        );
        assert_eq!(only(&pass(&engine).await), Outcome::Released);
        until("another one", || counts(&engine, "ready") == 2).await;
        assert_eq!(pass(&engine).await.findings, []);
        let kept = u64::from(counts(&engine, "ready"));
        let whole = bench.host.leftovers().iter().filter(|r| r.kind() == Kind::Veth).count() as u64;
        assert_eq!(whole, kept, "{gone}");
        // Both can be used.
        for name in ["a", "b", "c"] {
            create(&engine, name).await.unwrap();
        }
        engine.delete_all().await;
        engine.detach().await;
        assert_eq!(bench.leftovers(), []);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_sandbox_without_its_slot_is_reported_and_left() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = engine(&bench).await;
    let view = create(&engine, "lives").await.unwrap();
    let own = view.record.slot.unwrap();
    bench.host.vanish(&Resource::Netns { slot: own });
    for expected in [Outcome::Waiting, Outcome::Reported, Outcome::Reported] {
        let pass = pass(&engine).await;
        assert_eq!(only(&pass), expected);
        assert_eq!(pass.findings[0].finding, Finding::Running(own, view.record.id.clone()));
    }
    assert_eq!(bench.host.running().len(), 1);
    assert_eq!(engine.reconcile_report().findings["gone"], 1);
    assert_eq!(leaked(&engine, Kind::Netns), 0, "it has an owner");
    engine.delete("lives").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_host_firewall_is_made_again_at_once() {
    let bench = Bench::new();
    let engine = engine(&bench).await;
    pass(&engine).await;
    assert_eq!(engine.reconcile_report().findings.get("host-firewall"), None);
    bench.host.vanish(&Resource::HostFirewall);
    assert!(engine.reconcile(true).await.unwrap().reason.contains("host firewall is gone"));
    assert_eq!(pass(&engine).await.result, PassResult::Ok);
    assert!(bench.host.leftovers().contains(&Resource::HostFirewall));
    assert_eq!(engine.reconcile_report().findings["host-firewall"], 1);
    bench.host.vanish(&Resource::HostFirewall);
    bench.host.fail(Verb::Ensure, Kind::HostFirewall, 1, Fault::Error(ErrorClass::Refused));
    let failed = pass(&engine).await;
    assert_eq!(failed.result, PassResult::Failed);
    assert!(failed.reason.contains("host firewall"), "{}", failed.reason);
    assert_eq!(pass(&engine).await.result, PassResult::Ok);
    assert!(bench.host.leftovers().contains(&Resource::HostFirewall));
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_released_is_tried_again_without_another_pass() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = engine(&bench).await;
    plant_slot(&bench, 9);
    bench.host.plant(cgroup());
    pass(&engine).await;
    bench.host.fail(Verb::Release, Kind::Netns, 1, Fault::Error(ErrorClass::Busy));
    bench.host.fail(Verb::Release, Kind::Cgroup, 1, Fault::Deadline);
    let second = pass(&engine).await;
    assert_eq!(second.result, PassResult::Failed);
    assert!(
        second.findings.iter().all(|f| matches!(&f.outcome, Outcome::Failed(w) if w.contains("ordered")))
    );
    assert_eq!((counts(&engine, "stuck"), leaked(&engine, Kind::Cgroup)), (1, 1));
    // They are in the hands of the release now, and no new findings.
    let third = pass(&engine).await;
    assert_eq!((third.result, outcomes(&third)), (PassResult::Ok, vec![]));
    until("the next try", || bench.leftovers().is_empty()).await;
    until("the numbers", || counts(&engine, "stuck") == 0 && leaked(&engine, Kind::Cgroup) == 0).await;
    let netns = engine.leftovers()[&Kind::Netns];
    assert_eq!((netns.leaked, netns.stuck, netns.reclaimed, netns.failures), (0, 0, 1, 1));
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_things_and_those_of_a_reclaim_are_left_alone() {
    let mut bench = Bench::sized("10.12.0.0/24", 0);
    bench.reclaim = hearth_node::ReclaimMode::Off;
    plant_slot(&bench, 7);
    bench.host.plant(cgroup());
    let strange = bench.tmp.path().join("run/t/sandboxes/an operator's notes");
    std::fs::create_dir_all(&strange).unwrap();
    bench.host.plant_foreign(Resource::Netns { slot: slot(30) }, "a file");
    let engine = engine(&bench).await;
    assert_eq!(engine.reclaim().state, ReclaimState::Off);
    bench.host.plant_foreign(Resource::Veth { slot: slot(31) }, "an operator's link");
    let before = bench.leftovers();
    for _ in 0..3 {
        assert_eq!(pass(&engine).await.findings, []);
    }
    assert_eq!(bench.leftovers(), before);
    assert!(strange.is_dir());
    assert_eq!([Kind::Netns, Kind::Cgroup].map(|kind| leaked(&engine, kind)), [1, 1]);
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loop_that_hangs_is_noticed_and_forgiven() {
    let mut bench = Bench::sized("10.12.0.0/24", 0);
    bench.reconcile.interval = Duration::from_millis(10);
    bench.reconcile.patience = Duration::from_millis(200);
    let engine = engine(&bench).await;
    until("a pass", || !engine.reconcile_report().passes.is_empty()).await;
    bench.host.fail(Verb::Census, Kind::Veth, 1, Fault::Slow(Duration::from_secs(2)));
    until("it is noticed", || engine.reconcile_stopped().is_some_and(|w| w.contains("reconcile loop"))).await;
    until("it is forgiven", || engine.reconcile_stopped().is_none()).await;
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_that_panics_has_failed_and_the_loop_goes_on() {
    let mut bench = Bench::new();
    bench.reconcile.interval = Duration::from_millis(5);
    bench.reconcile.max_share_percent = 100;
    let engine = engine(&bench).await;
    let failed = |engine: &Engine<FakeHost>| {
        engine.reconcile_report().passes.get(&PassResult::Failed).copied().unwrap_or(0)
    };
    bench.host.fail(Verb::Census, Kind::Cgroup, 1, Fault::Panic);
    until("the pass that panicked", || failed(&engine) == 1).await;
    bench.host.plant(cgroup());
    until("the leak is gone", || !bench.leftovers().contains(&cgroup())).await;
    assert_eq!(engine.reconcile_stopped(), None);
    engine.detach().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_creations_under_fast_passes_loses_no_slot_and_shares_none() {
    const ROUNDS: usize = 12;
    const AT_ONCE: usize = 8;
    let mut bench = Bench::sized("10.12.0.0/26", 4);
    bench.reconcile.interval = Duration::from_millis(1);
    bench.reconcile.max_share_percent = 100;
    let engine = engine(&bench).await;
    let free = counts(&engine, "free") + counts(&engine, "ready");
    for round in 0..ROUNDS {
        let mut creates = JoinSet::new();
        for n in 0..AT_ONCE {
            let engine = Arc::clone(&engine);
            creates.spawn(async move { create(&engine, &format!("s{round}x{n}")).await.unwrap() });
        }
        // Something to do for the passes, under numbers that creations reach for.
        bench.host.plant(Resource::Cgroup { name: format!("leak{round:012}") });
        let mut slots: Vec<SlotIndex> =
            creates.join_all().await.iter().map(|view| view.record.slot.unwrap()).collect();
        slots.sort();
        slots.dedup();
        assert_eq!(slots.len(), AT_ONCE, "two sandboxes with one slot");
        for n in slots {
            let parts = Resource::of_slot(n);
            let there = bench.host.leftovers();
            assert!(
                parts.iter().all(|part| there.contains(part)),
                "slot {n} of a running sandbox was released"
            );
        }
        assert_eq!(engine.delete_all().await, Vec::<String>::new());
    }
    until("the leaks are gone", || !bench.leftovers().iter().any(|r| r.kind() == Kind::Cgroup)).await;
    until("all slots are back", || counts(&engine, "free") + counts(&engine, "ready") == free).await;
    let report = engine.reconcile_report();
    assert!(report.passes[&PassResult::Ok] as usize > ROUNDS, "{report:?}");
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}
