//! Why a VMM ended that nobody of ours ended: a pure function of the evidence. And the ear on the guest's console
//! that gathers part of it.
//!
//! What the console tells is the guest's word: whoever is root inside can print a panic. It decides between ends of
//! the guest only, never whether the VMM was killed or failed.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use hearth_core::exit::ExitReason;
use hearth_host::process::Ended;
use tokio::io::{AsyncRead, ReadBuf};

/// Longest part of a line that is kept.
const MAX_LINE: usize = 512;
/// A panic this many bytes before the console's end is not what ended the guest.
const RECENT: u64 = 64 * 1024;
/// Signals that a program causes itself (signal(7)): SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGXFSZ,
/// SIGSYS.
const CRASHES: [i32; 8] = [4, 5, 6, 7, 8, 11, 25, 31];

const PANIC: &str = "Kernel panic - not syncing";
const OOM_KILL: &str = "ut of memory: Killed process";
/// Panics for want of memory: `panic_on_oom`, and nobody left to kill (mm/oom_kill.c).
const OOM_PANICS: [&str; 2] = ["ut of memory", "deadlocked on memory"];

/// What the guest's kernel said of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GuestWords {
    /// The last panic's line.
    panic: Option<String>,
    panic_at: u64,
    bytes: u64,
    /// Processes it killed for want of memory.
    pub(crate) oom_kills: u64,
    line: Vec<u8>,
}

impl GuestWords {
    fn hear(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            let room = MAX_LINE.saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            self.bytes += piece.len() as u64;
            if piece.ends_with(b"\n") {
                self.judge_line();
            }
        }
    }

    fn judge_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        if text.contains(OOM_KILL) {
            self.oom_kills += 1;
        }
        if let Some(at) = text.find(PANIC) {
            self.panic = Some(text[at..].trim_end().chars().filter(|c| !c.is_control()).collect());
            self.panic_at = self.bytes;
        }
    }

    /// The panic that may have ended the guest.
    fn last_panic(&self) -> Option<&str> {
        let panic = self.panic.as_deref()?;
        (self.bytes - self.panic_at <= RECENT).then_some(panic)
    }
}

/// Shared by the ear and whoever judges.
#[derive(Debug, Clone, Default)]
pub(crate) struct Heard(Arc<Mutex<GuestWords>>);

impl Heard {
    fn lock(&self) -> MutexGuard<'_, GuestWords> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of it so far; a line without an end counts.
    pub(crate) fn words(&self) -> GuestWords {
        let mut words = self.lock().clone();
        words.judge_line();
        words
    }
}

/// A console that is listened to while somebody else reads it.
#[derive(Debug)]
pub(crate) struct Ear<R> {
    source: R,
    heard: Heard,
}

impl<R> Ear<R> {
    pub(crate) fn new(source: R, heard: Heard) -> Self {
        Self { source, heard }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Ear<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buf.filled().len();
        let outcome = Pin::new(&mut self.source).poll_read(cx, buf);
        self.heard.lock().hear(&buf.filled()[before..]);
        outcome
    }
}

/// Why it ended, and words to add. `stopped`: what the VMM said of the guest's end (QEMU's `SHUTDOWN` reasons,
/// qapi/run-state.json). `oom`: the kernel's word on killing the VMM for want of memory.
pub(crate) fn judge(
    ended: Ended,
    stopped: Option<&str>,
    words: &GuestWords,
    oom: Option<String>,
) -> (ExitReason, Option<String>) {
    if let Some(signal) = ended.signal {
        return match oom {
            Some(said) => (ExitReason::VmmOom, Some(said)),
            None if CRASHES.contains(&signal) => (ExitReason::VmmFailed, None),
            None => (ExitReason::Killed, None),
        };
    }
    if ended.code != Some(0) {
        return (ExitReason::VmmFailed, None);
    }
    match stopped {
        // A SIGTERM, SIGINT or SIGHUP that QEMU took for an order to end.
        Some("host-signal") => return (ExitReason::Killed, None),
        Some("guest-shutdown") => return (ExitReason::GuestShutdown, None),
        _ => {}
    }
    match words.last_panic() {
        Some(panic) if OOM_PANICS.iter().any(|p| panic.contains(p)) => {
            (ExitReason::GuestOom, Some(panic.to_owned()))
        }
        Some(panic) => (ExitReason::GuestPanic, Some(panic.to_owned())),
        None => (ExitReason::GuestShutdown, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt as _;

    const EXITED: Ended = Ended { code: Some(0), signal: None };

    fn heard(text: &str) -> GuestWords {
        let heard = Heard::default();
        heard.lock().hear(text.as_bytes());
        heard.words()
    }

    fn reason(ended: Ended, stopped: Option<&str>, console: &str, oom: Option<&str>) -> ExitReason {
        judge(ended, stopped, &heard(console), oom.map(str::to_owned)).0
    }

    #[test]
    fn each_end_is_told_from_the_others() {
        let signal = |n| Ended { code: None, signal: Some(n) };
        let code = |n| Ended { code: Some(n), signal: None };
        let panic = "[ 1.0] Kernel panic - not syncing: Attempted to kill init! exitcode=0x0000000b\r\n";
        let oom = "[ 2.0] Kernel panic - not syncing: System is deadlocked on memory\r\n";
        let forced =
            "[ 2.0] Kernel panic - not syncing: Out of memory: system-wide panic_on_oom is enabled\r\n";
        for (expected, got) in [
            (ExitReason::GuestShutdown, reason(EXITED, None, "reboot: Power down\n", None)),
            (ExitReason::GuestShutdown, reason(EXITED, Some("guest-shutdown"), panic, None)),
            (ExitReason::GuestPanic, reason(EXITED, Some("guest-reset"), panic, None)),
            (ExitReason::GuestPanic, reason(EXITED, None, panic.trim_end(), None)),
            (ExitReason::GuestOom, reason(EXITED, Some("guest-reset"), oom, None)),
            (ExitReason::GuestOom, reason(EXITED, Some("guest-reset"), forced, None)),
            (ExitReason::Killed, reason(EXITED, Some("host-signal"), "", None)),
            (ExitReason::Killed, reason(signal(9), None, panic, None)),
            (ExitReason::Killed, reason(signal(15), None, "", None)),
            (ExitReason::VmmOom, reason(signal(9), None, oom, Some("Out of memory: Killed process 1"))),
            (ExitReason::VmmFailed, reason(signal(11), None, "", None)),
            (ExitReason::VmmFailed, reason(signal(6), None, panic, None)),
            (ExitReason::VmmFailed, reason(code(1), None, panic, None)),
            (ExitReason::VmmFailed, reason(Ended { code: None, signal: None }, None, "", None)),
        ] {
            assert_eq!(got, expected);
        }
    }

    #[test]
    fn a_panic_long_before_the_end_is_not_its_cause() {
        let talk = "x".repeat(100) + "\n";
        let console = format!("{PANIC}: a text somebody printed\n{}", talk.repeat(700));
        assert_eq!(reason(EXITED, Some("guest-reset"), &console, None), ExitReason::GuestShutdown);
    }

    #[tokio::test]
    async fn the_ear_changes_nothing_and_hears_lines_in_parts_and_without_end() {
        let heard = Heard::default();
        let text = format!(
            "[1] Out of memory: Killed process 7 (a)\n{}\nMemory cgroup out of memory: Killed process 8 (b)",
            "y".repeat(100_000)
        );
        let mut ear = Ear::new(text.as_bytes(), heard.clone());
        let mut read = Vec::new();
        let mut part = [0; 7];
        loop {
            let n = ear.read(&mut part).await.unwrap();
            if n == 0 {
                break;
            }
            read.extend_from_slice(&part[..n]);
        }
        assert!(read == text.as_bytes());
        assert_eq!(heard.words().oom_kills, 2);
        assert!(heard.lock().line.len() <= MAX_LINE, "a line is kept in part");
    }
}
