//! Tests of `tarscan.rs`: archives built entry by entry, whole, hostile, cut and damaged.

use std::sync::atomic::AtomicBool;

use super::*;

struct Entry<'a>(EntryType, &'a str, &'a str, &'a [u8]);

fn raw_entry(kind: EntryType, name: &[u8], link: &[u8], size: u64, data: &[u8]) -> Vec<u8> {
    let mut h = Header::new_gnu();
    h.set_entry_type(kind);
    h.set_mode(0o644);
    h.set_size(size);
    h.set_uid(0);
    h.set_gid(0);
    h.set_mtime(0);
    let old = h.as_old_mut();
    old.name[..name.len()].copy_from_slice(name);
    old.linkname[..link.len()].copy_from_slice(link);
    h.set_cksum();
    let mut out = h.as_bytes().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn entries(list: &[Entry<'_>]) -> Vec<u8> {
    list.iter()
        .flat_map(|Entry(kind, name, link, data)| {
            raw_entry(*kind, name.as_bytes(), link.as_bytes(), data.len() as u64, data)
        })
        .collect()
}

fn archive(list: &[Entry<'_>]) -> Vec<u8> {
    let mut out = entries(list);
    out.extend_from_slice(&[0; 1024]);
    out
}

fn run(data: &[u8]) -> Result<Summary, Fault> {
    scan(data, &Job::quiet(&AtomicBool::new(false)))
}

fn refused(list: &[Entry<'_>], entry: &str, why: &str) {
    match run(&archive(list)) {
        Err(Fault::Bad { entry: Some(e), why: w }) if e == entry && w.contains(why) => {}
        other => panic!("{entry}: {other:?}"),
    }
}

use EntryType::{Directory, Link, Regular, Symlink};

#[test]
fn an_ordinary_archive_passes() {
    let list = [
        Entry(Directory, "./", "", b""),
        Entry(Directory, "./etc/", "", b""),
        Entry(Regular, "etc/a", "", &[7; 5000]),
        Entry(Link, "etc/b", "etc/a", b""),
        Entry(Symlink, "etc/alternatives", "/usr/bin/x", b""),
        Entry(Symlink, "lib", "usr/lib", b""),
        Entry(Regular, "lib/c", "", b"x"),
        Entry(Link, "lib/d", "usr/lib/c", b""),
        Entry(Symlink, "usr/lib64", "../lib", b""),
        Entry(Regular, "usr/lib64/e", "", b"x"),
        Entry(EntryType::Char, "dev/null", "", b""),
    ];
    assert_eq!(run(&archive(&list)).unwrap(), Summary { entries: 11, bytes: 8192 + 4096 + 4096 });
}

#[test]
fn names_that_lead_out_are_refused() {
    refused(&[Entry(Regular, "/etc/passwd", "", b"")], "/etc/passwd", "absolute");
    refused(&[Entry(Regular, "a/../../x", "", b"")], "a/../../x", "'..'");
    refused(&[Entry(Directory, "..", "", b"")], "..", "'..'");
    refused(&[Entry(Link, "x", "/etc/passwd", b"")], "x", "absolute");
    refused(&[Entry(Link, "x", "../x", b"")], "x", "'..'");
    refused(&[Entry(Link, "x", "y", b"")], "x", "no entry before");
    let through = |target| [Entry(Symlink, "d", target, b""), Entry(Regular, "d/x", "", b"")];
    refused(&through("/etc"), "d/x", "symbolic link to \"/etc\"");
    refused(&through("../etc"), "d/x", "leads out");
    refused(&through("d"), "d/x", "goes through");
    refused(
        &[Entry(Symlink, "a", "b", b""), Entry(Symlink, "b", "/etc", b""), Entry(Regular, "a/x", "", b"")],
        "a/x",
        "symbolic link to \"/etc\"",
    );
    refused(
        &[Entry(Regular, "f", "", b""), Entry(Symlink, "a", "/", b""), Entry(Link, "x", "a/etc/passwd", b"")],
        "x",
        "goes through",
    );
    refused(&[Entry(Link, "x", "y", b"data")], "x", "4 bytes of data");
    refused(&[Entry(EntryType::new(b'M'), "x", "", b"")], "x", "not supported");
    refused(&[Entry(Regular, "", "", b"")], "", "no name");
}

#[test]
fn long_names_count_too() {
    let ext = |kind: u8, data: &[u8]| raw_entry(EntryType::new(kind), b"h", b"", data.len() as u64, data);
    let end = |mut parts: Vec<u8>| {
        parts.extend(archive(&[Entry(Regular, "innocent", "", b"")]));
        parts
    };
    let why = |data: &[u8]| match run(data) {
        Err(Fault::Bad { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(&end(ext(b'L', b"/abs\0"))).contains("absolute"));
    assert!(why(&end(ext(b'x', b"11 path=..\n"))).contains("'..'"));
    assert!(why(&end(ext(b'x', b"22 GNU.sparse.name=/x\n"))).contains("absolute"));
    assert!(why(&end(ext(b'g', b"9 path=a\n"))).contains("global"));
    assert!(why(&end(ext(b'x', b"99 path=a\n"))).contains("pax header is damaged"));
    assert!(why(&end(ext(b'x', b"1 "))).contains("pax header is damaged"));
    assert!(why(&end(ext(b'x', b"9 size=x\n"))).contains("size cannot be read"));
    // Attribute values may hold newlines.
    let xattr = b"30 SCHILY.xattr.user.k=a\n1 b=\n";
    assert_eq!(xattr.len(), 30);
    assert!(run(&end(ext(b'x', xattr))).is_ok());
    let huge = raw_entry(EntryType::new(b'L'), b"h", b"", 1 << 40, b"");
    assert!(why(&end(huge)).contains("bytes"));
}

#[test]
fn the_name_of_a_sparse_file_is_the_one_that_counts() {
    let ext = |data: &[u8]| raw_entry(EntryType::XHeader, b"h", b"", data.len() as u64, data);
    let through = |records: &[u8]| {
        let mut all = entries(&[Entry(Symlink, "d", "/etc", b"")]);
        all.extend(ext(records));
        all.extend(archive(&[Entry(Regular, "innocent", "", b"")]));
        run(&all)
    };
    for records in [&b"23 GNU.sparse.name=d/x\n"[..], b"23 GNU.sparse.name=d/x\n10 path=a\n"] {
        match through(records) {
            Err(Fault::Bad { entry: Some(e), why }) if e == "d/x" && why.contains("goes through") => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(through(b"23 GNU.sparse.name=e/x\n").is_ok());
}

#[test]
fn what_gnu_tar_would_read_otherwise_is_refused() {
    let ext = |data: &[u8]| raw_entry(EntryType::XHeader, b"h", b"", data.len() as u64, data);
    let why = |headers: &[&[u8]], entry: EntryType| {
        let mut all: Vec<u8> = headers.iter().flat_map(|h| ext(h)).collect();
        all.extend(archive(&[Entry(entry, "innocent", "x", b"")]));
        match run(&all) {
            Err(Fault::Bad { why, .. }) => why,
            other => panic!("{other:?}"),
        }
    };
    assert!(why(&[b"10 path=a\n", b"11 mtime=1\n"], Regular).contains("two pax headers"));
    assert!(why(&[b"12 path=a\0b\n"], Regular).contains("zero byte"));
    assert!(why(&[b"16 linkpath=a\0b\n"], Symlink).contains("zero byte"));
    assert!(why(&[b"11 size=+0\n"], Regular).contains("size cannot be read"));
}

/// The version of a ustar header is read by nobody but the tar crate.
#[test]
fn the_prefix_of_any_ustar_header_counts() {
    for (version, magic, name) in [
        (b"00", b"ustar\0", "d/x"),
        (b"  ", b"ustar\0", "d/x"),
        (b"\0\0", b"ustar\0", "d/x"),
        (b" \0", b"ustar ", "x"),
    ] {
        let mut entry = raw_entry(Regular, b"x", b"", 0, b"");
        entry[257..263].copy_from_slice(magic);
        entry[263..265].copy_from_slice(version);
        entry[345..500].fill(0);
        entry[345] = b'd';
        let sum = checksum(entry[..512].try_into().unwrap());
        entry[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        entry.extend([0; 1024]);
        assert_eq!(header_name(entry[..512].try_into().unwrap()), name.as_bytes(), "{version:?}");
        let mut all = entries(&[Entry(Symlink, "d", "/etc", b"")]);
        all.extend(&entry);
        assert_eq!(run(&all).is_err(), name == "d/x", "{version:?}");
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.tar");
        std::fs::write(&file, &entry).unwrap();
        let Ok(out) = std::process::Command::new("tar").arg("-tf").arg(&file).output() else {
            hearth_testkit::skip("the_prefix_of_any_ustar_header_counts", "no tar program to compare with");
            return;
        };
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), name, "GNU tar reads it so");
    }
}

#[test]
fn cut_archives_are_truncated_ones() {
    let list = [Entry(Regular, "a", "", &[1; 700]), Entry(Directory, "d", "", b"")];
    let whole = archive(&list);
    let without_end = entries(&list).len();
    for len in 0..=without_end {
        match run(&whole[..len]) {
            Err(Fault::Bad { why, .. }) if why.contains("truncated") => {}
            other => panic!("{len} bytes: {other:?}"),
        }
    }
    assert!(run(&whole).is_ok());
    let packed = zstd::encode_all(&whole[..], 1).unwrap();
    let cut = super::super::mem::decoder(&packed[..packed.len() - 3]).unwrap();
    assert!(scan(cut, &Job::quiet(&AtomicBool::new(false))).is_err());
}

#[test]
fn other_files_and_damage_are_refused_without_a_panic() {
    let why = |data: &[u8]| match run(data) {
        Err(Fault::Bad { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(&[b'x'; 4096]).contains("not a tar archive"));
    assert!(why(&[0; 4096]).contains("empty"));
    let impossible = raw_entry(Regular, b"big", b"", u64::MAX >> 2, b"x");
    assert!(why(&impossible).contains("truncated"));
    let mut damaged = archive(&[Entry(Regular, "a", "", b""), Entry(Regular, "b", "", b"")]);
    damaged[520] ^= 1;
    assert!(why(&damaged).contains("damaged after entry \"a\""));
    let good = archive(&[Entry(Regular, "a", "", b"x"), Entry(EntryType::GNUSparse, "s", "", b"")]);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0xff;
        let block = at / 512 * 512;
        if block != 512 {
            // With a right checksum the damage gets past the first check.
            let fresh = checksum(bad[block..block + 512].try_into().unwrap());
            bad[block + 148..block + 156].copy_from_slice(format!("{fresh:06o}\0 ").as_bytes());
        }
        drop(run(&bad));
    }
}
