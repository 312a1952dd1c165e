//! What dirty-host was asked to make, on disk before it is made: the only proof by which it is removed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use hearth_core::id::{InstanceName, VethPrefix};
use hearth_core::network::Cidr;
use serde::{Deserialize, Serialize};

use super::Layout;

/// One directory per layout and instance. In `/run`, since what it names does not outlive a boot either.
const ROOT: &str = "/run/hearth-dirty";

/// Everything made for one layout and instance.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) layout: Layout,
    pub(super) instance: InstanceName,
    pub(super) veth_prefix: VethPrefix,
    pub(super) cidr: Cidr,
    pub(super) from: u32,
    pub(super) slots: u32,
    pub(super) rules: bool,
    pub(super) processes: u32,
    pub(super) gateway: String,
    pub(super) dir: PathBuf,
    pub(super) own_cgroup_root: bool,
    /// Inode of the network namespace that plays the host.
    pub(super) network: u64,
}

/// The calling thread's network namespace.
pub(super) fn network() -> Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net").context("look at the network namespace")?.ino())
}

/// Where a record and what belongs to it are kept.
#[derive(Debug)]
pub(super) struct Place {
    name: String,
    dir: PathBuf,
}

impl Place {
    pub(super) fn of(layout: Layout, instance: &InstanceName) -> Self {
        let layout = match layout {
            Layout::Hearth => "hearth",
            Layout::E2b => "e2b",
        };
        let dir = Path::new(ROOT).join(format!("{layout}-{instance}"));
        Self { name: format!("layout {layout}, instance {instance}"), dir }
    }

    /// For messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The record, if there is one.
    pub(super) fn load(&self) -> Result<Option<Record>> {
        let path = self.dir.join("record.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("read {}", path.display())),
        };
        Ok(Some(serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?))
    }

    pub(super) fn save(&self, record: &Record) -> Result<()> {
        let (path, new) = (self.dir.join("record.json"), self.dir.join("record.json.new"));
        fs::create_dir_all(&self.dir)
            .and_then(|()| fs::write(&new, serde_json::to_string_pretty(record)?))
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("write {}", path.display()))
    }

    /// Removes the record and its directory, when all it names is gone.
    pub(super) fn forget(&self) -> Result<()> {
        fs::remove_dir_all(&self.dir).with_context(|| format!("remove {}", self.dir.display()))?;
        match fs::remove_dir(ROOT) {
            // Another instance's record is there, or was a moment ago.
            Err(e) if !matches!(e.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::NotFound) => {
                Err(e).with_context(|| format!("remove {ROOT}"))
            }
            _ => Ok(()),
        }
    }
}
