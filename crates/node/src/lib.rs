//! The engine: which sandboxes there are, who owns which slot, what to make and what to release and when.
//! Generic over the host, so that all of it runs in tests without root. Reaches the kernel only through
//! `hearth_core::host::Host`.

mod blocking;
mod books;
mod config;
mod engine;
mod error;
mod failpoint;
pub mod images;
mod pool;
mod records;
mod sandbox;
mod shim_client;
mod start;

pub use config::{EngineConfig, Vmms};
pub use engine::{Engine, NewSandbox, Phase};
pub use error::{EngineError, chain};
pub use failpoint::{Action, Failpoints};
pub use sandbox::{StepStarted, View};
pub use shim_client::Client as ShimClient;
