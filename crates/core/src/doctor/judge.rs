//! Whose a thing is: what the scans saw, held against records and the daemon's books. Both are looked at before and
//! after the scans. They name a thing before it is made and until its absence was seen, so what neither look names was
//! nobody's while it was scanned, or came and went in between.

mod differ;

use std::collections::{BTreeMap, BTreeSet};

use super::{Item, ItemKind, Look, Owner, State, Thing};
use crate::lifecycle::SandboxState;
use crate::process::{Liveness, ProcessIdentity};
use crate::stuck::{Holder, Stuck};

/// What a record says, and what is known of its shim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// What the user calls the sandbox.
    pub name: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Its slot.
    pub slot: Option<u32>,
    /// Its shim.
    pub shim: Option<ProcessIdentity>,
    /// Whether that shim lives; `Gone` if none was recorded.
    pub alive: Liveness,
    /// Whether it was created since the host was booted.
    pub this_boot: bool,
    /// Why it is stuck.
    pub stuck: Option<Stuck>,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
}

/// A slot in the daemon's books.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BookedSlot {
    /// The word for its state.
    pub state: String,
    /// Why it is foreign or stuck.
    pub why: String,
}

/// A sandbox in the daemon's books.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Booked {
    /// What the user calls it.
    pub name: String,
    /// The word for its state.
    pub state: String,
    /// Its slot.
    pub slot: Option<u32>,
}

/// The daemon's books at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Books {
    /// Slots in any state but free.
    pub slots: BTreeMap<u32, BookedSlot>,
    /// Sandboxes by id.
    pub sandboxes: BTreeMap<String, Booked>,
    /// Names of cgroups and directories that a release of leftovers has in its hands.
    pub releasing: BTreeSet<String>,
}

/// Who claims what, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims {
    /// Records by sandbox id; `None` if they could not be read.
    pub records: Option<BTreeMap<String, Recorded>>,
    /// Records that cannot be used, by id: why.
    pub unusable: BTreeMap<String, String>,
    /// The daemon's books; `None` if it did not show them.
    pub books: Option<Books>,
}

/// Whether a daemon of the instance runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Daemon {
    /// None does.
    Down,
    /// One answers.
    Up,
    /// One does, or may, and does not show its books: why.
    Silent(String),
}

/// What the scans saw.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scene {
    /// Everything, foreign things too.
    pub things: Vec<Thing>,
    /// Kinds of which all was seen: only there absence means something.
    pub whole: BTreeSet<ItemKind>,
}

/// Says of each thing whose it is, and where the views differ.
#[must_use]
pub fn judge(scene: Scene, before: &Claims, after: &Claims, daemon: &Daemon) -> Look {
    let bench = Bench { before, after, daemon };
    let disagreements = bench.disagreements(&scene);
    let mut items = bench.records();
    items.extend(scene.things.into_iter().map(|thing| bench.item(thing)));
    items.sort_by(|a, b| (a.kind, a.owner.slot, &a.name).cmp(&(b.kind, b.owner.slot, &b.name)));
    Look { items, disagreements }
}

/// What is thought of something, and the reason.
struct Verdict {
    state: State,
    why: String,
    holders: Vec<Holder>,
}

impl Verdict {
    fn new(state: State, why: impl Into<String>) -> Self {
        Self { state, why: why.into(), holders: Vec::new() }
    }
}

struct Bench<'a> {
    before: &'a Claims,
    after: &'a Claims,
    daemon: &'a Daemon,
}

impl Claims {
    fn record(&self, id: &str) -> Option<&Recorded> {
        self.records.as_ref()?.get(id)
    }

    fn booked(&self, id: &str) -> Option<&Booked> {
        self.books.as_ref()?.sandboxes.get(id)
    }

    fn of_slot(&self, slot: u32) -> impl Iterator<Item = &str> {
        let records = self.records.iter().flatten().filter(move |(_, r)| r.slot == Some(slot));
        let books = self.books.iter().flat_map(|b| &b.sandboxes).filter(move |(_, b)| b.slot == Some(slot));
        records.map(|(id, _)| id.as_str()).chain(books.map(|(id, _)| id.as_str()))
    }
}

impl Bench<'_> {
    fn record(&self, id: &str) -> Option<&Recorded> {
        self.after.record(id).or_else(|| self.before.record(id))
    }

    fn booked(&self, id: &str) -> Option<&Booked> {
        self.after.booked(id).or_else(|| self.before.booked(id))
    }

    fn is_claimed(&self, id: &str) -> bool {
        self.record(id).is_some() || self.booked(id).is_some()
    }

    /// Both looks showed the daemon's books.
    fn has_books(&self) -> bool {
        self.before.books.is_some() && self.after.books.is_some()
    }

    fn unusable(&self) -> impl Iterator<Item = (&String, &String)> {
        self.after.unusable.iter().chain(&self.before.unusable)
    }

    fn item(&self, thing: Thing) -> Item {
        let (owner, verdict) = match (&thing.foreign, &thing.sandbox, thing.slot) {
            (Some(why), ..) => (None, Verdict::new(State::Foreign, why.clone())),
            // A device carries no instance, so the id of an unknown sandbox may be another instance's.
            (None, Some(id), _) if thing.kind == ItemKind::Nbd && !self.is_claimed(id) => {
                (None, Verdict::new(State::Foreign, "its backend names no sandbox of this instance"))
            }
            (None, Some(id), _) => (Some(id.clone()), self.of_sandbox(id, &thing.name)),
            (None, None, Some(slot)) => self.of_slot(slot),
            (None, None, None) => (None, Verdict::new(State::Live, "it belongs to the instance itself")),
        };
        let recorded = owner.as_deref().or(thing.sandbox.as_deref()).and_then(|id| self.record(id));
        let shim = recorded.and_then(|r| r.shim.as_ref());
        let own = match &thing.identity {
            super::Identity::Process(process) => Some(process),
            _ => shim,
        };
        let mut evidence = vec![verdict.why];
        let mut state = verdict.state;
        if thing.undead && state != State::Foreign {
            state = State::Stuck;
            evidence.insert(0, "it was killed and does not go".into());
        }
        if let (super::Identity::Process(process), Some(shim)) = (&thing.identity, shim)
            && (process.pid, process.start_time) == (shim.pid, shim.start_time)
        {
            evidence.push("the shim".into());
        }
        evidence.extend(thing.facts);
        Item {
            owner: Owner {
                slot: thing.slot.or_else(|| recorded.and_then(|r| r.slot)),
                sandbox: owner.or(thing.sandbox),
                pid: own.map(|p| p.pid),
                start_time: own.map(|p| p.start_time),
            },
            kind: thing.kind,
            name: thing.name,
            state,
            evidence,
            since_ms: thing.since_ms,
            identity: thing.identity,
            tasks: thing.tasks.into_iter().chain(verdict.holders).collect(),
        }
    }

    /// The records themselves.
    fn records(&self) -> Vec<Item> {
        let item = |id: &str, state, why, since_ms, slot, shim: Option<&ProcessIdentity>, tasks| Item {
            kind: ItemKind::Record,
            name: id.to_owned(),
            state,
            owner: Owner {
                sandbox: Some(id.to_owned()),
                slot,
                pid: shim.map(|s| s.pid),
                start_time: shim.map(|s| s.start_time),
            },
            evidence: vec![why],
            since_ms,
            identity: super::Identity::Name,
            tasks,
        };
        let usable = self.after.records.iter().flatten().map(|(id, r)| {
            let verdict = self.recorded(id, r);
            let since = Some(r.created_at_ms);
            item(id, verdict.state, verdict.why, since, r.slot, r.shim.as_ref(), verdict.holders)
        });
        let unusable = self.after.unusable.iter().map(|(id, why)| {
            item(id, State::Unknown, format!("it cannot be used: {why}"), None, None, None, Vec::new())
        });
        usable.chain(unusable).collect()
    }

    fn of_sandbox(&self, id: &str, name: &str) -> Verdict {
        let releasing = |c: &Claims| c.books.as_ref().is_some_and(|b| b.releasing.contains(name));
        if let Some(recorded) = self.record(id) {
            return self.recorded(id, recorded);
        }
        match self.booked(id) {
            Some(b) if b.state == "unknown" => Verdict::new(State::Unknown, "its record cannot be used"),
            Some(b) => Verdict::new(State::Live, format!("of sandbox {}, {}", b.name, b.state)),
            None if releasing(self.before) || releasing(self.after) => {
                Verdict::new(State::Leaked, "no record names it; the daemon is releasing it")
            }
            None => self.nobodys(Some(id)),
        }
    }

    fn recorded(&self, id: &str, r: &Recorded) -> Verdict {
        if let Some(stuck) = &r.stuck {
            let holders = stuck.left.iter().flat_map(|l| l.holders.iter().cloned()).collect();
            let why = format!("of sandbox {}, whose release does not finish: {stuck}", r.name);
            return Verdict { state: State::Stuck, why, holders };
        }
        let of = format!("of sandbox {}", r.name);
        if self.has_books() {
            return match self.booked(id) {
                Some(b) => Verdict::new(State::Live, format!("{of}, {}", b.state)),
                None => Verdict::new(State::Unknown, format!("{of}, whose record the daemon does not know")),
            };
        }
        if !r.this_boot {
            let why = format!("{of}, created before the host was booted; the next start releases it");
            return Verdict::new(State::Leaked, why);
        }
        let shim = match (&r.alive, &r.shim) {
            (Liveness::Unknown(why), _) => {
                return Verdict::new(State::Unknown, format!("{of}, whose shim cannot be judged: {why}"));
            }
            (Liveness::Alive, _) if r.state == SandboxState::Running => {
                return Verdict::new(State::Live, format!("{of}, which runs: its shim lives"));
            }
            (Liveness::Alive, _) => "its shim lives".to_owned(),
            (Liveness::Gone, Some(shim)) => format!("its shim (pid {}) is gone", shim.pid),
            (Liveness::Gone, None) => "no shim was recorded".to_owned(),
        };
        let why = format!("{of}, {} by its record; {shim}", r.state);
        match self.daemon {
            Daemon::Down => {
                let why = format!("{why}; no daemon runs, and the next start releases it");
                Verdict::new(State::Leaked, why)
            }
            Daemon::Up => Verdict::new(State::Unknown, why),
            Daemon::Silent(silent) => {
                Verdict::new(State::Unknown, format!("{why}; the daemon may be at it: {silent}"))
            }
        }
    }

    fn of_slot(&self, slot: u32) -> (Option<String>, Verdict) {
        let claims = self.after.of_slot(slot).chain(self.before.of_slot(slot));
        let mut verdicts: Vec<(String, Verdict)> =
            claims.map(|id| (id.to_owned(), self.of_sandbox(id, ""))).collect();
        // Two records name one slot if a crash came between giving it back and writing that down.
        verdicts.sort_by_key(|(_, v)| v.state);
        if let Some((id, verdict)) = verdicts.into_iter().next() {
            return (Some(id), verdict);
        }
        let state = |c: &'_ Claims| c.books.as_ref().and_then(|b| b.slots.get(&slot).cloned());
        let verdict = match state(self.after).or_else(|| state(self.before)) {
            Some(BookedSlot { state, .. }) if state == "leaked" => {
                Verdict::new(State::Leaked, "no record names its slot; the daemon knows and releases it")
            }
            Some(BookedSlot { state, why }) if state == "stuck" => {
                Verdict::new(State::Stuck, format!("the release of its slot does not finish: {why}"))
            }
            Some(BookedSlot { state, why }) if state == "foreign" => {
                Verdict::new(State::Foreign, format!("the daemon found another's thing in its slot: {why}"))
            }
            Some(BookedSlot { state, .. }) => Verdict::new(State::Live, format!("its slot is {state}")),
            None => self.nobodys(None),
        };
        (None, verdict)
    }

    /// Of what nobody claims: leaked, unless somebody could not be asked.
    fn nobodys(&self, id: Option<&str>) -> Verdict {
        let unknown = |why: String| Verdict::new(State::Unknown, why);
        if let Some((id, why)) = self.unusable().find(|(other, _)| id.is_none_or(|id| *other == id)) {
            return unknown(format!("the record of {id} cannot be used, and may name it: {why}"));
        }
        if let Some((other, _)) = self.unusable().next() {
            return unknown(format!("no usable record names it, but that of {other} cannot be used"));
        }
        let records = self.before.records.is_some() && self.after.records.is_some();
        match (records, self.has_books()) {
            (true, true) => Verdict::new(State::Leaked, "neither a record nor the daemon knows it"),
            (false, true) => Verdict::new(State::Leaked, "the daemon does not know it"),
            (false, false) => unknown("neither the records nor the daemon could be asked".into()),
            (true, false) => match (self.daemon, id) {
                (Daemon::Down, _) => Verdict::new(State::Leaked, "no record names it, and no daemon runs"),
                // A record comes before whatever carries an id, and goes after it.
                (_, Some(_)) => Verdict::new(State::Leaked, "no record names it"),
                (Daemon::Silent(why), None) => {
                    unknown(format!("no record names its slot; the daemon may have prepared it: {why}"))
                }
                (Daemon::Up, None) => {
                    unknown("no record names its slot; the daemon did not show its books twice".into())
                }
            },
        }
    }
}

#[cfg(test)]
mod tests;
