//! Who is who: the sandboxes of this engine by id and by name, and the last ones that ended.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_core::exit::ExitRecord;
use hearth_core::id::{SandboxId, SandboxName};
use hearth_core::lifecycle::{SandboxState, SlotState};
use hearth_core::network::SlotIndex;
use hearth_core::record::Record;
use hearth_core::resource::Resource;
use tokio::sync::watch;

use crate::error::EngineError;
use crate::sandbox::{Handle, View};
use crate::status::{Ask, Desired};

/// How many ended sandboxes are remembered, to tell "ended" from "never was".
const REMEMBERED: usize = 256;

/// The sandboxes of one engine. The lock guards map changes only and is never held across I/O.
#[derive(Debug, Default)]
pub(crate) struct Books(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    by_id: HashMap<SandboxId, Handle>,
    by_name: HashMap<SandboxName, SandboxId>,
    ended: VecDeque<(SandboxId, SandboxName, String)>,
    /// Ids under which something leaked: no sandbox gets one of them again.
    leaked: HashSet<SandboxId>,
    /// Records that cannot be used, by id: why, and what to do.
    unknown: BTreeMap<String, String>,
    /// What the operator wants.
    desired: Desired,
    /// Why no new sandbox is ever taken again: the daemon ends.
    closed: Option<String>,
}

/// What the node's books hold at one moment, for who looks at the host from outside.
#[derive(Debug, Clone, Default)]
pub struct BooksNow {
    /// Slots in any state but free.
    pub slots: BTreeMap<SlotIndex, SlotState>,
    /// Sandboxes in any state: record and state as they are now.
    pub sandboxes: Vec<(Record, SandboxState)>,
    /// Ids whose record cannot be used.
    pub unknown: Vec<String>,
    /// What a release of leftovers has in its hands; its slots are in state leaked.
    pub releasing: Vec<Resource>,
}

impl Books {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a sandbox under its name. Refusing new ones and entering one are decided under one lock, so
    /// that a create is either entered before a drain or refused by it.
    pub(crate) fn enter_new(&self, handle: Handle) -> Result<(), EngineError> {
        let mut inner = self.lock();
        if let Some(why) = &inner.closed {
            return Err(EngineError::Closed(format!("the node takes no new sandboxes: {why}")));
        }
        if let Some(why) = inner.desired.refusal() {
            return Err(EngineError::NotActive { desired: inner.desired, why });
        }
        if inner.leaked.contains(&handle.id) {
            return Err(EngineError::Failed(format!(
                "id {} is that of leftovers under release; create again",
                handle.id
            )));
        }
        if let Some(id) = inner.by_name.get(&handle.name) {
            return Err(EngineError::AlreadyExists(format!(
                "the name {} is taken by sandbox {id}; delete that one or choose another",
                handle.name
            )));
        }
        inner.by_name.insert(handle.name.clone(), handle.id.clone());
        inner.by_id.insert(handle.id.clone(), handle);
        Ok(())
    }

    /// Claims an id for the release of what leaked under it. False if a sandbox has it. Decided under the lock that
    /// enters sandboxes, so that none has it afterwards either.
    pub(crate) fn claim(&self, id: &SandboxId) -> bool {
        let mut inner = self.lock();
        let free = !inner.by_id.contains_key(id);
        if free {
            inner.leaked.insert(id.clone());
        }
        free
    }

    /// Enters a sandbox found on disk. If its name is taken it is reachable by its id alone.
    pub(crate) fn enter_found(&self, handle: Handle) {
        let mut inner = self.lock();
        inner.by_name.entry(handle.name.clone()).or_insert_with(|| handle.id.clone());
        inner.by_id.insert(handle.id.clone(), handle);
    }

    /// Strikes a sandbox of which nothing is left.
    pub(crate) fn remove(&self, record: &Record, exit: Option<&ExitRecord>) {
        let mut inner = self.lock();
        inner.by_id.remove(&record.id);
        if inner.by_name.get(&record.name) == Some(&record.id) {
            inner.by_name.remove(&record.name);
        }
        let how = match exit {
            Some(exit) => exit.words(),
            None => "deleted".to_owned(),
        };
        inner.ended.push_back((record.id.clone(), record.name.clone(), how));
        if inner.ended.len() > REMEMBERED {
            inner.ended.pop_front();
        }
    }

    /// The sandbox with this id or name.
    pub(crate) fn find(&self, key: &str) -> Result<Handle, EngineError> {
        let inner = self.lock();
        let by_name = || {
            let name: SandboxName = key.parse().ok()?;
            inner.by_name.get(&name).and_then(|id| inner.by_id.get(id))
        };
        let by_id = || inner.by_id.get(&key.parse().ok()?);
        if let Some(handle) = by_id().or_else(by_name) {
            return Ok(handle.clone());
        }
        if let Some(why) = inner.unknown.get(key) {
            return Err(EngineError::Precondition(format!(
                "sandbox {key} is unknown, so nothing of it is touched: {why}"
            )));
        }
        let ended = inner.ended.iter().rev().find(|(id, name, _)| id.as_str() == key || name.as_str() == key);
        Err(EngineError::NotFound(match ended {
            Some((id, _, how)) => format!("sandbox {key} ({id}) has ended: {how}"),
            None if inner.unknown.is_empty() => {
                format!("no sandbox is called {key:?}; `hearth ls` lists them")
            }
            // It may be the name of one of these.
            None => format!(
                "no sandbox whose record can be read is called {key:?}; {} cannot, see `hearth ls`",
                inner.unknown.len()
            ),
        }))
    }

    /// Notes the records that cannot be used, all of them.
    pub(crate) fn note_unknown(&self, unknown: BTreeMap<String, String>) {
        self.lock().unknown = unknown;
    }

    /// The records that cannot be used, by id: why, and what to do.
    pub(crate) fn unknown(&self) -> BTreeMap<String, String> {
        self.lock().unknown.clone()
    }

    /// All, oldest first.
    pub(crate) fn all(&self) -> Vec<Handle> {
        let mut all: Vec<Handle> = self.lock().by_id.values().cloned().collect();
        all.sort_by_key(|h| h.view.borrow().record.created_at_ms);
        all
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.lock().by_id.len()
    }

    /// What can be seen of all, in no order.
    pub(crate) fn views(&self) -> Vec<watch::Receiver<View>> {
        self.lock().by_id.values().map(|h| h.view.clone()).collect()
    }

    /// Takes no new sandboxes from here on, for good.
    pub(crate) fn close(&self, why: &str) {
        self.lock().closed = Some(why.to_owned());
    }

    /// What the operator wants.
    pub(crate) fn desired(&self) -> Desired {
        self.lock().desired
    }

    /// Does what the operator asks for. When this returns, no create that it refuses is entered any more.
    pub(crate) fn ask(&self, ask: Ask) -> Result<Desired, EngineError> {
        let mut inner = self.lock();
        if let Some(why) = inner.closed.as_ref().filter(|_| ask != Ask::Drain) {
            return Err(EngineError::Closed(format!("the node drains for good: {why}")));
        }
        let Some(next) = inner.desired.asked(ask) else {
            return Err(EngineError::Precondition(
                "the node is draining; `hearth node undrain` takes that back first".into(),
            ));
        };
        inner.desired = next;
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_for_good_cannot_be_taken_back() {
        let books = Books::default();
        books.close("it is shutting down");
        assert!(books.ask(Ask::Drain).is_ok());
        for ask in [Ask::Undrain, Ask::Activate, Ask::Standby] {
            assert!(matches!(books.ask(ask), Err(EngineError::Closed(_))), "{ask:?}");
        }
    }

    #[test]
    fn standby_is_refused_while_draining() {
        let books = Books::default();
        books.ask(Ask::Drain).unwrap();
        assert!(matches!(books.ask(Ask::Standby), Err(EngineError::Precondition(_))));
        assert_eq!(books.desired(), Desired::Draining { from_standby: false });
        assert_eq!(books.ask(Ask::Undrain).unwrap(), Desired::Active);
    }
}
