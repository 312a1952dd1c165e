//! The hands that reach the host: each kind by the verb of its file in `hearth-host`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use hearth_core::backup::{Content, Tool};
use hearth_core::doctor::{Identity, ItemKind};
use hearth_core::host::{ErrorClass, Host as _, HostError, Pace, SlotRelease};
use hearth_core::layout::Layout;
use hearth_core::network::SlotIndex;
use hearth_core::reclaim_plan::Action;
use hearth_core::resource::Resource;
use hearth_host::backup::{Backups, Taken};
use hearth_host::kernel_host::KernelHost;
use hearth_host::net::rules::{self, Backend};
use hearth_host::reclaim::{self, Done};

use super::{BATCH, Hands, Order, Outcome};

/// How long one thing may take to go after it was asked to.
const WITHIN: Duration = Duration::from_secs(60);

/// How long an empty cgroup may take to be removed: a process leaves it a moment after its end.
const EMPTY: Duration = Duration::from_secs(3);

/// Whose things are removed.
pub(crate) enum Target {
    /// An instance of ours: whoever makes these hands holds its lock.
    Own(Box<KernelHost>),
    /// Another orchestrator.
    Other(Box<Layout>),
}

/// Hands on the kernel.
pub(crate) struct KernelHands {
    target: Target,
    backups: Option<Backups>,
    /// The rules as they were before the first was removed.
    saved: OnceLock<Result<Taken, String>>,
}

impl Hands for KernelHands {
    fn remove(&self, batch: &[&Action], order: &Order) -> Vec<Outcome> {
        let Some(first) = batch.first() else { return Vec::new() };
        match (&self.target, first.kind) {
            (_, ItemKind::Rule) => self.remove_rules(batch),
            (Target::Own(host), ItemKind::Netns | ItemKind::Veth) => own_slots(host, batch, order),
            (Target::Other(layout), ItemKind::Netns) => {
                let slots: Vec<(u32, Identity)> =
                    batch.iter().map(|a| (a.slot.unwrap_or_default(), a.identity.clone())).collect();
                reclaim::remove_namespaces(layout, &slots, WITHIN).into_iter().map(outcome).collect()
            }
            _ => std::thread::scope(|scope| {
                let running: Vec<_> =
                    batch.iter().map(|action| scope.spawn(|| outcome(self.one(action, order)))).collect();
                let panicked = |_| Outcome::Failed("its thread panicked".into());
                running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
            }),
        }
    }
}

impl KernelHands {
    /// Hands that save the host's rules to `backups` before they remove the first.
    pub(crate) fn new(target: Target, backups: Option<Backups>) -> Self {
        Self { target, backups, saved: OnceLock::new() }
    }

    /// The backup, if rules were to be removed.
    pub(crate) fn backup(&self) -> Option<&Taken> {
        self.saved.get()?.as_ref().ok()
    }

    /// Rules that are not saved are not removed: there would be no way back.
    fn save_rules(&self, backend: Backend) -> Result<(), String> {
        let Some(backups) = &self.backups else { return Ok(()) };
        let saved = self.saved.get_or_init(|| {
            let reason = match &self.target {
                Target::Own(_) => "hearth reclaim".to_owned(),
                Target::Other(layout) => format!("hearth reclaim --layout {}", layout.name),
            };
            let place = backups.dir.display();
            backups.take(&reason, None).map_err(|e| format!("the rules cannot be saved in {place}: {e}"))
        });
        let tool = match backend {
            Backend::IptablesNft => Tool::IptablesNft,
            Backend::IptablesLegacy => Tool::IptablesLegacy,
            Backend::Nft => Tool::Nft,
        };
        let parts = &saved.as_ref().map_err(Clone::clone)?.backup.parts;
        match parts.iter().find(|p| p.tool == tool).map(|p| &p.content) {
            Some(Content::Absent(why)) => Err(format!("the rules of {tool} cannot be saved: {why}")),
            _ => Ok(()),
        }
    }

    /// All of one table in one transaction.
    fn remove_rules(&self, batch: &[&Action]) -> Vec<Outcome> {
        let Some(Identity::Rule { backend, table }) = batch.first().map(|a| &a.identity) else {
            return vec![Outcome::Failed("the plan does not say which table".into()); batch.len()];
        };
        let Some(backend) = Backend::of(backend) else {
            return vec![Outcome::Refused(format!("no back end is called {backend:?}")); batch.len()];
        };
        if let Err(why) = self.save_rules(backend) {
            return vec![Outcome::Failed(format!("not removed, since {why}")); batch.len()];
        }
        let texts: Vec<String> = batch.iter().map(|a| a.name.clone()).collect();
        let answer = outcome(rules::delete(backend, table, &texts).map(|()| Done::Removed));
        vec![answer; batch.len()]
    }

    fn one(&self, action: &Action, order: &Order) -> Result<Done, HostError> {
        let path = PathBuf::from(&action.name);
        match (action.kind, &action.identity, &self.target) {
            (ItemKind::Process, Identity::Process(process), _) => {
                reclaim::end_process(process, order.grace, WITHIN)
            }
            (ItemKind::Socket | ItemKind::Fifo | ItemKind::File, identity, _) => {
                reclaim::unlink(&path, identity)
            }
            (ItemKind::Cgroup, identity, Target::Other(_)) => reclaim::remove_cgroup(&path, identity, EMPTY),
            (ItemKind::Cgroup, identity, Target::Own(host)) => {
                let name = last_part(&path);
                release(host, &path, identity, &Resource::Cgroup { name })
            }
            (ItemKind::Directory, identity, Target::Own(host)) => {
                let resource = Resource::Directory { path: path.clone() };
                release(host, &path, identity, &resource)
            }
            (kind, ..) => Err(HostError {
                verb: "release",
                what: format!("{kind} {}", action.name),
                why: "things of this kind are not removed by a plan".into(),
                class: ErrorClass::Refused,
                source: None,
            }),
        }
    }
}

fn release(
    host: &KernelHost,
    path: &Path,
    identity: &Identity,
    resource: &Resource,
) -> Result<Done, HostError> {
    if reclaim::prove(path, identity)?.is_none() {
        return Ok(Done::Gone);
    }
    host.release(resource, WITHIN).map(|()| Done::Removed)
}

/// Whole slots of ours, by the one way there is to release them.
fn own_slots(host: &KernelHost, batch: &[&Action], order: &Order) -> Vec<Outcome> {
    let layout = &host.config().layout;
    let mut outcomes: Vec<Option<Outcome>> = vec![None; batch.len()];
    let mut slots = Vec::new();
    for (n, action) in batch.iter().enumerate() {
        let Some(slot) = action.slot.and_then(SlotIndex::new) else {
            outcomes[n] = Some(Outcome::Failed("the plan names no slot".into()));
            continue;
        };
        // A link alone was held against the fresh look by its index; its release proves it by its alias.
        let proven = match action.kind {
            ItemKind::Netns => reclaim::prove(&layout.netns_path(slot), &action.identity),
            _ => Ok(Some(())),
        };
        match proven {
            Ok(Some(())) => slots.push(slot),
            Ok(None) => outcomes[n] = Some(Outcome::Gone),
            Err(e) => outcomes[n] = Some(outcome(Err(e))),
        }
    }
    let (spared, pace) = (BTreeSet::new(), || Pace::AtMost(BATCH));
    let release = SlotRelease { within: WITHIN, grace: order.grace, spared: &spared, pace: &pace };
    host.release_slots(&slots, &release, &mut |slot, result| {
        let at = batch.iter().position(|a| a.slot == Some(slot.get()));
        if let Some(at) = at {
            outcomes[at] = Some(outcome(result.map(|()| Done::Removed)));
        }
    });
    let lost = || Outcome::Failed("no answer came".into());
    outcomes.into_iter().map(|o| o.unwrap_or_else(lost)).collect()
}

fn outcome(result: Result<Done, HostError>) -> Outcome {
    match result {
        Ok(Done::Removed) => Outcome::Removed,
        Ok(Done::Gone) => Outcome::Gone,
        Err(e) if matches!(e.class, ErrorClass::Foreign | ErrorClass::Refused) => {
            Outcome::Refused(e.to_string())
        }
        Err(e) => Outcome::Failed(e.to_string()),
    }
}

fn last_part(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}
