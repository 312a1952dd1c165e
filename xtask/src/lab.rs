//! The lab: a throwaway virtual machine in which tests run as root, on another kernel, with everything a host of
//! this product may have: cgroups with controllers, NBD, nested KVM. Outside nothing but files below the target
//! directory is touched, and no root is needed.
//!
//! This file is what a suite consists of and how its end is told. `image` makes the machine's kernel and root disk
//! once, `payload` what goes in for one run, `machine` boots it.

mod image;
mod machine;
mod payload;
mod report;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::stop::Stop;

/// Arguments of `cargo xtask lab`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Test programs to run, with a part of the tests' names if only some are wanted, as hearth-host:kernel or
    /// hearth:e2e:firecracker; without any and without --run, the default suite
    #[arg(value_name = "PACKAGE:TARGET[:FILTER]")]
    tests: Vec<String>,
    /// Shell command to run after the tests; may be given several times
    #[arg(long = "run", value_name = "COMMAND")]
    commands: Vec<String>,
    /// Memory of the machine, MiB
    #[arg(long, default_value_t = 2048, value_name = "MIB")]
    memory: u32,
    /// The machine is ended after this many minutes
    #[arg(long, default_value_t = 15, value_name = "N")]
    minutes: u32,
    /// Keep the run's files: disks, console, output, kernel messages
    #[arg(long)]
    keep: bool,
}

/// One part of a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    /// An integration test program of a package, and which of its tests.
    Test {
        /// Cargo's name of the package.
        package: String,
        /// Name of the test target.
        target: String,
        /// Part of the tests' names; empty for all.
        filter: String,
    },
    /// A command for the shell.
    Command(String),
}

impl Item {
    /// As people write it.
    fn name(&self) -> String {
        match self {
            Item::Test { package, target, filter } if filter.is_empty() => format!("{package}:{target}"),
            Item::Test { package, target, filter } => format!("{package}:{target}:{filter}"),
            Item::Command(command) => command.clone(),
        }
    }

    fn test(text: &str) -> Result<Self> {
        let mut parts = text.splitn(3, ':').map(str::to_owned);
        let (package, target) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        ensure!(
            !package.is_empty() && !target.is_empty(),
            "{text:?} is not PACKAGE:TARGET[:FILTER], as in hearth-host:kernel"
        );
        Ok(Item::Test { package, target, filter: parts.next().unwrap_or_default() })
    }
}

/// A guest on a real Firecracker: by nested KVM, which no other test has.
const FIRECRACKER_GUEST: &str = "hearth run --standalone busybox --vmm firecracker -- uname -a";

/// Of such guests' disks as devices of the kernel's, those that take no minutes each.
const FIRECRACKER_DEVICES: &str = "devices::a_guests_disk";

/// What to run where nothing was named.
fn default_suite(firecracker: bool) -> Vec<Item> {
    let test = |package: &str, target: &str| Item::Test {
        package: package.into(),
        target: target.into(),
        filter: String::new(),
    };
    let mut suite = vec![
        Item::Command("hearth preflight".into()),
        test("hearth-host", "kernel"),
        test("hearth-host", "nbd"),
        test("hearth", "block_attach"),
        test("hearth-vmm", "vmm_oom"),
    ];
    if firecracker {
        suite.push(Item::Command(FIRECRACKER_GUEST.into()));
        let filter = FIRECRACKER_DEVICES.into();
        suite.push(Item::Test { package: "hearth".into(), target: "e2e".into(), filter });
    }
    suite
}

/// Runs the suite; 0, or the exit code of its first part that failed.
pub(crate) fn run(args: &Args, root: &Path, stop: &Stop) -> Result<u8> {
    let firecracker = std::env::var_os("HEARTH_FIRECRACKER").map(PathBuf::from);
    let mut suite = args.tests.iter().map(|t| Item::test(t)).collect::<Result<Vec<_>>>()?;
    suite.extend(args.commands.iter().cloned().map(Item::Command));
    if suite.is_empty() {
        suite = default_suite(firecracker.is_some());
    }
    let place = target_dir(root).join("lab");
    std::fs::create_dir_all(&place).with_context(|| format!("make {}", place.display()))?;
    let image = timed("image", || image::ready(&place, stop))?;
    let mut dir = tempfile::Builder::new().prefix("run.").tempdir_in(&place).context("make a directory")?;
    dir.disable_cleanup(args.keep);
    let disk = timed("build and payload", || {
        payload::make(root, &suite, &image, firecracker.as_deref(), dir.path())
    })?;
    let machine = machine::Machine {
        image: &image,
        payload: &disk,
        dir: dir.path(),
        memory_mib: args.memory,
        within: Duration::from_secs(60 * u64::from(args.minutes)),
    };
    let ran = timed("machine", || machine.run(stop));
    if args.keep {
        println!("lab: kept {}", dir.path().display());
    }
    let result = ran?;
    let report = report::Report::read(&result, &suite)?;
    report.hand_on()?;
    print!("{report}");
    Ok(report.code())
}

/// Where cargo builds: as its environment says, or the checkout's own.
fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

fn timed<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let began = Instant::now();
    let done = work();
    println!("lab: {what}: {:.1} s", began.elapsed().as_secs_f64());
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_by_package_target_and_filter() {
        let item = |package: &str, target: &str, filter: &str| Item::Test {
            package: package.into(),
            target: target.into(),
            filter: filter.into(),
        };
        assert_eq!(Item::test("hearth-host:kernel").unwrap(), item("hearth-host", "kernel", ""));
        assert_eq!(Item::test("hearth:e2e:restart::a").unwrap(), item("hearth", "e2e", "restart::a"));
        for bad in ["", "hearth-host", ":kernel", "hearth-host:"] {
            assert!(Item::test(bad).is_err(), "{bad}");
        }
        for name in ["hearth-host:kernel", "hearth:e2e:restart::a"] {
            assert_eq!(Item::test(name).unwrap().name(), name);
        }
    }
}
