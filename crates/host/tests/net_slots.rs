//! Slots on a real kernel: whole, half made, foreign, held; each test plays a host in namespaces of its own.

#![allow(clippy::unwrap_used)]

mod net_support;

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use hearth_core::host::ErrorClass;
use hearth_core::resource::{Kind, Resource};
use hearth_host::net::{netns, slot as slots, tap, veth};
use net_support::{Lab, WITHIN, complete, ip, on_a_host, overlapping, release_slot, run, slot};

/// What `ip` and `nft` say about a whole slot, for comparing.
fn picture(lab: &Lab, n: u32) -> String {
    let ns = lab.in_slot(n);
    let host = ip(&format!("-o addr show dev {}", lab.layout.veth(slot(n))));
    let addresses = ip(&format!("-n {ns} -o addr"));
    let routes = ip(&format!("-n {ns} route"));
    let rules = run("ip", &format!("netns exec {ns} nft -a list ruleset"));
    format!("{host}{addresses}{routes}{rules}")
}

fn assert_whole(lab: &Lab, n: u32) {
    let seen = picture(lab, n);
    for part in [
        &format!("{}    inet {}/31", lab.layout.veth(slot(n)), lab.layout.host_address(slot(n))),
        &format!("uplink    inet {}/31", lab.layout.sandbox_address(slot(n))),
        "tap0    inet 169.254.0.22/30",
        "lo    inet 127.0.0.1/8",
        &format!("default via {} dev uplink", lab.layout.host_address(slot(n))),
        "dnat ip to 169.254.0.21",
        "policy drop",
    ] {
        assert!(seen.contains(part), "{part:?} is not in\n{seen}");
    }
    assert!(!seen.contains("inet6 fe80"), "{seen}");
    let kinds: Vec<Kind> = lab.census().iter().map(|(r, _)| r.kind()).collect();
    assert_eq!(kinds, [Kind::Netns, Kind::Veth, Kind::Tap, Kind::SandboxFirewall]);
}

fn class<T: std::fmt::Debug>(result: Result<T, hearth_core::host::HostError>) -> ErrorClass {
    result.unwrap_err().class
}

#[test]
fn a_slot_is_made_found_and_removed_each_step_twice() {
    on_a_host("a_slot_is_made_found_and_removed_each_step_twice", |lab| {
        assert!(lab.census().is_empty());
        lab.ensure(3);
        assert_whole(lab, 3);
        let before = picture(lab, 3);
        lab.ensure(3);
        assert_eq!(before, picture(lab, 3), "the second ensure changed something");
        let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        // The machine's own `/run` and `/run/netns` may be in the list too, hidden below this test's `/run`.
        let mut ours: Vec<&str> = mounts.lines().rev().take_while(|l| !l.contains(" / /run ")).collect();
        ours.reverse();
        assert_eq!(ours.len(), 2, "{mounts}");
        assert!(ours[0].contains(" /run/netns ") && ours[0].contains(" shared:"), "{mounts}");

        lab.release(3);
        assert!(lab.census().is_empty());
        assert_eq!(fs::read_dir("/run/netns").unwrap().count(), 0);
        lab.release(3);
    });
}

#[test]
fn a_namespace_takes_everything_with_it() {
    on_a_host("a_namespace_takes_everything_with_it", |lab| {
        lab.ensure(1);
        lab.ensure(2);
        release_slot(&lab.layout, slot(1), WITHIN).unwrap();
        assert!(lab.census().iter().all(|(r, _)| r.to_string().ends_with("slot 2")));
        // Same name at once: nothing of the former one is in the way.
        lab.ensure(1);
        lab.release(1);
        lab.release(2);
        assert!(lab.census().is_empty());
    });
}

#[test]
fn half_made_slots_are_completed() {
    on_a_host("half_made_slots_are_completed", |lab| {
        let host = lab.layout.veth(slot(5));
        let ns = lab.in_slot(5);
        let path = netns::path(&lab.layout, slot(5));
        // The file was made, the bind mount not.
        netns::ensure(&lab.layout, slot(6)).unwrap();
        fs::write(&path, "").unwrap();
        let seen = complete(netns::census(&lab.layout).unwrap());
        assert!(seen.iter().any(|(r, f)| *r == Resource::Netns { slot: slot(5) } && f.contains("half made")));
        assert_eq!(class(veth::ensure(&lab.layout, slot(5))), ErrorClass::Refused);
        lab.release(6);
        lab.ensure(5);
        assert_whole(lab, 5);

        let breakages: [&[&str]; 9] = [
            &[&format!("addr flush dev {host}")],
            &[&format!("link set {host} down")],
            &[&format!("-n {ns} addr flush dev uplink")],
            &[&format!("-n {ns} link set uplink down")],
            &[&format!("-n {ns} route del default")],
            &[&format!("-n {ns} link del uplink")],
            &[
                &format!("link del {host}"),
                &format!("link add {host} type veth peer name elsewhere"),
                &format!("link set {host} alias {ns}"),
            ],
            &[&format!("-n {ns} link set lo down"), &format!("-n {ns} link set tap0 down")],
            &[&format!("-n {ns} link del tap0"), &format!("netns exec {ns} nft flush ruleset")],
        ];
        for breakage in breakages {
            breakage.iter().for_each(|command| drop(ip(command)));
            lab.ensure(5);
            assert_whole(lab, 5);
        }
        // One rule lost, one rule of a stranger.
        run("ip", &format!("netns exec {ns} nft flush chain inet hearth input"));
        lab.ensure(5);
        let rules = || run("ip", &format!("netns exec {ns} nft list ruleset"));
        let whole = rules();
        run("ip", &format!("netns exec {ns} nft insert rule inet hearth forward accept"));
        assert_ne!(rules(), whole);
        lab.ensure(5);
        assert_eq!(rules(), whole);
        assert_whole(lab, 5);
        lab.release(5);
        assert!(lab.census().is_empty());
    });
}

#[test]
fn half_made_slots_are_released() {
    on_a_host("half_made_slots_are_released", |lab| {
        // Every prefix of the steps.
        for steps in 0..=4 {
            for part in &Resource::of_slot(slot(9))[..steps] {
                lab.ensure_part(part).unwrap();
            }
            lab.release(9);
            assert!(lab.census().is_empty(), "{steps} steps");
        }
        let path = netns::path(&lab.layout, slot(9));
        fs::write(&path, "").unwrap();
        lab.release(9);
        assert!(!path.exists());
        // Two namespaces stacked on one name.
        lab.ensure(9);
        rustix::mount::mount_bind("/proc/thread-self/ns/net", "/run/extra").unwrap_err();
        netns::ensure(&lab.layout, slot(8)).unwrap();
        rustix::mount::mount_bind(netns::path(&lab.layout, slot(8)), &path).unwrap();
        lab.release(8);
        lab.release(9);
        assert!(lab.census().is_empty());
    });
}

#[test]
fn what_is_not_ours_stays_untouched() {
    on_a_host("what_is_not_ours_stays_untouched", |lab| {
        netns::ensure(&lab.layout, slot(1)).unwrap();
        let path = |n| netns::path(&lab.layout, slot(n));
        fs::write(path(2), "x").unwrap();
        fs::create_dir(path(3)).unwrap();
        symlink("/dev/null", path(4)).unwrap();
        fs::write(path(5), "").unwrap();
        rustix::mount::mount_bind("/proc/thread-self/ns/uts", path(5)).unwrap();
        fs::write(path(6), "").unwrap();
        rustix::mount::mount_bind("/proc/thread-self/ns/net", path(6)).unwrap();
        for n in 2..=6 {
            assert_eq!(class(netns::ensure(&lab.layout, slot(n))), ErrorClass::Foreign, "{n}");
            assert_eq!(class(release_slot(&lab.layout, slot(n), WITHIN)), ErrorClass::Foreign, "{n}");
            assert_eq!(class(netns::enter(&path(n), || Ok(()))), ErrorClass::Foreign, "{n}");
        }
        assert_eq!(fs::read(path(2)).unwrap(), b"x");
        assert!(path(3).is_dir() && path(4).is_symlink());
        let name = |n| lab.in_slot(n);
        let other = "hearth-zzz-1";
        fs::write(format!("/run/netns/{other}"), "").unwrap();
        fs::write(format!("/run/netns/{}x", name(1)), "").unwrap();
        let foreign = netns::census(&lab.layout).unwrap().foreign;
        let names: Vec<&str> = foreign.keys().map(String::as_str).collect();
        assert!([&name(2), &name(3), &name(4), other].iter().all(|n| names.contains(n)), "{names:?}");
        assert!(names.contains(&format!("{}x", name(1)).as_str()) && names.len() == 5, "{names:?}");

        ip("link add hth1 type bridge");
        ip("link add hthx type bridge");
        let before = ip("-o link");
        assert_eq!(class(veth::ensure(&lab.layout, slot(1))), ErrorClass::Foreign);
        assert_eq!(class(veth::release(&lab.layout, slot(1), WITHIN)), ErrorClass::Foreign);
        let census = veth::census(&lab.layout).unwrap();
        assert!(census.ours.is_empty());
        assert_eq!(census.foreign.keys().collect::<Vec<_>>(), ["hth1", "hthx"]);
        assert_eq!(before, ip("-o link"));

        ip(&format!("-n {} link add tap0 type bridge", name(1)));
        assert_eq!(class(tap::ensure(&lab.layout, slot(1))), ErrorClass::Foreign);
        assert_eq!(class(tap::release(&lab.layout, slot(1), WITHIN)), ErrorClass::Foreign);
        // Not the stranger's link, but our namespace around it, may go. The number stays taken.
        assert_eq!(class(release_slot(&lab.layout, slot(1), WITHIN)), ErrorClass::Foreign);
        assert!(!netns::path(&lab.layout, slot(1)).exists());
        assert_eq!(before, ip("-o link"));
    });
}

#[test]
fn a_slot_that_is_not_whole_is_not_reset() {
    on_a_host("a_slot_that_is_not_whole_is_not_reset", |lab| {
        assert_eq!(class(slots::reset(&lab.layout, slot(1))), ErrorClass::Refused);
        for part in &Resource::of_slot(slot(1))[..3] {
            lab.ensure_part(part).unwrap();
            assert_eq!(class(slots::reset(&lab.layout, slot(1))), ErrorClass::Refused, "{part}");
        }
        lab.ensure(1);
        slots::reset(&lab.layout, slot(1)).unwrap();
        assert_whole(lab, 1);
        lab.release(1);
    });
}

#[test]
fn overlapping_routes_are_named() {
    on_a_host("overlapping_routes_are_named", |lab| {
        lab.ensure(1);
        assert_eq!(overlapping(&lab.layout).unwrap(), Vec::<String>::new());
        ip("link add wan0 type bridge");
        ip("link set wan0 up");
        ip("addr add 10.12.7.1/24 dev wan0");
        ip("route add 10.0.0.0/8 via 10.12.7.9");
        ip("route add default via 10.12.7.9");
        let found = overlapping(&lab.layout).unwrap();
        assert!(found.contains(&"route to 10.0.0.0/8 via 10.12.7.9 on wan0".to_owned()), "{found:?}");
        assert!(found.contains(&"own address 10.12.7.1/32 on wan0".to_owned()), "{found:?}");
        assert!(found.iter().all(|f| f.contains("wan0")), "{found:?}");
        lab.release(1);
    });
}

/// Prints the times quoted in comments and reports; `HEARTH_NET_SLOTS` raises the number.
#[test]
fn many_slots_at_once() {
    on_a_host("many_slots_at_once", |lab| {
        let count = std::env::var("HEARTH_NET_SLOTS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
        let mut times = std::collections::BTreeMap::<String, Duration>::new();
        let mut timed = |what: String, f: &mut dyn FnMut()| {
            let began = Instant::now();
            f();
            *times.entry(what).or_default() += began.elapsed();
        };
        for n in 1..=count {
            for part in Resource::of_slot(slot(n)) {
                timed(format!("ensure {}", part.kind()), &mut || lab.ensure_part(&part).unwrap());
            }
        }
        for n in 1..=count {
            for part in Resource::of_slot(slot(n)) {
                timed(format!("ensure again {}", part.kind()), &mut || lab.ensure_part(&part).unwrap());
            }
            timed("reset".into(), &mut || slots::reset(&lab.layout, slot(n)).unwrap());
        }
        timed("census netns (whole)".into(), &mut || drop(netns::census(&lab.layout).unwrap()));
        timed("census veth (whole)".into(), &mut || drop(veth::census(&lab.layout).unwrap()));
        timed("census tap (whole)".into(), &mut || drop(tap::census(&lab.layout).unwrap()));
        assert_eq!(lab.census().len(), 4 * count as usize);
        for n in 1..=count / 2 {
            for part in Resource::of_slot(slot(n)).iter().rev() {
                timed(format!("release x2 {}", part.kind()), &mut || lab.release_part(part, WITHIN).unwrap());
            }
        }
        for n in count / 2 + 1..=count {
            let part = Resource::Netns { slot: slot(n) };
            timed("release x2 netns alone".into(), &mut || lab.release_part(&part, WITHIN).unwrap());
        }
        assert!(lab.census().is_empty());
        for (what, time) in times {
            println!("{what:30} {:9.3} ms each of {count}", time.as_secs_f64() * 1e3 / f64::from(count));
        }
    });
}
