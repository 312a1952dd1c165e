//! The image store end to end on a real disk: kernels, templates, disks, bad input, crashes.
#![allow(clippy::unwrap_used, reason = "helpers of tests; a panic is the report")]

#[path = "images_store/bad_input.rs"]
mod bad_input;
#[path = "images_store/common.rs"]
mod common;
#[path = "images_store/kernels.rs"]
mod kernels;
#[path = "images_store/life.rs"]
mod life;
#[path = "images_store/templates.rs"]
mod templates;
