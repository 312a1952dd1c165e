//! `hearth reclaim`: plans what an operator removes, and carries a plan out: alone under a lock, or by the daemon
//! where one of the instance runs. There are never two that reclaim.

mod ask;
mod restore;
mod text;

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Subcommand;
use hearth_api::v1::ReconcileRequest;
use hearth_core::doctor::ItemKind;
use hearth_core::layout::Layout;
use hearth_core::reclaim_plan::{Action, ReclaimPlan, Verdict, verify};
use hearth_host::cgroup::Cgroups;
use hearth_host::kernel_host::KernelHost;
use hearth_host::lock::{InstanceClaim, InstanceLock};
use hearth_host::reclaim::here;

use super::client::Client;
use super::doctor::{LookArgs, source};
use super::error::{self, CliError};
use super::{Context, out, parse};
use crate::config::Config;
use crate::doctor::{Diagnosis, host_config};
use crate::reclaim::{KernelHands, Order, Outcome, Target, apply, plan, refusal};

/// How long the daemon is asked again to release what is planned: it wants to see a leak twice, and some age.
const BY_DAEMON: Duration = Duration::from_secs(120);
/// Between two times.
const AGAIN: Duration = Duration::from_secs(1);
/// What must be released, in words.
const WHAT: &str = "cannot reclaim";

/// The commands.
#[derive(Debug, Subcommand)]
pub(super) enum ReclaimCommand {
    /// Show what would be removed, in which order, and why; changes nothing
    #[command(
        after_help = "Examples:\n  hearth reclaim plan\n  hearth reclaim plan --layout e2b --out plan.json"
    )]
    Plan {
        #[command(flatten)]
        look: LookArgs,
        /// Write the plan to this file, for `hearth reclaim apply`
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Remove what a plan names and is still nobody's
    #[command(
        after_help = "Examples:\n  hearth reclaim apply plan.json\n  hearth reclaim apply --interactive --layout e2b\n  hearth reclaim apply --yes --max 50 --layout e2b\n\nThe exit code is 1 if something was refused or did not go."
    )]
    Apply(Box<ApplyArgs>),
    /// Show how the host's firewall rules differ from a backup, and put them back
    #[command(after_help = restore::EXAMPLES)]
    Restore(restore::RestoreArgs),
}

/// Arguments of `hearth reclaim apply`.
#[derive(Debug, clap::Args)]
pub(super) struct ApplyArgs {
    #[command(flatten)]
    look: LookArgs,
    /// A plan of `hearth reclaim plan --out`; without one a plan is made now
    #[arg(value_name = "PLAN")]
    plan: Option<PathBuf>,
    /// Ask for each thing, or for all of a kind
    #[arg(long, conflicts_with = "yes")]
    interactive: bool,
    /// Carry out a plan that is made now, without a question
    #[arg(long, conflicts_with = "plan")]
    yes: bool,
    /// Remove at most so many
    #[arg(long, value_name = "N")]
    max: Option<usize>,
    /// From SIGTERM to SIGKILL
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = parse::timeout)]
    grace: u64,
    /// Processes, files and cgroups at once
    #[arg(long, value_name = "N", default_value_t = 1)]
    parallel: usize,
}

/// Runs one.
pub(super) async fn run(command: ReclaimCommand, context: &Context) -> Result<u8, CliError> {
    match command {
        ReclaimCommand::Plan { look, out } => make(&look, out.as_deref(), context).await,
        ReclaimCommand::Apply(args) => carry_out(&args, context).await,
        ReclaimCommand::Restore(args) => restore::run(&args, context),
    }
}

async fn make(look: &LookArgs, to: Option<&Path>, context: &Context) -> Result<u8, CliError> {
    let diagnosis = look.diagnose(context).await?;
    let here = here().map_err(|e| CliError::failed("cannot plan", e.to_string()))?;
    let plan = plan(&diagnosis, here);
    if let Some(to) = to {
        save(&plan, to)?;
    }
    if context.json {
        out::json(&plan)?;
    } else {
        out::print(&text::plan(&plan, &diagnosis, to))?;
    }
    Ok(error::OK)
}

fn save(plan: &ReclaimPlan, to: &Path) -> Result<(), CliError> {
    let failed =
        |e: std::io::Error| CliError::failed(format!("cannot write {}", to.display()), e.to_string());
    let text = serde_json::to_string_pretty(plan).map_err(|e| failed(e.into()))?;
    let mut file = fs::OpenOptions::new();
    let mut file = file.write(true).create(true).truncate(true).mode(0o600).open(to).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n")).map_err(failed)
}

fn load(from: &Path) -> Result<ReclaimPlan, CliError> {
    let bad = |why: String| {
        CliError::usage(from.display().to_string(), why).todo("make a plan with `hearth reclaim plan --out`")
    };
    let text = fs::read(from).map_err(|e| bad(e.to_string()))?;
    serde_json::from_slice(&text).map_err(|e| bad(format!("it is no plan: {e}")))
}

async fn carry_out(args: &ApplyArgs, context: &Context) -> Result<u8, CliError> {
    if args.plan.is_none() && !args.interactive && !args.yes {
        let why = "name a plan, or ask for --interactive or --yes";
        return Err(CliError::usage("reclaim apply", why));
    }
    let planned = args.plan.as_deref().map(load).transpose()?;
    let config = args.look.loaded()?.config;
    let layout = args.look.layout()?;
    if layout.is_none() {
        let seen = args.look.diagnose(context).await?;
        match seen.daemon.state {
            "up" => return by_daemon(args, planned, seen, &config, context).await,
            "silent" => {
                let why = seen.daemon.why.unwrap_or_default();
                return Err(CliError::failed(WHAT, why).todo("end that daemon, or wait until it answers"));
            }
            _ => {}
        }
    }
    let held = Held::take(&config, layout.as_ref())?;
    // Looked at again under the lock: from here on nobody else releases.
    let done = with_lock(args, planned, layout, &config, context).await;
    let freed = held.release();
    let (plan, outcomes, backup) = done?;
    freed?;
    show(&plan, &outcomes, backup.as_deref(), context)
}

async fn with_lock(
    args: &ApplyArgs,
    planned: Option<ReclaimPlan>,
    layout: Option<Layout>,
    config: &Config,
    context: &Context,
) -> Result<(ReclaimPlan, Vec<Outcome>, Option<PathBuf>), CliError> {
    let now = args.look.diagnose(context).await?;
    let place = here().map_err(|e| CliError::failed(WHAT, e.to_string()))?;
    let plan = planned.unwrap_or_else(|| plan(&now, place.clone()));
    if let Some(why) = refusal(&plan, &place, &now) {
        return Err(CliError::failed("nothing is removed", why));
    }
    let target = match layout {
        Some(layout) => Target::Other(Box::new(layout)),
        None => {
            let host =
                KernelHost::new(host_config(config)).map_err(|e| CliError::failed(WHAT, e.to_string()))?;
            Target::Own(Box::new(host))
        }
    };
    let hands = KernelHands::new(target, config.backups());
    let order = Order { max: args.max, parallel: args.parallel, grace: Duration::from_secs(args.grace) };
    let (interactive, json) = (args.interactive, context.json);
    let work = move || {
        let mut questions = ask::Questions::new(plan.actions.len());
        let mut asked = |action: &Action| match interactive {
            true => questions.ask(action, &mut std::io::stdin().lock(), &mut std::io::stderr()),
            false => Ok(true),
        };
        let total = plan.actions.len();
        let mut tell = |action: &Action, outcome: &Outcome| {
            if !json && text::is_told(total, outcome) {
                out::note_raw(&text::progress(action, total, outcome));
            }
        };
        let outcomes = apply(&plan, &now, &hands, &order, &mut asked, &mut tell);
        let backup = hands.backup().map(|taken| taken.path.clone());
        (plan, outcomes, backup)
    };
    tokio::task::spawn_blocking(work).await.map_err(|e| CliError::failed(WHAT, e.to_string()))
}

/// Nobody else reclaims while this is held.
enum Held {
    /// An instance of ours, without a daemon: its lock and its name.
    Own(InstanceLock, InstanceClaim),
    /// Another orchestrator's host.
    Other(InstanceLock),
}

impl Held {
    fn take(config: &Config, layout: Option<&Layout>) -> Result<Self, CliError> {
        let failed = |e: hearth_host::lock::LockError| CliError::failed(WHAT, e.to_string());
        if let Some(layout) = layout {
            let place = config.run_dir.join(format!("reclaim-{}", layout.name.replace('/', "-")));
            return InstanceLock::acquire(&place).map(Held::Other).map_err(failed);
        }
        let lock = InstanceLock::acquire(&config.instance_run_dir()).map_err(failed)?;
        let cgroups = Cgroups::locate(&config.instance).map_err(|e| CliError::failed(WHAT, e.to_string()))?;
        let claim = InstanceClaim::acquire(cgroups.root()).map_err(failed)?;
        Ok(Held::Own(lock, claim))
    }

    fn release(self) -> Result<(), CliError> {
        let lock = match self {
            Held::Own(lock, claim) => {
                drop(claim);
                lock
            }
            Held::Other(lock) => lock,
        };
        lock.remove().map_err(|e| CliError::failed("the lock stays", e.to_string()))
    }
}

/// Asks the daemon to release what leaked until nothing of the plan is left.
async fn by_daemon(
    args: &ApplyArgs,
    planned: Option<ReclaimPlan>,
    seen: Diagnosis,
    config: &Config,
    context: &Context,
) -> Result<u8, CliError> {
    if args.interactive || args.max.is_some() {
        let why = "the instance's daemon runs, and releases all that leaked by itself";
        return Err(CliError::usage("--interactive, --max", why)
            .todo("leave them out, or see `hearth node reconcile`"));
    }
    let place = here().map_err(|e| CliError::failed(WHAT, e.to_string()))?;
    let plan = planned.unwrap_or_else(|| plan(&seen, place.clone()));
    if let Some(why) = refusal(&plan, &place, &seen) {
        return Err(CliError::failed("nothing is removed", why));
    }
    if !context.json && !plan.actions.is_empty() {
        out::note("the instance's daemon runs; it is asked to release what leaked");
    }
    let client = Client::connect(&source(config, context).addr, context.json).await?;
    let first = standing(&plan, &seen);
    let (deadline, mut now) = (Instant::now() + BY_DAEMON, seen);
    while standing(&plan, &now).contains(&Verdict::Due) && Instant::now() < deadline {
        let failed = |s| CliError::from_status("the daemon cannot reconcile", &s);
        client.nodes().reconcile(ReconcileRequest { dry_run: false }).await.map_err(failed)?;
        tokio::time::sleep(AGAIN).await;
        now = args.look.diagnose(context).await?;
    }
    let late = || {
        format!("the daemon did not release it within {} s; see `hearth node reconcile`", BY_DAEMON.as_secs())
    };
    let outcomes: Vec<Outcome> = first
        .into_iter()
        .zip(standing(&plan, &now))
        .map(|(before, after)| match (before, after) {
            (Verdict::Gone, _) => Outcome::Gone,
            (Verdict::Refused(why), _) => Outcome::Refused(why),
            (Verdict::Due, Verdict::Due) => Outcome::Failed(late()),
            // Another thing that has its name by now is a new one.
            (Verdict::Due, _) => Outcome::Removed,
        })
        .collect();
    show(&plan, &outcomes, None, context)
}

/// How each action stands.
fn standing(plan: &ReclaimPlan, now: &Diagnosis) -> Vec<Verdict> {
    let items: HashMap<(ItemKind, &str), _> =
        now.items.iter().map(|i| ((i.kind, i.name.as_str()), i)).collect();
    plan.actions.iter().map(|action| verify(action, &items)).collect()
}

fn show(
    plan: &ReclaimPlan,
    outcomes: &[Outcome],
    backup: Option<&Path>,
    context: &Context,
) -> Result<u8, CliError> {
    if context.json {
        out::json(&text::outcomes_json(plan, outcomes, backup))?;
    } else {
        out::print(&text::outcomes(plan, outcomes))?;
        if let Some(backup) = backup {
            let backup = backup.display();
            out::line(&format!("The rules from before: hearth reclaim restore {backup}"))?;
        }
    }
    let well = outcomes.iter().all(|o| !matches!(o, Outcome::Refused(_) | Outcome::Failed(_)));
    Ok(if well { error::OK } else { error::FAILED })
}
