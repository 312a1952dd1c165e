//! Kernels, templates and writable disks on the local disk.
//!
//! A synchronous library: run its calls on a thread that may wait. It owns `<state>/kernels`,
//! `<state>/templates` and `<state>/tmp` and nothing else. Whatever it makes is built below `tmp` and put in
//! place by a rename, so that a reader sees all of it or nothing. It reads sandbox records only to learn
//! which template is in use.

mod bzimage;
mod cpio;
mod debian;
mod elf;
mod error;
mod ext4;
mod guest_program;
mod job;
mod mem;
mod modules;
mod mounts;
mod program;
mod space;
mod store;
mod tarball;
mod tarscan;
mod tree;
mod uses;

pub mod disk;
pub mod initramfs;
pub mod kernel;
pub mod template;

pub use error::{ErrorClass, ImageError};
pub use guest_program::GuestProgram;
pub use job::{Job, Progress};
pub use store::{Listing, Store};

/// Directory of the state directory with the cached chunks of remote disks. Shims fill it.
pub const CHUNKS: &str = "chunks";
