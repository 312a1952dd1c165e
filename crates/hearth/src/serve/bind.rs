//! What only one daemon can have: the instance's lock, the port, and the instance's name on this host; and
//! the bounded wait for a former daemon that still holds them. Nothing else is touched before all are held.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use hearth_core::id::InstanceName;
use hearth_host::cgroup::Cgroups;
use hearth_host::facts;
use hearth_host::lock::{InstanceClaim, InstanceLock, LockError};

use super::signals::Signals;
use super::supervisor::Supervisor;
use crate::config::Config;

/// Time between two tries.
const RETRY: Duration = Duration::from_millis(100);
/// Time between two messages about the same wait.
const TELL: Duration = Duration::from_secs(5);

/// The port and the instance's name on this host.
pub(super) struct Place {
    pub(super) listener: TcpListener,
    pub(super) claim: InstanceClaim,
}

impl Place {
    /// Takes both, without a wait. The caller has the instance's lock.
    ///
    /// # Errors
    /// Names who has one of them.
    pub(super) fn take(config: &Config) -> anyhow::Result<Self> {
        Self::try_take(config).map_err(Obstacle::tell)
    }

    fn try_take(config: &Config) -> Result<Self, Obstacle> {
        let listener = match TcpListener::bind(config.listen) {
            Ok(listener) => listener,
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Err(Obstacle::Port(config.listen)),
            Err(e) => {
                let e = anyhow!(e).context(format!("cannot listen on {}", config.listen));
                return Err(Obstacle::Lasting(e));
            }
        };
        // After the port, so that a daemon that finds the port taken has not made this directory.
        let claim = claim(&config.instance)?;
        Ok(Self { listener, claim })
    }
}

fn claim(instance: &InstanceName) -> Result<InstanceClaim, Obstacle> {
    let cgroups = Cgroups::locate(instance).map_err(|e| Obstacle::Lasting(e.into()))?;
    Ok(InstanceClaim::acquire(cgroups.root())?)
}

/// Why a try did not work.
enum Obstacle {
    /// Somebody has the lock or the name; may pass.
    Held(LockError),
    /// Somebody has the port; may pass.
    Port(SocketAddr),
    /// A wait changes nothing.
    Lasting(anyhow::Error),
}

impl From<LockError> for Obstacle {
    fn from(e: LockError) -> Self {
        match e {
            LockError::Held { .. } => Obstacle::Held(e),
            LockError::Io { .. } => Obstacle::Lasting(e.into()),
        }
    }
}

impl Obstacle {
    /// As an error that names the holder. Looks through all processes for that of a port.
    fn tell(self) -> anyhow::Error {
        match self {
            Obstacle::Held(e) => e.into(),
            Obstacle::Lasting(e) => e,
            Obstacle::Port(listen) => {
                let holders = facts::tcp_listeners(listen.port()).unwrap_or_default();
                match holders.into_iter().find_map(|l| l.holder) {
                    Some(h) => anyhow!(
                        "{listen} is in use by {} (pid {}); end it or choose another --listen",
                        h.comm,
                        h.pid
                    ),
                    None => anyhow!("{listen} is in use; choose another --listen"),
                }
            }
        }
    }
}

/// Takes the lock and the place. Waits for a holder at most `takeover_seconds`; `None`: a signal ended the
/// wait.
///
/// # Errors
/// Names the holder.
pub(super) async fn take(
    config: &Config,
    signals: &mut Signals,
    supervisor: &Supervisor,
) -> anyhow::Result<Option<(InstanceLock, Place)>> {
    let bound = Duration::from_secs(config.takeover_seconds);
    let run_dir = config.instance_run_dir();
    let begun = Instant::now();
    let mut told: Option<Instant> = None;
    let mut lock = None;
    loop {
        let obstacle = match attempt(config, &run_dir, &mut lock) {
            Ok(place) => {
                if told.is_some() {
                    tracing::info!(waited_ms = begun.elapsed().as_millis(), "the wait is over");
                }
                return Ok(lock.map(|lock| (lock, place)));
            }
            Err(Obstacle::Lasting(e)) => return Err(e),
            Err(obstacle) => obstacle,
        };
        let left = bound.saturating_sub(begun.elapsed());
        if left.is_zero() {
            let waited = (!bound.is_zero()).then(|| format!("waited {} s in vain", bound.as_secs()));
            let error = obstacle.tell();
            return Err(match waited {
                Some(waited) => error.context(waited),
                None => error,
            });
        }
        if told.is_none_or(|at| at.elapsed() >= TELL) {
            let what = obstacle.tell();
            tracing::warn!(seconds_left = left.as_secs(), "waiting: {what}");
            supervisor.waiting(&what.to_string(), left);
            told = Some(Instant::now());
        }
        tokio::select! {
            signal = signals.next() => {
                tracing::info!("{signal}: no longer waiting");
                return Ok(None);
            }
            () = tokio::time::sleep(RETRY.min(left)) => {}
        }
    }
}

/// One try. What it got of the lock is kept for the next.
fn attempt(config: &Config, run_dir: &Path, lock: &mut Option<InstanceLock>) -> Result<Place, Obstacle> {
    if lock.is_none() {
        *lock = Some(InstanceLock::acquire(run_dir)?);
    }
    Place::try_take(config)
}
