//! A daemon under test: an instance of its own with its own directories, on a host that is a namespace.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hearth_core::network::SlotLayout;
use tempfile::TempDir;

use crate::program;

/// How long the daemon may take to end when told to.
const GOODBYE: Duration = Duration::from_secs(20);
/// Free on every host that was made for one run.
const PORT: u16 = 5008;

/// Where one daemon runs, and as whom.
#[derive(Debug)]
pub(crate) struct Ground {
    /// The program under test, where one is needed.
    binary: Option<PathBuf>,
    /// State directory with kernels and templates; the instance gets a directory of its own in it.
    state: PathBuf,
    /// Names and addresses of its slots.
    pub(crate) layout: SlotLayout,
    dir: TempDir,
}

/// A running daemon. End it with [`Daemon::end`]: dropped, it goes on.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    /// Just before the program was executed.
    pub(crate) began: Instant,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    log: PathBuf,
}

/// The program to measure: the one named, else the release build beside this program, else the build of its own
/// profile.
pub(crate) fn binary(named: Option<&Path>) -> Result<PathBuf> {
    if let Some(named) = named {
        return fs::canonicalize(named).with_context(|| format!("find {}", named.display()));
    }
    let own = std::env::current_exe().context("find this program")?;
    let profile = own.parent().context("this program's directory")?;
    let release = profile.parent().map(|target| target.join("release/hearth"));
    let candidates = [release.unwrap_or_default(), profile.join("hearth")];
    let found = candidates.into_iter().find(|path| path.is_file());
    found.context("hearth is not built; run: cargo build --release -p hearth -p hearth-guest")
}

impl Ground {
    /// Prepares directories for a new instance; without `state`, an empty one is made.
    pub(crate) fn new(binary: Option<&Path>, state: Option<&Path>) -> Result<Self> {
        // Short: a socket's path has at most 107 bytes.
        let dir = tempfile::Builder::new().prefix("hb").tempdir().context("make a directory")?;
        let state = state.map_or_else(|| dir.path().join("s"), Path::to_owned);
        let layout = SlotLayout {
            instance: format!("bench{}", std::process::id()).parse()?,
            veth_prefix: "hbv".parse()?,
            cidr: "10.214.0.0/16".parse()?,
        };
        Ok(Self { binary: binary.map(Path::to_owned), state, layout, dir })
    }

    /// A directory that goes with this value.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the instance keeps records and disks.
    pub(crate) fn instance_dir(&self) -> PathBuf {
        self.state.join(self.layout.instance.as_str())
    }

    /// Starts the daemon with these lines added to its configuration.
    pub(crate) fn start(&self, lines: &str) -> Result<Daemon> {
        let (config, log) = (self.dir.path().join("hearth.toml"), self.dir.path().join("daemon.log"));
        let text = format!(
            "instance = \"{}\"\nlisten = \"127.0.0.1:{PORT}\"\nstate_dir = {:?}\nrun_dir = {:?}\n\
             [network]\ncidr = \"{}\"\nveth_prefix = \"{}\"\n[exits]\nkeep_seconds = 0\n[test]\nprocess_vmm = true\n{lines}",
            self.layout.instance,
            self.state,
            self.dir.path().join("r"),
            self.layout.cidr,
            self.layout.veth_prefix
        );
        fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        let out = fs::File::create(&log).with_context(|| format!("write {}", log.display()))?;
        let binary = self.binary.as_ref().context("no binary was given to start")?;
        let mut command = Command::new(binary);
        for (name, _) in std::env::vars_os() {
            // What the caller's shell says about another daemon must not reach this one.
            if name.to_string_lossy().starts_with("HEARTH_") && name != "HEARTH_GUEST" {
                command.env_remove(name);
            }
        }
        command.args(["serve", "--config"]).arg(&config);
        // Out of reach of the terminal's Ctrl-C: the benchmark ends it itself.
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).process_group(0);
        let began = Instant::now();
        let child = command.spawn().with_context(|| format!("run {}", binary.display()))?;
        Ok(Daemon { child, began, address: SocketAddr::from(([127, 0, 0, 1], PORT)), log })
    }

    /// Removes what the instance keeps on disk; what it has in the kernel is removed with the leftovers.
    pub(crate) fn clean(&self) -> Result<()> {
        for dir in [self.instance_dir(), self.dir.path().join("r")] {
            match fs::remove_dir_all(&dir) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(e).with_context(|| format!("remove {}", dir.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl Daemon {
    /// An error with its last words if it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("the daemon ended by itself, {status}: {}", self.last_words());
        }
        Ok(())
    }

    /// The end of its log.
    pub(crate) fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }

    /// Of the running process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL, and waits.
    pub(crate) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Tells it to end and waits; one that does not is killed, and that is an error.
    pub(crate) fn end(mut self) -> Result<()> {
        if self.child.try_wait()?.is_some() {
            return Ok(());
        }
        program::run("kill", &["-TERM", &self.child.id().to_string()], "")?;
        let end = Instant::now() + GOODBYE;
        while self.child.try_wait()?.is_none() {
            if Instant::now() >= end {
                self.child.kill()?;
                self.child.wait()?;
                ensure!(
                    false,
                    "the daemon did not end within {} s: {}",
                    GOODBYE.as_secs(),
                    self.last_words()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
