//! End to end: the real binary, real namespaces, real guests. Each test plays a host of its own: a network
//! namespace with a daemon inside, an instance name, addresses and directories nobody else has. Needs root
//! and, for guests, `HEARTH_TEST_STATE`: a state directory with the kernel `default` and the templates
//! `busybox` and `base`, as `scripts/test` prepares it.
#![allow(clippy::unwrap_used, unreachable_pub, missing_docs)]

mod adopt;
mod backup;
mod bad_input;
mod clean;
mod collisions;
mod devices;
mod dirty;
mod disks;
mod doctor;
mod drain;
mod events;
mod exits;
mod firecracker;
mod guest;
mod http;
mod https;
mod layout;
mod matrix;
mod metrics;
mod mounts;
mod net;
mod node;
mod planted;
mod probe;
mod reclaim;
mod reconcile;
mod remote;
mod restart;
mod running;
mod stats;
mod status;
#[allow(dead_code, reason = "the block server's tests use the rest of it")]
#[path = "../../../vmm/tests/block/store.rs"]
mod store;
mod supervisor;
mod takeover;
mod telemetry;
mod top;
mod traps;
mod webhook;
