//! Child processes: found in PATH, without a terminal, stoppable, each with a deadline, and with clear errors. No
//! shell; their output goes to an unnamed file that is read while they run. Only one that is fed through its
//! stdin has a thread beside it, which ends it when it does not read.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::error::{ImageError, io};
use super::job::Job;

/// A program and how to get it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Program {
    pub(super) name: &'static str,
    /// Debian package.
    pub(super) package: &'static str,
}

/// How long a program may run, and what the operator can do when it ran longer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub(super) after: Duration,
    pub(super) remedy: &'static str,
}

impl Limit {
    /// For making a template: minutes on a slow disk or mirror, and then some.
    pub(super) const TEMPLATE: Self = Self {
        after: Duration::from_secs(60 * 60),
        remedy: "Look in `dmesg` for a disk that stalls, and whether the source (disk, mirror) still answers; then \
                 make the template again.",
    };
}

const SYSTEM_DIRS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How long a program may tidy up after SIGTERM; mmdebstrap unmounts what it mounted.
const GENTLE: Duration = Duration::from_secs(5);
/// How long a program may take to die of SIGKILL. One in uninterruptible sleep (a dead disk or network mount)
/// takes as long as that sleeps.
const DYING: Duration = Duration::from_secs(5);
/// Between two looks at stop and deadline while a program is fed.
const WATCH: Duration = Duration::from_millis(50);
/// Lines of output kept for an error.
const TAIL: usize = 12;
/// Output kept in memory for callers that read it.
const MAX_OUTPUT: u64 = 1 << 20;

impl Program {
    /// A command for it. The absolute path keeps std on its vfork path, which does not copy the daemon's
    /// page tables.
    pub(super) fn command(self) -> Result<Command, ImageError> {
        let path = find(self.name)
            .ok_or(ImageError::MissingProgram { program: self.name, package: self.package })?;
        let mut cmd = Command::new(path);
        cmd.stdin(Stdio::null());
        cmd.env("LC_ALL", "C");
        Ok(cmd)
    }
}

/// PATH of this process followed by the system's directories: a daemon's PATH often lacks the sbin ones.
pub(super) fn search_path() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    if !path.is_empty() {
        path.push(":");
    }
    path.push(SYSTEM_DIRS);
    path
}

fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&search_path())
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
}

/// A child that runs. Every path out of this module has waited for it; for one that does not die of SIGKILL a
/// thread waits.
pub(super) struct Running {
    program: Program,
    child: Child,
    limit: Limit,
    deadline: Instant,
    output: File,
    read: u64,
    partial: Vec<u8>,
    tail: Vec<String>,
}

/// How a program ended, and what it said.
pub(super) struct Ended {
    program: Program,
    status: ExitStatus,
    output: File,
    tail: Vec<String>,
}

impl Running {
    /// Starts `cmd`; its output is kept in an unnamed file in `dir`.
    pub(super) fn start(
        program: Program,
        mut cmd: Command,
        dir: &Path,
        limit: Limit,
    ) -> Result<Self, ImageError> {
        let output = tempfile::tempfile_in(dir).map_err(io("create a file in", dir))?;
        let copy = || output.try_clone().map_err(io("share a file in", dir));
        let path = PathBuf::from(cmd.get_program());
        // A group of its own: a terminal's Ctrl-C reaches hearth alone, which then decides.
        let child =
            cmd.process_group(0).stdout(copy()?).stderr(copy()?).spawn().map_err(io("start", &path))?;
        let deadline = Instant::now() + limit.after;
        let (partial, tail) = (Vec::new(), Vec::new());
        Ok(Self { program, child, limit, deadline, output, read: 0, partial, tail })
    }

    /// Lets `write` fill the pipe to its stdin. A program that does not read holds up the writer, so on stop and
    /// at the deadline another thread ends the process group, and the write fails; [`Running::finish`] then
    /// says which of the two it was.
    pub(super) fn feed(
        &mut self,
        job: &Job<'_>,
        write: impl FnOnce(&mut ChildStdin) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut stdin = self.child.stdin.take().ok_or_else(|| std::io::Error::other("it has no stdin"))?;
        let (stop, deadline) = (job.stop, self.deadline);
        // The child is not waited for meanwhile, so its number is its own.
        let group = self.child.id();
        let (fed, watch) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let waiting = |pause| matches!(watch.recv_timeout(pause), Err(RecvTimeoutError::Timeout));
                while waiting(WATCH) {
                    if stop.load(Ordering::Relaxed) || Instant::now() > deadline {
                        signal_group(group, "TERM");
                        if waiting(GENTLE) {
                            signal_group(group, "KILL");
                        }
                        return;
                    }
                }
            });
            let written = write(&mut stdin);
            drop((stdin, fed));
            written
        })
    }

    /// Waits for its end, telling `tick` each new line of output (and none when there is none). On stop
    /// the whole process group is ended first, and likewise at the deadline.
    pub(super) fn finish(
        mut self,
        job: &Job<'_>,
        tick: &mut dyn FnMut(&[String]),
    ) -> Result<Ended, ImageError> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().map_err(|e| self.wait_error(e))?;
            let lines = self.new_lines();
            tick(&lines);
            let overdue = Instant::now() > self.deadline;
            if let Some(status) = status {
                // Ended by the thread that watched it being fed.
                if !status.success() && job.stopped() {
                    return Err(ImageError::Stopped);
                }
                if !status.success() && overdue {
                    return Err(self.overdue());
                }
                return Ok(Ended { program: self.program, status, output: self.output, tail: self.tail });
            }
            if job.stopped() {
                self.kill()?;
                return Err(ImageError::Stopped);
            }
            if overdue {
                let error = self.overdue();
                self.kill()?;
                return Err(error);
            }
            // A short run (a disk takes 20 ms) must not be slept past, a long one not be polled hard.
            let pause = start.elapsed() / 16;
            std::thread::sleep(pause.clamp(Duration::from_millis(1), Duration::from_millis(30)));
        }
    }

    /// Ends the process group and waits for the child: SIGTERM, some time to tidy up, SIGKILL.
    pub(super) fn kill(mut self) -> Result<(), ImageError> {
        for (signal, patience) in [("TERM", GENTLE), ("KILL", DYING)] {
            signal_group(self.child.id(), signal);
            let end = Instant::now() + patience;
            while Instant::now() < end {
                if self.child.try_wait().map_err(|e| self.wait_error(e))?.is_some() {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let (program, pid) = (self.program.name, self.child.id());
        tracing::warn!(program, pid, "a killed program does not end; a thread waits for it");
        // It must not stay as a zombie once it did die; nothing is asked of the thread.
        std::thread::spawn(move || self.child.wait());
        Err(ImageError::Undying { program, pid })
    }

    fn overdue(&self) -> ImageError {
        ImageError::Overdue {
            program: self.program.name,
            after: self.limit.after,
            tail: self.tail.clone(),
            remedy: self.limit.remedy,
        }
    }

    fn wait_error(&self, source: std::io::Error) -> ImageError {
        ImageError::Io { verb: "wait for", path: PathBuf::from(self.program.name), source }
    }

    fn new_lines(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut buf = [0_u8; 8192];
        // read_at: the child writes through the same file offset.
        while let Ok(n @ 1..) = self.output.read_at(&mut buf, self.read) {
            self.read += n as u64;
            for byte in &buf[..n] {
                match byte {
                    b'\n' | b'\r' => {
                        let line = String::from_utf8_lossy(&self.partial).trim_end().to_owned();
                        self.partial.clear();
                        if !line.is_empty() {
                            lines.push(line);
                        }
                    }
                    b if self.partial.len() < 4096 => self.partial.push(*b),
                    _ => {}
                }
            }
        }
        self.tail.extend(lines.iter().cloned());
        let extra = self.tail.len().saturating_sub(TAIL);
        self.tail.drain(..extra);
        lines
    }
}

impl Ended {
    /// Whether it exited with 0.
    pub(super) fn success(&self) -> bool {
        self.status.success()
    }

    /// The error of an unsuccessful end.
    pub(super) fn failure(self, remedy: impl Into<String>) -> ImageError {
        ImageError::Program {
            program: self.program.name,
            status: self.status.to_string(),
            tail: self.tail,
            remedy: remedy.into(),
        }
    }

    /// The first MiB of its output.
    pub(super) fn output(&self) -> String {
        let len = self.output.metadata().map_or(0, |m| m.len().min(MAX_OUTPUT));
        let mut buf = vec![0; usize::try_from(len).unwrap_or(0)];
        let read = self.output.read_exact_at(&mut buf, 0);
        if read.is_ok() { String::from_utf8_lossy(&buf).into_owned() } else { String::new() }
    }
}

/// Runs a command to its end without looking at the output on the way.
pub(super) fn run(
    program: Program,
    cmd: Command,
    dir: &Path,
    limit: Limit,
    job: &Job<'_>,
) -> Result<Ended, ImageError> {
    Running::start(program, cmd, dir, limit)?.finish(job, &mut |_| {})
}

/// Whether a write failed only because the reading program has ended: its exit status says more.
pub(super) fn feed(stdin: &mut ChildStdin, bytes: &[u8]) -> std::io::Result<bool> {
    match stdin.write_all(bytes) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(e),
    }
}

/// std has no killpg; a shell's `kill` has. The child was not waited for, so the number is still its own.
fn signal_group(pid: u32, signal: &str) {
    let group = format!("-{pid}");
    let sent = Command::new("/bin/sh")
        .args(["-c", "kill -s \"$1\" -- \"$2\"", "sh", signal, &group])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if let Err(error) = sent {
        tracing::warn!(%error, group, "cannot signal a child's process group");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const SOON: Limit = Limit { after: Duration::from_millis(300), remedy: "Do that." };

    const SH: Program = Program { name: "sh", package: "dash" };

    fn sh(script: &str) -> Command {
        let mut cmd = SH.command().unwrap();
        cmd.args(["-c", script]);
        cmd
    }

    #[test]
    fn a_missing_program_names_its_package() {
        let err = Program { name: "no-such-program", package: "nothing" }.command().unwrap_err();
        assert_eq!(
            err.to_string(),
            "the program no-such-program is missing; install it with `apt-get install nothing`"
        );
    }

    #[test]
    fn a_failure_shows_the_last_lines() {
        let stop = AtomicBool::new(false);
        let dir = tempfile::tempdir().unwrap();
        let script = "for i in $(seq 40); do echo line $i; done; exit 3";
        let ended = run(SH, sh(script), dir.path(), Limit::TEMPLATE, &Job::quiet(&stop)).unwrap();
        assert!(!ended.success());
        assert!(ended.output().starts_with("line 1\n"));
        let text = ended.failure("Do this.").to_string();
        assert!(text.contains("line 40\nDo this.") && text.contains("line 29"), "{text}");
        assert!(!text.contains("line 28"), "{text}");
    }

    #[test]
    fn stop_ends_the_whole_group() {
        let stop = AtomicBool::new(false);
        let dir = tempfile::tempdir().unwrap();
        let job = Job::quiet(&stop);
        let running =
            Running::start(SH, sh("sleep 60 & echo $!; wait"), dir.path(), Limit::TEMPLATE).unwrap();
        let mut pid = String::new();
        let err = running.finish(&job, &mut |lines| {
            if let Some(line) = lines.first() {
                pid.clone_from(line);
                stop.store(true, Ordering::Relaxed);
            }
        });
        assert!(matches!(err, Err(ImageError::Stopped)));
        assert_gone(&pid);
    }

    fn assert_gone(pid: &str) {
        let end = Instant::now() + Duration::from_secs(5);
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        while !(state().is_empty() || state().contains(") Z")) {
            assert!(Instant::now() < end, "the grandchild {pid} is still alive");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn the_deadline_ends_the_whole_group_and_says_so() {
        let (stop, dir) = (AtomicBool::new(false), tempfile::tempdir().unwrap());
        let running = Running::start(SH, sh("sleep 60 & echo $!; wait"), dir.path(), SOON).unwrap();
        let mut pid = String::new();
        let start = Instant::now();
        let ended = running.finish(&Job::quiet(&stop), &mut |lines| pid.extend(lines.iter().cloned()));
        let text = ended.err().unwrap().to_string();
        assert!(text.starts_with("sh did not end within 300ms and was killed"), "{text}");
        assert!(text.contains(&pid) && text.ends_with("Do that."), "{text}");
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
        assert_gone(&pid);
    }

    #[test]
    fn a_program_that_does_not_read_is_not_fed_for_ever() {
        let (stop, dir) = (AtomicBool::new(false), tempfile::tempdir().unwrap());
        let job = Job::quiet(&stop);
        let mut cmd = sh("sleep 60");
        cmd.stdin(Stdio::piped());
        let mut running = Running::start(SH, cmd, dir.path(), SOON).unwrap();
        let mut whole = true;
        running.feed(&job, |stdin| feed(stdin, &[0; 1 << 20]).map(|w| whole = w)).unwrap();
        assert!(!whole);
        assert!(matches!(running.finish(&job, &mut |_| {}), Err(ImageError::Overdue { program: "sh", .. })));
        // The same on stop.
        let mut cmd = sh("sleep 60");
        cmd.stdin(Stdio::piped());
        let mut running = Running::start(SH, cmd, dir.path(), Limit::TEMPLATE).unwrap();
        stop.store(true, Ordering::Relaxed);
        running.feed(&job, |stdin| feed(stdin, &[0; 1 << 20]).map(drop)).unwrap();
        assert!(matches!(running.finish(&job, &mut |_| {}), Err(ImageError::Stopped)));
    }
}
