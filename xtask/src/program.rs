//! Running programs of the host: one call, and an error that says what the program said.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Runs a program to its end with `input` on its stdin; its stdout.
pub(crate) fn run(program: &str, args: &[&str], input: &str) -> Result<String> {
    let what = || format!("{program} {}", args.join(" "));
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {}", what()))?;
    // A thread of its own: a program that answers before it has read all would block both.
    let (written, output) = std::thread::scope(|scope| {
        let stdin = child.stdin.take();
        let writer = scope.spawn(move || stdin.map_or(Ok(()), |mut pipe| pipe.write_all(input.as_bytes())));
        let output = child.wait_with_output();
        (writer.join(), output)
    });
    let output = output.with_context(what)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", what(), output.status, said.trim());
    let written = written.map_err(|_| anyhow::anyhow!("{}: the writer panicked", what()))?;
    written.with_context(|| format!("{}: write its input", what()))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
