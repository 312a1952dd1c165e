//! Makes the faults happen that were ordered at the engine's places, switched by configuration only, so that on a
//! release build every place of a life can be seen to fail, hang and crash, and what follows to be clean. Their form is
//! in [`hearth_core::failpoint`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::failpoint::{Action, Failpoints, Fault};
use hearth_core::steps::Place;

/// How the daemon kills itself at a place. Given by the binary, since this crate makes no system call.
#[derive(Clone)]
pub struct Kill9(Arc<dyn Fn() + Send + Sync>);

impl Kill9 {
    /// `kill` ends the process at once, as SIGKILL does; nothing waits for a task.
    pub fn new(kill: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(kill))
    }
}

impl fmt::Debug for Kill9 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kill9")
    }
}

/// The faults of one engine: what is configured, and how often each place was passed.
#[derive(Debug)]
pub struct Faults {
    points: Failpoints,
    passed: Mutex<BTreeMap<Place, u64>>,
    kill9: Kill9,
}

impl Faults {
    pub(crate) fn new(points: Failpoints, kill9: Kill9) -> Self {
        Self { points, passed: Mutex::default(), kill9 }
    }

    /// Does `effect`, which is all that happens at `place`, with the faults that are due before and after
    /// it. `failed` makes an error of an ordered one.
    ///
    /// # Errors
    /// From the effect, or as ordered.
    ///
    /// # Panics
    /// As ordered.
    pub async fn around<T, E>(
        &self,
        place: Place,
        failed: impl Fn(String) -> E,
        effect: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let due = self.due(place);
        self.strike(place, &due, false).await.map_err(&failed)?;
        let done = effect.await?;
        self.strike(place, &due, true).await.map_err(&failed)?;
        Ok(done)
    }

    fn due(&self, place: Place) -> Vec<Fault> {
        if self.points.at(place).is_empty() {
            return vec![];
        }
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let n = passed.entry(place).or_default();
        *n += 1;
        self.points.due(place, *n)
    }

    #[allow(clippy::panic)]
    async fn strike(&self, place: Place, due: &[Fault], after: bool) -> Result<(), String> {
        for fault in due.iter().filter(|fault| fault.after == after) {
            tracing::warn!("failpoint at {place}: {fault}");
            match fault.action {
                Action::Error if fault.after => return Err("failpoint after the effect".into()),
                Action::Error => return Err("failpoint".into()),
                Action::Delay(time) => tokio::time::sleep(time).await,
                Action::Block(time) => block(time).await,
                Action::Panic => panic!("failpoint at {place}"),
                Action::Kill9 => {
                    (self.kill9.0)();
                    // Whoever plays the daemon's death in a test lets no task go on either.
                    std::future::pending::<()>().await;
                }
            }
        }
        Ok(())
    }
}

async fn block(time: Duration) {
    // One for each thread: the others take theirs from the queue of this one.
    let threads = tokio::runtime::Handle::current().metrics().num_workers();
    let mut blocks = tokio::task::JoinSet::new();
    for _ in 0..threads {
        blocks.spawn(async move { std::thread::sleep(time) });
    }
    blocks.join_all().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::steps::Step;

    fn faults(pairs: &[(&str, &str)]) -> Faults {
        Faults::new(Failpoints::parse(pairs.iter().copied()).unwrap(), Kill9::new(|| {}))
    }

    #[tokio::test]
    async fn each_strikes_at_its_place_and_time_and_on_its_side_of_the_effect() {
        let faults = faults(&[("slot", "error@2+error-after@3"), ("boot", "error")]);
        let slot = Place::Create(Step::Slot);
        let mut effects = 0;
        let mut outcomes = vec![];
        for _ in 0..4 {
            let effect = async {
                effects += 1;
                Ok(())
            };
            outcomes.push(faults.around(slot, |why| why, effect).await.is_ok());
        }
        assert_eq!(outcomes, [true, false, false, true]);
        assert_eq!(effects, 3, "the second came before its effect, the third after it");
        let boot = faults.around(Place::Create(Step::Boot), |why| why, async { Ok(()) });
        assert!(boot.await.is_err());
        let cgroup = faults.around(Place::Create(Step::Cgroup), |why| why, async { Ok(()) });
        assert!(cgroup.await.is_ok());
    }
}
