//! Two looks: a host with a living daemon changes while it is looked at, so what only one look saw proves nothing.

use std::collections::HashMap;

use super::{Disagreement, Item, ItemKind};

/// What one look came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Look {
    /// Everything seen.
    pub items: Vec<Item>,
    /// Where the views differ.
    pub disagreements: Vec<Disagreement>,
}

impl Look {
    /// Whether there is something that a second look has to confirm.
    #[must_use]
    pub fn is_suspicious(&self) -> bool {
        !self.disagreements.is_empty() || self.items.iter().any(|i| i.state.is_finding())
    }
}

/// Keeps of the later look what the former saw as well, and counts what came meanwhile. A finding is the same one if
/// kind, name, state and identity are; what is in order needs no confirmation.
#[must_use]
pub fn settle(former: &Look, later: Look) -> (Look, usize) {
    let suspects: HashMap<(ItemKind, &str), &Item> = former
        .items
        .iter()
        .filter(|i| i.state.is_finding())
        .map(|i| ((i.kind, i.name.as_str()), i))
        .collect();
    let confirmed = |item: &Item| {
        let former = suspects.get(&(item.kind, item.name.as_str()));
        former.is_some_and(|f| (f.state, &f.identity) == (item.state, &item.identity))
    };
    let before = later.items.len() + later.disagreements.len();
    let items: Vec<Item> =
        later.items.into_iter().filter(|i| !i.state.is_finding() || confirmed(i)).collect();
    let disagreements: Vec<Disagreement> =
        later.disagreements.into_iter().filter(|d| former.disagreements.contains(d)).collect();
    let passing = before - items.len() - disagreements.len();
    (Look { items, disagreements }, passing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Identity, Owner, State};

    fn item(name: &str, state: State, inode: u64) -> Item {
        Item {
            kind: ItemKind::Netns,
            name: name.into(),
            state,
            owner: Owner::default(),
            evidence: vec![],
            since_ms: None,
            identity: Identity::Inode { device: 1, inode },
            tasks: vec![],
        }
    }

    #[test]
    fn what_one_look_saw_is_no_finding_and_a_new_life_under_a_name_is_new() {
        let look = |items: &[(&str, State, u64)]| Look {
            items: items.iter().map(|(n, s, i)| item(n, *s, *i)).collect(),
            disagreements: vec![],
        };
        let first = look(&[("a", State::Leaked, 1), ("b", State::Leaked, 2), ("c", State::Live, 3)]);
        assert!(first.is_suspicious());
        let second = look(&[
            ("a", State::Leaked, 1),
            ("b", State::Leaked, 9),
            ("c", State::Leaked, 3),
            ("d", State::Foreign, 4),
        ]);
        let (settled, passing) = settle(&first, second);
        let names: Vec<&str> = settled.items.iter().map(|i| i.name.as_str()).collect();
        assert_eq!((names, passing), (vec!["a", "d"], 2));
    }

    #[test]
    fn a_disagreement_has_to_last_too() {
        let of = |what: &str| Disagreement {
            what: what.into(),
            record: "x".into(),
            kernel: "y".into(),
            daemon: String::new(),
        };
        let look = |all: &[&str]| Look { items: vec![], disagreements: all.iter().map(|w| of(w)).collect() };
        let (settled, passing) = settle(&look(&["slot 1"]), look(&["slot 1", "slot 2"]));
        assert_eq!((settled, passing), (look(&["slot 1"]), 1));
    }
}
