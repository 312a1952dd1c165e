//! A writer of newc cpio archives, as the kernel unpacks them for an initramfs
//! (Documentation/driver-api/early-userspace/buffer-format.rst). The same input gives the same bytes.

use std::io::{self, Write};

const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const CHAR: u32 = 0o020_600;

/// Writes entries in the order of the calls; a directory goes before what is in it.
pub(super) struct Cpio<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Cpio<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    pub(super) fn dir(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIR, 2, (0, 0), &[])
    }

    pub(super) fn file(&mut self, name: &str, permissions: u32, data: &[u8]) -> io::Result<()> {
        self.entry(name, FILE | permissions, 1, (0, 0), data)
    }

    pub(super) fn char_device(&mut self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        self.entry(name, CHAR, 1, (major, minor), &[])
    }

    /// Writes the end mark.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.inode = u32::MAX;
        self.entry("TRAILER!!!", 0, 1, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, links: u32, dev: (u32, u32), data: &[u8]) -> io::Result<()> {
        self.inode = self.inode.wrapping_add(1);
        let size = u32::try_from(data.len()).map_err(|_| io::Error::other(format!("{name} is too large")))?;
        let name_size = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        write!(self.out, "070701")?;
        for field in [self.inode, mode, 0, 0, links, 0, size, 0, 0, dev.0, dev.1, name_size, 0] {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + name.len() + 1)?;
        self.out.write_all(data)?;
        self.pad(data.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..(4 - written % 4) % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_those_of_newc() {
        let mut c = Cpio::new(Vec::new());
        c.dir("d").unwrap();
        c.file("d/ab", 0o755, b"hello").unwrap();
        c.char_device("c", 5, 1).unwrap();
        let bytes = c.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        let head = "0707010000000100\
                    0041ED000000000000000000000002000000000000000000000000";
        assert!(text.starts_with(head), "{text}");
        // Where cpio(1) is installed it must agree.
        let Ok(mut child) = std::process::Command::new("cpio")
            .args(["-tv", "--quiet"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
        else {
            hearth_testkit::skip("the_bytes_are_those_of_newc", "no cpio program to compare with");
            return;
        };
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(out.contains("drwxr-xr-x") && out.contains("-rwxr-xr-x") && out.contains("d/ab"), "{out}");
        assert!(out.lines().any(|l| l.starts_with("crw-------") && l.contains("5,   1")), "{out}");
    }
}
