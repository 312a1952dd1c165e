//! Unpacks a tar archive as `docker export` makes it: hard links, owners, modes, devices and extended
//! attributes kept. GNU tar unpacks, but only what `tarscan` has read to its end before.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::error::{ImageError, io};
use super::job::{Job, Watched};
use super::mem::decoder;
use super::program::{Limit, Program, Running, feed};
use super::store::Work;
use super::{space, tarscan};

const TAR: Program = Program { name: "tar", package: "tar" };

/// Where an archive comes from.
pub enum TarInput<'a> {
    /// A file; read twice.
    File(PathBuf),
    /// A stream, spooled into the store's work area.
    Reader {
        /// The bytes. It must end, with an error if need be, when the job is stopped.
        reader: Box<dyn Read + Send + 'a>,
        /// What to call it in messages.
        label: String,
    },
}

impl std::fmt::Debug for TarInput<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.label())
    }
}

impl TarInput<'_> {
    pub(super) fn label(&self) -> String {
        match self {
            TarInput::File(path) => path.display().to_string(),
            TarInput::Reader { label, .. } => label.clone(),
        }
    }
}

/// Whether this process is root: the owner of its /proc entry is its effective user.
pub(super) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0)
}

/// Unpacks `input` into a new directory of the work area and returns that.
pub(super) fn unpack(input: TarInput<'_>, work: &Work, job: &Job<'_>) -> Result<PathBuf, ImageError> {
    if !is_root() {
        return Err(ImageError::NeedsRoot { what: "a template from a tar" });
    }
    let label = input.label();
    let file = match input {
        TarInput::File(path) => path,
        TarInput::Reader { reader, label } => spool(reader, &label, work, job)?,
    };
    let summary = tarscan::scan(open(&file, "checking the archive", job)?, job).map_err(|f| f.at(&label))?;
    // Once as files, once as image.
    let need = summary.bytes.saturating_add(summary.entries.saturating_mul(1024)).saturating_mul(2);
    space::require(work.dir(), "the template", need, job)?;
    let dir = work.dir().join("root");
    std::fs::create_dir(&dir).map_err(io("create", &dir))?;
    std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .map_err(io("protect", &dir))?;
    let done = extract(open(&file, "unpacking", job)?, &label, &dir, work, job);
    done.map(|()| dir).map_err(|e| space::explain(e, work.dir(), "the template", need))
}

fn open<'a>(path: &Path, step: &'static str, job: &Job<'a>) -> Result<Box<dyn Read + 'a>, ImageError> {
    let meta = std::fs::metadata(path).map_err(io("read", path))?;
    if !meta.is_file() {
        return Err(ImageError::Source { path: path.to_owned(), why: "it is not a file".into() });
    }
    let file = File::open(path).map_err(io("open", path))?;
    let watched = Watched::new(file, *job, step, Some(meta.len()));
    decoder(BufReader::with_capacity(1 << 18, watched)).map_err(io("read", path))
}

fn spool(reader: impl Read, label: &str, work: &Work, job: &Job<'_>) -> Result<PathBuf, ImageError> {
    let path = work.dir().join("input");
    let mut out = File::create_new(&path).map_err(io("create", &path))?;
    let mut reader = Watched::new(reader, *job, "receiving the archive", None);
    let mut buf = vec![0; 1 << 18];
    loop {
        let n = match reader.read(&mut buf) {
            Ok(0) => return Ok(path),
            Ok(n) => n,
            Err(_) if job.stopped() => return Err(ImageError::Stopped),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => {
                let why = format!("it cannot be read: {e}");
                return Err(ImageError::Tar { archive: label.to_owned(), entry: None, why });
            }
        };
        std::io::Write::write_all(&mut out, &buf[..n]).map_err(io("write", &path))?;
    }
}

fn extract(
    mut from: impl Read,
    label: &str,
    dir: &Path,
    work: &Work,
    job: &Job<'_>,
) -> Result<(), ImageError> {
    let mut cmd = TAR.command()?;
    cmd.args(["--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*"]);
    // GNU tar warns of each attribute or timestamp it finds odd; only errors matter here.
    cmd.args(["--warning=no-timestamp", "-xf", "-", "-C"]).arg(dir);
    cmd.stdin(Stdio::piped());
    let mut running = Running::start(TAR, cmd, work.dir(), Limit::TEMPLATE)?;
    let fed = running.feed(job, |stdin| pump(&mut from, stdin, job));
    if let Err(e) = fed {
        running.kill()?;
        if job.stopped() {
            return Err(ImageError::Stopped);
        }
        let why = format!("it cannot be read: {e}");
        return Err(ImageError::Tar { archive: label.to_owned(), entry: None, why });
    }
    let ended = running.finish(job, &mut |_| {})?;
    if ended.success() { Ok(()) } else { Err(ended.failure("")) }
}

fn pump(from: &mut impl Read, stdin: &mut std::process::ChildStdin, job: &Job<'_>) -> std::io::Result<()> {
    let mut buf = vec![0; 1 << 18];
    loop {
        if job.stopped() {
            return Err(std::io::Error::other("stopped"));
        }
        match from.read(&mut buf)? {
            0 => return Ok(()),
            n if !feed(stdin, &buf[..n])? => return Ok(()),
            _ => {}
        }
    }
}
