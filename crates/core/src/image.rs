//! Metadata of templates and kernels, as stored beside their files.

use serde::{Deserialize, Serialize};

use crate::block::RemoteDisk;
use crate::id::{KernelName, TemplateName};

/// `template.json` in `<state>/templates/<name>/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Version of this file's form.
    pub schema: u32,
    /// Its name.
    pub name: TemplateName,
    /// Kernel it boots with.
    pub kernel: KernelName,
    /// Whether there is a root disk (`rootfs.ext4`) and so a guest agent. Without one the kernel runs alone
    /// and no command can be run in it.
    pub rootfs: bool,
    /// Size of the root disk, bytes.
    pub rootfs_bytes: u64,
    /// The root disk, if it is an object of a store. Then there is no file of it here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteDisk>,
    /// Where it came from, in words.
    pub source: String,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
}

impl Template {
    /// Newest version that this build knows; written for a remote root disk.
    pub const SCHEMA: u32 = 2;
    /// Version written for all others, so that a build that does not know of remote ones understands them.
    pub const SCHEMA_LOCAL: u32 = 1;
    /// Metadata file name.
    pub const FILE: &str = "template.json";
    /// Root disk file name.
    pub const ROOTFS: &str = "rootfs.ext4";
}

/// `kernel.json` in `<state>/kernels/<name>/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Version of this file's form.
    pub schema: u32,
    /// Its name.
    pub name: KernelName,
    /// `uname -r` of it, if the modules or the image tell.
    pub release: String,
    /// Modules in load order, paths below `modules/`; empty if everything needed is built in.
    pub modules: Vec<String>,
    /// Where it came from, in words.
    pub source: String,
    /// Milliseconds since the Unix epoch.
    pub created_at_ms: u64,
}

impl Kernel {
    /// Version written by this build.
    pub const SCHEMA: u32 = 1;
    /// Metadata file name.
    pub const FILE: &str = "kernel.json";
    /// ELF file name.
    pub const ELF: &str = "vmlinux";
}
