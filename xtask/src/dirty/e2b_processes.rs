//! Processes in the e2b orchestrator's layout: a VMM by name in its cgroup `e2b/sbx-<sandbox>-<random>` and its
//! slot's namespace, and the sockets and the FIFO it leaves.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::e2b::{Leftovers, netns_path};
use super::resident;
use crate::program;

/// How long killed processes may take to go.
const WITHIN: Duration = Duration::from_secs(10);

/// The cgroup above all of that orchestrator's sandboxes.
pub(super) fn cgroup_root() -> Result<PathBuf> {
    let mount = hearth_host::cgroup::mount_point()?.context("no cgroup2 file system is mounted")?;
    Ok(mount.join("e2b"))
}

/// One process and its files.
struct Vmm {
    cgroup: PathBuf,
    socket: PathBuf,
    uffd: PathBuf,
    fifo: PathBuf,
}

impl Vmm {
    /// The same names whenever asked: what is removed is what was made.
    fn of(leftovers: &Leftovers, n: u32) -> Result<Self> {
        let tag = format!("i{}x{n}-dirtyrnd", leftovers.instance);
        let files = &leftovers.files;
        Ok(Self {
            cgroup: cgroup_root()?.join(format!("sbx-{tag}")),
            socket: files.join(format!("fc-{tag}.sock")),
            uffd: files.join(format!("uffd-{tag}.sock")),
            fifo: files.join(format!("fc-metrics-{tag}.fifo")),
        })
    }
}

/// Makes what is not there yet.
pub(super) fn make(leftovers: &Leftovers) -> Result<()> {
    if leftovers.processes == 0 {
        return Ok(());
    }
    for dir in [&leftovers.files, &leftovers.dir] {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    }
    let mut fifos = vec![];
    for n in leftovers.from..leftovers.from + leftovers.processes {
        let vmm = Vmm::of(leftovers, n)?;
        for socket in [&vmm.socket, &vmm.uffd] {
            if !socket.exists() {
                // Dropped at once: what is left of a socket is its file.
                UnixListener::bind(socket).with_context(|| format!("make {}", socket.display()))?;
            }
        }
        if !vmm.fifo.exists() {
            fifos.push(vmm.fifo.display().to_string());
        }
        fs::create_dir_all(&vmm.cgroup).with_context(|| format!("make {}", vmm.cgroup.display()))?;
        if fs::read_to_string(vmm.cgroup.join("cgroup.procs"))?.is_empty() {
            let cgroup = File::open(&vmm.cgroup)?;
            let netns = netns_path(n);
            let netns = File::open(&netns).with_context(|| format!("open {}", netns.display()))?;
            let args = ["--api-sock".to_owned(), vmm.socket.display().to_string()];
            let args = args.each_ref().map(String::as_str);
            resident::start(&leftovers.dir, "firecracker", &args, cgroup.as_fd(), netns.as_fd())?;
        }
    }
    for some in fifos.chunks(100) {
        program::run("mkfifo", &some.iter().map(String::as_str).collect::<Vec<_>>(), "")?;
    }
    Ok(())
}

/// Removes processes with their cgroups, and files; how many of each.
pub(super) fn clean(leftovers: &Leftovers) -> Result<(usize, usize)> {
    let (mut cgroups, mut files) = (0, 0);
    for n in leftovers.from..leftovers.from + leftovers.processes {
        let vmm = Vmm::of(leftovers, n)?;
        cgroups += usize::from(end(&vmm.cgroup)?);
        for file in [&vmm.socket, &vmm.uffd, &vmm.fifo] {
            match fs::remove_file(file) {
                Ok(()) => files += 1,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("unlink {}", file.display())),
            }
        }
    }
    let root = cgroup_root()?;
    if leftovers.own_cgroup_root && leftovers.processes > 0 && root.exists() {
        match fs::remove_dir(&root) {
            // Somebody else uses it by now.
            Err(e) if !matches!(e.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty) => {
                return Err(e).with_context(|| format!("rmdir {}", root.display()));
            }
            _ => {}
        }
    }
    Ok((cgroups, files))
}

/// Kills all in a cgroup and removes it; whether it was there.
fn end(cgroup: &Path) -> Result<bool> {
    match fs::write(cgroup.join("cgroup.kill"), "1") {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other.with_context(|| format!("kill all in {}", cgroup.display()))?,
    }
    let end = Instant::now() + WITHIN;
    loop {
        match fs::remove_dir(cgroup) {
            Ok(()) => return Ok(true),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
            Err(e) => return Err(e).with_context(|| format!("rmdir {}", cgroup.display())),
        }
        ensure!(
            Instant::now() < end,
            "{} is still in use {} s after the kill",
            cgroup.display(),
            WITHIN.as_secs()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}
