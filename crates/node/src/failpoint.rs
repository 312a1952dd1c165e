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
            _ => s
                .strip_prefix("delay(")
                .and_then(|rest| rest.strip_suffix(')'))
                .and_then(|ms| ms.parse().ok())
                .map(|ms| Action::Delay(Duration::from_millis(ms)))
                .ok_or_else(|| {
                    format!("failpoint action {s:?} is none of error, error-after, delay(MS), panic")
                }),
        }
    }
}

/// The configured faults, by step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failpoints(BTreeMap<Step, Action>);

impl Failpoints {
    /// Parses the `[failpoint]` table: step name to action.
    ///
    /// # Errors
    /// If a step or an action is not known.
    pub fn parse<'a>(table: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let mut points = BTreeMap::new();
        for (step, action) in table {
            points.insert(step.parse()?, action.parse()?);
        }
        Ok(Self(points))
    }

    /// Runs before a step.
    ///
    /// # Errors
    /// If the step is to fail here.
    ///
    /// # Panics
    /// If the step is to panic.
    #[allow(clippy::panic)]
    pub async fn before(&self, step: Step) -> Result<(), String> {
        match self.0.get(&step) {
            Some(Action::Error) => Err("failpoint".into()),
            Some(Action::Delay(d)) => {
                tokio::time::sleep(*d).await;
                Ok(())
            }
            Some(Action::Panic) => panic!("failpoint at step {step}"),
            Some(Action::ErrorAfter) | None => Ok(()),
        }
    }

    /// Runs after a step.
    ///
    /// # Errors
    /// If the step is to fail here.
    pub fn after(&self, step: Step) -> Result<(), String> {
        match self.0.get(&step) {
            Some(Action::ErrorAfter) => Err("failpoint after the effect".into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_it_documents_and_nothing_else() {
        let points = Failpoints::parse([("slot", "error"), ("boot", "delay(20)")]).unwrap();
        assert_eq!(points.0[&Step::Boot], Action::Delay(Duration::from_millis(20)));
        assert!(Failpoints::parse([("nowhere", "error")]).is_err());
        assert!(Failpoints::parse([("slot", "delay(x)")]).is_err());
    }
}
