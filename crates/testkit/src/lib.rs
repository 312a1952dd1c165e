//! What tests of hearth need and no release contains: a fake [`Host`](hearth_core::host::Host), the suite
//! that holds for the fake and the kernel alike, a check that nothing was left behind, and throwaway
//! network namespaces.
//!
//! Depends on `core` only, and reaches the kernel through std and programs, never by system calls of its own.

pub mod clean_slate;
pub mod conformance;
pub mod fake_host;
mod fake_process;
pub mod faults;
pub mod matrix;
pub mod netns;
mod report;
mod skip;

pub use fake_host::FakeHost;
pub use report::report;
pub use skip::skip;
