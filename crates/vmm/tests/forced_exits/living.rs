//! A VMM that lives and gives no metrics: said once, and once more when it does again.

use std::sync::atomic::Ordering;
use std::time::Duration;

use hearth_core::exit::ExitReason;
use hearth_core::shim::ShimSpec;
use hearth_core::spec::VmmKind;

use crate::common::{Place, Running, until};
use crate::double::{MODE, program};
use crate::ear::listen;

async fn said_once_and_recovered_once(mode: &str, error: &str) {
    let _alone = crate::ALONE.lock().await;
    let place = Place::new();
    let double = program(place.dir.path());
    let spec = ShimSpec { stats_interval_ms: 20, ..place.spec(VmmKind::Firecracker, &double) };
    let (said, _listening) = listen();
    let running = Running::new(spec);
    running.handle.boot().await.unwrap();
    let samples = async || running.handle.usage().await.unwrap().vmm.map_or(0, |v| v.samples);
    while samples().await == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    std::fs::write(place.run().join(MODE), mode).unwrap();
    until("the fault is said", || !said.loud().is_empty()).await;
    until("two more tries", || said.again.load(Ordering::Relaxed) >= 2).await;
    // A pause is served at once meanwhile, whatever the flush does.
    running.handle.pause().await.unwrap();
    running.handle.resume().await.unwrap();
    std::fs::remove_file(place.run().join(MODE)).unwrap();
    until("it recovers", || said.recovered.load(Ordering::Relaxed) > 0).await;
    let before = samples().await;
    while samples().await < before + 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let loud = said.loud();
    assert_eq!(loud.len(), 1, "{loud:?}");
    assert!(loud[0].contains("lives and gives no metrics") && loud[0].contains(error), "{loud:?}");
    assert_eq!(said.recovered.load(Ordering::Relaxed), 1);
    let record = running.handle.stop(Duration::ZERO).await.unwrap();
    assert_eq!(record.reason, ExitReason::Stopped);
    assert_eq!(said.loud(), loud, "nothing is said of the end");
    running.ended().await;
}

#[tokio::test]
async fn a_vmm_that_answers_500_is_told_once() {
    said_once_and_recovered_once("500", "refused with 500").await;
}

#[tokio::test]
async fn a_vmm_that_hangs_is_told_once() {
    said_once_and_recovered_once("hang", "no answer within 2s").await;
}

#[tokio::test]
async fn a_vmm_that_closes_its_connections_is_told_once() {
    said_once_and_recovered_once("close", "the connection ended").await;
}
