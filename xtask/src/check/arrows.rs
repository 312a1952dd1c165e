//! Which crate may depend on which. A new crate needs a row here.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::tree::Tree;
use super::{Finding, Outcome};

/// core says what, host does it, vmm runs one VM, node decides when, hearth wires and serves.
const ARROWS: &[(&str, &[&str])] = &[
    ("hearth", &["hearth-node", "hearth-vmm", "hearth-host", "hearth-api", "hearth-core"]),
    ("hearth-node", &["hearth-api", "hearth-core"]),
    ("hearth-vmm", &["hearth-host", "hearth-core"]),
    ("hearth-host", &["hearth-core"]),
    ("hearth-guest", &["hearth-core"]),
    ("hearth-testkit", &["hearth-core"]),
    ("hearth-api", &[]),
    ("hearth-core", &[]),
    ("xtask", &["hearth-host", "hearth-testkit", "hearth-api", "hearth-core"]),
];

/// Asks cargo for the dependencies and compares.
pub(crate) fn check(tree: &Tree) -> Result<Outcome> {
    let output = Command::new(super::tools::cargo())
        .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
        .current_dir(&tree.root)
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata is not JSON")?;
    Ok(Outcome::of(compare(&metadata, &tree.root)))
}

/// Line of the manifest that names the dependency; 0 if it cannot be seen.
pub(crate) fn line_of_dependency(manifest: &str, name: &str) -> usize {
    let names = |line: &str| {
        let line = line.trim_start();
        // `libc = …`, `libc.workspace = …`, `[dependencies.libc]`
        line.strip_prefix(name).is_some_and(|r| r.starts_with([' ', '=', '.']))
            || (line.starts_with('[') && line.trim_end().ends_with(&format!("dependencies.{name}]")))
    };
    manifest.lines().position(names).map_or(0, |at| at + 1)
}

fn compare(metadata: &Value, root: &Path) -> Vec<Finding> {
    let mut findings = vec![];
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ours: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let file = manifest.strip_prefix(root).unwrap_or(manifest);
        let Some((_, allowed)) = ARROWS.iter().find(|(from, _)| *from == name) else {
            findings.push(Finding::new(file, 0, format!("{name} has no row in xtask/src/check/arrows.rs")));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            // Tests may use anything.
            if dependency["kind"] == "dev" || !ours.contains(&to) || allowed.contains(&to) {
                continue;
            }
            let text = std::fs::read_to_string(manifest).unwrap_or_default();
            let what = format!("{name} must not depend on {to}");
            findings.push(Finding::new(file, line_of_dependency(&text, to), what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tree::planted::{places, tree};

    const WORKSPACE: &str = "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n";

    fn member(name: &str, rest: &str) -> String {
        format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n{rest}")
    }

    #[test]
    fn an_arrow_the_wrong_way_is_refused_and_a_test_dependency_is_not() {
        let core = member("hearth-core", "[dependencies]\nhearth-host = { path = \"../host\" }\n");
        let host = member("hearth-host", "[dev-dependencies]\nhearth-node = { path = \"../node\" }\n");
        let node = member("hearth-node", "");
        let (_dir, tree) = tree(&[
            ("Cargo.toml", WORKSPACE),
            ("crates/core/Cargo.toml", &core),
            ("crates/core/src/lib.rs", "//! x\n"),
            ("crates/host/Cargo.toml", &host),
            ("crates/host/src/lib.rs", "//! x\n"),
            ("crates/node/Cargo.toml", &node),
            ("crates/node/src/lib.rs", "//! x\n"),
        ]);
        let outcome = check(&tree).unwrap();
        assert_eq!(places(&outcome.findings), [("crates/core/Cargo.toml".into(), 6)]);
        assert!(outcome.findings[0].what.contains("hearth-core must not depend on hearth-host"));
    }

    #[test]
    fn a_new_crate_needs_a_row() {
        let (_dir, tree) = tree(&[
            ("Cargo.toml", WORKSPACE),
            ("crates/new/Cargo.toml", &member("hearth-new", "")),
            ("crates/new/src/lib.rs", "//! x\n"),
        ]);
        assert_eq!(places(&check(&tree).unwrap().findings), [("crates/new/Cargo.toml".into(), 0)]);
    }
}
