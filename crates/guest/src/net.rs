//! The guest's network by ioctl: loopback, and address, link and default route of the first card.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use hearth_core::agent::GuestNet;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::time::{Instant, sleep};

/// How long the card may take to appear.
const PATIENCE: Duration = Duration::from_secs(10);

/// `struct rtentry` of the kernel on 64-bit machines; libc has it for other systems only.
#[repr(C)]
#[derive(Default)]
struct RouteEntry {
    pad1: libc::c_ulong,
    dst: RawAddress,
    gateway: RawAddress,
    genmask: RawAddress,
    flags: libc::c_ushort,
    pad2: libc::c_short,
    pad3: libc::c_ulong,
    pad4: usize,
    metric: libc::c_short,
    dev: usize,
    mtu: libc::c_ulong,
    window: libc::c_ulong,
    irtt: libc::c_ushort,
}

/// `struct sockaddr` holding an IPv4 address.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct RawAddress {
    family: u16,
    port: u16,
    address: [u8; 4],
    zero: [u8; 8],
}

impl RawAddress {
    fn new(address: Ipv4Addr) -> Self {
        Self { family: libc::AF_INET as u16, address: address.octets(), ..Self::default() }
    }
}

/// Raises the loopback interface; the kernel gives it its address.
pub(crate) fn loopback_up() -> io::Result<()> {
    raise(&socket()?, "lo")
}

/// Gives the first card its address and the default route.
pub(crate) async fn configure(net: &GuestNet) -> io::Result<()> {
    let start = Instant::now();
    let name = loop {
        match first_card() {
            Some(name) => break name,
            None if start.elapsed() > PATIENCE => {
                return Err(io::Error::other(
                    "the guest has no network card (is virtio_net in its kernel or modules?)",
                ));
            }
            None => sleep(Duration::from_millis(5)).await,
        }
    };
    if net.prefix_len > 32 {
        return Err(io::Error::other(format!("prefix length {} is over 32", net.prefix_len)));
    }
    let mask = u32::MAX.checked_shl(32 - u32::from(net.prefix_len)).unwrap_or(0);
    let socket = socket()?;
    set_address(&socket, &name, libc::SIOCSIFADDR, net.address)?;
    set_address(&socket, &name, libc::SIOCSIFNETMASK, Ipv4Addr::from(mask))?;
    raise(&socket, &name)?;
    let route = RouteEntry {
        dst: RawAddress::new(Ipv4Addr::UNSPECIFIED),
        gateway: RawAddress::new(net.gateway),
        genmask: RawAddress::new(Ipv4Addr::UNSPECIFIED),
        flags: libc::RTF_UP | libc::RTF_GATEWAY,
        ..RouteEntry::default()
    };
    // SAFETY: the kernel reads a struct of the layout it defines.
    let added = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT, &raw const route) };
    match checked(added) {
        // Configured twice.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// The card with the lowest index that is not the loopback interface.
fn first_card() -> Option<String> {
    let cards = std::fs::read_dir("/sys/class/net").ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let index: u32 = std::fs::read_to_string(entry.path().join("ifindex")).ok()?.trim().parse().ok()?;
        // Tunnels that some kernels always have are no cards.
        entry.path().join("device").exists().then_some((index, name))
    });
    cards.min().map(|(_, name)| name)
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?)
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: all-zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays zero: the name's end.
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request
}

fn set_address(socket: &OwnedFd, name: &str, what: libc::c_ulong, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(name);
    // SAFETY: both are 16 bytes without invalid values.
    request.ifr_ifru.ifru_addr =
        unsafe { std::mem::transmute::<RawAddress, libc::sockaddr>(RawAddress::new(address)) };
    // SAFETY: the kernel reads a struct of the layout it defines.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), what, &raw const request) })
}

fn raise(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = request(name);
    // SAFETY: the kernel reads and writes a struct of the layout it defines; the flags are the part it filled.
    unsafe {
        checked(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request))?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short;
        checked(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request))
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_have_the_kernels_layout() {
        assert_eq!(size_of::<RawAddress>(), size_of::<libc::sockaddr>());
        assert_eq!(size_of::<RouteEntry>(), 120);
        assert_eq!(std::mem::offset_of!(RouteEntry, flags), 56);
        assert_eq!(std::mem::offset_of!(RouteEntry, dev), 88);
    }
}
