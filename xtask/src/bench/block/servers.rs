//! The servers that are compared: started on a socket, their CPU time and memory from `/proc`, ended by their pid.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use crate::program;

/// Until a server answers on its socket, or has ended.
const PATIENCE: Duration = Duration::from_secs(20);

/// Which server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Hearth,
    QemuNbd,
    Nbdkit,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Hearth, Self::QemuNbd, Self::Nbdkit];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hearth => "hearth",
            Self::QemuNbd => "qemu-nbd",
            Self::Nbdkit => "nbdkit",
        }
    }
}

/// One that runs.
pub(super) struct Server {
    child: Child,
    socket: PathBuf,
    name: &'static str,
}

impl Server {
    pub(super) fn start(kind: Kind, binary: &Path, file: &Path, dir: &Path) -> Result<Self> {
        let socket = dir.join(format!("{}.sock", kind.name()));
        let command = match kind {
            Kind::Hearth => ours(binary, &socket, |command| {
                command.arg("--file").arg(file);
            }),
            Kind::QemuNbd => {
                let mut command = Command::new("qemu-nbd");
                command.args(["-f", "raw", "-t", "-e", "8", "-k"]).arg(&socket).arg(file);
                command
            }
            Kind::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["-f", "-U"]).arg(&socket).arg("file").arg(file);
                command
            }
        };
        Self::spawn(kind, command, socket)
    }

    /// Ours, with an object of a store and a cache of its own.
    pub(super) fn remote(binary: &Path, url: &str, dir: &Path) -> Result<Self> {
        let socket = dir.join("remote.sock");
        let command = ours(binary, &socket, |command| {
            command.args(["--url", url, "--cache-mib", "1024", "--cache"]).arg(dir.join("cache"));
        });
        Self::spawn(Kind::Hearth, command, socket)
    }

    fn spawn(kind: Kind, mut command: Command, socket: PathBuf) -> Result<Self> {
        // The others complain of the connection that only asks whether they are there.
        let errors = if kind == Kind::Hearth { Stdio::inherit() } else { Stdio::null() };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let child = command.spawn().with_context(|| format!("start {}: is it installed?", kind.name()))?;
        let mut server = Self { child, socket, name: kind.name() };
        let began = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            let ended = server.child.try_wait()?;
            if ended.is_some() || began.elapsed() > PATIENCE {
                let why = ended.map_or_else(|| "it does not answer".to_owned(), |status| status.to_string());
                server.end().ok();
                bail!("{} did not start: {why}", kind.name());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Of all its threads so far, those that ended included.
    pub(super) fn cpu_seconds(&self) -> Result<f64> {
        let stat =
            fs::read_to_string(format!("/proc/{}/stat", self.child.id())).context("the server's CPU time")?;
        // The name may have spaces; the fields after it are counted from its end.
        let (_, fields) = stat.rsplit_once(") ").context("/proc/<pid>/stat")?;
        let ticks: u64 = fields.split(' ').skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
        // USER_HZ is 100 wherever Linux runs.
        Ok(ticks as f64 / 100.0)
    }

    fn private_mib(&self) -> Result<f64> {
        let path = format!("/proc/{}/smaps_rollup", self.child.id());
        let text = fs::read_to_string(&path).context("the server's memory")?;
        let own = text.lines().filter(|l| l.starts_with("Private_Dirty:"));
        let kib: u64 = own.filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).sum();
        Ok(kib as f64 / 1024.0)
    }

    /// Ends it, and waits for its end.
    pub(super) fn end(mut self) -> Result<()> {
        if self.child.try_wait()?.is_none() {
            program::run("kill", &["-TERM", &self.child.id().to_string()], "")?;
            let began = Instant::now();
            while self.child.try_wait()?.is_none() {
                if began.elapsed() > PATIENCE {
                    self.child.kill().context("kill")?;
                    self.child.wait().context("wait")?;
                    bail!("{} had to be killed", self.name);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        match fs::remove_file(&self.socket) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).context("remove the socket"),
            _ => Ok(()),
        }
    }
}

fn ours(binary: &Path, socket: &Path, disk: impl FnOnce(&mut Command)) -> Command {
    let mut command = Command::new(binary);
    command.args(["block", "serve", "--socket"]).arg(socket);
    disk(&mut command);
    command
}

/// The memory, in MiB, of our server with a disk and a client that asks nothing: all of the process that no other process
/// shares.
pub(super) fn idle(binary: &Path, file: &Path, dir: &Path) -> Result<f64> {
    let server = Server::start(Kind::Hearth, binary, file, dir)?;
    let client = UnixStream::connect(server.socket()).context("connect")?;
    let memory = server.private_mib();
    drop(client);
    server.end()?;
    let memory = memory?;
    ensure!(memory > 0.0, "no memory is told for the server");
    Ok(memory)
}
