//! A network namespace for one test, made and removed by `ip netns`.

use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A namespace of its own name in `/run/netns`. Call [`Throwaway::remove`] at the end; a dropped one is
/// removed as well, since a failed test must not leave it, and complains if that fails.
#[derive(Debug)]
pub struct Throwaway {
    name: String,
    removed: bool,
}

impl Throwaway {
    /// Makes one. The name has this process's pid in it and is outside hearth's own grammar.
    ///
    /// # Errors
    /// If `ip` is missing or refuses (not root).
    pub fn new(label: &str) -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("htest-{label}-{}-{n}", std::process::id());
        run(Command::new("ip").args(["netns", "add", &name]))?;
        Ok(Self { name, removed: false })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file it is bound to.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// A command that runs `program` inside.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path().display())).arg("--").arg(program);
        command
    }

    /// Removes it.
    ///
    /// # Errors
    /// If `ip` refuses.
    pub fn remove(mut self) -> io::Result<()> {
        self.removed = true;
        self.delete()
    }

    fn delete(&self) -> io::Result<()> {
        run(Command::new("ip").args(["netns", "del", &self.name]))
    }
}

impl Drop for Throwaway {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        if let Err(e) = self.delete() {
            eprintln!("LEFT BEHIND: namespace {}: {e}; remove it: ip netns del {}", self.name, self.name);
        }
    }
}

/// Runs a program to its end and fails with what it said.
fn run(command: &mut Command) -> io::Result<()> {
    let output = command.output().map_err(|e| io::Error::new(e.kind(), format!("{command:?}: {e}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("{command:?}: {}: {}", output.status, said.trim())));
    }
    Ok(())
}
