//! `hearth top`: what the node does, live. This file has the loop between terminal, daemon and model; what a key or an
//! answer means is in `model`, and what is seen in `screen`. A daemon that does not answer is told and tried again.

mod model;
mod screen;
mod source;

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossterm::event::{self, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::error::{self, CliError};
use super::signals::Signals;
use super::terminal::FullScreen;
use super::{Context, out, parse, view};
use model::{Effect, Event, Key, Model};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth top
  hearth top --interval 5s
  NO_COLOR=1 hearth --addr node-7:5008 top

Keys: enter inspects, d deletes after a question, / filters, s sorts, tab shows
leftovers, ? helps, q leaves. Sandboxes go on.";

/// Events that wait to be taken in.
const WAITING: usize = 64;
/// How often the input thread looks whether it is to end.
const LOOK: Duration = Duration::from_millis(100);
/// How long it may take to end.
const ENDING: Duration = Duration::from_secs(1);
/// Ages and spans are shown in seconds.
const TICK: Duration = Duration::from_secs(1);

/// Arguments of `hearth top`.
#[derive(Debug, clap::Args)]
pub(super) struct TopArgs {
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse::timeout)]
    interval: u64,
}

/// Runs it until somebody leaves, or a signal comes.
pub(super) async fn run(args: TopArgs, context: &Context) -> Result<u8, CliError> {
    if context.json || !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(CliError::usage("top", "it needs a terminal")
            .todo("use `hearth node status --json` and `hearth ls --json`"));
    }
    let mut signals = Signals::new()?;
    let (events, incoming) = mpsc::channel(WAITING);
    let mut tasks = JoinSet::new();
    let every = Duration::from_secs(args.interval.max(1));
    tasks.spawn(source::run(context.addr.clone(), every, events.clone()));
    let screen = FullScreen::enter()?;
    let input = Input::start(events.clone())?;
    let shown = show(context, incoming, &events, &mut tasks, &mut signals).await;
    // The thread reads the terminal, so it ends before the terminal is given back.
    input.stop();
    drop(screen);
    // A delete that was asked for goes on in the daemon.
    tasks.shutdown().await;
    shown.map(|()| error::OK)
}

/// The loop.
async fn show(
    context: &Context,
    mut incoming: mpsc::Receiver<Event>,
    events: &mpsc::Sender<Event>,
    tasks: &mut JoinSet<()>,
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut terminal = Terminal::new(CrosstermBackend::new(std::io::stdout()))?;
    let mut model = Model::new(context.addr.clone(), out::colour());
    let mut tick = tokio::time::interval(TICK);
    loop {
        let event = tokio::select! {
            Some(event) = incoming.recv() => event,
            _ = tick.tick() => Event::Now(view::now_ms()),
            _ = signals.next() => return Ok(()),
            Some(ended) = tasks.join_next() => match ended {
                // A delete has told what came of it.
                Ok(()) => continue,
                Err(e) => return Err(CliError::failed("top", e.to_string())),
            },
        };
        if matches!(event, Event::Resized) {
            terminal.autoresize()?;
        }
        match model.update(event) {
            Some(Effect::Quit) => return Ok(()),
            Some(Effect::Delete { id, name }) => {
                tasks.spawn(source::delete(context.addr.clone(), id, name, events.clone()));
            }
            None => {}
        }
        terminal.draw(|frame| screen::draw(frame, &model))?;
    }
}

/// The thread that reads the terminal: a read there cannot be awaited.
struct Input {
    ended: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Input {
    fn start(events: mpsc::Sender<Event>) -> Result<Self, CliError> {
        let ended = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ended);
        let read = move || {
            while !told.load(Ordering::Relaxed) {
                // A terminal that cannot be read any more hangs up, which is a signal.
                if !event::poll(LOOK).unwrap_or_default() {
                    continue;
                }
                let read = event::read().map(translate).unwrap_or_default();
                if read.into_iter().any(|event| events.blocking_send(event).is_err()) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("input".into()).spawn(read);
        let thread = thread.map_err(|e| CliError::failed("cannot read the terminal", e.to_string()))?;
        Ok(Self { ended, thread })
    }

    fn stop(self) {
        self.ended.store(true, Ordering::Relaxed);
        let end = Instant::now() + ENDING;
        while !self.thread.is_finished() {
            // The library reads a terminal that hung up for ever; that thread ends with the process, which is next.
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(LOOK / 10);
        }
        // Its panic was told by the hook.
        drop(self.thread.join());
    }
}

/// What of an event of the terminal is anything here.
fn translate(event: event::Event) -> Vec<Event> {
    match event {
        event::Event::Resize(..) => vec![Event::Resized],
        event::Event::Key(key) if key.kind != KeyEventKind::Release => {
            // Escape and a key right after it cannot be told from that key with Alt.
            let escape = key.modifiers.contains(KeyModifiers::ALT).then_some(Key::Escape);
            escape.into_iter().chain(meaning(key)).map(Event::Key).collect()
        }
        _ => vec![],
    }
}

fn meaning(key: KeyEvent) -> Option<Key> {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Char('c' | 'd') if control => Key::Interrupt,
        KeyCode::Char(_) if control => return None,
        KeyCode::Char(c) => Key::Char(c),
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab => Key::Tab,
        KeyCode::Delete => Key::Delete,
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        _ => return None,
    })
}
