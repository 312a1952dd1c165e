//! The fuzz targets over the corpus and over random input, so that they hold without a fuzzer.

use std::path::Path;

use proptest::prelude::*;

use crate::{nbd, overlay};

/// Runs a target over its corpus.
fn corpus(name: &str, target: impl Fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut count = 0;
    for entry in std::fs::read_dir(&dir).expect("corpus") {
        let path = entry.expect("entry").path();
        target(&std::fs::read(&path).expect("input"));
        count += 1;
    }
    assert!(count > 5, "{} has only {count} inputs", dir.display());
}

#[test]
fn the_corpus_of_handshakes() {
    corpus("handshake", nbd::handshake);
}

#[test]
fn the_corpus_of_requests() {
    corpus("requests", nbd::requests);
}

#[test]
fn the_corpus_of_overlays() {
    corpus("overlay", |data| overlay::exercise(&overlay::ops(data)));
}

/// Frames that are nearly right: what any bytes hardly ever are.
fn option() -> impl Strategy<Value = Vec<u8>> {
    let body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(prop_oneof![Just(0_u8), Just(4), Just(1), Just(b'd')], 0..40),
        Just(b"\0\0\0\x04disk\0\0".to_vec()),
        Just(b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation".to_vec()),
    ];
    (0..12_u32, body, prop::option::weighted(0.1, any::<u32>())).prop_map(|(option, body, wrong)| {
        let mut frame = b"IHAVEOPT".to_vec();
        frame.extend(option.to_be_bytes());
        frame.extend(wrong.unwrap_or(body.len() as u32).to_be_bytes());
        frame.extend(body);
        frame
    })
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    let place = prop_oneof![0..1_100_000_u64, any::<u64>()];
    let len = prop_oneof![0..10_000_u32, any::<u32>()];
    (0..9_u16, 0..32_u16, place, len).prop_map(|(kind, flags, at, len)| {
        let mut frame = 0x2560_9513_u32.to_be_bytes().to_vec();
        frame.extend(flags.to_be_bytes());
        frame.extend(kind.to_be_bytes());
        frame.extend(5_u64.to_be_bytes());
        frame.extend(at.to_be_bytes());
        frame.extend(len.to_be_bytes());
        if kind == 1 {
            frame.extend(vec![7; (len as usize).min(10_000)]);
        }
        frame
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn handshakes_that_are_nearly_right(cut in any::<u8>(), options in prop::collection::vec(option(), 0..8)) {
        let mut data = vec![cut, 0, 0, 0, 3];
        data.extend(options.concat());
        nbd::handshake(&data);
    }

    #[test]
    fn requests_that_are_nearly_right(flags in 0..8_u8, cut in any::<u8>(), all in prop::collection::vec(request(), 0..8)) {
        let mut data = vec![flags, cut];
        data.extend(all.concat());
        nbd::requests(&data);
    }

    #[test]
    fn any_bytes(data in prop::collection::vec(any::<u8>(), 0..500)) {
        nbd::handshake(&data);
        nbd::requests(&data);
        overlay::exercise(&overlay::ops(&data[..data.len().min(60)]));
    }
}
