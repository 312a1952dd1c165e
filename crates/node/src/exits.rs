//! How sandboxes ended, kept for a while after everything else of them is gone: `<state>/exits/<id>.json`. No record
//! names these files; they are bounded by age and number, and each is written whole or not at all. Losing one costs
//! knowledge and nothing else, so none is synced.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_core::exit::KeptExit;
use hearth_core::id::SandboxId;

/// What is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepExits {
    /// How long from the end on; zero: nothing is kept.
    pub keep: Duration,
    /// How many at most; the oldest go first.
    pub most: usize,
}

/// The ends of one instance's sandboxes.
#[derive(Debug)]
pub(crate) struct Exits {
    dir: PathBuf,
    bounds: KeepExits,
    /// By time of the end; every one of them is on disk as well.
    kept: Mutex<BTreeMap<(u64, SandboxId), Arc<KeptExit>>>,
}

impl Exits {
    /// Below `state_dir` (the instance's own). Touches nothing yet.
    pub(crate) fn new(state_dir: &Path, bounds: KeepExits) -> Self {
        Self { dir: state_dir.join("exits"), bounds, kept: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, SandboxId), Arc<KeptExit>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// Reads what earlier daemons kept. Files that cannot be used stay as long as others would.
    ///
    /// # Errors
    /// If the directory cannot be listed; one that is absent holds nothing.
    pub(crate) fn load(&self, now_ms: u64) -> io::Result<()> {
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let path = entry?.path();
            let read = fs::read(&path).and_then(|t| Ok(serde_json::from_slice::<KeptExit>(&t)?));
            match read {
                Ok(kept) if self.path(&kept.id) == path => {
                    self.lock().insert((kept.exit.at_ms, kept.id.clone()), Arc::new(kept));
                }
                _ if self.is_old(&path) => remove(&path),
                _ => tracing::info!("not used: {}", path.display()),
            }
        }
        self.prune(now_ms);
        Ok(())
    }

    fn is_old(&self, path: &Path) -> bool {
        let age = fs::metadata(path).and_then(|m| m.modified()).map(|t| t.elapsed().unwrap_or_default());
        age.is_ok_and(|age| age >= self.bounds.keep)
    }

    /// Keeps one; the same life again replaces what was kept of it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn keep(&self, kept: KeptExit, now_ms: u64) -> io::Result<()> {
        if self.bounds.keep.is_zero() || self.bounds.most == 0 {
            return Ok(());
        }
        fs::create_dir_all(&self.dir)?;
        let path = self.path(&kept.id);
        let fresh = path.with_extension("new");
        fs::write(&fresh, serde_json::to_vec(&kept)?)?;
        fs::rename(&fresh, &path)?;
        {
            let mut all = self.lock();
            all.retain(|(_, id), _| *id != kept.id);
            all.insert((kept.exit.at_ms, kept.id.clone()), Arc::new(kept));
        }
        self.prune(now_ms);
        Ok(())
    }

    /// Forgets what is too old or one too many.
    pub(crate) fn prune(&self, now_ms: u64) {
        let keep_ms = u64::try_from(self.bounds.keep.as_millis()).unwrap_or(u64::MAX);
        let mut gone = Vec::new();
        {
            let mut all = self.lock();
            while let Some(first) = all.first_entry() {
                let (at_ms, _) = first.key();
                // An end in the future is that of a clock since set back; it counts as new.
                if now_ms.saturating_sub(*at_ms) < keep_ms {
                    break;
                }
                gone.push(first.remove());
            }
            while all.len() > self.bounds.most {
                gone.extend(all.pop_first().map(|(_, kept)| kept));
            }
        }
        for kept in gone {
            remove(&self.path(&kept.id));
        }
    }

    /// The one with this id, or the last one of this name.
    pub(crate) fn find(&self, key: &str) -> Option<Arc<KeptExit>> {
        let all = self.lock();
        let by_id = all.values().find(|k| k.id.as_str() == key);
        by_id.or_else(|| all.values().rev().find(|k| k.name.as_str() == key)).cloned()
    }

    /// All, first ended first.
    pub(crate) fn all(&self) -> Vec<Arc<KeptExit>> {
        self.lock().values().cloned().collect()
    }
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("a kept end is left: {}: {e}", path.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::exit::{ExitReason, ExitRecord};
    use hearth_core::spec::VmmKind;

    fn kept(id: &str, name: &str, at_ms: u64) -> KeptExit {
        KeptExit {
            schema: KeptExit::SCHEMA,
            id: id.repeat(16).parse().unwrap(),
            name: name.parse().unwrap(),
            template: "base".parse().unwrap(),
            vmm: VmmKind::Process,
            cpus: 1,
            memory_mib: 64,
            created_at_ms: 1,
            exit: ExitRecord::new(ExitReason::Killed, at_ms, ""),
        }
    }

    fn exits(dir: &Path, seconds: u64, most: usize) -> Exits {
        Exits::new(dir, KeepExits { keep: Duration::from_secs(seconds), most })
    }

    fn ids(exits: &Exits) -> Vec<String> {
        exits.all().iter().map(|k| k.id.as_str()[..1].to_owned()).collect()
    }

    #[test]
    fn the_oldest_go_by_age_and_number_and_their_files_with_them() {
        let dir = tempfile::tempdir().unwrap();
        let exits = exits(dir.path(), 10, 2);
        for (id, at_ms) in [("a", 1_000), ("b", 2_000), ("c", 3_000)] {
            exits.keep(kept(id, "web", at_ms), 3_000).unwrap();
        }
        assert_eq!(ids(&exits), ["b", "c"]);
        assert_eq!(exits.find("web").unwrap().id.as_str(), "c".repeat(16), "the last of that name");
        assert_eq!(exits.find(&"b".repeat(16)).unwrap().exit.at_ms, 2_000);
        exits.prune(12_000);
        assert_eq!(ids(&exits), ["c"]);
        assert_eq!(fs::read_dir(dir.path().join("exits")).unwrap().count(), 1);
        exits.keep(kept("c", "web", 4_000), 4_000).unwrap();
        assert_eq!(exits.all().len(), 1, "one life has one end");
        exits.prune(u64::MAX);
        assert_eq!(fs::read_dir(dir.path().join("exits")).unwrap().count(), 0);
    }

    #[test]
    fn the_next_daemon_reads_them_and_what_it_cannot_use_goes_with_time() {
        let dir = tempfile::tempdir().unwrap();
        exits(dir.path(), 10, 9).keep(kept("a", "web", 1_000), 1_000).unwrap();
        let folder = dir.path().join("exits");
        fs::write(folder.join("aaaaaaaaaaaaaaab.new"), "half").unwrap();
        fs::write(folder.join("other.json"), serde_json::to_vec(&kept("b", "x", 1)).unwrap()).unwrap();
        let next = exits(dir.path(), 10, 9);
        next.load(2_000).unwrap();
        assert_eq!(ids(&next), ["a"]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3);
        let off = exits(dir.path(), 0, 9);
        off.load(2_000).unwrap();
        assert_eq!((off.all().len(), fs::read_dir(&folder).unwrap().count()), (0, 0), "switched off, all go");
        off.keep(kept("a", "web", 1_000), 1_000).unwrap();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    }
}
