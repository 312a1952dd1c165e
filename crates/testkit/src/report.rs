//! What a run of the tests should tell its reader beyond passed and failed: which VMM really ran, a time measured.

use std::fs::OpenOptions;
use std::io::Write as _;

/// Says one line. It goes to stdout and, if `HEARTH_REPORT` names a file, is appended there: `scripts/test`
/// shows that file under "Notes", where the harness would hide the output of tests that pass.
///
/// # Panics
/// If that file cannot be written.
pub fn report(line: &str) {
    // One note is one line there.
    let line = line.replace('\n', " ");
    println!("NOTE: {line}");
    if let Some(path) = std::env::var_os("HEARTH_REPORT") {
        let mut notes = OpenOptions::new().create(true).append(true).open(path).expect("report");
        notes.write_all(format!("{line}\n").as_bytes()).expect("report");
    }
}
