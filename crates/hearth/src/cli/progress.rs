//! What a person sees on stderr while something takes long: one line that changes on a terminal, plain lines
//! otherwise.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::out;

/// How much to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Show {
    /// Nothing.
    Nothing,
    /// One line that changes, gone at the end.
    Line,
    /// A line per step.
    Lines,
}

impl Show {
    /// For steps that normally take milliseconds: silent unless somebody watches.
    pub(super) fn for_steps(json: bool, verbose: bool) -> Self {
        match (json, verbose) {
            (true, _) => Show::Nothing,
            (false, true) => Show::Lines,
            (false, false) if std::io::stderr().is_terminal() => Show::Line,
            (false, false) => Show::Nothing,
        }
    }

    /// For work that takes minutes: never silent.
    pub(super) fn for_work(json: bool) -> Self {
        match json {
            true => Show::Nothing,
            false if std::io::stderr().is_terminal() => Show::Line,
            false => Show::Lines,
        }
    }
}

/// Progress of one piece of work.
#[derive(Debug)]
pub(super) struct Progress {
    show: Show,
    bar: Option<ProgressBar>,
    step: String,
    since: Instant,
}

impl Progress {
    /// Shows nothing yet.
    pub(super) fn new(show: Show) -> Self {
        let bar = (show == Show::Line).then(|| {
            let bar = ProgressBar::new_spinner();
            bar.set_style(spinner());
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self { show, bar, step: String::new(), since: Instant::now() }
    }

    /// A step begins.
    pub(super) fn step(&mut self, step: &str) {
        if step == self.step {
            return;
        }
        self.close_step();
        step.clone_into(&mut self.step);
        self.since = Instant::now();
        if let Some(bar) = &self.bar {
            bar.set_style(spinner());
            bar.set_message(step.to_owned());
        }
    }

    /// How far the step is.
    pub(super) fn advance(&mut self, step: &str, done: u64, total: Option<u64>) {
        self.step(step);
        if let (Some(bar), Some(total)) = (&self.bar, total) {
            if bar.length() != Some(total) {
                bar.set_length(total);
                bar.set_style(gauge());
            }
            bar.set_position(done);
        }
    }

    fn close_step(&mut self) {
        if self.show == Show::Lines && !self.step.is_empty() {
            out::note(&format!("{}: {} ms", self.step, self.since.elapsed().as_millis()));
        }
        self.step.clear();
    }

    /// Takes the line away.
    pub(super) fn finish(&mut self) {
        self.close_step();
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn spinner() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn gauge() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg} {wide_bar} {percent}%")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
