//! Any bytes as requests of an NBD client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| hearth_fuzz::nbd::requests(data));
