//! The crash matrix as data: every place of a life, every way it can go wrong there, and what follows. Made
//! from the list of places, so that a new one is covered by being in it. How a cell is run is the business
//! of the tests, which do it on the fake host and on the kernel.

use std::fmt;

use hearth_core::steps::{Place, ReleaseStep, Step};

/// How it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blow {
    /// The place fails before its effect.
    Error,
    /// The place fails after its effect.
    ErrorAfter,
    /// It takes its time.
    Delay,
    /// The task panics before the effect.
    Panic,
    /// The task panics after the effect.
    PanicAfter,
    /// The daemon is killed before the effect.
    Kill9,
    /// The daemon is killed after the effect, before anything was noted of it.
    Kill9After,
    /// The sandbox's shim is killed at that moment.
    KillShim,
}

impl Blow {
    const ALL: [Blow; 8] = [
        Blow::Error,
        Blow::ErrorAfter,
        Blow::Delay,
        Blow::Panic,
        Blow::PanicAfter,
        Blow::Kill9,
        Blow::Kill9After,
        Blow::KillShim,
    ];

    /// Whether the daemon is dead afterwards.
    #[must_use]
    pub fn kills_daemon(self) -> bool {
        matches!(self, Blow::Kill9 | Blow::Kill9After)
    }

    fn failpoint(self) -> &'static str {
        match self {
            Blow::Error => "error",
            Blow::ErrorAfter => "error-after",
            Blow::Delay => "delay(20)",
            Blow::Panic => "panic",
            Blow::PanicAfter => "panic-after",
            Blow::Kill9 => "kill9",
            Blow::Kill9After => "kill9-after",
            // Time enough to find the shim and kill it.
            Blow::KillShim => "delay(500)",
        }
    }
}

/// What follows the blow. The daemon is started again first, if it died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// The sandbox is deleted, twice.
    ReleaseTwice,
    /// The daemon is killed and started again, twice.
    RestartTwice,
}

/// One cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Where.
    pub place: Place,
    /// How.
    pub blow: Blow,
    /// And then.
    pub then: Then,
}

impl Cell {
    /// Every cell there is.
    #[must_use]
    pub fn all() -> Vec<Cell> {
        let mut cells = vec![];
        for place in Place::all() {
            for blow in Blow::ALL {
                if blow == Blow::KillShim && !has_shim(place) {
                    continue;
                }
                for then in [Then::ReleaseTwice, Then::RestartTwice] {
                    cells.push(Cell { place, blow, then });
                }
            }
        }
        cells
    }

    /// What `test.failpoints` is for this cell: the first time only.
    #[must_use]
    pub fn failpoints(&self) -> String {
        format!("{}={}@1", self.place, self.blow.failpoint())
    }

    /// Whether the sandbox must live through the blow, well and reachable; otherwise it must be gone.
    #[must_use]
    pub fn survives(&self) -> bool {
        match self.place {
            Place::Start | Place::Exec => self.blow != Blow::KillShim,
            Place::Create(_) | Place::Spawn | Place::Block(_) => self.blow == Blow::Delay,
            Place::Release(_) => false,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blow = match self.blow {
            Blow::KillShim => "kill -9 of the shim",
            blow => blow.failpoint(),
        };
        let then = match self.then {
            Then::ReleaseTwice => "release twice",
            Then::RestartTwice => "restart twice",
        };
        write!(f, "{}: {blow}, then {then}", self.place)
    }
}

/// Whether a shim lives when a life comes to this place.
fn has_shim(place: Place) -> bool {
    match place {
        Place::Start | Place::Exec | Place::Block(_) => true,
        Place::Create(step) => step > Step::Shim,
        Place::Spawn => false,
        Place::Release(step) => step <= ReleaseStep::Process,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_in_it_with_every_blow_that_it_can_take() {
        let cells = Cell::all();
        for place in Place::all() {
            let of_place = cells.iter().filter(|c| c.place == place).count();
            assert_eq!(of_place, if has_shim(place) { 16 } else { 14 }, "{place}");
        }
        assert!(cells.len() >= 200, "{}", cells.len());
    }
}
