//! Netlink sockets: sending requests, matching answers by sequence number, dumps that know when they were cut.
//! Owns no knowledge of links or rules; see `rtnl` and `nft`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::attr::{Attrs, Message, align4, read_i32, read_u16, read_u32};

/// `NETLINK_ROUTE` of netlink(7).
pub(crate) const ROUTE: i32 = libc::NETLINK_ROUTE;
/// `NETLINK_NETFILTER` of netlink(7).
pub(crate) const NETFILTER: i32 = libc::NETLINK_NETFILTER;

/// `NLM_F_REPLACE`.
pub(crate) const F_REPLACE: u16 = 0x100;
/// `NLM_F_EXCL`.
pub(crate) const F_EXCL: u16 = 0x200;
/// `NLM_F_CREATE`.
pub(crate) const F_CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
pub(crate) const F_APPEND: u16 = 0x800;
const F_REQUEST: u16 = 1;
const F_ACK: u16 = 4;
const F_DUMP_INTR: u16 = 0x10;
const F_DUMP: u16 = 0x300;
const F_ACK_TLVS: u16 = 0x200;
const F_CAPPED: u16 = 0x100;

const NLMSG_NOOP: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const HEADER: usize = 16;

/// The kernel answers while `send` runs, except for long dumps; this only bounds a fault.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Dumps are cut into parts of at most 32 KiB by the kernel.
const RECEIVE_BYTES: usize = 128 * 1024;
/// Events of a few thousand links that go at once.
const EVENT_BYTES: i32 = 16 << 20;
/// A dump interrupted this often is reported as incomplete.
const DUMP_TRIES: usize = 4;

/// A netlink exchange that did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetlinkError {
    /// The kernel refused the request.
    #[error("the kernel refused it{}", .text.as_deref().map(|t| format!(" ({t})")).unwrap_or_default())]
    Refused {
        /// The errno.
        errno: i32,
        /// The kernel's own words (extended acknowledgement), if any.
        text: Option<String>,
    },
    /// The socket failed.
    #[error("the netlink socket failed")]
    Socket(#[source] io::Error),
    /// No answer came in time.
    #[error("no answer within {ANSWER_WITHIN:?}")]
    NoAnswer,
    /// A list changed while it was read, every time.
    #[error("the list changed while it was read, {DUMP_TRIES} times")]
    Interrupted,
    /// The answer does not parse.
    #[error("the answer does not parse: {0}")]
    Malformed(&'static str),
}

impl NetlinkError {
    /// The errno, if the kernel answered with one.
    pub(crate) fn errno(&self) -> Option<i32> {
        match self {
            NetlinkError::Refused { errno, .. } => Some(*errno),
            NetlinkError::Socket(e) => e.raw_os_error(),
            _ => None,
        }
    }

    /// The cause as an I/O error, for `HostError::source`.
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            NetlinkError::Refused { errno, .. } => io::Error::from_raw_os_error(errno),
            NetlinkError::Socket(e) => e,
            NetlinkError::NoAnswer => io::Error::from(io::ErrorKind::TimedOut),
            other => io::Error::other(other),
        }
    }
}

/// Result of a netlink exchange.
pub(crate) type Result<T> = std::result::Result<T, NetlinkError>;

/// Makes one errno a success: "already there", "already gone".
pub(crate) fn tolerate(result: Result<()>, errnos: &[i32]) -> Result<()> {
    match result {
        Err(e) if e.errno().is_some_and(|n| errnos.contains(&n)) => Ok(()),
        other => other,
    }
}

/// One message received.
#[derive(Debug)]
pub(crate) struct Reply {
    /// `nlmsg_type`.
    pub(crate) kind: u16,
    /// What follows the netlink header.
    pub(crate) body: Vec<u8>,
}

impl Reply {
    /// The attributes after a fixed header of `skip` bytes.
    pub(crate) fn attrs(&self, skip: usize) -> Attrs<'_> {
        Attrs::new(self.body.get(skip..).unwrap_or_default())
    }
}

/// A netlink socket. It belongs to the network namespace of the thread that opened it, wherever it is used.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    seq: u32,
    /// Of the last datagram; kept, since events come by the thousand.
    buffer: Vec<u8>,
}

struct Header {
    kind: u16,
    flags: u16,
    seq: u32,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open(protocol: i32) -> Result<Self> {
        // SAFETY: no pointers; the result is checked and owned at once.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
        if fd < 0 {
            return Err(NetlinkError::Socket(io::Error::last_os_error()));
        }
        // SAFETY: `fd` was just returned by socket(2) and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let socket = Self { fd, seq: 0, buffer: vec![0; RECEIVE_BYTES] };
        socket.option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 1)?;
        socket.option(libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 1)?;
        // Lets a dump of addresses or neighbours be limited to one link; requests must then be exact.
        socket.option(libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 1)?;
        // Room for a burst of acknowledgements; without CAP_NET_ADMIN the default size has to do.
        if let Err(e) = socket.option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, 1 << 20) {
            tracing::trace!(error = %e, "netlink receive buffer stays at its default size");
        }
        Ok(socket)
    }

    fn option(&self, level: i32, name: i32, value: i32) -> Result<()> {
        // SAFETY: the pointer and length describe `value`, which outlives the call.
        let rc = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                std::ptr::from_ref(&value).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(()) } else { Err(NetlinkError::Socket(io::Error::last_os_error())) }
    }

    /// Sends one request and waits for its acknowledgement.
    pub(crate) fn request(&mut self, message: Message) -> Result<()> {
        self.requests(vec![message])?.pop().unwrap_or(Err(NetlinkError::Malformed("no acknowledgement")))
    }

    /// Sends requests in one run; the kernel works them off in order and goes on past errors.
    pub(crate) fn requests(&mut self, messages: Vec<Message>) -> Result<Vec<Result<()>>> {
        // An empty datagram is an error (ENODATA).
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let first = self.seq.wrapping_add(1);
        let mut out = Vec::new();
        let count = messages.len();
        for message in messages {
            self.push(&mut out, message, F_REQUEST | F_ACK)?;
        }
        self.send(&out)?;
        let mut results: Vec<Option<Result<()>>> = (0..count).map(|_| None).collect();
        let mut open = count;
        let deadline = Instant::now() + ANSWER_WITHIN;
        while open > 0 {
            self.receive(deadline, |header, body| {
                let place = header.seq.wrapping_sub(first) as usize;
                if header.kind == NLMSG_ERROR
                    && let Some(slot @ None) = results.get_mut(place)
                {
                    *slot = Some(acknowledged(header.flags, body));
                    open -= 1;
                }
            })?;
        }
        Ok(results.into_iter().flatten().collect())
    }

    /// Asks for one object.
    pub(crate) fn get(&mut self, message: Message) -> Result<Reply> {
        let mut out = Vec::new();
        let seq = self.push(&mut out, message, F_REQUEST | F_ACK)?;
        self.send(&out)?;
        let deadline = Instant::now() + ANSWER_WITHIN;
        let (mut reply, mut done) = (None, None);
        while done.is_none() {
            self.receive(deadline, |header, body| match header.kind {
                _ if header.seq != seq => {}
                NLMSG_ERROR => done = Some(acknowledged(header.flags, body)),
                kind => reply = Some(Reply { kind, body: body.to_vec() }),
            })?;
        }
        done.unwrap_or(Ok(()))?;
        reply.ok_or(NetlinkError::Malformed("acknowledged without an answer"))
    }

    /// Asks for many objects in one run: a result each, in order. The answers must fit the socket's buffer, so keep
    /// to a few dozen.
    pub(crate) fn get_each(&mut self, messages: Vec<Message>) -> Result<Vec<Result<Reply>>> {
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let first = self.seq.wrapping_add(1);
        let mut out = Vec::new();
        let mut results: Vec<(Option<Reply>, Option<Result<()>>)> = Vec::new();
        for message in messages {
            self.push(&mut out, message, F_REQUEST | F_ACK)?;
            results.push((None, None));
        }
        self.send(&out)?;
        let mut open = results.len();
        let deadline = Instant::now() + ANSWER_WITHIN;
        while open > 0 {
            self.receive(deadline, |header, body| {
                let place = header.seq.wrapping_sub(first) as usize;
                let Some((reply, done @ None)) = results.get_mut(place) else { return };
                if header.kind == NLMSG_ERROR {
                    *done = Some(acknowledged(header.flags, body));
                    open -= 1;
                } else {
                    *reply = Some(Reply { kind: header.kind, body: body.to_vec() });
                }
            })?;
        }
        let without = || NetlinkError::Malformed("acknowledged without an answer");
        Ok(results
            .into_iter()
            .map(|(reply, done)| done.unwrap_or(Ok(())).and_then(|()| reply.ok_or_else(without)))
            .collect())
    }

    /// Lists objects. A list that changed underneath is read again; see [`NetlinkError::Interrupted`].
    pub(crate) fn dump(&mut self, message: &Message) -> Result<Vec<Reply>> {
        self.dump_seen(message)
            .and_then(|(seen, whole)| whole.then_some(seen).ok_or(NetlinkError::Interrupted))
    }

    /// As [`Self::dump`], but what the last try saw comes back in any case, with whether it is all.
    pub(crate) fn dump_seen(&mut self, message: &Message) -> Result<(Vec<Reply>, bool)> {
        for _ in 1..DUMP_TRIES {
            if let whole @ (_, true) = self.dump_once(message.clone())? {
                return Ok(whole);
            }
        }
        self.dump_once(message.clone())
    }

    fn dump_once(&mut self, message: Message) -> Result<(Vec<Reply>, bool)> {
        let mut out = Vec::new();
        let seq = self.push(&mut out, message, F_REQUEST | F_DUMP)?;
        self.send(&out)?;
        let (mut replies, mut whole, mut end) = (Vec::new(), true, None);
        while end.is_none() {
            // Each part has its own deadline: a long list is not a fault.
            let received = self.receive(Instant::now() + ANSWER_WITHIN, |header, body| {
                if header.seq != seq {
                    return;
                }
                whole &= header.flags & F_DUMP_INTR == 0;
                match header.kind {
                    NLMSG_NOOP => {}
                    NLMSG_ERROR => end = Some(acknowledged(header.flags, body)),
                    NLMSG_DONE => end = Some(verdict(read_i32(body).unwrap_or(0), None)),
                    kind => replies.push(Reply { kind, body: body.to_vec() }),
                }
            });
            match received {
                // Answers were dropped for want of space; the rest of this dump says nothing.
                Err(NetlinkError::Socket(e)) if e.raw_os_error() == Some(libc::ENOBUFS) => whole = false,
                other => other?,
            }
        }
        match end.unwrap_or(Ok(())) {
            Err(e) if e.errno() == Some(libc::EINTR) => Ok((replies, false)),
            Err(e) => Err(e),
            Ok(()) => Ok((replies, whole)),
        }
    }

    /// Hears of changes of one kind from now on (`RTNLGRP_…` of rtnetlink(7)), with room for a burst.
    pub(crate) fn join(&self, group: i32) -> Result<()> {
        if let Err(e) = self.option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, EVENT_BYTES) {
            tracing::trace!(error = %e, "netlink event buffer stays at its size");
        }
        // SAFETY: an all-zero sockaddr_nl is valid.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        let len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
        // SAFETY: pointer and length describe `address`, which outlives the call; port 0 lets the kernel choose.
        if unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return Err(NetlinkError::Socket(io::Error::last_os_error()));
        }
        self.option(libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group)
    }

    /// Waits for the next events, at most until `deadline`, and hands them out with those that are there
    /// already. False if events were lost, so that what is waited for must be looked at again.
    pub(crate) fn events(&mut self, deadline: Instant, mut each: impl FnMut(u16, &[u8])) -> Result<bool> {
        let mut until = deadline;
        loop {
            match self.receive(until, |header, body| each(header.kind, body)) {
                Ok(()) => until = Instant::now(),
                Err(NetlinkError::NoAnswer) => return Ok(true),
                Err(NetlinkError::Socket(e)) if e.raw_os_error() == Some(libc::ENOBUFS) => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }

    /// Sends an nfnetlink transaction: all of it takes effect or none. `messages` must begin with the batch
    /// begin message and end with the batch end message.
    pub(crate) fn transaction(&mut self, messages: Vec<Message>) -> Result<()> {
        let begin = self.seq.wrapping_add(1);
        let last = messages.len().saturating_sub(2);
        let last_seq = begin.wrapping_add(u32::try_from(last).unwrap_or(u32::MAX));
        let mut out = Vec::new();
        for (i, message) in messages.into_iter().enumerate() {
            let ack = if i == last { F_ACK } else { 0 };
            self.push(&mut out, message, F_REQUEST | ack)?;
        }
        self.send(&out)?;
        // Errors come in order of the messages. One that names the begin message (generation changed, commit
        // failed, no nf_tables) may come alone; without one the last message is always acknowledged.
        let deadline = Instant::now() + ANSWER_WITHIN;
        let mut end = None;
        let mut over = false;
        while !over {
            self.receive(deadline, |header, body| {
                let place = header.seq.wrapping_sub(begin);
                if header.kind != NLMSG_ERROR || place > last_seq.wrapping_sub(begin) {
                    return;
                }
                let result = acknowledged(header.flags, body);
                over |= header.seq == last_seq || (header.seq == begin && result.is_err());
                if !matches!(end, Some(Err(_))) {
                    end = Some(result);
                }
            })?;
        }
        end.unwrap_or(Ok(()))
    }

    fn push(&mut self, out: &mut Vec<u8>, message: Message, flags: u16) -> Result<u32> {
        self.seq = self.seq.wrapping_add(1);
        message
            .write(out, flags, self.seq)
            .then_some(self.seq)
            .ok_or(NetlinkError::Malformed("the request is too long"))
    }

    fn send(&self, bytes: &[u8]) -> Result<()> {
        loop {
            // SAFETY: the pointer and length describe `bytes`; an unconnected netlink socket sends to the kernel.
            let n = unsafe { libc::send(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
            match usize::try_from(n) {
                Ok(n) if n == bytes.len() => return Ok(()),
                Ok(_) => return Err(NetlinkError::Malformed("a request was sent in part")),
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if e.kind() != io::ErrorKind::Interrupted {
                        return Err(NetlinkError::Socket(e));
                    }
                }
            }
        }
    }

    /// Receives one datagram and hands out its messages.
    fn receive(&mut self, deadline: Instant, mut each: impl FnMut(Header, &[u8])) -> Result<()> {
        let n = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // Rounded up; past the deadline what is there already still counts.
            let ms = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
            // SAFETY: one valid pollfd, count one.
            let ready = unsafe { libc::poll(&raw mut poll, 1, ms) };
            if ready < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return Err(NetlinkError::Socket(io::Error::last_os_error()));
            }
            if ready == 0 && left.is_zero() {
                return Err(NetlinkError::NoAnswer);
            }
            if ready <= 0 {
                continue;
            }
            // SAFETY: zeroed sockaddr_nl is valid; pointers and lengths describe live local buffers.
            let (n, from) = unsafe {
                let mut from: libc::sockaddr_nl = std::mem::zeroed();
                let mut len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
                let n = libc::recvfrom(
                    self.fd.as_raw_fd(),
                    self.buffer.as_mut_ptr().cast(),
                    self.buffer.len(),
                    libc::MSG_TRUNC | libc::MSG_DONTWAIT,
                    (&raw mut from).cast(),
                    &raw mut len,
                );
                (n, from.nl_pid)
            };
            match usize::try_from(n) {
                // Only the kernel (port 0) is believed.
                Ok(_) if from != 0 => {}
                Ok(n) if n > self.buffer.len() => {
                    return Err(NetlinkError::Malformed("an answer was cut short"));
                }
                Ok(n) => break n,
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if !matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) {
                        return Err(NetlinkError::Socket(e));
                    }
                }
            }
        };
        let mut rest = &self.buffer[..n];
        while rest.len() >= HEADER {
            let len = read_u32(rest).unwrap_or(0) as usize;
            let (Some(kind), Some(flags), Some(seq)) =
                (read_u16(&rest[4..]), read_u16(&rest[6..]), read_u32(&rest[8..]))
            else {
                break;
            };
            let Some(body) = rest.get(HEADER..len) else {
                return Err(NetlinkError::Malformed("a message is longer than its datagram"));
            };
            each(Header { kind, flags, seq }, body);
            rest = rest.get(align4(len)..).unwrap_or_default();
        }
        Ok(())
    }
}

/// Reads a `struct nlmsgerr`.
fn acknowledged(flags: u16, body: &[u8]) -> Result<()> {
    let errno = read_i32(body).ok_or(NetlinkError::Malformed("an acknowledgement without a code"))?;
    let mut text = None;
    if flags & F_ACK_TLVS != 0 {
        let request = body.get(4..).and_then(read_u32).map_or(HEADER, |n| n as usize);
        let skip = 4 + if flags & F_CAPPED != 0 { HEADER } else { align4(request) };
        text = Attrs::new(body.get(skip..).unwrap_or_default()).string(1);
    }
    verdict(errno, text)
}

fn verdict(code: i32, text: Option<String>) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(NetlinkError::Refused { errno: code.saturating_neg(), text }) }
}
