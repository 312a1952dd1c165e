//! Programs of the host that have no other interface: run to their end, within a bound, with what they said.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where programs of an administrator are; the PATH of an ordinary user often lacks them.
const PLACES: [&str; 5] = ["/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"];

/// Finds a program by its name.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    PLACES.iter().map(|dir| Path::new(dir).join(name)).find(|path| path.is_file())
}

/// Runs a program with `input` on its stdin; its stdout.
///
/// # Errors
/// If it cannot be run, does not end within the bound (it is killed then), or fails: with what it said.
pub(crate) fn run(program: &Path, args: &[&str], input: &str, within: Duration) -> io::Result<String> {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (stdin, mut stdout, mut stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let deadline = Instant::now() + within;
    // Fed and read while it runs: a long text fills a pipe in either direction.
    std::thread::scope(|scope| {
        let fed = scope.spawn(|| stdin.map_or(Ok(()), |mut pipe| pipe.write_all(input.as_bytes())));
        let out = scope.spawn(|| read(stdout.as_mut()));
        let err = scope.spawn(|| read(stderr.as_mut()));
        let status = loop {
            match child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
                None => {
                    child.kill()?;
                    child.wait()?;
                    return Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("not done after {within:?}"),
                    ));
                }
            }
        };
        let panicked = |_| Err(io::Error::other("a reader panicked"));
        let (fed, out, err) = (
            fed.join().unwrap_or_else(panicked),
            out.join().unwrap_or_else(|_| Err(io::Error::other("a reader panicked"))),
            err.join().unwrap_or_else(|_| Err(io::Error::other("a reader panicked"))),
        );
        if !status.success() {
            return Err(io::Error::other(format!("{status}: {}", err.unwrap_or_default().trim())));
        }
        fed.and(out)
    })
}

fn read(pipe: Option<&mut impl Read>) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        pipe.read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_is_kept_and_one_that_does_not_end_is_killed() {
        let sh = find("sh").unwrap();
        let within = Duration::from_secs(60);
        assert_eq!(run(&sh, &["-c", "cat"], "a text", within).unwrap(), "a text");
        let failed = run(&sh, &["-c", "echo why >&2; exit 3"], "", within).unwrap_err();
        assert!(failed.to_string().contains("why"), "{failed}");
        let late = run(&sh, &["-c", "exec sleep 600"], "", Duration::from_millis(50)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(find("no-such-program-at-all").is_none());
    }
}
