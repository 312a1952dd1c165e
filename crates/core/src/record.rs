//! `record.json`: all that is known of one sandbox, written before each effect (law 1).

use serde::{Deserialize, Serialize};

use crate::id::{SandboxId, SandboxName};
use crate::lifecycle::SandboxState;
use crate::network::SlotIndex;
use crate::process::ProcessIdentity;
use crate::resource::Resource;
use crate::spec::SandboxSpec;
use crate::stuck::Stuck;

/// File name of the record in a sandbox's state directory.
pub const RECORD_FILE: &str = "record.json";

/// One sandbox on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this file's form.
    pub schema: u32,
    /// This life.
    pub id: SandboxId,
    /// What the user calls it.
    pub name: SandboxName,
    /// What was asked for.
    pub spec: SandboxSpec,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
    /// When the shim ends it, milliseconds since the Unix epoch.
    pub ends_at_ms: Option<u64>,
    /// Boot it was created in; every pid and namespace of another boot is gone.
    pub boot_id: String,
    /// Its network slot.
    pub slot: Option<SlotIndex>,
    /// Its shim.
    pub shim: Option<ProcessIdentity>,
    /// Host resources it owns or is about to own, in order of creation. A name leaves the list only after
    /// its absence was seen.
    pub resources: Vec<Resource>,
    /// What keeps it from being released, if it is stuck.
    #[serde(default, deserialize_with = "crate::stuck::of_record")]
    pub stuck: Option<Stuck>,
}

/// A record that cannot be used; the file is kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Written by a newer hearth.
    #[error("schema {found} is newer than the {known} this build knows; use the newer hearth")]
    FutureSchema {
        /// In the file.
        found: u32,
        /// Of this build.
        known: u32,
    },
}

impl Record {
    /// Version written by this build.
    pub const SCHEMA: u32 = 1;

    /// Checks that this build may act on the record.
    ///
    /// # Errors
    /// If it was written by a newer build.
    pub fn check(&self) -> Result<(), RecordError> {
        if self.schema > Self::SCHEMA {
            return Err(RecordError::FutureSchema { found: self.schema, known: Self::SCHEMA });
        }
        Ok(())
    }

    /// Notes the intent to make `resource`; noting it twice is once.
    pub fn intend(&mut self, resource: Resource) {
        if !self.resources.contains(&resource) {
            self.resources.push(resource);
        }
    }

    /// Clears a resource whose absence was seen.
    pub fn absent(&mut self, resource: &Resource) {
        self.resources.retain(|r| r != resource);
    }
}
