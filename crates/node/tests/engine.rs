//! The engine against a fake host: every step failed, cancelled and panicked at; collisions; stuck releases;
//! restarts. After each, the slate is clean of every kind.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Bench, create};
use hearth_core::host::ErrorClass;
use hearth_core::lifecycle::SandboxState;
use hearth_core::network::SlotIndex;
use hearth_core::resource::{Kind, Resource};
use hearth_core::steps::Step;
use hearth_node::{Ask, Engine, EngineError, Failpoints, ReclaimState};
use hearth_testkit::faults::{Fault, Verb};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_life_from_create_to_gone() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let view = create(&engine, "a").await.unwrap();
    assert_eq!(view.state, SandboxState::Running);
    assert_eq!(view.steps.len(), Step::ALL.len());
    assert!(view.record.slot.is_some());
    assert!(engine.shim("a").is_ok());
    assert_eq!(engine.list().unwrap().len(), 1);
    engine.delete("a").await.unwrap();
    // "Gone" is said when it is so, not later.
    assert_eq!(bench.host.running().len(), 0);
    assert!(
        !bench.leftovers().iter().any(|r| matches!(r, Resource::Cgroup { .. } | Resource::Directory { .. }))
    );
    assert!(engine.list().unwrap().is_empty());
    let again = engine.delete("a").await.unwrap_err();
    assert!(matches!(again, EngineError::NotFound(ref why) if why.contains("has ended")), "{again}");
    assert_eq!(engine.detach().await, Vec::<String>::new());
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_at_any_step_leaves_nothing() {
    for step in Step::ALL {
        for action in ["error", "error-after", "panic"] {
            let bench = Bench::new();
            let points = Failpoints::parse([(step.as_str(), action)]).unwrap();
            let engine = bench.engine_with(points).await;
            let error = create(&engine, "a").await.unwrap_err();
            match (action, &error) {
                ("panic", EngineError::Failed(_)) => {}
                (_, EngineError::Step { step: at, .. }) if *at == step => {}
                _ => panic!("{step} {action}: {error}"),
            }
            assert!(engine.drained(Duration::from_secs(5)).await, "{step} {action}");
            assert_eq!(engine.detach().await, Vec::<String>::new(), "{step} {action}");
            assert_eq!(bench.leftovers(), [], "{step} {action}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_fails_half_way_leaves_nothing() {
    let kinds = [Kind::Netns, Kind::Veth, Kind::Tap, Kind::SandboxFirewall, Kind::Cgroup, Kind::Directory];
    for kind in kinds {
        for fault in [
            Fault::Error(ErrorClass::Failed),
            Fault::HalfDone(ErrorClass::Failed),
            Fault::DoneButError(ErrorClass::Failed),
        ] {
            // No pool: the slot is then built by the creation under test.
            let bench = Bench::sized("10.12.0.0/24", 0);
            let engine = bench.engine().await;
            bench.host.fail(Verb::Ensure, kind, 1, fault.clone());
            let error = create(&engine, "a").await.unwrap_err();
            assert!(matches!(error, EngineError::Step { .. }), "{kind} {fault:?}: {error}");
            engine.detach().await;
            assert_eq!(bench.leftovers(), [], "{kind} {fault:?}");
        }
    }
    for fault in [Fault::Error(ErrorClass::Failed), Fault::HalfDone(ErrorClass::Failed)] {
        let bench = Bench::new();
        let engine = bench.engine().await;
        bench.host.fail(Verb::Spawn, Kind::Process, 1, fault.clone());
        create(&engine, "a").await.unwrap_err();
        engine.detach().await;
        assert_eq!(bench.leftovers(), [], "spawn {fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_goes_away_takes_the_creation_with_it() {
    let bench = Bench::new();
    bench.boot_blocks.store(true, Ordering::Relaxed);
    let engine = bench.engine().await;
    let gave_up = tokio::time::timeout(Duration::from_millis(200), create(&engine, "a")).await;
    assert!(gave_up.is_err());
    assert!(engine.drained(Duration::from_secs(5)).await);
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delete_during_create_ends_both() {
    let bench = Bench::new();
    bench.boot_blocks.store(true, Ordering::Relaxed);
    let engine = bench.engine().await;
    let creating = Arc::clone(&engine);
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move { create(&creating, "a").await.map(|_| ()) });
    while engine.get("a").map_or(true, |v| v.record.shim.is_none()) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Twice at once: both hear the same.
    let (one, two) = tokio::join!(engine.delete("a"), engine.delete("a"));
    one.unwrap();
    assert!(two.is_ok() || matches!(two, Err(EngineError::NotFound(_))));
    let created = tasks.join_next().await.unwrap().unwrap();
    assert!(matches!(created, Err(EngineError::Cancelled(_))), "{created:?}");
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_creates_with_one_name_one_wins() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let (one, two) = tokio::join!(create(&engine, "a"), create(&engine, "a"));
    assert!(one.is_ok() != two.is_ok());
    let lost = one.err().or(two.err()).unwrap();
    assert!(matches!(lost, EngineError::AlreadyExists(_)), "{lost}");
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_released_is_stuck_and_retried() {
    for kind in [Kind::Cgroup, Kind::Netns, Kind::Directory] {
        // No pool, so that the slot is removed and not only reset.
        let bench = Bench::sized("10.12.0.0/24", 0);
        let engine = bench.engine().await;
        let slot = create(&engine, "a").await.unwrap().record.slot.unwrap();
        bench.host.fail_always(Verb::Release, kind, Fault::Deadline);
        let error = engine.delete("a").await.unwrap_err();
        assert!(matches!(error, EngineError::Stuck { .. }), "{kind}: {error}");
        let view = engine.get("a").unwrap();
        assert_eq!(view.state, SandboxState::Stuck, "{kind}");
        assert!(view.record.stuck.is_some());
        // Meanwhile its slot is nobody else's, and others are served.
        let other = create(&engine, "b").await.unwrap();
        if kind != Kind::Directory {
            assert_ne!(other.record.slot, Some(slot), "{kind}");
        }
        bench.host.heal();
        engine.delete("a").await.unwrap();
        engine.delete("b").await.unwrap();
        engine.detach().await;
        assert_eq!(bench.leftovers(), [], "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_run_out_with_the_numbers() {
    // A /29 has three usable pairs.
    let bench = Bench::sized("10.12.0.0/29", 8);
    let engine = bench.engine().await;
    for name in ["a", "b", "c"] {
        create(&engine, name).await.unwrap();
    }
    let error = create(&engine, "d").await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, EngineError::Exhausted(_)), "{text}");
    assert!(text.contains("the limit is 3 (3 assigned)"), "{text}");
    engine.delete("b").await.unwrap();
    create(&engine, "d").await.unwrap();
    assert_eq!(engine.delete_all().await, Vec::<String>::new());
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_ends_by_itself_is_released() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    for process in bench.host.running() {
        process.kill();
    }
    assert!(engine.drained(Duration::from_secs(5)).await);
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_takes_over_what_lives_and_releases_the_rest() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let alive = create(&engine, "alive").await.unwrap();
    let dead = create(&engine, "dead").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.host.running().len(), 2, "detach ended a VM");
    let dead_pid = dead.record.shim.unwrap();
    bench.host.running().iter().find(|p| *p.identity() == dead_pid).unwrap().kill();
    // A slot and a cgroup that no record names.
    bench.host.plant(Resource::Netns { slot: SlotIndex::new(77).unwrap() });
    bench.host.plant(Resource::Cgroup { name: "zzzzzzzzzzzzzzzz".into() });

    let engine = bench.engine().await;
    let found = engine.get("alive").unwrap();
    assert_eq!(found.state, SandboxState::Running);
    assert_eq!(found.record.id, alive.record.id);
    tokio::time::timeout(Duration::from_secs(5), async {
        while engine.list().unwrap().len() > 1 || engine.shim("alive").is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    // Its slot is not handed out a second time.
    let other = create(&engine, "other").await.unwrap();
    assert_ne!(other.record.slot, alive.record.slot);
    engine.delete_all().await;
    tokio::time::timeout(Duration::from_secs(20), async {
        while engine.reclaim().state != ReclaimState::Done {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_shields_its_things() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let view = create(&engine, "a").await.unwrap();
    let slot = view.record.slot.unwrap();
    engine.detach().await;
    let record = bench.tmp.path().join("state/t/sandboxes").join(view.record.id.as_str()).join("record.json");
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, text.replace("\"schema\": 1", "\"schema\": 99")).unwrap();

    let engine = bench.engine().await;
    assert!(engine.list().unwrap().is_empty());
    let other = create(&engine, "b").await.unwrap();
    assert_ne!(other.record.slot, Some(slot));
    engine.delete("b").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.host.running().len(), 1, "a sandbox of a newer hearth was killed");
    assert!(record.exists());
    assert!(bench.leftovers().contains(&Resource::Netns { slot }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_that_cannot_be_judged_is_kept() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let view = create(&engine, "a").await.unwrap();
    engine.detach().await;
    let pid = view.record.shim.unwrap().pid;
    bench.host.blind(pid, Some("EACCES"));
    let engine = bench.engine().await;
    tokio::time::timeout(Duration::from_secs(5), async {
        while engine.get("a").unwrap().state != SandboxState::Stuck {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    let error = engine.delete("a").await.unwrap_err();
    assert!(error.to_string().contains("EACCES"), "{error}");
    assert_eq!(bench.host.running().len(), 1);
    engine.detach().await;
    bench.host.blind(pid, None);
    let engine = bench.engine().await;
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_engine_takes_nothing_new() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    engine.close("draining");
    let error = create(&engine, "a").await.unwrap_err();
    assert!(matches!(error, EngineError::Closed(_)), "{error}");
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_create_is_admitted_after_a_drain_answered() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    for round in 0..4 {
        let mut creates = tokio::task::JoinSet::new();
        for i in 0..24 {
            let engine = Arc::clone(&engine);
            let name = format!("r{round}-{i}");
            creates.spawn(async move { (name.clone(), create(&engine, &name).await) });
        }
        // Somewhere among them: after the first were admitted.
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while engine.work().unwrap().total() < 3 {
            assert!(std::time::Instant::now() < end, "no create was admitted");
            tokio::task::yield_now().await;
        }
        engine.ask(Ask::Drain).unwrap();
        let admitted: Vec<String> =
            engine.list().unwrap().iter().map(|v| v.record.name.to_string()).collect();
        for (name, created) in creates.join_all().await {
            match created {
                Ok(_) => assert!(admitted.contains(&name), "{name} came in after the drain"),
                Err(e) => {
                    assert!(matches!(e, EngineError::NotActive { .. }), "{e}");
                    assert!(!admitted.contains(&name), "{name} was admitted and then refused");
                }
            }
        }
        assert_eq!(engine.work().unwrap().running, u32::try_from(admitted.len()).unwrap());
        assert!(!engine.drained(Duration::ZERO).await);
        engine.delete_all().await;
        assert_eq!(engine.work().unwrap().total(), 0);
        assert!(engine.drained(Duration::from_secs(5)).await);
        assert!(matches!(create(&engine, "late").await, Err(EngineError::NotActive { .. })));
        engine.ask(Ask::Undrain).unwrap();
        create(&engine, "again").await.unwrap();
        engine.delete("again").await.unwrap();
    }
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delete_says_gone_only_when_it_is() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    engine.detach().await;
    let error = engine.delete("a").await.unwrap_err();
    assert!(matches!(error, EngineError::Closed(_)), "{error}");
    assert_eq!(bench.host.running().len(), 1);
    let engine = bench.engine().await;
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_start_without_the_list_of_records() {
    let bench = Bench::new();
    let sandboxes = bench.tmp.path().join("state/t/sandboxes");
    std::fs::write(&sandboxes, "not a directory").unwrap();
    bench.host.plant(Resource::Netns { slot: SlotIndex::new(5).unwrap() });
    let engine = Engine::new(Arc::clone(&bench.host), bench.config(Failpoints::default()));
    assert!(engine.start().await.is_err());
    assert!(bench.leftovers().contains(&Resource::Netns { slot: SlotIndex::new(5).unwrap() }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_claim_to_a_slot_yields_to_whoever_may_live() {
    for blind in [false, true] {
        let bench = Bench::new();
        let engine = bench.engine().await;
        let alive = create(&engine, "alive").await.unwrap().record;
        engine.detach().await;
        // A crash between giving a slot back and writing that down leaves a second record with its number.
        let (id, stale) = (alive.id.as_str(), "stalestalestale2");
        let sandboxes = bench.tmp.path().join("state/t/sandboxes");
        let text = std::fs::read_to_string(sandboxes.join(id).join("record.json")).unwrap();
        let mut record: serde_json::Value = serde_json::from_str(&text.replace(id, stale)).unwrap();
        record["name"] = "stale".into();
        record["shim"] = serde_json::Value::Null;
        record["resources"].as_array_mut().unwrap().retain(|r| r["kind"] != "process");
        std::fs::create_dir(sandboxes.join(stale)).unwrap();
        std::fs::write(sandboxes.join(stale).join("record.json"), record.to_string()).unwrap();

        let slot = alive.slot.unwrap();
        let resets = bench.host.resets(slot);
        if blind {
            bench.host.blind(alive.shim.as_ref().unwrap().pid, Some("EACCES"));
        }
        let engine = bench.engine().await;
        let gone = async {
            while engine.get("stale").is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), gone).await.unwrap();
        assert_eq!(bench.host.resets(slot), resets, "the slot of a sandbox that may live was reset");
        assert!(bench.leftovers().contains(&Resource::Netns { slot }));
        bench.host.blind(alive.shim.as_ref().unwrap().pid, None);
        engine.detach().await;
        let engine = bench.engine().await;
        engine.delete("alive").await.unwrap();
        engine.detach().await;
        assert_eq!(bench.leftovers(), []);
    }
}
