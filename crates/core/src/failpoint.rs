//! Faults on purpose as a value: which, where, when. Who passes the places makes them happen: the engine, and the shim's block
//! server.
//!
//! `PLACE=FAULT[+FAULT…]`, where FAULT is `error`, `panic`, `kill9`, `delay(MS)` or `block(MS)`. With `-after`
//! it strikes after the effect of the place, not before. `@N` behind it makes it strike the N-th time that
//! place is passed, and no other time: `slot=delay(50)+error@2,release.cgroup=kill9-after`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::steps::Place;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
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
pub struct Fault {
    /// What.
    pub action: Action,
    /// Once the effect of the place has happened, instead of before.
    pub after: bool,
    /// From 1; `None`: every time.
    pub nth: Option<u64>,
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

    /// The same in one text: places separated by commas. Empty is none.
    ///
    /// # Errors
    /// If a place or a fault is not known.
    pub fn parse_text(text: &str) -> Result<Self, String> {
        let pairs = text.split(',').map(str::trim).filter(|p| !p.is_empty());
        let pairs = pairs.map(|p| p.split_once('=').ok_or_else(|| format!("{p:?} is not PLACE=FAULT")));
        Self::parse(pairs.collect::<Result<Vec<_>, _>>()?)
    }

    /// Those at places of which `wanted` is true.
    #[must_use]
    pub fn only(&self, wanted: impl Fn(Place) -> bool) -> Self {
        Self(self.0.iter().filter(|(place, _)| wanted(**place)).map(|(p, c)| (*p, c.clone())).collect())
    }

    /// What is ordered at a place.
    #[must_use]
    pub fn at(&self, place: Place) -> &[Fault] {
        self.0.get(&place).map_or(&[], Vec::as_slice)
    }

    /// Those of the chain at `place` that strike the `n`-th time that it is passed, from 1.
    #[must_use]
    pub fn due(&self, place: Place, n: u64) -> Vec<Fault> {
        self.at(place).iter().filter(|f| f.nth.is_none_or(|nth| nth == n)).copied().collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::Step;

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
}
