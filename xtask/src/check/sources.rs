//! Checks of each Rust file by itself.

use std::path::Path;

use super::tree::{File, Tree};
use super::{Finding, Outcome, strip};

/// More lines than this are refused.
const MAX_LINES: usize = 800;
/// More lines than this are worth a thought.
const MANY_LINES: usize = 400;
/// The word that begins a line about a test that did not run, and the one file that may write it.
const SKIP_WORD: &str = "SKIPPED";
const SKIP_FILE: &str = "crates/testkit/src/skip.rs";
/// Crates whose business is the kernel.
const KERNEL_CRATES: [&str; 2] = ["host", "guest"];

/// Every file begins with a `//!` that says what it owns.
pub(crate) fn headers(tree: &Tree) -> Outcome {
    let bad = tree.rust.iter().filter(|f| !f.text.starts_with("//!"));
    Outcome::of(bad.map(|f| Finding::new(&f.path, 1, "begin with //! and what this file owns")).collect())
}

/// No file is too long to read.
pub(crate) fn lengths(tree: &Tree) -> Outcome {
    let mut outcome = Outcome::default();
    for file in &tree.rust {
        let lines = file.text.lines().count();
        let finding =
            Finding::new(&file.path, lines, format!("{lines} lines; at most {MAX_LINES}, split it"));
        if lines > MAX_LINES {
            outcome.findings.push(finding);
        } else if lines > MANY_LINES {
            outcome.warnings.push(Finding { what: format!("{lines} lines"), ..finding });
        }
    }
    outcome
}

/// A test that only prints its skip would count as passed: `hearth_testkit::skip` alone writes the word. The
/// checks' own code is exempt, which looks for it.
pub(crate) fn raw_skips(tree: &Tree) -> Outcome {
    let looked_at = |f: &&File| f.path != Path::new(SKIP_FILE) && f.member() != "xtask";
    Outcome::of(tree.rust.iter().filter(looked_at).flat_map(skip_literals).collect())
}

fn skip_literals(file: &File) -> Vec<Finding> {
    let with = strip::blank(&file.text, strip::Strings::Keep);
    let without = strip::blank(&file.text, strip::Strings::Blank);
    let count = |line: &str| line.matches(SKIP_WORD).count();
    let lines = with.lines().zip(without.lines()).enumerate();
    lines
        .filter(|(_, (with, without))| count(with) > count(without))
        .map(|(at, _)| Finding::new(&file.path, at + 1, "call hearth_testkit::skip, which is counted"))
        .collect()
}

/// `unsafe`, and leave to use it, only in the crates that reach a kernel. Tests count too.
pub(crate) fn unsafe_code(tree: &Tree) -> Outcome {
    let outside = tree.rust.iter().filter(|f| !KERNEL_CRATES.contains(&f.member()));
    Outcome::of(outside.flat_map(unsafe_words).collect())
}

fn unsafe_words(file: &File) -> Vec<Finding> {
    let code = strip::blank(&file.text, strip::Strings::Blank);
    let mut findings = vec![];
    for (at, line) in code.lines().enumerate() {
        let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        let allowed = line.contains("allow(") || line.contains("expect(");
        if words.any(|w| w == "unsafe" || (w == "unsafe_code" && allowed)) {
            findings.push(Finding::new(&file.path, at + 1, "unsafe outside host and guest; move it there"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tree::planted::{places, tree};

    #[test]
    fn a_file_without_a_header_is_named() {
        let (_dir, tree) = tree(&[("a.rs", "//! Good.\n"), ("b.rs", "// Not enough.\n"), ("tests/c.rs", "")]);
        assert_eq!(places(&headers(&tree).findings), [("b.rs".into(), 1), ("tests/c.rs".into(), 1)]);
    }

    #[test]
    fn long_files_are_refused_and_longish_ones_mentioned() {
        let (long, longish) = ("//!\n".repeat(801), "//!\n".repeat(401));
        let (_dir, tree) = tree(&[("a.rs", &long), ("b.rs", &longish), ("c.rs", "//!\n")]);
        let outcome = lengths(&tree);
        assert_eq!(places(&outcome.findings), [("a.rs".into(), 801)]);
        assert_eq!(places(&outcome.warnings), [("b.rs".into(), 401)]);
    }

    #[test]
    fn unsafe_is_found_outside_host_and_guest_only() {
        let fault = "//! x\nfn f() {\n    unsafe { g() }\n}\n";
        let (_dir, tree) = tree(&[
            ("crates/host/src/a.rs", fault),
            ("crates/guest/src/a.rs", fault),
            ("crates/node/src/a.rs", fault),
            (
                "crates/core/src/a.rs",
                "//! No unsafe here.\n#![deny(unsafe_code)]\nconst A: &str = \"unsafe\";\n",
            ),
            ("crates/vmm/src/a.rs", "//! x\n#![allow(unsafe_code)]\n"),
            ("xtask/src/a.rs", "//! x\n#[cfg(test)]\nmod tests {\n    unsafe fn f() {}\n}\n"),
        ]);
        assert_eq!(
            places(&unsafe_code(&tree).findings),
            [
                ("crates/node/src/a.rs".into(), 3),
                ("crates/vmm/src/a.rs".into(), 2),
                ("xtask/src/a.rs".into(), 4)
            ]
        );
    }
    #[test]
    fn skips_that_are_only_printed_are_found() {
        let fault = "//! SKIPPED\nfn f() {\n    // SKIPPED\n    println!(\"SKIPPED: {x}\");\n}\n";
        let (_dir, tree) = tree(&[
            ("crates/testkit/src/skip.rs", fault),
            ("crates/node/tests/a.rs", fault),
            ("crates/core/src/a.rs", "//! x\nconst SKIPPED: u8 = 1;\nconst B: &str = r#\"SKIPPED\"#;\n"),
            ("xtask/src/a.rs", fault),
        ]);
        assert_eq!(
            places(&raw_skips(&tree).findings),
            [("crates/core/src/a.rs".into(), 3), ("crates/node/tests/a.rs".into(), 4)]
        );
    }
}
