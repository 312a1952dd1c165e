//! A private daemon inside this process, for one command on a machine where none runs. It has an instance,
//! a veth prefix and addresses of its own, and takes all of it away when it ends.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hearth_host::lock::{InstanceLock, LockError};

use super::Daemon;
use super::bind::Place;
use super::supervisor::Supervisor;
use crate::config::{Config, ReclaimMode, ShutdownMode};
use crate::logging::LogLines;

/// How many may run at once on one host.
const MAX: u32 = 8;
/// How long the private daemon may take to be ready.
const READY: Duration = Duration::from_secs(60);

/// A private daemon.
pub(crate) struct Standalone {
    /// Where it listens, on loopback.
    pub(crate) address: SocketAddr,
    config: Config,
    daemon: Daemon,
    lock: InstanceLock,
}

impl Standalone {
    /// Starts one beside whatever else runs on the host.
    ///
    /// # Errors
    /// If all places are taken, or the daemon cannot start.
    pub(crate) fn start(base: &Config) -> anyhow::Result<Self> {
        for i in 0..MAX {
            let config = private(base, i)?;
            let lock = match InstanceLock::acquire(&config.instance_run_dir()) {
                Ok(lock) => lock,
                Err(LockError::Held { .. }) => continue,
                Err(e) => return Err(e).context("a private daemon needs root"),
            };
            let place = Place::take(&config);
            match place
                .and_then(|place| Daemon::start(&config, place, Supervisor::none(), LogLines::default()))
            {
                Ok(daemon) => {
                    let standalone = Self { address: daemon.address, config, daemon, lock };
                    return standalone.ready();
                }
                Err(e) => {
                    lock.remove().context("instance lock")?;
                    // Another daemon of this name, with other directories.
                    if !matches!(e.downcast_ref(), Some(LockError::Held { .. })) {
                        return Err(e);
                    }
                }
            }
        }
        bail!(
            "all {MAX} places for private daemons on this host are taken; start one daemon with `hearth serve`"
        )
    }

    fn ready(self) -> anyhow::Result<Self> {
        let mut report = self.daemon.node.status.subscribe();
        let settled = self.daemon.runtime.block_on(async {
            let settled = report.wait_for(|r| r.status != super::Status::Starting);
            tokio::time::timeout(READY, settled).await.map(|r| r.map(|r| (*r).clone()))
        });
        let why = match settled {
            Ok(Ok(report)) if report.status.is_ready() => return Ok(self),
            Ok(Ok(report)) => report.reason,
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("not ready within {} s", READY.as_secs()),
        };
        let left = self.end();
        bail!(
            "the private daemon cannot start: {why}{}",
            left.err().map(|e| format!("; {e}")).unwrap_or_default()
        )
    }

    /// Ends it and removes everything it made: sandboxes, slots, firewall, directories.
    ///
    /// # Errors
    /// What is left behind.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        let host = std::sync::Arc::clone(&self.daemon.host);
        self.daemon.end(&self.config, "the command is done");
        let removed = host.remove_instance(super::RELEASE_DEADLINE);
        self.lock.remove().context("instance lock")?;
        // Shared with other instances: goes only if this was the last.
        match std::fs::remove_dir(&self.config.run_dir) {
            Err(e) if !matches!(e.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::NotFound) => {
                tracing::debug!("{}: {e}", self.config.run_dir.display());
            }
            _ => {}
        }
        if let Err(errors) = removed {
            let errors: Vec<String> = errors.iter().map(|e| hearth_node::chain(e)).collect();
            bail!("left behind: {}", errors.join("; "));
        }
        Ok(())
    }
}

fn private(base: &Config, i: u32) -> anyhow::Result<Config> {
    let mut config = base.clone();
    config.instance = format!("standalone-{i}").parse()?;
    config.listen = SocketAddr::from(([127, 0, 0, 1], 0));
    config.network.veth_prefix = format!("hts{i}v").parse()?;
    // A /28 for each: seven slots. Below the default instance's 10.12.0.0/16.
    config.network.cidr = format!("10.11.255.{}/28", i * 16).parse()?;
    config.network.slot_pool = 1;
    config.events.keep_mib = 0;
    config.webhook = Default::default();
    config.otlp = Default::default();
    config.shutdown.mode = ShutdownMode::Kill;
    // What an earlier one of this place left is gone before this one begins.
    config.reclaim.mode = ReclaimMode::Blocking;
    config.reclaim.budget_seconds = 30;
    // Nobody could ask for them afterwards.
    config.exits.keep_seconds = 0;
    Ok(config)
}
