//! Directories of sandboxes, below the instance's state or run directory and nowhere else. Releasing one
//! removes it with its contents, without ever following a symlink or crossing a mount: every step goes from
//! an open parent by `openat2` with `RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV | RESOLVE_BENEATH`.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::host::{Census, ErrorClass, HostError, Sighting};
use hearth_core::id::SandboxId;
use hearth_core::resource::Resource;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error;

/// Deeper trees are not ours: no sandbox directory has more than a few levels.
const MAX_DEPTH: usize = 64;

const OPEN: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const STAY: ResolveFlags =
    ResolveFlags::NO_SYMLINKS.union(ResolveFlags::NO_XDEV).union(ResolveFlags::BENEATH);

/// The directories of one instance.
#[derive(Debug, Clone)]
pub struct Directories {
    state: PathBuf,
    run: PathBuf,
}

impl Directories {
    /// Both are the instance's own: `<state>/<instance>` and `<run>/<instance>`.
    #[must_use]
    pub fn new(state: PathBuf, run: PathBuf) -> Self {
        Self { state, run }
    }

    /// Makes the directory (mode 0700) and its parents; there already is success.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] outside the instance's directories, [`ErrorClass::Foreign`] if a symlink or
    /// a file is in the place.
    pub fn ensure(&self, path: &Path) -> Result<(), HostError> {
        let what = format_args!("directory {}", path.display()).to_string();
        let (base, below) = self.split("ensure", path)?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(base)
            .map_err(|e| error::os("ensure", &what, format_args!("mkdir {}", base.display()), e))?;
        let mut at = open_base(base).map_err(|e| error::os("ensure", &what, "open the base", e))?;
        for name in &below {
            match rustix::fs::mkdirat(&at, name, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(error::os("ensure", &what, format_args!("mkdir {name:?}"), e.into())),
            }
            at = rustix::fs::openat(&at, name, OPEN, Mode::empty())
                .map_err(|e| not_a_directory("ensure", &what, name, e))?;
        }
        let mode = rustix::fs::fstat(&at).map_err(|e| error::os("ensure", &what, "stat", e.into()))?.st_mode;
        if Mode::from_raw_mode(mode).as_raw_mode() & 0o777 != 0o700 {
            rustix::fs::fchmod(&at, Mode::from_raw_mode(0o700))
                .map_err(|e| error::os("ensure", &what, "chmod 0700", e.into()))?;
        }
        Ok(())
    }

    /// Removes the directory with its contents; absent is success. Goes on past errors.
    ///
    /// # Errors
    /// [`ErrorClass::Refused`] outside the instance's directories (nothing was touched);
    /// [`ErrorClass::Foreign`] if a symlink or a file is in the place; [`ErrorClass::Busy`] if a mount lies
    /// inside or on it.
    pub fn release(&self, path: &Path, within: Duration) -> Result<(), HostError> {
        let what = format_args!("directory {}", path.display()).to_string();
        let (base, below) = self.split("release", path)?;
        let Some((name, parents)) = below.split_last() else {
            return Ok(());
        };
        let mut at = match open_base(base) {
            Ok(fd) => fd,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(error::os("release", what, format_args!("open {}", base.display()), e)),
        };
        for parent in parents {
            // Only no symlinks here: that a sandbox's directory lies on a file system of its own is allowed.
            at = match rustix::fs::openat(&at, parent, OPEN, Mode::empty()) {
                Ok(fd) => fd,
                Err(Errno::NOENT) => return Ok(()),
                Err(e) => return Err(not_a_directory("release", &what, parent, e)),
            };
        }
        match rustix::fs::statat(&at, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(error::os("release", what, "stat", e.into())),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Directory => {
                return Err(not_a_directory("release", &what, name, Errno::NOTDIR));
            }
            Ok(_) => {}
        }
        let mut walk = Walk { deadline: Instant::now() + within, left: Vec::new() };
        walk.remove_directory(at.as_fd(), name, path, 0);
        walk.into_result(&what, within)
    }

    /// Entries of `<run>/sandboxes` and `<state>/sandboxes`.
    ///
    /// # Errors
    /// If neither can be read.
    pub fn census(&self) -> Result<Census, HostError> {
        let mut census = Census::default();
        let mut failed = 0;
        for parent in [self.run.join("sandboxes"), self.state.join("sandboxes")] {
            if let Err(e) = list(&parent, &mut census) {
                failed += 1;
                census.incomplete.push(format!("{}: {e}", parent.display()));
            }
        }
        if failed == 2 {
            let why = census.incomplete.join("; ");
            return Err(error::plain("census", "directories", ErrorClass::Failed, why));
        }
        Ok(census)
    }

    /// The base this path is below, and the names from there on. Judged by components: no `..`, no `.` that
    /// the parser would keep, nothing outside, not the base itself.
    fn split(&self, verb: &'static str, path: &Path) -> Result<(&Path, Vec<CString>), HostError> {
        let refuse = |why: String| {
            error::plain(verb, format_args!("directory {}", path.display()), ErrorClass::Refused, why)
        };
        let parts = |p: &Path| -> Option<Vec<CString>> {
            let mut components = p.components();
            matches!(components.next(), Some(Component::RootDir)).then_some(())?;
            components
                .map(|c| match c {
                    Component::Normal(name) => CString::new(name.as_bytes()).ok(),
                    _ => None,
                })
                .collect()
        };
        let Some(wanted) = parts(path) else {
            return Err(refuse("the path is not absolute, or has '..' or a NUL byte in it".into()));
        };
        for base in [&self.run, &self.state] {
            if let Some(base_parts) = parts(base)
                && wanted.len() > base_parts.len()
                && wanted.starts_with(&base_parts)
            {
                return Ok((base, wanted[base_parts.len()..].to_vec()));
            }
        }
        let (run, state) = (self.run.display(), self.state.display());
        Err(refuse(format!("it is neither below {run} nor below {state}; only those are ours")))
    }
}

/// The base may be a symlink: an operator placed it.
fn open_base(base: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(base, flags, Mode::empty())?)
}

fn not_a_directory(verb: &'static str, what: &str, name: &CStr, e: Errno) -> HostError {
    if matches!(e, Errno::LOOP | Errno::NOTDIR) {
        let why =
            format!("{name:?} is a symlink or a file, not a directory of ours; look at it and remove it");
        return error::plain(verb, what, ErrorClass::Foreign, why);
    }
    error::os(verb, what, format_args!("open {name:?}"), e.into())
}

fn list(parent: &Path, census: &mut Census) -> io::Result<()> {
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        let is_id = name.to_str().is_some_and(|n| n.parse::<SandboxId>().is_ok());
        if !is_id {
            census.foreign.insert(path.display().to_string(), "its name is no sandbox id".into());
        } else if !entry.file_type()?.is_dir() {
            census.foreign.insert(path.display().to_string(), "it is not a directory".into());
        } else {
            let resource = Resource::Directory { path };
            census.ours.push(Sighting { resource, facts: "directory".into() });
        }
    }
    Ok(())
}

/// One removal: goes on past errors and keeps them all.
struct Walk {
    deadline: Instant,
    left: Vec<(PathBuf, Errno)>,
}

impl Walk {
    /// Removes `name` in `parent`, contents first. `path` is for messages only.
    fn remove_directory(&mut self, parent: BorrowedFd<'_>, name: &CStr, path: &Path, depth: usize) {
        if depth > MAX_DEPTH {
            return self.left.push((path.to_owned(), Errno::NAMETOOLONG));
        }
        let fd = match rustix::fs::openat2(parent, name, OPEN, Mode::empty(), STAY) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return,
            Err(e) => return self.left.push((path.to_owned(), e)),
        };
        let failed_before = self.left.len();
        match Dir::read_from(&fd) {
            Ok(dir) => self.remove_contents(fd.as_fd(), dir, path, depth),
            Err(e) => self.left.push((path.to_owned(), e)),
        }
        if self.left.len() > failed_before {
            // It cannot be empty; the errors inside say why.
            return;
        }
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => self.left.push((path.to_owned(), e)),
        }
    }

    fn remove_contents(&mut self, fd: BorrowedFd<'_>, mut dir: Dir, path: &Path, depth: usize) {
        while let Some(entry) = dir.read() {
            if Instant::now() >= self.deadline {
                return self.left.push((path.to_owned(), Errno::TIMEDOUT));
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(e) => return self.left.push((path.to_owned(), e)),
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let below = path.join(std::ffi::OsStr::from_bytes(name.to_bytes()));
            let kind = match entry.file_type() {
                // Some file systems do not tell; a look that follows nothing does.
                FileType::Unknown => rustix::fs::statat(fd, name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |s| FileType::from_raw_mode(s.st_mode)),
                kind => kind,
            };
            if kind == FileType::Directory {
                self.remove_directory(fd, name, &below, depth + 1);
                continue;
            }
            match rustix::fs::unlinkat(fd, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => self.left.push((below, e)),
            }
        }
    }

    fn into_result(self, what: &str, within: Duration) -> Result<(), HostError> {
        let Some((path, first)) = self.left.first() else {
            return Ok(());
        };
        let more = match self.left.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        let at = path.display();
        Err(match *first {
            Errno::XDEV | Errno::BUSY => {
                let why = format!("something is mounted on {at}; left as it is: umount it first{more}");
                error::plain("release", what, ErrorClass::Busy, why)
            }
            Errno::TIMEDOUT => {
                let why = format!("not empty after {within:?}, stopped in {at}{more}");
                error::plain("release", what, ErrorClass::Deadline, why)
            }
            e => error::os("release", what, format_args!("remove {at}{more}"), e.into()),
        })
    }
}
