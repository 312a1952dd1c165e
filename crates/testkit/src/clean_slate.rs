//! An inventory of real host state, taken before and after a test, and the difference in words. What a test
//! left behind shows here, whoever made it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What an inventory looks at. Several test processes share one host, so each kind is narrowed to what
/// carries `tag`, unless that is empty.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Part of the name of everything the test makes: an instance name, say. Empty: everything.
    pub tag: String,
    /// First part of host veth names.
    pub veth_prefix: String,
    /// Directories whose files are listed, names only.
    pub dirs: Vec<PathBuf>,
    /// Words whose presence in a command line or executable path makes a process count.
    pub programs: Vec<String>,
}

impl Scope {
    /// Everything of one instance.
    #[must_use]
    pub fn instance(instance: &str, veth_prefix: &str) -> Self {
        Self {
            tag: instance.to_owned(),
            veth_prefix: veth_prefix.to_owned(),
            dirs: Vec::new(),
            programs: vec![instance.to_owned()],
        }
    }
}

/// What was there. Each line says kind and name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Compared too: two inventories of different scopes are never held against each other.
    scope: String,
    seen: BTreeSet<String>,
}

impl Inventory {
    /// Looks.
    ///
    /// # Errors
    /// If anything could not be read: unknown is not empty.
    pub fn take(scope: &Scope) -> io::Result<Self> {
        let mut seen = BTreeSet::new();
        let has_tag = |name: &str| scope.tag.is_empty() || name.contains(&scope.tag);
        for name in names(Path::new("/run/netns"))? {
            if has_tag(&name) {
                seen.insert(format!("netns {name}"));
            }
        }
        for name in links()? {
            let ours = !scope.veth_prefix.is_empty() && name.starts_with(&scope.veth_prefix);
            if has_tag(&name) || ours {
                seen.insert(format!("link {name}"));
            }
        }
        for table in nft_tables()? {
            if has_tag(&table) {
                seen.insert(format!("nft {table}"));
            }
        }
        for line in fs::read_to_string("/proc/thread-self/mountinfo")?.lines() {
            let mut fields = line.split(' ');
            let point = fields.nth(4).unwrap_or("?");
            let source = line.split(" - ").nth(1).unwrap_or("?");
            if (point.contains("hearth") || source.contains("hearth")) && has_tag(line) {
                seen.insert(format!("mount {point} ({source})"));
            }
        }
        for dir in cgroups(&scope.tag)? {
            seen.insert(format!("cgroup {}", dir.display()));
        }
        for process in processes(scope)? {
            seen.insert(format!("process {process}"));
        }
        for dir in &scope.dirs {
            files(dir, &mut seen)?;
        }
        Ok(Self { scope: format!("{scope:?}"), seen })
    }

    /// What `later` has that this has not, and the reverse.
    #[must_use]
    pub fn diff(&self, later: &Inventory) -> Diff {
        assert_eq!(self.scope, later.scope, "two inventories of different scopes");
        Diff {
            appeared: later.seen.difference(&self.seen).cloned().collect(),
            vanished: self.seen.difference(&later.seen).cloned().collect(),
        }
    }

    /// Everything seen.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.seen.iter().map(String::as_str)
    }
}

/// The difference of two inventories.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Diff {
    /// Left behind.
    pub appeared: Vec<String>,
    /// Taken away though it was there before.
    pub vanished: Vec<String>,
}

impl Diff {
    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.appeared.is_empty() && self.vanished.is_empty()
    }
}

impl fmt::Display for Diff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("no difference");
        }
        for line in &self.appeared {
            writeln!(f, "+ {line}")?;
        }
        for line in &self.vanished {
            writeln!(f, "- {line}")?;
        }
        Ok(())
    }
}

/// Names in a directory; an absent directory has none.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Of this thread's network namespace: sysfs would show that of whoever mounted it.
fn links() -> io::Result<Vec<String>> {
    let text = fs::read_to_string("/proc/thread-self/net/dev")?;
    Ok(text.lines().skip(2).filter_map(|l| Some(l.split_once(':')?.0.trim().to_owned())).collect())
}

fn nft_tables() -> io::Result<Vec<String>> {
    match Command::new("nft").args(["list", "tables"]).output() {
        Ok(o) if o.status.success() => {
            Ok(String::from_utf8_lossy(&o.stdout).lines().map(str::to_owned).collect())
        }
        // Not root: no table of ours can have been made either.
        Ok(_) if fs::metadata("/proc/self")?.uid() != 0 => Ok(Vec::new()),
        Ok(o) => Err(io::Error::other(format!("nft list tables: {}", String::from_utf8_lossy(&o.stderr)))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

fn cgroups(tag: &str) -> io::Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/thread-self/mountinfo")?;
    let mut found = Vec::new();
    for line in text.lines().filter(|l| l.split(" - ").nth(1).is_some_and(|f| f.starts_with("cgroup2 "))) {
        let Some(point) = line.split(' ').nth(4) else { continue };
        walk_cgroups(&Path::new(point).join("hearth"), tag, &mut found)?;
    }
    Ok(found)
}

fn walk_cgroups(dir: &Path, tag: &str, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for name in names(dir)? {
        let path = dir.join(name);
        if path.is_dir() {
            if path.to_string_lossy().contains(tag) {
                found.push(path.clone());
            }
            walk_cgroups(&path, tag, found)?;
        }
    }
    Ok(())
}

fn processes(scope: &Scope) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for name in names(Path::new("/proc"))? {
        let Ok(pid) = name.parse::<u32>() else { continue };
        if pid == std::process::id() {
            continue;
        }
        let proc = Path::new("/proc").join(&name);
        // A process that ended while we looked is not there.
        let Ok(line) = fs::read(proc.join("cmdline")) else { continue };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let exe = fs::read_link(proc.join("exe")).map(|p| p.display().to_string()).unwrap_or_default();
        if scope.programs.iter().any(|p| line.contains(p) || exe.contains(p)) {
            found.push(format!("{pid} {exe} [{}]", line.trim_end()));
        }
    }
    Ok(found)
}

fn files(dir: &Path, seen: &mut BTreeSet<String>) -> io::Result<()> {
    for name in names(dir)? {
        let path = dir.join(name);
        seen.insert(format!("file {}", path.display()));
        if fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir()) {
            files(&path, seen)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_left_behind_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let scope =
            Scope { tag: "no-such-tag-x".into(), dirs: vec![dir.path().to_owned()], ..Scope::default() };
        let before = Inventory::take(&scope).unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        fs::write(dir.path().join("d/f"), "").unwrap();
        let diff = before.diff(&Inventory::take(&scope).unwrap());
        assert_eq!(diff.appeared.len(), 2, "{diff}");
        assert!(diff.to_string().contains("+ file "), "{diff}");
        assert!(before.diff(&before.clone()).is_empty());
    }
}
