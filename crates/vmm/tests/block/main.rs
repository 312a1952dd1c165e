//! The block server and the overlay, from outside. What a fuzzer would be given lies in `fuzz/` and is run here over the
//! corpus and over random input.

#![allow(unreachable_pub, missing_docs, reason = "the fuzz crate's modules are public there")]

#[path = "../../../../fuzz/src/fault.rs"]
mod fault;
#[path = "../../../../fuzz/src/nbd.rs"]
mod nbd;
#[path = "../../../../fuzz/src/overlay.rs"]
mod overlay;

mod attack;
mod clients;
mod fuse;
mod overlay_properties;
mod parser;
mod remote;
mod remote_clients;
mod served;
mod store;
mod stuck;
