//! The engine: which sandboxes there are, who owns which slot, what to make and what to release and when.
//! Generic over the host, so that all of it runs in tests without root. Reaches the kernel only through
//! `hearth_core::host::Host`.

mod blocking;
mod books;
mod config;
mod disk_sums;
mod engine;
mod error;
pub mod events;
mod exits;
mod failpoint;
pub mod images;
mod meters;
mod nbds;
mod pool;
mod reclaim;
mod reconcile;
mod records;
mod sandbox;
mod shim_client;
mod start;
mod status;
mod stop;
pub mod trace;
mod usage;

pub use books::BooksNow;
pub use config::{EngineConfig, FirecrackerDisk, Reclaim, ReclaimMode, Reconcile, ReconcileAction, Vmms};
pub use engine::{Engine, NewSandbox, Phase};
pub use error::{EngineError, chain};
pub use events::{Events, JournalConfig};
pub use exits::KeepExits;
pub use failpoint::{Faults, Kill9};
pub use hearth_core::failpoint::Failpoints;
pub use meters::Meters;
pub use reclaim::{KindProgress, Looked, ReclaimProgress, ReclaimState};
pub use reconcile::{Found, Outcome, Pass, PassResult, ReconcileReport};
pub use records::{Loaded, Records};
pub use sandbox::{StepStarted, View};
pub use shim_client::Client as ShimClient;
pub use status::{Ask, Desired, Status, shown};
pub use stop::Work;
