//! The end of an engine: no new sandboxes, then what is to become of the others. Every wait is bounded; what
//! is left is told, and the next start takes it up.

use std::time::Duration;

use hearth_core::event::EventKind;
use hearth_core::host::Host;
use hearth_core::lifecycle::SandboxState;

use crate::engine::{Engine, Phase};
use crate::error::EngineError;
use crate::events::Events;
use crate::sandbox::{By, DeleteError};
use crate::status::{Ask, Desired};

/// How long the tasks of an engine get to end.
const JOIN: Duration = Duration::from_secs(30);
/// How long `delete_all` waits for one sandbox before it counts as left.
const DELETE: Duration = Duration::from_secs(60);

/// How many sandboxes keep a node from being drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Being made.
    pub creating: u32,
    /// The guest runs.
    pub running: u32,
    /// The VM ended by itself; being released.
    pub exited: u32,
    /// Being released.
    pub deleting: u32,
    /// A release did not finish, or it cannot be told whether the VM lives.
    pub stuck: u32,
}

impl Work {
    /// How many in all. A node with none is drained.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.creating + self.running + self.exited + self.deleting + self.stuck
    }
}

impl<H: Host> Engine<H> {
    /// Does what the operator asks for. A create that this refuses is not admitted any more once it returns;
    /// those admitted before go on. Works in every phase: a node told to drain while it starts comes up
    /// draining.
    ///
    /// # Errors
    /// If the node drains and was not told to undrain, or the daemon ends.
    pub fn ask(&self, ask: Ask) -> Result<Desired, EngineError> {
        let former = self.desired();
        let desired = self.context.books.ask(ask)?;
        if desired != former {
            let event = Events::now(EventKind::DesiredChanged).because(desired.refusal().unwrap_or_default());
            let event = event.with("desired", desired.as_str()).with("former", former.as_str());
            self.context.events.tell(event);
        }
        Ok(desired)
    }

    /// What the operator wants.
    #[must_use]
    pub fn desired(&self) -> Desired {
        self.context.books.desired()
    }

    /// What there is to wait for before the node is drained. `None` while that is not known: unknown is not
    /// empty.
    #[must_use]
    pub fn work(&self) -> Option<Work> {
        if *self.phase.borrow() != Phase::Ready {
            return None;
        }
        let mut work = Work::default();
        for view in self.context.books.views() {
            let count = match view.borrow().state {
                SandboxState::Creating => &mut work.creating,
                SandboxState::Running => &mut work.running,
                SandboxState::Exited => &mut work.exited,
                SandboxState::Deleting => &mut work.deleting,
                SandboxState::Stuck => &mut work.stuck,
            };
            *count += 1;
        }
        Some(work)
    }

    /// Takes no new sandboxes from here on, for good; those being made go on until [`detach`](Self::detach).
    pub fn close(&self, why: &str) {
        self.context.books.close(why);
    }

    /// Waits until no sandbox is left, at most `within`. True if none is.
    pub async fn drained(&self, within: Duration) -> bool {
        let end = tokio::time::Instant::now() + within;
        let mut phase = self.phase.subscribe();
        // Before the census nobody knows what there is.
        let known = phase.wait_for(|p| !matches!(p, Phase::Starting(_)));
        if !matches!(tokio::time::timeout_at(end, known).await, Ok(Ok(p)) if *p == Phase::Ready) {
            return false;
        }
        loop {
            let Some(handle) = self.context.books.all().into_iter().next() else { return true };
            let mut view = handle.view.clone();
            let gone = view.wait_for(|v| v.gone);
            match tokio::time::timeout_at(end, gone).await {
                Err(_) => return false,
                Ok(Ok(_)) => {}
                // Its task ended without that, or is being replaced.
                Ok(Err(_)) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
            if tokio::time::Instant::now() >= end {
                return self.context.books.len() == 0;
            }
        }
    }

    /// Deletes every sandbox. What is stuck is told.
    pub async fn delete_all(&self) -> Vec<String> {
        let deletes = self.context.books.all().into_iter().map(|handle| async move {
            let why = match tokio::time::timeout(
                DELETE,
                handle.delete(By::Daemon("the daemon shuts down and deletes all".into())),
            )
            .await
            {
                Ok(Ok(())) => return None,
                Ok(Err(DeleteError::Stuck(why))) => why,
                Ok(Err(DeleteError::Ended)) => "its task ended".into(),
                Err(_) => format!("not gone after {} s", DELETE.as_secs()),
            };
            Some(format!("sandbox {}: {why}", handle.name))
        });
        let mut left = Vec::new();
        // Bounded: each delete holds a few threads of the blocking pool for a moment.
        let mut results = futures::stream::StreamExt::buffer_unordered(futures::stream::iter(deletes), 16);
        while let Some(result) = futures::stream::StreamExt::next(&mut results).await {
            left.extend(result);
        }
        left
    }

    /// Ends the engine and leaves running VMs to their shims. Prepared slots are released.
    pub async fn detach(&self) -> Vec<String> {
        self.close("it is shutting down");
        self.context.no_creates.cancel();
        self.stop.cancel();
        // Creations under way are taken back by their own tasks before those end.
        let settled = async {
            for handle in self.context.books.all() {
                let mut view = handle.view.clone();
                // An error means that its task has ended, which is settled too.
                drop(view.wait_for(|v| v.gone || v.state != SandboxState::Creating).await);
            }
        };
        let mut left = Vec::new();
        if tokio::time::timeout(JOIN, settled).await.is_err() {
            left.push("creations under way".to_owned());
        }
        self.context.detach.cancel();
        self.tasks.close();
        if tokio::time::timeout(JOIN, self.tasks.wait()).await.is_err() {
            left.push(format!("{} tasks that did not end", self.tasks.len()));
        }
        left.extend(self.context.pool.close().await);
        left
    }
}
