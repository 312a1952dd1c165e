//! One run of the lab's machine: QEMU without KVM, with the image's root disk that forgets, the payload, an empty disk
//! for results, and a second serial port whose text goes to standard output as it comes.
//!
//! A processor of AMD's is emulated with its virtualization, so that KVM works inside whatever this host has. One core:
//! with more, wake-ups between them take erratically long.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use super::image::Image;
use crate::program;
use crate::stop::Stop;

/// How often the end of a program is asked for.
const ROUND: Duration = Duration::from_millis(50);
/// How long a program may tidy up after SIGTERM.
const GRACE: Duration = Duration::from_secs(20);
/// Upper bound of mmdebstrap.
const LONG: Duration = Duration::from_secs(30 * 60);
/// Size of the disk for results, which is a tar. Sparse.
const RESULT_BYTES: u64 = 256 << 20;

/// A machine to run once.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    /// Kernel and root disk.
    pub(crate) image: &'a Image,
    /// The disk with init and suite.
    pub(crate) payload: &'a Path,
    /// For disks and logs of this run.
    pub(crate) dir: &'a Path,
    /// Memory, MiB.
    pub(crate) memory_mib: u32,
    /// It is ended when it takes longer.
    pub(crate) within: Duration,
}

impl Machine<'_> {
    /// Boots it, shows what it says, waits until it turned itself off; the directory with its results.
    pub(crate) fn run(&self, stop: &Stop) -> Result<PathBuf> {
        let disk = self.dir.join("result.tar");
        let file = fs::File::create(&disk).with_context(|| format!("make {}", disk.display()))?;
        file.set_len(RESULT_BYTES).with_context(|| format!("make {}", disk.display()))?;
        let log = self.dir.join("qemu.log");
        let mut command = Command::new("setpriv");
        // The machine ends with this program, however that ends.
        command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]).args(self.arguments(&disk));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(fs::File::create(&log).with_context(|| format!("make {}", log.display()))?);
        let mut child = command.spawn().context("run setpriv (package util-linux)")?;
        let mut live = child.stdout.take().context("no output of the machine")?;
        let status = std::thread::scope(|scope| {
            let shown = scope.spawn(move || show(&mut live));
            let status = ended(&mut child, stop, self.within);
            shown.join().map_err(|_| anyhow!("showing the output panicked"))?.context("show the output")?;
            status
        })?;
        ensure!(status.success(), "the machine: {status}: {}", last_words(&log));
        let result = self.dir.join("result");
        fs::create_dir_all(&result).with_context(|| format!("make {}", result.display()))?;
        let (from, to) = (disk.display().to_string(), result.display().to_string());
        let unpacked = program::run("tar", &["-xf", &from, "-C", &to], "");
        let console = self.dir.join("console.log");
        if unpacked.is_err() || !result.join("dmesg").exists() {
            bail!("the machine ended without a result; its console: {}", last_words(&console));
        }
        Ok(result)
    }

    fn arguments(&self, result: &Path) -> Vec<String> {
        let path = |path: &Path| path.display().to_string().replace(',', ",,");
        let kernel_line = "console=ttyS0 loglevel=4 panic=-1 root=/dev/nvme0n1 rootfstype=ext4 rw init=/lab-init \
                           random.trust_cpu=on mitigations=off";
        let mut args: Vec<String> = ["-M", "q35", "-accel", "tcg", "-cpu", "EPYC", "-smp", "1"]
            .into_iter()
            .chain(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .map(str::to_owned)
            .collect();
        let mut add = |name: &str, value: String| args.extend([name.to_owned(), value]);
        add("-m", self.memory_mib.to_string());
        add("-kernel", self.image.kernel.display().to_string());
        add("-append", kernel_line.to_owned());
        add("-serial", format!("file:{}", self.dir.join("console.log").display()));
        // Not QEMU's own keys and signals: text only.
        add("-chardev", "stdio,id=live,signal=off".to_owned());
        add("-serial", "chardev:live".to_owned());
        // One controller with three numbers: their names inside do not depend on the order of detection.
        add("-device", "nvme,id=disks,serial=lab".to_owned());
        let disks = [(self.image.disk.as_path(), "on"), (self.payload, "off"), (result, "off")];
        for (at, (disk, snapshot)) in disks.into_iter().enumerate() {
            let cache = "format=raw,if=none,cache=unsafe";
            add("-drive", format!("id=d{at},file={},{cache},snapshot={snapshot}", path(disk)));
            add("-device", format!("nvme-ns,bus=disks,drive=d{at},nsid={}", at + 1));
        }
        args
    }
}

/// Copies to standard output until the end.
fn show(from: &mut impl std::io::Read) -> std::io::Result<()> {
    let mut buffer = [0; 4096];
    let mut out = std::io::stdout();
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(());
        }
        out.write_all(&buffer[..read])?;
        out.flush()?;
    }
}

/// Runs a program to its end with its output in `log`.
pub(crate) fn to_its_end(program: &str, args: &[String], log: &Path, stop: &Stop) -> Result<()> {
    let out = fs::File::create(log).with_context(|| format!("make {}", log.display()))?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    let mut child = command.spawn().with_context(|| format!("run {program}; is it installed?"))?;
    let status = ended(&mut child, stop, LONG)?;
    ensure!(status.success(), "{program}: {status}: {}", last_words(log));
    Ok(())
}

/// Waits for the end; ends it on the wish to stop and after `within`.
fn ended(child: &mut Child, stop: &Stop, within: Duration) -> Result<ExitStatus> {
    let end = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait()? {
            stop.check()?;
            return Ok(status);
        }
        let why = match stop.check() {
            Err(interrupted) => Some(interrupted),
            Ok(()) => (Instant::now() >= end).then(|| anyhow!("not done within {} s", within.as_secs())),
        };
        if let Some(why) = why {
            terminate(child)?;
            return Err(why);
        }
        std::thread::sleep(ROUND);
    }
}

fn terminate(child: &mut Child) -> Result<()> {
    program::run("kill", &["-TERM", &child.id().to_string()], "")?;
    let end = Instant::now() + GRACE;
    while child.try_wait()?.is_none() {
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
        }
        std::thread::sleep(ROUND);
    }
    Ok(())
}

/// The end of a log.
fn last_words(log: &Path) -> String {
    let mut bytes = vec![];
    let read = fs::File::open(log).and_then(|mut file| file.read_to_end(&mut bytes));
    if let Err(e) = read {
        return format!("{}: {e}", log.display());
    }
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
