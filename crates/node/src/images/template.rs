//! Templates: `<state>/templates/<name>/` with `template.json` and, unless the kernel runs alone,
//! `rootfs.ext4`, a clean ext4 that is only ever mounted read-only.

use std::fs::File;
use std::path::{Path, PathBuf};

use hearth_core::block::RemoteDisk;
use hearth_core::id::{KernelName, TemplateName};
use hearth_core::image::{Kernel, Template};

use super::error::{ImageError, io};
use super::job::Job;
use super::store::{Listing, Store, What, Work, list_json, now_ms, read_json, write_json};
use super::tree::{BLOCK, measure};
use super::uses::{Claim, claim, refuse_used_template};
use super::{debian, ext4, kernel, space, tarball};

pub use super::tarball::TarInput;

/// Kernel taken when none is named and there are several.
const DEFAULT_KERNEL: &str = "default";

/// Where a root disk comes from.
#[derive(Debug)]
pub enum Source<'a> {
    /// A directory tree, taken as it is on disk.
    Directory(PathBuf),
    /// A tar archive: plain, gzip, xz or zstd.
    Tar(TarInput<'a>),
    /// A Debian or Ubuntu suite through mmdebstrap, with additional packages.
    Debian {
        /// Such as `bookworm`.
        suite: String,
        /// Package names.
        include: Vec<String>,
    },
    /// An ext4 image, copied.
    Image(PathBuf),
    /// An object of a store, which stays there; whoever names it has looked at it.
    Remote(RemoteDisk),
    /// No root disk: the kernel runs alone.
    KernelOnly,
}

impl Source<'_> {
    fn words(&self) -> String {
        match self {
            Source::Directory(path) => format!("directory {}", path.display()),
            Source::Tar(input) => format!("tar {}", input.label()),
            Source::Debian { suite, include } if include.is_empty() => format!("debian {suite}"),
            Source::Debian { suite, include } => format!("debian {suite} with {}", include.join(", ")),
            Source::Image(path) => format!("image {}", path.display()),
            Source::Remote(disk) => disk.url.clone(),
            Source::KernelOnly => "kernel only".into(),
        }
    }
}

/// How a template is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Its kernel; `None` for the only one, or the one called `default`.
    pub kernel: Option<KernelName>,
    /// Replace a template of that name, unless it is in use.
    pub force: bool,
    /// Size of the root disk; `None` for the contents and some slack.
    pub size_mib: Option<u64>,
}

/// Makes a template.
///
/// # Errors
/// If the source cannot be used (named, with the entry of a tar), the name is taken, the kernel is absent,
/// or the host lacks space, a program or root. The store is then as before.
pub fn create(
    store: &Store,
    name: &TemplateName,
    source: Source<'_>,
    options: &Options,
    job: &Job<'_>,
) -> Result<Template, ImageError> {
    store.work(What::Template, name.as_str(), false, job, |work| {
        let target = dir(store, name);
        if target.exists() {
            if !options.force {
                return Err(ImageError::Exists { what: What::Template.word(), name: name.to_string() });
            }
            // Said before minutes of work rather than after.
            refuse_used_template(store, name)?;
        }
        let kernel = choose_kernel(store, options.kernel.as_ref())?;
        // Held to the end: the kernel is not removed before the template that names it is in place.
        let _kernel = claim(store, What::Kernel, kernel.as_str(), Claim::Use)?;
        let words = source.words();
        let remote = match &source {
            Source::Remote(disk) => Some(disk.clone()),
            _ => None,
        };
        let new = work.dir().join("new");
        std::fs::create_dir(&new).map_err(io("create", &new))?;
        let rootfs_bytes = build(store, source, options, work, &new, job)?;
        let template = Template {
            schema: if remote.is_some() { Template::SCHEMA } else { Template::SCHEMA_LOCAL },
            name: name.clone(),
            kernel,
            rootfs: rootfs_bytes.is_some(),
            rootfs_bytes: rootfs_bytes.unwrap_or(0),
            remote,
            source: words,
            created_at_ms: now_ms(),
        };
        write_json(&new.join(Template::FILE), &template)?;
        let _change = change_lock(store, name, &target)?;
        if target.exists() {
            refuse_used_template(store, name)?;
        }
        job.check()?;
        work.place(&new, &target)?;
        Ok(template)
    })
}

/// Writes the root disk into `new` and returns its size, if the source has one.
fn build(
    store: &Store,
    source: Source<'_>,
    options: &Options,
    work: &Work,
    new: &Path,
    job: &Job<'_>,
) -> Result<Option<u64>, ImageError> {
    let image = ext4::rootfs(new);
    let tree = match source {
        Source::KernelOnly => return Ok(None),
        Source::Remote(_) if options.size_mib.is_some() => {
            let why = "a remote root disk keeps its size; resize it with resize2fs first".into();
            return Err(ImageError::Option { field: "size", why });
        }
        Source::Remote(disk) => return Ok(Some(disk.bytes)),
        Source::Image(path) => {
            let bytes = ext4::check(&path)?;
            let need = on_disk(&path, bytes);
            space::require(work.dir(), "the template", need, job)?;
            if options.size_mib.is_some() {
                let why = "an ext4 image keeps its size; resize it with resize2fs first".into();
                return Err(ImageError::Option { field: "size", why });
            }
            let copied = ext4::copy(&path, &image, bytes, job);
            return copied
                .map(|()| Some(bytes))
                .map_err(|e| space::explain(e, work.dir(), "the template", need));
        }
        Source::Directory(path) => {
            let real = path.canonicalize().map_err(io("read", &path))?;
            if store.state_dir().starts_with(&real) {
                let why = format!("it holds hearth's own state in {}", store.state_dir().display());
                return Err(ImageError::Source { path, why });
            }
            real
        }
        Source::Tar(input) => tarball::unpack(input, work, job)?,
        Source::Debian { suite, include } => debian::bootstrap(&suite, &include, work, job)?,
    };
    let measured = measure(&tree, job)?;
    let need = measured.on_disk.max(BLOCK).saturating_add(16 << 20);
    space::require(work.dir(), "the root disk", need, job)?;
    let size = match options.size_mib {
        None => None,
        Some(mib) => Some(mib.checked_mul(1 << 20).ok_or_else(|| ImageError::Option {
            field: "size",
            why: format!("{mib} MiB is more than any disk holds"),
        })?),
    };
    let made = ext4::make(work, &image, &tree, &measured, size, job);
    made.map(Some).map_err(|e| space::explain(e, work.dir(), "the root disk", need))
}

fn on_disk(path: &Path, bytes: u64) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(bytes, |m| (m.blocks() * 512).min(bytes))
}

fn choose_kernel(store: &Store, asked: Option<&KernelName>) -> Result<KernelName, ImageError> {
    if let Some(name) = asked {
        return kernel::get(store, name).map(|k| k.name);
    }
    let known = kernel::list(store)?;
    let names: Vec<KernelName> = known.found.into_iter().map(|k| k.name).collect();
    if let Some(default) = names.iter().find(|n| n.as_str() == DEFAULT_KERNEL) {
        return Ok(default.clone());
    }
    match names.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(ImageError::Option {
            field: "kernel",
            why: "there is none yet; import one with `hearth kernel import`".into(),
        }),
        many => {
            let names: Vec<&str> = many.iter().map(KernelName::as_str).collect();
            let why = format!("there are several ({}); name one with --kernel", names.join(", "));
            Err(ImageError::Option { field: "kernel", why })
        }
    }
}

/// The lock on what is about to be replaced or removed. One without metadata (damaged) has no users.
fn change_lock(store: &Store, name: &TemplateName, target: &Path) -> Result<Option<File>, ImageError> {
    if !target.join(Template::FILE).exists() {
        return Ok(None);
    }
    claim(store, What::Template, name.as_str(), Claim::Change).map(Some)
}

/// All templates.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(store: &Store) -> Result<Listing<Template>, ImageError> {
    list_json(What::Template, &store.templates(), Template::FILE, |dir, t: &Template| {
        check(t).and(if t.name.as_str() == dir { Ok(()) } else { Err(format!("it says {:?}", t.name)) })
    })
}

/// One template.
///
/// # Errors
/// [`ImageError::NotFound`], or [`ImageError::Metadata`] if its file is damaged.
pub fn get(store: &Store, name: &TemplateName) -> Result<Template, ImageError> {
    let path = dir(store, name).join(Template::FILE);
    let template: Template = read_json(What::Template, &path)?
        .ok_or_else(|| ImageError::NotFound { what: What::Template.word(), name: name.to_string() })?;
    check(&template).map_err(|why| ImageError::Metadata { what: What::Template.word(), path, why })?;
    Ok(template)
}

fn check(template: &Template) -> Result<(), String> {
    if template.schema > Template::SCHEMA {
        return Err(format!(
            "schema {} is newer than this build knows; use the newer hearth",
            template.schema
        ));
    }
    Ok(())
}

/// Removes a template.
///
/// # Errors
/// [`ImageError::InUse`] while a sandbox of any instance uses it or is being created from it,
/// [`ImageError::Unknown`] if that cannot be told.
pub fn remove(store: &Store, name: &TemplateName, job: &Job<'_>) -> Result<(), ImageError> {
    let target = dir(store, name);
    let missing = || ImageError::NotFound { what: What::Template.word(), name: name.to_string() };
    if !target.exists() {
        return Err(missing());
    }
    store.work(What::Template, name.as_str(), false, job, |work| {
        if !target.exists() {
            return Err(missing());
        }
        // First the lock, then the records: a creation holds the lock until its record is written.
        let _change = change_lock(store, name, &target)?;
        refuse_used_template(store, name)?;
        work.take_out(&target)
    })
}

/// Directory of a template.
#[must_use]
pub fn dir(store: &Store, name: &TemplateName) -> PathBuf {
    store.templates().join(name.as_str())
}

/// The root disk of a template that has one.
#[must_use]
pub fn rootfs_path(store: &Store, name: &TemplateName) -> PathBuf {
    ext4::rootfs(&dir(store, name))
}

/// A template and its kernel that stay as they are while this lives: neither is removed or replaced, by
/// this process or another. Whoever creates a sandbox holds it from the look-up until the record that names
/// the template is written (against removal), and until the guest has booted (against a new kernel under
/// the same name).
#[derive(Debug)]
pub struct Hold {
    /// The template.
    pub template: Template,
    /// Its kernel.
    pub kernel: Kernel,
    _template_lock: File,
    _kernel_lock: File,
}

/// Looks a template up and holds it.
///
/// # Errors
/// [`ImageError::NotFound`] for the template or its kernel; [`ImageError::Busy`] if it was being replaced
/// for five seconds.
pub fn hold(store: &Store, name: &TemplateName) -> Result<Hold, ImageError> {
    let template_lock = claim(store, What::Template, name.as_str(), Claim::Use)?;
    let template = get(store, name)?;
    let kernel_lock = claim(store, What::Kernel, template.kernel.as_str(), Claim::Use)?;
    let kernel = kernel::get(store, &template.kernel)?;
    Ok(Hold { template, kernel, _template_lock: template_lock, _kernel_lock: kernel_lock })
}
