//! What the engine knows and tells of sandboxes that are stuck, unknown or out of reach.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Bench, create};
use hearth_core::lifecycle::SandboxState;
use hearth_core::resource::Kind;
use hearth_core::shim::SHIM_PROTOCOL;
use hearth_node::{Engine, EngineError, View};
use hearth_testkit::FakeHost;
use hearth_testkit::faults::{Fault, Verb};

async fn until(engine: &Engine<FakeHost>, what: &str, good: impl Fn(&View) -> bool) -> View {
    let waited = tokio::time::timeout(Duration::from_secs(20), async {
        loop {
            let view = engine.get("a").unwrap();
            if good(&view) {
                return view;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("never {what}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stuck_says_what_is_left_who_holds_it_and_since_when() {
    let bench = Bench::sized("10.12.0.0/24", 0);
    let engine = bench.engine().await;
    let id = create(&engine, "a").await.unwrap().record.id;
    for kind in [Kind::Process, Kind::Cgroup] {
        bench.host.fail_always(Verb::Release, kind, Fault::Deadline);
    }
    let error = engine.delete("a").await.unwrap_err();
    assert!(matches!(error, EngineError::Stuck { .. }), "{error}");
    let stuck = engine.get("a").unwrap().record.stuck.unwrap();
    let kinds: Vec<Kind> = stuck.left.iter().map(|l| l.kind).collect();
    assert_eq!(kinds, [Kind::Process, Kind::Cgroup]);
    assert_eq!(stuck.left[1].what, format!("cgroup {id}"));
    for left in &stuck.left {
        assert_eq!(left.holders[0].wchan.as_deref(), Some("fake_wait"));
        assert!(stuck.to_string().contains(&left.why));
    }
    assert_eq!(stuck.tries, 1);
    assert!(stuck.next_try_ms > stuck.since_ms);
    assert_eq!(engine.stuck(), [(Kind::Cgroup, 1), (Kind::Process, 1)].into());
    // A delete is a try at once; without one it is tried all the same.
    engine.delete("a").await.unwrap_err();
    let view = until(&engine, "tried again", |v| v.record.stuck.as_ref().is_some_and(|s| s.tries >= 3)).await;
    assert_eq!(view.state, SandboxState::Stuck);
    assert_eq!(view.record.stuck.unwrap().since_ms, stuck.since_ms);

    // The next daemon knows as much.
    engine.detach().await;
    let engine = bench.engine().await;
    let view = until(&engine, "stuck", |v| v.record.stuck.as_ref().is_some_and(|s| s.tries >= 4)).await;
    assert_eq!(view.record.stuck.unwrap().since_ms, stuck.since_ms);
    bench.host.heal();
    engine.delete("a").await.unwrap();
    assert!(engine.stuck().is_empty());
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_sandbox_is_told_and_not_called_absent() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    let id = create(&engine, "a").await.unwrap().record.id;
    engine.detach().await;
    let record = bench.tmp.path().join("state/t/sandboxes").join(id.as_str()).join("record.json");
    let text = std::fs::read(&record).unwrap();
    std::fs::write(&record, "").unwrap();
    let engine = bench.engine().await;
    assert!(engine.unknown().unwrap()[id.as_str()].contains("it is empty"));
    let error = engine.delete(id.as_str()).await.unwrap_err();
    assert!(matches!(error, EngineError::Precondition(_)), "{error}");
    let error = engine.get("a").unwrap_err();
    assert!(error.to_string().contains("record can be read"), "{error}");
    assert_eq!(bench.host.running().len(), 1);
    engine.detach().await;
    std::fs::write(&record, text).unwrap();
    let engine = bench.engine().await;
    assert!(engine.unknown().unwrap().is_empty());
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_of_the_former_protocol_is_taken_over() {
    let bench = Bench::new();
    bench.protocol.store(SHIM_PROTOCOL - 1, Ordering::Relaxed);
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    engine.detach().await;
    let engine = bench.engine().await;
    engine.connected("a").await.unwrap();
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_of_a_newer_protocol_goes_on_out_of_reach() {
    let bench = Bench::new();
    let engine = bench.engine().await;
    create(&engine, "a").await.unwrap();
    engine.detach().await;
    bench.protocol.store(SHIM_PROTOCOL + 1, Ordering::Relaxed);
    let engine = bench.engine().await;
    let error = engine.connected("a").await.unwrap_err();
    assert!(error.to_string().contains("newer protocol"), "{error}");
    let view = engine.get("a").unwrap();
    assert_eq!(view.state, SandboxState::Running);
    assert!(view.unreachable.unwrap().contains("newer protocol"));
    assert_eq!(bench.host.running().len(), 1);
    // Once it answers as it should it is reached without a restart.
    bench.protocol.store(SHIM_PROTOCOL, Ordering::Relaxed);
    until(&engine, "reached", |v| v.shim.is_some() && v.unreachable.is_none()).await;
    bench.protocol.store(SHIM_PROTOCOL + 1, Ordering::Relaxed);
    engine.delete("a").await.unwrap();
    engine.detach().await;
    assert_eq!(bench.leftovers(), []);
}
