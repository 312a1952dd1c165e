//! Hears what the machine says: all of it on one thread, so that a life knows its own words.

use std::cell::Cell;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

tokio::task_local! {
    /// The life whose owner is being polled.
    pub static LIFE: Rc<Life>;
}

/// What is known of one life beside the machine.
#[derive(Debug, Default)]
pub struct Life {
    /// The kernel says that the VMM ended.
    pub dead: Cell<bool>,
    /// Requests begun.
    pub begun: Cell<u32>,
    /// Requests begun though `dead`.
    pub begun_after: Cell<u32>,
}

/// Everything said on this thread.
#[derive(Debug, Clone, Default)]
pub struct Said {
    /// Warnings and errors, in words.
    pub loud: Arc<Mutex<Vec<String>>>,
    /// Times that a VMM was said to give metrics again.
    pub recovered: Arc<AtomicU32>,
    /// Flushes that failed after the fault was told.
    pub again: Arc<AtomicU32>,
}

impl Said {
    pub fn loud(&self) -> Vec<String> {
        self.loud.lock().unwrap().clone()
    }
}

/// Listens on this thread until the guard is dropped.
pub fn listen() -> (Said, tracing::subscriber::DefaultGuard) {
    let said = Said::default();
    let guard = tracing::subscriber::set_default(Registry::default().with(said.clone()));
    (said, guard)
}

impl<S: Subscriber> Layer<S> for Said {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut words = Words::default();
        event.record(&mut words);
        if *event.metadata().level() <= Level::WARN {
            self.loud.lock().unwrap().push(words.0.clone());
        }
        if words.0.contains("gives metrics again") {
            self.recovered.fetch_add(1, Ordering::Relaxed);
        }
        if words.0.contains("metrics, again") {
            self.again.fetch_add(1, Ordering::Relaxed);
        }
        if words.0.contains("flush begins") {
            // Outside of a life nobody counts.
            LIFE.try_with(|life| {
                life.begun.set(life.begun.get() + 1);
                if life.dead.get() {
                    life.begun_after.set(life.begun_after.get() + 1);
                }
            })
            .ok();
        }
    }
}

#[derive(Default)]
struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}
