//! Tests that cannot run here say so: counted as skipped, never as passed.

use std::fs::OpenOptions;
use std::io::Write as _;

/// Says that a test did not run and why. The line goes to stdout and, if `HEARTH_SKIP_LOG` names a file, is
/// appended there, since the harness hides the output of tests that return without failing.
///
/// # Panics
/// If that file cannot be written: a skip must not be lost.
pub fn skip(test: &str, why: &str) {
    let line = format!("SKIPPED: {test}: {why}");
    println!("{line}");
    if let Some(path) = std::env::var_os("HEARTH_SKIP_LOG") {
        let mut log = OpenOptions::new().create(true).append(true).open(path).expect("skip log");
        log.write_all(format!("{line}\n").as_bytes()).expect("skip log");
    }
}
