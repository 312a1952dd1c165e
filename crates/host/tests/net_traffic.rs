//! Packets through a slot on a real kernel: guest, slot, host and "internet" are namespaces of one machine. The
//! guest is a kernel of its own behind `tap0`: a second tap in another namespace, with frames carried between the
//! two as a VMM does.

#![allow(clippy::unwrap_used)]

mod net_support;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hearth_host::net::{host_firewall, slot as slots};
use net_support::{Lab, WITHIN, inside, ip, nft, on_a_host, open_tap, pump, run, slot};

const INTERNET: &str = "203.0.113.5";
const PRIVATE: &str = "10.99.0.1";
const WAN: &str = "198.51.100.1";
const PORT: u16 = 8080;
/// Long enough for a handshake on a loaded machine; a blocked one costs all of it.
const PATIENCE: Duration = Duration::from_secs(5);
const BLOCKED_AFTER: Duration = Duration::from_millis(400);

/// Answers each connection with the peer's address, until told to stop.
fn serve(stop: &AtomicBool) {
    let listener = TcpListener::bind(("0.0.0.0", PORT)).unwrap();
    listener.set_nonblocking(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((mut stream, peer)) => drop(stream.write_all(peer.ip().to_string().as_bytes())),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Who the server at `to` sees when called from the namespace `from` (empty: the host).
fn call(from: &str, to: impl ToString, patience: Duration) -> Result<String, std::io::Error> {
    let to: SocketAddr = format!("{}:{PORT}", to.to_string()).parse().unwrap();
    let ask = || {
        let mut stream = TcpStream::connect_timeout(&to, patience)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    if from.is_empty() { ask() } else { inside(from, ask) }
}

fn assert_blocked(from: &str, to: impl ToString) {
    let to = to.to_string();
    assert!(call(from, &to, BLOCKED_AFTER).is_err(), "{from} reached {to}");
}

/// Slot 1 with a guest, an internet, servers in the guest, on the host and in the internet; then the test.
fn with_a_guest(lab: &Lab, test: impl FnOnce()) {
    ip("netns add inet");
    ip("link add wan0 type veth peer name eth0 netns inet");
    ip(&format!("addr add {WAN}/24 dev wan0"));
    ip("link set wan0 up");
    ip("-n inet addr add 198.51.100.2/24 dev eth0");
    for address in [INTERNET, PRIVATE] {
        ip(&format!("-n inet addr add {address}/32 dev lo"));
    }
    ip("-n inet link set lo up");
    ip("-n inet link set eth0 up");
    ip(&format!("-n inet route add 10.12.0.0/16 via {WAN}"));
    ip("route add default via 198.51.100.2");
    lab.ensure(1);

    ip("netns add guest");
    let outer = inside(&lab.in_slot(1), || open_tap("tap0"));
    let inner = inside("guest", || open_tap("eth0"));
    ip("-n guest link set lo up");
    ip("-n guest link set eth0 address 06:00:ac:10:00:02");
    ip("-n guest addr add 169.254.0.21/30 dev eth0");
    ip("-n guest link set eth0 up");
    ip("-n guest route add default via 169.254.0.22");

    let stop = AtomicBool::new(false);
    /// A panic in the test must still end the threads that the scope waits for.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let ends = Stop(&stop);
        scope.spawn(|| pump(&outer, &inner, &stop));
        scope.spawn(|| pump(&inner, &outer, &stop));
        scope.spawn(|| serve(&stop));
        scope.spawn(|| inside("guest", || serve(&stop)));
        scope.spawn(|| inside("inet", || serve(&stop)));
        std::thread::sleep(Duration::from_millis(50));
        test();
        drop(ends);
    });
    drop((outer, inner));
    lab.release(1);
    assert!(lab.census().is_empty());
}

#[test]
fn a_guest_reaches_the_internet_and_nothing_private() {
    on_a_host("a_guest_reaches_the_internet_and_nothing_private", |lab| {
        let (even, odd) = (lab.layout.host_address(slot(1)), lab.layout.sandbox_address(slot(1)));
        with_a_guest(lab, || {
            host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
            lab.ensure(2);
            let other = lab.layout.sandbox_address(slot(2));
            // Out, seen with the host's own address.
            assert_eq!(call("guest", INTERNET, PATIENCE).unwrap(), WAN);
            // In from the host, seen with the even address.
            assert_eq!(call("", odd, PATIENCE).unwrap(), even.to_string());
            // The private server is there, but not for the guest.
            assert_eq!(call("", PRIVATE, PATIENCE).unwrap(), WAN);
            for to in [PRIVATE, "169.254.0.22", WAN, &even.to_string(), &other.to_string()] {
                assert_blocked("guest", to);
            }
            // Nobody from outside, not even by route; the namespace itself offers nothing.
            assert_blocked("inet", odd);
            assert_blocked(&lab.in_slot(1), PRIVATE);
            assert_blocked(&lab.in_slot(1), even);
            assert_blocked(&lab.in_slot(2), odd);
            lab.release(2);
        });
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
    });
}

#[test]
fn a_false_source_does_not_get_out() {
    on_a_host("a_false_source_does_not_get_out", |lab| {
        with_a_guest(lab, || {
            host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
            ip("-n guest addr add 203.0.113.77/32 dev eth0");
            let sink = inside("inet", || UdpSocket::bind((INTERNET, 53)).unwrap());
            sink.set_read_timeout(Some(PATIENCE)).unwrap();
            let send = |source: &str| {
                inside("guest", || {
                    let socket = UdpSocket::bind((source, 0)).unwrap();
                    socket.send_to(source.as_bytes(), (INTERNET, 53)).unwrap();
                });
            };
            // In order, so the second's arrival proves the first's loss.
            send("203.0.113.77");
            send("169.254.0.21");
            let mut got = [0; 64];
            let (n, from) = sink.recv_from(&mut got).unwrap();
            assert_eq!(&got[..n], b"169.254.0.21");
            assert_eq!(from.ip(), WAN.parse::<Ipv4Addr>().unwrap());
            // And the answer finds its way, through three translations.
            let answered = inside("guest", || {
                let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket.send_to(b"ask", (INTERNET, 53)).unwrap();
                let (_, who) = sink.recv_from(&mut [0; 8]).unwrap();
                sink.send_to(b"answer", who).unwrap();
                socket.recv_from(&mut [0; 8]).unwrap().1
            });
            assert_eq!(answered.to_string(), format!("{INTERNET}:53"));
        });
    });
}

#[test]
fn a_reset_slot_knows_nothing_of_its_former_guest() {
    on_a_host("a_reset_slot_knows_nothing_of_its_former_guest", |lab| {
        let connections = |ns: &str| {
            let count = || std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap();
            if ns.is_empty() { count() } else { inside(ns, count) }
        };
        with_a_guest(lab, || {
            host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
            assert_eq!(call("guest", INTERNET, PATIENCE).unwrap(), WAN);
            let ns = lab.in_slot(1);
            assert_ne!(connections(&ns).trim(), "0");
            assert!(ip(&format!("-n {ns} neigh")).contains("lladdr"));
            let hosts = connections("");
            slots::reset(&lab.layout, slot(1)).unwrap();
            assert_eq!(connections(&ns).trim(), "0");
            assert_eq!(connections(""), hosts, "the host's own connections were touched");
            let neighbours = ip(&format!("-n {ns} neigh"));
            assert!(!neighbours.contains("lladdr"), "{neighbours}");
            // And it works for the next one.
            assert_eq!(call("guest", INTERNET, PATIENCE).unwrap(), WAN);
            let odd = lab.layout.sandbox_address(slot(1));
            assert!(call("", odd, PATIENCE).is_ok());
        });
    });
}

/// Makes a drop in a foreign chain, shows that it stops the guest, that `ensure` cures it, and that `release`
/// leaves exactly what was there.
fn foreign_firewall(lab: &Lab, make: impl Fn(), picture: impl Fn() -> String) {
    with_a_guest(lab, || {
        // Ours first, then theirs: the order in which a daemon and a firewall service may start.
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(call("guest", INTERNET, PATIENCE).unwrap(), WAN);
        assert_eq!(host_firewall::obstacles().unwrap(), [""; 0]);
        make();
        assert_eq!(host_firewall::obstacles().unwrap().len(), 1);
        let theirs = picture();
        assert_blocked("guest", INTERNET);
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(call("guest", INTERNET, PATIENCE).unwrap(), WAN);
        assert_blocked("guest", PRIVATE);
        assert_blocked("inet", lab.layout.sandbox_address(slot(1)));
        let with_ours = picture();
        assert_ne!(with_ours, theirs);
        host_firewall::ensure(&lab.layout, &lab.record, &|| ()).unwrap();
        assert_eq!(picture(), with_ours, "the second ensure changed something");
        host_firewall::release(&lab.layout, &lab.record, WITHIN).unwrap();
        assert_eq!(picture(), theirs);
        assert!(host_firewall::census(&lab.layout).unwrap().ours.is_empty());
    });
}

#[test]
fn an_iptables_policy_of_drop_is_lived_with() {
    on_a_host("an_iptables_policy_of_drop_is_lived_with", |lab| {
        let tag = lab.layout.host_table();
        foreign_firewall(
            lab,
            || {
                run("iptables-nft", "-P FORWARD DROP");
                run("iptables-nft", "-A FORWARD -i docker0 -m comment --comment theirs -j ACCEPT");
            },
            || {
                let listed = run("nft", "-s list table ip filter");
                let rules = run("iptables-nft", "-S");
                assert_eq!(rules.matches(&tag).count(), listed.matches(&tag).count(), "{rules}\n{listed}");
                format!("{listed}{rules}")
            },
        );
    });
}

#[test]
fn a_chain_that_ends_in_reject_is_lived_with() {
    on_a_host("a_chain_that_ends_in_reject_is_lived_with", |lab| {
        foreign_firewall(
            lab,
            || {
                nft("table inet wall { chain FORWARD { type filter hook forward priority 10; policy accept;
                     iifname \"eth9\" drop
                     counter reject with icmpx admin-prohibited comment \"hearth\" }
                     chain some { type filter hook forward priority 11; policy accept; iifname \"eth9\" drop } }");
            },
            || run("nft", "-s list table inet wall"),
        );
    });
}

#[test]
fn a_legacy_iptables_policy_of_drop_is_lived_with() {
    on_a_host("a_legacy_iptables_policy_of_drop_is_lived_with", |lab| {
        foreign_firewall(
            lab,
            || {
                run("iptables-legacy", "-P FORWARD DROP");
                run("iptables-legacy", "-A FORWARD -i docker0 -j ACCEPT");
            },
            || run("iptables-legacy", "-S"),
        );
    });
}
