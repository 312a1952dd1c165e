//! Free space of a file system. std has no statvfs, so df(1) is asked.

use std::path::Path;
use std::time::Duration;

use super::error::ImageError;
use super::job::Job;
use super::program::{self, Limit, Program};

const DF: Program = Program { name: "df", package: "coreutils" };

const ANSWER: Limit = Limit {
    after: Duration::from_secs(10),
    remedy: "The file system of that directory does not answer: look in `dmesg` and, for a network mount, at its server.",
};

/// Bytes an unprivileged writer may still use below `dir`.
pub(super) fn available(dir: &Path, job: &Job<'_>) -> Result<u64, ImageError> {
    let mut cmd = DF.command()?;
    cmd.args(["--output=avail", "-B1", "--"]).arg(dir);
    let ended = program::run(DF, cmd, dir, ANSWER, job)?;
    if !ended.success() {
        return Err(ended.failure(""));
    }
    parse(&ended.output()).ok_or_else(|| ended.failure("Its output was not understood."))
}

fn parse(output: &str) -> Option<u64> {
    output.lines().nth(1)?.trim().parse().ok()
}

/// Fails if fewer than `need` bytes are available below `dir`.
pub(super) fn require(dir: &Path, what: &str, need: u64, job: &Job<'_>) -> Result<(), ImageError> {
    let have = available(dir, job)?;
    if have < need {
        return Err(ImageError::NoSpace { path: dir.to_owned(), what: what.to_owned(), need, have });
    }
    Ok(())
}

/// Makes "no space" out of an error that happened while the disk was full: programs report that in words of
/// their own.
pub(super) fn explain(error: ImageError, dir: &Path, what: &str, need: u64) -> ImageError {
    let full = match &error {
        ImageError::Program { .. } => true,
        ImageError::Io { source, .. } => source.kind() == std::io::ErrorKind::StorageFull,
        _ => false,
    };
    if !full {
        return error;
    }
    let never = std::sync::atomic::AtomicBool::new(false);
    match available(dir, &Job::quiet(&never)) {
        Ok(have) if have < 4 << 20 => {
            ImageError::NoSpace { path: dir.to_owned(), what: what.to_owned(), need, have }
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn df_is_understood() {
        assert_eq!(parse("     Avail\n84825374720\n"), Some(84_825_374_720));
        assert_eq!(parse("Avail\n-\n"), None);
        assert_eq!(parse(""), None);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let job = Job::quiet(&stop);
        let dir = tempfile::tempdir().unwrap();
        let err = require(dir.path(), "a test", u64::MAX, &job).unwrap_err();
        assert!(err.to_string().contains("a test needs 17592186044416 MiB"), "{err}");
    }
}
