//! `hearth doctor` beside a busy daemon, without one, beside one that hangs, and without root: what it says is true,
//! and it changes nothing.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::dirty::{layout, leak, slot};
use crate::node::{Node, Wish, cannot, hearth, in_path, text};

const NOBODY: &str = "nobodynobodynobo";

const WISH: Wish = Wish {
    test: "process_vmm = true",
    slot_pool: 2,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// One diagnosis, and the exit code.
fn doctor(node: &Node) -> (i32, Value) {
    let out = node.cli(&["doctor", "--json"]);
    let answer = serde_json::from_slice(&out.stdout);
    let answer = answer.unwrap_or_else(|e| panic!("{e}: {}\n{}", text(&out.stderr), node.log_text()));
    (out.status.code().unwrap(), answer)
}

/// The items in one state, as "kind name".
fn in_state(diagnosis: &Value, state: &str) -> Vec<String> {
    let items = diagnosis["items"].as_array().unwrap().iter().filter(|i| i["state"] == state);
    items.map(|i| format!("{} {}", i["kind"].as_str().unwrap(), i["name"].as_str().unwrap())).collect()
}

/// That nothing was found but what the machine under the test is short of.
fn assert_no_finding(diagnosis: &Value, node: &Node) {
    for state in ["leaked", "stuck", "unknown"] {
        assert!(in_state(diagnosis, state).is_empty(), "{diagnosis:#}\n{}", node.log_text());
    }
    assert_eq!(diagnosis["disagreements"].as_array().unwrap().len(), 0, "{diagnosis:#}");
    assert_eq!(diagnosis["unseen"].as_array().unwrap().len(), 0, "{diagnosis:#}");
}

fn number(variable: &str, usual: u32) -> u32 {
    std::env::var(variable).map_or(usual, |n| n.parse().unwrap())
}

#[test]
fn beside_a_busy_daemon_nothing_is_found() {
    if cannot("beside_a_busy_daemon_nothing_is_found", true) {
        return;
    }
    let (runs, sandboxes) = (number("HEARTH_TEST_DOCTOR_RUNS", 8), number("HEARTH_TEST_DOCTOR_SANDBOXES", 4));
    let node = Node::start(&WISH);
    let create = |name: &str| {
        node.ok(&["create", "busybox", "--name", name, "--vmm", "process", "--disk", "16"]);
    };
    (0..sandboxes).for_each(|n| create(&format!("s{n}")));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                create("churn");
                node.ok(&["rm", "churn"]);
            }
        });
        let ends = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..runs {
                let (_, diagnosis) = doctor(&node);
                assert_no_finding(&diagnosis, &node);
                assert_eq!(diagnosis["daemon"]["state"], "up");
                let live = in_state(&diagnosis, "live");
                let of = |kind: &str| live.iter().filter(|i| i.starts_with(&format!("{kind} "))).count();
                for kind in ["record", "cgroup", "process", "netns", "veth", "tap", "sandbox-firewall"] {
                    assert!(of(kind) >= sandboxes as usize, "{kind}: {live:#?}");
                }
                assert_eq!(of("host-firewall"), 1);
            }
        }));
        over.store(true, Ordering::Relaxed);
        if let Err(panic) = ends {
            std::panic::resume_unwind(panic);
        }
    });
    node.end_clean();
}

#[test]
fn it_makes_no_system_call_that_changes_anything() {
    const TEST: &str = "it_makes_no_system_call_that_changes_anything";
    if cannot(TEST, true) {
        return;
    }
    if !in_path("strace") {
        hearth_testkit::skip(TEST, "strace is not in PATH");
        return;
    }
    let node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "one", "--vmm", "process", "--disk", "16"]);
    leak(&node, 1000..=1000);
    let log = node.dir.path().join("strace.log");
    let strace = format!("strace -f -y -s 0 -o {} {} doctor --json", log.display(), hearth().display());
    let mut words = strace.split(' ');
    let mut command = node.netns.command(words.next().unwrap());
    let out = command.args(words).env("HEARTH_CONFIG", node.config()).output().unwrap();
    assert!(serde_json::from_slice::<Value>(&out.stdout).is_ok(), "{}", text(&out.stderr));
    let calls = fs::read_to_string(&log).unwrap();
    let bad: Vec<&str> = calls.lines().filter(|line| changes(line)).collect();
    assert!(calls.lines().count() > 500 && bad.is_empty(), "{bad:#?}");
    fs::remove_file(log).unwrap();
    // What leaked goes with the next pass, which the daemon itself makes.
    release_leaked(&node);
    node.end_clean();
}

/// Whether a line of strace shows a call that changes something outside the process.
fn changes(line: &str) -> bool {
    let Some((_, call)) = line.split_once(' ') else { return false };
    let call = call.trim_start();
    let name = call.split('(').next().unwrap_or_default();
    match name {
        "unlink" | "unlinkat" | "rename" | "renameat" | "renameat2" | "mkdir" | "mkdirat" | "rmdir"
        | "mount" | "umount2" | "link" | "linkat" | "symlink" | "symlinkat" | "chmod" | "fchmod"
        | "fchmodat" | "chown" | "fchown" | "fchownat" | "truncate" | "ftruncate" | "fallocate" | "mknod"
        | "mknodat" | "setxattr" | "tgkill" | "tkill" | "pidfd_send_signal" | "flock" | "unshare"
        | "sethostname" | "reboot" | "init_module" | "finit_module" | "bpf" | "move_mount" | "execveat" => {
            true
        }
        // Signal 0 only asks.
        "kill" => !call.contains(", 0)"),
        "execve" => !call.contains("doctor") && !call.contains("/hearth"),
        "open" | "openat" | "openat2" | "creat" => {
            let writes = ["O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC"].iter().any(|f| call.contains(f));
            writes && !call.contains("/dev/null") && !call.contains("/dev/tty")
        }
        "write" | "writev" | "pwrite64" => {
            let own = ["(1<", "(2<", "<anon_inode", "<socket", "<pipe", "<TCP", "<UNIX"];
            !own.iter().any(|o| call.contains(o))
        }
        "sendto" | "sendmsg" => {
            let word = |w: &str| call.contains(w);
            word("RTM_NEW")
                || word("RTM_DEL")
                || word("RTM_SET")
                || word("NFT_MSG_NEW")
                || word("NFT_MSG_DEL")
        }
        _ => false,
    }
}

/// Makes the daemon release what leaked.
fn release_leaked(node: &Node) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(120);
    while !node.cli(&["node", "reconcile"]).status.success() {
        assert!(std::time::Instant::now() < end, "never released: {}", node.log_text());
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
}

/// A process with a shim's arguments that is none. It ends with its stdin.
fn decoy(node: &Node, dir: &Path) -> Child {
    fs::write(dir.join("shim"), "read x\n").unwrap();
    let run = node.dir.path().join("r").join(&node.instance).join("sandboxes").join(NOBODY);
    let mut command = Command::new("sh");
    command.arg0("/usr/bin/hearth").current_dir(dir).args(["shim", "--dir"]).arg(run);
    command.stdin(Stdio::piped()).spawn().unwrap()
}

#[test]
fn true_leftovers_are_told_from_look_alikes() {
    if cannot("true_leftovers_are_told_from_look_alikes", true) {
        return;
    }
    let mut node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    node.ok(&["create", "busybox", "--name", "dies", "--vmm", "process", "--disk", "16"]);
    let (lives, dies) = (node.inspect("lives"), node.inspect("dies"));
    node.kill_daemon();
    let shim = dies["shim_pid"].as_u64().unwrap().to_string();
    assert!(Command::new("kill").args(["-9", &shim]).status().unwrap().success());

    leak(&node, 1000..=1003);
    let cgroups = hearth_host::cgroup::Cgroups::locate(&node.instance.parse().unwrap()).unwrap();
    cgroups.ensure(NOBODY).unwrap();
    let run: PathBuf = node.dir.path().join("r").join(&node.instance).join("sandboxes");
    fs::create_dir(run.join(NOBODY)).unwrap();
    // Look-alikes: of another node, of another nature, of another place.
    let other = format!("hearth-{}-other-1000", node.instance);
    node.host("ip", &["netns", "add", &other]);
    let plain = layout(&node).netns_path(slot(1500));
    fs::write(&plain, "an operator's notes").unwrap();
    node.host("ip", &["link", "add", "hxv1501", "type", "veth", "peer", "name", "other"]);
    fs::create_dir(run.join("notes")).unwrap();
    fs::create_dir(cgroups.root().join("Not-An-Id")).unwrap();
    let scripts = tempfile::tempdir().unwrap();
    let mut decoy = decoy(&node, scripts.path());

    let (code, diagnosis) = doctor(&node);
    assert_eq!((code, diagnosis["daemon"]["state"].as_str()), (1, Some("down")), "{diagnosis:#}");
    let leaked = in_state(&diagnosis, "leaked");
    let has = |what: String| assert!(leaked.contains(&what), "{what} is not in {leaked:#?}");
    for n in 1000..=1003 {
        has(format!("netns hearth-{}-{n}", node.instance));
        has(format!("veth hxv{n}"));
    }
    has(format!("cgroup {}", cgroups.root().join(NOBODY).display()));
    has(format!("directory {}", run.join(NOBODY).display()));
    has(format!("record {}", dies["id"].as_str().unwrap()));
    let live = in_state(&diagnosis, "live");
    assert!(live.contains(&format!("record {}", lives["id"].as_str().unwrap())), "{live:#?}");
    assert!(live.contains(&format!("netns hearth-{}-{}", node.instance, lives["slot"])), "{live:#?}");
    let foreign = in_state(&diagnosis, "foreign");
    for what in [
        format!("netns {other}"),
        format!("netns hearth-{}-1500", node.instance),
        "veth hxv1501".into(),
        format!("directory {}", run.join("notes").display()),
        format!("cgroup {}", cgroups.root().join("Not-An-Id").display()),
        format!("process {}", decoy.id()),
    ] {
        assert!(foreign.contains(&what), "{what} is not in {foreign:#?}");
    }
    // Its shim died, and with it everything that its record still names is nobody's.
    let said = &diagnosis["disagreements"].to_string();
    assert!(said.contains(&format!("shim {shim} is gone")), "{said}");
    // The same for a person, in 80 columns and without colour.
    let shown = node.cli(&["doctor"]);
    let shown = text(&shown.stdout);
    assert!(
        shown.contains("Daemon down") && shown.contains("leaked   netns") && !shown.contains('\x1b'),
        "{shown}"
    );

    drop(decoy.stdin.take());
    decoy.wait().unwrap();
    node.host("ip", &["netns", "del", &other]);
    node.host("ip", &["link", "del", "hxv1501"]);
    fs::remove_file(plain).unwrap();
    fs::remove_dir(run.join("notes")).unwrap();
    fs::remove_dir(cgroups.root().join("Not-An-Id")).unwrap();
    node.start_daemon();
    crate::dirty::until(&node, "reclaimed", crate::dirty::reclaim_is_done);
    release_leaked(&node);
    node.end_clean();
}

#[test]
fn a_daemon_that_hangs_hides_only_its_own_view() {
    if cannot("a_daemon_that_hangs_hides_only_its_own_view", true) {
        return;
    }
    let node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    let id = node.inspect("lives")["id"].as_str().unwrap().to_owned();
    let pid = node.daemon_pid().to_string();
    let signal =
        |signal: &str| assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    signal("-STOP");
    let (code, diagnosis) = doctor(&node);
    signal("-CONT");
    assert_eq!((code, &diagnosis["daemon"]["state"]), (1, &Value::from("silent")), "{diagnosis:#}");
    let why = diagnosis["daemon"]["why"].as_str().unwrap();
    assert!(why.contains(&format!("pid {pid} holds the instance's lock")), "{why}");
    assert!(in_state(&diagnosis, "live").contains(&format!("record {id}")), "{diagnosis:#}");
    // The prepared slots are in its memory alone.
    assert!(in_state(&diagnosis, "leaked").is_empty(), "{diagnosis:#}");
    assert!(!in_state(&diagnosis, "unknown").is_empty(), "{diagnosis:#}");
    node.end_clean();
}

#[test]
fn without_root_it_says_what_it_could_not_see() {
    const TEST: &str = "without_root_it_says_what_it_could_not_see";
    if cannot(TEST, true) {
        return;
    }
    if !in_path("setpriv") {
        hearth_testkit::skip(TEST, "setpriv is not in PATH");
        return;
    }
    let node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    let id = node.inspect("lives")["id"].as_str().unwrap().to_owned();
    // Where another user can reach them.
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = place.path().join("hearth");
    fs::copy(hearth(), &program).unwrap();
    let config = place.path().join("hearth.toml");
    fs::copy(node.config(), &config).unwrap();
    let run = || {
        let mut command = node.netns.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(&program);
        let out = command.args(["doctor", "--json"]).env("HEARTH_CONFIG", &config).output().unwrap();
        let answer = serde_json::from_slice::<Value>(&out.stdout);
        (out.status.code().unwrap(), answer.unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr))))
    };
    // The daemon answers whoever asks, so its books are seen all the same.
    let (code, diagnosis) = run();
    assert_eq!((code, &diagnosis["host"]["root"]), (1, &Value::from(false)), "{diagnosis:#}");
    let unseen = diagnosis["unseen"].to_string();
    for what in ["record:", "directories", "host-firewall", "tap: "] {
        assert!(unseen.contains(what), "{what}: {unseen}");
    }
    assert!(in_state(&diagnosis, "leaked").is_empty(), "{diagnosis:#}");
    let cgroup = diagnosis["items"].as_array().unwrap().iter().find(|i| i["kind"] == "cgroup").unwrap();
    assert_eq!((&cgroup["state"], &cgroup["owner"]["sandbox"]), (&"live".into(), &id.into()), "{cgroup}");
    node.end_clean();
}

#[test]
fn a_report_has_what_is_needed_and_no_secret() {
    if cannot("a_report_has_what_is_needed_and_no_secret", true) {
        return;
    }
    let node = Node::start(&Wish { env: &[("HEARTH_TOKEN", "t0kens3cret")], ..WISH });
    let create = [
        "create",
        "busybox",
        "--name",
        "one",
        "--vmm",
        "process",
        "--disk",
        "16",
        "--env",
        "KEY=v4lues3cret",
    ];
    node.ok(&create);
    let to = node.dir.path().join("report.json");
    node.ok(&["doctor", "report", "--to", to.to_str().unwrap()]);
    let report = fs::read_to_string(&to).unwrap();
    assert!(!report.contains("s3cret"), "a secret is in the report");
    let value: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(value["doctor"]["daemon"]["state"], "up", "{value:#}");
    assert_eq!(value["node"]["instance"], node.instance.as_str());
    assert!(report.contains("\"KEY\"") && value["preflight"].as_array().unwrap().len() > 5);
    assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o600);
    // What is there is not overwritten.
    let again = node.cli(&["doctor", "report", "--to", to.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(1), "{}", text(&again.stderr));
    assert_eq!(fs::read_to_string(&to).unwrap(), report);
    fs::remove_file(to).unwrap();
    node.end_clean();
}
