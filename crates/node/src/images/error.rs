//! Errors of this module: each names the object and says what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// How a caller may react to an [`ImageError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// No such kernel or template.
    NotFound,
    /// The name is taken.
    Exists,
    /// Somebody works on it or uses it; the same call may succeed later.
    Busy,
    /// What was given cannot be used; the same call will fail again.
    Invalid,
    /// The host lacks something: space, a program, root.
    Host,
    /// The caller asked for the end.
    Stopped,
}

/// Why an image was not made, found or removed. Nothing is left behind by a failed call.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The store does not hold it.
    #[error("there is no {what} {name:?}; `hearth {what} ls` lists what there is")]
    NotFound {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The name is taken.
    #[error("{what} {name:?} exists; choose another name or replace it with --force")]
    Exists {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// Another process works on the same name.
    #[error("{what} {name:?} is being made or removed by another process; try again when that has ended")]
    Busy {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// Something needs it.
    #[error("{what} {name:?} is in use by {by}; remove that first")]
    InUse {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its name.
        name: String,
        /// Who uses it.
        by: String,
    },
    /// Whether it is in use cannot be told, so it counts as used.
    #[error(
        "whether {what} {name:?} is in use cannot be told: {path}: {why}; repair or remove that file first"
    )]
    Unknown {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its name.
        name: String,
        /// The file that cannot be read.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Metadata in the store is damaged.
    #[error("{path} cannot be used: {why}; remove the {what} and make it again")]
    Metadata {
        /// `kernel` or `template`.
        what: &'static str,
        /// Its metadata file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file given as kernel is none.
    #[error("{path} is not a kernel: {why}; give an x86-64 vmlinuz (bzImage) or an ELF vmlinux")]
    NotAKernel {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The module tree cannot be used.
    #[error("kernel modules in {path}: {why}")]
    Modules {
        /// Tree or file.
        path: PathBuf,
        /// What is wrong and what to give.
        why: String,
    },
    /// The archive cannot be used.
    #[error("tar archive {archive}{}: {why}; nothing was unpacked", entry_words(.entry.as_deref()))]
    Tar {
        /// Its path or label.
        archive: String,
        /// The entry concerned.
        entry: Option<String>,
        /// What is wrong.
        why: String,
    },
    /// The image is not an ext4 file system.
    #[error("{path} is a rootfs that is not ext4: {why}; give an ext4 image, a tar or a directory")]
    NotExt4 {
        /// The image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The image is ext4 but cannot be mounted read-only as it is.
    #[error("ext4 image {path}: {why}")]
    Ext4 {
        /// The image.
        path: PathBuf,
        /// What is wrong and the remedy.
        why: String,
    },
    /// A source directory or file cannot be used.
    #[error("{path}: {why}")]
    Source {
        /// The source.
        path: PathBuf,
        /// What is wrong and what to give.
        why: String,
    },
    /// An option makes no sense.
    #[error("{field}: {why}")]
    Option {
        /// The option.
        field: &'static str,
        /// What is wrong and what is allowed.
        why: String,
    },
    /// The file system is too small.
    #[error("{path}: {what} needs {} MiB and its file system has {} MiB free; free some or ask for less",
        need.div_ceil(1 << 20), have >> 20)]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// For what.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        have: u64,
    },
    /// Only root can do it.
    #[error("{what} needs root (owners and device nodes are kept); run hearth as root")]
    NeedsRoot {
        /// What was asked for.
        what: &'static str,
    },
    /// A program is not installed.
    #[error("the program {program} is missing; install it with `apt-get install {package}`")]
    MissingProgram {
        /// Its name.
        program: &'static str,
        /// Debian package that has it.
        package: &'static str,
    },
    /// A program failed.
    #[error("{program} failed ({status}){}{}", tail_words(.tail), remedy_words(.remedy))]
    Program {
        /// Its name.
        program: &'static str,
        /// How it ended.
        status: String,
        /// Last lines of its output.
        tail: Vec<String>,
        /// What to do.
        remedy: String,
    },
    /// A program ran too long; it is gone.
    #[error("{program} did not end within {after:?} and was killed{}{}", tail_words(.tail), remedy_words(.remedy))]
    Overdue {
        /// Its name.
        program: &'static str,
        /// The limit.
        after: Duration,
        /// Last lines of its output.
        tail: Vec<String>,
        /// What to do.
        remedy: &'static str,
    },
    /// A program was killed and does not die: it sleeps in the kernel.
    #[error(
        "{program} (pid {pid}) was killed and does not end: it waits in the kernel, mostly for a disk or a network \
         mount that does not answer; look in `dmesg`"
    )]
    Undying {
        /// Its name.
        program: &'static str,
        /// Its pid.
        pid: u32,
    },
    /// The kernel refused.
    #[error("cannot {verb} {path}")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// The caller asked for the end; nothing is left.
    #[error("stopped on request; nothing was left")]
    Stopped,
}

fn entry_words(entry: Option<&str>) -> String {
    entry.map(|e| format!(", entry {e:?}")).unwrap_or_default()
}

fn tail_words(tail: &[String]) -> String {
    if tail.is_empty() { String::new() } else { format!("; its last words:\n  {}", tail.join("\n  ")) }
}

fn remedy_words(remedy: &str) -> String {
    if remedy.is_empty() { String::new() } else { format!("\n{remedy}") }
}

impl ImageError {
    /// How a caller may react.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound { .. } => ErrorClass::NotFound,
            Self::Exists { .. } => ErrorClass::Exists,
            Self::Busy { .. } | Self::InUse { .. } | Self::Unknown { .. } => ErrorClass::Busy,
            Self::NotAKernel { .. }
            | Self::Modules { .. }
            | Self::Tar { .. }
            | Self::NotExt4 { .. }
            | Self::Ext4 { .. }
            | Self::Source { .. }
            | Self::Option { .. } => ErrorClass::Invalid,
            Self::Metadata { .. }
            | Self::NoSpace { .. }
            | Self::NeedsRoot { .. }
            | Self::MissingProgram { .. }
            | Self::Program { .. }
            | Self::Overdue { .. }
            | Self::Undying { .. }
            | Self::Io { .. } => ErrorClass::Host,
            Self::Stopped => ErrorClass::Stopped,
        }
    }
}

/// Names the object of a failed system call.
pub(super) fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ImageError {
    let path = path.to_owned();
    move |source| ImageError::Io { verb, path, source }
}
