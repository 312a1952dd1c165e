//! Checks made by other programs: rustfmt, clippy, shellcheck.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result};

use super::tree::Tree;
use super::{Finding, Outcome};

/// The cargo that runs this program, else the one in PATH.
pub(crate) fn cargo() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Format of every crate.
pub(crate) fn rustfmt(root: &Path) -> Result<Outcome> {
    let output = run(root, &cargo(), &["fmt", "--all", "--check"])?.context("there is no cargo")?;
    let mut outcome = outcome_of(&output);
    if outcome.failed {
        let places = differences(&String::from_utf8_lossy(&output.stdout), root);
        if !places.is_empty() {
            outcome = Outcome::of(places);
        }
    }
    Ok(outcome)
}

/// Lints of every crate, tests included; a warning is a failure.
pub(crate) fn clippy(root: &Path) -> Result<Outcome> {
    let args = [
        "clippy",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--locked",
        "--message-format=short",
        "--",
        "-D",
        "warnings",
    ];
    Ok(outcome_of(&run(root, &cargo(), &args)?.context("there is no cargo")?))
}

/// Every shell script, one by one, sources followed.
pub(crate) fn shellcheck(tree: &Tree) -> Result<Outcome> {
    let mut args = vec!["--external-sources".into(), "--format=gcc".into()];
    args.extend(tree.scripts.iter().map(|p| p.display().to_string()));
    if tree.scripts.is_empty() {
        return Ok(Outcome::skipped("there are no scripts"));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&tree.root, &"shellcheck".into(), &args)? {
        Some(output) => Ok(outcome_of(&output)),
        None => Ok(Outcome::skipped("shellcheck is not installed")),
    }
}

/// Runs a program; `None` if there is none of that name.
fn run(root: &Path, program: &OsString, args: &[&str]) -> Result<Option<Output>> {
    match Command::new(program).args(args).current_dir(root).output() {
        Ok(output) => Ok(Some(output)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot run {}", program.display())),
    }
}

fn outcome_of(output: &Output) -> Outcome {
    if output.status.success() {
        return Outcome::default();
    }
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    let text = text.lines().map(|line| format!("    {line}\n")).collect();
    Outcome { failed: true, output: text, ..Outcome::default() }
}

/// Places in the output of `rustfmt --check`: lines like `Diff in /path/file.rs:12:`. The line is where the
/// shown part begins, a few before the first change.
fn differences(output: &str, root: &Path) -> Vec<Finding> {
    let mut findings = vec![];
    for line in output.lines() {
        let Some(place) = line.strip_prefix("Diff in ") else { continue };
        let (file, line) = place.trim_end_matches(':').rsplit_once(':').unwrap_or((place, "0"));
        let file = Path::new(file);
        let file = file.strip_prefix(root).unwrap_or(file);
        findings.push(Finding::new(file, line.parse().unwrap_or(0), "run cargo fmt --all"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::check::tree::planted::{places, tree};

    const MANIFEST: &str =
        "[package]\nname = \"planted\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n";

    /// Says that a test could not run, on stdout and in the log that scripts/test reads.
    fn skip(name: &str, why: &str) {
        let line = format!("SKIPPED: {name}: {why}\n");
        print!("{line}");
        if let Some(log) = std::env::var_os("HEARTH_SKIP_LOG") {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(log).unwrap();
            file.write_all(line.as_bytes()).unwrap();
        }
    }

    fn has(tool: &str) -> bool {
        run(Path::new("."), &cargo(), &[tool, "--version"]).unwrap().is_some_and(|o| o.status.success())
    }

    #[test]
    fn unformatted_code_is_named() {
        if !has("fmt") {
            return skip("unformatted_code_is_named", "there is no rustfmt");
        }
        let (dir, _) = tree(&[("Cargo.toml", MANIFEST), ("src/lib.rs", "//! x\n\nfn  f( ) {}\n")]);
        let root = dir.path().canonicalize().unwrap();
        assert_eq!(places(&rustfmt(&root).unwrap().findings), [("src/lib.rs".into(), 1)]);
    }

    #[test]
    fn a_lint_fails() {
        if !has("clippy") {
            return skip("a_lint_fails", "there is no clippy");
        }
        let lock = "version = 4\n\n[[package]]\nname = \"planted\"\nversion = \"0.1.0\"\n";
        let fault = "//! x\n\n/// Doc.\npub fn f(x: u8) -> bool {\n    return x >= 0;\n}\n";
        let (dir, _) = tree(&[("Cargo.toml", MANIFEST), ("Cargo.lock", lock), ("src/lib.rs", fault)]);
        let outcome = clippy(dir.path()).unwrap();
        assert!(!outcome.good() && outcome.output.contains("src/lib.rs:5"), "{}", outcome.output);
    }

    #[test]
    fn a_careless_script_fails() {
        let (_dir, tree) = tree(&[("scripts/x", "#!/bin/sh\nrm $1\n")]);
        let outcome = shellcheck(&tree).unwrap();
        match outcome.skipped {
            Some(why) => skip("a_careless_script_fails", &why),
            None => assert!(!outcome.good() && outcome.output.contains("scripts/x:2"), "{}", outcome.output),
        }
    }
}
