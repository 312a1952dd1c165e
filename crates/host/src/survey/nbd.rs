//! Connected network block devices, by sysfs alone: opening one, or asking by netlink, can hang.

use std::fs;
use std::io;
use std::path::Path;

use hearth_core::doctor::{Identity, ItemKind, Thing};
use hearth_core::id::SandboxId;

use super::{Scan, list, unless_gone};

/// Whose devices are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    /// Of this project: the backend names a sandbox.
    Instance,
    /// Of an orchestrator that gives no backend: who has one, only the connecting task tells.
    Nameless,
}

pub(super) fn scan(of: Of) -> Scan {
    match connected(Path::new("/sys/block")) {
        Ok(things) if of == Of::Instance => Scan { things, unseen: vec![] },
        Ok(things) => {
            let nameless = |t: Thing| match (&t.identity, &t.foreign) {
                (Identity::Device { backend, .. }, _) if backend.is_empty() => Thing { foreign: None, ..t },
                (_, None) => {
                    Thing { foreign: Some("its backend names a sandbox of another kind".into()), ..t }
                }
                _ => t,
            };
            let things = things.into_iter().map(nameless).map(|t| Thing { sandbox: None, ..t }).collect();
            Scan { things, unseen: vec![] }
        }
        Err(e) => Scan { things: vec![], unseen: vec![format!("nbd: /sys/block: {e}")] },
    }
}

/// The connected devices: those that have the file `pid`.
pub(super) fn connected(sys: &Path) -> io::Result<Vec<Thing>> {
    let mut found = Vec::new();
    for entry in list(sys)? {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.strip_prefix("nbd").is_none_or(|n| n.parse::<u32>().is_err()) {
            continue;
        }
        let Some(task) = unless_gone(fs::read_to_string(entry.path().join("pid")))? else { continue };
        let task: u32 = task.trim().parse().unwrap_or(0);
        let backend = fs::read_to_string(entry.path().join("backend")).unwrap_or_default();
        let backend = backend.trim().to_owned();
        let sandbox = backend.parse::<SandboxId>().ok().map(|_| backend.clone());
        let foreign = match (&sandbox, backend.as_str()) {
            (Some(_), _) => None,
            (None, "") => Some("it names no owner".to_owned()),
            (None, other) => Some(format!("its backend is {other:?}, which is no sandbox of ours")),
        };
        let holders = crate::process::comm(task).map_or("gone by now".to_owned(), |comm| comm);
        found.push(Thing {
            facts: vec![format!("connected by task {task} ({holders})")],
            identity: Identity::Device { backend, task },
            sandbox,
            foreign,
            ..Thing::new(ItemKind::Nbd, format!("/dev/{name}"))
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connected_devices_are_listed_and_the_backend_names_the_owner() {
        let sys = tempfile::tempdir().unwrap();
        for (name, pid, backend) in [
            ("nbd0", None, None),
            ("nbd1", Some("99999999"), Some("abcdefghijkmnpqr\n")),
            ("nbd316", Some("99999999"), None),
            ("nbdx", Some("1"), None),
            ("sda", Some("1"), None),
        ] {
            let dir = sys.path().join(name);
            fs::create_dir(&dir).unwrap();
            for (file, text) in [("pid", pid), ("backend", backend)] {
                if let Some(text) = text {
                    fs::write(dir.join(file), text).unwrap();
                }
            }
        }
        let mut found = connected(sys.path()).unwrap();
        found.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<&str> = found.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["/dev/nbd1", "/dev/nbd316"]);
        assert_eq!(found[0].sandbox.as_deref(), Some("abcdefghijkmnpqr"));
        assert_eq!(found[1].foreign.as_deref(), Some("it names no owner"));
        assert!(connected(&sys.path().join("absent")).unwrap().is_empty());
    }
}
