//! `hearth reclaim restore`: shows how the firewall rules differ from those of a backup, and puts them back when that is
//! wanted. What was shown is what is done: rules that change meanwhile end it.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use hearth_core::backup::changes::{Change, Comparison, compare};
use hearth_core::backup::{Backup, Part};
use hearth_host::backup::{host_name, load};
use hearth_host::net::rulesets;
use serde_json::{Value, json};

use super::super::configured::StateArgs;
use super::super::doctor::text::{width, wrapped};
use super::super::error::{self, CliError};
use super::super::{Context, out};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth reclaim restore /var/lib/hearth/backups/20260101T120000.000-default-812.rules
  hearth reclaim restore --yes FILE
  hearth reclaim restore --json FILE | jq -r '.changes[].diff'

Without --yes it asks; where nobody can be asked it only shows. The exit code is 1
if something differs and was not put back.";

const WHAT: &str = "cannot restore";
/// Lines of one table's difference that a person is shown.
const SHOWN: usize = 40;

/// Arguments of `hearth reclaim restore`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct RestoreArgs {
    #[command(flatten)]
    state: StateArgs,
    /// The backup
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Put the rules back without a question
    #[arg(long)]
    yes: bool,
}

/// Runs it.
pub(super) fn run(args: &RestoreArgs, context: &Context) -> Result<u8, CliError> {
    let config = args.state.load()?.config;
    let backup = load(&args.file).map_err(|e| {
        let todo = format!("backups are in {}", config.state_dir.join("backups").display());
        CliError::usage(args.file.display().to_string(), e.to_string()).todo(todo)
    })?;
    let foreign = (backup.header.host != host_name())
        .then(|| format!("it is of host {}, and this is {}", backup.header.host, host_name()));
    let found = compare(&backup, &rulesets::read());
    if !context.json {
        out::print(&shown(&backup, &found, foreign.as_deref()))?;
    }
    let wanted = !found.changes.is_empty() && wanted(args, foreign.as_deref(), context)?;
    let (mut outcomes, mut before) = (vec![], None);
    if wanted {
        if let Some(backups) = config.backups() {
            let reason = format!("hearth reclaim restore {}", args.file.display());
            let taken = backups.take(&reason, Some(&args.file));
            let taken = taken.map_err(|e| {
                CliError::failed(WHAT, format!("the rules that are there cannot be saved first: {e}"))
            })?;
            before = Some(taken.path);
        }
        // Scripts name rules by their place.
        if compare(&backup, &rulesets::read()) != found {
            return Err(CliError::failed(WHAT, "somebody changed the rules meanwhile, so nothing was done")
                .todo("run it again"));
        }
        outcomes = restore(&backup, &found.changes);
    }
    report(&backup, &found, &outcomes, before.as_deref(), context)?;
    let all = outcomes.len() == found.changes.len() && outcomes.iter().all(Result::is_ok);
    Ok(if all && found.unseen.is_empty() { error::OK } else { error::FAILED })
}

fn wanted(args: &RestoreArgs, foreign: Option<&str>, context: &Context) -> Result<bool, CliError> {
    if args.yes {
        return match foreign {
            Some(why) => {
                Err(CliError::failed(WHAT, why).todo("run it without --yes, and look at what differs"))
            }
            None => Ok(true),
        };
    }
    if context.json {
        return Ok(false);
    }
    if !std::io::stdin().is_terminal() {
        out::note("nobody can be asked here, so nothing is changed; give --yes to have the rules put back");
        return Ok(false);
    }
    let mut answer = String::new();
    std::io::stderr().write_all(b"Put these rules back? [y]es, [n]o: ")?;
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

/// One script after the other, past errors; then a look whether each table is what it was.
fn restore(backup: &Backup, changes: &[Change]) -> Vec<Result<(), String>> {
    let done: Vec<_> = changes.iter().map(|c| rulesets::carry_out(c.tool, &c.script)).collect();
    let now = rulesets::read();
    changes
        .iter()
        .zip(done)
        .map(|(change, done)| {
            done.map_err(|e| format!("nothing of it was changed: {e}"))?;
            match text(&now, change) == text(&backup.parts, change) {
                true => Ok(()),
                false => {
                    Err("it was put back, and is not what it was: the program understands some of its rules \
                     in another way, or somebody changes them; run it again to see what differs"
                        .into())
                }
            }
        })
        .collect()
}

fn text<'a>(parts: &'a [Part], change: &Change) -> Option<&'a str> {
    let part = parts.iter().find(|p| p.tool == change.tool)?;
    part.tables().into_iter().find(|t| t.name == change.table).map(|t| t.text)
}

fn shown(backup: &Backup, found: &Comparison, foreign: Option<&str>) -> String {
    let (header, width) = (&backup.header, width());
    let mut shown = wrapped(
        "",
        "",
        &format!("Backup of {} on {}, taken before: {}", header.taken_at, header.host, header.reason),
        width,
    );
    for change in &found.changes {
        let Change { tool, table, added, removed, diff, .. } = change;
        shown.push_str(&format!("\n{tool} table {table}: {added} lines come back, {removed} go\n"));
        // The two lines of file names say nothing here.
        let lines: Vec<&str> =
            diff.lines().filter(|l| !l.starts_with("---") && !l.starts_with("+++")).collect();
        lines.iter().take(SHOWN).for_each(|line| shown.push_str(&format!("  {line}\n")));
        if lines.len() > SHOWN {
            shown.push_str(&format!("  and {} lines more, which --json shows\n", lines.len() - SHOWN));
        }
    }
    if found.changes.is_empty() {
        shown.push_str("Nothing differs that can be put back.\n");
    }
    let not_put_back = found.unseen.iter().map(|why| format!("Not put back: {why}"));
    let stays = found.left.iter().map(|why| format!("Stays as it is: {why}"));
    let foreign = foreign.map(|why| format!("Mind: {why}."));
    for line in not_put_back.chain(stays).chain(foreign) {
        shown.push_str(&wrapped("", "  ", &line, width));
    }
    shown
}

fn report(
    backup: &Backup,
    found: &Comparison,
    outcomes: &[Result<(), String>],
    before: Option<&Path>,
    context: &Context,
) -> Result<(), CliError> {
    if context.json {
        return out::json(&report_json(backup, found, outcomes, before));
    }
    for (change, outcome) in found.changes.iter().zip(outcomes) {
        match outcome {
            Ok(()) => out::line(&format!("restored {} table {}", change.tool, change.table))?,
            Err(why) => out::line(&format!("failed {} table {}: {why}", change.tool, change.table))?,
        }
    }
    if let Some(before) = before {
        out::line(&format!("The rules from before: hearth reclaim restore {}", before.display()))?;
    }
    Ok(())
}

fn report_json(
    backup: &Backup,
    found: &Comparison,
    outcomes: &[Result<(), String>],
    before: Option<&Path>,
) -> Value {
    let one = |(n, change): (usize, &Change)| {
        let (outcome, why) = match outcomes.get(n) {
            None => ("differs", ""),
            Some(Ok(())) => ("restored", ""),
            Some(Err(why)) => ("failed", why.as_str()),
        };
        json!({
            "tool": change.tool.as_str(),
            "table": change.table,
            "added": change.added,
            "removed": change.removed,
            "diff": change.diff,
            "outcome": outcome,
            "why": why,
        })
    };
    json!({
        "backup": backup.header,
        "changes": found.changes.iter().enumerate().map(one).collect::<Vec<_>>(),
        "left": found.left,
        "unseen": found.unseen,
        "before": before,
    })
}
