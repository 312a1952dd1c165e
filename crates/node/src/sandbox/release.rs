//! The one release path: the steps of creation backwards, from any prefix. It goes on past errors and may be
//! run again; "already gone" is success.

use std::time::{Duration, Instant};

use hearth_core::event::EventKind;
use hearth_core::host::Host;
use hearth_core::lifecycle::SandboxState;
use hearth_core::resource::{Kind, Resource};
use hearth_core::steps::ReleaseStep;
use hearth_core::stuck::{Left, Stuck};

use super::task::Sandbox;
use crate::blocking::on_host;
use crate::engine::now_ms;
use crate::error::chain;
use crate::events::Events;
use crate::trace::{self, TraceContext};

/// How long the shim may take to kill the VM and write the exit record before the cgroup is killed.
pub(super) const GENTLE: Duration = Duration::from_secs(3);

impl<H: Host> Sandbox<H> {
    /// One try at everything the record names. What is left is told, and stays in the record with the reason.
    pub(super) async fn release_once(&mut self) -> Result<(), String> {
        self.ending.get_or_insert_with(Instant::now);
        let asked = std::mem::take(&mut self.trace);
        self.trace = trace::begin("release", &asked);
        trace::about(&self.trace, &self.record);
        let released = self.release_all().await;
        trace::end(&self.trace, &released);
        self.trace = TraceContext::new();
        released
    }

    async fn release_all(&mut self) -> Result<(), String> {
        let other_boot = self.record.boot_id != self.context.host.boot_id();
        if other_boot {
            // Pids and slot numbers of another boot name other things now; only names that are unique for
            // ever (the cgroup's, the directories') may be followed.
            self.record.shim = None;
            self.record.slot = None;
            self.record.resources.retain(|r| matches!(r.kind(), Kind::Directory | Kind::Cgroup));
        }
        // Stuck stays what it is until a try leaves nothing.
        if self.record.state != SandboxState::Stuck {
            self.record.state = SandboxState::Deleting;
            self.save_if_kept().await;
        }
        self.stop_gently().await;

        let mut left = Vec::new();
        // The processes first: they hold everything else.
        self.release_kind(Kind::Process, &mut left).await;
        // A device goes only when its server was seen gone, and its server is the shim. Before the cgroup, since a VMM that
        // waits for its disk does not end before that.
        let mut devices = Vec::new();
        let served_out = left.is_empty() && self.record.shim.is_some();
        if served_out {
            self.release_nbds(&mut devices).await;
        }
        self.release_kind(Kind::Cgroup, &mut left).await;
        // Now everybody who may have had it open is gone, and so is a shim that no record names.
        if left.is_empty() && !(served_out && devices.is_empty()) {
            devices.clear();
            self.release_nbds(&mut devices).await;
        }
        left.append(&mut devices);
        self.release_kind(Kind::Mount, &mut left).await;
        if left.is_empty() {
            self.release_slot(&mut left).await;
        }
        let run_dir = Resource::Directory { path: self.run_dir.clone() };
        if self.record.resources.contains(&run_dir) {
            self.release_one(&run_dir, &mut left).await;
        }
        if left.is_empty() {
            self.keep_end(other_boot).await;
            // Last, since the record lies in it.
            self.release_kind(Kind::Directory, &mut left).await;
        }
        if left.is_empty() {
            return Ok(());
        }
        let stuck = Stuck::again(self.record.stuck.as_ref(), left, now_ms());
        let why = stuck.to_string();
        if stuck.tries == 1 {
            tracing::warn!(sandbox = %self.record.id, name = %self.record.name, "stuck: {why}");
            let event = Events::now(EventKind::SandboxStuck).about(&self.record).because(why.as_str());
            let event = event.with("tries", stuck.tries);
            let left =
                stuck.left.iter().fold(event, |e, left| e.with(&format!("left.{}", left.what), &left.why));
            self.context.events.tell(left);
        } else {
            tracing::debug!(sandbox = %self.record.id, tries = stuck.tries, "still stuck: {why}");
        }
        self.record.state = SandboxState::Stuck;
        self.record.stuck = Some(stuck);
        self.save_if_kept().await;
        Err(why)
    }

    /// Asks the shim to kill the VM, so that the exit is recorded as ours. Whatever it answers, the cgroup is
    /// killed afterwards.
    async fn stop_gently(&mut self) {
        let client = self.view.borrow().shim.clone();
        self.view.send_modify(|v| v.shim = None);
        if let Some(client) = client
            && let Err(why) = self.stop_shim(&client).await
        {
            tracing::debug!(sandbox = %self.record.id, "the shim did not stop its VM: {why}");
        }
    }

    async fn release_kind(&mut self, kind: Kind, left: &mut Vec<Left>) {
        let resources: Vec<Resource> =
            self.record.resources.iter().rev().filter(|r| r.kind() == kind).cloned().collect();
        for resource in resources {
            self.release_one(&resource, left).await;
        }
    }

    /// Releases its devices. Every life passes this place, also one that has none.
    async fn release_nbds(&mut self, left: &mut Vec<Left>) {
        if self.record.resources.iter().any(|r| r.kind() == Kind::Nbd) {
            self.release_kind(Kind::Nbd, left).await;
        } else if let Err(why) = self.pass(ReleaseStep::Nbd).await {
            left.push(Left { kind: Kind::Nbd, what: "network block devices".into(), why, holders: vec![] });
        }
    }

    async fn release_one(&mut self, resource: &Resource, left: &mut Vec<Left>) {
        let released = self.release_on_host(resource).await;
        if let Resource::Nbd { index, sandbox } = resource {
            self.context.nbds.settle(&self.context.host, *index, sandbox).await;
        }
        match released {
            Ok(()) => self.record.absent(resource),
            Err(e) => left.push(self.stays(resource, resource.to_string(), chain(&e)).await),
        }
    }

    /// What did not go, with who holds it.
    async fn stays(&self, resource: &Resource, what: String, why: String) -> Left {
        let (kind, resource) = (resource.kind(), resource.clone());
        let holders = on_host(&self.context.host, move |host| host.holders(&resource)).await;
        Left { kind, what, why, holders }
    }

    /// Gives the slot back to the pool, which resets or removes it.
    async fn release_slot(&mut self, left: &mut Vec<Left>) {
        let Some(slot) = self.record.slot else { return };
        match self.retire_slot(slot).await {
            Ok(retired) => {
                self.record.slot = None;
                for part in Resource::of_slot(slot) {
                    self.record.absent(&part);
                }
                // Before the slot may become another's: two records must not name it.
                self.save_if_kept().await;
                self.context.pool.put(&retired);
            }
            Err(why) => {
                let netns = Resource::Netns { slot };
                left.push(self.stays(&netns, format!("slot {slot}"), why).await);
            }
        }
    }

    /// Writes the record if its directory is still there. A failure costs nothing but knowledge: the release
    /// goes on, and the next start finds the same things by their names.
    async fn save_if_kept(&mut self) {
        let kept = self
            .record
            .resources
            .iter()
            .any(|r| matches!(r, Resource::Directory { path } if *path != self.run_dir));
        if !kept {
            self.show();
            return;
        }
        if let Err(why) = self.save().await {
            tracing::warn!(sandbox = %self.record.id, "{why}");
        }
    }
}
