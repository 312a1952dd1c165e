//! `hearth doctor` as a library: looks at one instance through its records, the kernel and the daemon, and puts the
//! three together. Changes nothing, and goes on where one of the three cannot be asked.

mod claims;
pub(crate) mod layouts;

use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use hearth_core::doctor::{
    self, Daemon, Disagreement, Item, ItemKind, Limit, Look, Room, State, judge, settle,
};
use hearth_core::layout::Layout;
use hearth_host::kernel_host::HostConfig;
use hearth_host::{facts, limits, process, survey};
use serde::Serialize;

use crate::config::Config;
use claims::look_up;
pub(crate) use claims::{DaemonSeen, Source};

/// How long one scan may take.
const SCAN: Duration = Duration::from_secs(15);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(400);

/// The host that was looked at.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct HostSeen {
    pub(crate) kernel: String,
    pub(crate) boot_id: Option<String>,
    /// Whether everything may be looked at.
    pub(crate) root: bool,
}

/// All that a look came to, in the form that is printed.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Diagnosis {
    pub(crate) schema: u32,
    pub(crate) layout: String,
    pub(crate) instance: String,
    pub(crate) taken_at_ms: u64,
    pub(crate) took_ms: u64,
    /// How many looks: a suspicion takes a second one.
    pub(crate) looks: u32,
    /// What only the last look saw; not listed.
    pub(crate) passing: usize,
    pub(crate) host: HostSeen,
    pub(crate) daemon: DaemonSeen,
    /// Kind → state → number.
    pub(crate) counts: BTreeMap<ItemKind, BTreeMap<State, usize>>,
    pub(crate) findings: usize,
    pub(crate) items: Vec<Item>,
    pub(crate) disagreements: Vec<Disagreement>,
    pub(crate) limits: Vec<Limit>,
    /// What could not be seen, and why.
    pub(crate) unseen: Vec<String>,
}

impl Diagnosis {
    /// Whether everything was seen and nothing found.
    pub(crate) fn is_clean(&self) -> bool {
        self.findings == 0 && self.unseen.is_empty()
    }
}

/// Where the instance's things are.
pub(crate) fn host_config(config: &Config) -> HostConfig {
    HostConfig {
        layout: config.slot_layout(),
        state_dir: config.instance_state_dir(),
        run_dir: config.instance_run_dir(),
    }
}

/// Looks at this project's own instance.
pub(crate) async fn diagnose(config: &Config, source: &Source) -> Diagnosis {
    let begun = Instant::now();
    let (last, looks, passing) = twice(|| look(config, source)).await;
    let (subject, pid) = (config.clone(), last.daemon.pid);
    let limits = blocking(move || {
        let state_dir = subject.instance_state_dir();
        let slots = u64::from(subject.network.cidr.slot_capacity());
        limits::look(&limits::Subject { slots, state_dir: &state_dir, daemon: pid })
    })
    .await
    .unwrap_or_default();
    let about = About { layout: "hearth", instance: config.instance.as_str(), begun, looks, passing };
    assemble(last, limits, &about)
}

/// Looks at a host that runs another orchestrator.
///
/// # Errors
/// If its processes cannot be listed.
pub(crate) async fn diagnose_layout(layout: &Layout) -> Result<Diagnosis, String> {
    let begun = Instant::now();
    let (last, looks, passing) = twice(|| look_layout(layout)).await;
    let slots = u64::from(layout.slots.last - layout.slots.first + 1);
    let pid = last.daemon.pid;
    let limits = blocking(move || {
        limits::look(&limits::Subject { slots, state_dir: std::path::Path::new("/"), daemon: pid })
    })
    .await?;
    let about = About { layout: &layout.name, instance: "", begun, looks, passing };
    Ok(assemble(last, limits, &about))
}

/// One look, and a second one if it is suspicious: what that came to, how many there were, and what was passing.
async fn twice<F: Future<Output = Looked>>(look: impl Fn() -> F) -> (Looked, u32, usize) {
    let first = look().await;
    if !first.look.is_suspicious() {
        return (first, 1, 0);
    }
    tokio::time::sleep(PAUSE).await;
    let mut second = look().await;
    let (settled, passing) = settle(&first.look, second.look);
    second.look = settled;
    // What one of the looks could not see is not confirmed.
    second.unseen.extend(first.unseen);
    second.unseen.sort();
    second.unseen.dedup();
    (second, 2, passing)
}

/// What a diagnosis is about, and how it came about.
struct About<'a> {
    layout: &'a str,
    instance: &'a str,
    begun: Instant,
    looks: u32,
    passing: usize,
}

fn assemble(last: Looked, limits: Vec<Limit>, about: &About<'_>) -> Diagnosis {
    let Look { items, disagreements } = last.look;
    let mut counts: BTreeMap<ItemKind, BTreeMap<State, usize>> = BTreeMap::new();
    for item in &items {
        *counts.entry(item.kind).or_default().entry(item.state).or_default() += 1;
    }
    let findings = items.iter().filter(|i| i.state.is_finding()).count()
        + disagreements.len()
        + limits.iter().filter(|l| l.result == Room::Fail).count();
    Diagnosis {
        schema: doctor::SCHEMA,
        layout: about.layout.to_owned(),
        instance: about.instance.to_owned(),
        taken_at_ms: crate::cli::now_ms(),
        took_ms: u64::try_from(about.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        looks: about.looks,
        passing: about.passing,
        host: host_seen(),
        daemon: last.daemon,
        counts,
        findings,
        items,
        disagreements,
        limits,
        unseen: last.unseen,
    }
}

async fn look_layout(layout: &Layout) -> Looked {
    let wanted = layout.clone();
    let taken = blocking(move || survey::other::take(&wanted, SCAN)).await;
    let (survey, daemons) = match taken.and_then(|taken| taken.map_err(|e| format!("process: /proc: {e}"))) {
        Ok((survey, daemons)) => (survey, daemons),
        Err(why) => {
            // Without the processes nothing can be said of anything.
            let daemon =
                DaemonSeen { state: "silent", pid: None, address: String::new(), why: Some(why.clone()) };
            return Looked { look: Look::default(), daemon, unseen: vec![why] };
        }
    };
    let state = if daemons.is_empty() { "down" } else { "up" };
    let pid = daemons.first().map(|(pid, _)| *pid);
    let daemon = DaemonSeen { state, pid, address: String::new(), why: None };
    let look = hearth_core::layout::judge(layout, survey.scene, &daemons);
    Looked { look, daemon, unseen: survey.unseen }
}

pub(crate) fn host_seen() -> HostSeen {
    HostSeen {
        kernel: facts::kernel_release(),
        boot_id: process::boot_id().ok().map(str::to_owned),
        root: facts::is_root(),
    }
}

struct Looked {
    look: Look,
    daemon: DaemonSeen,
    unseen: Vec<String>,
}

async fn look(config: &Config, source: &Source) -> Looked {
    let before = look_up(config, source).await;
    let host = host_config(config);
    let mut unseen = before.unseen;
    let scene = match blocking(move || survey::take(&host, SCAN)).await {
        Ok(survey) => {
            unseen.extend(survey.unseen);
            survey.scene
        }
        Err(why) => {
            unseen.push(why);
            doctor::Scene::default()
        }
    };
    let after = look_up(config, source).await;
    unseen.extend(after.unseen);
    unseen.sort();
    unseen.dedup();
    // A daemon that was silent at one of the two looks is not asked for what it has.
    let daemon = match (&before.daemon, &after.daemon) {
        (Daemon::Silent(why), _) => Daemon::Silent(why.clone()),
        (Daemon::Up, Daemon::Down) | (Daemon::Down, Daemon::Up) => {
            Daemon::Silent("it began or ended during the look".into())
        }
        (_, after) => after.clone(),
    };
    Looked { look: judge(scene, &before.claims, &after.claims, &daemon), daemon: after.seen, unseen }
}

/// Runs what may block on a thread that may.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.map_err(|e| format!("a look failed: {e}"))
}
