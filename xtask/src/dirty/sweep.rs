//! Removing many namespaces as plainly as the kernel allows: each unmounted and unlinked, one after the other,
//! then a wait until their links are gone. The benchmark calls this the kernel's floor.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::stop::Stop;

/// Names of the links in this thread's network namespace.
pub(crate) fn links() -> Result<Vec<String>> {
    // `/proc/net` would be that of the process's first thread.
    let text = fs::read_to_string("/proc/thread-self/net/dev").context("read the list of links")?;
    let names = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    Ok(names.map(|(name, _)| name.trim().to_owned()).collect())
}

/// Drops the namespaces bound at `paths`; they die later. How many.
pub(crate) fn drop_namespaces(paths: &[PathBuf], stop: &Stop) -> Result<usize> {
    for path in paths {
        stop.check()?;
        hearth_host::test_support::drop_namespace(path)
            .with_context(|| format!("drop {}", path.display()))?;
    }
    Ok(paths.len())
}

/// Waits until no link that `ours` names is left; an error after `within`.
pub(crate) fn wait_until_gone(ours: impl Fn(&str) -> bool, within: Duration, stop: &Stop) -> Result<()> {
    let end = Instant::now() + within;
    loop {
        stop.check()?;
        let look = Instant::now();
        let left = links()?.iter().filter(|name| ours(name)).count();
        if left == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{left} links are still there after {} s", within.as_secs());
        // A look costs milliseconds at thousands of links, which the kernel's worker would miss.
        std::thread::sleep((look.elapsed() * 10).clamp(Duration::from_millis(2), Duration::from_millis(200)));
    }
}

/// How long `count` namespaces may take to die: many times what is usual.
pub(crate) fn patience(count: u32) -> Duration {
    Duration::from_secs(60) + Duration::from_millis(50) * count
}
