//! Checks of the documents: paths they name exist, links between them resolve.

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
