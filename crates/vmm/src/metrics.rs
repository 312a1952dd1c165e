//! What a sandbox uses, sampled by its shim: [`flusher`] decides when the VMM is asked and when its silence is a
//! fault, [`fifo`] reads what a VMM writes into its metrics FIFO, [`meter`] adds what the host's kernel counts.
//!
//! Nothing here asks a VMM by itself: the machine's owner does, between its other work, so that a flush never meets
//! a pause or a snapshot and is never begun after the exit.

pub mod fifo;
pub mod flusher;
pub mod line;
pub(crate) mod meter;
