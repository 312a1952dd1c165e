//! What became of a suite: read from the machine's results, told in one line a part.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::Item;

/// Exit code of a part that never ran.
const NEVER_RAN: u8 = 1;

/// The whole suite.
#[derive(Debug)]
pub(crate) struct Report {
    parts: Vec<Part>,
    skips: Vec<String>,
    notes: Vec<String>,
}

/// One part of it. Of a command the command itself counts as the one test.
#[derive(Debug, Default, PartialEq, Eq)]
struct Part {
    name: String,
    /// Exit code and seconds; absent if it did not run.
    ran: Option<(u8, u64)>,
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Report {
    /// Reads the directory that the machine filled.
    pub(crate) fn read(dir: &Path, suite: &[Item]) -> Result<Self> {
        let items = text(&dir.join("items"))?;
        let mut report = Self { parts: vec![], skips: vec![], notes: vec![] };
        for (number, item) in suite.iter().enumerate() {
            let file = |kind: &str| text(&dir.join(format!("{kind}.{number}")));
            let skips: BTreeSet<String> = file("skips")?.lines().map(str::to_owned).collect();
            let ran = items.lines().find_map(|line| ended(line, number));
            report.parts.push(Part::of(item, ran, &file("output")?, &skips));
            report.skips.extend(skips);
            report.notes.extend(file("notes")?.lines().map(str::to_owned));
        }
        Ok(report)
    }

    /// 0, or the exit code of the first part that failed.
    pub(crate) fn code(&self) -> u8 {
        self.parts.iter().map(Part::code).find(|code| *code != 0).unwrap_or(0)
    }

    /// Appends skips and notes to the files that `HEARTH_SKIP_LOG` and `HEARTH_REPORT` name, as tests outside do.
    ///
    /// # Errors
    /// If a file cannot be written: a skip must not be lost.
    pub(crate) fn hand_on(&self) -> Result<()> {
        for (variable, lines) in [("HEARTH_SKIP_LOG", &self.skips), ("HEARTH_REPORT", &self.notes)] {
            let Some(path) = std::env::var_os(variable) else { continue };
            let text: String = lines.iter().map(|line| format!("{line} (in the lab)\n")).collect();
            let file = fs::OpenOptions::new().create(true).append(true).open(&path);
            let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
            written.with_context(|| format!("write {}", path.display()))?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        for line in self.skips.iter().chain(&self.notes) {
            writeln!(f, "lab: {line}")?;
        }
        // scripts/test reads these lines.
        for Part { name, ran, passed, failed, skipped } in &self.parts {
            let end = match ran {
                Some((code, seconds)) => format!("exit code {code} after {seconds} s"),
                None => "did not run".to_owned(),
            };
            writeln!(f, "lab: {name}: {end}: {passed} passed, {failed} failed, {skipped} skipped")?;
        }
        Ok(())
    }
}

impl Part {
    fn of(item: &Item, ran: Option<(u8, u64)>, output: &str, skips: &BTreeSet<String>) -> Self {
        let good = matches!(ran, Some((0, _)));
        let counted = match item {
            Item::Test { .. } => output.lines().rev().find_map(counts),
            Item::Command(_) => Some((usize::from(good), usize::from(!good), 0)),
        };
        let (passed, failed, ignored) = counted.unwrap_or((0, 1, 0));
        // A test that could not run passes as far as its program knows.
        let skipped = skips.len().min(passed);
        // A program that failed without naming a test.
        let failed = if good { failed } else { failed.max(1) };
        Self { name: item.name(), ran, passed: passed - skipped, failed, skipped: skipped + ignored }
    }

    fn code(&self) -> u8 {
        match self.ran {
            Some((0, _)) if self.failed > 0 => NEVER_RAN,
            Some((code, _)) => code,
            None => NEVER_RAN,
        }
    }
}

/// The exit code and seconds in a line "number code seconds", if it is about that number.
fn ended(line: &str, number: usize) -> Option<(u8, u64)> {
    let mut words = line.split_ascii_whitespace();
    (words.next()?.parse() == Ok(number)).then_some(())?;
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

/// Passed, failed and ignored of a line "test result: ok. 3 passed; 0 failed; 1 ignored; …".
fn counts(line: &str) -> Option<(usize, usize, usize)> {
    let (_, rest) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut numbers = rest.split("; ").map(|part| part.split(' ').next()?.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

/// Text of a file; there need not be one.
fn text(path: &Path) -> Result<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(e).with_context(|| format!("read {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(files: &[(&str, &str)], suite: &[Item]) -> Report {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        Report::read(dir.path(), suite).unwrap()
    }

    #[test]
    fn skips_are_not_passed_and_the_first_failure_gives_the_code() {
        let suite = [Item::test("a:b").unwrap(), Item::Command("false".into()), Item::Command("true".into())];
        let report = report(
            &[
                ("items", "0 0 12\n1 7 0\n2 0 1\n"),
                ("output.0", "noise\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured\n\n"),
                ("skips.0", "SKIPPED: one: no reason\nSKIPPED: one: no reason\n"),
            ],
            &suite,
        );
        assert_eq!(report.code(), 7);
        let text = report.to_string();
        for line in [
            "lab: a:b: exit code 0 after 12 s: 2 passed, 0 failed, 2 skipped",
            "lab: false: exit code 7 after 0 s: 0 passed, 1 failed, 0 skipped",
            "lab: true: exit code 0 after 1 s: 1 passed, 0 failed, 0 skipped",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\nnot in\n{text}");
        }
    }

    #[test]
    fn what_did_not_run_or_gave_no_result_failed() {
        let suite = [Item::test("a:b").unwrap(), Item::test("a:c").unwrap()];
        let report = report(&[("items", "0 0 1\n"), ("output.0", "nothing of a result\n")], &suite);
        assert_eq!(report.parts.iter().map(|p| (p.passed, p.failed)).collect::<Vec<_>>(), [(0, 1), (0, 1)]);
        assert_eq!(report.code(), NEVER_RAN);
        assert!(report.to_string().contains("lab: a:c: did not run: 0 passed, 1 failed"));
    }
}
