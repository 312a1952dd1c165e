//! Ten true leftovers of each kind among ten look-alikes of each: all of the first are listed and removed, and none of the
//! second is touched.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::dirty::{layout, leak, present, slot};
use crate::layout::{Dirty, in_state, tools_missing};
use crate::node::{Node, Wish, cannot, in_path, text};

const EACH: u32 = 10;

/// What only looks like a leftover. Everything is held, alive, or another's, and goes with this value.
struct LookAlikes {
    processes: Vec<Child>,
    /// Orphans with somebody at their API socket, by pid.
    served: Vec<String>,
    sockets: Vec<(PathBuf, UnixListener, UnixStream)>,
    fifos: Vec<(PathBuf, fs::File)>,
    files: Vec<PathBuf>,
    netns: Vec<String>,
    links: Vec<String>,
    cgroups: Vec<PathBuf>,
}

/// A process that waits, with the arguments of a VMM.
fn decoy(socket: &Path) -> Command {
    let mut command = Command::new("bash");
    command.arg0("/opt/fc/firecracker").args(["-c", "read -r line", "--api-sock"]).arg(socket);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl LookAlikes {
    fn plant(dirty: &Dirty, cgroup_root: &Path) -> Self {
        let mut all = Self {
            processes: vec![],
            served: vec![],
            sockets: vec![],
            fifos: vec![],
            files: vec![],
            netns: vec![],
            links: vec![],
            cgroups: vec![],
        };
        for n in 0..EACH {
            all.decoys(dirty, n);
            all.held_files(dirty, n);
            all.names(dirty, n);
            all.cgroup(dirty, cgroup_root, n);
            rules(dirty, n);
        }
        all
    }

    /// A process of ours by a VMM's arguments, one that somebody speaks to though its parent is gone, and a stranger
    /// in a slot.
    fn decoys(&mut self, dirty: &Dirty, n: u32) {
        self.processes.push(decoy(&dirty.file("fc", &format!("decoy{n}-rnd.sock"))).spawn().unwrap());
        let socket = dirty.file("fc", &format!("served{n}-rnd.sock"));
        self.hold(socket.clone());
        // Its parent ends at once, so it is an orphan by its parent alone.
        let line =
            "(exec -a /opt/fc/firecracker bash -c 'sleep 600 & echo $!; wait' --api-sock \"$0\" & echo $!)";
        let mut command = Command::new("bash");
        command.args(["-c", line]).arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = std::io::BufReader::new(child.stdout.take().unwrap());
        for _ in 0..2 {
            let mut pid = String::new();
            std::io::BufRead::read_line(&mut said, &mut pid).unwrap();
            self.served.push(pid.trim().to_owned());
        }
        child.wait().unwrap();
        let slot = format!("ns-{}", dirty.slot(EACH + n));
        dirty.host("ip", &["netns", "add", &slot]);
        let inside = format!("--net=/run/netns/{slot}");
        self.processes.push(Command::new("nsenter").args([&inside, "sleep", "600"]).spawn().unwrap());
        self.netns.push(slot);
    }

    fn hold(&mut self, path: PathBuf) {
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        self.sockets.push((path, listener, client));
    }

    /// A socket and a FIFO that somebody has open, and a file of that name that is neither.
    fn held_files(&mut self, dirty: &Dirty, n: u32) {
        self.hold(dirty.file("uffd", &format!("held{n}-rnd.sock")));
        let fifo = dirty.file("fc-metrics", &format!("held{n}-rnd.fifo"));
        dirty.host("mkfifo", &[fifo.to_str().unwrap()]);
        let open = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
        self.fifos.push((fifo, open));
        let file = dirty.file("uffd", &format!("plain{n}-rnd.sock"));
        fs::write(&file, "a file").unwrap();
        self.files.push(file);
    }

    /// Namespaces and links that are called almost like a slot's, or that are no slot's.
    fn names(&mut self, dirty: &Dirty, n: u32) {
        for name in [format!("ns-0{}", dirty.slot(n)), format!("ns-{}-b", dirty.slot(n))] {
            dirty.host("ip", &["netns", "add", &name]);
            self.netns.push(name);
        }
        let link = format!("veth-{}", dirty.slot(2 * EACH + n));
        dirty.host("ip", &["link", "add", &link, "type", "veth", "peer", "name", &format!("other{n}")]);
        self.links.push(link);
    }

    /// A sandbox's cgroup with a process in it that is somebody's, and one of another grammar.
    fn cgroup(&mut self, dirty: &Dirty, root: &Path, n: u32) {
        let name = dirty.file("sbx", &format!("lives{n}-rnd"));
        let lives = root.join(name.file_name().unwrap());
        let other = root.join(format!("{}.slice", lives.file_name().unwrap().to_string_lossy()));
        for dir in [&lives, &other] {
            fs::create_dir(dir).unwrap();
        }
        let child = decoy(&dirty.file("fc", &format!("lives{n}-rnd.sock"))).spawn().unwrap();
        fs::write(lives.join("cgroup.procs"), child.id().to_string()).unwrap();
        self.processes.push(child);
        self.cgroups.extend([lives, other]);
    }

    fn assert_untouched(&mut self, dirty: &Dirty) {
        for child in &mut self.processes {
            assert!(child.try_wait().unwrap().is_none(), "process {} was ended", child.id());
        }
        for pid in &self.served {
            assert!(fs::exists(format!("/proc/{pid}")).unwrap(), "process {pid} was ended");
        }
        for (path, ..) in &self.sockets {
            assert!(UnixStream::connect(path).is_ok(), "{}", path.display());
        }
        for path in self.fifos.iter().map(|f| &f.0).chain(&self.cgroups) {
            assert!(path.exists(), "{}", path.display());
        }
        for path in &self.files {
            assert_eq!(fs::read_to_string(path).unwrap(), "a file");
        }
        for name in &self.netns {
            assert!(fs::exists(format!("/run/netns/{name}")).unwrap(), "{name}");
        }
        let links = dirty.host("ip", &["-o", "link"]);
        self.links.iter().for_each(|link| assert!(links.contains(&format!("{link}@")), "{link}: {links}"));
    }

    fn remove(mut self, dirty: &Dirty) {
        for child in &mut self.processes {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        for pid in &self.served {
            // The second of a pair may end with the first.
            drop(Command::new("kill").args(["-KILL", pid]).output());
        }
        self.netns.iter().for_each(|name| drop(dirty.host("ip", &["netns", "del", name])));
        self.links.iter().for_each(|link| drop(dirty.host("ip", &["link", "del", link])));
        self.cgroups.iter().for_each(|cgroup| remove_cgroup(cgroup));
    }
}

/// Rules that speak of a slot and are not the orchestrator's.
fn rules(dirty: &Dirty, n: u32) {
    let (veth, address) = (format!("veth-{}", dirty.slot(n)), dirty.address(n));
    dirty.host("iptables", &["-A", "FORWARD", "-i", &veth, "-p", "udp", "-j", "DROP"]);
    dirty.host("iptables", &["-I", "FORWARD", "-s", &address, "-j", "ACCEPT"]);
    let about = format!("about {veth}");
    dirty.host("iptables", &["-A", "INPUT", "-m", "comment", "--comment", &about, "-j", "ACCEPT"]);
    dirty.host(
        "iptables",
        &["-t", "nat", "-A", "POSTROUTING", "-s", &address, "-p", "tcp", "-j", "MASQUERADE"],
    );
    let element = format!("{{ {} }}", address.trim_end_matches("/32"));
    dirty.host("nft", &["add", "element", "inet", "others", "addresses", &element]);
}

/// "kind name" of each.
fn names(list: &Value) -> BTreeSet<String> {
    let of = |a: &Value| format!("{} {}", a["kind"].as_str().unwrap(), a["name"].as_str().unwrap());
    list.as_array().unwrap().iter().map(of).collect()
}

#[test]
fn of_ten_true_leftovers_and_ten_look_alikes_of_each_kind_the_true_ones_go() {
    let test = "of_ten_true_leftovers_and_ten_look_alikes_of_each_kind_the_true_ones_go";
    if tools_missing(test) {
        return;
    }
    if !in_path("nft") {
        hearth_testkit::skip(test, "nft is not in PATH");
        return;
    }
    let dirty = Dirty::make(EACH, EACH);
    dirty.host("nft", &["add", "table", "inet", "others"]);
    dirty.host("nft", &["add", "set", "inet", "others", "addresses", "{ type ipv4_addr; }"]);
    let cgroup_root = hearth_host::cgroup::mount_point().unwrap().unwrap().join("e2b");
    let mut look_alikes = LookAlikes::plant(&dirty, &cgroup_root);

    let before = dirty.rules();
    let sets = dirty.host("nft", &["-s", "list", "table", "inet", "others"]);
    let plan = dirty.json(&["reclaim", "plan", "--json"]);
    let planned = names(&plan["actions"]);
    let of = |kind: &str| planned.iter().filter(|n| n.starts_with(&format!("{kind} "))).count();
    let found = ["process", "socket", "fifo", "cgroup", "rule", "netns"].map(of);
    assert_eq!(found, [10, 20, 10, 10, 60, 10], "{planned:#?}");
    assert_eq!(planned.len(), 120, "{planned:#?}");
    let its_own: BTreeSet<String> =
        planned.iter().filter_map(|n| Some(format!("-A {}", n.strip_prefix("rule ")?))).collect();

    let out = dirty.hearth(&["reclaim", "apply", "--yes", "--json", "--grace", "5s", "--parallel", "4"]);
    let answer: Value =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)));
    assert!(out.status.success(), "{answer:#}");
    assert_eq!(answer["removed"], 120, "{answer:#}");
    assert_eq!(names(&answer["outcomes"]), planned, "what was listed is not what was removed");
    look_alikes.assert_untouched(&dirty);
    let foreign: Vec<&String> = before.iter().filter(|rule| !its_own.contains(*rule)).collect();
    assert_eq!(before.len() - foreign.len(), 60);
    assert_eq!(dirty.rules().iter().collect::<Vec<_>>(), foreign, "foreign rules changed");
    assert_eq!(dirty.host("nft", &["-s", "list", "table", "inet", "others"]), sets);
    let after = dirty.json(&["doctor", "--json"]);
    assert!(in_state(&after, "leaked").is_empty(), "{after:#}");
    look_alikes.remove(&dirty);
    dirty.clean();
}

const WISH: Wish = Wish {
    test: "process_vmm = true\n[reconcile]\ninterval_seconds = 3600",
    slot_pool: 0,
    prefix_len: 20,
    env: &[],
    keep_exits: 0,
    own_state: false,
};

/// A process with a shim's arguments that is none of this instance's. It ends with its stdin.
fn decoy_shim(node: &Node, run: &Path, n: u32) -> Child {
    fs::write(node.dir.path().join("shim"), "read x\n").unwrap();
    let mut command = Command::new("sh");
    command.arg0("/usr/bin/hearth").current_dir(node.dir.path()).args(["shim", "--dir"]);
    command.arg(run.join(nobody(n))).stdin(Stdio::piped()).spawn().unwrap()
}

/// The id of a sandbox that there is not.
fn nobody(n: u32) -> String {
    format!("nobodynobodyno{n:02}")
}

#[test]
fn of_an_instance_the_true_leftovers_go_and_ten_look_alikes_of_each_kind_stay() {
    if cannot("of_an_instance_the_true_leftovers_go_and_ten_look_alikes_of_each_kind_stay", true) {
        return;
    }
    let mut node = Node::start(&WISH);
    node.ok(&["create", "busybox", "--name", "lives", "--vmm", "process", "--disk", "16"]);
    let before = node.inspect("lives");
    node.kill_daemon();
    let run: PathBuf = node.dir.path().join("r").join(&node.instance).join("sandboxes");
    let cgroups = hearth_host::cgroup::Cgroups::locate(&node.instance.parse().unwrap()).unwrap();
    // The cgroups of another instance of this host.
    let others = cgroups.root().with_file_name(format!("{}-b", node.instance));
    fs::create_dir(&others).unwrap();
    let (mut ours, mut theirs, mut decoys, mut kept) = (vec![], vec![], vec![], vec![]);
    leak(&node, 1000..=999 + EACH);
    let sleep_in = |cgroup: &Path| {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).unwrap();
        child
    };
    for n in 0..EACH {
        cgroups.ensure(&nobody(n)).unwrap();
        ours.push(sleep_in(&cgroups.root().join(nobody(n))));
        fs::create_dir(run.join(nobody(n))).unwrap();
        // Of another instance, of another nature, of another grammar.
        let other = format!("hearth-{}-b-{}", node.instance, 1000 + n);
        let padded = format!("hearth-{}-0{}", node.instance, 1100 + n);
        for name in [other, padded] {
            node.host("ip", &["netns", "add", &name]);
            kept.push(name);
        }
        fs::write(layout(&node).netns_path(slot(1500 + n)), "notes").unwrap();
        let link = format!("hxv{}", 1600 + n);
        node.host("ip", &["link", "add", &link, "type", "veth", "peer", "name", &format!("other{n}")]);
        fs::create_dir(others.join(nobody(n))).unwrap();
        theirs.push(sleep_in(&others.join(nobody(n))));
        fs::create_dir(cgroups.root().join(format!("Not-An-Id-{n}"))).unwrap();
        fs::create_dir(run.join(format!("notes-{n}"))).unwrap();
        decoys.push(decoy_shim(&node, &run, n));
        node.host("nft", &["add", "table", "inet", &format!("hearth-other{n}")]);
    }
    let rules = node.host("nft", &["-s", "list", "ruleset"]);
    let json = |args: &[&str]| -> Value {
        let out = node.cli(args);
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
    };
    let planned = names(&json(&["reclaim", "plan", "--json"])["actions"]);
    let of = |kind: &str| planned.iter().filter(|n| n.starts_with(&format!("{kind} "))).count();
    assert_eq!(["process", "cgroup", "directory", "netns"].map(of), [10; 4], "{planned:#?}");
    assert_eq!(planned.len(), 40, "{planned:#?}");
    let answer = json(&["reclaim", "apply", "--yes", "--json", "--grace", "5s"]);
    assert_eq!(answer["removed"], 40, "{answer:#}");
    for child in &mut ours {
        child.wait().unwrap();
    }
    assert_eq!(
        present(&node),
        (1500..1500 + EACH).chain(1600..1600 + EACH).chain(slot_of(&before)).collect()
    );

    assert_eq!(node.host("nft", &["-s", "list", "ruleset"]), rules);
    for child in theirs.iter_mut().chain(&mut decoys) {
        assert!(child.try_wait().unwrap().is_none(), "process {} was ended", child.id());
    }
    for n in 0..EACH {
        assert_eq!(fs::read_to_string(layout(&node).netns_path(slot(1500 + n))).unwrap(), "notes");
        assert!(others.join(nobody(n)).exists() && run.join(format!("notes-{n}")).exists());
        assert!(cgroups.root().join(format!("Not-An-Id-{n}")).exists());
        fs::remove_file(layout(&node).netns_path(slot(1500 + n))).unwrap();
        node.host("ip", &["link", "del", &format!("hxv{}", 1600 + n)]);
        fs::remove_dir(cgroups.root().join(format!("Not-An-Id-{n}"))).unwrap();
        fs::remove_dir(run.join(format!("notes-{n}"))).unwrap();
    }
    for name in &kept {
        assert!(fs::exists(format!("/run/netns/{name}")).unwrap(), "{name}");
        node.host("ip", &["netns", "del", name]);
    }
    theirs.iter_mut().chain(&mut decoys).for_each(|child| {
        child.kill().unwrap();
        child.wait().unwrap();
    });
    for n in 0..EACH {
        remove_cgroup(&others.join(nobody(n)));
    }
    remove_cgroup(&others);
    fs::remove_file(node.dir.path().join("shim")).unwrap();
    node.start_daemon();
    let after = node.inspect("lives");
    for key in ["id", "shim_pid", "slot", "state"] {
        assert_eq!(before[key], after[key], "{key}");
    }
    node.end_clean();
}

/// The slot of a sandbox.
fn slot_of(sandbox: &Value) -> Option<u32> {
    sandbox["slot"].as_u64().and_then(|n| u32::try_from(n).ok())
}

/// A process leaves its cgroup a moment after its end.
fn remove_cgroup(cgroup: &Path) {
    let end = Instant::now() + Duration::from_secs(20);
    while let Err(e) = fs::remove_dir(cgroup) {
        assert!(Instant::now() < end, "{}: {e}", cgroup.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}
