//! Any bytes as operations on an overlay, crashes among them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearth_fuzz::overlay::exercise(&hearth_fuzz::overlay::ops(data)));
