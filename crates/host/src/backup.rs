//! The files of firewall backups: written whole or not at all, readable by root alone, and so many as configured. What
//! is in one is `hearth_core::backup`'s business, and when one is taken its caller's.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_core::backup::{Backup, Content, FORM, Header};

use crate::net::rulesets;

/// What the file of a backup ends with.
const SUFFIX: &str = ".rules";
/// Of a file that is being written.
const PARTIAL: &str = ".partial";

/// Where backups are kept.
#[derive(Debug, Clone)]
pub struct Backups {
    /// Their directory; made when the first is taken.
    pub dir: PathBuf,
    /// How many are kept; the oldest go.
    pub keep: usize,
    /// Whose configuration is in force.
    pub instance: String,
}

/// A backup that was taken.
#[derive(Debug)]
pub struct Taken {
    /// Where it is.
    pub path: PathBuf,
    /// Whether it was written; else an earlier one holds the same rules.
    pub written: bool,
    /// What it holds.
    pub backup: Backup,
    /// An older file that had to go and did not.
    pub kept: Vec<String>,
}

impl Taken {
    /// What could not be saved, in words.
    #[must_use]
    pub fn absent(&self) -> Vec<String> {
        let why = |part: &hearth_core::backup::Part| match &part.content {
            Content::Absent(why) => Some(format!("{}: {why}", part.tool)),
            Content::Saved(_) | Content::Empty => None,
        };
        self.backup.parts.iter().filter_map(why).collect()
    }
}

impl Backups {
    /// Saves the rules that are there now. Where the newest backup holds the same rules of this host, that is the one.
    /// `spared` is not removed, however old.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn take(&self, reason: &str, spared: Option<&Path>) -> io::Result<Taken> {
        let parts = rulesets::read();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let taken_at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let at = utc(now.as_secs())?;
        let header = Header {
            form: FORM,
            taken_at_ms,
            taken_at: at.clone(),
            host: host_name(),
            kernel: crate::facts::kernel_release(),
            instance: self.instance.clone(),
            reason: reason.to_owned(),
        };
        let backup = Backup { header, parts };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        if let Some(path) = self.all()?.pop()
            && load(&path)
                .is_ok_and(|last| last.header.host == backup.header.host && last.parts == backup.parts)
        {
            return Ok(Taken { path, written: false, backup, kept: vec![] });
        }
        // Names sort by time; two in one millisecond are told apart by who took them.
        let name = format!(
            "{}.{:03}-{}-{}{SUFFIX}",
            at.trim_end_matches('Z').replace([':', '-'], ""),
            now.subsec_millis(),
            self.instance,
            std::process::id()
        );
        let path = self.dir.join(name);
        write(&path, &backup.to_string())?;
        let kept = self.prune(&path, spared)?;
        Ok(Taken { path, written: true, backup, kept })
    }

    /// All backups, the oldest first. Other files in the directory are not ours.
    fn all(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            if is_ours(&entry.file_name().to_string_lossy()) {
                found.push(entry.path());
            }
        }
        found.sort();
        Ok(found)
    }

    /// Removes the oldest; those that did not go, in words.
    fn prune(&self, newest: &Path, spared: Option<&Path>) -> io::Result<Vec<String>> {
        let mut failed = Vec::new();
        let mut all = self.all()?;
        let surplus = all.len().saturating_sub(self.keep.max(1));
        for old in all.drain(..surplus).filter(|p| p != newest && Some(p.as_path()) != spared) {
            match fs::remove_file(&old) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    failed.push(format!("{}: {e}", old.display()))
                }
                _ => {}
            }
        }
        Ok(failed)
    }
}

/// Reads one.
///
/// # Errors
/// If it cannot be read or is no backup; InvalidData then.
pub fn load(path: &Path) -> io::Result<Backup> {
    fs::read_to_string(path)?.parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// Name of this host.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// `20231114T221320.123-<instance>-<pid>.rules`
fn is_ours(name: &str) -> bool {
    let Some((time, rest)) = name.strip_suffix(SUFFIX).and_then(|n| n.split_once('-')) else { return false };
    let digits = |s: &str, n: usize| s.len() == n && s.bytes().all(|b| b.is_ascii_digit());
    let time = time.split_once('T').and_then(|(day, time)| Some((day, time.split_once('.')?)));
    let by = rest
        .rsplit_once('-')
        .is_some_and(|(instance, pid)| !instance.is_empty() && pid.parse::<u32>().is_ok());
    by && time.is_some_and(|(day, (time, ms))| digits(day, 8) && digits(time, 6) && digits(ms, 3))
}

/// Another name first: a file that was cut short never has the right one.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let partial = path.with_extension(format!("rules{PARTIAL}"));
    let written = (|| {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&partial)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()?;
        fs::rename(&partial, path)
    })();
    if let Err(e) = written {
        // Half of it is of no use to anybody; the error is the news.
        drop(fs::remove_file(&partial));
        return Err(e);
    }
    match path.parent() {
        Some(dir) => fs::File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}

/// `2023-11-14T22:13:20Z`
fn utc(seconds: u64) -> io::Result<String> {
    let time = libc::time_t::try_from(seconds).map_err(io::Error::other)?;
    // SAFETY: all zeroes is a value of this plain C structure.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both point to values of this function; the result is one of them or null.
    if unsafe { libc::gmtime_r(&raw const time, &raw mut parts) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    Ok(format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        parts.tm_year + 1900,
        parts.tm_mon + 1,
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_time_and_other_files_are_nobodys_business() {
        assert_eq!(utc(1_700_000_000).unwrap(), "2023-11-14T22:13:20Z");
        assert!(is_ours("20231114T221320.123-default-77.rules"));
        assert!(is_ours("20231114T221320.123-a-b-77.rules"));
        for other in ["a.rules", "20231114T221320.123-a-77.rules.partial", "20231114T2213.123-a-7.rules", "x"]
        {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    fn so_many_are_kept_and_the_one_in_use_too() {
        let dir = tempfile::tempdir().unwrap();
        let backups = Backups { dir: dir.path().to_owned(), keep: 2, instance: "i".into() };
        let name = |n: u32| dir.path().join(format!("20231114T22132{n}.000-i-1.rules"));
        (0..5).for_each(|n| fs::write(name(n), "x").unwrap());
        fs::write(dir.path().join("notes.txt"), "mine").unwrap();
        assert_eq!(backups.prune(&name(4), Some(&name(0))).unwrap(), [""; 0]);
        let left: Vec<bool> = (0..5).map(|n| name(n).exists()).collect();
        assert_eq!(left, [true, false, false, true, true]);
        assert!(dir.path().join("notes.txt").exists());
    }

    #[test]
    fn a_file_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("20231114T221320.123-i-1.rules");
        write(&path, "text").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&path).unwrap().permissions());
        assert_eq!((mode & 0o777, fs::read_to_string(&path).unwrap().as_str()), (0o600, "text"));
        // Somebody's directory has the name: nothing is left of the try.
        let taken = dir.path().join("20231114T221321.123-i-1.rules");
        fs::create_dir(&taken).unwrap();
        fs::write(taken.join("x"), "").unwrap();
        assert!(write(&taken, "text").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
