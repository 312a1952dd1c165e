//! Why a sandbox is stuck, as a value: what is left, who holds it, and when it is tried again. Kept in the
//! record, so that the next daemon and the operator know as much as the one that tried.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use crate::resource::Kind;

/// Wait after the first try; it doubles with each one.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A release that did not finish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stuck {
    /// Each resource that did not go, in the order in which it was tried.
    pub left: Vec<Left>,
    /// When the first try failed, milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Tries so far, over restarts of the daemon.
    pub tries: u32,
    /// When it is tried again at the latest, milliseconds since the Unix epoch.
    pub next_try_ms: u64,
}

/// One resource that did not go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Its kind.
    pub kind: Kind,
    /// Which one, in words.
    pub what: String,
    /// Why it did not go, with what to do where that is known.
    pub why: String,
    /// Who holds it, as far as that can be seen; the first few.
    #[serde(default)]
    pub holders: Vec<Holder>,
}

/// A task (a thread of a process) that keeps a resource from going.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its process.
    pub pid: u32,
    /// Its thread; the same number for a main thread.
    pub task: u32,
    /// Its name, at most 15 bytes.
    pub name: String,
    /// State letter of proc_pid_stat(5); `D` is sleep that no signal ends.
    pub state: char,
    /// In state `D`: the kernel function it sleeps in, where that can be read.
    pub wchan: Option<String>,
    /// In state `D`: its kernel stack, innermost first, where that can be read.
    #[serde(default)]
    pub stack: Vec<String>,
}

impl Stuck {
    /// After one more try that left `left`.
    #[must_use]
    pub fn again(former: Option<&Stuck>, left: Vec<Left>, now_ms: u64) -> Self {
        let tries = former.map_or(0, |f| f.tries).saturating_add(1);
        let since_ms = former.map_or(now_ms, |f| f.since_ms);
        let wait = u64::try_from(wait(tries).as_millis()).unwrap_or(u64::MAX);
        Self { left, since_ms, tries, next_try_ms: now_ms.saturating_add(wait) }
    }

    /// How long to wait before the next try.
    #[must_use]
    pub fn wait(&self) -> Duration {
        wait(self.tries)
    }
}

fn wait(tries: u32) -> Duration {
    FIRST_WAIT.saturating_mul(1 << tries.saturating_sub(1).min(10)).min(LONGEST_WAIT)
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, left) in self.left.iter().enumerate() {
            f.write_str(if n > 0 { "; " } else { "" })?;
            f.write_str(&left.why)?;
        }
        Ok(())
    }
}

/// The former form of a record had one line of text here.
pub(crate) fn of_record<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Stuck>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Value(Stuck),
        Words(String),
    }
    Ok(Option::<Form>::deserialize(from)?.map(|form| match form {
        Form::Value(stuck) => stuck,
        Form::Words(why) => {
            let left = Left { kind: Kind::Record, what: "a former release".into(), why, holders: vec![] };
            Stuck { left: vec![left], since_ms: 0, tries: 1, next_try_ms: 0 }
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(why: &str) -> Left {
        Left { kind: Kind::Cgroup, what: "cgroup a".into(), why: why.into(), holders: vec![] }
    }

    #[test]
    fn tries_are_counted_and_the_wait_grows_to_its_bound() {
        let first = Stuck::again(None, vec![left("x")], 1_000);
        assert_eq!((first.since_ms, first.tries, first.next_try_ms), (1_000, 1, 2_000));
        let second = Stuck::again(Some(&first), vec![left("y"), left("z")], 5_000);
        assert_eq!((second.since_ms, second.tries, second.next_try_ms), (1_000, 2, 7_000));
        assert_eq!(second.to_string(), "y; z");
        let mut last = second;
        for _ in 0..100 {
            last = Stuck::again(Some(&last), vec![], 0);
        }
        assert_eq!(last.wait(), LONGEST_WAIT);
    }

    #[test]
    fn the_former_form_is_read() {
        #[derive(Deserialize)]
        struct Record {
            #[serde(default, deserialize_with = "of_record")]
            stuck: Option<Stuck>,
        }
        let read = |text: &str| serde_json::from_str::<Record>(text).unwrap().stuck;
        assert_eq!(read("{}"), None);
        assert_eq!(read("{\"stuck\": null}"), None);
        assert_eq!(read("{\"stuck\": \"cgroup a is busy\"}").unwrap().to_string(), "cgroup a is busy");
        let now = Stuck::again(None, vec![left("x")], 7);
        let text = format!("{{\"stuck\": {}}}", serde_json::to_string(&now).unwrap());
        assert_eq!(read(&text), Some(now));
    }
}
