//! The files in `deploy/`, read as their readers would, against the daemon itself: its flags, its defaults as
//! it prints them, and the paths it answers.
#![allow(clippy::unwrap_used, unreachable_pub, missing_docs, dead_code)]

#[path = "e2e/node.rs"]
mod node;
#[path = "e2e/probe.rs"]
mod probe;
#[path = "e2e/running.rs"]
mod running;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use hcl::{Block, Body, Expression};
use node::{Node, Wish, cannot, hearth, in_path, text};

/// What the daemon may need beyond a drain: joining its tasks, saying goodbye to connections.
const TO_END: Duration = Duration::from_secs(120);

fn deployed(file: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `hearth serve ARGS --print-config --json`, without this process's own settings: key → value.
fn configuration(args: &[String], env: &[(String, String)]) -> serde_json::Value {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hearth.toml");
    fs::write(&file, "").unwrap();
    let mut command = Command::new(hearth());
    command.env_clear().env("HEARTH_CONFIG", &file).envs(env.iter().cloned());
    let out = command.args(args).args(["--print-config", "--json"]).output().unwrap();
    assert!(out.status.success(), "hearth {args:?}: {}", text(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

fn seconds(config: &serde_json::Value, key: &str) -> Duration {
    Duration::from_secs(config[key]["value"].as_u64().unwrap_or_else(|| panic!("{key} in {config}")))
}

// ---- systemd ----

type Unit = BTreeMap<String, BTreeMap<String, Vec<String>>>;

fn unit() -> Unit {
    unit_of("hearth.service")
}

/// `[Section]` → key → values, as systemd reads a unit: a key may be there more than once.
fn unit_of(name: &str) -> Unit {
    let mut unit = Unit::new();
    let mut section = String::new();
    for line in deployed(&format!("systemd/{name}")).lines().map(str::trim) {
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = name.to_owned();
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("no assignment: {line}"));
        let values = unit.entry(section.clone()).or_default().entry(key.trim().to_owned()).or_default();
        values.push(value.trim().to_owned());
    }
    unit
}

/// The one value of a key in `[Service]`.
fn service(key: &str) -> String {
    let unit = unit();
    let values = unit["Service"].get(key).unwrap_or_else(|| panic!("no {key}"));
    assert_eq!(values.len(), 1, "{key}: {values:?}");
    values[0].clone()
}

fn service_seconds(key: &str) -> Duration {
    Duration::from_secs(service(key).parse().unwrap_or_else(|_| panic!("{key}: not plain seconds")))
}

fn exec_start() -> Vec<String> {
    service("ExecStart").split_whitespace().skip(1).map(str::to_owned).collect()
}

#[test]
fn the_unit_starts_the_daemon_with_flags_it_knows() {
    let config = configuration(&exec_start(), &[]);
    assert!(service_seconds("TimeoutStartSec") > seconds(&config, "takeover_seconds"));
    assert!(service_seconds("TimeoutStopSec") >= seconds(&config, "shutdown.drain_seconds") + TO_END);
    // systemd makes these directories, so they must be the daemon's.
    let value = |key: &str| config[key]["value"].as_str().unwrap().to_owned();
    assert_eq!(value("run_dir"), format!("/run/{}", service("RuntimeDirectory")));
    assert_eq!(value("state_dir"), format!("/var/lib/{}", service("StateDirectory")));
}

#[test]
fn the_unit_lets_sandboxes_outlive_the_daemon() {
    for (key, value) in [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("KillMode", "process"),
        ("Delegate", "yes"),
        ("Restart", "on-failure"),
        ("TasksMax", "infinity"),
        // The sockets of living sandboxes are in it.
        ("RuntimeDirectoryPreserve", "yes"),
        ("PrivateMounts", "no"),
    ] {
        assert_eq!(service(key), value, "{key}");
    }
    assert!(
        service_seconds("WatchdogSec") >= Duration::from_secs(10),
        "a busy machine must not count as dead"
    );
    assert_eq!(unit()["Unit"]["StartLimitIntervalSec"], ["0"], "a node is never given up");
    // Each makes a mount namespace, in which what is bound in /run/netns is not seen by the host.
    let unit = unit();
    let own_mounts = |key: &&String| {
        ["ProtectS", "ProtectH", "ProtectK", "ProtectC", "ProtectP", "PrivateT", "PrivateD", "PrivateU"]
            .iter()
            .any(|p| key.starts_with(p))
            || ["Paths", "Namespace", "RootDirectory", "RootImage", "TemporaryFileSystem", "DynamicUser"]
                .iter()
                .any(|p| key.contains(p))
            || ["MountFlags", "PrivateNetwork", "RestrictNamespaces", "User"].contains(&key.as_str())
    };
    let found: Vec<&String> = unit["Service"].keys().filter(own_mounts).collect();
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn systemd_finds_no_fault_with_the_unit() {
    match systemd_says(&["hearth.service"], |unit| unit) {
        Ok(said) => assert_eq!(said, ""),
        Err(why) => {
            hearth_testkit::skip("systemd_finds_no_fault_with_the_unit", &why);
            return;
        }
    }
    let wrong = |unit: String| unit.replace("KillMode=process", "KillMood=process");
    let said = systemd_says(&["hearth.service"], wrong).unwrap();
    assert!(said.contains("KillMood"), "a wrong key goes unnoticed: {said}");
}

/// Why `systemd-analyze verify` cannot be used here, or what it says of these units, whose program is this one.
fn systemd_says(units: &[&str], change: impl Fn(String) -> String) -> Result<String, String> {
    if !in_path("systemd-analyze") {
        return Err("no systemd-analyze".into());
    }
    let dir = tempfile::tempdir().unwrap();
    let verify = |files: &[PathBuf]| {
        let out = Command::new("systemd-analyze").args(["verify", "--man=no"]).args(files).output().unwrap();
        (out.status.success(), text(&out.stderr))
    };
    let plain = dir.path().join("plain.service");
    fs::write(&plain, "[Service]\nType=oneshot\nExecStart=/bin/true\n").unwrap();
    let (works, said) = verify(&[plain]);
    if !works {
        return Err(format!("systemd-analyze does not work here: {said}"));
    }
    let write = |unit: &&str| {
        let here =
            deployed(&format!("systemd/{unit}")).replace("/usr/local/bin/hearth", hearth().to_str().unwrap());
        let file = dir.path().join(unit);
        fs::write(&file, change(here)).unwrap();
        file
    };
    let files: Vec<PathBuf> = units.iter().map(write).collect();
    let (_, said) = verify(&files);
    Ok(said.lines().filter(|l| units.iter().any(|u| l.contains(u))).map(|l| format!("{l}\n")).collect())
}

/// The regular jobs.
const JOBS: [&str; 2] = ["doctor", "reclaim"];

#[test]
fn systemd_finds_no_fault_with_the_regular_jobs() {
    for job in JOBS {
        let units = [format!("hearth-{job}.service"), format!("hearth-{job}.timer")];
        let units: Vec<&str> = units.iter().map(String::as_str).collect();
        match systemd_says(&units, |unit| unit) {
            Ok(said) => assert_eq!(said, ""),
            Err(why) => {
                hearth_testkit::skip("systemd_finds_no_fault_with_the_regular_jobs", &why);
                return;
            }
        }
        let said = systemd_says(&units, |unit| unit.replace("OnBootSec", "OnBotSec")).unwrap();
        assert!(said.contains("OnBotSec"), "a wrong key goes unnoticed: {said}");
    }
}

/// Whether the command line takes them, with their values.
fn takes(args: &[String]) -> bool {
    let out = Command::new(hearth()).env_clear().args(args).arg("--help").output().unwrap();
    out.status.success()
}

/// Commands of a unit, with its own variables put in.
fn commands(unit: &Unit) -> Vec<Vec<String>> {
    let service = &unit["Service"];
    let variables: Vec<(&str, &str)> =
        service.get("Environment").into_iter().flatten().map(|v| v.split_once('=').unwrap()).collect();
    let put_in = |word: &str| {
        let named = variables.iter().find(|(name, _)| word == format!("${{{name}}}"));
        named.map_or(word, |(_, value)| value).to_owned()
    };
    service["ExecStart"]
        .iter()
        .map(|line| {
            let (program, args) = line.split_once(' ').unwrap();
            assert_eq!(program, "/usr/local/bin/hearth");
            args.split_whitespace().map(put_in).collect()
        })
        .collect()
}

#[test]
fn the_regular_jobs_give_options_that_there_are_and_never_ask() {
    assert!(!takes(&["doctor".into(), "--jsno".into()]), "a wrong option goes unnoticed");
    for name in JOBS {
        let unit = unit_of(&format!("hearth-{name}.service"));
        assert_eq!(unit["Service"]["Type"], ["oneshot"]);
        assert_eq!(unit["Service"]["PrivateMounts"], ["no"], "the host's namespaces would not be seen");
        let job: Body = hcl::parse(&deployed(&format!("nomad/hearth-{name}.nomad.hcl"))).unwrap();
        let job = block(&job, &["job"]).body();
        // Once on each client, and not again because something was found.
        assert_eq!(word(job, "type"), "sysbatch");
        let periodic = block(job, &["periodic"]).body();
        assert!(matches!(attribute(periodic, "prohibit_overlap"), Some(Expression::Bool(true))));
        let group = block(job, &["group"]).body();
        let restart = block(group, &["restart"]).body();
        assert_eq!(word(restart, "mode"), "fail");
        assert!(
            matches!(attribute(restart, "attempts"), Some(Expression::Number(n)) if n.as_u64() == Some(0))
        );
        let tasks: Vec<Vec<String>> = blocks(group, "task")
            .map(|task| {
                assert_eq!(word(task.body(), "driver"), "raw_exec");
                args(block(task.body(), &["config"]).body())
            })
            .collect();
        let lines = commands(&unit);
        assert_eq!(lines, tasks, "systemd and Nomad do not run the same");
        for line in lines {
            assert!(takes(&line), "{line:?}");
            assert!(line.contains(&"--json".to_owned()), "{line:?}");
            if line.contains(&"apply".to_owned()) {
                let has = |option: &str| line.iter().any(|a| a == option);
                assert!(has("--yes") && has("--max") && !has("--interactive"), "{line:?}");
            }
        }
    }
}

#[test]
fn the_regular_jobs_end_with_their_codes_where_nobody_can_be_asked() {
    let test = "the_regular_jobs_end_with_their_codes_where_nobody_can_be_asked";
    if cannot(test, false) {
        return;
    }
    let node = Node::start(&Wish { own_state: true, ..Wish::default() });
    for name in JOBS {
        for line in commands(&unit_of(&format!("hearth-{name}.service"))) {
            // For the instance of this test: another layout's things are the whole machine's.
            let line: Vec<&str> = line.iter().map(String::as_str).collect();
            let line: Vec<&str> = line.iter().take_while(|a| **a != "--layout").copied().collect();
            let line: Vec<&str> = match line.contains(&"apply") {
                // The daemon reclaims, and all of it.
                true => line.into_iter().filter(|a| !["--max", "50"].contains(a)).collect(),
                false => line,
            };
            let out = node.cli(&line);
            let code = out.status.code().unwrap();
            let said: serde_json::Value = serde_json::from_slice(&out.stdout)
                .unwrap_or_else(|e| panic!("{line:?}: {e}: {}", text(&out.stderr)));
            match line[0] {
                "doctor" => {
                    let clean = said["findings"] == 0 && said["unseen"].as_array().unwrap().is_empty();
                    assert_eq!(code, i32::from(!clean), "{said:#}");
                }
                _ => assert_eq!(code, 0, "{line:?}: {said:#}"),
            }
        }
    }
    node.end_clean();
}

// ---- Nomad ----

fn job() -> Body {
    hcl::parse(&deployed("nomad/hearth.nomad.hcl")).unwrap()
}

fn blocks<'a>(body: &'a Body, name: &'a str) -> impl Iterator<Item = &'a Block> {
    body.blocks().filter(move |b| b.identifier() == name)
}

/// The one block of this name at the end of a path.
fn block<'a>(body: &'a Body, path: &[&'a str]) -> &'a Block {
    let (name, rest) = path.split_first().unwrap();
    let found: Vec<&Block> = blocks(body, name).collect();
    assert_eq!(found.len(), 1, "{name}");
    if rest.is_empty() { found[0] } else { block(found[0].body(), rest) }
}

fn attribute<'a>(body: &'a Body, key: &str) -> Option<&'a Expression> {
    body.attributes().find(|a| a.key() == key).map(hcl::Attribute::expr)
}

fn word(body: &Body, key: &str) -> String {
    match attribute(body, key) {
        Some(Expression::String(s)) => s.clone(),
        other => panic!("{key}: {other:?}"),
    }
}

/// `90s`, `5m`.
fn duration(body: &Body, key: &str) -> Duration {
    let value = word(body, key);
    let (number, unit) = value.split_at(value.len() - 1);
    let factor = match unit {
        "s" => 1,
        "m" => 60,
        _ => panic!("{key}: {value}"),
    };
    Duration::from_secs(number.parse::<u64>().unwrap() * factor)
}

/// Arguments and environment of the task, as the daemon gets them.
fn task_command(job: &Body) -> (Vec<String>, Vec<(String, String)>) {
    let task = block(job, &["job", "group", "task"]).body();
    let config = block(task, &["config"]).body();
    let env = block(task, &["env"]).body();
    let env = env.attributes().map(|a| (a.key().to_owned(), word(env, a.key())));
    (args(config), env.collect())
}

/// The arguments of a task's program.
fn args(config: &Body) -> Vec<String> {
    let Some(Expression::Array(args)) = attribute(config, "args") else { panic!("no args") };
    let plain = |a: &Expression| match a {
        Expression::String(s) => s.clone(),
        other => panic!("{other:?}"),
    };
    args.iter().map(plain).collect()
}

#[test]
fn the_job_starts_the_daemon_with_what_it_knows() {
    let job = job();
    let (args, env) = task_command(&job);
    let config = configuration(&args, &env);
    let group = block(&job, &["job", "group"]).body();
    assert_eq!(word(block(&job, &["job"]).body(), "type"), "system");
    let port = block(group, &["network", "port"]);
    let Some(Expression::Number(number)) = attribute(port.body(), "static") else { panic!("no static port") };
    let listen: std::net::SocketAddr = config["listen"]["value"].as_str().unwrap().parse().unwrap();
    assert_eq!(number.as_u64(), Some(listen.port().into()));
    let service = block(group, &["service"]).body();
    assert_eq!(word(service, "port"), port.labels()[0].as_str());
    assert_eq!(word(service, "address"), listen.ip().to_string());
    let task = block(group, &["task"]).body();
    assert_eq!(word(task, "driver"), "raw_exec");
    assert_eq!(word(task, "kill_signal"), "SIGTERM");
    let kill_timeout = duration(task, "kill_timeout");
    assert!(kill_timeout >= seconds(&config, "shutdown.drain_seconds") + TO_END);
    // The client cuts it without a word, so the file must say what to set.
    let needed = format!("max_kill_timeout = \"{}s\"", kill_timeout.as_secs());
    assert!(deployed("nomad/hearth.nomad.hcl").contains(&needed), "{needed}");
    // A node is never given up.
    assert_eq!(word(block(group, &["restart"]).body(), "mode"), "delay");
}

#[test]
fn only_liveness_restarts_the_job() {
    let job = job();
    let (args, env) = task_command(&job);
    let service = block(&job, &["job", "group", "service"]).body();
    assert_eq!(blocks(service, "check_restart").count(), 0, "every check would inherit it");
    let checks: BTreeMap<String, &Body> =
        blocks(service, "check").map(|c| (word(c.body(), "path"), c.body())).collect();
    let paths: Vec<&str> = checks.keys().map(String::as_str).collect();
    assert_eq!(paths, ["/health", "/health/live"]);
    for (path, check) in &checks {
        assert_eq!(word(check, "type"), "http");
        assert!(duration(check, "timeout") < duration(check, "interval"), "{path}");
    }
    assert_eq!(blocks(checks["/health"], "check_restart").count(), 0);
    let restart = block(checks["/health/live"], &["check_restart"]).body();
    let Some(Expression::Number(limit)) = attribute(restart, "limit") else { panic!("no limit") };
    assert!(limit.as_u64().unwrap() >= 2, "one lost answer is no death");
    assert!(duration(restart, "grace") > seconds(&configuration(&args, &env), "takeover_seconds"));
}

#[test]
fn the_daemon_answers_the_paths_that_are_checked() {
    let test = "the_daemon_answers_the_paths_that_are_checked";
    if cannot(test, false) {
        return;
    }
    let job = job();
    let node = Node::start(&Wish { own_state: true, ..Wish::default() });
    let service = block(&job, &["job", "group", "service"]).body();
    for check in blocks(service, "check") {
        let path = word(check.body(), "path");
        let (code, body) = probe::get(&node.netns, 5008, &path).expect("no answer");
        assert_eq!(code, 200, "{path}: {body}");
    }
    // So the above says something.
    assert_eq!(probe::get(&node.netns, 5008, "/healthy").expect("no answer").0, 404);
    node.end_clean();
}
