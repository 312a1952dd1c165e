//! The files of a checkout, read once.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::strip;

/// A text file.
#[derive(Debug)]
pub(crate) struct File {
    /// Relative to the checkout.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
}

impl File {
    /// Folder in `crates/` the file belongs to, or `xtask`.
    pub(crate) fn member(&self) -> &str {
        let mut parts = self.path.iter().filter_map(|p| p.to_str());
        match parts.next() {
            Some("crates") => parts.next().unwrap_or_default(),
            Some(first) => first,
            None => "",
        }
    }

    /// Whether the whole file is test code.
    pub(crate) fn is_test(&self) -> bool {
        let name = self.path.file_name().and_then(|n| n.to_str());
        name.is_some_and(|n| n.ends_with("tests.rs"))
            || self.path.parent().is_some_and(|p| p.iter().any(|d| d == "tests" || d == "benches"))
    }

    /// Code with comments, literals and test modules blanked; same length in lines.
    pub(crate) fn code(&self) -> String {
        strip::without_tests(&strip::blank(&self.text, strip::Strings::Blank))
    }
}

/// All files the checks look at.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    pub(crate) rust: Vec<File>,
    pub(crate) manifests: Vec<File>,
    pub(crate) markdown: Vec<File>,
    /// Scripts for a shell, by extension or first line.
    pub(crate) scripts: Vec<PathBuf>,
}

impl Tree {
    /// Reads a checkout, build products and hidden folders left out (`.ci` is looked at).
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self {
            root: root.to_path_buf(),
            rust: vec![],
            manifests: vec![],
            markdown: vec![],
            scripts: vec![],
        };
        tree.walk(root)?;
        Ok(tree)
    }

    fn walk(&mut self, dir: &Path) -> Result<()> {
        let mut entries: Vec<PathBuf> = fs::read_dir(dir)
            .and_then(|entries| entries.map(|e| Ok(e?.path())).collect())
            .with_context(|| format!("cannot list {}", dir.display()))?;
        entries.sort();
        for path in entries {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if path.is_symlink() || (name.starts_with('.') && name != ".ci") {
                continue;
            }
            if path.is_dir() {
                // Cargo marks its target directories so.
                if name != "target" && !path.join("CACHEDIR.TAG").exists() {
                    self.walk(&path)?;
                }
            } else {
                self.take(&path)?;
            }
        }
        Ok(())
    }

    fn take(&mut self, path: &Path) -> Result<()> {
        // Not text: nothing to check.
        let Ok(text) = fs::read_to_string(path) else { return Ok(()) };
        let relative = path.strip_prefix(&self.root)?.to_path_buf();
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let file = File { path: relative, text };
        match extension {
            "rs" => self.rust.push(file),
            "md" => self.markdown.push(file),
            "toml" if path.file_name().is_some_and(|n| n == "Cargo.toml") => self.manifests.push(file),
            _ => {
                let first = file.text.lines().next().unwrap_or_default();
                if extension == "sh" || (first.starts_with("#!") && first.ends_with("sh")) {
                    self.scripts.push(file.path);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod planted {
    //! Small checkouts with a fault in them.

    use super::*;

    /// A checkout with these files; it goes when the first value is dropped.
    pub(crate) fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Tree) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let tree = Tree::read(dir.path()).unwrap();
        (dir, tree)
    }

    /// File and line of each finding.
    pub(crate) fn places(findings: &[crate::check::Finding]) -> Vec<(String, usize)> {
        findings.iter().map(|f| (f.file.display().to_string(), f.line)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::planted::tree;

    #[test]
    fn build_products_and_hidden_folders_are_not_looked_at() {
        let (_dir, tree) = tree(&[
            ("src/a.rs", ""),
            ("target/b.rs", ""),
            ("elsewhere/CACHEDIR.TAG", ""),
            ("elsewhere/c.rs", ""),
            (".git/d.rs", ""),
            (".ci/run", "#!/usr/bin/env bash\n"),
            ("scripts/lib.sh", "true\n"),
            ("scripts/data", "no script\n"),
        ]);
        let rust: Vec<_> = tree.rust.iter().map(|f| f.path.display().to_string()).collect();
        assert_eq!(rust, ["src/a.rs"]);
        let scripts: Vec<_> = tree.scripts.iter().map(|p| p.display().to_string()).collect();
        assert_eq!(scripts, [".ci/run", "scripts/lib.sh"]);
    }
}
