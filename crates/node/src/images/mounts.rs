//! Removal of a directory tree that proves first that nothing is mounted below it: an interrupted Debian
//! bootstrap may leave the host's /dev or /proc bound there, and a recursive removal would reach them.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::error::{ImageError, io};

/// Mount points in a mountinfo(5) text at or below `dir`.
fn below(mountinfo: &[u8], dir: &Path) -> Vec<PathBuf> {
    mountinfo
        .split(|b| *b == b'\n')
        .filter_map(|line| line.split(|b| *b == b' ').nth(4))
        .map(|field| PathBuf::from(OsString::from_vec(unescape(field))))
        .filter(|p| p.starts_with(dir))
        .collect()
}

/// Undoes the kernel's `\ooo` of blanks and backslashes.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut i = 0;
    while i < field.len() {
        let octal = field.get(i + 1..i + 4).filter(|d| d.iter().all(|c| (b'0'..=b'7').contains(c)));
        match (field[i], octal) {
            (b'\\', Some(d)) => {
                out.push(d.iter().fold(0_u8, |v, c| v.wrapping_mul(8).wrapping_add(c - b'0')));
                i += 4;
            }
            (byte, _) => {
                out.push(byte);
                i += 1;
            }
        }
    }
    out
}

/// Removes a tree; "already gone" is success. Refuses while something is mounted in it.
pub(super) fn remove_tree(dir: &Path) -> Result<(), ImageError> {
    let real = match std::fs::canonicalize(dir) {
        Ok(real) => real,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(io("resolve", dir)(e)),
    };
    let table = Path::new("/proc/self/mountinfo");
    let mounted = below(&std::fs::read(table).map_err(io("read", table))?, &real);
    if let Some(first) = mounted.first() {
        return Err(ImageError::Source {
            path: real,
            why: format!("cannot be removed while {} is mounted; unmount it", first.display()),
        });
    }
    // A killed child may still be writing for a moment, which makes rmdir fail.
    let mut left = 20;
    loop {
        match std::fs::remove_dir_all(&real) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !real.exists() => return Ok(()),
            Err(_) if left > 0 => {
                left -= 1;
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            Err(e) => return Err(io("remove", &real)(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_through_escapes() {
        let text = b"29 1 254:0 / / rw - ext4 /dev/vda rw\n30 29 0:5 / /s/tmp\\040x/dev rw - devtmpfs d rw\n31 29 0:5 / /s/tmpx rw - a b c\nshort line\n";
        assert_eq!(below(text, Path::new("/s/tmp x")), [PathBuf::from("/s/tmp x/dev")]);
        assert!(below(text, Path::new("/s/tmp")).is_empty());
        assert_eq!(unescape(b"a\\134b\\9"), b"a\\b\\9");
    }
}
