//! What the daemon tells a supervisor that speaks systemd's notify protocol (`NOTIFY_SOCKET`, see
//! sd_notify(3)): ready, status, still alive, ending. Without that variable nothing happens.
//!
//! READY means that the port answers, not that the node is healthy: a supervisor must never end a node for
//! being slow to get ready. Alive means what `/health/live` means: the front's thread runs. A blocked engine
//! shows in `/health` and is no reason to restart.
//!
//! No message ever waits for its reader: the front's thread sends most of them, and it must answer.

use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_node::{ReclaimProgress, ReclaimState};
use tokio::time::MissedTickBehavior;

use super::status::Report;

/// Longest time between two looks at the status.
const LOOK: Duration = Duration::from_secs(1);
/// Beyond what a wait was told to take: the engine joins its tasks in at most about a minute after it.
const SLACK: Duration = Duration::from_secs(120);

/// The supervisor that started this process, if one did.
#[derive(Debug, Clone)]
pub(super) struct Supervisor {
    line: Option<Arc<Line>>,
    /// Within this time it must hear that we are alive.
    watchdog: Option<Duration>,
}

/// Where it listens.
#[derive(Debug)]
struct Line {
    socket: UnixDatagram,
    address: SocketAddr,
}

impl Supervisor {
    /// Nobody.
    pub(super) fn none() -> Self {
        Self { line: None, watchdog: None }
    }

    /// Who the environment names.
    pub(super) fn from_env() -> Self {
        let variable = |name| std::env::var(name).ok().filter(|v: &String| !v.is_empty());
        let Some(name) = variable("NOTIFY_SOCKET") else { return Self::none() };
        let line = match Line::open(&name) {
            Ok(line) => line,
            Err(e) => {
                tracing::warn!("NOTIFY_SOCKET {name:?} cannot be used, the supervisor hears nothing: {e}");
                return Self::none();
            }
        };
        let watchdog = watchdog(variable("WATCHDOG_USEC").as_deref(), variable("WATCHDOG_PID").as_deref());
        Self { line: Some(Arc::new(line)), watchdog }
    }

    /// Says what the start waits for, and that it may take `left` longer.
    pub(super) fn waiting(&self, what: &str, left: Duration) {
        self.say(&format!("{}\n{}", status_line(&format!("waiting: {what}")), extend(left)));
    }

    /// Says that the end has begun and may take `bound`. Blocks, at most half a second.
    pub(super) fn stopping(&self, bound: Duration) {
        let message = format!("STOPPING=1\n{}", extend(bound));
        for _ in 0..10 {
            if self.say(&message) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Says ready, then each change of `status` and being alive, for as long as the thread it runs on does.
    /// Must run on the front's.
    pub(super) async fn follow(self, status: impl Fn() -> String + Send) {
        if self.line.is_none() {
            return;
        }
        let (look, silence) = pace(self.watchdog);
        let mut look = tokio::time::interval(look);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ready = "READY=1\n";
        let mut said = (Instant::now(), String::new());
        loop {
            look.tick().await;
            let status = status();
            if ready.is_empty() && said.0.elapsed() < silence && said.1 == status {
                continue;
            }
            let alive = if self.watchdog.is_some() { "\nWATCHDOG=1" } else { "" };
            // What was not taken is said again at the next look.
            if self.say(&format!("{ready}{}{alive}", status_line(&status))) {
                ready = "";
                said = (Instant::now(), status);
            }
        }
    }

    /// Whether it was handed over. Never waits: a full queue is an answer.
    fn say(&self, message: &str) -> bool {
        let Some(line) = &self.line else { return true };
        match line.socket.send_to_addr(message.as_bytes(), &line.address) {
            Ok(_) => true,
            Err(e) => {
                if e.kind() != ErrorKind::WouldBlock {
                    tracing::debug!("the supervisor's socket: {e}");
                }
                false
            }
        }
    }
}

impl Line {
    fn open(name: &str) -> io::Result<Self> {
        let address = match name.strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None if name.starts_with('/') => SocketAddr::from_pathname(name)?,
            None => {
                return Err(io::Error::new(ErrorKind::Unsupported, "neither a path nor an abstract name"));
            }
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, address })
    }
}

/// The watchdog's time, if it is meant for this process.
fn watchdog(usec: Option<&str>, pid: Option<&str>) -> Option<Duration> {
    let usec: u64 = usec?.parse().ok().filter(|n| *n > 0)?;
    let ours = pid.is_none_or(|pid| pid.parse() == Ok(std::process::id()));
    ours.then(|| Duration::from_micros(usec))
}

/// Time between two looks, and the longest silence between two messages. Both together stay well within the
/// watchdog's time, so that one message may be lost.
fn pace(watchdog: Option<Duration>) -> (Duration, Duration) {
    match watchdog {
        None => (LOOK, Duration::MAX),
        Some(within) => (LOOK.min(within / 8), within / 4),
    }
}

/// One line whatever is in it: a line more would be an assignment of its own.
fn status_line(text: &str) -> String {
    format!("STATUS={}", text.replace(['\n', '\r'], " "))
}

fn extend(wait: Duration) -> String {
    format!("EXTEND_TIMEOUT_USEC={}", wait.saturating_add(SLACK).as_micros())
}

/// The status as people read it in `systemctl status`.
pub(super) fn status_text(report: &Report, sandboxes: usize, reclaim: &ReclaimProgress) -> String {
    let mut text = report.status.as_str().to_owned();
    if !report.reason.is_empty() {
        text.push_str(&format!(": {}", report.reason));
    }
    text.push_str(&format!("; {sandboxes} sandboxes"));
    match reclaim.state {
        ReclaimState::Running => text.push_str(&format!(
            "; reclaim: {} of {} done, {} failed",
            reclaim.done, reclaim.total, reclaim.failed
        )),
        ReclaimState::Done if reclaim.failed > 0 => {
            text.push_str(&format!("; reclaim: {} failed, tried again", reclaim.failed));
        }
        ReclaimState::Off if reclaim.total > 0 => {
            text.push_str(&format!("; reclaim: off, {} leftovers", reclaim.total));
        }
        _ => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_meant_for_another_process_is_not_ours() {
        let me = std::process::id().to_string();
        assert_eq!(watchdog(Some("2000000"), None), Some(Duration::from_secs(2)));
        assert_eq!(watchdog(Some("2000000"), Some(&me)), Some(Duration::from_secs(2)));
        assert_eq!(watchdog(Some("2000000"), Some("1")), None);
        assert_eq!(watchdog(Some("0"), None), None);
        assert_eq!(watchdog(Some("soon"), None), None);
        assert_eq!(watchdog(None, Some(&me)), None);
    }

    #[test]
    fn one_lost_message_is_within_the_watchdogs_time() {
        for within in [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(3600)] {
            let (look, silence) = pace(Some(within));
            assert!((look + silence) * 2 < within, "{within:?}: {look:?} {silence:?}");
            assert!(look > Duration::ZERO);
        }
    }

    #[test]
    fn a_reason_of_many_lines_stays_one_assignment() {
        assert_eq!(status_line("bad\nREADY=1"), "STATUS=bad READY=1");
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let reader = UnixDatagram::bind(&path).unwrap();
        let line = Line::open(path.to_str().unwrap()).unwrap();
        let supervisor = Supervisor { line: Some(Arc::new(line)), watchdog: None };
        // The queue holds a bounded number of messages, a few hundred at most.
        let taken = (0..100_000).take_while(|_| supervisor.say("STATUS=x")).count();
        assert!(taken < 100_000);
        let mut buffer = [0; 64];
        assert_eq!(reader.recv(&mut buffer).unwrap(), 8);
        assert!(supervisor.say("STATUS=y"));
    }
}
