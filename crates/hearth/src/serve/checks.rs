//! The engine's periodic loop: stamps that it runs, and looks at what the node depends on. It decides
//! nothing; what it finds is one value in the node's status.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_core::host::Host;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Node;

/// Time between two rounds.
const EVERY: Duration = Duration::from_secs(1);
/// How long slots cannot be made before that counts: longer than the pool's first wait before it tries
/// again, so that a single failure is none.
const SLOTS_PATIENCE: Duration = Duration::from_secs(8);
/// Time from one probe of the state directory to the next: each costs the disk a sync.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// How long one probe of the state directory may take.
const PROBE_PATIENCE: Duration = Duration::from_secs(5);
/// The probe's file. One name, so that one left by a crash is overwritten and then removed.
const PROBE_FILE: &str = ".probe";

/// Runs until `stop`.
pub(super) async fn run<H: Host>(node: &Node<H>, stop: CancellationToken) {
    let mut round = tokio::time::interval(EVERY);
    round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut slots = Lasting::default();
    let mut disk = Disk::new(node.engine.config().state_dir.clone());
    loop {
        tokio::select! {
            _ = round.tick() => {}
            () = stop.cancelled() => return,
        }
        node.status.beat();
        // Without a pool nobody tries again until the next create, which then tells for itself.
        let trouble = node.engine.slot_trouble().filter(|_| node.engine.config().slot_pool > 0);
        let slots = slots.seen(trouble, Instant::now()).map(|why| format!("slots cannot be made: {why}"));
        let broken = slots.into_iter().chain(disk.look().await).chain(node.engine.reconcile_stopped());
        node.status.set_broken(broken.collect());
    }
}

/// A trouble that counts once it lasts.
#[derive(Debug, Default)]
struct Lasting(Option<Instant>);

impl Lasting {
    fn seen(&mut self, trouble: Option<String>, now: Instant) -> Option<String> {
        let Some(why) = trouble else {
            self.0 = None;
            return None;
        };
        let first = *self.0.get_or_insert(now);
        (now.saturating_duration_since(first) >= SLOTS_PATIENCE).then_some(why)
    }
}

/// The state directory, probed on a thread that may wait. One probe at a time: a disk that hangs holds one
/// thread, not one a second.
#[derive(Debug)]
struct Disk {
    dir: PathBuf,
    running: Option<(Instant, JoinHandle<io::Result<()>>)>,
    next: Instant,
    found: Option<String>,
}

impl Disk {
    fn new(dir: PathBuf) -> Self {
        Self { dir, running: None, next: Instant::now(), found: None }
    }

    /// What is wrong with it as far as known. Takes the result of the last probe, or begins the next.
    async fn look(&mut self) -> Option<String> {
        let shown = self.dir.display();
        match self.running.take() {
            None if Instant::now() < self.next => {}
            None => {
                let dir = self.dir.clone();
                self.next = Instant::now() + PROBE_EVERY;
                self.running = Some((Instant::now(), tokio::task::spawn_blocking(move || probe(&dir))));
            }
            Some((_, probe)) if probe.is_finished() => {
                self.found = match probe.await {
                    Ok(Ok(())) => None,
                    Ok(Err(e)) => Some(format!("state directory {shown} cannot be written: {e}")),
                    Err(e) => Some(format!("state directory {shown}: the probe failed: {e}")),
                };
            }
            Some((begun, probe)) => {
                if begun.elapsed() > PROBE_PATIENCE {
                    let seconds = begun.elapsed().as_secs();
                    self.found =
                        Some(format!("state directory {shown} has not answered a write for {seconds} s"));
                }
                self.running = Some((begun, probe));
            }
        }
        self.found.clone()
    }
}

/// Does what keeping a record takes: creates, syncs and removes a small file.
fn probe(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let path = dir.join(PROBE_FILE);
    let mut file = File::create(&path)?;
    let written = file.write_all(b"probe\n").and_then(|()| file.sync_all());
    drop(file);
    written.and(fs::remove_file(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blip_is_no_trouble() {
        let mut slots = Lasting::default();
        let (t, why) = (Instant::now(), || Some("no rights".to_owned()));
        assert_eq!(slots.seen(why(), t), None);
        assert_eq!(slots.seen(why(), t + SLOTS_PATIENCE / 2), None);
        assert_eq!(slots.seen(None, t + SLOTS_PATIENCE), None);
        assert_eq!(slots.seen(why(), t + SLOTS_PATIENCE), None);
        assert_eq!(slots.seen(why(), t + SLOTS_PATIENCE * 2), why());
    }

    #[test]
    fn a_probe_leaves_nothing_and_tells_what_fails() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        probe(&state).unwrap();
        assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
        fs::remove_dir(&state).unwrap();
        fs::write(&state, "").unwrap();
        assert!(probe(&state).is_err());
    }
}
