//! The only crate that reaches the host kernel. One kind of resource per file, each with the verbs `census`,
//! `ensure` and `release`; [`kernel_host::KernelHost`] puts them together as the engine's
//! [`Host`](hearth_core::host::Host).
//!
//! It must not decide: what to make, adopt or remove is the engine's business. It must not touch a thing
//! that is not proven ours (law 3).
#![allow(unsafe_code, reason = "this crate is where the system calls are; each block says why it is sound")]

pub mod backup;
pub mod cgroup;
pub mod directory;
mod error;
pub mod facts;
pub mod fifo;
pub mod kernel_host;
pub mod kmsg;
pub mod limits;
pub mod lock;
pub mod mount;
pub mod mountinfo;
pub mod nbd;
pub mod net;
pub mod positional;
pub mod process;
mod program;
pub mod reclaim;
pub mod sparse;
pub mod survey;
pub mod test_support;
pub mod usage;
