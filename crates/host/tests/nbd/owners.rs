//! Whose a device is: nobody's but its owner's, also when an index came round, an answer was lost, or who connected is gone.

use std::os::fd::OwnedFd;
use std::time::Duration;

use hearth_core::host::ErrorClass;
use hearth_host::nbd::{self, Device, Outcome, Server};

use crate::server::{Manner, TestServer};
use crate::{Attached, BOUND, SIZE, SOON, assert_quiet, nbd_or_skip, order, owner};

#[test]
fn an_index_that_came_round_is_left_to_its_new_owner() {
    if !nbd_or_skip("an_index_that_came_round_is_left_to_its_new_owner") {
        return;
    }
    let (_server, socket) = TestServer::new(SIZE, Manner::Good);
    let first = Attached::new(&order(5), socket);
    // One that is in use is not taken.
    let (_other, socket) = TestServer::new(SIZE, Manner::Good);
    match nbd::connect(&order(5), vec![socket.into()], SOON) {
        Outcome::NotSent(e) => assert_eq!(e.class, ErrorClass::Busy, "{e}"),
        other => panic!("{other:?}"),
    }
    first.release();
    let (_server, socket) = TestServer::new(SIZE, Manner::Good);
    let second = Attached::new(&order(5), socket);
    // A release that comes late, with all it knows and with less.
    for late in [first.device.clone(), Device { task: None, ..first.device.clone() }] {
        nbd::release(&late, &Server::Ended, SOON).unwrap();
        nbd::release(&late, &Server::Shut(&first.sockets), SOON).unwrap();
    }
    // The right owner and another task: not the device that is meant.
    let other_task = Device { task: second.device.task.map(|task| task + 1), ..second.device.clone() };
    nbd::release(&other_task, &Server::Ended, SOON).unwrap();
    assert!(nbd::look(5).unwrap().is_of(&second.device), "another's device was disconnected");
    second.release();
}

#[test]
fn a_device_whose_connecting_task_is_gone_is_still_its_owners() {
    if !nbd_or_skip("a_device_whose_connecting_task_is_gone_is_still_its_owners") {
        return;
    }
    let (server, socket) = TestServer::new(SIZE, Manner::Good);
    let attached = Attached::new(&order(6), socket);
    let task = attached.device.task.unwrap();
    crate::until("the task that connected has ended", || {
        !std::path::Path::new(&format!("/proc/{}/task/{task}", std::process::id())).exists()
    });
    assert_eq!(nbd::look(6).unwrap().task, Some(task));
    // What a daemon does after a restart: it has the record, and the process that served is gone.
    server.die();
    let Attached { device, sockets } = attached;
    drop(sockets);
    nbd::release(&Device { task: None, ..device }, &Server::Ended, BOUND).unwrap();
    assert_quiet(6);
}

#[test]
fn a_lost_acknowledgement_leaks_nothing() {
    if !nbd_or_skip("a_lost_acknowledgement_leaks_nothing") {
        return;
    }
    let mut unknown = 0;
    for wait in 0..20 {
        let (_server, socket) = TestServer::new(SIZE, Manner::Good);
        let socket = OwnedFd::from(socket);
        let kept = [socket.try_clone().unwrap()];
        let order = order(7);
        // The answer comes after the wait for it has ended, at each stage of the work.
        match nbd::connect(&order, vec![socket], Duration::from_millis(wait)) {
            Outcome::Unknown(_) => unknown += 1,
            Outcome::Done(device) => assert_eq!(device.owner, order.device.owner),
            other => panic!("{other:?}"),
        }
        nbd::release(&order.device, &Server::Shut(&kept), SOON).unwrap();
        assert_quiet(7);
        // Nothing comes later: the lock is free, so the thread that asked has ended.
        nbd::release(&Device { owner: owner(), ..order.device }, &Server::Ended, SOON).unwrap();
    }
    assert!(unknown > 0, "no answer was lost");
    assert_quiet(7);
}
