//! Writes the exit record: complete under its name or absent, and on disk before anybody is told.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use hearth_core::exit::{EXIT_RECORD_FILE, ExitRecord};

/// Writes `exit.json` into the state directory: new file, sync, rename, sync of the directory.
///
/// # Errors
/// If one of the four fails; an older record is left as it was.
pub fn write(state_dir: &Path, record: &ExitRecord) -> io::Result<()> {
    let path = state_dir.join(EXIT_RECORD_FILE);
    let new = state_dir.join(format!("{EXIT_RECORD_FILE}.new"));
    let mut text = serde_json::to_vec_pretty(record).map_err(io::Error::other)?;
    text.push(b'\n');
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&text)?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    File::open(state_dir)?.sync_all()
}

/// Last lines of a log, at most `bytes`, on one line: what the VMM had to say before it ended. Empty if there
/// is nothing to read.
#[must_use]
pub fn last_words(path: &Path, bytes: usize) -> String {
    let Ok(all) = tail(path, bytes) else {
        return String::new();
    };
    let text = String::from_utf8_lossy(&all);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    lines.join(" | ").chars().map(printable).collect()
}

fn tail(path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut file = File::open(path)?;
    let start = file.metadata()?.len().saturating_sub(bytes as u64);
    file.seek(SeekFrom::Start(start))?;
    let mut out = Vec::with_capacity(bytes);
    file.take(bytes as u64).read_to_end(&mut out)?;
    // A cut line says less than none.
    if start > 0
        && let Some(newline) = out.iter().position(|b| *b == b'\n')
    {
        out.drain(..=newline);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::exit::ExitReason;

    #[test]
    fn a_record_replaces_the_older_one_whole() {
        let dir = tempfile::tempdir().unwrap();
        let mut record =
            ExitRecord { signal: Some(9), ..ExitRecord::new(ExitReason::VmmFailed, 1, "long ".repeat(100)) };
        write(dir.path(), &record).unwrap();
        record.detail = "short".into();
        write(dir.path(), &record).unwrap();
        let read = std::fs::read(dir.path().join(EXIT_RECORD_FILE)).unwrap();
        assert_eq!(serde_json::from_slice::<ExitRecord>(&read).unwrap(), record);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn last_words_are_whole_lines_without_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vmm.log");
        std::fs::write(&path, "first line\nsecond \x1b[31mline\r\n\nthird\n").unwrap();
        assert_eq!(last_words(&path, 1000), "first line | second  [31mline | third");
        assert_eq!(last_words(&path, 12), "third");
        assert_eq!(last_words(&dir.path().join("absent"), 12), "");
    }
}
