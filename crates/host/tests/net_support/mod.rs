//! A throwaway host for the network tests: a thread with a network and a mount namespace of its own and an empty
//! `/run`. All the tests make dies with the thread, also on a panic. Needs root and the `ip` program.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]
#![allow(unsafe_code)] // unshare and the tun ioctl.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hearth_core::host::{Census, HostError, Pace, SlotRelease};
use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::resource::Resource;
use hearth_host::net::links::Links;
use hearth_host::net::{netns, routes, sandbox_firewall, slot, tap, veth};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;

pub const WITHIN: Duration = Duration::from_secs(10);

/// The host a test plays on.
pub struct Lab {
    pub layout: SlotLayout,
    pub record: PathBuf,
}

/// Runs a test on a host of its own.
pub fn on_a_host(name: &str, test: impl FnOnce(&Lab) + Send) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    if !rustix::process::geteuid().is_root() {
        hearth_testkit::skip(name, "needs root");
        return;
    }
    let k = NEXT.fetch_add(1, Ordering::Relaxed);
    let lab = Lab {
        layout: SlotLayout {
            instance: format!("t{}n{k}", std::process::id()).parse().unwrap(),
            veth_prefix: "hth".parse().unwrap(),
            cidr: "10.12.0.0/16".parse().unwrap(),
        },
        record: "/run/hearth-test/sysctl.json".into(),
    };
    let ended = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                // SAFETY: only this thread's namespaces change, and it ends with the test.
                unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }
                    .unwrap();
                let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
                rustix::mount::mount_change("/", private).unwrap();
                rustix::mount::mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), None).unwrap();
                ip("link set lo up");
                std::fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
                test(&lab);
            })
            .join()
    });
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
}

pub fn slot(n: u32) -> SlotIndex {
    SlotIndex::new(n).unwrap()
}

impl Lab {
    pub fn ensure(&self, n: u32) {
        for part in Resource::of_slot(slot(n)) {
            self.ensure_part(&part).unwrap_or_else(|e| panic!("{e:?}"));
        }
    }

    pub fn ensure_part(&self, part: &Resource) -> Result<(), HostError> {
        let l = &self.layout;
        match part {
            Resource::Netns { slot } => netns::ensure(l, *slot),
            Resource::Veth { slot } => veth::ensure(l, *slot),
            Resource::Tap { slot } => tap::ensure(l, *slot),
            Resource::SandboxFirewall { slot } => sandbox_firewall::ensure(l, *slot),
            other => panic!("no part of a slot: {other}"),
        }
    }

    pub fn release_part(&self, part: &Resource, within: Duration) -> Result<(), HostError> {
        let l = &self.layout;
        match part {
            Resource::Netns { slot } => release_slot(l, *slot, within),
            Resource::Veth { slot } => veth::release(l, *slot, within),
            Resource::Tap { slot } => tap::release(l, *slot, within),
            Resource::SandboxFirewall { slot } => sandbox_firewall::release(l, *slot, within),
            other => panic!("no part of a slot: {other}"),
        }
    }

    pub fn release(&self, n: u32) {
        for part in Resource::of_slot(slot(n)).iter().rev() {
            self.release_part(part, WITHIN).unwrap_or_else(|e| panic!("{e:?}"));
        }
    }

    /// All four kinds.
    pub fn census(&self) -> Vec<(Resource, String)> {
        let all = [netns::census, veth::census, tap::census, sandbox_firewall::census];
        all.iter().flat_map(|c| complete(c(&self.layout).unwrap())).collect()
    }

    pub fn in_slot(&self, n: u32) -> String {
        self.layout.netns(slot(n))
    }
}

/// Removes one slot; no process counts as this instance's.
pub fn release_slot(layout: &SlotLayout, slot: SlotIndex, within: Duration) -> Result<(), HostError> {
    let (spared, pace) = (BTreeSet::new(), || Pace::AtMost(1));
    let order = SlotRelease { within, grace: within, spared: &spared, pace: &pace };
    slot::release_one(layout, slot, &order, &|| Ok(BTreeMap::new()))
}

/// Routes of the host that overlap the layout's.
pub fn overlapping(layout: &SlotLayout) -> Result<Vec<String>, HostError> {
    routes::overlapping(layout, &Links::of(layout)?)
}

pub fn complete(census: Census) -> Vec<(Resource, String)> {
    assert_eq!(census.incomplete, Vec::<String>::new());
    census.ours.into_iter().map(|s| (s.resource, s.facts)).collect()
}

/// Runs `ip` and returns what it printed.
pub fn ip(args: &str) -> String {
    run("ip", args)
}

/// Runs a program on the host of the test.
pub fn run(program: &str, args: &str) -> String {
    let out = Command::new(program).args(args.split_whitespace()).output().unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {args}: {} {err}", out.status);
    String::from_utf8(out.stdout).unwrap()
}

/// Runs an nft script; its grammar wants each brace on a line of its own.
pub fn nft(script: &str) {
    std::fs::write("/run/script.nft", script.replace('}', "\n}\n")).unwrap();
    run("nft", "-f /run/script.nft");
}

/// Runs `f` inside a namespace made by `ip netns add`.
pub fn inside<T: Send>(name: &str, f: impl FnOnce() -> T + Send) -> T {
    netns::enter(&Path::new(netns::DIRECTORY).join(name), || Ok(f())).unwrap()
}

/// Opens a tap in the calling thread's namespace as Firecracker does.
pub fn open_tap(name: &str) -> File {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    // SAFETY: an all-zero ifreq is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    // SAFETY: TUNSETIFF reads and writes one ifreq.
    let rc = unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(rc, 0, "{name}: {}", std::io::Error::last_os_error());
    tun
}

/// Carries frames from one tap to another until told to stop.
pub fn pump(from: &File, to: &File, stop: &AtomicBool) {
    let mut frame = vec![0; 70_000];
    while !stop.load(Ordering::Relaxed) {
        let mut poll = libc::pollfd { fd: from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, 20) } <= 0 || poll.revents & libc::POLLIN == 0 {
            continue;
        }
        let (mut from, mut to) = (from, to);
        // A tap that is down refuses both ways; frames are lost then, as on a wire.
        let n = from.read(&mut frame).unwrap_or(0);
        if n > 0 && to.write(&frame[..n]).is_err() {
            continue;
        }
    }
}
