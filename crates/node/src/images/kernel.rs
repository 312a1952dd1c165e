//! Guest kernels: `<state>/kernels/<name>/` with `kernel.json`, `vmlinux` and `modules/*.ko`.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use hearth_core::id::KernelName;
use hearth_core::image::Kernel;

use super::error::{ImageError, io};
use super::job::{Job, Watched};
use super::store::{Listing, Store, What, list_json, now_ms, read_json, write_json, write_synced};
use super::uses::{Claim, claim, refuse_used_kernel};
use super::{bzimage, elf, modules};

/// Largest bzImage read; real ones have 5 to 20 MiB.
const MAX_BZIMAGE: u64 = 256 << 20;
/// Release of a kernel that does not tell.
const UNKNOWN: &str = "unknown";

/// A kernel just imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// What was stored.
    pub kernel: Kernel,
    /// What the user should know, in words.
    pub notes: Vec<String>,
}

/// Imports a kernel from an ELF vmlinux or a bzImage, with the modules a guest needs out of a tree as in
/// `/lib/modules/<release>`. With `force` a kernel of that name is replaced, also under templates that use
/// it; only one that is just booting keeps it.
///
/// # Errors
/// If the image is not a kernel, the tree is of another release, or the name is taken or busy.
pub fn import(
    store: &Store,
    name: &KernelName,
    image: &Path,
    modules: Option<&Path>,
    force: bool,
    job: &Job<'_>,
) -> Result<Imported, ImageError> {
    store.work(What::Kernel, name.as_str(), false, job, |work| {
        let target = dir(store, name);
        if target.exists() && !force {
            return Err(ImageError::Exists { what: What::Kernel.word(), name: name.to_string() });
        }
        let new = work.dir().join("new");
        let tree = new.join("modules");
        std::fs::create_dir_all(&tree).map_err(io("create", &tree))?;
        let own_release = store_elf(image, &new.join(Kernel::ELF), job)?;
        let chosen = match modules {
            Some(path) => modules::choose(&modules::locate(path, own_release.as_deref())?, job)?,
            None => modules::Chosen::default(),
        };
        if let (Some(own), Some(theirs), Some(path)) = (&own_release, &chosen.release, modules)
            && own != theirs
        {
            let why = format!("they are of release {theirs}, the kernel is {own}; give the tree of {own}");
            return Err(ImageError::Modules { path: path.to_owned(), why });
        }
        for module in &chosen.modules {
            write_synced(&tree.join(&module.file), &module.data)?;
        }
        let mut notes = chosen.notes;
        if modules.is_none() {
            notes
                .push("no modules were given: everything a guest needs must be built into the kernel".into());
        }
        let kernel = Kernel {
            schema: Kernel::SCHEMA,
            name: name.clone(),
            release: chosen.release.or(own_release).unwrap_or_else(|| UNKNOWN.into()),
            modules: chosen.modules.into_iter().map(|m| m.file).collect(),
            source: image.display().to_string(),
            created_at_ms: now_ms(),
        };
        write_json(&new.join(Kernel::FILE), &kernel)?;
        super::store::sync_dir(&tree)?;
        let _change = change_lock(store, name, &target)?;
        job.check()?;
        work.place(&new, &target)?;
        Ok(Imported { kernel, notes })
    })
}

/// The lock on what is about to be replaced, if anything is. Damaged leftovers without metadata have no
/// users.
fn change_lock(store: &Store, name: &KernelName, target: &Path) -> Result<Option<File>, ImageError> {
    if !target.join(Kernel::FILE).exists() {
        return Ok(None);
    }
    claim(store, What::Kernel, name.as_str(), Claim::Change).map(Some)
}

/// All kernels.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(store: &Store) -> Result<Listing<Kernel>, ImageError> {
    list_json(What::Kernel, &store.kernels(), Kernel::FILE, |dir, k: &Kernel| {
        check(k).and(if k.name.as_str() == dir { Ok(()) } else { Err(format!("it says {:?}", k.name)) })
    })
}

/// One kernel.
///
/// # Errors
/// [`ImageError::NotFound`], or [`ImageError::Metadata`] if its file is damaged.
pub fn get(store: &Store, name: &KernelName) -> Result<Kernel, ImageError> {
    let path = dir(store, name).join(Kernel::FILE);
    let kernel: Kernel = read_json(What::Kernel, &path)?
        .ok_or_else(|| ImageError::NotFound { what: What::Kernel.word(), name: name.to_string() })?;
    check(&kernel).map_err(|why| ImageError::Metadata { what: What::Kernel.word(), path, why })?;
    Ok(kernel)
}

fn check(kernel: &Kernel) -> Result<(), String> {
    if kernel.schema > Kernel::SCHEMA {
        return Err(format!("schema {} is newer than this build knows; use the newer hearth", kernel.schema));
    }
    match kernel.modules.iter().find(|m| m.contains('/') || m.starts_with('.')) {
        Some(bad) => Err(format!("module {bad:?} is not a file name")),
        None => Ok(()),
    }
}

/// Removes a kernel.
///
/// # Errors
/// [`ImageError::InUse`] while a template names it, [`ImageError::Unknown`] if that cannot be told.
pub fn remove(store: &Store, name: &KernelName, job: &Job<'_>) -> Result<(), ImageError> {
    let target = dir(store, name);
    let missing = || ImageError::NotFound { what: What::Kernel.word(), name: name.to_string() };
    if !target.exists() {
        return Err(missing());
    }
    store.work(What::Kernel, name.as_str(), false, job, |work| {
        if !target.exists() {
            return Err(missing());
        }
        let _change = change_lock(store, name, &target)?;
        refuse_used_kernel(store, name)?;
        work.take_out(&target)
    })
}

/// Directory of a kernel.
#[must_use]
pub fn dir(store: &Store, name: &KernelName) -> PathBuf {
    store.kernels().join(name.as_str())
}

/// The ELF that a VMM loads.
#[must_use]
pub fn elf_path(store: &Store, name: &KernelName) -> PathBuf {
    dir(store, name).join(Kernel::ELF)
}

/// Writes the ELF of `image` to `out` and says its release if it tells.
fn store_elf(image: &Path, out: &Path, job: &Job<'_>) -> Result<Option<String>, ImageError> {
    let fault = |why: String| ImageError::NotAKernel { path: image.to_owned(), why };
    let meta = std::fs::metadata(image).map_err(io("read", image))?;
    if !meta.is_file() {
        return Err(fault("it is not a file".into()));
    }
    let mut file = File::open(image).map_err(io("open", image))?;
    let mut head = Vec::new();
    Read::by_ref(&mut file).take(elf::HEAD as u64).read_to_end(&mut head).map_err(io("read", image))?;
    if elf::is_elf(&head) {
        elf::check_kernel(&head, meta.len()).map_err(fault)?;
        let whole = std::io::Cursor::new(head).chain(file);
        return copy_elf(Watched::new(whole, *job, "copying the kernel", Some(meta.len())), image, out, job);
    }
    if !bzimage::is_bzimage(&head) {
        return Err(fault("it is neither an ELF file nor a bzImage".into()));
    }
    if meta.len() > MAX_BZIMAGE {
        return Err(fault(format!("a bzImage of {} bytes is too large", meta.len())));
    }
    file.read_to_end(&mut head).map_err(io("read", image))?;
    job.report("unpacking the kernel", 0, None);
    let kernel = bzimage::extract(&head, job).map_err(|f| f.at(image))?;
    elf::check_kernel(&kernel, kernel.len() as u64)
        .map_err(|why| fault(format!("what its payload holds is no kernel: {why}")))?;
    let release = bzimage::release(&head).or_else(|| elf::banner_release(&kernel));
    write_synced(out, &kernel)?;
    Ok(release)
}

fn copy_elf(
    mut from: impl Read,
    image: &Path,
    out: &Path,
    job: &Job<'_>,
) -> Result<Option<String>, ImageError> {
    const OVERLAP: usize = 256;
    let mut to = File::create_new(out).map_err(io("create", out))?;
    let mut release = None;
    let mut window: Vec<u8> = Vec::new();
    let mut buf = vec![0; 1 << 20];
    loop {
        let n = match from.read(&mut buf) {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) if job.stopped() => return Err(ImageError::Stopped),
            Err(e) => return Err(io("read", image)(e)),
        };
        to.write_all(&buf[..n]).map_err(io("write", out))?;
        if release.is_none() {
            // The banner may lie across two pieces.
            let keep = window.len().saturating_sub(OVERLAP);
            window.drain(..keep);
            window.extend_from_slice(&buf[..n]);
            release = elf::banner_release(&window);
        }
    }
    to.sync_all().map_err(io("sync", out))?;
    Ok(release)
}
