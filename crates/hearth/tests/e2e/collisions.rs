//! Callers that go away or get in each other's way: each call ends soon, and what is left is one clear state:
//! a sandbox that is well, or nothing of it.

use std::fs;
use std::time::{Duration, Instant};

use hearth_core::steps::{Place, Step};

use crate::matrix::{begin, client, delete, difference, finish, states, wait_for};
use crate::node::{Node, Wish, cannot, children_in_words};
use crate::running::Running;

/// Longest time from a collision to its clear state.
const BOUND: Duration = Duration::from_secs(5);
/// The test table without faults.
const PLAIN: &str = "process_vmm = true";

/// A host and what it looks like with an idle daemon.
struct Bench {
    node: Node,
    before: String,
}

impl Bench {
    fn new(test: &'static str) -> Self {
        let node = Node::start(&Wish { test, slot_pool: 0, ..Wish::default() });
        node.warm_up();
        let before = node.inventory();
        Self { node, before }
    }

    fn create(&self, name: &str) -> Running {
        begin(&self.node, &["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"])
    }

    fn create_well(&self, name: &str) {
        let (status, said) = finish(self.create(name), "create").unwrap();
        assert!(status.success(), "{said}");
    }

    fn exec(&self, name: &str) -> bool {
        client(&self.node, &["exec", name, "--", "true"]).unwrap().0.success()
    }

    /// That nothing is left, within the bound from `since` on.
    fn check_gone(&self, since: Instant, what: &str) {
        let called = since.elapsed();
        wait_for(&format!("{what}: no sandbox is left"), || states(&self.node).is_empty()).unwrap();
        let listed = since.elapsed();
        let daemon = self.node.daemon_pid();
        let mut children = Vec::new();
        let reaped = wait_for("children of the daemon", || {
            let now = children_in_words(daemon);
            let none = now.is_empty();
            children.push(now);
            none
        });
        let reaped = reaped.map(|()| since.elapsed());
        children.dedup();
        let mut differences = Vec::new();
        let clean = wait_for(what, || {
            let after = self.node.inventory();
            if after != self.before {
                differences.push(difference(&self.before, &after));
            }
            after == self.before
        });
        let clean = clean.is_ok();
        let gone = since.elapsed();
        differences.dedup();
        let log = || self.node.log_text();
        assert!(clean, "{what}: {differences:#?}\n{}", log());
        assert!(
            gone < BOUND,
            "{what}: the call took {called:?}, not listed after {listed:?}, no child after {reaped:?} ({children:?}), \
             nothing left after {gone:?}: {differences:#?}\n{}",
            log()
        );
    }

    /// Waits until a place with an ordered fault is passed once more than `times`.
    fn wait_for_place(&self, place: Place, times: usize) {
        let what = format!("failpoint at {place}: ");
        wait_for(&what, || self.passed(place) > times).unwrap();
    }

    fn passed(&self, place: Place) -> usize {
        self.node.log_text().matches(&format!("failpoint at {place}: ")).count()
    }
}

/// Each step of creation waits for a moment, so that a collision can be timed to it.
const SLOW: &str = "process_vmm = true\nfailpoints = \"record=delay(200),run-directory=delay(200),nbd=delay(200),\
                    disk=delay(200),slot=delay(200),cgroup=delay(200),shim=delay(200),spawn=delay(200),\
                    boot=delay(200)\"";

fn kill(mut client: Running) {
    client.child.kill().unwrap();
    client.child.wait().unwrap();
}

#[test]
fn a_caller_that_goes_away_at_any_step_leaves_nothing() {
    if cannot("a_caller_that_goes_away_at_any_step_leaves_nothing", true) {
        return;
    }
    let bench = Bench::new(SLOW);
    let places = Step::ALL.into_iter().map(Place::Create).chain([Place::Spawn]);
    for place in places {
        let passed = bench.passed(place);
        let caller = bench.create("g");
        bench.wait_for_place(place, passed);
        let since = Instant::now();
        kill(caller);
        bench.check_gone(since, &format!("its caller went away at {place}"));
    }
    bench.node.end_clean();
}

#[test]
fn a_caller_that_goes_away_at_any_moment_leaves_nothing_or_a_sandbox_that_is_well() {
    let name = "a_caller_that_goes_away_at_any_moment_leaves_nothing_or_a_sandbox_that_is_well";
    if cannot(name, true) {
        return;
    }
    let bench = Bench::new(PLAIN);
    let (mut gone, mut well) = (0, 0);
    for ms in (0..300).step_by(7) {
        let caller = bench.create("g");
        std::thread::sleep(Duration::from_millis(ms));
        let since = Instant::now();
        kill(caller);
        // A creation that had ended stays; one under way is taken back.
        let settled = |s: &[String]| s.is_empty() || s == ["running"];
        wait_for("a clear state", || settled(&states(&bench.node))).unwrap();
        // One whose caller is seen to be gone just as it runs was shown as running, and is taken back all the same:
        // `check_gone` waits for that, and fails for one that stays and is not well.
        if bench.exec("g") {
            well += 1;
            delete(&bench.node, "g").unwrap();
        } else {
            gone += 1;
        }
        bench.check_gone(since, &format!("its caller went away after {ms} ms"));
    }
    hearth_testkit::report(&format!(
        "callers that went away during a create: {gone} taken back, {well} done"
    ));
    bench.node.end_clean();
}

#[test]
fn a_delete_at_any_step_of_a_create_ends_both() {
    if cannot("a_delete_at_any_step_of_a_create_ends_both", true) {
        return;
    }
    let bench = Bench::new(SLOW);
    for step in Step::ALL {
        let place = Place::Create(step);
        let passed = bench.passed(place);
        let creating = bench.create("g");
        bench.wait_for_place(place, passed);
        let since = Instant::now();
        let (deleted, said) = client(&bench.node, &["rm", "g"]).unwrap();
        assert!(deleted.success(), "{step}: {said}");
        let (created, said) = finish(creating, "create").unwrap();
        assert!(!created.success() && said.contains("cancelled"), "{step}: {said}");
        bench.check_gone(since, &format!("deleted at {step}"));
    }
    bench.node.end_clean();
}

#[test]
fn a_delete_ends_the_commands_that_run() {
    if cannot("a_delete_ends_the_commands_that_run", true) {
        return;
    }
    let bench = Bench::new(PLAIN);
    bench.create_well("g");
    let command = begin(&bench.node, &["exec", "g", "--", "sh", "-c", "echo begun; sleep 600"]);
    command.wait_for_log(&["begun"]);
    let since = Instant::now();
    let (deleted, said) = client(&bench.node, &["rm", "g"]).unwrap();
    assert!(deleted.success(), "{said}");
    let (status, said) = finish(command, "exec").unwrap();
    assert!(!status.success(), "{said}");
    bench.check_gone(since, "deleted while a command runs");
    bench.node.end_clean();
}

#[test]
fn of_two_creates_with_one_name_one_wins_and_is_well() {
    if cannot("of_two_creates_with_one_name_one_wins_and_is_well", true) {
        return;
    }
    let bench = Bench::new(PLAIN);
    for _ in 0..5 {
        let both = [bench.create("g"), bench.create("g")];
        let ended = both.map(|caller| finish(caller, "create").unwrap());
        let won = ended.iter().filter(|(status, _)| status.success()).count();
        assert_eq!(won, 1, "{ended:?}");
        let lost = ended.iter().find(|(status, _)| !status.success()).unwrap();
        assert!(lost.1.contains("is taken by sandbox"), "{}", lost.1);
        assert_eq!(states(&bench.node), ["running"]);
        assert!(bench.exec("g"));
        let since = Instant::now();
        delete(&bench.node, "g").unwrap();
        bench.check_gone(since, "the winner was deleted");
    }
    bench.node.end_clean();
}

#[test]
fn of_two_deletes_at_once_both_hear_that_it_is_gone() {
    if cannot("of_two_deletes_at_once_both_hear_that_it_is_gone", true) {
        return;
    }
    let bench = Bench::new(PLAIN);
    for _ in 0..5 {
        bench.create_well("g");
        let since = Instant::now();
        let both = [begin(&bench.node, &["rm", "g"]), begin(&bench.node, &["rm", "g"])];
        for (status, said) in both.map(|caller| finish(caller, "rm").unwrap()) {
            assert!(status.success() || said.contains("has ended"), "{said}");
        }
        // Gone when the answer comes, not later.
        assert_eq!(states(&bench.node), Vec::<String>::new());
        bench.check_gone(since, "deleted twice at once");
    }
    bench.node.end_clean();
}

#[test]
fn a_sandbox_known_only_from_disk_is_deleted_whatever_its_record_is() {
    if cannot("a_sandbox_known_only_from_disk_is_deleted_whatever_its_record_is", true) {
        return;
    }
    let mut bench = Bench::new(PLAIN);
    for place in Step::ALL.into_iter().map(Place::Create).chain([Place::Spawn]) {
        bench.node.kill_daemon();
        bench.node.set_test(&format!("{PLAIN}\nfailpoints = \"{place}=kill9-after\""));
        bench.node.start_daemon();
        let (status, _) = finish(bench.create("g"), "create").unwrap();
        assert!(!status.success(), "{place}");
        wait_for("the daemon's death", || bench.node.daemon_ended().is_some()).unwrap();
        // Half made on disk, and told to go before anything else is said to the new daemon.
        let dir = bench.node.state.join(&bench.node.instance).join("sandboxes");
        let id = fs::read_dir(dir).unwrap().next().unwrap().unwrap().file_name().into_string().unwrap();
        bench.node.set_test(PLAIN);
        bench.node.spawn_daemon();
        wait_for("an answer", || {
            let (status, said) = client(&bench.node, &["rm", &id]).unwrap();
            status.success() || said.contains("no sandbox is called") || said.contains("has ended")
        })
        .unwrap();
        bench.check_gone(Instant::now(), &format!("half made at {place}"));
    }
    bench.node.end_clean();
}
