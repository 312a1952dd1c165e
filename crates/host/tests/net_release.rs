//! The release of many slots by one call: each is told of once, whatever holds some of them.

#![allow(clippy::unwrap_used)]

mod net_support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hearth_core::host::{ErrorClass, HostError, Pace, SlotRelease};
use hearth_core::network::SlotIndex;
use hearth_core::resource::Resource;
use hearth_host::net::{netns, slot as slots, veth};
use net_support::{Lab, complete, inside, ip, on_a_host, open_tap, slot};

const SIGKILL: i32 = 9;

/// How one call goes, for tests that vary a part of it.
struct Call {
    within: Duration,
    grace: Duration,
    spared: BTreeSet<String>,
    own: BTreeMap<u32, String>,
    batch: usize,
}

impl Default for Call {
    fn default() -> Self {
        Self {
            within: Duration::from_secs(20),
            grace: Duration::from_secs(20),
            spared: BTreeSet::new(),
            own: BTreeMap::new(),
            batch: 16,
        }
    }
}

impl Call {
    fn release(&self, lab: &Lab, numbers: &[u32]) -> BTreeMap<SlotIndex, Result<(), HostError>> {
        let pace = || Pace::AtMost(self.batch);
        let order = SlotRelease { within: self.within, grace: self.grace, spared: &self.spared, pace: &pace };
        let mut seen = BTreeMap::new();
        let list: Vec<SlotIndex> = numbers.iter().map(|n| slot(*n)).collect();
        slots::release(&lab.layout, &list, &order, &|| Ok(self.own.clone()), &mut |slot, result| {
            assert!(seen.insert(slot, result).is_none(), "slot {slot} was told of twice");
        });
        seen
    }
}

fn start_inside(lab: &Lab, n: u32, script: &str) -> Child {
    inside(&lab.in_slot(n), || Command::new("sh").args(["-c", script]).spawn().unwrap())
}

/// Waits until the script has said that it is ready.
fn await_file(path: &str) {
    for _ in 0..2000 {
        if fs::exists(path).unwrap() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("{path} does not appear");
}

#[test]
fn many_go_at_once_half_made_ones_too() {
    on_a_host("many_go_at_once_half_made_ones_too", |lab| {
        for n in 1..=60 {
            // Every prefix of the steps, and whole ones.
            for part in &Resource::of_slot(slot(n))[..(n as usize % 5)] {
                lab.ensure_part(part).unwrap();
            }
        }
        fs::write(netns::path(&lab.layout, slot(61)), "").unwrap();
        // Lowered or without its address: nothing of that is needed.
        ip("link set hth4 down");
        ip("addr flush dev hth9");
        let all: Vec<u32> = (1..=61).collect();
        let seen = Call::default().release(lab, &all);
        assert_eq!(seen.len(), 61);
        for (slot, result) in seen {
            result.unwrap_or_else(|e| panic!("{slot}: {e}"));
        }
        assert!(lab.census().is_empty());
        assert_eq!(fs::read_dir("/run/netns").unwrap().count(), 0);
        // Gone already is success.
        assert!(Call::default().release(lab, &all).values().all(Result::is_ok));
    });
}

#[test]
fn what_is_foreign_stays_as_it_is_and_stops_nobody() {
    on_a_host("what_is_foreign_stays_as_it_is_and_stops_nobody", |lab| {
        for n in 1..=6 {
            lab.ensure(n);
        }
        let mut stranger = start_inside(lab, 3, "exec sleep 60");
        fs::write(netns::path(&lab.layout, slot(7)), "not ours").unwrap();
        let before = ip("-o addr show dev hth3");
        let seen = Call::default().release(lab, &[1, 2, 3, 4, 5, 6, 7]);
        for n in [1, 2, 4, 5, 6] {
            seen[&slot(n)].as_ref().unwrap();
        }
        let held = seen[&slot(3)].as_ref().unwrap_err();
        assert_eq!(held.class, ErrorClass::Foreign, "{held}");
        let named = format!("process {} (sleep)", stranger.id());
        assert!(held.to_string().contains(&named), "{held}");
        assert_eq!(seen[&slot(7)].as_ref().unwrap_err().class, ErrorClass::Foreign);
        assert_eq!(before, ip("-o addr show dev hth3"), "a slot that is not to be touched was");
        assert!(stranger.try_wait().unwrap().is_none(), "the stranger's process was ended");
        assert_eq!(fs::read(netns::path(&lab.layout, slot(7))).unwrap(), b"not ours");
        // It leaves, and the slot can go.
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        Call::default().release(lab, &[3])[&slot(3)].as_ref().unwrap();
        assert!(lab.census().is_empty());
    });
}

#[test]
fn processes_of_ours_are_asked_and_then_killed() {
    on_a_host("processes_of_ours_are_asked_and_then_killed", |lab| {
        for n in 1..=4 {
            lab.ensure(n);
        }
        // Builtins only, from when it says it is ready: a child that is just ending would be a stranger in there.
        let script = |on_term: &str, n: u32| {
            format!("trap '{on_term}' TERM; mkfifo /run/f{n}; exec 3>/run/ready{n}; read x </run/f{n}")
        };
        let polite = start_inside(lab, 1, &script("exec 3>/run/asked; exit", 1));
        let stubborn = start_inside(lab, 2, &script("", 2));
        await_file("/run/ready1");
        await_file("/run/ready2");
        let mut spared = start_inside(lab, 3, "exec sleep 60");
        let call = Call {
            grace: Duration::from_millis(300),
            spared: ["ownedxxxxxxxxxxx".to_owned()].into(),
            own: [
                (&polite, "leakedxxxxxxxxxx"),
                (&stubborn, "leakedxxxxxxxxxx"),
                (&spared, "ownedxxxxxxxxxxx"),
            ]
            .map(|(child, cgroup)| (child.id(), cgroup.to_owned()))
            .into(),
            ..Call::default()
        };
        let seen = call.release(lab, &[1, 2, 3, 4]);
        for n in [1, 2, 4] {
            seen[&slot(n)].as_ref().unwrap_or_else(|e| panic!("{n}: {e}"));
        }
        assert!(fs::exists("/run/asked").unwrap(), "it was killed without being asked");
        for mut child in [polite, stubborn] {
            assert!(child.wait().is_err(), "a child of the releasing process stayed a zombie");
        }
        let third = seen[&slot(3)].as_ref().unwrap_err();
        assert_eq!(third.class, ErrorClass::Busy, "{third}");
        assert!(third.to_string().contains("ownedxxxxxxxxxxx"), "{third}");
        assert!(spared.try_wait().unwrap().is_none());
        spared.kill().unwrap();
        assert_eq!(spared.wait().unwrap().signal(), Some(SIGKILL));
        call.release(lab, &[3])[&slot(3)].as_ref().unwrap();
        assert!(lab.census().is_empty());
    });
}

#[test]
fn one_that_is_held_from_elsewhere_is_told_late_and_the_others_go_on() {
    on_a_host("one_that_is_held_from_elsewhere_is_told_late_and_the_others_go_on", |lab| {
        for n in 1..=9 {
            lab.ensure(n);
        }
        let tap = inside(&lab.in_slot(2), || open_tap("held0"));
        // Batches of two: the others must not wait for the one that does not go.
        let call = Call { within: Duration::from_secs(1), batch: 2, ..Call::default() };
        let seen = call.release(lab, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
        let late = seen[&slot(2)].as_ref().unwrap_err();
        assert_eq!(late.class, ErrorClass::Deadline, "{late}");
        assert!(seen.iter().all(|(n, r)| r.is_ok() || *n == slot(2)), "{seen:?}");
        // Its link is still there and known as ours: a number in use is never taken for free.
        assert_eq!(complete(veth::census(&lab.layout).unwrap())[0].0, Resource::Veth { slot: slot(2) });
        drop(tap);
        Call::default().release(lab, &[2])[&slot(2)].as_ref().unwrap();
        assert!(lab.census().is_empty());
    });
}

#[test]
fn a_pace_of_none_ends_the_call() {
    on_a_host("a_pace_of_none_ends_the_call", |lab| {
        for n in 1..=5 {
            lab.ensure(n);
        }
        let told = AtomicUsize::new(0);
        let asked = AtomicUsize::new(0);
        // One batch, and the end when something of it went, however long that takes.
        let pace = || match (asked.fetch_add(1, Ordering::Relaxed), told.load(Ordering::Relaxed)) {
            (3, _) => Pace::AtMost(2),
            (0..3, _) | (_, 0) => Pace::Wait(Duration::from_millis(1)),
            _ => Pace::End,
        };
        let spared = BTreeSet::new();
        let within = Duration::from_secs(20);
        let order = SlotRelease { within, grace: within, spared: &spared, pace: &pace };
        let mut gone = Vec::new();
        let list: Vec<SlotIndex> = (1..=5).map(slot).collect();
        slots::release(&lab.layout, &list, &order, &|| Ok(BTreeMap::new()), &mut |slot, result| {
            result.unwrap();
            told.fetch_add(1, Ordering::Relaxed);
            gone.push(slot);
        });
        gone.sort();
        assert_eq!(gone, [slot(1), slot(2)]);
        let left: BTreeSet<String> = lab.census().into_iter().map(|(r, _)| r.to_string()).collect();
        let whole = (3..=5).flat_map(|n| Resource::of_slot(slot(n)).map(|r| r.to_string()));
        assert_eq!(left, whole.collect());
        Call::default().release(lab, &[3, 4, 5]);
        assert!(lab.census().is_empty());
    });
}

/// The kernel may still be at work on namespaces that lost their names when a daemon died.
#[test]
fn a_slot_that_already_dies_is_waited_for() {
    on_a_host("a_slot_that_already_dies_is_waited_for", |lab| {
        for n in 1..=40 {
            lab.ensure(n);
        }
        for n in 1..=40 {
            let path = netns::path(&lab.layout, slot(n));
            rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).unwrap();
            fs::remove_file(&path).unwrap();
        }
        let all: Vec<u32> = (1..=40).collect();
        for (slot, result) in Call::default().release(lab, &all) {
            result.unwrap_or_else(|e| panic!("{slot}: {e}"));
        }
        assert!(lab.census().is_empty());
    });
}

/// A slot may wait for its turn long after it was looked at.
#[test]
fn a_stranger_who_comes_in_meanwhile_keeps_the_name() {
    on_a_host("a_stranger_who_comes_in_meanwhile_keeps_the_name", |lab| {
        // So many that some are looked at before any goes.
        for n in 1..=20 {
            lab.ensure(n);
        }
        let stranger = Mutex::new(None);
        // One by one: the second slot is looked at before the first one goes, and its turn is put off until somebody is
        // inside.
        let (asked, first_gone) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let pace = || match asked.fetch_add(1, Ordering::Relaxed) {
            // The first answer is for a look.
            0 => Pace::AtMost(100),
            1 => Pace::AtMost(1),
            _ if first_gone.load(Ordering::Relaxed) == 0 => Pace::Wait(Duration::from_millis(1)),
            _ => {
                let mut stranger = stranger.lock().unwrap();
                if stranger.is_none() {
                    *stranger = Some(start_inside(lab, 2, "exec sleep 60"));
                    // An answer about processes is believed for ten times what it cost.
                    std::thread::sleep(Duration::from_millis(500));
                }
                Pace::AtMost(1)
            }
        };
        let (spared, within) = (BTreeSet::new(), Duration::from_secs(20));
        let order = SlotRelease { within, grace: within, spared: &spared, pace: &pace };
        let mut seen = BTreeMap::new();
        let list: Vec<SlotIndex> = (1..=20).map(slot).collect();
        slots::release(&lab.layout, &list, &order, &|| Ok(BTreeMap::new()), &mut |slot, result| {
            first_gone.store(1, Ordering::Relaxed);
            seen.insert(slot, result);
        });
        for n in (1..=20).filter(|n| *n != 2) {
            seen[&slot(n)].as_ref().unwrap();
        }
        assert_eq!(seen[&slot(2)].as_ref().unwrap_err().class, ErrorClass::Foreign);
        assert!(netns::path(&lab.layout, slot(2)).exists(), "the name was taken from under a stranger");
        let mut stranger = stranger.into_inner().unwrap().unwrap();
        stranger.kill().unwrap();
        stranger.wait().unwrap();
        Call::default().release(lab, &[2])[&slot(2)].as_ref().unwrap();
        assert!(lab.census().is_empty());
    });
}
