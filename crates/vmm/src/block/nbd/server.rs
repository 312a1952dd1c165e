//! The server of one unix socket: takes connections, bounded in number, owns them, and ends them.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Ended, Export, Limits, MAX_REQUEST, serve};

/// After an accept that failed: descriptors are short, and only time helps.
const BREATH: Duration = Duration::from_millis(100);

/// What one server serves.
#[derive(Debug, Clone)]
pub struct Server {
    exports: Arc<[Arc<Export>]>,
    limits: Limits,
}

/// What became of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Connections that were let in.
    pub connections: u64,
    /// Clients that were turned away since there were too many.
    pub refused: u64,
    /// Requests that the kernel did not give back; their threads and buffers stay.
    pub leaked: usize,
}

impl Server {
    /// The first export is also the one without a name. Limits that make no sense are raised.
    #[must_use]
    pub fn new(exports: Vec<Arc<Export>>, mut limits: Limits) -> Self {
        limits.in_flight = limits.in_flight.max(1);
        limits.in_flight_bytes = limits.in_flight_bytes.max(MAX_REQUEST as usize + (1 << 20));
        Self { exports: exports.into(), limits }
    }

    /// Serves until `stop`. Then every request in flight is answered with an error, the connections end, and the disks are
    /// closed; nothing is flushed that no client asked for.
    pub async fn run(&self, listener: UnixListener, stop: CancellationToken) -> Served {
        let mut served = Served::default();
        let mut connections = JoinSet::new();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = connections.join_next() => tell(ended),
                accepted = listener.accept() => match accepted {
                    // Dropped, it is closed.
                    Ok(_) if connections.len() >= self.limits.connections => served.refused += 1,
                    Ok((stream, _)) => {
                        served.connections += 1;
                        let (read, write) = stream.into_split();
                        connections.spawn(serve(read, write, self.exports.clone(), self.limits, stop.clone()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be taken");
                        tokio::time::sleep(BREATH).await;
                    }
                }
            }
        }
        drop(listener);
        while let Some(ended) = connections.join_next().await {
            tell(ended);
        }
        for export in self.exports.iter() {
            served.leaked += export.backend.close(self.limits.quiet).await;
        }
        served
    }
}

fn tell(ended: Result<Ended, JoinError>) {
    match ended {
        Ok(Ended::Garbage) => tracing::warn!("a client sent what is no request; its connection was closed"),
        Ok(how) => tracing::debug!(%how, "a connection ended"),
        Err(error) => tracing::error!(%error, "a connection's task failed"),
    }
}
