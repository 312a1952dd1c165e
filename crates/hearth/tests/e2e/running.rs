//! A program that runs beside a test: a daemon the test starts itself, a stranger on its port.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::node::Node;

/// A process of a test; ended with it.
pub struct Running {
    pub child: Child,
    pub log: PathBuf,
}

impl Running {
    /// Starts it; what it says goes to `log`.
    pub fn start(mut command: Command, log: PathBuf) -> Self {
        let out = fs::File::create(&log).unwrap();
        let child =
            command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
        Self { child, log }
    }

    pub fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn wait_for(&self, what: &str, mut seen: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !seen() {
            assert!(Instant::now() < end, "{what}: {}", self.log_text());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Until its log names all of these.
    pub fn wait_for_log(&self, words: &[&str]) {
        self.wait_for(&format!("no {words:?}"), || {
            let log = self.log_text();
            words.iter().all(|w| log.contains(w))
        });
    }

    /// SIGTERM, and its end.
    pub fn terminate(&mut self) -> ExitStatus {
        assert!(Command::new("kill").arg(self.child.id().to_string()).status().unwrap().success());
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            // Only after a failed assertion.
            drop(Command::new("kill").arg(self.child.id().to_string()).status());
            drop(self.child.wait());
        }
    }
}

/// A daemon of the test's own, with its configuration and these flags.
pub fn serve(node: &Node, log: &str, args: &[&str], env: &[(&str, &str)]) -> Running {
    let mut command = node.command(&[&["serve"], args].concat());
    command.envs(env.iter().copied());
    Running::start(command, node.dir.path().join(log))
}

pub fn wait_until_ready(node: &Node, daemon: &Running) {
    daemon.wait_for("not ready", || node.cli(&["ls"]).status.success());
}
