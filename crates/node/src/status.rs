//! The node's status as a pure function: what the operator wants, what the engine does, what fails. Two
//! values are kept apart, what is *desired* and what is *broken*, and the status shown is derived from both,
//! so that a failure that heals brings back exactly what was there before.
//!
//! ```text
//!  desired:   active ◄──activate / standby──► standby
//!               │ ▲                              │ ▲
//!         drain │ │ undrain                drain │ │ undrain
//!               ▼ │                              ▼ │
//!            draining                         draining      activate and standby are refused here
//!
//!  shown:     starting ──► the desired one, as healthy | standby | draining
//!                                 ▲ healed │ something fails
//!                                 └──── unhealthy
//! ```
//!
//! An unhealthy node goes on refusing what it refused before: draining and standby bind it whatever fails. An
//! active one takes creates while unhealthy, each of which tells what fails: success is how some failures
//! are seen to have healed.

use crate::engine::Phase;

/// What the operator wants of the node. Kept in memory: a daemon begins as `Active`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Desired {
    /// Sandboxes are created.
    #[default]
    Active,
    /// Ready to take over; no sandboxes are created, all else works.
    Standby,
    /// No sandboxes are created, so that the node empties.
    Draining {
        /// What `undrain` brings back.
        from_standby: bool,
    },
}

/// What an operator may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Take sandboxes, if not draining.
    Activate,
    /// Be ready and take none, if not draining.
    Standby,
    /// Take none until `Undrain`.
    Drain,
    /// Take back a drain.
    Undrain,
}

/// Where the node is in its own life, as shown everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The census is not done; requests are refused with a reason.
    Starting,
    /// Requests are served.
    Healthy,
    /// No new sandboxes; the others go on.
    Draining,
    /// Ready to take over; no new sandboxes.
    Standby,
    /// Something the node needs fails.
    Unhealthy,
}

impl Desired {
    /// The transition table. `None`: not without `undrain`. Asking twice is no error.
    #[must_use]
    pub fn asked(self, ask: Ask) -> Option<Self> {
        use Desired::{Active, Draining, Standby};
        Some(match (self, ask) {
            (Active | Standby, Ask::Activate) => Active,
            (Active | Standby, Ask::Standby) => Standby,
            (Draining { .. }, Ask::Activate | Ask::Standby) => return None,
            (Active, Ask::Drain) => Draining { from_standby: false },
            (Standby, Ask::Drain) => Draining { from_standby: true },
            (Draining { .. }, Ask::Drain) => self,
            (Draining { from_standby: false }, Ask::Undrain) => Active,
            (Draining { from_standby: true }, Ask::Undrain) => Standby,
            (Active | Standby, Ask::Undrain) => self,
        })
    }

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Desired::Active => "active",
            Desired::Standby => "standby",
            Desired::Draining { .. } => "draining",
        }
    }

    /// Why no sandbox is created and the way back; `None` if they are.
    #[must_use]
    pub fn refusal(self) -> Option<&'static str> {
        match self {
            Desired::Active => None,
            Desired::Standby => Some("it is in standby; `hearth node activate` ends that"),
            Desired::Draining { .. } => Some("it is draining; `hearth node undrain` takes that back"),
        }
    }
}

impl Status {
    /// All, in the order of a node's life.
    pub const ALL: [Status; 5] =
        [Status::Starting, Status::Healthy, Status::Standby, Status::Draining, Status::Unhealthy];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Starting => "starting",
            Status::Healthy => "healthy",
            Status::Draining => "draining",
            Status::Standby => "standby",
            Status::Unhealthy => "unhealthy",
        }
    }

    /// Whether the node answers for its sandboxes: `GET /health` is then 200.
    #[must_use]
    pub fn is_ready(self) -> bool {
        matches!(self, Status::Healthy | Status::Standby | Status::Draining)
    }
}

/// The status to show, with its reason. `ending`: why the daemon ends, if it does. `broken`: what the node
/// needs and has not.
#[must_use]
pub fn shown(phase: &Phase, desired: Desired, ending: Option<&str>, broken: &[String]) -> (Status, String) {
    match phase {
        Phase::Failed(why) => return (Status::Unhealthy, why.clone()),
        Phase::Starting(why) => {
            let reasons: Vec<&str> =
                ending.into_iter().chain([why.as_str()]).chain(broken.iter().map(String::as_str)).collect();
            return (Status::Starting, reasons.join("; "));
        }
        Phase::Ready => {}
    }
    if !broken.is_empty() {
        return (Status::Unhealthy, broken.join("; "));
    }
    if let Some(why) = ending {
        return (Status::Draining, why.to_owned());
    }
    let status = match desired {
        Desired::Active => Status::Healthy,
        Desired::Standby => Status::Standby,
        Desired::Draining { .. } => Status::Draining,
    };
    (status, desired.refusal().map(|why| format!("takes no new sandboxes: {why}")).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAINING: Desired = Desired::Draining { from_standby: false };
    const DRAINING_STANDBY: Desired = Desired::Draining { from_standby: true };

    #[test]
    fn the_transition_table() {
        use Ask::{Activate, Drain, Standby as ToStandby, Undrain};
        use Desired::{Active, Standby};
        let table = [
            (Active, Activate, Some(Active)),
            (Active, ToStandby, Some(Standby)),
            (Active, Drain, Some(DRAINING)),
            (Active, Undrain, Some(Active)),
            (Standby, Activate, Some(Active)),
            (Standby, ToStandby, Some(Standby)),
            (Standby, Drain, Some(DRAINING_STANDBY)),
            (Standby, Undrain, Some(Standby)),
            (DRAINING, Activate, None),
            (DRAINING, ToStandby, None),
            (DRAINING, Drain, Some(DRAINING)),
            (DRAINING, Undrain, Some(Active)),
            (DRAINING_STANDBY, Activate, None),
            (DRAINING_STANDBY, ToStandby, None),
            (DRAINING_STANDBY, Drain, Some(DRAINING_STANDBY)),
            (DRAINING_STANDBY, Undrain, Some(Standby)),
        ];
        for (from, ask, to) in table {
            assert_eq!(from.asked(ask), to, "{from:?} {ask:?}");
        }
    }

    #[test]
    fn what_is_broken_hides_what_is_desired_and_gives_it_back() {
        let broken = ["the disk is gone".to_owned(), "no slots".to_owned()];
        for (desired, status) in [
            (Desired::Active, Status::Healthy),
            (Desired::Standby, Status::Standby),
            (DRAINING, Status::Draining),
        ] {
            assert_eq!(shown(&Phase::Ready, desired, None, &[]).0, status);
            let (bad, why) = shown(&Phase::Ready, desired, None, &broken);
            assert_eq!((bad, why.as_str()), (Status::Unhealthy, "the disk is gone; no slots"));
        }
        assert_eq!(shown(&Phase::Ready, Desired::Active, Some("SIGTERM"), &[]).0, Status::Draining);
    }

    #[test]
    fn a_start_is_never_shown_as_ready() {
        for desired in [Desired::Active, Desired::Standby, DRAINING] {
            for ending in [None, Some("SIGTERM")] {
                let starting = shown(&Phase::Starting("census".into()), desired, ending, &["no disk".into()]);
                assert!(!starting.0.is_ready());
                assert!(starting.1.ends_with("census; no disk"), "{}", starting.1);
                assert!(!shown(&Phase::Failed("x".into()), desired, ending, &[]).0.is_ready());
            }
        }
    }

    #[test]
    fn a_refusal_names_the_way_back() {
        assert_eq!(Desired::Active.refusal(), None);
        assert!(Desired::Standby.refusal().unwrap().contains("hearth node activate"));
        assert!(DRAINING.refusal().unwrap().contains("hearth node undrain"));
    }
}
