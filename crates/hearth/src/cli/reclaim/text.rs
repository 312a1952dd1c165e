//! Plans and what became of them, as text and as JSON.

use std::collections::BTreeMap;
use std::path::Path;

use hearth_core::doctor::{ItemKind, State};
use hearth_core::reclaim_plan::{Action, ReclaimPlan, words};
use serde_json::{Value, json};

use super::super::doctor::text::{width, wrapped};
use super::super::view;
use crate::doctor::Diagnosis;
use crate::reclaim::Outcome;

const INDENT: &str = "      ";
/// More actions than this are not told one by one as long as they go well.
const MANY: usize = 100;

/// What would be done.
pub(super) fn plan(plan: &ReclaimPlan, diagnosis: &Diagnosis, to: Option<&Path>) -> String {
    let width = width();
    let mut text = String::new();
    for action in &plan.actions {
        let Action { number, kind, name, does, evidence, goes_with, identity, .. } = action;
        text.push_str(&format!("{number:>4}  {kind:<9} {name}\n"));
        text.push_str(&wrapped(INDENT, INDENT, &evidence.join("; "), width));
        let known = format!("{does}; known again by {}", words(identity));
        text.push_str(&wrapped(INDENT, INDENT, &known, width));
        if !goes_with.is_empty() {
            text.push_str(&wrapped(INDENT, INDENT, &format!("with it go {}", goes_with.join(", ")), width));
        }
    }
    let not = |state: State| diagnosis.items.iter().filter(|i| i.state == state).count();
    let (unknown, stuck) = (not(State::Unknown), not(State::Stuck));
    let mut end = match plan.actions.len() {
        0 => "Nothing to remove.".to_owned(),
        1 => "1 thing would be removed.".to_owned(),
        n => format!("{n} things would be removed."),
    };
    if unknown + stuck > 0 {
        end.push_str(&format!(
            " {unknown} unknown and {stuck} stuck ones are no candidates: see `hearth doctor`."
        ));
    }
    if let Some(why) = plan.unseen.first() {
        let more = plan.unseen.len() - 1;
        end.push_str(&format!(
            " Not everything could be seen, so it will be refused: {why}; and {more} more."
        ));
    }
    match to {
        Some(to) => end.push_str(&format!(" Written to {}.", to.display())),
        None if plan.actions.is_empty() => {}
        None => end.push_str(" With --out FILE it can be carried out by `hearth reclaim apply FILE`."),
    }
    text.push_str(&wrapped("", "", &end, width));
    text
}

/// Whether an outcome has a line of its own: what went wrong always, what was not wanted never.
pub(super) fn is_told(total: usize, outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Refused(_) | Outcome::Failed(_) => true,
        Outcome::Removed | Outcome::Gone => total <= MANY,
        Outcome::Skipped(_) => false,
    }
}

/// One line while it goes on.
pub(super) fn progress(action: &Action, total: usize, outcome: &Outcome) -> String {
    let why = if outcome.why().is_empty() { String::new() } else { format!(": {}", outcome.why()) };
    format!("[{}/{total}] {} {} {}{why}", action.number, outcome.as_str(), action.kind, action.name)
}

/// Numbers by kind, and what was refused or failed.
pub(super) fn outcomes(plan: &ReclaimPlan, outcomes: &[Outcome]) -> String {
    const WORDS: [&str; 5] = ["removed", "gone", "refused", "failed", "skipped"];
    let mut counts: BTreeMap<ItemKind, [usize; 5]> = BTreeMap::new();
    for (action, outcome) in plan.actions.iter().zip(outcomes) {
        let at = WORDS.iter().position(|w| *w == outcome.as_str()).unwrap_or_default();
        counts.entry(action.kind).or_default()[at] += 1;
    }
    if counts.is_empty() {
        return "Nothing to remove.\n".to_owned();
    }
    let header: Vec<String> =
        std::iter::once("KIND".to_owned()).chain(WORDS.map(str::to_uppercase)).collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let number = |n: &usize| if *n == 0 { "-".to_owned() } else { n.to_string() };
    let rows = counts
        .iter()
        .map(|(kind, counts)| std::iter::once(kind.to_string()).chain(counts.iter().map(number)).collect());
    view::table(&header, rows)
}

/// The same for programs.
pub(super) fn outcomes_json(plan: &ReclaimPlan, outcomes: &[Outcome], backup: Option<&Path>) -> Value {
    let one = |(action, outcome): (&Action, &Outcome)| {
        json!({
            "number": action.number,
            "kind": action.kind,
            "name": action.name,
            "outcome": outcome.as_str(),
            "why": outcome.why(),
        })
    };
    let count = |word: &str| outcomes.iter().filter(|o| o.as_str() == word).count();
    json!({
        "layout": plan.layout,
        "instance": plan.instance,
        "removed": count("removed"),
        "gone": count("gone"),
        "refused": count("refused"),
        "failed": count("failed"),
        "skipped": count("skipped"),
        "backup": backup,
        "outcomes": plan.actions.iter().zip(outcomes).map(one).collect::<Vec<_>>(),
    })
}
