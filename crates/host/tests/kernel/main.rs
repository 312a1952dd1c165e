//! Tests of the host crate on the real kernel: processes, cgroups, directories, mounts and the lock. Each
//! takes names with this process's pid in them and leaves nothing. Those that need root say so when skipped.

mod cgroups;
mod directories;
mod endings;
mod helper;
mod locks;
mod mounts;
mod processes;

use std::os::fd::AsFd;
use std::time::Duration;

use hearth_host::process::{Child, Ended, wait};

/// Long enough for a loaded machine.
const SOON: Duration = Duration::from_secs(20);

/// Whether the test may run; says so if not.
fn root_or_skip(test: &str) -> bool {
    let root = hearth_host::test_support::is_root();
    if !root {
        hearth_testkit::skip(test, "needs root");
    }
    root
}

/// Waits for the end of a child and reaps it.
fn end_of(child: &Child) -> Ended {
    wait(child.pidfd.as_fd(), SOON).expect("wait").expect("the child still runs")
}
