//! `hearth reclaim` as a library: makes a plan, and carries one out. Each action is held against a fresh diagnosis and
//! is known again right before it is done; an error never stops the rest.

mod hands;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use hearth_core::doctor::{Identity, ItemKind};
use hearth_core::reclaim_plan::{Action, Here, ReclaimPlan, SCHEMA, Verdict, actions, elsewhere, verify};

use crate::doctor::Diagnosis;
pub(crate) use hands::{KernelHands, Target};

/// Namespaces that go together.
const BATCH: usize = 64;

/// How a plan is carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    /// Most to remove; the rest is left.
    pub(crate) max: Option<usize>,
    /// Processes, files and cgroups at once.
    pub(crate) parallel: usize,
    /// Between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
}

/// What became of an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Removed,
    /// Before it was its turn.
    Gone,
    /// Not touched: why.
    Refused(String),
    Failed(String),
    /// Not asked for: why.
    Skipped(String),
}

impl Outcome {
    pub(crate) fn as_str(&self) -> &'static str {
        match self {
            Outcome::Removed => "removed",
            Outcome::Gone => "gone",
            Outcome::Refused(_) => "refused",
            Outcome::Failed(_) => "failed",
            Outcome::Skipped(_) => "skipped",
        }
    }

    pub(crate) fn why(&self) -> &str {
        match self {
            Outcome::Removed | Outcome::Gone => "",
            Outcome::Refused(why) | Outcome::Failed(why) | Outcome::Skipped(why) => why,
        }
    }
}

/// What does the removing.
pub(crate) trait Hands: Sync {
    /// Does actions of one kind that go together; one answer each, in their order.
    fn remove(&self, batch: &[&Action], order: &Order) -> Vec<Outcome>;
}

/// Whether an action is wanted; an error ends the questions and skips the rest.
pub(crate) type Asked<'a> = dyn FnMut(&Action) -> Result<bool, String> + 'a;

/// A plan of what a diagnosis calls leaked.
pub(crate) fn plan(diagnosis: &Diagnosis, here: Here) -> ReclaimPlan {
    ReclaimPlan {
        schema: SCHEMA,
        layout: diagnosis.layout.clone(),
        instance: diagnosis.instance.clone(),
        made_at_ms: diagnosis.taken_at_ms,
        here,
        actions: actions(&diagnosis.items),
        unseen: diagnosis.unseen.clone(),
    }
}

/// Why a plan may not be carried out at all; nothing if it may.
pub(crate) fn refusal(plan: &ReclaimPlan, here: &Here, now: &Diagnosis) -> Option<String> {
    if plan.schema != SCHEMA {
        return Some(format!("its form is {}, this program knows {SCHEMA}; make a new one", plan.schema));
    }
    if (&plan.layout, &plan.instance) != (&now.layout, &now.instance) {
        return Some(format!(
            "it is for layout {} {}, which is not what is configured",
            plan.layout, plan.instance
        ));
    }
    let unseen = plan.unseen.first().or(now.unseen.first());
    elsewhere(&plan.here, here)
        .map(str::to_owned)
        .or_else(|| unseen.map(|why| format!("not everything could be seen, so nothing is removed: {why}")))
}

/// Carries a plan out. Tells of each action once, and answers with all outcomes in the plan's order.
pub(crate) fn apply(
    plan: &ReclaimPlan,
    now: &Diagnosis,
    hands: &impl Hands,
    order: &Order,
    asked: &mut Asked<'_>,
    tell: &mut dyn FnMut(&Action, &Outcome),
) -> Vec<Outcome> {
    let items: HashMap<(ItemKind, &str), _> =
        now.items.iter().map(|i| ((i.kind, i.name.as_str()), i)).collect();
    let rules = rules_by_text(now);
    let mut outcomes: Vec<Option<Outcome>> = vec![None; plan.actions.len()];
    let mut due: Vec<usize> = Vec::new();
    let mut ended: Option<String> = None;
    for (n, action) in plan.actions.iter().enumerate() {
        let verdict = match action.kind {
            // Two rules may have the same text, which alone is not their name then.
            ItemKind::Rule if rules.contains_key(&rule_of(action)) => Verdict::Due,
            _ => verify(action, &items),
        };
        let outcome = match verdict {
            Verdict::Gone => Some(Outcome::Gone),
            Verdict::Refused(why) => Some(Outcome::Refused(why)),
            Verdict::Due if ended.is_some() => ended.clone().map(Outcome::Skipped),
            Verdict::Due if order.max.is_some_and(|max| due.len() >= max) => {
                Some(Outcome::Skipped(format!("--max {}", order.max.unwrap_or_default())))
            }
            Verdict::Due => match asked(action) {
                Ok(true) => None,
                Ok(false) => Some(Outcome::Skipped("not wanted".into())),
                Err(why) => {
                    ended = Some(why.clone());
                    Some(Outcome::Skipped(why))
                }
            },
        };
        match outcome {
            Some(outcome) => {
                tell(action, &outcome);
                outcomes[n] = Some(outcome);
            }
            None => due.push(n),
        }
    }
    for batch in batches(&due, &plan.actions, order.parallel) {
        let actions: Vec<&Action> = batch.iter().map(|n| &plan.actions[*n]).collect();
        for (n, outcome) in batch.iter().zip(hands.remove(&actions, order)) {
            tell(&plan.actions[*n], &outcome);
            outcomes[*n] = Some(outcome);
        }
    }
    let lost = || Outcome::Failed("no answer came".into());
    outcomes.into_iter().map(|o| o.unwrap_or_else(lost)).collect()
}

/// Back end, table and text.
fn rule_of(action: &Action) -> (String, String, String) {
    match &action.identity {
        Identity::Rule { backend, table } => (backend.clone(), table.clone(), action.name.clone()),
        _ => (String::new(), String::new(), action.name.clone()),
    }
}

/// The leaked rules of a diagnosis.
fn rules_by_text(now: &Diagnosis) -> BTreeMap<(String, String, String), usize> {
    let mut found = BTreeMap::new();
    for item in &now.items {
        if let (Identity::Rule { backend, table }, hearth_core::doctor::State::Leaked) =
            (&item.identity, item.state)
        {
            *found.entry((backend.clone(), table.clone(), item.name.clone())).or_default() += 1;
        }
    }
    found
}

/// What goes together: all rules of a table, a batch of namespaces, of the rest as many as may go at once.
fn batches(due: &[usize], actions: &[Action], parallel: usize) -> Vec<Vec<usize>> {
    let mut batches: Vec<Vec<usize>> = Vec::new();
    for n in due {
        let action = &actions[*n];
        let limit = match action.kind {
            ItemKind::Rule => usize::MAX,
            ItemKind::Netns | ItemKind::Veth => BATCH,
            _ => parallel.max(1),
        };
        let fits = |batch: &Vec<usize>| {
            let first = &actions[batch[0]];
            let same_table = action.kind != ItemKind::Rule || first.identity == action.identity;
            first.kind == action.kind && same_table && batch.len() < limit
        };
        // Rules of one table need not stand together in the plan.
        match batches.iter().rposition(fits) {
            Some(at) if action.kind == ItemKind::Rule || at + 1 == batches.len() => batches[at].push(*n),
            _ => batches.push(vec![*n]),
        }
    }
    batches
}

#[cfg(test)]
mod tests;
