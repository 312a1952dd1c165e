//! The host's first request: hostname, hosts, name servers, network, clock. Doing it again is harmless.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_core::agent::{AgentError, AgentErrorKind, GuestConfig};
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::agent::fail;
use crate::net;

/// A clock that is off by less is left alone.
const CLOCK_SLACK: Duration = Duration::from_secs(1);

/// Applies the settings; the environment is the agent's own matter.
pub(crate) async fn apply(config: &GuestConfig) -> Result<(), AgentError> {
    let failed = |what: &str, e: &io::Error| fail(AgentErrorKind::Failed, format!("cannot set {what}: {e}"));
    set_clock(config.now_ms).map_err(|e| failed("the clock", &e))?;
    set_hostname(&config.hostname)?;
    if let Some(network) = &config.net {
        net::configure(network).await.map_err(|e| failed("the network", &e))?;
        let servers: String = network.dns.iter().map(|ip| format!("nameserver {ip}\n")).collect();
        write("/etc/resolv.conf", &servers).map_err(|e| failed("/etc/resolv.conf", &e))?;
    }
    Ok(())
}

fn set_hostname(name: &str) -> Result<(), AgentError> {
    if name.is_empty() {
        return Ok(());
    }
    // The kernel takes 64 bytes; control characters would corrupt the files.
    if name.len() > 64 || !name.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(fail(AgentErrorKind::Invalid, format!("{name:?} is not a hostname")));
    }
    let failed = |what: &str, e: io::Error| fail(AgentErrorKind::Failed, format!("cannot set {what}: {e}"));
    rustix::system::sethostname(name.as_bytes()).map_err(|e| failed("the hostname", e.into()))?;
    write("/etc/hostname", &format!("{name}\n")).map_err(|e| failed("/etc/hostname", e))?;
    let hosts =
        format!("127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    write("/etc/hosts", &hosts).map_err(|e| failed("/etc/hosts", e))
}

/// Writes a file in `/etc`. A link there (resolv.conf often is one, into a `/run` that is empty now) is
/// replaced, not followed.
fn write(path: &str, content: &str) -> io::Result<()> {
    let path = Path::new(path);
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    if path.symlink_metadata().is_ok_and(|m| !m.is_file()) {
        std::fs::remove_file(path)?;
    }
    std::fs::write(path, content)
}

fn set_clock(now_ms: u64) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wanted = Duration::from_millis(now_ms);
    if now_ms == 0 || wanted.abs_diff(now) <= CLOCK_SLACK {
        return Ok(());
    }
    let tv_sec = i64::try_from(wanted.as_secs()).map_err(io::Error::other)?;
    let time = Timespec { tv_sec, tv_nsec: i64::from(wanted.subsec_nanos()) };
    Ok(clock_settime(ClockId::Realtime, time)?)
}
