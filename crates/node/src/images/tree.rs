//! Measures a directory that is to become a root disk.

use std::collections::HashSet;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::{ImageError, io};
use super::job::Job;

/// Block size of the images made here.
pub(super) const BLOCK: u64 = 4096;
/// Longest symlink target kept inside an inode.
const FAST_SYMLINK: u64 = 59;

/// Size of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) inodes: u64,
    /// Blocks an ext4 needs for contents and directories, holes counted as data.
    pub(super) blocks: u64,
    /// Bytes really on disk.
    pub(super) on_disk: u64,
}

/// Walks `root` on its own file system; another one mounted inside is refused, since what it holds (/proc,
/// a home directory) is hardly meant.
pub(super) fn measure(root: &Path, job: &Job<'_>) -> Result<Measured, ImageError> {
    let top = std::fs::metadata(root).map_err(io("inspect", root))?;
    if !top.is_dir() {
        return Err(ImageError::Source { path: root.to_owned(), why: "it is not a directory".into() });
    }
    let mut sum = Measured { inodes: 1, ..Measured::default() };
    let mut linked: HashSet<u64> = HashSet::new();
    let mut dirs: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(dir) = dirs.pop() {
        job.check()?;
        job.report("measuring", sum.inodes, None);
        let mut listing = 64;
        for entry in std::fs::read_dir(&dir).map_err(io("list", &dir))? {
            let entry = entry.map_err(io("list", &dir))?;
            let path = entry.path();
            let meta = entry.metadata().map_err(io("inspect", &path))?;
            listing += 8 + (entry.file_name().as_bytes().len() as u64).next_multiple_of(4);
            if meta.dev() != top.dev() {
                let why = "another file system is mounted there; unmount it, or give a tar instead".into();
                return Err(ImageError::Source { path, why });
            }
            if !meta.is_dir() && meta.nlink() > 1 && !linked.insert(meta.ino()) {
                continue;
            }
            sum.inodes += 1;
            sum.on_disk += meta.blocks() * 512;
            if meta.is_dir() {
                dirs.push(path);
            } else if meta.is_file() || (meta.is_symlink() && meta.len() > FAST_SYMLINK) {
                sum.blocks += meta.len().div_ceil(BLOCK);
            }
        }
        // Half full blocks and hash tree: twice the plain size.
        sum.blocks += (2 * listing).div_ceil(BLOCK);
    }
    Ok(sum)
}
