//! Network block devices of the kernel's own client: connecting one to a server's socket, releasing it, and the proof that
//! an index is quiet. By netlink and sysfs alone: opening a device whose server is gone can hang.
//!
//! Ours is a device whose backend identifier is the sandbox id of the caller and, where it is known, whose `pid` is the
//! task that connected it. That number is of a *thread*, which may be long gone, so it proves nothing alone.
//!
//! What the kernel does to whom (Linux 6.1, seen): all commands of this family wait for each other, and for every other
//! generic netlink call of the host. A disconnect hangs unkillably while a writer has filled the server's socket, and with
//! it all of those. So the socket is shut before ([`Server`] is the proof), and each command runs on a thread of its own that
//! may be left behind. It holds the lock of its index and nothing else: only that index waits for it.

mod genl;
mod index;
mod worker;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use hearth_core::host::{Census, ErrorClass, HostError, Sighting};
use hearth_core::id::SandboxId;
use hearth_core::resource::Resource;
use serde::{Deserialize, Serialize};

use crate::error;
use crate::net::netlink::NetlinkError;

use index::Lock;
pub(crate) use index::openers;
pub use index::{Limits, Seen, indexes, limits, look, path};

/// Between two looks at a device that is on its way out.
const LOOK: Duration = Duration::from_millis(10);
/// A device that is connected for so long and has no name is somebody else's.
const NAMELESS: Duration = Duration::from_secs(1);
/// Added to the time a backend takes at most: the answer has to come through the socket as well.
const MARGIN: Duration = Duration::from_secs(5);
/// How long a device waits for another connection after its last one broke. None comes, and a request that was in flight then
/// waits for this besides its own timeout (Linux 6.1: it is queued again first), so the least there is.
const DEAD_CONNECTION: Duration = Duration::from_secs(1);

/// For the kernel to say that it has such a client; every other command of this kind is waited for.
const ASK: Duration = Duration::from_secs(5);

/// The limits of a client that this process can reach: in a container the module may be seen and of no use.
///
/// # Errors
/// [`ErrorClass::Refused`] if there is none, or it is out of reach, with what to do.
pub fn usable() -> Result<Limits, HostError> {
    let refused = |why: &str| error::plain("census", "nbd", ErrorClass::Refused, why);
    let limits = limits().map_err(|e| error::os("census", "nbd", "read the module's limits", e))?;
    let limits = limits.ok_or_else(|| refused("the kernel has no module nbd: load it (modprobe nbd)"))?;
    if !path(0).exists() {
        return Err(refused(
            "the module nbd is loaded and /dev/nbd0 is not there: give this process the host's /dev",
        ));
    }
    match worker::run(Instant::now() + ASK, || genl::Family::open().map(drop)) {
        Ok(Ok(())) => Ok(limits),
        Ok(Err(e)) if e.errno() == Some(libc::ENOENT) => Err(refused(
            "the module nbd is loaded and its commands are out of reach: run the daemon in the host's network or pid namespace",
        )),
        Ok(Err(e)) => Err(refused(&format!("its commands are out of reach: {}", e.into_io()))),
        Err(_) => Err(error::plain("census", "nbd", ErrorClass::Deadline, "the kernel does not answer")),
    }
}

/// What the kernel is told of time. In whole seconds, as it counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// After this a request without an answer fails (`NBD_ATTR_TIMEOUT`). Without it one would wait for ever when its
    /// server dies.
    pub request: Duration,
    /// After this, without a connection, everything fails (`NBD_ATTR_DEAD_CONN_TIMEOUT`).
    pub dead_connection: Duration,
}

impl Timeouts {
    /// Those for a backend that answers within `backend`, with an error if need be: the kernel must be the last to lose
    /// patience, or it gives up a device whose server is well.
    #[must_use]
    pub fn above(backend: Duration) -> Self {
        let request = Duration::from_secs((backend + MARGIN).as_secs() + 1);
        Self { request, dead_connection: DEAD_CONNECTION }
    }
}

/// A device to be connected.
#[derive(Debug, Clone)]
pub struct Order {
    /// Which, and for whom. To be on record before [`connect`] is called.
    pub device: Device,
    /// Of the disk, bytes; a multiple of the block size.
    pub size: u64,
    /// Bytes: a power of two from 512 to 4,096.
    pub block_size: u64,
    /// Transmission flags as the server announces them.
    pub flags: u16,
    /// What the kernel is told of time.
    pub timeouts: Timeouts,
    /// The longest time the server takes for an answer; [`Timeouts::request`] must be longer.
    pub backend: Duration,
}

/// A device by name, as a record holds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// The number in `/dev/nbd<index>`.
    pub index: u32,
    /// Its backend identifier: whose it is.
    pub owner: SandboxId,
    /// The task that connected it; absent until the kernel said so.
    pub task: Option<u32>,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nbd{} of {}", self.index, self.owner)
    }
}

/// What became of a [`connect`].
#[derive(Debug)]
pub enum Outcome {
    /// Connected, and seen to be ours.
    Done(Device),
    /// The kernel was not asked: there is nothing to undo.
    NotSent(HostError),
    /// The kernel said no: there is nothing to undo.
    Refused(HostError),
    /// It may be connected, or may be yet: [`release`] it by its name.
    Unknown(HostError),
}

/// The proof a disconnect asks for: nobody can be stuck in the device's socket.
#[derive(Debug)]
pub enum Server<'a> {
    /// Descriptors of one end of each of its sockets, kept for this; they are shut at once.
    Shut(&'a [OwnedFd]),
    /// The process that held the server's ends was seen to be gone.
    Ended,
}

/// Connects a device to sockets on whose other ends a server is in its transmission phase already. `sockets` are given
/// away; keep clones for [`Server::Shut`]. Takes at most about `within`; past it the outcome is not known.
#[must_use]
pub fn connect(order: &Order, sockets: Vec<OwnedFd>, within: Duration) -> Outcome {
    let device = &order.device;
    let deadline = Instant::now() + within;
    let not_sent = |class, why: String| Outcome::NotSent(error::plain("ensure", device, class, why));
    if let Err(why) = order.check(sockets.len()) {
        return not_sent(ErrorClass::Refused, why);
    }
    let lock = match Lock::take("ensure", device, deadline) {
        Ok(lock) => lock,
        Err(e) => return Outcome::NotSent(e),
    };
    // Under the lock, so that nobody of ours connects it meanwhile.
    match look(device.index) {
        Ok(seen) => match seen.unquiet() {
            None => {}
            Some(why) => return not_sent(ErrorClass::Busy, format!("in use: {why}; take another index")),
        },
        Err(e) => return Outcome::NotSent(error::os("ensure", device, "look at it", e)),
    }
    let request = order.clone();
    let worked = worker::run(deadline, move || {
        let answer = genl::Family::open().map(|mut family| family.connect(&request, &sockets));
        // The lock goes last: whoever looks into an outcome that is not known waits for this thread's end.
        drop(sockets);
        (answer, lock)
    });
    let unknown = |class, why: &str| Outcome::Unknown(error::plain("ensure", device, class, why));
    let (answer, lock) = match worked {
        Ok(done) => done,
        Err(worker::Lost::Full) => {
            let why = format!("{} commands hang already; see `hearth doctor`", worker::MOST);
            return not_sent(ErrorClass::Busy, why);
        }
        Err(worker::Lost::Late) => return unknown(ErrorClass::Deadline, "no acknowledgement in time"),
        Err(worker::Lost::Died) => return unknown(ErrorClass::Failed, "the thread that asked has failed"),
    };
    match answer {
        Err(e) => return Outcome::NotSent(family_error("ensure", device, e)),
        Ok(Err(e @ NetlinkError::Refused { .. })) => {
            return Outcome::Refused(netlink_error("ensure", device, "connect", e));
        }
        // Sent or not, acknowledged or not: a socket's failure does not say.
        Ok(Err(e)) => return Outcome::Unknown(netlink_error("ensure", device, "connect", e)),
        Ok(Ok(())) => {}
    }
    let seen = look(device.index);
    drop(lock);
    match seen {
        // Quiet before, acknowledged, and nobody of ours came between: it is this one. The task's number is that of the first
        // pid namespace, which need not be this one.
        Ok(seen) if seen.is_of(device) => Outcome::Done(Device { task: seen.task, ..device.clone() }),
        Ok(seen) => unknown(ErrorClass::Failed, &format!("acknowledged, and then: {seen}")),
        Err(e) => Outcome::Unknown(error::os("ensure", device, "look at it", e)),
    }
}

impl Order {
    fn check(&self, sockets: usize) -> Result<(), String> {
        let Order { size, block_size: block, timeouts, backend, .. } = self;
        if sockets == 0 {
            return Err("there is no socket".into());
        }
        if !block.is_power_of_two() || !(512..=4096).contains(block) {
            return Err(format!(
                "a block size of {block} bytes; the kernel takes 512, 1,024, 2,048 or 4,096"
            ));
        }
        if *size == 0 || size % block != 0 {
            return Err(format!("a size of {size} bytes is not whole blocks of {block}"));
        }
        if timeouts.request.as_secs() <= backend.as_secs() || timeouts.request <= *backend {
            return Err(format!(
                "the kernel would lose patience after {:?}, before the backend's {backend:?}; raise the request timeout",
                timeouts.request
            ));
        }
        if timeouts.dead_connection.as_secs() == 0 {
            return Err(
                "without a dead-connection timeout, openers would hang; give one second or more".into()
            );
        }
        Ok(())
    }
}

/// Shuts the sockets, disconnects the device if it is still the caller's, and waits until it is quiet: no `pid`, size 0,
/// nothing in flight, no holders. May be repeated; not connected and quiet, or another's by now, is success. The latter means
/// the index was let go before.
///
/// # Errors
/// [`ErrorClass::Busy`] if it is not quiet after `within`: somebody has it open, or its lock. [`ErrorClass::Deadline`] if the
/// kernel did not answer a disconnect.
pub fn release(device: &Device, server: &Server<'_>, within: Duration) -> Result<(), HostError> {
    let deadline = Instant::now() + within;
    if let Server::Shut(sockets) = server {
        for socket in *sockets {
            match rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both) {
                // Not connected: the other end is gone, which is as good.
                Ok(()) | Err(rustix::io::Errno::NOTCONN) => {}
                // Without it a disconnect could take the whole host's netlink with it.
                Err(e) => return Err(error::os("release", device, "shut its socket", e.into())),
            }
        }
    }
    let mut asked = false;
    let mut nameless: Option<(u32, Instant)> = None;
    loop {
        // The module was unloaded, which no device in use survives.
        if !index::exists(device.index) {
            return Ok(());
        }
        let lock = Lock::take("release", device, deadline)?;
        let seen = look(device.index).map_err(|e| error::os("release", device, "look at it", e))?;
        if seen.is_anothers(device) {
            return Ok(());
        }
        // Every device of ours has a name, but for a moment when it comes and when it goes.
        nameless = seen.nameless().map(|task| match nameless {
            Some((before, since)) if before == task => (task, since),
            _ => (task, Instant::now()),
        });
        if nameless.is_some_and(|(_, since)| since.elapsed() >= NAMELESS) {
            return Ok(());
        }
        let Some(why) = seen.unquiet() else { return Ok(()) };
        // Asked once: what keeps it after that is an opener, which another disconnect does not move.
        if seen.is_of(device) && !asked {
            disconnect(device, lock, deadline)?;
            asked = true;
            continue;
        }
        drop(lock);
        if Instant::now() >= deadline {
            let why =
                format!("not quiet after {within:?}: {why}; see who: fuser -v /dev/nbd{}", device.index);
            return Err(error::plain("release", device, ErrorClass::Busy, why));
        }
        std::thread::sleep(LOOK);
    }
}

/// The owner was seen under `lock`, which goes along: nobody can connect the index for another before the answer.
fn disconnect(device: &Device, lock: Lock, deadline: Instant) -> Result<(), HostError> {
    let index = device.index;
    let worked = worker::run(deadline, move || {
        let answer = genl::Family::open().map(|mut family| family.disconnect(index));
        drop(lock);
        answer
    });
    let plain = |class, why: &str| Err(error::plain("release", device, class, why));
    match worked {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(e))) => Err(netlink_error("release", device, "disconnect", e)),
        Ok(Err(e)) => Err(family_error("release", device, e)),
        Err(worker::Lost::Late) => plain(ErrorClass::Deadline, "the kernel does not answer the disconnect"),
        Err(worker::Lost::Died) => plain(ErrorClass::Failed, "the thread that asked has failed"),
        Err(worker::Lost::Full) => plain(ErrorClass::Busy, "too many commands hang already"),
    }
}

/// The connected devices. Ours are those whose backend names a sandbox that `claimed` knows: a device carries no instance.
///
/// # Errors
/// If `/sys/block` cannot be read.
pub fn census(claimed: &dyn Fn(&SandboxId) -> bool) -> Result<Census, HostError> {
    let mut census = Census::default();
    for index in indexes().map_err(|e| error::os("census", "nbd", "list /sys/block", e))? {
        let seen = match look(index) {
            Ok(seen) => seen,
            Err(e) => {
                census.incomplete.push(format!("nbd{index}: {e}"));
                continue;
            }
        };
        let Some(task) = seen.task else { continue };
        match seen.backend.as_deref().unwrap_or_default().parse::<SandboxId>() {
            Ok(sandbox) if claimed(&sandbox) => census
                .ours
                .push(Sighting { resource: Resource::Nbd { index, sandbox }, facts: format!("task {task}") }),
            _ => drop(census.foreign.insert(format!("/dev/nbd{index}"), seen.to_string())),
        }
    }
    Ok(census)
}

fn family_error(verb: &'static str, device: &Device, e: NetlinkError) -> HostError {
    match e.errno() {
        Some(libc::ENOENT) => {
            let why = "the kernel has no nbd here: load the module (modprobe nbd), in the host's network or pid namespace";
            error::plain(verb, device, ErrorClass::Refused, why)
        }
        _ => netlink_error(verb, device, "ask for the family", e),
    }
}

fn netlink_error(verb: &'static str, device: &Device, doing: &str, e: NetlinkError) -> HostError {
    error::os(verb, device, doing, e.into_io())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> Order {
        let backend = Duration::from_millis(1500);
        Order {
            device: Device { index: u32::MAX, owner: "abcdefghijkmnpqr".parse().unwrap(), task: None },
            size: 1 << 20,
            block_size: 4096,
            flags: 1,
            timeouts: Timeouts::above(backend),
            backend,
        }
    }

    #[test]
    fn the_kernel_is_never_the_first_to_lose_patience() {
        for backend in [0, 1, 999, 1000, 1001, 60_000].map(Duration::from_millis) {
            let order = Order { backend, timeouts: Timeouts::above(backend), ..order() };
            order.check(1).unwrap();
        }
        let mut short = order();
        // In the kernel's whole seconds it is no longer than the backend's time.
        short.timeouts.request = Duration::from_millis(1900);
        assert!(short.check(1).unwrap_err().contains("raise the request timeout"));
        short.timeouts = Timeouts { dead_connection: Duration::ZERO, ..order().timeouts };
        assert!(short.check(1).is_err());
    }

    #[test]
    fn what_cannot_be_is_refused_before_the_kernel_is_asked() {
        let bad = [
            Order { size: 0, ..order() },
            Order { size: 4097, ..order() },
            Order { block_size: 100, ..order() },
            Order { block_size: 8192, ..order() },
        ];
        for order in bad {
            let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
            let outcome = connect(&order, vec![a.into()], Duration::from_secs(1));
            assert!(matches!(&outcome, Outcome::NotSent(e) if e.class == ErrorClass::Refused), "{outcome:?}");
        }
        assert!(order().check(0).is_err());
        // An index that the kernel does not have.
        let outcome = connect(&order(), vec![], Duration::from_secs(1));
        assert!(matches!(outcome, Outcome::NotSent(_)), "{outcome:?}");
    }
}
