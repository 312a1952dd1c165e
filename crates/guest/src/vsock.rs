//! The vsock listener (Firecracker). One connection at a time: a new one is a host that restarted, and
//! replaces the old.

use std::future::pending;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hearth_core::agent::VSOCK_PORT;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

use crate::agent::Agent;
use crate::{say, session};

type Session<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Listens for ever, where the kernel knows vsock.
pub(crate) async fn serve(agent: &Arc<Agent>) {
    let listener = match listen() {
        Ok(listener) => listener,
        // No such module: the host uses the serial port. Any other error is worth a line.
        Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => return,
        Err(e) => return say!("vsock port {VSOCK_PORT}: {e}"),
    };
    let mut session: Session<'_> = Box::pin(pending());
    loop {
        tokio::select! {
            accepted = accept(&listener) => match accepted {
                // Drops the old session; its commands go on.
                Ok(stream) => session = Box::pin(session::serve(stream, agent)),
                Err(e) => {
                    say!("vsock port {VSOCK_PORT}: {e}");
                    tokio::time::sleep(Duration::from_millis(250)).await;
                }
            },
            () = &mut session => session = Box::pin(pending()),
        }
    }
}

fn listen() -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: a plain system call; the result is checked.
    let fd = unsafe {
        libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all-zero is a valid sockaddr_vm.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_ANY;
    address.svm_port = VSOCK_PORT;
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the address is initialised and its length is given.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    // SAFETY: a plain system call on a descriptor we own.
    if bound < 0 || unsafe { libc::listen(fd.as_raw_fd(), 4) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an OwnedFd gives the same open descriptor each time.
    Ok(unsafe { AsyncFd::register(fd)? })
}

async fn accept(listener: &AsyncFd<OwnedFd>) -> io::Result<UnixStream> {
    let fd = listener.async_io(tokio::io::Interest::READABLE, |fd| {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no address is asked for; the result is checked.
        let fd = unsafe { libc::accept4(fd.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, owned by nobody else.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    });
    // The types know streams of the unix family; reading, writing and polling are the same for vsock.
    UnixStream::from_std(StdStream::from(fd.await?))
}
