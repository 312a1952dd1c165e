//! What the release of leftovers has in its hands, so that no reconcile pass takes it for a new finding.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hearth_core::resource::Resource;

use super::Leftovers;

/// Leftovers on their way. The pool knows which slots are; this is for the rest, and for what failed.
#[derive(Debug, Default)]
pub(crate) struct Hands(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    resources: HashSet<Resource>,
    /// Tried by a reconcile pass, to be tried again.
    failed: Leftovers,
}

impl Hands {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on these are this release's.
    pub(crate) fn take_in(&self, resources: &[Resource]) {
        self.lock().resources.extend(resources.iter().cloned());
    }

    /// Its absence was seen.
    pub(crate) fn let_go(&self, resource: &Resource) {
        self.lock().resources.remove(resource);
    }

    /// All but slots.
    pub(crate) fn resources(&self) -> HashSet<Resource> {
        self.lock().resources.clone()
    }

    /// Leaves what a pass could not release to whoever tries again.
    pub(crate) fn leave(&self, failed: Leftovers) {
        self.lock().failed.extend(failed);
    }

    /// What was left since it was last asked.
    pub(crate) fn take_failed(&self) -> Leftovers {
        std::mem::take(&mut self.lock().failed)
    }
}
