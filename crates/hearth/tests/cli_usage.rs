//! The command line without a daemon: usage errors, configuration, completions, help.

#![allow(clippy::unwrap_used, reason = "in a test a failed step is the failure of the test")]

use std::path::Path;
use std::process::{Command, Output};

fn hearth(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HEARTH_")) {
        command.env_remove(name);
    }
    command.args(args).envs(env.iter().copied()).env("COLUMNS", "80").output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// An empty configuration file, so that one of this machine plays no part.
fn config(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

fn path(file: &tempfile::NamedTempFile) -> &str {
    file.path().to_str().unwrap()
}

#[test]
fn usage_errors_exit_2_and_say_what_is_allowed() {
    let long = "x".repeat(300);
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage"),
        (&["fly"], "unrecognized subcommand"),
        (&["run"], "TEMPLATE"),
        (&["run", "base"], "hearth run base -- uname -a"),
        (&["run", "--cpus", "0", "base", "--", "true"], "0 is outside 1 to 32"),
        (&["run", "--cpus", "10000", "base", "--", "true"], "10000 is outside 1 to 32"),
        (&["run", "--memory", "3", "base", "--", "true"], "3 MiB is outside 64 MiB"),
        (&["run", "--memory", "lots", "base", "--", "true"], "512M"),
        (&["run", "--disk", "1M", "base", "--", "true"], "16 MiB"),
        (&["run", "--timeout", "soon", "base", "--", "true"], "30s, 5m, 2h"),
        (&["run", "--net", "maybe", "base", "--", "true"], "neither on nor off"),
        (&["run", "--vmm", "xen", "base", "--", "true"], "auto, firecracker, qemu"),
        (&["run", "--name", "a/b", "base", "--", "true"], "has the character '/'"),
        (&["run", "--name", &long, "base", "--", "true"], "sandbox name has 300 bytes; at most 63"),
        (&["run", "../etc", "--", "true"], "template name"),
        (&["run", "--env", "=x", "base", "--", "true"], "NAME=VALUE"),
        (&["run", "--keep", "--standalone", "base", "--", "true"], "cannot be used with"),
        (&["exec", "web"], "hearth exec web -- uname -a"),
        (&["rm"], "NAME"),
        (&["template", "create", "x"], "--debian"),
        (&["template", "create", "x", "--dir", "/", "--kernel-only"], "cannot be used with"),
        (&["template", "create", "x", "--dir", "/", "--include", "a"], "--debian"),
        (&["completions", "tcsh"], "bash, zsh, fish"),
        (&["serve", "--config", "/no/such/file", "--print-config"], "/no/such/file could not be read"),
        (&["serve", "--addr", "0.0.0.0:1"], "use --listen"),
        (&["ls", "--addr", "not an address"], "write ADDRESS:PORT"),
    ];
    for (args, expected) in cases {
        let output = hearth(args, &[]);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
    }
}

#[test]
fn errors_are_objects_with_json() {
    for (args, code) in [
        (["run", "--json", "--cpus=0", "base"], 2),
        (["run", "--json", "--cpus=1", "base"], 2),
        (["inspect", "--json", "--addr=127.0.0.1:1", "web"], 3),
    ] {
        let output = hearth(&args, &[]);
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let object: serde_json::Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(object["error"]["exit_code"], code, "{object}");
        assert!(!object["error"]["message"].as_str().unwrap().is_empty());
    }
    // Behind the dashes it is the command's.
    let output = hearth(&["run", "--cpus=0", "base", "--", "jq", "--json"], &[]);
    assert!(stderr(&output).starts_with("error: "), "{output:?}");
}

#[test]
fn nobody_listening_is_3_and_says_what_to_start() {
    for args in [
        &["run", "base", "--", "true"][..],
        &["exec", "web", "--", "true"],
        &["ls"],
        &["logs", "web"],
        &["rm", "web"],
        &["rm", "--all"],
        &["create", "base"],
    ] {
        let output = hearth(args, &[("HEARTH_ADDR", "127.0.0.1:1")]);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {output:?}");
        let text = stderr(&output);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("hearth: no daemon answers at 127.0.0.1:1: Connection refused"), "{text}");
        assert!(text.contains("`hearth serve`") && text.contains("--standalone"), "{text}");
    }
}

#[test]
fn every_layer_of_the_configuration_is_named() {
    let file = config("vmm = \"qemu\"\nstate_dir = \"/srv/a\"\n[reclaim]\nparallelism = 4\n");
    let output = hearth(
        &[
            "serve",
            "--print-config",
            "--config",
            path(&file),
            "--cidr",
            "10.99.0.0/16",
            "--state-dir",
            "/srv/c",
        ],
        &[("HEARTH_STATE_DIR", "/srv/b"), ("HEARTH_RECLAIM_MODE", "off"), ("HEARTH_TOKEN", "s3cret")],
    );
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let text = stdout(&output);
    let line =
        |key: &str| text.lines().find(|l| l.starts_with(key)).unwrap_or_else(|| panic!("{key}: {text}"));
    assert!(line("listen = \"127.0.0.1:5008\"").ends_with("# default"));
    assert!(line("vmm = \"qemu\"").ends_with(&format!("# file {}", path(&file))));
    assert!(line("mode = \"off\"").ends_with("# environment HEARTH_RECLAIM_MODE"));
    assert!(line("state_dir = \"/srv/c\"").ends_with("# flag --state-dir"));
    assert!(line("cidr = \"10.99.0.0/16\"").ends_with("# flag --network-cidr"));
    assert!(line("# token").ends_with("# environment HEARTH_TOKEN"));
    assert!(!text.contains("s3cret"), "{text}");
    toml::from_str::<toml::Table>(&text).unwrap();

    let output = hearth(&["serve", "--print-config", "--json", "--config", path(&file)], &[]);
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["reclaim.parallelism"]["value"], 4);
}

#[test]
fn bad_configuration_is_refused_with_key_and_source() {
    let empty = config("");
    let typo = config("[network]\ncdir = \"10.0.0.0/16\"\n");
    /// Arguments, environment, what the error says.
    type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a str);
    let cases: &[Case<'_>] = &[
        (
            &["--config", path(&typo)],
            &[],
            "unknown key \"network.cdir\"; did you mean \"cidr\" in [network]?",
        ),
        (
            &["--config", path(&empty), "--listen", "0.0.0.0:5008"],
            &[],
            "listen (flag --listen): 0.0.0.0:5008 is not a loopback address and no token is set",
        ),
        (&["--config", path(&empty)], &[("HEARTH_LISTEN", "[::]:5008")], "set a token (HEARTH_TOKEN)"),
        (
            &["--config", path(&empty)],
            &[("HEARTH_NETWORK_SLOT_POL", "1")],
            "did you mean HEARTH_NETWORK_SLOT_POOL?",
        ),
        (&["--config", path(&empty), "--instance", "a/b"], &[], "has the character '/'"),
        (&["--config", path(&empty), "--veth-prefix", "muchtoolong"], &[], "at most 10 are allowed"),
    ];
    for (args, env, expected) in cases {
        let args: Vec<&str> = ["serve", "--print-config"].iter().chain(*args).copied().collect();
        let output = hearth(&args, env);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        assert!(stderr(&output).contains(expected), "{args:?}: {}", stderr(&output));
    }
    // Too far from every setting: somebody else's variable.
    let strange =
        hearth(&["serve", "--print-config", "--config", path(&empty)], &[("HEARTH_PORT", "tcp://1.2.3.4:5")]);
    assert_eq!(strange.status.code(), Some(0), "{strange:?}");
    let listening = hearth(
        &["serve", "--print-config", "--config", path(&empty), "--listen", "0.0.0.0:5008"],
        &[("HEARTH_TOKEN", "abc")],
    );
    assert_eq!(listening.status.code(), Some(0), "{listening:?}");
}

#[test]
fn completions_know_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let output = hearth(&["completions", shell], &[]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("preflight"), "{shell}");
    }
}

#[test]
fn every_subcommand_has_help_with_an_example() {
    for command in [
        "serve",
        "run",
        "create",
        "ls",
        "inspect",
        "exec",
        "logs",
        "rm",
        "template create",
        "template ls",
        "template rm",
        "kernel import",
        "kernel ls",
        "kernel rm",
        "preflight",
        "doctor",
        "doctor report",
        "reclaim plan",
        "reclaim apply",
        "block serve",
        "block diff",
        "block apply",
        "completions",
    ] {
        let args: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let output = hearth(&args, &[]);
        assert_eq!(output.status.code(), Some(0), "{command}");
        let text = stdout(&output);
        assert!(
            text.contains("Examples:") && text.contains(&format!("hearth {command}")),
            "{command}: {text}"
        );
    }
}

#[test]
fn the_first_page_of_help_is_as_reviewed() {
    let output = hearth(&["--help"], &[]);
    let expected = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli_help.txt");
    let reviewed = std::fs::read_to_string(&expected).unwrap_or_default();
    let text = stdout(&output);
    assert_eq!(text, reviewed, "if the change is meant, write the new text to {}", expected.display());
}

#[test]
fn lists_without_a_state_directory_are_empty_and_make_none() {
    let file = config("");
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    for kind in ["template", "kernel"] {
        let args = [kind, "ls", "--json", "--config", path(&file), "--state-dir", state.to_str().unwrap()];
        let output = hearth(&args, &[]);
        assert_eq!((output.status.code(), stdout(&output).trim()), (Some(0), "[]"), "{output:?}");
    }
    assert!(!state.exists());
}

#[test]
fn preflight_judges_in_json_and_in_words() {
    let file = config("state_dir = \"/no/such/state\"\n");
    let output = hearth(&["preflight", "--json", "--config", path(&file)], &[]);
    let checks: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    let failed = checks.iter().any(|c| c["result"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)));
    for wanted in
        ["root", "kvm", "firecracker", "qemu", "cgroup v2", "nftables", "addresses", "disk", "mke2fs", "port"]
    {
        assert!(checks.iter().any(|c| c["check"] == wanted), "{wanted}: {checks:?}");
    }
    let words = hearth(&["preflight", "--config", path(&file)], &[]);
    assert!(stdout(&words).starts_with("RESULT"), "{words:?}");
    assert!(!Path::new("/no/such").exists());
}
