//! A server in this process, for tests: a plain file or an overlay, on a socket in a directory of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_vmm::block::nbd::{Export, Limits, Served, Server};
use hearth_vmm::block::{Backend, FileBackend, Limit, Overlay, Pool};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// No test waits longer for anything.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) struct Running {
    pub(crate) dir: TempDir,
    pub(crate) stop: CancellationToken,
    server: JoinSet<Served>,
}

impl Running {
    /// Serves these disks, by name.
    pub(crate) fn of(disks: Vec<(&str, Arc<dyn Backend>)>, limits: Limits) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let listener = UnixListener::bind(dir.path().join("socket")).expect("bind");
        let stop = CancellationToken::new();
        let exports = disks.into_iter().map(|(name, disk)| Export::new(name, disk)).collect();
        let mut server = JoinSet::new();
        let token = stop.clone();
        server.spawn(async move { Server::new(exports, limits).run(listener, token).await });
        Self { dir, stop, server }
    }

    /// An overlay above a base of `base` bytes of a pattern and `size` bytes itself.
    pub(crate) async fn overlay(base: usize, size: u64) -> Self {
        let files = tempfile::tempdir().expect("directory");
        let image = files.path().join("base");
        std::fs::write(&image, pattern(base)).expect("base");
        let base = FileBackend::open(&image, true, Pool::new("base", 4)).expect("open");
        let path = files.path().join("overlay");
        let limit = Limit::within(LONG);
        let overlay = Overlay::create(&path, Arc::new(base), size, Pool::new("overlay", 8), &limit);
        let overlay = overlay.await.expect("create");
        // The files stay open; nothing else needs their names.
        Self::of(vec![("disk", Arc::new(overlay))], Limits::default())
    }

    /// A plain file of zeroes.
    pub(crate) fn file(size: u64) -> Self {
        let file = tempfile::tempfile().expect("file");
        file.set_len(size).expect("length");
        let disk = FileBackend::new(file, "plain file", false, Pool::new("plain file", 8)).expect("open");
        Self::of(vec![("disk", Arc::new(disk))], Limits::default())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket().display())
    }

    pub(crate) async fn end(mut self) -> Served {
        self.stop.cancel();
        let ended = tokio::time::timeout(LONG, self.server.join_next()).await;
        ended.expect("the server did not end").expect("it ran").expect("it did not panic")
    }
}

/// Bytes that tell their position.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 * 13 + at % 253) as u8).collect()
}

/// Whether all programs are there; else the test is counted as skipped.
pub(crate) fn have(test: &str, programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = |program: &&&str| std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    match programs.iter().find(|program| !there(program)) {
        None => true,
        Some(missing) => {
            hearth_testkit::skip(test, &format!("{missing} is not installed"));
            false
        }
    }
}

/// Runs a program to its good end and gives what it printed.
pub(crate) async fn run(program: &str, args: &[&str]) -> String {
    let (good, text) = try_run(program, args).await;
    assert!(good, "{program} {args:?} failed:\n{text}");
    text
}

/// Runs a program; whether it ended well, and what it printed.
pub(crate) async fn try_run(program: &str, args: &[&str]) -> (bool, String) {
    let output = Command::new(program).args(args).kill_on_drop(true).output();
    let output = tokio::time::timeout(LONG, output).await;
    let output = output.unwrap_or_else(|_| panic!("{program} {args:?} did not end")).expect("run");
    let text = [output.stdout, output.stderr].map(|o| String::from_utf8_lossy(&o).into_owned()).concat();
    (output.status.success(), text)
}
