//! What a guest reaches: the internet, and nothing of the host's private ranges. Another network namespace
//! plays the internet (TEST-NET-3, RFC 5737).

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use hearth_testkit::netns::Throwaway;

use crate::node::{Node, Wish, busybox, cannot, text};

const INTERNET: &str = "203.0.113.2";
const PRIVATE: &str = "192.168.77.1";
const PUBLIC_OF_HOST: &str = "203.0.113.1";

const HELLO: &str = "hello from outside\n";

/// A shell command that asks a web server for a page. (Debian's static busybox has a wget that crashes.)
fn request(busybox: &str, address: &str) -> String {
    format!("printf 'GET /hello HTTP/1.0\\r\\n\\r\\n' | {busybox} nc -w 3 {address} 8080")
}

fn body(answer: &std::process::Output) -> Option<String> {
    let answer = text(&answer.stdout);
    answer.starts_with("HTTP/1.1 200").then(|| answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

fn fetch_from(netns: &Throwaway, address: &str) -> Option<String> {
    let busybox = busybox().unwrap();
    body(&netns.command("sh").args(["-c", &request(busybox.to_str().unwrap(), address)]).output().unwrap())
}

struct World {
    // Dropped in this order: servers hold the namespaces.
    servers: Servers,
    node: Node,
    internet: Throwaway,
}

struct Servers(Vec<Child>);

impl Drop for Servers {
    fn drop(&mut self) {
        for server in &mut self.0 {
            drop(server.kill());
            drop(server.wait());
        }
    }
}

impl World {
    fn new(before_daemon: impl FnOnce(&Node)) -> Self {
        let mut node = Node::new(&Wish::default());
        let internet = Throwaway::new("inet").unwrap();
        node.host(
            "ip",
            &["link", "add", "up0", "type", "veth", "peer", "name", "up1", "netns", internet.name()],
        );
        node.host("ip", &["addr", "add", "203.0.113.1/24", "dev", "up0"]);
        node.host("ip", &["link", "set", "up0", "up"]);
        node.host("ip", &["link", "add", "priv0", "type", "veth", "peer", "name", "priv1"]);
        node.host("ip", &["link", "set", "priv1", "up"]);
        node.host("ip", &["addr", "add", "192.168.77.1/24", "dev", "priv0"]);
        node.host("ip", &["link", "set", "priv0", "up"]);
        for args in
            [["addr", "add", "203.0.113.2/24", "dev", "up1"].as_slice(), &["link", "set", "up1", "up"]]
        {
            assert!(internet.command("ip").args(args).status().unwrap().success());
        }
        let www = node.dir.path().join("www");
        std::fs::create_dir(&www).unwrap();
        std::fs::write(www.join("hello"), HELLO).unwrap();
        let mut servers = Servers(Vec::new());
        for (netns, address) in [(&internet, INTERNET), (&node.netns, PRIVATE), (&node.netns, PUBLIC_OF_HOST)]
        {
            let server = netns
                .command(busybox().unwrap())
                .args(["httpd", "-f", "-p", &format!("{address}:8080"), "-h"])
                .arg(&www)
                .stdin(Stdio::null())
                .spawn()
                .unwrap();
            servers.0.push(server);
        }
        before_daemon(&node);
        node.start_daemon();
        // The servers answer from the host itself, so a failure below is the firewall's doing.
        for address in [INTERNET, PRIVATE, PUBLIC_OF_HOST] {
            let end = Instant::now() + Duration::from_secs(10);
            while fetch_from(&node.netns, address).as_deref() != Some(HELLO) {
                assert!(Instant::now() < end, "no answer from {address}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Self { servers, node, internet }
    }

    fn fetch(&self, sandbox: &str, address: &str) -> Option<String> {
        body(&self.node.cli(&["exec", sandbox, "--", "sh", "-c", &request("busybox", address)]))
    }

    fn end(self) {
        let Self { servers, node, internet } = self;
        drop(servers);
        node.end_clean();
        internet.remove().unwrap();
    }

    fn check_reach(&self) {
        self.node.ok(&["create", "busybox", "--name", "on"]);
        self.node.ok(&["create", "busybox", "--name", "off", "--net", "off"]);
        assert_eq!(self.fetch("on", INTERNET).as_deref(), Some(HELLO));
        // Masqueraded: the world outside needs no route to a slot.
        for address in [PRIVATE, PUBLIC_OF_HOST, "10.77.0.2", "169.254.0.22"] {
            assert_eq!(self.fetch("on", address), None, "a guest reached {address}");
        }
        assert_eq!(self.fetch("off", INTERNET), None, "--net off reached the internet");
        let links = self.node.ok(&["exec", "off", "--", "ls", "/sys/class/net"]);
        assert_eq!(links.trim(), "lo");
    }
}

fn cannot_here(test: &str) -> bool {
    if cannot(test, true) {
        return true;
    }
    if busybox().is_none() {
        hearth_testkit::skip(test, "no busybox in HEARTH_TEST_BUSYBOX or PATH");
        return true;
    }
    false
}

#[test]
fn a_guest_reaches_the_internet_and_nothing_private() {
    if cannot_here("a_guest_reaches_the_internet_and_nothing_private") {
        return;
    }
    let world = World::new(|_| {});
    world.check_reach();
    // From the host a guest is reached at its slot's address, and only from there.
    let address = world.node.inspect("on")["address"].as_str().unwrap().to_owned();
    let serve = "echo served > /tmp/hello; busybox httpd -p 8080 -h /tmp";
    world.node.ok(&["exec", "on", "--", "sh", "-c", serve]);
    assert_eq!(fetch_from(&world.node.netns, &address).as_deref(), Some("served\n"));
    // Neither another guest nor the world outside gets there.
    world.node.ok(&["create", "busybox", "--name", "other"]);
    assert_eq!(world.fetch("other", &address), None, "a guest reached another");
    let out =
        world.internet.command("ip").args(["route", "add", "10.77.0.0/24", "via", PUBLIC_OF_HOST]).status();
    assert!(out.unwrap().success());
    assert_eq!(fetch_from(&world.internet, &address), None, "the world outside reached a guest");
    world.end();
}

#[test]
fn a_forward_policy_of_drop_is_no_obstacle() {
    if cannot_here("a_forward_policy_of_drop_is_no_obstacle") {
        return;
    }
    let rules = "table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }";
    let world = World::new(|node| {
        node.host("nft", &[rules]);
    });
    world.check_reach();
    let now = world.node.host("nft", &["list", "chain", "ip", "filter", "FORWARD"]);
    assert!(now.contains("policy drop"), "a foreign policy was changed: {now}");
    assert!(now.contains(&format!("hearth-{}", world.node.instance)), "no tagged rule: {now}");
    world.end();
}
