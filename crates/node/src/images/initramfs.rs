//! The initramfs of a kernel: the guest agent as `/init` and the modules it loads.
//!
//! Its file name carries a hash of its contents, so another build of hearth makes another file beside the
//! one that running daemons use.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hearth_core::id::KernelName;
use sha2::{Digest as _, Sha256};

use super::cpio::Cpio;
use super::error::{ImageError, io};
use super::guest_program::{Digest, GuestProgram};
use super::job::Job;
use super::kernel;
use super::store::{Store, What, sync_dir};
use super::uses::{Claim, claim};

/// Initramfs files kept per kernel: the one in use and the one before, for a daemon about to be upgraded.
const KEEP: usize = 2;
/// Raised when the layout inside changes.
const LAYOUT: &[u8] = b"hearth initramfs 1\n";

/// Returns the initramfs of a kernel with this guest binary, made if it is not there yet. The common case costs a
/// look at the binary's metadata and at the directory.
///
/// # Errors
/// If there is no such kernel, the binary cannot be read, or the initramfs cannot be written.
pub fn ensure(
    store: &Store,
    kernel: &KernelName,
    guest: &GuestProgram,
    job: &Job<'_>,
) -> Result<PathBuf, ImageError> {
    let _use = claim(store, What::Kernel, kernel.as_str(), Claim::Use)?;
    let meta = kernel::get(store, kernel)?;
    let dir = kernel::dir(store, kernel);
    let digest = guest.digest().map_err(io("read the guest agent", guest.path()))?;
    let path = dir.join(file_name(&digest, &meta.modules));
    if path.exists() {
        return Ok(path);
    }
    let (binary, digest) = guest.read().map_err(io("read the guest agent", guest.path()))?;
    let path = dir.join(file_name(&digest, &meta.modules));
    store.work(What::Initramfs, kernel.as_str(), true, job, |work| {
        if path.exists() {
            return Ok(());
        }
        let new = work.dir().join("new");
        write(&new, &binary, &dir.join("modules"), &meta.modules, job)?;
        std::fs::rename(&new, &path).map_err(io("put in place", &path))?;
        prune(&dir, &path)?;
        sync_dir(&dir)
    })?;
    Ok(path)
}

fn file_name(guest: &Digest, modules: &[String]) -> String {
    let mut hash = Sha256::new();
    hash.update(LAYOUT);
    hash.update(guest);
    for module in modules {
        hash.update(module.as_bytes());
        hash.update([0]);
    }
    let hex: String = hash.finalize().iter().take(6).map(|b| format!("{b:02x}")).collect();
    format!("initramfs-{hex}.cpio")
}

fn write(
    out: &Path,
    guest: &[u8],
    modules: &Path,
    order: &[String],
    job: &Job<'_>,
) -> Result<(), ImageError> {
    let file = std::fs::File::create_new(out).map_err(io("create", out))?;
    let mut cpio = Cpio::new(BufWriter::with_capacity(1 << 20, file));
    let wrote = |r: std::io::Result<()>| r.map_err(io("write", out));
    for dir in ["dev", "modules", "newroot", "proc", "sys"] {
        wrote(cpio.dir(dir))?;
    }
    // Without it the kernel gives init no stdout.
    wrote(cpio.char_device("dev/console", 5, 1))?;
    wrote(cpio.file("init", 0o755, guest))?;
    let list: String = order.iter().map(|m| format!("{m}\n")).collect();
    wrote(cpio.file("modules/order", 0o644, list.as_bytes()))?;
    for (i, module) in order.iter().enumerate() {
        job.check()?;
        job.report("making the initramfs", i as u64, Some(order.len() as u64));
        let path = modules.join(module);
        let data = std::fs::read(&path).map_err(io("read", &path))?;
        wrote(cpio.file(&format!("modules/{module}"), 0o644, &data))?;
    }
    let mut buffered = cpio.finish().map_err(io("write", out))?;
    buffered.flush().map_err(io("write", out))?;
    buffered.get_ref().sync_all().map_err(io("sync", out))
}

/// Removes the oldest of our files in `dir` beyond [`KEEP`], never `current`.
fn prune(dir: &Path, current: &Path) -> Result<(), ImageError> {
    let mut others: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io("list", dir))? {
        let entry = entry.map_err(io("list", dir))?;
        let name = entry.file_name();
        let hash = name.to_str().and_then(|n| n.strip_prefix("initramfs-")?.strip_suffix(".cpio"));
        let ours = hash.is_some_and(|h| h.len() == 12 && h.bytes().all(|b| b.is_ascii_hexdigit()));
        let path = entry.path();
        if ours && path != current {
            let modified = entry.metadata().and_then(|m| m.modified()).map_err(io("inspect", &path))?;
            others.push((modified, path));
        }
    }
    others.sort();
    let extra = (others.len() + 1).saturating_sub(KEEP);
    for (_, path) in others.into_iter().take(extra) {
        std::fs::remove_file(&path).map_err(io("remove", &path))?;
    }
    Ok(())
}
