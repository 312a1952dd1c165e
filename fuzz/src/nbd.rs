//! The parser of the NBD server against any bytes: it never panics, never grows beyond its bounds, and does not care how
//! the bytes are cut.

use std::sync::Arc;

use bytes::BytesMut;
use hearth_vmm::block::nbd::{Ask, Chosen, Export, Handshake, Intake, MAX_REQUEST, Progress, Taken};

use crate::fault::{FaultyDisk, Pattern};

const SIZE: u64 = 1 << 20;

fn exports() -> Arc<[Arc<Export>]> {
    [Export::new("disk", Arc::new(FaultyDisk::new(SIZE))), Export::new("base", Arc::new(Pattern(SIZE)))]
        .into()
}

/// Cuts bytes where the first byte says: whole, or in parts of that size.
fn parts(data: &[u8]) -> (impl Iterator<Item = &[u8]>, &[u8]) {
    let (size, rest) = data.split_first().map_or((0, data), |(size, rest)| (usize::from(*size), rest));
    (rest.chunks(if size == 0 { rest.len().max(1) } else { size }), rest)
}

/// A handshake.
///
/// # Panics
/// If the parser does not keep to its bounds, or depends on where the bytes were cut.
pub fn handshake(data: &[u8]) {
    let (cut, whole) = parts(data);
    let (out, how, left) = shake(cut);
    let (expected, expected_how, _) = shake(std::iter::once(whole));
    assert_eq!((&out, &how), (&expected, &expected_how));
    // Each option takes 16 bytes and gets at most so many back.
    assert!(out.len() <= 256 + (whole.len() / 16 + 1) * 4096, "{} bytes for {}", out.len(), whole.len());
    assert!(left <= 65_552, "{left} bytes are kept");
}

fn shake<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (BytesMut, String, usize) {
    let (mut input, mut out) = (BytesMut::new(), BytesMut::new());
    let mut handshake = Handshake::new(exports(), &mut out);
    for part in parts {
        input.extend_from_slice(part);
        match handshake.feed(&mut input, &mut out) {
            Progress::More => {}
            done => return (out, format!("{done:?}"), 0),
        }
    }
    (out, "more".into(), input.len())
}

/// Requests of one connection.
///
/// # Panics
/// As [`handshake`].
pub fn requests(data: &[u8]) {
    let Some((flags, data)) = data.split_first() else { return };
    let exports = exports();
    let chosen = Chosen {
        export: exports[usize::from(flags & 1)].clone(),
        structured: flags & 2 != 0,
        allocation: flags & 6 == 6,
    };
    let writable = flags & 1 == 0;
    let (cut, whole) = parts(data);
    let seen = take(&chosen, cut, writable);
    assert_eq!(seen, take(&chosen, std::iter::once(whole), writable));
}

fn take<'a>(chosen: &Chosen, parts: impl Iterator<Item = &'a [u8]>, writable: bool) -> Vec<String> {
    let mut intake = Intake::new(chosen.clone());
    let (mut input, mut seen) = (BytesMut::new(), vec![]);
    // Room as a connection has it: sometimes little.
    let rooms = [0, 5000, MAX_REQUEST as usize + (1 << 20)];
    for part in parts {
        input.extend_from_slice(part);
        let mut room = 0;
        loop {
            match intake.take(&mut input, rooms[room]) {
                Taken::More => break,
                Taken::NoRoom(cost) => {
                    assert!(cost > rooms[room], "there was room");
                    room += 1;
                }
                Taken::Request { cookie, ask, cost } => {
                    check(&ask, cost, writable);
                    seen.push(format!("{cookie} {ask:?} {cost}"));
                    room = 0;
                }
                refused @ Taken::Refused { .. } => seen.push(format!("{refused:?}")),
                over @ (Taken::Disconnect | Taken::Garbage) => {
                    seen.push(format!("{over:?}"));
                    return seen;
                }
            }
        }
        assert!(input.len() < 28, "what was not taken is less than a request's head");
    }
    seen
}

/// What is let through lies within the disk, is allowed, and is paid for.
fn check(ask: &Ask, cost: usize, writable: bool) {
    let (at, len, writes) = match ask {
        Ask::Read { at, len } => (*at, *len as u64, false),
        Ask::Write { at, data, .. } => (*at, data.len() as u64, true),
        Ask::Trim { at, len, .. } | Ask::Zero { at, len, .. } => (*at, *len, true),
        Ask::Status { at, len, .. } => (*at, *len, false),
        Ask::Flush => (0, 0, false),
    };
    assert!(at.checked_add(len).is_some_and(|end| end <= SIZE), "{ask:?} is outside");
    assert!(writable || !writes, "{ask:?} of a read-only export");
    if matches!(ask, Ask::Read { .. } | Ask::Write { .. }) {
        assert!(cost as u64 >= len, "{ask:?} costs {cost}");
    }
}
