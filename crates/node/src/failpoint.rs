//! Faults on purpose, switched by configuration only, so that the unwind of every step can be seen to work
//! on a release build.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

use hearth_core::steps::Step;

/// What happens at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The step fails before it does anything.
    Error,
    /// The step does its work, then fails: half a creation with a whole effect.
    ErrorAfter,
    /// The step waits first.
    Delay(Duration),
    /// Every thread of the engine stands still for as long, as if something blocking ran on each.
    Block(Duration),
    /// The sandbox's task panics.
    Panic,
}

impl FromStr for Action {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "error" => Ok(Action::Error),
            "error-after" => Ok(Action::ErrorAfter),
            "panic" => Ok(Action::Panic),
            _ => {
                let time = |name: &str| {
                    let ms = s.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')?.parse().ok()?;
                    Some(Duration::from_millis(ms))
                };
                let delay = time("delay").map(Action::Delay);
                delay.or_else(|| time("block").map(Action::Block)).ok_or_else(|| {
                    format!(
                        "failpoint action {s:?} is none of error, error-after, delay(MS), block(MS), panic"
                    )
                })
            }
        }
    }
}

/// The place before the census, beside the steps of creation.
const START: &str = "start";

/// The configured faults, by step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failpoints {
    steps: BTreeMap<Step, Action>,
    start: Option<Action>,
}

impl Failpoints {
    /// Parses pairs of a step's name, or `start`, and an action.
    ///
    /// # Errors
    /// If a step or an action is not known.
    pub fn parse<'a>(table: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let mut points = Self::default();
        for (step, action) in table {
            match step {
                START => points.start = Some(action.parse()?),
                step => drop(points.steps.insert(step.parse()?, action.parse()?)),
            }
        }
        Ok(points)
    }

    /// Runs before the start of the engine.
    ///
    /// # Errors
    /// If the start is to fail.
    ///
    /// # Panics
    /// If the start is to panic.
    pub(crate) async fn before_start(&self) -> Result<(), String> {
        act(self.start, START).await
    }

    /// Runs before a step.
    ///
    /// # Errors
    /// If the step is to fail here.
    ///
    /// # Panics
    /// If the step is to panic.
    pub async fn before(&self, step: Step) -> Result<(), String> {
        act(self.steps.get(&step).copied(), step.as_str()).await
    }

    /// Runs after a step.
    ///
    /// # Errors
    /// If the step is to fail here.
    pub fn after(&self, step: Step) -> Result<(), String> {
        match self.steps.get(&step) {
            Some(Action::ErrorAfter) => Err("failpoint after the effect".into()),
            _ => Ok(()),
        }
    }
}

#[allow(clippy::panic)]
async fn act(action: Option<Action>, place: &str) -> Result<(), String> {
    match action {
        Some(Action::Error) => return Err("failpoint".into()),
        Some(Action::Delay(d)) => tokio::time::sleep(d).await,
        Some(Action::Block(d)) => {
            // One for each thread: the others take theirs from the queue of this one.
            let threads = tokio::runtime::Handle::current().metrics().num_workers();
            let mut blocks = tokio::task::JoinSet::new();
            for _ in 0..threads {
                blocks.spawn(async move { std::thread::sleep(d) });
            }
            blocks.join_all().await;
        }
        Some(Action::Panic) => panic!("failpoint at {place}"),
        Some(Action::ErrorAfter) | None => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_it_documents_and_nothing_else() {
        let points = Failpoints::parse([("slot", "error"), ("boot", "delay(20)")]).unwrap();
        assert_eq!(points.steps[&Step::Boot], Action::Delay(Duration::from_millis(20)));
        let points = Failpoints::parse([("start", "delay(20)"), ("record", "block(5)")]).unwrap();
        assert_eq!(points.start, Some(Action::Delay(Duration::from_millis(20))));
        assert_eq!(points.steps[&Step::Record], Action::Block(Duration::from_millis(5)));
        assert!(Failpoints::parse([("nowhere", "error")]).is_err());
        assert!(Failpoints::parse([("slot", "delay(x)")]).is_err());
    }
}
