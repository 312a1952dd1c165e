//! The commands of the kernel's NBD client, as generic netlink messages (`include/uapi/linux/nbd-netlink.h`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::thread::LinkNameSpaceType;

use super::Order;
use crate::net::attr::{Message, read_u16};
use crate::net::netlink::{NetlinkError, Result, Socket};

/// `GENL_ID_CTRL`, and of it `CTRL_CMD_GETFAMILY`, `CTRL_ATTR_FAMILY_ID` and `CTRL_ATTR_FAMILY_NAME`.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// `NBD_CMD_…`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
/// `NBD_ATTR_…`.
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const DEAD_CONN_TIMEOUT: u16 = 8;
const BACKEND_IDENTIFIER: u16 = 10;
/// `NBD_SOCK_ITEM` and in it `NBD_SOCK_FD`.
const SOCK_ITEM: u16 = 1;
const SOCK_FD: u16 = 1;

/// `struct genlmsghdr`.
const HEADER: usize = 4;

/// The network namespace that this thread is in, and the first one, if this process sees the host's first process.
const NETNS: &str = "/proc/thread-self/ns/net";
const FIRST_NETNS: &str = "/proc/1/ns/net";

/// The family "nbd" of this kernel. It is known in the host's first network namespace only.
pub(super) struct Family {
    socket: Socket,
    id: u16,
}

impl Family {
    /// Where this thread's network namespace does not have it, the thread goes over to the first one and stays: call this on
    /// one that ends afterwards.
    pub(super) fn open() -> Result<Self> {
        match Self::open_here() {
            Err(e)
                if e.errno() == Some(libc::ENOENT)
                    && enter_first_netns().map_err(NetlinkError::Socket)? =>
            {
                Self::open_here()
            }
            opened => opened,
        }
    }

    fn open_here() -> Result<Self> {
        let mut socket = Socket::open(libc::NETLINK_GENERIC)?;
        let reply = socket.get(command(CONTROL, GET_FAMILY).str(FAMILY_NAME, "nbd"))?;
        let id = reply.attrs(HEADER).get(FAMILY_ID).and_then(read_u16);
        Ok(Self { socket, id: id.ok_or(NetlinkError::Malformed("a family without a number"))? })
    }

    /// The task that asks is what the device shows as `pid`.
    pub(super) fn connect(&mut self, order: &Order, sockets: &[OwnedFd]) -> Result<()> {
        let seconds = |time: std::time::Duration| time.as_secs().to_ne_bytes();
        let message = command(self.id, CONNECT)
            .u32(INDEX, order.device.index)
            .attr(SIZE_BYTES, &order.size.to_ne_bytes())
            .attr(BLOCK_SIZE_BYTES, &order.block_size.to_ne_bytes())
            .attr(TIMEOUT, &seconds(order.timeouts.request))
            .attr(DEAD_CONN_TIMEOUT, &seconds(order.timeouts.dead_connection))
            .attr(SERVER_FLAGS, &u64::from(order.flags).to_ne_bytes())
            .str(BACKEND_IDENTIFIER, order.device.owner.as_str())
            .nest(SOCKETS, |message| {
                sockets.iter().fold(message, |message, socket| {
                    // A descriptor is never negative.
                    let fd = socket.as_raw_fd().unsigned_abs();
                    message.nest(SOCK_ITEM, |message| message.u32(SOCK_FD, fd))
                })
            });
        // It answers with the index too; the acknowledgement is what counts.
        self.socket.request(message)
    }

    /// Of an index that is not connected this is a success that changes nothing.
    pub(super) fn disconnect(&mut self, index: u32) -> Result<()> {
        self.socket.request(command(self.id, DISCONNECT).u32(INDEX, index))
    }
}

/// False if the thread is in it already.
fn enter_first_netns() -> io::Result<bool> {
    let first = File::open(FIRST_NETNS)?;
    let (here, there) = (std::fs::metadata(NETNS)?, first.metadata()?);
    if (here.dev(), here.ino()) == (there.dev(), there.ino()) {
        return Ok(false);
    }
    rustix::thread::move_into_link_name_space(first.as_fd(), Some(LinkNameSpaceType::Network))?;
    Ok(true)
}

fn command(family: u16, command: u8) -> Message {
    // Command, version, two bytes of nothing.
    Message::new(family, 0).raw(&[command, 1, 0, 0])
}
