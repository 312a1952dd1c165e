//! Types and decisions of hearth. No I/O, no clock, no unsafe: everything here is a value that can be
//! printed, compared and tested without a kernel.

pub mod agent;
pub mod backup;
pub mod block;
pub mod doctor;
pub mod event;
pub mod exit;
pub mod failpoint;
pub mod host;
pub mod id;
pub mod image;
pub mod layout;
pub mod lifecycle;
pub mod nbd_pool;
pub mod network;
pub mod plan;
pub mod process;
pub mod reclaim_plan;
pub mod reconcile;
pub mod record;
pub mod resource;
pub mod shim;
pub mod spec;
pub mod steps;
pub mod stuck;
pub mod usage;
