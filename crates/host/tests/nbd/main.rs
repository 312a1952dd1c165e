//! The kernel's NBD client with servers that behave and servers that do not. Needs root and the module nbd, which the lab
//! has (`cargo xtask lab hearth-host:nbd`). Indexes below 8 are for single tests, those from 8 for the churn.

mod churn;
mod owners;
mod server;
mod stalls;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hearth_core::id::SandboxId;
use hearth_host::nbd::{self, Device, Order, Outcome, Server, Timeouts};

/// For what must not hang; far longer than it takes.
const SOON: Duration = Duration::from_secs(20);
/// Of the disks, bytes.
const SIZE: u64 = 64 << 20;
/// Within this a release must be done, whatever the server does.
const BOUND: Duration = Duration::from_secs(5);

/// Whether the test may run; says so if not.
fn nbd_or_skip(test: &str) -> bool {
    let why = match nbd::limits() {
        _ if !hearth_host::test_support::is_root() => "needs root",
        Ok(Some(limits)) if limits.most >= 16 => return true,
        Ok(Some(_)) => "nbds_max is below 16",
        Ok(None) => "the module nbd is not loaded; it is in the lab",
        Err(_) => "the module nbd cannot be looked at",
    };
    hearth_testkit::skip(test, why);
    false
}

/// An owner nobody had before.
fn owner() -> SandboxId {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut bytes = [0; SandboxId::LEN];
    let number = NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes();
    bytes[..4].copy_from_slice(&number);
    bytes[4..8].copy_from_slice(&std::process::id().to_le_bytes());
    SandboxId::from_random(spread(bytes))
}

/// Letters are made of single bytes: half a byte each, so that nothing is lost.
fn spread(bytes: [u8; SandboxId::LEN]) -> [u8; SandboxId::LEN] {
    std::array::from_fn(|at| (bytes[at / 2] >> (4 * (at % 2))) & 0xf)
}

fn order(index: u32) -> Order {
    let backend = Duration::from_secs(1);
    Order {
        device: Device { index, owner: owner(), task: None },
        size: SIZE,
        block_size: 4096,
        // Has flags, flush.
        flags: 0b101,
        timeouts: Timeouts { request: Duration::from_secs(30), ..Timeouts::above(backend) },
        backend,
    }
}

/// A connected device; [`Attached::release`] it.
struct Attached {
    device: Device,
    sockets: [OwnedFd; 1],
}

impl Attached {
    fn new(order: &Order, socket: UnixStream) -> Self {
        let socket = OwnedFd::from(socket);
        let kept = socket.try_clone().expect("clone");
        match nbd::connect(order, vec![socket], SOON) {
            Outcome::Done(device) => Self { device, sockets: [kept] },
            other => panic!("{other:?}"),
        }
    }

    fn path(&self) -> String {
        format!("/dev/nbd{}", self.device.index)
    }

    /// Releases it within the bound, and sees it quiet.
    fn release(&self) {
        let began = Instant::now();
        nbd::release(&self.device, &Server::Shut(&self.sockets), BOUND).expect("release");
        assert!(began.elapsed() <= BOUND, "{:?}", began.elapsed());
        assert_quiet(self.device.index);
    }
}

fn assert_quiet(index: u32) {
    assert_eq!(nbd::look(index).expect("look").unquiet(), None);
}

/// A program that does I/O on a device.
fn dd(args: &[&str]) -> Child {
    let mut command = Command::new("dd");
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("run dd")
}

/// Its end, which must come within `within`: a task in D state has none.
fn end(child: &mut Child, within: Duration) -> ExitStatus {
    let deadline = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        assert!(Instant::now() < deadline, "task {} does not end: {}", child.id(), state(child.id()));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The letter of a task's state, and where it waits.
fn state(pid: u32) -> String {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let stat = read("stat");
    let letter = stat.rsplit_once(") ").map_or("gone", |(_, rest)| &rest[..1]);
    format!("{letter} {}", read("wchan"))
}

/// Waits until something is so.
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !so() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a child hangs in the kernel.
fn until_in_d(child: &Child) {
    until("the child hangs", || state(child.id()).starts_with('D'));
}
