//! Processes that do nothing, left behind on purpose: this program under another name.

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use anyhow::{Context as _, Result};
use hearth_host::process::{SpawnOptions, spawn};

/// Names under which this program only stays.
const NAMES: [&str; 2] = ["hearth", "firecracker"];

/// Whether this process is one of them.
pub(crate) fn is_one() -> bool {
    let own = std::env::args_os().next();
    own.as_deref()
        .and_then(|own| Path::new(own).file_name())
        .is_some_and(|n| NAMES.iter().any(|name| n == *name))
}

/// Stays until killed.
pub(crate) fn stay() -> ! {
    loop {
        std::thread::park();
    }
}

/// Starts one as `<dir>/<name>` in a session, a cgroup and a network namespace of its own.
pub(super) fn start(
    dir: &Path,
    name: &str,
    args: &[&str],
    cgroup: BorrowedFd<'_>,
    netns: BorrowedFd<'_>,
) -> Result<()> {
    let program = dir.join(name);
    let own = std::env::current_exe().context("find this program")?;
    match std::os::unix::fs::symlink(own, &program) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("link {}", program.display()));
        }
        _ => {}
    }
    let null = || fs::File::options().read(true).write(true).open("/dev/null");
    let fds = vec![(null()?.into(), 0), (null()?.into(), 1), (null()?.into(), 2)];
    let options = SpawnOptions {
        program,
        args: args.iter().map(Into::into).collect(),
        cwd: Some("/".into()),
        cgroup_fd: Some(cgroup),
        netns: Some(netns),
        new_session: true,
        fds,
        ..SpawnOptions::default()
    };
    // Nobody waits for it: it is to outlive this program, and init reaps it.
    spawn(options).map(drop).map_err(|e| anyhow::anyhow!("start a process: {e}: {}", e.error))
}
