//! Checks of the documents: paths and tests they name exist, links between them resolve.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::tree::{File, Tree};
use super::{Finding, Outcome};

/// The map whose paths must exist.
const MAP: &str = "ARCHITECTURE.md";

/// Every path in backticks in ARCHITECTURE.md exists.
pub(crate) fn paths(tree: &Tree) -> Outcome {
    let mut findings = vec![];
    for file in tree.markdown.iter().filter(|f| f.path == Path::new(MAP)) {
        for (line, text) in prose(&file.text) {
            for span in text.split('`').skip(1).step_by(2) {
                if is_path(span) && !tree.root.join(span).exists() {
                    findings.push(Finding::new(&file.path, line, format!("{span} does not exist")));
                }
            }
        }
    }
    Outcome::of(findings)
}

/// Whether a code span names a file or folder of the checkout.
fn is_path(span: &str) -> bool {
    let shaped = span.contains('/') || [".rs", ".md", ".toml"].iter().any(|e| span.ends_with(e));
    // Absolute paths are on a host; the others are patterns, commands, addresses.
    let foreign = span.starts_with(['/', '~', '$', '-']) || span.contains("://");
    shaped && !foreign && !span.contains(['<', '>', '*', '{', ' ', '=', '(', '"'])
}

/// Every link to a file of the checkout, and to a heading in it, resolves.
pub(crate) fn links(tree: &Tree) -> Outcome {
    let anchors: BTreeMap<&Path, Vec<String>> =
        tree.markdown.iter().map(|f| (f.path.as_path(), headings(f))).collect();
    let mut findings = vec![];
    for file in &tree.markdown {
        for (line, text) in prose(&file.text) {
            for target in targets(&without_code(text)) {
                if let Some(what) = broken(tree, &anchors, &file.path, &target) {
                    findings.push(Finding::new(&file.path, line, what));
                }
            }
        }
    }
    Outcome::of(findings)
}

fn broken(tree: &Tree, anchors: &BTreeMap<&Path, Vec<String>>, from: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let to = if path.is_empty() {
        from.to_path_buf()
    } else {
        normal(&from.parent().unwrap_or(Path::new("")).join(path))
    };
    if !tree.root.join(&to).exists() {
        return Some(format!("link to {target}: {} does not exist", to.display()));
    }
    let known = anchors.get(to.as_path());
    let found = anchor.is_empty() || known.is_none_or(|all| all.iter().any(|a| a == anchor));
    (!found).then(|| format!("link to {target}: {} has no such heading", to.display()))
}

/// The table of promises, the last column of which names a test.
const GUARANTEES: &str = "docs/guarantees.md";

/// Every row of a table of promises names a test, `path::name`, that exists.
pub(crate) fn guarantees(tree: &Tree) -> Outcome {
    let mut findings = vec![];
    for file in tree.markdown.iter().filter(|f| f.path == Path::new(GUARANTEES)) {
        for (line, text) in prose(&file.text) {
            let cells: Vec<&str> = text.split('|').map(str::trim).collect();
            // Of a row: nothing before the first bar, three cells, nothing after the last one.
            let [_, guarantee, bound, test, _] = cells[..] else { continue };
            if guarantee == "guarantee" || guarantee.starts_with('-') {
                continue;
            }
            let what = match test.trim_matches('`').rsplit_once("::") {
                _ if bound.is_empty() => Some("a promise without a bound".to_owned()),
                Some((path, name)) if !is_test(tree, path, name) => Some(format!("no test {name} in {path}")),
                Some(_) => None,
                None => Some(format!("{test:?} names no test; write `path::name`")),
            };
            findings.extend(what.map(|what| Finding::new(&file.path, line, what)));
        }
    }
    Outcome::of(findings)
}

/// Whether a function of this name in this file is marked as a test.
fn is_test(tree: &Tree, path: &str, name: &str) -> bool {
    let Some(file) = tree.rust.iter().find(|f| f.path == Path::new(path)) else { return false };
    let mut marked = false;
    for line in file.text.lines().map(str::trim) {
        let head = line.strip_prefix("async ").unwrap_or(line);
        if let Some(rest) = head.strip_prefix("fn ") {
            if marked && rest.split_once('(').is_some_and(|(found, _)| found == name) {
                return true;
            }
            marked = false;
        } else if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        }
    }
    false
}

/// `a/../b` as `b`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// Lines outside fenced blocks, numbered from 1.
fn prose(text: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut lines = vec![];
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((at + 1, line));
        }
    }
    lines
}

fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// Targets of `[text](target)` and `[label]: target`.
fn targets(line: &str) -> Vec<String> {
    let mut found = vec![];
    let mut rest = line;
    while let Some((_, after)) = rest.split_once("](") {
        let (target, tail) = after.split_once(')').unwrap_or((after, ""));
        // A title may follow the target.
        found.extend(target.split_whitespace().next().map(str::to_owned));
        rest = tail;
    }
    if let Some((label, target)) = line.split_once("]:")
        && label.starts_with('[')
    {
        found.extend(target.split_whitespace().next().map(str::to_owned));
    }
    found
}

/// Anchors of a document's headings, made as GitHub does.
fn headings(file: &File) -> Vec<String> {
    let mut anchors: Vec<String> = vec![];
    for (_, line) in prose(&file.text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let slug: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let same = anchors.iter().filter(|a| **a == slug).count();
        anchors.push(if same == 0 { slug } else { format!("{slug}-{same}") });
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tree::planted::{places, tree};

    #[test]
    fn a_path_that_does_not_exist_is_named_by_line() {
        let map = "# Map\n\n`crates/a/` and `crates/b/x.rs` and `gone.md`\n`/run/netns` `<state>/x` `a b/c` `fork`\n```\n`no/path`\n```\n`README.md`\n";
        let (_dir, tree) = tree(&[("ARCHITECTURE.md", map), ("crates/a/x.rs", ""), ("README.md", "")]);
        let outcome = paths(&tree);
        assert_eq!(places(&outcome.findings), [("ARCHITECTURE.md".into(), 3), ("ARCHITECTURE.md".into(), 3)]);
        assert!(outcome.findings[0].what.contains("crates/b/x.rs"));
    }

    #[test]
    fn a_promise_without_its_test_is_named_by_line() {
        let table = "| guarantee | bound | test |\n|---|---|---|\n| a | 5 s | `crates/a/t.rs::holds` |\n\
                     | b | 5 s | `crates/a/t.rs::helps` |\n| c | – | `crates/a/u.rs::holds` |\n\
                     | d | – | |\n| e | | `crates/a/t.rs::waits` |\n| f | 1 s | `crates/a/t.rs::waits` |\n";
        let tests = "#[test]\nfn holds() {}\n\nfn helps() {}\n\n#[tokio::test(x = 2)]\nasync fn waits() {}\n";
        let (_dir, tree) = tree(&[("docs/guarantees.md", table), ("crates/a/t.rs", tests)]);
        let outcome = guarantees(&tree);
        let lines: Vec<usize> = places(&outcome.findings).into_iter().map(|(_, line)| line).collect();
        assert_eq!(lines, [4, 5, 6, 7]);
    }

    #[test]
    fn broken_links_and_anchors_are_named_by_line() {
        let readme = "# Top\n[a](docs/a.md) [b](docs/b.md)\n[c](docs/a.md#two-words) [d](docs/a.md#three)\n[e](#top) [f](https://x.y/z) `[g](h)`\n\n[label]: docs/c.md\n";
        let a = "# One\n\n## Two, words\n\n[up](../README.md \"title\") [out](../none)\n";
        let (_dir, tree) = tree(&[("README.md", readme), ("docs/a.md", a)]);
        assert_eq!(
            places(&links(&tree).findings),
            [
                ("README.md".into(), 2),
                ("README.md".into(), 3),
                ("README.md".into(), 6),
                ("docs/a.md".into(), 5)
            ]
        );
    }
}
