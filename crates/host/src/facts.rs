//! Read-only facts of the host, for `preflight` and the choice of a VMM. Nothing here changes anything, and
//! a fact that could not be read is an error or `None`, never a guess.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::{cgroup, process};

/// The CPU flag that says it can run guests: `vmx` or `svm`. Without it a usable-looking `/dev/kvm` can be a
/// paravirtual one, on which an ordinary guest aborts or spins.
///
/// # Errors
/// If `/proc/cpuinfo` cannot be read.
pub fn cpu_virtualization() -> io::Result<Option<&'static str>> {
    let text = fs::read_to_string("/proc/cpuinfo")?;
    Ok(virtualization_of(&text))
}

fn virtualization_of(cpuinfo: &str) -> Option<&'static str> {
    let line = cpuinfo.lines().find(|l| l.starts_with("flags"))?;
    ["vmx", "svm"].into_iter().find(|flag| line.split_ascii_whitespace().any(|w| w == *flag))
}

/// Whether `/dev/kvm` opens for reading and writing and speaks the one stable version of the interface.
///
/// # Errors
/// Why not.
pub fn kvm_usable() -> io::Result<()> {
    use std::os::fd::AsRawFd;
    const KVM_GET_API_VERSION: libc::Ioctl = 0xAE00;
    let kvm = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: this request takes no argument and writes nothing.
    match unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_API_VERSION, 0) } {
        12 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        other => Err(io::Error::other(format!("/dev/kvm speaks version {other}, not 12"))),
    }
}

/// Estimated TSC frequency in kHz: half of bogomips, which the kernel derives from it. For
/// `tsc_early_khz=` of an emulated guest.
///
/// # Errors
/// If `/proc/cpuinfo` cannot be read.
pub fn tsc_khz() -> io::Result<Option<u64>> {
    Ok(tsc_khz_of(&fs::read_to_string("/proc/cpuinfo")?))
}

fn tsc_khz_of(cpuinfo: &str) -> Option<u64> {
    let line = cpuinfo.lines().find(|l| l.starts_with("bogomips"))?;
    let (whole, part) = line.split_once(':')?.1.trim().split_once('.')?;
    let hundredths: u64 = format!("{whole}{:0<2.2}", part).parse().ok()?;
    // bogomips / 2 * 1000, in hundredths.
    (hundredths > 0).then_some(hundredths * 5)
}

/// A cgroup2 mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup2 {
    /// Where.
    pub mount: PathBuf,
    /// Controllers it has.
    pub controllers: Vec<String>,
}

/// The cgroup2 mount hearth would use.
///
/// # Errors
/// If mountinfo or the list of controllers cannot be read.
pub fn cgroup2() -> io::Result<Option<Cgroup2>> {
    let Some(mount) = cgroup::mount_point()? else {
        return Ok(None);
    };
    let text = fs::read_to_string(mount.join("cgroup.controllers"))?;
    Ok(Some(Cgroup2 { controllers: text.split_ascii_whitespace().map(str::to_owned).collect(), mount }))
}

/// Bytes an unprivileged writer can still have on the file system of `path`, or of its nearest ancestor that
/// exists.
///
/// # Errors
/// If none can be looked at.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let existing = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(existing)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A TCP socket that listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Where it listens.
    pub address: SocketAddr,
    /// Who holds it; `None` if that could not be seen (not root, or another namespace).
    pub holder: Option<Holder>,
}

/// A process that holds a descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its pid.
    pub pid: u32,
    /// Its name, at most 15 bytes.
    pub comm: String,
}

/// Listeners on a TCP port in this thread's network namespace, each with a holder where one was found.
///
/// # Errors
/// If the kernel's table cannot be read.
pub fn tcp_listeners(port: u16) -> io::Result<Vec<Listener>> {
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        match fs::read_to_string(format!("/proc/thread-self/net/{table}")) {
            Ok(text) => found.extend(text.lines().skip(1).filter_map(listener_of)),
            // A kernel without IPv6.
            Err(e) if table == "tcp6" && e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    found.retain(|(address, _)| address.port() == port);
    Ok(found
        .into_iter()
        .map(|(address, inode)| Listener { address, holder: holder_of_socket(inode) })
        .collect())
}

/// One line of `/proc/net/tcp{,6}`, if the socket listens (state 0A): address and inode.
fn listener_of(line: &str) -> Option<(SocketAddr, u64)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    if *fields.get(3)? != "0A" {
        return None;
    }
    let (address, port) = fields.get(1)?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    // Groups of 32 bits, each printed as a number in the host's byte order.
    let words: Vec<u8> = (0..address.len() / 8)
        .map(|i| u32::from_str_radix(address.get(i * 8..i * 8 + 8)?, 16).ok())
        .collect::<Option<Vec<u32>>>()?
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    let ip = match words.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(words).ok()?)),
        16 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(words).ok()?)),
        _ => return None,
    };
    Some((SocketAddr::new(ip, port), fields.get(9)?.parse().ok()?))
}

fn holder_of_socket(inode: u64) -> Option<Holder> {
    let wanted = format!("socket:[{inode}]");
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(fds) = fs::read_dir(entry.path().join("fd")) else { continue };
        if fds.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str() == wanted.as_str()))
        {
            return Some(Holder { pid, comm: process::comm(pid)? });
        }
    }
    None
}

/// Release of the kernel, as `uname -r` prints it.
#[must_use]
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Whether we are root.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Most neighbour entries of the whole host (`gc_thresh3`): each active slot needs about two.
///
/// # Errors
/// If it cannot be read.
pub fn neighbour_limit() -> io::Result<u64> {
    number("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
}

/// Most tracked connections; `None` while the module is not loaded.
///
/// # Errors
/// If it exists and cannot be read.
pub fn conntrack_max() -> io::Result<Option<u64>> {
    match number("/proc/sys/net/netfilter/nf_conntrack_max") {
        Ok(n) => Ok(Some(n)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Whether the host forwards IPv4.
///
/// # Errors
/// If it cannot be read.
pub fn ip_forward() -> io::Result<bool> {
    number("/proc/sys/net/ipv4/ip_forward").map(|n| n != 0)
}

/// Limits of open files of this process, soft and hard; `None`: unlimited.
#[must_use]
pub fn nofile_limits() -> (Option<u64>, Option<u64>) {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    (limit.current, limit.maximum)
}

pub(crate) fn number(path: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{path} holds {text:?}, not a number"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_facts_are_whole_words_and_whole_numbers() {
        let text = "flags\t\t: fpu svm_lock nvmx\nbogomips\t: 5199.99\n";
        assert_eq!(virtualization_of(text), None);
        assert_eq!(virtualization_of("flags : fpu svm\n"), Some("svm"));
        assert_eq!(tsc_khz_of(text), Some(2_599_995));
        assert_eq!(tsc_khz_of("bogomips : 4000.5\n"), Some(2_000_250));
        assert_eq!(tsc_khz_of("nothing"), None);
    }

    #[test]
    fn a_listener_of_ours_is_found_with_its_holder() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let found = tcp_listeners(address.port()).unwrap();
        let mine = found.iter().find(|l| l.address == address).unwrap();
        assert_eq!(mine.holder.as_ref().map(|h| h.pid), Some(std::process::id()));
    }

    #[test]
    fn facts_of_this_host_can_be_read() {
        assert!(free_bytes(Path::new("/no/such/place")).unwrap() > 0);
        assert!(!kernel_release().is_empty());
        assert!(neighbour_limit().unwrap() > 0);
        ip_forward().unwrap();
        cgroup2().unwrap();
        assert!(nofile_limits().0.is_none_or(|n| n > 0));
    }
}
