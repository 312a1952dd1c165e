//! What the release walk does to the host and the shim, each at its place: the only way of the walk to
//! either, so that a fault can be ordered at every part of it.

use std::sync::Arc;
use std::time::Instant;

use hearth_core::host::{ErrorClass, Host, HostError};
use hearth_core::network::SlotIndex;
use hearth_core::resource::{Kind, Resource};
use hearth_core::steps::{Place, ReleaseStep};

use super::release::GENTLE;
use super::task::Sandbox;
use crate::blocking::on_host;
use crate::pool::Retired;
use crate::shim_client::{self, Client};
use crate::trace;

impl<H: Host> Sandbox<H> {
    /// Has the shim kill its VM.
    pub(super) async fn stop_shim(&self, client: &Client) -> Result<(), String> {
        self.part(ReleaseStep::Stop, |why| why, shim_client::stop(client, GENTLE, self.by.policy())).await
    }

    /// Releases one resource that is no part of a slot.
    pub(super) async fn release_on_host(&self, resource: &Resource) -> Result<(), HostError> {
        let step = match resource.kind() {
            Kind::Process => ReleaseStep::Process,
            Kind::Nbd => ReleaseStep::Nbd,
            Kind::Cgroup => ReleaseStep::Cgroup,
            _ if *resource == (Resource::Directory { path: self.run_dir.clone() }) => {
                ReleaseStep::RunDirectory
            }
            _ => ReleaseStep::Directory,
        };
        let failed = |why| HostError {
            verb: "release",
            what: resource.to_string(),
            why,
            class: ErrorClass::Failed,
            source: None,
        };
        let (host, what) = (Arc::clone(&self.context.host), resource.clone());
        let within = self.context.config.release_deadline;
        let released = on_host(&host, move |host| host.release(&what, within));
        self.part(step, failed, released).await
    }

    /// Takes the slot from this sandbox: reset for the next owner, or removed.
    pub(super) async fn retire_slot(&self, slot: SlotIndex) -> Result<Retired, String> {
        self.part(ReleaseStep::Slot, |why| why, self.context.pool.retire(slot)).await
    }

    /// A part of the walk at which there is nothing to do.
    pub(super) async fn pass(&self, step: ReleaseStep) -> Result<(), String> {
        self.part(step, |why| why, std::future::ready(Ok(()))).await
    }

    /// One part of the walk, at its place, timed, in a span of its own.
    async fn part<T, E: std::fmt::Display>(
        &self,
        step: ReleaseStep,
        failed: impl Fn(String) -> E,
        effect: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let (begun, place) = (Instant::now(), Place::Release(step));
        let done = async |_| self.context.faults.around(place, failed, effect).await;
        let done = trace::within(place.as_str(), &self.trace, done).await;
        self.context.meters.release_step(step, begun.elapsed());
        done
    }
}
