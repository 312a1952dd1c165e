//! Connection tracking by ctnetlink: forgetting all entries of the calling thread's network namespace.

use super::attr::Message;
use super::netlink::{Result, Socket};

/// `NFNL_SUBSYS_CTNETLINK` and `IPCTNL_MSG_CT_DELETE`.
const DELETE: u16 = (1 << 8) | 2;
const AF_UNSPEC: u8 = 0;

/// Forgets every connection of the socket's namespace. Without a tuple the deletion means all of them.
pub(crate) fn flush(nfnetlink: &mut Socket) -> Result<()> {
    nfnetlink.request(Message::new(DELETE, 0).raw(&[AF_UNSPEC, 0, 0, 0]))
}
