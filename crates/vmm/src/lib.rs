//! One microVM and its data path, as run by the shim: the VMM back ends behind one trait, the console log,
//! the client of the guest agent, and the machine that ties them together.
//!
//! It must not decide when a sandbox is made or removed (that is the node's), must not depend on a daemon
//! being there, and must not touch anything outside the sandbox's two directories.

pub mod agent;
pub mod backend;
pub mod block;
pub mod console;
mod disks;
pub mod end_time;
pub mod exit_record;
mod firecracker;
pub mod machine;
pub mod metrics;
mod plain;
mod qemu;
mod verdict;
