//! Servers that stop answering, with I/O in flight: the device goes in bounded time, and with it every task that hangs in it.

use std::time::{Duration, Instant};

use hearth_core::host::ErrorClass;
use hearth_host::nbd::{self, Order, Server, Timeouts};

use crate::server::{Manner, TestServer};
use crate::{Attached, BOUND, SIZE, assert_quiet, dd, end, nbd_or_skip, order, until, until_in_d};

#[test]
fn a_device_holds_what_was_written_and_is_not_let_go_while_it_is_open() {
    if !nbd_or_skip("a_device_holds_what_was_written_and_is_not_let_go_while_it_is_open") {
        return;
    }
    let (_server, socket) = TestServer::new(SIZE, Manner::Good);
    let attached = Attached::new(&order(0), socket);
    let seen = nbd::look(0).unwrap();
    assert!(seen.is_of(&attached.device) && seen.size == SIZE, "{seen}");
    let path = attached.path();
    let data: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 7) as u8).collect();
    std::fs::write(&path, &data).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    file.sync_all().unwrap();
    let mut back = vec![0; data.len()];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut back, 0).unwrap();
    assert!(back == data, "the device does not hold what was written");
    // An index that somebody has open is not quiet, however well it was disconnected.
    let short = Duration::from_millis(300);
    let error = nbd::release(&attached.device, &Server::Shut(&attached.sockets), short).unwrap_err();
    assert_eq!(error.class, ErrorClass::Busy, "{error}");
    drop(file);
    attached.release();
    attached.release();
}

#[test]
fn a_server_that_never_answers_holds_nobody() {
    if !nbd_or_skip("a_server_that_never_answers_holds_nobody") {
        return;
    }
    let (_server, socket) = TestServer::new(SIZE, Manner::Mute);
    let attached = Attached::new(&order(1), socket);
    let mut reader =
        dd(&[&format!("if={}", attached.path()), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]);
    until_in_d(&reader);
    // Killed as a VMM would be: it cannot go yet.
    reader.kill().unwrap();
    let began = Instant::now();
    attached.release();
    assert!(!end(&mut reader, BOUND.saturating_sub(began.elapsed())).success());
}

#[test]
fn a_full_socket_harms_neither_the_host_nor_the_release() {
    if !nbd_or_skip("a_full_socket_harms_neither_the_host_nor_the_release") {
        return;
    }
    let (server, socket) = TestServer::new(SIZE, Manner::Good);
    let attached = Attached::new(&order(2), socket);
    // The first opener looks for partitions, which must be answered.
    drop(std::fs::File::open(attached.path()).unwrap());
    server.be(Manner::Stopped);
    let mut writer =
        dd(&["if=/dev/zero", &format!("of={}", attached.path()), "bs=32M", "count=1", "oflag=direct"]);
    until_in_d(&writer);
    until("requests are in flight", || nbd::look(2).unwrap().in_flight > 0);
    writer.kill().unwrap();
    // Another caller of generic netlink, at the same time.
    let began = Instant::now();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let (_server, socket) = TestServer::new(SIZE, Manner::Good);
            let other = Attached::new(&order(3), socket);
            let took = began.elapsed();
            other.release();
            took
        });
        attached.release();
        assert!(other.join().unwrap() <= BOUND, "another caller was held up");
    });
    end(&mut writer, BOUND.saturating_sub(began.elapsed()));
    assert_quiet(3);
}

#[test]
fn a_request_in_flight_ends_when_its_server_dies() {
    if !nbd_or_skip("a_request_in_flight_ends_when_its_server_dies") {
        return;
    }
    let request = Duration::from_secs(3);
    let timeouts = Timeouts { request, ..order(4).timeouts };
    let (server, socket) = TestServer::new(SIZE, Manner::Good);
    let attached = Attached::new(&Order { timeouts, ..order(4) }, socket);
    drop(std::fs::File::open(attached.path()).unwrap());
    server.be(Manner::Mute);
    let mut reader =
        dd(&[&format!("if={}", attached.path()), "of=/dev/null", "bs=4k", "count=1", "iflag=direct"]);
    until("the request is in flight", || nbd::look(4).unwrap().in_flight > 0);
    server.die();
    // dd tells an error of its input by 1.
    // The kernel's timer counts whole seconds, then comes the wait for another connection; and one for dd to end.
    let within = request + timeouts.dead_connection + Duration::from_secs(2);
    let status = end(&mut reader, within);
    assert_eq!(status.code(), Some(1), "{status}");
    attached.release();
}
