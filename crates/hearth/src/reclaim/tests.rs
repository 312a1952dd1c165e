//! What is done with a plan: by hands that only write down.

use std::sync::Mutex;

use hearth_core::doctor::{Item, Owner, State};

use super::*;
use crate::doctor::{DaemonSeen, HostSeen};

#[derive(Default)]
struct Fake {
    calls: Mutex<Vec<Vec<String>>>,
    fails: Vec<&'static str>,
}

impl Hands for Fake {
    fn remove(&self, batch: &[&Action], _: &Order) -> Vec<Outcome> {
        self.calls.lock().unwrap().push(batch.iter().map(|a| a.name.clone()).collect());
        let outcome = |a: &&Action| match self.fails.contains(&a.name.as_str()) {
            true => Outcome::Failed("busy".into()),
            false => Outcome::Removed,
        };
        batch.iter().map(outcome).collect()
    }
}

fn item(kind: ItemKind, name: &str, slot: u32) -> Item {
    let identity = match kind {
        ItemKind::Rule => Identity::Rule {
            backend: "iptables-nft".into(),
            table: if name.starts_with("FORWARD") { "filter" } else { "nat" }.into(),
        },
        _ => Identity::Inode { device: 1, inode: u64::from(slot) },
    };
    Item {
        kind,
        name: name.into(),
        state: State::Leaked,
        owner: Owner { slot: Some(slot), ..Owner::default() },
        evidence: vec!["why".into()],
        since_ms: None,
        identity,
        tasks: vec![],
    }
}

fn diagnosis(items: Vec<Item>) -> Diagnosis {
    Diagnosis {
        schema: 1,
        layout: "e2b".into(),
        instance: String::new(),
        taken_at_ms: 1,
        took_ms: 1,
        looks: 2,
        passing: 0,
        host: HostSeen { kernel: String::new(), boot_id: None, root: true },
        daemon: DaemonSeen { state: "down", pid: None, address: String::new(), why: None },
        counts: BTreeMap::new(),
        findings: items.len(),
        items,
        disagreements: vec![],
        limits: vec![],
        unseen: vec![],
    }
}

fn here() -> Here {
    Here { boot_id: "b".into(), network: 1, mounts: 1 }
}

fn some() -> Vec<Item> {
    vec![
        item(ItemKind::Process, "11", 1),
        item(ItemKind::Process, "12", 2),
        item(ItemKind::Process, "13", 3),
        item(ItemKind::Rule, "FORWARD -i veth-1", 1),
        item(ItemKind::Rule, "POSTROUTING -s 1", 1),
        item(ItemKind::Rule, "FORWARD -i veth-2", 2),
        item(ItemKind::Netns, "ns-1", 1),
        item(ItemKind::Netns, "ns-2", 2),
    ]
}

const ORDER: Order = Order { max: None, parallel: 2, grace: Duration::ZERO };

fn run(plan: &ReclaimPlan, now: &Diagnosis, fake: &Fake, order: &Order) -> Vec<Outcome> {
    apply(plan, now, fake, order, &mut |_| Ok(true), &mut |_, _| {})
}

#[test]
fn what_is_planned_is_what_is_removed_in_its_order_and_rules_by_table() {
    let plan = plan(&diagnosis(some()), here());
    let fake = Fake { fails: vec!["12"], ..Fake::default() };
    let outcomes = run(&plan, &diagnosis(some()), &fake, &ORDER);
    // An error never stops the rest.
    assert_eq!(outcomes.iter().filter(|o| **o == Outcome::Removed).count(), 7, "{outcomes:?}");
    let calls = fake.calls.into_inner().unwrap();
    let expected: [&[&str]; 5] = [
        &["11", "12"],
        &["13"],
        &["FORWARD -i veth-1", "FORWARD -i veth-2"],
        &["POSTROUTING -s 1"],
        &["ns-1", "ns-2"],
    ];
    assert_eq!(calls, expected);
    let planned: BTreeMap<&str, ()> = plan.actions.iter().map(|a| (a.name.as_str(), ())).collect();
    let done: BTreeMap<&str, ()> = calls.iter().flatten().map(|n| (n.as_str(), ())).collect();
    assert_eq!(planned, done);
}

#[test]
fn what_changed_since_the_plan_is_refused_one_by_one() {
    let plan = plan(&diagnosis(some()), here());
    let mut now = some();
    now[6].identity = Identity::Inode { device: 1, inode: 99 };
    now[0].state = State::Live;
    now.remove(4);
    let fake = Fake::default();
    let outcomes = run(&plan, &diagnosis(now), &fake, &ORDER);
    let words: Vec<&str> = outcomes.iter().map(Outcome::as_str).collect();
    let mut expected = vec!["removed"; 8];
    (expected[0], expected[5], expected[6]) = ("refused", "gone", "refused");
    // Within the plan rules stand in the order of the diagnosis.
    let position = plan.actions.iter().position(|a| a.name.starts_with("POSTROUTING")).unwrap();
    expected[5] = "removed";
    expected[position] = "gone";
    assert_eq!(words, expected);
    assert!(outcomes[6].why().contains("inode 99 instead of inode 1"), "{outcomes:?}");
}

#[test]
fn a_cap_a_no_and_a_quit_leave_the_rest() {
    let plan = plan(&diagnosis(some()), here());
    let now = diagnosis(some());
    let fake = Fake::default();
    let capped = run(&plan, &now, &fake, &Order { max: Some(3), ..ORDER });
    assert_eq!(capped.iter().filter(|o| **o == Outcome::Removed).count(), 3);
    assert_eq!(capped[7].why(), "--max 3");
    let mut asked = 0;
    let mut answer = |_: &Action| {
        asked += 1;
        match asked {
            1 => Ok(false),
            2 => Ok(true),
            _ => Err("stopped".to_owned()),
        }
    };
    let outcomes = apply(&plan, &now, &fake, &ORDER, &mut answer, &mut |_, _| {});
    let words: Vec<&str> = outcomes.iter().map(Outcome::as_str).collect();
    assert_eq!(words[..3], ["skipped", "removed", "skipped"]);
    assert!(words[3..].iter().all(|w| *w == "skipped"), "{words:?}");
    assert_eq!(asked, 3, "nobody is asked again after a quit");
}

#[test]
fn a_plan_is_refused_as_a_whole_if_a_look_was_not_whole_or_it_is_of_another_boot() {
    let plan = plan(&diagnosis(some()), here());
    let now = diagnosis(some());
    assert_eq!(refusal(&plan, &here(), &now), None);
    let unseen = Diagnosis { unseen: vec!["rule: no".into()], ..now.clone() };
    assert!(refusal(&plan, &here(), &unseen).unwrap().contains("rule: no"));
    let boot = Here { boot_id: "c".into(), ..here() };
    assert!(refusal(&plan, &boot, &now).unwrap().contains("last boot"));
    let other = Diagnosis { layout: "hearth".into(), ..now };
    assert!(refusal(&plan, &here(), &other).is_some());
}
