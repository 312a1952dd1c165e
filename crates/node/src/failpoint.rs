//! Faults on purpose, switched by configuration only, so that on a release build every place of a life can
//! be seen to fail, hang and crash, and what follows to be clean.
//!
//! `PLACE=FAULT[+FAULT…]`, where FAULT is `error`, `panic`, `kill9`, `delay(MS)` or `block(MS)`. With `-after`
//! it strikes after the effect of the place, not before. `@N` behind it makes it strike the N-th time that
//! place is passed, and no other time: `slot=delay(50)+error@2,release.cgroup=kill9-after`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_core::steps::Place;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// The place fails.
    Error,
    /// It waits.
    Delay(Duration),
    /// Every thread of the engine stands still for as long, as if something blocking ran on each.
    Block(Duration),
    /// The task that passes the place panics.
    Panic,
    /// The daemon kills itself.
    Kill9,
}

/// One fault of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fault {
    action: Action,
    /// Once the effect of the place has happened, instead of before.
    after: bool,
    /// From 1; `None`: every time.
    nth: Option<u64>,
}

impl FromStr for Fault {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "failpoint {s:?} is none of error, panic, kill9, delay(MS), block(MS), each also with -after; \
                 @N behind it picks the N-th time"
            )
        };
        let (word, nth) = match s.split_once('@') {
            Some((word, n)) => (word, Some(n.parse().ok().filter(|n| *n > 0).ok_or_else(unknown)?)),
            None => (s, None),
        };
        let (plain, after) = word.strip_suffix("-after").map_or((word, false), |plain| (plain, true));
        let time = |name: &str| {
            let ms = plain.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')?.parse().ok()?;
            Some(Duration::from_millis(ms))
        };
        let action = match plain {
            "error" => Some(Action::Error),
            "panic" => Some(Action::Panic),
            "kill9" => Some(Action::Kill9),
            _ => time("delay").map(Action::Delay).or_else(|| time("block").map(Action::Block)),
        };
        Ok(Self { action: action.ok_or_else(unknown)?, after, nth })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.action {
            Action::Error => f.write_str("error")?,
            Action::Panic => f.write_str("panic")?,
            Action::Kill9 => f.write_str("kill9")?,
            Action::Delay(time) => write!(f, "delay({})", time.as_millis())?,
            Action::Block(time) => write!(f, "block({})", time.as_millis())?,
        }
        if self.after {
            f.write_str("-after")?;
        }
        self.nth.map_or(Ok(()), |n| write!(f, "@{n}"))
    }
}

/// The configured faults, by place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Failpoints(BTreeMap<Place, Vec<Fault>>);

impl Failpoints {
    /// Parses pairs of a place and a chain of faults; a place named twice has one chain.
    ///
    /// # Errors
    /// If a place or a fault is not known.
    pub fn parse<'a>(table: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let mut points = Self::default();
        for (place, chain) in table {
            let chain = chain.split('+').map(str::parse).collect::<Result<Vec<Fault>, _>>()?;
            points.0.entry(place.parse()?).or_default().extend(chain);
        }
        Ok(points)
    }
}

impl fmt::Display for Failpoints {
    /// As it is written in the configuration.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (place, chain)) in self.0.iter().enumerate() {
            let chain: Vec<String> = chain.iter().map(ToString::to_string).collect();
            write!(f, "{}{place}={}", if i == 0 { "" } else { "," }, chain.join("+"))?;
        }
        Ok(())
    }
}

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
        let Some(chain) = self.points.0.get(&place) else { return vec![] };
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let n = passed.entry(place).or_default();
        *n += 1;
        chain.iter().filter(|f| f.nth.is_none_or(|nth| nth == *n)).copied().collect()
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

    #[test]
    fn parses_what_it_documents_and_nothing_else() {
        let text = "start=delay(20),slot=delay(50)+error@2,spawn=kill9-after,release.cgroup=panic+block(5)@1";
        let pairs = text.split(',').map(|p| p.split_once('=').unwrap());
        let points = Failpoints::parse(pairs).unwrap();
        assert_eq!(points.to_string(), text);
        let chain = &points.0[&Place::Create(Step::Slot)];
        assert_eq!(chain[1], Fault { action: Action::Error, after: false, nth: Some(2) });
        let twice = Failpoints::parse([("slot", "delay(50)"), ("slot", "error@2")]).unwrap();
        assert_eq!(twice.0[&Place::Create(Step::Slot)], *chain);
        for (place, chain) in [
            ("nowhere", "error"),
            ("slot", "delay(x)"),
            ("slot", "delay(5)-before"),
            ("slot", "error@0"),
            ("slot", "error@"),
            ("slot", "error+"),
            ("slot", ""),
        ] {
            assert!(Failpoints::parse([(place, chain)]).is_err(), "{place}={chain}");
        }
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
