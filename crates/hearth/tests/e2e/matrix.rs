//! The crash matrix on the kernel: the daemon, its host and its shims are real, the VMM is a plain process
//! (in the smaller cut, real guests). Each cell drives a life into one fault at one place, then releases it
//! twice or restarts the daemon twice. Afterwards the host is as it was, or the sandbox is well.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hearth_core::steps::{Place, ReleaseStep, Step};
use hearth_testkit::matrix::{Blow, Cell, Then};

use crate::node::{Node, Wish, cannot};
use crate::running::Running;

/// Longest time for anything that is waited for: a guest under plain emulation boots in tens of seconds while other
/// tests run.
const BOUND: Duration = Duration::from_secs(90);
/// Hosts that run cells at the same time.
const LANES: usize = 2;
/// The `[test]` table without faults.
const PLAIN: &str = "process_vmm = true";
/// The sandbox of every cell.
const NAME: &str = "c";

type Outcome = Result<(), String>;

/// Waits, and says for what it waited in vain.
pub fn wait_for(what: &str, mut seen: impl FnMut() -> bool) -> Outcome {
    let end = Instant::now() + BOUND;
    while !seen() {
        if Instant::now() > end {
            return Err(format!("not within {} s: {what}", BOUND.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A client that is waited for no longer than the bound.
pub fn client(node: &Node, args: &[&str]) -> Result<(ExitStatus, String), String> {
    finish(begin(node, args), &args.join(" "))
}

pub fn begin(node: &Node, args: &[&str]) -> Running {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let log = node.dir.path().join(format!("client-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
    Running::start(node.command(args), log)
}

pub fn finish(mut client: Running, what: &str) -> Result<(ExitStatus, String), String> {
    let mut status = None;
    wait_for(&format!("the end of `hearth {what}`"), || {
        status = client.child.try_wait().unwrap();
        status.is_some()
    })?;
    let said = client.log_text();
    fs::remove_file(&client.log).unwrap();
    Ok((status.unwrap(), said))
}

/// Deletes by name or id; that there is none is as good.
pub fn delete(node: &Node, name: &str) -> Outcome {
    let (status, said) = client(node, &["rm", name])?;
    let gone = status.success() || said.contains("no sandbox is called") || said.contains("has ended");
    if gone { Ok(()) } else { Err(format!("hearth rm {name}: {said}")) }
}

pub fn states(node: &Node) -> Vec<String> {
    node.list().as_array().unwrap().iter().map(|s| s["state"].as_str().unwrap().to_owned()).collect()
}

/// Pid of the shim of the only sandbox, as its record has it.
fn shim_pid(node: &Node) -> Option<String> {
    let dir = node.state.join(&node.instance).join("sandboxes");
    let entry = fs::read_dir(dir).ok()?.next()?.ok()?;
    let text = fs::read_to_string(entry.path().join("record.json")).ok()?;
    let record: serde_json::Value = serde_json::from_str(&text).ok()?;
    Some(record["shim"]["pid"].as_u64()?.to_string())
}

/// Runs cells on one host, one after the other.
struct Lane {
    node: Node,
    /// What the host looks like with an idle daemon.
    before: String,
    vmm: &'static str,
}

impl Lane {
    fn new(vmm: &'static str) -> Self {
        let mut node = Node::start(&Wish { test: PLAIN, slot_pool: 0, ..Wish::default() });
        node.warm_up();
        let before = node.inventory();
        node.kill_daemon();
        Self { node, before, vmm }
    }

    fn create(&self) -> Result<(ExitStatus, String), String> {
        client(&self.node, &["create", "busybox", "--name", NAME, "--vmm", self.vmm, "--disk", "16"])
    }

    fn create_well(&self) -> Outcome {
        let (status, said) = self.create()?;
        if status.success() { Ok(()) } else { Err(format!("a creation without a fault failed: {said}")) }
    }

    fn exec(&self) -> Result<bool, String> {
        let (status, said) = client(&self.node, &["exec", NAME, "--", "echo", "well"])?;
        Ok(status.success() && said == "well\n")
    }

    fn start(&mut self) {
        self.node.set_test(PLAIN);
        self.node.start_daemon();
    }

    /// Comes to the place with a daemon that has the fault ordered.
    fn drive(&mut self, cell: &Cell) -> Outcome {
        fs::write(self.node.log(), "").unwrap();
        if cell.place == Place::Start {
            self.start();
            self.create_well()?;
            self.node.kill_daemon();
        }
        self.node.set_test(&format!("{PLAIN}\nfailpoints = \"{}\"", cell.failpoints()));
        self.node.spawn_daemon();
        if cell.place == Place::Start {
            self.kill_shim_if_due(cell)?;
        } else {
            self.node.wait_ready();
            if matches!(cell.place, Place::Exec | Place::Release(_)) {
                self.create_well()?;
            }
            let create = ["create", "busybox", "--name", NAME, "--vmm", self.vmm, "--disk", "16"];
            let (args, must_fail): (&[&str], _) = match cell.place {
                Place::Exec => (&["exec", NAME, "--", "true"], true),
                // A release that fails at a part may go on without it, or be tried again.
                Place::Release(_) => (&["rm", NAME], cell.blow.kills_daemon()),
                _ => (&create, true),
            };
            let caller = begin(&self.node, args);
            self.kill_shim_if_due(cell)?;
            let (status, said) = finish(caller, args[0])?;
            if status.success() && must_fail && !matches!(cell.blow, Blow::Delay | Blow::KillShim) {
                return Err(format!("{} did not feel the fault", args[0]));
            }
            if !status.success() && cell.blow == Blow::Delay {
                return Err(format!("{} failed: {said}", args[0]));
            }
        }
        self.see_the_blow(cell)
    }

    fn kill_shim_if_due(&self, cell: &Cell) -> Outcome {
        if cell.blow != Blow::KillShim {
            return Ok(());
        }
        wait_for("the place is passed", || self.passed(cell))?;
        let pid = shim_pid(&self.node).ok_or("no record names a shim")?;
        let killed = Command::new("kill").args(["-9", &pid]).status().unwrap().success();
        if killed { Ok(()) } else { Err(format!("there is no shim with pid {pid}")) }
    }

    fn passed(&self, cell: &Cell) -> bool {
        self.node.log_text().contains(&format!("failpoint at {}: ", cell.place))
    }

    /// That the place was passed, and that the daemon died of it if it should.
    fn see_the_blow(&mut self, cell: &Cell) -> Outcome {
        wait_for("the place is passed", || self.passed(cell))?;
        let harmless = matches!(cell.blow, Blow::Delay | Blow::KillShim);
        if cell.blow.kills_daemon() || (cell.place == Place::Start && !harmless) {
            let mut ended = None;
            wait_for("the end of the daemon", || {
                ended = self.node.daemon_ended();
                ended.is_some()
            })?;
            let (signal, expected) = (ended.unwrap().signal(), cell.blow.kills_daemon().then_some(9));
            return if signal == expected { Ok(()) } else { Err(format!("it ended by signal {signal:?}")) };
        }
        self.node.wait_ready();
        Ok(())
    }

    fn run(&mut self, cell: &Cell) -> Outcome {
        self.drive(cell)?;
        if cell.then == Then::RestartTwice {
            for _ in 0..2 {
                if self.node.has_daemon() {
                    self.node.kill_daemon();
                }
                self.start();
            }
        } else if !self.node.has_daemon() {
            self.start();
        }
        if cell.survives() {
            wait_for("the sandbox runs", || states(&self.node) == ["running"])?;
            let end = Instant::now() + BOUND;
            // The daemon connects to the shim of a sandbox it took over soon after it is ready.
            while !self.exec()? {
                if Instant::now() > end {
                    return Err("the sandbox is not well".into());
                }
            }
        }
        if cell.survives() || cell.then == Then::ReleaseTwice {
            // The first may be the one whose part fails; the second may not.
            drop(delete(&self.node, NAME));
            delete(&self.node, NAME)?;
        }
        wait_for("no sandbox is left", || states(&self.node).is_empty())?;
        let mut after = String::new();
        wait_for("the host is as it was", || {
            after = self.node.inventory();
            after == self.before
        })
        .map_err(|e| format!("{e}\n{}", difference(&self.before, &after)))?;
        self.node.kill_daemon();
        Ok(())
    }
}

pub fn difference(before: &str, after: &str) -> String {
    let lacks = |text: &str, line: &&str| !text.lines().any(|l| l == *line);
    let more = after.lines().filter(|l| lacks(before, l)).map(|l| format!("+ {l}\n"));
    let less = before.lines().filter(|l| lacks(after, l)).map(|l| format!("- {l}\n"));
    more.chain(less).collect()
}

/// Runs all cells and tells those that failed, each with what the daemon said.
fn run_all(cells: &[Cell], vmm: &'static str) {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                let mut lane = Lane::new(vmm);
                while let Some(cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = catch_unwind(AssertUnwindSafe(|| lane.run(cell)))
                        .unwrap_or_else(|_| Err("a panic, shown above".into()));
                    if let Err(why) = outcome {
                        failed.lock().unwrap().push(format!("{cell}: {why}\n{}", lane.node.log_text()));
                        if !lane.node.has_daemon() {
                            // So that the end of this host takes away what it can.
                            drop(catch_unwind(AssertUnwindSafe(|| lane.start())));
                        }
                        // The next cells begin on a host that this one has not touched.
                        lane = Lane::new(vmm);
                    }
                }
                lane.start();
                lane.node.end_clean();
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of {} cells:\n{}", failed.len(), cells.len(), failed.join("\n"));
}

#[test]
fn every_cell_leaves_the_host_as_it_was_or_the_sandbox_well() {
    if cannot("every_cell_leaves_the_host_as_it_was_or_the_sandbox_well", true) {
        return;
    }
    let mut cells = Cell::all();
    assert!(cells.len() >= 200, "{}", cells.len());
    // To look at some of them: part of a cell's name.
    if let Ok(some) = std::env::var("HEARTH_TEST_CELLS") {
        cells.retain(|cell| cell.to_string().contains(&some));
    }
    let begun = Instant::now();
    run_all(&cells, "process");
    let seconds = begun.elapsed().as_secs();
    hearth_testkit::report(&format!("crash matrix on the kernel: {} cells in {seconds} s", cells.len()));
}

#[test]
fn a_cut_of_the_matrix_with_real_guests() {
    if cannot("a_cut_of_the_matrix_with_real_guests", true) {
        return;
    }
    let cells = [
        (Place::Create(Step::Boot), Blow::Kill9After),
        (Place::Create(Step::Boot), Blow::KillShim),
        (Place::Exec, Blow::Kill9),
        (Place::Release(ReleaseStep::Stop), Blow::Kill9),
    ]
    .map(|(place, blow)| Cell { place, blow, then: Then::RestartTwice });
    run_all(&cells, "qemu");
    hearth_testkit::report(&format!("crash matrix with real guests: {} cells", cells.len()));
}
