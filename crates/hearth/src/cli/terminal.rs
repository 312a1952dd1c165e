//! The terminal in raw mode, and back on every path: return, error, panic.

use std::sync::Once;

use crossterm::terminal;
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

fn leave() {
    // A terminal that is gone needs no mode.
    drop(terminal::disable_raw_mode());
}
