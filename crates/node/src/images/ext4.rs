//! ext4 images: made by mke2fs, and checked by their superblock when a user brings one.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::elf::{u16_at, u32_at};
use super::error::{ImageError, io};
use super::job::Job;
use super::program::{Limit, Program, Running};
use super::store::Work;
use super::tree::{BLOCK, Measured};

pub(super) const MKE2FS: Program = Program { name: "mke2fs", package: "e2fsprogs" };

/// Where the superblock begins in an image.
const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xEF53;
/// `s_state`: cleanly unmounted.
const CLEAN: u16 = 1;
/// `s_feature_incompat`: the journal must be replayed.
const NEEDS_RECOVERY: u32 = 0x4;
/// `s_feature_incompat`: it is a journal, not a file system.
const JOURNAL_DEVICE: u32 = 0x8;

/// Checks that a file is a whole, clean ext4 image, so that a read-only mount needs no journal replay.
pub(super) fn check(path: &Path) -> Result<u64, ImageError> {
    let not = |why: String| ImageError::NotExt4 { path: path.to_owned(), why };
    let bad = |why: String| ImageError::Ext4 { path: path.to_owned(), why };
    let meta = std::fs::metadata(path).map_err(io("read", path))?;
    if !meta.is_file() {
        return Err(not("it is not a file".into()));
    }
    let file = File::open(path).map_err(io("open", path))?;
    let mut sb = [0_u8; 1024];
    if meta.len() < SUPERBLOCK + 1024 {
        return Err(not(format!("its {} bytes hold no superblock", meta.len())));
    }
    file.read_exact_at(&mut sb, SUPERBLOCK).map_err(io("read", path))?;
    verdict(&sb, meta.len(), path).map_err(|fault| match fault {
        Verdict::NotExt4(why) => not(why),
        Verdict::Unusable(why) => bad(why),
    })?;
    Ok(meta.len())
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    NotExt4(String),
    Unusable(String),
}

fn verdict(sb: &[u8], file_len: u64, path: &Path) -> Result<(), Verdict> {
    let word = |at| u16_at(sb, at).unwrap_or(0);
    let long = |at| u32_at(sb, at).unwrap_or(0);
    if word(0x38) != MAGIC {
        return Err(Verdict::NotExt4(format!("no magic number {MAGIC:#06x} at byte {}", SUPERBLOCK + 0x38)));
    }
    let (incompatible, shift) = (long(0x60), long(0x18));
    if shift > 6 {
        return Err(Verdict::NotExt4("its block size is impossible".into()));
    }
    if incompatible & JOURNAL_DEVICE != 0 {
        return Err(Verdict::NotExt4("it is an external journal".into()));
    }
    // Extents tell ext4 from ext2 and ext3; every kernel's ext4 mounts those too.
    let wide = if incompatible & 0x80 == 0 { 0 } else { u64::from(long(0x150)) << 32 };
    let blocks = wide | u64::from(long(0x4));
    let bytes = blocks.checked_mul(1024 << shift);
    if bytes.is_none_or(|b| b > file_len) {
        return Err(Verdict::Unusable(format!(
            "it is truncated: its superblock says {blocks} blocks of {} bytes, the file has {file_len} bytes",
            1024 << shift
        )));
    }
    let dirty = word(0x3a) != CLEAN;
    if dirty || incompatible & NEEDS_RECOVERY != 0 {
        return Err(Verdict::Unusable(format!(
            "it was not unmounted cleanly; run `e2fsck -fy {}` first",
            path.display()
        )));
    }
    Ok(())
}

/// Inodes and bytes of the image for a tree: contents, inode table, a fifth more and 16 MiB. It is mounted
/// read-only, so it needs no room to grow; what is not used stays a hole.
fn geometry(tree: &Measured) -> (u64, u64) {
    let inodes = tree.inodes + tree.inodes / 8 + 256;
    let used = (tree.blocks + (inodes * 256).div_ceil(BLOCK)) * BLOCK;
    // A block group holds as many inodes as blocks: many empty files need a larger image.
    let wanted = (used + used / 5 + (16 << 20)).max(inodes * BLOCK);
    (inodes, wanted.next_multiple_of(1 << 20))
}

/// Makes an image of a directory.
pub(super) fn make(
    work: &Work,
    image: &Path,
    dir: &Path,
    tree: &Measured,
    size: Option<u64>,
    job: &Job<'_>,
) -> Result<u64, ImageError> {
    let (inodes, least) = geometry(tree);
    let bytes = size.unwrap_or(least);
    let data = tree.blocks * BLOCK;
    if bytes < data {
        let why = format!(
            "{} MiB cannot hold {} MiB of files; at least {} MiB are needed",
            bytes >> 20,
            data.div_ceil(1 << 20),
            least >> 20
        );
        return Err(ImageError::Option { field: "size", why });
    }
    let file = File::create_new(image).map_err(io("create", image))?;
    file.set_len(bytes).map_err(io("size", image))?;
    let mut cmd = MKE2FS.command()?;
    // No journal: nothing is ever replayed, so `mount -o ro` works on a read-only device.
    cmd.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0", "-L", "hearth-root"]);
    cmd.args(["-O", "^has_journal,^resize_inode", "-E", "root_owner=0:0,lazy_itable_init=1,nodiscard"]);
    cmd.arg("-N").arg(inodes.to_string()).arg("-d").arg(dir).arg(image);
    cmd.stdin(work.lock_for_child()?);
    let ended = Running::start(MKE2FS, cmd, work.dir(), Limit::TEMPLATE)?.finish(job, &mut |_| {
        let done = file.metadata().map_or(0, |m| m.blocks() * 512);
        job.report("writing the image", done.min(data), Some(data));
    })?;
    if !ended.success() {
        return Err(ended.failure("If the files do not fit, ask for a larger image size."));
    }
    file.sync_all().map_err(io("sync", image))?;
    Ok(bytes)
}

/// Copies an image, holes kept.
pub(super) fn copy(from: &Path, to: &Path, bytes: u64, job: &Job<'_>) -> Result<(), ImageError> {
    let source = File::open(from).map_err(io("open", from))?;
    let target = File::create_new(to).map_err(io("create", to))?;
    target.set_len(bytes).map_err(io("size", to))?;
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    while at < bytes {
        job.check()?;
        let want = usize::try_from(bytes - at).unwrap_or(buf.len()).min(buf.len());
        let piece = &mut buf[..want];
        source.read_exact_at(piece, at).map_err(io("read", from))?;
        for (i, block) in piece.chunks(64 * 1024).enumerate() {
            if block.iter().any(|b| *b != 0) {
                target.write_all_at(block, at + (i * 64 * 1024) as u64).map_err(io("write", to))?;
            }
        }
        at += want as u64;
        job.report("copying the image", at, Some(bytes));
    }
    target.sync_all().map_err(io("sync", to))
}

/// Path of an image in a directory being built.
pub(super) fn rootfs(dir: &Path) -> PathBuf {
    dir.join(hearth_core::image::Template::ROOTFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(blocks: u32) -> [u8; 1024] {
        let mut sb = [0_u8; 1024];
        sb[0x4..0x8].copy_from_slice(&blocks.to_le_bytes());
        sb[0x18] = 2;
        sb[0x38..0x3a].copy_from_slice(&MAGIC.to_le_bytes());
        sb[0x3a] = 1;
        sb
    }

    #[test]
    fn superblocks_are_judged() {
        let path = Path::new("/i");
        let good = superblock(100);
        assert_eq!(verdict(&good, 409_600, path), Ok(()));
        let why = |sb: &[u8], len| match verdict(sb, len, path) {
            Err(Verdict::NotExt4(w) | Verdict::Unusable(w)) => w,
            Ok(()) => panic!("taken"),
        };
        assert!(why(&good, 409_599).contains("truncated"));
        assert!(why(&[0; 1024], 409_600).contains("0xef53 at byte 1080"));
        assert!(why(&good[..0x38], 409_600).contains("no magic"));
        let with = |at: usize, value: u8| {
            let mut sb = good;
            sb[at] = value;
            why(&sb, 409_600)
        };
        assert!(with(0x3a, 0).contains("e2fsck -fy /i"));
        assert!(with(0x60, 4).contains("e2fsck"));
        assert!(with(0x60, 8).contains("journal"));
        assert!(with(0x18, 200).contains("impossible"));
        let mut wide = good;
        wide[0x60] = 0x80;
        wide[0x150..0x154].fill(0xff);
        assert!(why(&wide, 409_600).contains("truncated"));
    }

    #[test]
    fn many_empty_files_get_a_large_image() {
        let tree = Measured { inodes: 1_000_000, blocks: 1, on_disk: 0 };
        assert!(geometry(&tree).1 > 4 << 30);
        let tree = Measured { inodes: 1, blocks: 1, on_disk: 0 };
        assert_eq!(geometry(&tree).1, 17 << 20);
    }
}
