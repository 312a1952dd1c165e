//! The exit decides: VMMs that are killed at any moment, many of them with a flush in flight, and not a word about it;
//! VMMs that live and give no metrics, and one word about that. The VMM is a double, a process of this program that
//! serves Firecracker's API on a real socket, or a real Firecracker where there is one.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod double;
mod ear;
mod kills;
mod living;

/// Held by each test that has VMMs: descriptors are counted for the whole process.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
