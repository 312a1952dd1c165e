//! Limits of the host, held against what is used and what the configured capacity would need.

use serde::{Deserialize, Serialize};

/// From this share of a limit on, in percent, it is as good as reached.
const REACHED: u64 = 95;
/// From this share on it is worth a look.
const NEAR: u64 = 80;

/// What is thought of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Room {
    /// Enough.
    Ok,
    /// Soon reached, or too low for the configured capacity.
    Warn,
    /// Reached. A finding.
    Fail,
    /// Could not be seen.
    Unknown,
}

impl Room {
    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Room::Ok => "ok",
            Room::Warn => "warn",
            Room::Fail => "fail",
            Room::Unknown => "unknown",
        }
    }
}

/// One limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// Of what.
    pub limit: String,
    /// Used now, where that can be seen.
    pub used: Option<u64>,
    /// The most there can be; nothing if there is no limit, or it could not be seen.
    pub max: Option<u64>,
    /// What the configured number of slots would need, where that is known.
    pub wanted: Option<u64>,
    /// What is thought of it.
    pub result: Room,
    /// In words, where there is something to say.
    pub why: String,
    /// What to do; empty if nothing.
    pub todo: String,
}

impl Limit {
    /// Of something that is counted.
    #[must_use]
    pub fn counted(
        limit: &str,
        used: Option<u64>,
        max: Option<u64>,
        wanted: Option<u64>,
        todo: &str,
    ) -> Self {
        let share =
            used.zip(max).filter(|(_, max)| *max > 0).map(|(used, max)| used.saturating_mul(100) / max);
        let (result, why) = match (share, max.zip(wanted)) {
            (Some(share), _) if share >= REACHED => (Room::Fail, format!("{share} % are used")),
            (Some(share), _) if share >= NEAR => (Room::Warn, format!("{share} % are used")),
            (_, Some((max, wanted))) if max < wanted => {
                (Room::Warn, "too low for the configured number of slots".to_owned())
            }
            _ => (Room::Ok, String::new()),
        };
        let todo = if result == Room::Ok { String::new() } else { todo.to_owned() };
        Self { limit: limit.to_owned(), used, max, wanted, result, why, todo }
    }

    /// One that could not be seen.
    #[must_use]
    pub fn unseen(limit: &str, why: String) -> Self {
        let (used, max, wanted) = (None, None, None);
        Self { limit: limit.to_owned(), used, max, wanted, result: Room::Unknown, why, todo: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_weighs_more_than_what_would_be_needed() {
        let of = |used, max, wanted| Limit::counted("x", Some(used), Some(max), wanted, "raise it").result;
        assert_eq!(of(10, 100, Some(50)), Room::Ok);
        assert_eq!(of(10, 100, Some(500)), Room::Warn);
        assert_eq!(of(80, 100, None), Room::Warn);
        assert_eq!(of(95, 100, Some(1)), Room::Fail);
        assert_eq!(of(0, 0, None), Room::Ok);
        let none = Limit::counted("x", Some(7), None, Some(9), "raise it");
        assert_eq!((none.result, none.todo.as_str()), (Room::Ok, ""));
    }
}
