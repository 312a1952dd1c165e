//! The terminal in raw mode or with a screen of our own, and back on every path: return, error, panic.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::{cursor, execute, terminal};
use hearth_api::v1::TtySize;

use super::error::CliError;

/// Size of our terminal, or the classic one where there is none.
pub(super) fn size() -> TtySize {
    let (cols, rows) = terminal::size().unwrap_or((80, 24));
    TtySize { rows: u32::from(rows.max(1)), cols: u32::from(cols.max(1)) }
}

/// Raw mode as long as this lives.
#[derive(Debug)]
pub(super) struct RawMode(());

impl RawMode {
    /// Switches it on.
    pub(super) fn enter() -> Result<Self, CliError> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                // Before the message, which would run down the screen like stairs.
                leave();
                before(info);
            }));
        });
        terminal::enable_raw_mode()
            .map_err(|e| CliError::failed("cannot use the terminal", e.to_string()))?;
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        leave();
    }
}

/// Whether the other screen is shown.
static FULL: AtomicBool = AtomicBool::new(false);

/// The terminal's other screen, in raw mode, as long as this lives. What was on the first one comes back.
#[derive(Debug)]
pub(super) struct FullScreen(RawMode);

impl FullScreen {
    /// Switches to it.
    pub(super) fn enter() -> Result<Self, CliError> {
        let raw = RawMode::enter()?;
        FULL.store(true, Ordering::Relaxed);
        execute!(std::io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(Self(raw))
    }
}

fn leave() {
    // A terminal that is gone needs no mode.
    if FULL.swap(false, Ordering::Relaxed) {
        drop(execute!(std::io::stdout(), terminal::LeaveAlternateScreen, cursor::Show));
    }
    drop(terminal::disable_raw_mode());
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Set for the run of this test that panics in a terminal.
    const INSIDE: &str = "HEARTH_TEST_PANIC_INSIDE";

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_is_told() {
        let test = "a_panic_gives_the_terminal_back_before_it_is_told";
        if std::env::var_os(INSIDE).is_some() {
            let _screen = FullScreen::enter().expect("a terminal");
            panic!("on purpose");
        }
        let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .any(|dir| dir.join("script").is_file());
        if !found {
            hearth_testkit::skip(test, "script is not in PATH");
            return;
        }
        let program = std::env::current_exe().unwrap();
        let line = format!("exec {} --nocapture --exact cli::terminal::tests::{test}", program.display());
        let mut command = Command::new("script");
        command
            .args(["-qfec", &line, "/dev/null"])
            .env(INSIDE, "1")
            .env("TERM", "xterm")
            .stdin(Stdio::null());
        let out = command.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        let at = |what: &str| said.find(what).unwrap_or_else(|| panic!("no {what:?} in {said:?}"));
        assert!(at("\u{1b}[?1049h") < at("\u{1b}[?1049l"), "{said:?}");
        assert!(at("\u{1b}[?25h") < at("on purpose"), "{said:?}");
    }
}
