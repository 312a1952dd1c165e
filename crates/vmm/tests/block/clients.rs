//! The server with the clients that people use. Each test is skipped, and says so, where its program is missing.

use crate::served::{Running, have, pattern, run, try_run};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nbdinfo_sees_size_flags_and_map() {
    if !have("nbdinfo_sees_size_flags_and_map", &["nbdinfo"]) {
        return;
    }
    let server = Running::overlay(3 * MIB as usize, 8 * MIB).await;
    let uri = server.uri();
    let text = run("nbdinfo", &[&uri]).await;
    for line in [
        "export-size: 8388608",
        "is_read_only: false",
        "can_flush: true",
        "can_fua: true",
        "can_trim: true",
        "can_zero: true",
        "can_fast_zero: true",
        "can_df: true",
        "can_multi_conn: true",
        "can_cache: false",
        "base:allocation",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(text.contains(line), "no {line:?} in:\n{text}");
    }
    assert!(text.contains("newstyle-fixed") && text.contains("structured"), "{text}");
    let list = run("nbdinfo", &["--list", &uri.replace("/disk?", "/?")]).await;
    assert!(list.contains("export=\"disk\""), "{list}");
    // Data as far as the base goes, then a hole.
    let map = run("nbdinfo", &["--map", &uri]).await;
    let rows: Vec<Vec<&str>> = map.lines().map(|l| l.split_whitespace().take(3).collect()).collect();
    assert_eq!(rows, [["0", "3145728", "0"], ["3145728", "5242880", "3"]], "{map}");
    let (good, text) = try_run("nbdinfo", &[&uri.replace("/disk?", "/other?")]).await;
    assert!(!good && text.contains("server replied with error"), "{text}");
    assert_eq!(server.end().await.leaked, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nbdcopy_both_ways_with_many_connections() {
    if !have("nbdcopy_both_ways_with_many_connections", &["nbdcopy"]) {
        return;
    }
    for server in [Running::overlay(MIB as usize, 24 * MIB).await, Running::file(24 * MIB)] {
        let (from, to) = (server.dir.path().join("from"), server.dir.path().join("to"));
        let mut image = pattern(24 * MIB as usize);
        // Zeroes in the middle, which are not sent.
        image[5 * MIB as usize..9 * MIB as usize].fill(0);
        std::fs::write(&from, &image).unwrap();
        let (from, to, uri) = (from.to_str().unwrap(), to.to_str().unwrap(), server.uri());
        run("nbdcopy", &["--flush", "--threads=4", "--connections=4", from, &uri]).await;
        run("nbdcopy", &["--threads=4", "--connections=4", &uri, to]).await;
        assert!(std::fs::read(to).unwrap() == image, "what came back differs");
        let served = server.end().await;
        assert!(served.connections >= 8 && served.leaked == 0, "{served:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qemu_img_converts_compares_and_maps() {
    if !have("qemu_img_converts_compares_and_maps", &["qemu-img"]) {
        return;
    }
    let server = Running::overlay(2 * MIB as usize, 16 * MIB).await;
    let source = server.dir.path().join("source");
    let mut image = vec![0; 16 * MIB as usize];
    image[MIB as usize..4 * MIB as usize].copy_from_slice(&pattern(3 * MIB as usize));
    std::fs::write(&source, &image).unwrap();
    let (source, uri) = (source.to_str().unwrap(), server.uri());
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", source, &uri]).await;
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, &uri]).await;
    let copy = server.dir.path().join("copy.qcow2");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, copy.to_str().unwrap()]).await;
    run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", source, copy.to_str().unwrap()]).await;
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).await;
    // The base had data in the first MiB; it was made zeroes, and is told as such.
    assert!(
        map.contains(r#""start": 0, "length": 1048576, "depth": 0, "present": false, "zero": true"#)
            || map.contains(r#""start": 0, "length": 1048576, "depth": 0, "present": true, "zero": true"#),
        "{map}"
    );
    assert_eq!(server.end().await.leaked, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qemu_io_writes_discards_zeroes_flushes_and_verifies() {
    if !have("qemu_io_writes_discards_zeroes_flushes_and_verifies", &["qemu-io"]) {
        return;
    }
    for server in [Running::overlay(0, 8 * MIB).await, Running::file(8 * MIB)] {
        let text = run(
            "qemu-io",
            &[
                "-f",
                "raw",
                "-d",
                "unmap",
                "-c",
                "write -P 0xab 1000 70000",
                "-c",
                "read -P 0xab 1000 70000",
                "-c",
                "read -P 0 0 1000",
                "-c",
                "write -f -P 0xcd 65536 65536",
                "-c",
                "write -z 66000 10",
                "-c",
                "read -P 0 66000 10",
                "-c",
                "read -P 0xcd 66010 1000",
                "-c",
                "write -z -u 65536 8192",
                "-c",
                "read -P 0 65536 8192",
                "-c",
                "discard 4096 8192",
                "-c",
                "read -P 0 4096 8192",
                "-c",
                "aio_write -P 1 1M 1M",
                "-c",
                "aio_write -P 2 3M 1M",
                "-c",
                "aio_flush",
                "-c",
                "read -P 1 1M 1M",
                "-c",
                "read -P 2 3M 1M",
                "-c",
                "flush",
                &server.uri(),
            ],
        )
        .await;
        assert!(!text.contains("failed") && !text.contains("error"), "{text}");
        assert_eq!(server.end().await.leaked, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fio_verifies_random_writes_on_several_connections() {
    let test = "fio_verifies_random_writes_on_several_connections";
    if !have(test, &["fio"]) {
        return;
    }
    if !run("fio", &["--enghelp"]).await.lines().any(|l| l.trim() == "nbd") {
        hearth_testkit::skip(test, "this fio has no nbd engine");
        return;
    }
    for server in [Running::overlay(MIB as usize, 32 * MIB).await, Running::file(32 * MIB)] {
        let uri = format!("--uri={}", server.uri());
        // Trims and partial blocks among the writes, and a flush now and then.
        for more in [&["--bs=4k", "--fsync=50"][..], &["--bsrange=512-64k", "--bs_unaligned"]] {
            let mut args = vec![
                "--ioengine=nbd",
                &uri,
                "--rw=randwrite",
                "--iodepth=16",
                "--size=32M",
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--do_verify=1",
                "--randrepeat=1",
                "--name=verify",
                "--minimal",
            ];
            args.extend(more);
            run("fio", &args).await;
        }
        assert_eq!(server.end().await.leaked, 0);
    }
}
