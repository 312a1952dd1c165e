//! The checks. Each looks at the tree and returns what it found; all run, then the result is one yes or no.
//!
//! A check must not change anything and must not depend on another.

mod arrows;
mod documents;
mod kernel;
mod sources;
mod strip;
mod tools;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;

use tree::Tree;

/// One thing that is wrong, with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Relative to the checkout.
    file: PathBuf,
    /// From 1; 0 where it is about the whole file.
    line: usize,
    /// What is wrong and what to do.
    what: String,
}

impl Finding {
    fn new(file: impl Into<PathBuf>, line: usize, what: impl Into<String>) -> Self {
        Self { file: file.into(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ": {}", self.what)
    }
}

/// How one check ended.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Each makes the check fail.
    findings: Vec<Finding>,
    /// Shown, but no failure.
    warnings: Vec<Finding>,
    /// Why it could not run.
    skipped: Option<String>,
    /// Output of a tool that failed, shown as it is.
    output: String,
    /// A tool failed without a place to point at.
    failed: bool,
}

impl Outcome {
    fn of(findings: Vec<Finding>) -> Self {
        Self { findings, ..Self::default() }
    }

    fn skipped(why: impl Into<String>) -> Self {
        Self { skipped: Some(why.into()), ..Self::default() }
    }

    fn good(&self) -> bool {
        self.findings.is_empty() && !self.failed
    }
}

type Check<'a> = (&'static str, Box<dyn Fn() -> Result<Outcome> + 'a>);

/// Runs every check and prints a line for each; true if none failed.
pub(crate) fn run(root: &Path, fast: bool) -> Result<bool> {
    let tree = Tree::read(root)?;
    let mut checks: Vec<Check<'_>> = vec![
        ("every source file says what it owns", Box::new(|| Ok(sources::headers(&tree)))),
        ("no source file is too long", Box::new(|| Ok(sources::lengths(&tree)))),
        ("unsafe only in host and guest", Box::new(|| Ok(sources::unsafe_code(&tree)))),
        ("tests that do not run are counted as skipped", Box::new(|| Ok(sources::raw_skips(&tree)))),
        ("only host and guest reach the kernel", Box::new(|| kernel::check(&tree))),
        ("crate direction", Box::new(|| arrows::check(&tree))),
        ("paths named in ARCHITECTURE.md exist", Box::new(|| Ok(documents::paths(&tree)))),
        ("links between documents resolve", Box::new(|| Ok(documents::links(&tree)))),
        ("tests named in docs/guarantees.md exist", Box::new(|| Ok(documents::guarantees(&tree)))),
        ("shellcheck", Box::new(|| tools::shellcheck(&tree))),
        ("rustfmt", Box::new(|| tools::rustfmt(root))),
    ];
    if !fast {
        checks.push(("clippy", Box::new(|| tools::clippy(root))));
    }
    let mut failed = 0;
    for (name, check) in &checks {
        let outcome = check().unwrap_or_else(|error| Outcome {
            failed: true,
            output: format!("{error:#}\n"),
            ..Outcome::default()
        });
        print(name, &outcome);
        failed += usize::from(!outcome.good());
    }
    println!("{} checks, {failed} failed", checks.len());
    Ok(failed == 0)
}

fn print(name: &str, outcome: &Outcome) {
    let word = match (&outcome.skipped, outcome.good()) {
        (Some(_), _) => "skipped",
        (None, true) => "ok",
        (None, false) => "FAIL",
    };
    match &outcome.skipped {
        Some(why) => println!("{word:<8}{name}: {why}"),
        None => println!("{word:<8}{name}"),
    }
    for finding in &outcome.findings {
        println!("    {finding}");
    }
    for warning in &outcome.warnings {
        println!("    warning: {warning}");
    }
    print!("{}", outcome.output);
}
