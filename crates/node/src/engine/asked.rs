//! What an engine answers at once: who is there, who has ended, and what the books hold. Changes nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::exit::KeptExit;
use hearth_core::host::Host;
use hearth_core::lifecycle::SandboxState;
use hearth_core::resource::Kind;
use tokio::sync::watch;

use super::Engine;
use crate::books::BooksNow;
use crate::error::EngineError;
use crate::sandbox::View;
use crate::shim_client::Client;

/// How long a request waits for the shim of a sandbox that is being taken over.
const TAKE_OVER: Duration = Duration::from_secs(10);

impl<H: Host> Engine<H> {
    /// The sandbox with this id or name.
    ///
    /// # Errors
    /// If there is none, or the node does not know yet.
    pub fn get(&self, key: &str) -> Result<View, EngineError> {
        self.ready()?;
        let view = self.context.books.find(key)?.view.borrow().clone();
        Ok(view)
    }

    /// All sandboxes, oldest first.
    ///
    /// # Errors
    /// If the node does not know yet.
    pub fn list(&self) -> Result<Vec<View>, EngineError> {
        self.ready()?;
        Ok(self.context.books.all().iter().map(|h| h.view.borrow().clone()).collect())
    }

    /// Shows each sandbox, in no order, without a copy of it.
    ///
    /// # Errors
    /// If the node does not know yet.
    pub fn each(&self, mut seen: impl FnMut(&View)) -> Result<(), EngineError> {
        self.ready()?;
        for view in self.context.books.views() {
            seen(&view.borrow());
        }
        Ok(())
    }

    /// A sandbox that is gone and whose end is still kept, by id or name.
    ///
    /// # Errors
    /// If there is none, or the node does not know yet.
    pub fn ended(&self, key: &str) -> Result<Arc<KeptExit>, EngineError> {
        self.ready()?;
        // Why it is not there is the better answer.
        self.context.exits.find(key).map_or_else(|| Err(self.not_found(key)), Ok)
    }

    fn not_found(&self, key: &str) -> EngineError {
        let gone = || EngineError::NotFound(format!("how sandbox {key} ended is not kept any more"));
        self.context.books.find(key).err().unwrap_or_else(gone)
    }

    /// All whose end is still kept, first ended first.
    ///
    /// # Errors
    /// If the node does not know yet.
    pub fn all_ended(&self) -> Result<Vec<Arc<KeptExit>>, EngineError> {
        self.ready()?;
        Ok(self.context.exits.all())
    }

    /// The shim of a running sandbox.
    ///
    /// # Errors
    /// If it does not run or its shim cannot be reached.
    pub fn shim(&self, key: &str) -> Result<Client, EngineError> {
        let view = self.get(key)?;
        if view.state != SandboxState::Running {
            return Err(EngineError::Precondition(format!("sandbox {key} is {}, not running", view.state)));
        }
        view.shim.ok_or_else(|| {
            let why = view.unreachable.unwrap_or_else(|| "it is being connected to".into());
            EngineError::Precondition(format!("the shim of sandbox {key} cannot be reached: {why}"))
        })
    }

    /// As [`shim`](Self::shim), but a sandbox that is just being taken over is waited for: the node is ready
    /// before every shim has answered.
    ///
    /// # Errors
    /// If it does not run or its shim does not answer.
    pub async fn connected(&self, key: &str) -> Result<Client, EngineError> {
        self.ready()?;
        let mut view = self.context.books.find(key)?.view;
        let told = view.wait_for(|v| {
            v.state != SandboxState::Running || v.shim.is_some() || v.unreachable.is_some() || v.gone
        });
        // Late or not, what is known then is the answer.
        drop(tokio::time::timeout(TAKE_OVER, told).await);
        self.shim(key)
    }

    /// The records that cannot be used, by sandbox id: why, and what to do. What they may own is kept.
    ///
    /// # Errors
    /// If the node does not know yet.
    pub fn unknown(&self) -> Result<BTreeMap<String, String>, EngineError> {
        self.ready()?;
        Ok(self.context.books.unknown())
    }

    /// Resources of stuck sandboxes that did not go at the last try, by kind.
    #[must_use]
    pub fn stuck(&self) -> BTreeMap<Kind, u64> {
        let mut stuck = BTreeMap::new();
        for view in self.context.books.views() {
            let view = view.borrow();
            for left in view.record.stuck.iter().flat_map(|s| &s.left) {
                *stuck.entry(left.kind).or_default() += 1;
            }
        }
        stuck
    }

    /// The console log of a sandbox, and its view to follow its end.
    ///
    /// # Errors
    /// If there is no such sandbox.
    pub fn console(&self, key: &str) -> Result<(PathBuf, watch::Receiver<View>), EngineError> {
        self.ready()?;
        let handle = self.context.books.find(key)?;
        Ok((handle.run_dir.join(hearth_core::shim::CONSOLE_LOG), handle.view))
    }

    /// How many sandboxes there are, in any state.
    #[must_use]
    pub fn sandbox_count(&self) -> usize {
        self.context.books.len()
    }

    /// Slots by state.
    #[must_use]
    pub fn slot_counts(&self) -> BTreeMap<String, u32> {
        self.context.pool.counts()
    }

    /// Indexes of the kernel's NBD client; nothing where it has none, or none is wanted.
    #[must_use]
    pub fn nbd_counts(&self) -> Option<hearth_core::nbd_pool::Counts> {
        self.context.nbds.counts()
    }

    /// What the books hold now.
    ///
    /// # Errors
    /// If the node does not know yet what there is.
    pub fn books_now(&self) -> Result<BooksNow, EngineError> {
        self.ready()?;
        let view = |view: tokio::sync::watch::Receiver<crate::sandbox::View>| {
            let view = view.borrow();
            (view.record.clone(), view.state)
        };
        Ok(BooksNow {
            // The slots first: one that a sandbox gives back meanwhile is then still known as its own.
            slots: self.context.pool.states(),
            sandboxes: self.context.books.views().into_iter().map(view).collect(),
            unknown: self.context.books.unknown().into_keys().collect(),
            releasing: self.context.hands.resources().into_iter().collect(),
        })
    }

    /// Why slots cannot be made at present; nothing if they can.
    #[must_use]
    pub fn slot_trouble(&self) -> Option<String> {
        self.context.pool.trouble()
    }
}
