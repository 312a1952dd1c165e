//! Records on disk: `<state>/<instance>/sandboxes/<id>/record.json`. Written whole under another name,
//! synced, renamed; never truncated in place, so a crash or a full disk leaves the old one. Whether the new name survives
//! a power cut does not matter: all that a former record leaves out, a slot or a process, has gone with that boot.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use hearth_core::exit::{EXIT_RECORD_FILE, ExitRecord};
use hearth_core::id::SandboxId;
use hearth_core::record::{RECORD_FILE, Record};
use hearth_core::resource::Resource;

/// The records of one instance.
#[derive(Debug, Clone)]
pub struct Records {
    dir: PathBuf,
}

/// What the record directory holds.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Usable.
    pub records: Vec<Record>,
    /// Sandbox directories whose record cannot be used, by id: why, and what to do. Kept as they are.
    pub unreadable: BTreeMap<String, String>,
    /// Sandbox directories without a record: made just before a crash, or released all but this.
    pub without: Vec<PathBuf>,
    /// Whatever else lies there; not ours.
    pub foreign: Vec<PathBuf>,
}

impl Records {
    /// Records below `state_dir` (the instance's own).
    #[must_use]
    pub fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("sandboxes") }
    }

    /// The directory of one sandbox.
    #[must_use]
    pub(crate) fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.dir.join(id.as_str())
    }

    /// Writes a record. The sandbox's directory must exist.
    ///
    /// # Errors
    /// From the file system; the former record is then still whole.
    pub(crate) fn save(&self, record: &Record) -> io::Result<()> {
        let dir = self.sandbox_dir(&record.id);
        let fresh = dir.join(format!("{RECORD_FILE}.new"));
        let mut text = serde_json::to_vec_pretty(record)?;
        text.push(b'\n');
        let written = File::create(&fresh).and_then(|mut f| {
            f.write_all(&text)?;
            f.sync_data()
        });
        written.and_then(|()| fs::rename(&fresh, dir.join(RECORD_FILE)))
    }

    /// Reads every record. Cost is one directory entry and one small file per sandbox.
    ///
    /// # Errors
    /// If the directory cannot be listed; nothing may then be called leaked (law 4). A directory that does
    /// not exist holds no record.
    pub fn load(&self) -> io::Result<Loaded> {
        self.load_except(&BTreeSet::new())
    }

    /// Reads every record but those of sandboxes `known` by their id: these cost a directory entry alone.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub(crate) fn load_except(&self, known: &BTreeSet<String>) -> io::Result<Loaded> {
        let mut loaded = Loaded::default();
        let entries = match fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(loaded),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let path = entry?.path();
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if known.contains(&name) {
                continue;
            }
            if name.parse::<SandboxId>().is_err() || !path.is_dir() {
                loaded.foreign.push(path);
                continue;
            }
            match read_record(&path, &name) {
                Ok(Some(record)) => loaded.records.push(record),
                Ok(None) => loaded.without.push(path),
                Err(why) => {
                    loaded.unreadable.insert(name, why);
                }
            }
        }
        Ok(loaded)
    }

    /// Reads one record; `None` if there is none.
    ///
    /// # Errors
    /// In words, if it cannot be used.
    pub(crate) fn load_one(&self, id: &SandboxId) -> Result<Option<Record>, String> {
        read_record(&self.sandbox_dir(id), id.as_str())
    }

    /// How the VM of a sandbox ended, if its shim said so.
    #[must_use]
    pub(crate) fn exit_record(&self, id: &SandboxId) -> Option<ExitRecord> {
        let text = fs::read(self.sandbox_dir(id).join(EXIT_RECORD_FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

fn read_record(dir: &Path, name: &str) -> Result<Option<Record>, String> {
    let path = dir.join(RECORD_FILE);
    let unusable = |why: String, todo: &str| format!("{}: {why}; {todo}", path.display());
    let broken = |why: String| {
        let todo = format!(
            "put back a copy of it, or, once nothing runs in the cgroup of {name}, remove {}; then restart the daemon",
            dir.display()
        );
        unusable(why, &todo)
    };
    let text = match fs::read(&path) {
        Ok(text) if text.is_empty() => return Err(broken("it is empty".into())),
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unusable(e.to_string(), "make it readable and restart the daemon")),
    };
    // The version first: a newer form may not parse as ours.
    #[derive(serde::Deserialize)]
    struct Head {
        schema: u32,
    }
    let head: Head = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
    if head.schema > Record::SCHEMA {
        let why = format!("schema {} is newer than the {} this hearth knows", head.schema, Record::SCHEMA);
        return Err(unusable(why, "start the newer hearth again"));
    }
    let mut record: Record = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
    if record.id.as_str() != name {
        return Err(broken(format!("it names sandbox {}, its directory {name}", record.id)));
    }
    complete(&mut record);
    Ok(Some(record))
}

/// An older record does not say in which cgroup its shim is; a shim was always born in the sandbox's own.
fn complete(record: &mut Record) {
    let own = record.id.to_string();
    let of_resources = record.resources.iter_mut().filter_map(|r| match r {
        Resource::Process { process } => Some(process),
        _ => None,
    });
    for process in record.shim.iter_mut().chain(of_resources) {
        process.cgroup.get_or_insert_with(|| own.clone());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use hearth_core::lifecycle::SandboxState;
    use hearth_core::process::ProcessIdentity;
    use hearth_core::spec::{SandboxSpec, VmmKind};

    pub(crate) fn record(id: &str) -> Record {
        Record {
            schema: Record::SCHEMA,
            id: id.parse().unwrap(),
            name: "a".parse().unwrap(),
            spec: SandboxSpec {
                template: "base".parse().unwrap(),
                cpus: 1,
                memory_mib: 128,
                disk_mib: 64,
                timeout_seconds: None,
                net: true,
                vmm: VmmKind::Process,
                env: vec![],
                disk_rate: Default::default(),
            },
            state: SandboxState::Creating,
            created_at_ms: 1,
            ends_at_ms: None,
            boot_id: "b".into(),
            slot: None,
            shim: None,
            resources: vec![],
            stuck: None,
        }
    }

    const EMPTY: &str = "bbbbbbbbbbbbbbbb";
    const FUTURE: &str = "cccccccccccccccc";
    const OTHER: &str = "dddddddddddddddd";
    const TRUNCATED: &str = "eeeeeeeeeeeeeeee";
    const BARE: &str = "ffffffffffffffff";

    #[test]
    fn what_is_saved_is_loaded_and_what_cannot_be_used_is_kept() {
        let tmp = tempfile::tempdir().unwrap();
        let records = Records::new(tmp.path());
        assert!(records.load().unwrap().records.is_empty());
        let good = record("aaaaaaaaaaaaaaaa");
        for name in ["aaaaaaaaaaaaaaaa", EMPTY, FUTURE, TRUNCATED, BARE, OTHER, "old-backup"] {
            fs::create_dir_all(tmp.path().join("sandboxes").join(name)).unwrap();
        }
        records.save(&good).unwrap();
        let put = |name: &str, text: &str| {
            fs::write(tmp.path().join("sandboxes").join(name).join(RECORD_FILE), text).unwrap();
        };
        put(EMPTY, "");
        put(FUTURE, "{\"schema\": 99, \"new\": true}");
        put(TRUNCATED, "{\"schema\": 1, \"id\": \"tr");
        put(OTHER, &serde_json::to_string(&good).unwrap());
        let loaded = records.load().unwrap();
        assert_eq!(loaded.records, vec![good]);
        assert_eq!(
            loaded.unreadable.keys().map(String::as_str).collect::<Vec<_>>(),
            [EMPTY, FUTURE, OTHER, TRUNCATED]
        );
        assert!(loaded.unreadable[FUTURE].contains("schema 99 is newer"));
        assert!(loaded.unreadable[EMPTY].contains("it is empty; put back a copy"));
        assert_eq!(loaded.without, [tmp.path().join("sandboxes").join(BARE)]);
        assert_eq!(loaded.foreign, [tmp.path().join("sandboxes/old-backup")]);
    }

    #[test]
    fn a_record_of_the_former_form_is_read_and_completed() {
        let tmp = tempfile::tempdir().unwrap();
        let records = Records::new(tmp.path());
        let process = ProcessIdentity { pid: 7, start_time: 8, boot_id: "b".into(), cgroup: None };
        let mut former = record("aaaaaaaaaaaaaaaa");
        former.shim = Some(process.clone());
        former.resources = vec![Resource::Process { process }];
        fs::create_dir_all(records.sandbox_dir(&former.id)).unwrap();
        records.save(&former).unwrap();
        let path = records.sandbox_dir(&former.id).join(RECORD_FILE);
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains("cgroup"), "{text}");
        fs::write(&path, text.replace("\"stuck\": null", "\"stuck\": \"busy\"")).unwrap();
        let read = records.load_one(&former.id).unwrap().unwrap();
        assert_eq!(read.stuck.unwrap().to_string(), "busy");
        let shim = read.shim.unwrap();
        assert_eq!(shim.cgroup.as_deref(), Some("aaaaaaaaaaaaaaaa"));
        assert_eq!(read.resources, [Resource::Process { process: shim }]);
    }

    #[test]
    fn a_directory_that_cannot_be_listed_is_an_error_not_an_empty_list() {
        let tmp = tempfile::tempdir().unwrap();
        fs::write(tmp.path().join("sandboxes"), "a file").unwrap();
        assert!(Records::new(tmp.path()).load().is_err());
    }

    #[test]
    fn a_failed_write_leaves_the_former_record() {
        let tmp = tempfile::tempdir().unwrap();
        let records = Records::new(tmp.path());
        let mut r = record("aaaaaaaaaaaaaaaa");
        let dir = records.sandbox_dir(&r.id);
        fs::create_dir_all(&dir).unwrap();
        records.save(&r).unwrap();
        // The new one cannot be made: its name is a directory.
        fs::create_dir(dir.join("record.json.new")).unwrap();
        r.state = SandboxState::Running;
        assert!(records.save(&r).is_err());
        assert_eq!(records.load().unwrap().records[0].state, SandboxState::Creating);
    }
}
