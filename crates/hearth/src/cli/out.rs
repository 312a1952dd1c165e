//! Writing to stdout and stderr without the panic of `println!` when nobody reads.

use std::io::{IsTerminal, Write};

use serde::Serialize;

use super::error::CliError;

/// Writes text to stdout.
pub(super) fn print(text: &str) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Writes one line to stdout.
pub(super) fn line(text: &str) -> Result<(), CliError> {
    print(&format!("{text}\n"))
}

/// Writes one JSON value to stdout.
pub(super) fn json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| CliError::failed("cannot write output", e.to_string()))?;
    line(&text)
}

/// Tells a person something on stderr. That nobody may be listening there is no reason to fail.
pub(super) fn note(text: &str) {
    note_raw(&format!("hearth: {text}"));
}

/// The same without our name in front.
pub(super) fn note_raw(text: &str) {
    // In one write, so that lines of several processes do not mix.
    drop(std::io::stderr().lock().write_all(format!("{text}\n").as_bytes()));
}

/// Whether a person reads our output.
pub(super) fn is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Whether output may have colour.
pub(super) fn colour() -> bool {
    // https://no-color.org: set and not empty, whatever the value.
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()) && std::io::stdout().is_terminal()
}
