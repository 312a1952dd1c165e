//! Tests of `bzimage.rs`: every payload format made here, whole, cut and damaged.

use std::io::Write;
use std::sync::atomic::AtomicBool;

use super::super::elf::tests::kernel_elf;
use super::*;

fn bzimage(payload: &[u8], size: Option<usize>) -> Vec<u8> {
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
    image[0x300..0x30f].copy_from_slice(b"6.1.0-test (me)");
    let mut payload = payload.to_vec();
    if let Some(size) = size {
        payload.extend_from_slice(&u32::try_from(size).unwrap().to_le_bytes());
    }
    image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend_from_slice(&[0xcc; 16]);
    image.extend_from_slice(&payload);
    image.extend_from_slice(&[0; 32]);
    image
}

fn sample() -> Vec<u8> {
    let body: Vec<u8> = (0..5_000_u32).flat_map(|i| (i * i).to_le_bytes()).collect();
    kernel_elf(&body)
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    w.write_all(data).unwrap();
    w.finish().unwrap()
}

/// As the kernel's build does it: x86 filter, lzma2, crc32.
fn xz_bcj(data: &[u8]) -> Vec<u8> {
    use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
    let mut filters = Filters::new();
    filters.x86();
    filters.lzma2(&LzmaOptions::new_preset(1).unwrap());
    let stream = Stream::new_stream_encoder(&filters, Check::Crc32).unwrap();
    let mut out = Vec::new();
    liblzma::read::XzEncoder::new_stream(data, stream).read_to_end(&mut out).unwrap();
    out
}

fn lzma(data: &[u8]) -> Vec<u8> {
    use liblzma::stream::{LzmaOptions, Stream};
    let stream = Stream::new_lzma_encoder(&LzmaOptions::new_preset(1).unwrap()).unwrap();
    let mut out = Vec::new();
    liblzma::read::XzEncoder::new_stream(data, stream).read_to_end(&mut out).unwrap();
    out
}

fn lz4(data: &[u8]) -> Vec<u8> {
    let mut out = LZ4_LEGACY.to_le_bytes().to_vec();
    for chunk in data.chunks(LZ4_BLOCK) {
        let block = lz4_flex::block::compress(chunk);
        out.extend_from_slice(&u32::try_from(block.len()).unwrap().to_le_bytes());
        out.extend_from_slice(&block);
    }
    out
}

fn images(elf: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let size = Some(elf.len());
    vec![
        ("gzip", bzimage(&gzip(elf), None)),
        ("xz", bzimage(&xz_bcj(elf), size)),
        ("lzma", bzimage(&lzma(elf), size)),
        ("lz4", bzimage(&lz4(elf), size)),
        ("zstd", bzimage(&zstd::encode_all(elf, 1).unwrap(), size)),
    ]
}

#[test]
fn every_format_gives_the_elf_back() {
    let stop = AtomicBool::new(false);
    let elf = sample();
    for (name, image) in images(&elf) {
        assert!(is_bzimage(&image));
        assert_eq!(release(&image).as_deref(), Some("6.1.0-test"));
        assert!(extract(&image, &Job::quiet(&stop)).unwrap() == elf, "{name} differs");
    }
    // More than one lz4 block.
    let big = kernel_elf(&vec![7; LZ4_BLOCK + 5]);
    let image = bzimage(&lz4(&big), Some(big.len()));
    assert!(extract(&image, &Job::quiet(&stop)).unwrap() == big);
}

#[test]
fn cut_and_damaged_images_are_refused() {
    let stop = AtomicBool::new(false);
    let elf = sample();
    for (name, image) in images(&elf) {
        for len in (0..image.len() - 32).step_by(97) {
            let cut = &image[..len];
            assert!(
                !is_bzimage(cut) || extract(cut, &Job::quiet(&stop)).is_err(),
                "{name}: {len} bytes taken"
            );
            release(cut);
        }
        // Whatever byte is damaged, nothing panics and nothing large is allocated.
        for at in (0x1f0..0x260).chain((1040..image.len()).step_by(149)) {
            let mut bad = image.clone();
            bad[at] ^= 0xff;
            drop(extract(&bad, &Job::quiet(&stop)));
            release(&bad);
        }
    }
}

#[test]
fn reasons_are_clear() {
    let stop = AtomicBool::new(false);
    let why = |image: &[u8]| match extract(image, &Job::quiet(&stop)) {
        Err(Fault::Bad(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(&bzimage(b"BZh91AY", Some(9))).contains("bzip2"));
    assert!(why(&bzimage(b"what is this", Some(9))).contains("no known compression"));
    assert!(why(&bzimage(&[0x1f, 0x8b, 1, 1, 1, 255, 255, 255, 255], None)).contains("claims"));
    let elf = sample();
    assert!(why(&bzimage(&lz4(&elf), Some(elf.len() - 1))).contains("more than it says"));
    assert!(why(&bzimage(&lz4(&elf), Some(elf.len() + 1))).contains("should have"));
    let mut old = bzimage(&lz4(&elf), Some(elf.len()));
    old[0x206] = 5;
    old[0x207] = 2;
    assert!(why(&old).contains("2.08"));
}

#[test]
fn stop_ends_it() {
    let stop = AtomicBool::new(true);
    let image = bzimage(&lz4(&sample()), Some(sample().len()));
    assert!(matches!(extract(&image, &Job::quiet(&stop)), Err(Fault::Stopped)));
}
