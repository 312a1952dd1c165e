//! What `hearth top` knows and what it is about: everything on the screen follows from this value. Events change it, and
//! may ask for something to be done. No terminal, no daemon, no clock.
//!
//! ```text
//!   list ── / ──> filter ── enter, esc ──> list        list ── ? ──> help ── any ──> list
//!   list ── enter ──> inspect ── esc ──> list          list, inspect ── d ──> confirm ── y, n ──> back
//! ```

use std::collections::BTreeMap;

use hearth_api::v1::{InfoResponse, Sandbox};

/// A key, apart from what library read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Enter,
    Escape,
    Backspace,
    Tab,
    Delete,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    /// Ctrl-C.
    Interrupt,
}

/// What the daemon said.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) info: InfoResponse,
    /// Nothing as long as the daemon cannot tell, with its reason.
    pub(super) sandboxes: Result<Vec<Sandbox>, String>,
}

/// The load of the host the daemon is on.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Load {
    /// Processes that want to run, over 1, 5 and 15 minutes.
    pub(super) average: [String; 3],
    pub(super) cpus: usize,
    pub(super) memory_total_kib: u64,
    pub(super) memory_available_kib: u64,
    /// Share of the last 10 s in which somebody waited, in percent: processor, memory, disk. Nothing where the kernel
    /// does not say.
    pub(super) pressure: [Option<f64>; 3],
}

/// What happened.
#[derive(Debug)]
pub(super) enum Event {
    Key(Key),
    Answer(Box<Answer>),
    /// No answer: why.
    Silent(String),
    /// Nothing if the host is another one.
    Load(Option<Load>),
    Deleted {
        id: String,
        name: String,
        failed: Option<String>,
    },
    /// Unix time in milliseconds.
    Now(u64),
    Resized,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Quit,
    Delete { id: String, name: String },
}

/// The order of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Name,
    State,
    Template,
    Age,
    Ends,
}

impl Sort {
    const ALL: [Sort; 5] = [Sort::Name, Sort::State, Sort::Template, Sort::Age, Sort::Ends];

    fn next(self) -> Self {
        let at = Self::ALL.iter().position(|s| *s == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// What keys mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    List,
    Filter,
    /// One sandbox, by its id.
    Inspect(String),
    /// Whether to delete it; where to go back to.
    Confirm {
        id: String,
        name: String,
        from: Box<Mode>,
    },
    Help,
}

/// What the list is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    Sandboxes,
    Leftovers,
}

/// Everything.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) address: String,
    pub(super) now_ms: u64,
    /// The last answer; it stays when the daemon goes.
    pub(super) answer: Option<Answer>,
    /// Since when no answer comes, and why.
    pub(super) silent: Option<(u64, String)>,
    pub(super) load: Option<Load>,
    pub(super) view: View,
    pub(super) mode: Mode,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// The id of a sandbox: what is selected stays so when the list changes.
    pub(super) selected: Option<String>,
    /// First line of a text that is longer than the screen.
    pub(super) scroll: usize,
    /// Ids that are being deleted, with their names.
    pub(super) deleting: BTreeMap<String, String>,
    /// What came of the last thing that was done.
    pub(super) note: Option<String>,
    pub(super) colour: bool,
}

/// Rows that a page key goes.
const PAGE: usize = 10;

impl Model {
    pub(super) fn new(address: String, colour: bool) -> Self {
        Self {
            address,
            now_ms: 0,
            answer: None,
            silent: None,
            load: None,
            view: View::Sandboxes,
            mode: Mode::List,
            sort: Sort::Name,
            reversed: false,
            filter: String::new(),
            selected: None,
            scroll: 0,
            deleting: BTreeMap::new(),
            note: None,
            colour,
        }
    }

    /// Takes an event in.
    pub(super) fn update(&mut self, event: Event) -> Option<Effect> {
        match event {
            Event::Key(key) => return self.key(key),
            Event::Answer(answer) => {
                self.answer = Some(*answer);
                self.silent = None;
                self.settle();
            }
            Event::Silent(why) => {
                let since = self.silent.as_ref().map_or(self.now_ms, |(since, _)| *since);
                self.silent = Some((since, why));
            }
            Event::Load(load) => self.load = load,
            Event::Deleted { id, name, failed } => {
                self.deleting.remove(&id);
                self.note = Some(match failed {
                    None => format!("{name} is deleted, with everything it owned"),
                    Some(why) => format!("{name} is not deleted: {why}"),
                });
            }
            Event::Now(now) => self.now_ms = now,
            Event::Resized => {}
        }
        None
    }

    /// The sandboxes that are shown, in order; nothing if the daemon cannot tell.
    pub(super) fn shown(&self) -> Vec<&Sandbox> {
        let mut shown: Vec<&Sandbox> = self.all().iter().filter(|s| self.fits(s)).collect();
        shown.sort_by(|a, b| {
            let order = match self.sort {
                Sort::Name => title(a).cmp(title(b)),
                Sort::State => a.state.cmp(&b.state),
                Sort::Template => a.template.cmp(&b.template),
                // The youngest first.
                Sort::Age => b.created_at_ms.cmp(&a.created_at_ms),
                // One that has no end is last.
                Sort::Ends => a.ends_at_ms.wrapping_sub(1).cmp(&b.ends_at_ms.wrapping_sub(1)),
            };
            let order = order.then_with(|| title(a).cmp(title(b))).then_with(|| a.id.cmp(&b.id));
            if self.reversed { order.reverse() } else { order }
        });
        shown
    }

    pub(super) fn all(&self) -> &[Sandbox] {
        self.answer.as_ref().and_then(|a| a.sandboxes.as_deref().ok()).unwrap_or_default()
    }

    pub(super) fn find(&self, id: &str) -> Option<&Sandbox> {
        self.all().iter().find(|s| s.id == id)
    }

    /// Where the selected one stands among those shown.
    pub(super) fn position(&self, shown: &[&Sandbox]) -> usize {
        let at = |id: &String| shown.iter().position(|s| s.id == *id);
        self.selected.as_ref().and_then(at).unwrap_or_default()
    }

    fn fits(&self, s: &Sandbox) -> bool {
        let wanted = self.filter.to_lowercase();
        let texts = [&s.name, &s.id, &s.template, &s.state, &s.vmm, &s.address];
        texts.iter().any(|t| t.to_lowercase().contains(&wanted))
    }

    /// After the list changed.
    fn settle(&mut self) {
        let gone = |id: &String| self.find(id).is_none();
        if let Mode::Inspect(id) | Mode::Confirm { id, .. } = &self.mode
            && gone(id)
            && self.answer.as_ref().is_some_and(|a| a.sandboxes.is_ok())
        {
            // A note of its delete says more.
            self.note.get_or_insert_with(|| "that sandbox is gone".to_owned());
            self.mode = Mode::List;
            self.scroll = 0;
        }
        let shown = self.shown();
        let kept = self.selected.as_ref().is_some_and(|id| shown.iter().any(|s| s.id == *id));
        if !kept {
            self.selected = shown.first().map(|s| s.id.clone());
        }
    }

    fn key(&mut self, key: Key) -> Option<Effect> {
        if key == Key::Interrupt {
            return Some(Effect::Quit);
        }
        // Read by now; what comes next has its own to say.
        if !matches!(self.mode, Mode::Filter) {
            self.note = None;
        }
        match self.mode.clone() {
            Mode::List => return self.list_key(key),
            Mode::Filter => self.filter_key(key),
            Mode::Inspect(id) => match key {
                Key::Up | Key::Char('k') => self.scroll = self.scroll.saturating_sub(1),
                Key::Down | Key::Char('j') => self.scroll += 1,
                Key::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
                Key::PageDown => self.scroll += PAGE,
                Key::Char('d') | Key::Delete => self.confirm(&id),
                Key::Escape | Key::Enter | Key::Char('q') => {
                    self.mode = Mode::List;
                    self.scroll = 0;
                }
                _ => {}
            },
            Mode::Confirm { id, name, from } => match key {
                Key::Char('y' | 'Y') => {
                    self.mode = *from;
                    self.deleting.insert(id.clone(), name.clone());
                    return Some(Effect::Delete { id, name });
                }
                // Anything but yes is no.
                _ => self.mode = *from,
            },
            Mode::Help => self.mode = Mode::List,
        }
        None
    }

    fn list_key(&mut self, key: Key) -> Option<Effect> {
        match key {
            Key::Char('q') => return Some(Effect::Quit),
            Key::Escape => {
                self.filter.clear();
                self.settle();
            }
            Key::Char('?' | 'h') => self.mode = Mode::Help,
            Key::Tab => {
                self.scroll = 0;
                self.view = match self.view {
                    View::Sandboxes => View::Leftovers,
                    View::Leftovers => View::Sandboxes,
                };
            }
            Key::Up | Key::Char('k') => self.go(|at, _| at.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.go(|at, _| at + 1),
            Key::PageUp => self.go(|at, _| at.saturating_sub(PAGE)),
            Key::PageDown => self.go(|at, _| at + PAGE),
            Key::Home | Key::Char('g') => self.go(|_, _| 0),
            Key::End | Key::Char('G') => self.go(|_, last| last),
            _ if self.view == View::Leftovers => {}
            Key::Char('s') => self.sort = self.sort.next(),
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Char('/') => self.mode = Mode::Filter,
            Key::Enter => {
                self.scroll = 0;
                if let Some(id) = self.selected.clone().filter(|id| self.find(id).is_some()) {
                    self.mode = Mode::Inspect(id);
                }
            }
            Key::Char('d') | Key::Delete => {
                if let Some(id) = self.selected.clone() {
                    self.confirm(&id);
                }
            }
            _ => {}
        }
        None
    }

    fn filter_key(&mut self, key: Key) {
        match key {
            Key::Char(c) => self.filter.push(c),
            Key::Backspace => drop(self.filter.pop()),
            Key::Enter => self.mode = Mode::List,
            Key::Escape => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            _ => {}
        }
        self.settle();
    }

    fn go(&mut self, to: impl Fn(usize, usize) -> usize) {
        if self.view == View::Leftovers {
            // The screen ends it at the last line.
            self.scroll = to(self.scroll, self.scroll);
            return;
        }
        let shown = self.shown();
        let last = shown.len().saturating_sub(1);
        let at = to(self.position(&shown), last).min(last);
        self.selected = shown.get(at).map(|s| s.id.clone());
    }

    fn confirm(&mut self, id: &str) {
        let Some(sandbox) = self.find(id) else { return };
        if self.deleting.contains_key(id) {
            self.note = Some(format!("{} is being deleted already", title(sandbox)));
            return;
        }
        let (id, name, from) = (id.to_owned(), title(sandbox).to_owned(), Box::new(self.mode.clone()));
        self.mode = Mode::Confirm { id, name, from };
    }
}

/// What a sandbox is called: of an unknown one only the id is known.
pub(super) fn title(s: &Sandbox) -> &str {
    if s.name.is_empty() { &s.id } else { &s.name }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
