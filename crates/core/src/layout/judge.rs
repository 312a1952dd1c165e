//! Whether anybody still has a thing of another orchestrator. There are no records to ask, so kernel facts decide: who
//! is whose parent, who holds what open, who is inside which namespace. While that orchestrator's daemon runs, what
//! only it could know is its own.

use std::collections::{BTreeMap, HashMap};

use super::Layout;
use crate::doctor::{Identity, Item, ItemKind, Look, Owner, Scene, State, Thing};

/// Who a process's parent is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parent {
    /// Pid 1: the process lost its own.
    Init,
    /// A program that adopts what lost its parent.
    Reaper(u32, String),
    /// A daemon of this orchestrator.
    Daemon(u32, String),
    /// Any other process.
    Other(u32, String),
}

/// Says of each thing whether anybody has it. `daemons` are those of this orchestrator that run.
#[must_use]
pub fn judge(layout: &Layout, scene: Scene, daemons: &[(u32, String)]) -> Look {
    let mut bench = Bench {
        layout,
        daemon: daemons.first().map(|(pid, name)| format!("{name} (pid {pid}) runs")),
        processes: HashMap::new(),
        inside: BTreeMap::new(),
        of_sandbox: BTreeMap::new(),
        namespaces: scene
            .things
            .iter()
            .filter(|t| t.kind == ItemKind::Netns && t.foreign.is_none())
            .filter_map(|t| t.slot)
            .collect(),
        links: scene.things.iter().filter(|t| t.kind == ItemKind::Veth).filter_map(|t| t.slot).collect(),
    };
    bench.take_in_processes(&scene.things);
    let mut items: Vec<Item> = scene.things.into_iter().map(|thing| bench.item(thing)).collect();
    items.sort_by(|a, b| (a.kind, a.owner.slot, &a.name).cmp(&(b.kind, b.owner.slot, &b.name)));
    Look { items, disagreements: Vec::new() }
}

/// What is thought of something, and why.
type Verdict = (State, String);

struct Bench<'a> {
    layout: &'a Layout,
    /// That a daemon runs, in words.
    daemon: Option<String>,
    processes: HashMap<u32, Verdict>,
    /// Slot → pids inside its namespace.
    inside: BTreeMap<u32, Vec<u32>>,
    /// Sandbox → pids.
    of_sandbox: BTreeMap<String, Vec<u32>>,
    namespaces: std::collections::HashSet<u32>,
    links: std::collections::HashSet<u32>,
}

impl Bench<'_> {
    fn take_in_processes(&mut self, things: &[Thing]) {
        let by_pid: HashMap<u32, &Thing> = things.iter().filter_map(|t| Some((pid_of(t)?, t))).collect();
        for (pid, thing) in &by_pid {
            let verdict = self.of_process(*pid, &by_pid, by_pid.len());
            self.processes.insert(*pid, verdict);
            if let Some(slot) = thing.slot {
                self.inside.entry(slot).or_default().push(*pid);
            }
            if let Some(sandbox) = &thing.sandbox {
                self.of_sandbox.entry(sandbox.clone()).or_default().push(*pid);
            }
        }
    }

    /// Up the line of parents; `left` bounds it, since what was read may be a circle.
    fn of_process(&self, pid: u32, by_pid: &HashMap<u32, &Thing>, left: usize) -> Verdict {
        let Some(thing) = by_pid.get(&pid) else { return (State::Foreign, "it is not known".into()) };
        if let Some(why) = &thing.foreign {
            return (State::Foreign, why.clone());
        }
        if thing.connected {
            return (State::Live, "somebody is connected to its API socket".into());
        }
        match &thing.parent {
            Some(Parent::Init) => (
                State::Leaked,
                "an orphan: its parent is pid 1, and nobody is connected to its API socket".into(),
            ),
            Some(Parent::Reaper(pid, name)) => (
                State::Leaked,
                format!(
                    "an orphan: {name} (pid {pid}) adopted it, and nobody is connected to its API socket"
                ),
            ),
            Some(Parent::Daemon(pid, name)) => (State::Live, format!("its parent is {name} (pid {pid})")),
            Some(Parent::Other(parent, name)) if by_pid.contains_key(parent) && left > 0 => {
                let (state, why) = self.of_process(*parent, by_pid, left - 1);
                (state, format!("its parent is {name} (pid {parent}): {why}"))
            }
            Some(Parent::Other(parent, name)) => (
                State::Foreign,
                format!("its parent {name} (pid {parent}) lives and is not of {}", self.layout.name),
            ),
            None => (State::Unknown, "its parent could not be seen".into()),
        }
    }

    /// The worst of the processes that have something: one that lives, or is not understood, keeps it.
    fn of_processes(&self, pids: &[u32]) -> Option<Verdict> {
        let rank = |state: State| match state {
            State::Live => 0,
            State::Unknown => 1,
            State::Foreign => 2,
            State::Stuck => 3,
            State::Leaked => 4,
        };
        let all = pids.iter().filter_map(|pid| Some((pid, self.processes.get(pid)?)));
        let (pid, (state, why)) = all.min_by_key(|(pid, (state, _))| (rank(*state), **pid))?;
        let more = if pids.len() > 1 { format!(" (of {})", pids.len()) } else { String::new() };
        Some((*state, format!("process {pid}{more}: {why}")))
    }

    fn item(&self, thing: Thing) -> Item {
        let (state, why) = self.verdict(&thing);
        let process = match &thing.identity {
            Identity::Process(process) => Some((process.pid, process.start_time)),
            _ => None,
        };
        let (state, undead) = match (thing.undead, state) {
            (true, State::Leaked | State::Live) => {
                (State::Stuck, Some("it was killed and does not go".to_owned()))
            }
            (_, state) => (state, None),
        };
        Item {
            kind: thing.kind,
            name: thing.name,
            state,
            owner: Owner {
                sandbox: thing.sandbox,
                slot: thing.slot,
                pid: process.map(|p| p.0),
                start_time: process.map(|p| p.1),
            },
            evidence: undead.into_iter().chain([why]).chain(thing.facts).collect(),
            since_ms: thing.since_ms,
            identity: thing.identity,
            tasks: thing.tasks,
        }
    }

    fn verdict(&self, thing: &Thing) -> Verdict {
        if let Some(why) = &thing.foreign {
            return (State::Foreign, why.clone());
        }
        if let Some(pid) = pid_of(thing) {
            return self.processes.get(&pid).cloned().unwrap_or((State::Unknown, "not judged".into()));
        }
        match (thing.kind, thing.slot, &thing.sandbox) {
            (ItemKind::Rule, Some(slot), _) if !self.namespaces.contains(&slot) => {
                match self.links.contains(&slot) {
                    false => (State::Leaked, format!("slot {slot} has neither a namespace nor a link")),
                    true => (State::Unknown, format!("slot {slot} has a link and no namespace")),
                }
            }
            (_, Some(slot), _) => self.of_slot(slot),
            (ItemKind::Cgroup, None, Some(sandbox)) => self.of_sandbox(sandbox, true),
            (_, None, Some(sandbox)) => match thing.holders.first() {
                Some(holder) => {
                    let (state, why) =
                        self.processes.get(holder).cloned().unwrap_or((State::Live, "it lives".into()));
                    // Whoever holds it, it is in use; an orphan's own goes after the orphan.
                    let state = if state == State::Leaked { State::Leaked } else { State::Live };
                    (state, format!("process {holder} has it open: {why}"))
                }
                None => self.of_sandbox(sandbox, thing.kind == ItemKind::Fifo),
            },
            _ => (State::Unknown, "it names no owner; look at it by hand".into()),
        }
    }

    fn of_slot(&self, slot: u32) -> Verdict {
        if let Some(verdict) = self.inside.get(&slot).and_then(|pids| self.of_processes(pids)) {
            return match verdict {
                (State::Foreign, why) => {
                    (State::Foreign, format!("inside is a process that keeps it: {why}"))
                }
                (state, why) => (state, format!("inside is {why}")),
            };
        }
        match &self.daemon {
            Some(daemon) => (State::Live, format!("nobody is inside, but {daemon} and may have prepared it")),
            None => (State::Leaked, format!("nobody is inside, and no {} runs", self.daemons())),
        }
    }

    /// `early`: the daemon makes it before a process has it open.
    fn of_sandbox(&self, sandbox: &str, early: bool) -> Verdict {
        if let Some(verdict) = self.of_sandbox.get(sandbox).and_then(|pids| self.of_processes(pids)) {
            return verdict;
        }
        match &self.daemon {
            Some(daemon) if early => {
                (State::Live, format!("no process has it, but {daemon} and may be about to"))
            }
            Some(_) => (State::Leaked, "no process has it open, and none is of its sandbox".into()),
            None => (State::Leaked, format!("no process is of its sandbox, and no {} runs", self.daemons())),
        }
    }

    fn daemons(&self) -> String {
        self.layout.processes.daemons.join(" or ")
    }
}

fn pid_of(thing: &Thing) -> Option<u32> {
    match &thing.identity {
        Identity::Process(process) => Some(process.pid),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::e2b;
    use super::*;
    use crate::process::ProcessIdentity;

    fn process(pid: u32, slot: Option<u32>, parent: Parent) -> Thing {
        let identity = ProcessIdentity { pid, start_time: 1, boot_id: "b".into(), cgroup: None };
        Thing {
            sandbox: Some(format!("s{pid}-r")),
            slot,
            identity: Identity::Process(identity),
            parent: Some(parent),
            ..Thing::new(ItemKind::Process, pid.to_string())
        }
    }

    fn slot(kind: ItemKind, n: u32) -> Thing {
        Thing { slot: Some(n), ..Thing::new(kind, format!("{kind}-{n}")) }
    }

    fn states(look: &Look, kind: ItemKind) -> Vec<(String, State)> {
        look.items.iter().filter(|i| i.kind == kind).map(|i| (i.name.clone(), i.state)).collect()
    }

    fn scene() -> Scene {
        let other = |pid: u32, name: &str| Parent::Other(pid, name.into());
        let mut things: Vec<Thing> = (1..=6).map(|n| slot(ItemKind::Netns, n)).collect();
        things.extend([
            process(11, Some(1), Parent::Init),
            process(12, Some(2), other(500, "bash")),
            process(13, Some(3), Parent::Daemon(900, "orchestrator".into())),
            process(14, Some(4), other(11, "bash")),
            Thing { connected: true, ..process(15, Some(5), Parent::Init) },
        ]);
        things.push(Thing { foreign: Some("x".into()), ..process(16, Some(1), Parent::Init) });
        Scene { things, whole: Default::default() }
    }

    #[test]
    fn an_orphan_is_told_by_its_parents_and_by_who_speaks_to_it() {
        use State::{Foreign, Leaked, Live};
        let look = judge(&e2b(), scene(), &[]);
        let expected = [Leaked, Foreign, Live, Leaked, Live, Foreign];
        let processes: Vec<State> = states(&look, ItemKind::Process).into_iter().map(|(_, s)| s).collect();
        let mut by_pid: Vec<(u32, State)> = look
            .items
            .iter()
            .filter(|i| i.kind == ItemKind::Process)
            .map(|i| (i.owner.pid.unwrap(), i.state))
            .collect();
        by_pid.sort();
        assert_eq!(by_pid.iter().map(|p| p.1).collect::<Vec<_>>(), expected, "{processes:?}");
        // Slot 1 has a stranger inside beside the orphan; slot 6 nobody.
        let slots: Vec<State> = states(&look, ItemKind::Netns).into_iter().map(|(_, s)| s).collect();
        assert_eq!(slots, [Foreign, Foreign, Live, Leaked, Live, Leaked]);
    }

    #[test]
    fn what_a_living_daemon_may_have_prepared_is_its_own() {
        let daemons = [(900, "orchestrator".to_owned())];
        let look = judge(&e2b(), scene(), &daemons);
        let slots = states(&look, ItemKind::Netns);
        assert_eq!((slots[5].1, slots[3].1), (State::Live, State::Leaked));
        let of = |kind, holders: &[u32]| {
            let thing =
                Thing { sandbox: Some("gone-r".into()), holders: holders.to_vec(), ..Thing::new(kind, "f") };
            let scene = Scene { things: vec![thing], whole: Default::default() };
            judge(&e2b(), scene, &daemons).items[0].state
        };
        assert_eq!((of(ItemKind::Fifo, &[]), of(ItemKind::Socket, &[])), (State::Live, State::Leaked));
        assert_eq!(of(ItemKind::Socket, &[77]), State::Live);
    }

    #[test]
    fn a_rule_of_a_slot_that_is_gone_is_leaked_and_others_follow_their_slot() {
        let mut all = scene();
        all.things.extend([1, 4, 9, 10].map(|n| slot(ItemKind::Rule, n)));
        all.things.push(slot(ItemKind::Veth, 10));
        let rules: Vec<State> =
            states(&judge(&e2b(), all, &[]), ItemKind::Rule).into_iter().map(|(_, s)| s).collect();
        assert_eq!(rules, [State::Foreign, State::Leaked, State::Leaked, State::Unknown]);
    }
}
