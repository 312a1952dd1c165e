//! Who uses a kernel or a template: templates by their metadata, sandboxes by their records, and those that
//! are just being made by a lock on the metadata file. What cannot be read counts as a user (law 4).

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_core::id::{KernelName, TemplateName};
use hearth_core::image::{Kernel, Template};
use hearth_core::record::RECORD_FILE;
use serde::Deserialize;

use super::error::{ImageError, io};
use super::store::{Store, What, try_lock};

/// The part of a record that matters here; a newer schema will still have it.
#[derive(Deserialize)]
struct RecordOfUse {
    id: String,
    name: String,
    spec: SpecOfUse,
}

#[derive(Deserialize)]
struct SpecOfUse {
    template: String,
}

/// Fails if a sandbox record of any instance names the template.
pub(super) fn refuse_used_template(store: &Store, name: &TemplateName) -> Result<(), ImageError> {
    let unknown = |path: &Path, why: String| ImageError::Unknown {
        what: What::Template.word(),
        name: name.to_string(),
        path: path.to_owned(),
        why,
    };
    let state = store.state_dir();
    for instance in std::fs::read_dir(state).map_err(io("list", state))? {
        let dir = instance.map_err(io("list", state))?.path().join("sandboxes");
        let sandboxes = match std::fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            Err(e) => return Err(unknown(&dir, e.to_string())),
        };
        for sandbox in sandboxes {
            let path = sandbox.map_err(|e| unknown(&dir, e.to_string()))?.path().join(RECORD_FILE);
            let bytes = match std::fs::read(&path) {
                Ok(bytes) => bytes,
                // The record is the first thing of a sandbox and the last to go.
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
                Err(e) => return Err(unknown(&path, e.to_string())),
            };
            let record: RecordOfUse =
                serde_json::from_slice(&bytes).map_err(|e| unknown(&path, e.to_string()))?;
            if record.spec.template == name.as_str() {
                return Err(ImageError::InUse {
                    what: What::Template.word(),
                    name: name.to_string(),
                    by: format!("sandbox {} ({})", record.name, record.id),
                });
            }
        }
    }
    Ok(())
}

/// Fails if a template names the kernel.
pub(super) fn refuse_used_kernel(store: &Store, name: &KernelName) -> Result<(), ImageError> {
    let dir = store.templates();
    for entry in std::fs::read_dir(&dir).map_err(io("list", &dir))? {
        let path = entry.map_err(io("list", &dir))?.path().join(Template::FILE);
        let unknown = |why: String| ImageError::Unknown {
            what: What::Kernel.word(),
            name: name.to_string(),
            path: path.clone(),
            why,
        };
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            Err(e) => return Err(unknown(e.to_string())),
        };
        let template: Template = serde_json::from_slice(&bytes).map_err(|e| unknown(e.to_string()))?;
        if &template.kernel == name {
            return Err(ImageError::InUse {
                what: What::Kernel.word(),
                name: name.to_string(),
                by: format!("template {}", template.name),
            });
        }
    }
    Ok(())
}

/// Who asks for the metadata lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Uses it for a while; any number of these.
    Use,
    /// Replaces or removes it; alone.
    Change,
}

/// Locks the metadata file of something in the store. A user waits up to five seconds for a change, which
/// takes milliseconds; a change does not wait for users.
pub(super) fn claim(store: &Store, what: What, name: &str, claim: Claim) -> Result<File, ImageError> {
    let path = match what {
        What::Template => store.templates().join(name).join(Template::FILE),
        What::Kernel | What::Initramfs => store.kernels().join(name).join(Kernel::FILE),
    };
    let word = what.word();
    let end = Instant::now() + if claim == Claim::Use { Duration::from_secs(5) } else { Duration::ZERO };
    loop {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound && Instant::now() >= end => {
                return Err(ImageError::NotFound { what: word, name: name.to_owned() });
            }
            // Inside a replacement the place is empty for a moment, while its directory of work exists.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                if !store.tmp().join(format!("{word}.{name}")).exists() && !path.exists() {
                    return Err(ImageError::NotFound { what: word, name: name.to_owned() });
                }
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            Err(e) => return Err(io("open", &path)(e)),
        };
        match try_lock(file, &path, claim == Claim::Change).map_err(io("lock", &path))? {
            Ok(file) => return Ok(file),
            Err(()) if Instant::now() >= end && claim == Claim::Use => {
                return Err(ImageError::Busy { what: word, name: name.to_owned() });
            }
            Err(()) if Instant::now() >= end => {
                let by = "something that is just being created".to_owned();
                return Err(ImageError::InUse { what: word, name: name.to_owned(), by });
            }
            Err(()) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
