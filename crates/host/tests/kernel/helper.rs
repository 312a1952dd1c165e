//! The test binary executed again as another process: what `helper` does is chosen by an environment
//! variable, and answers go into a file, since the harness writes to stdout.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use hearth_host::lock::InstanceLock;
use hearth_host::process::{Signal, SpawnOptions, spawn, wait};

const ROLE: &str = "HEARTH_TEST_ROLE";
const ANSWER: &str = "HEARTH_TEST_ANSWER";

/// Starts this binary in a role; see `helper` for the roles.
pub(crate) fn start(role: &str, answer: &Path) -> Child {
    Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "helper::helper", "--nocapture"])
        .env(ROLE, role)
        .env(ANSWER, answer)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("start the helper")
}

/// Waits for the helper's answer.
pub(crate) fn answer(path: &Path) -> String {
    let deadline = Instant::now() + super::SOON;
    loop {
        match std::fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text.trim_end().to_owned(),
            _ => assert!(Instant::now() < deadline, "the helper does not answer"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn helper() {
    let (Ok(role), Some(out)) = (std::env::var(ROLE), std::env::var_os(ANSWER).map(PathBuf::from)) else {
        return;
    };
    match role.as_str() {
        // Starts a child that dies with it, then waits to be killed.
        "death-signal" => {
            let child = spawn(SpawnOptions {
                program: "/bin/sleep".into(),
                args: vec!["1000".into()],
                new_session: true,
                parent_death_signal: Some(Signal::KILL),
                ..SpawnOptions::default()
            })
            .unwrap();
            let id = &child.identity;
            std::fs::write(out, format!("{} {}\n", id.pid, id.start_time)).unwrap();
            wait(child.pidfd.as_fd(), Duration::from_secs(60)).unwrap();
        }
        // Holds the lock of the run directory next to the answer.
        "lock" => {
            let _lock = InstanceLock::acquire(&out.with_file_name("run")).unwrap();
            std::fs::write(out, "held\n").unwrap();
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
}
