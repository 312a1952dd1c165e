//! `hearth preflight`: whether this host can run sandboxes. Only looks: what a check could not see, it says.

use std::path::Path;
use std::process::{Command, Stdio};

use hearth_core::network::{SlotIndex, SlotLayout};
use hearth_core::spec::VmmKind;
use hearth_host::{facts, net};
use hearth_node::images::{Store, kernel as kernels, template as templates};
use serde::Serialize;

use super::Context;
use super::configured::StateArgs;
use super::error::{self, CliError};
use super::out;
use super::view;
use crate::config::{Config, FirecrackerDisk};
use crate::serve::vmms;

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth preflight
  hearth preflight --json | jq '.[] | select(.result != \"ok\")'

The exit code is 1 if something is missing that hearth cannot do without.";

/// Less than this is not enough for anything.
const DISK_LEAST: u64 = 1 << 30;
/// Less than this is soon used up.
const DISK_FAIR: u64 = 5 << 30;

/// Arguments of `hearth preflight`.
#[derive(Debug, clap::Args)]
pub(super) struct PreflightArgs {
    #[command(flatten)]
    state: StateArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Ok,
    Warn,
    Fail,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Warn => "warn",
            Outcome::Fail => "fail",
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Check {
    check: &'static str,
    result: Outcome,
    found: String,
    /// What to do; empty if nothing.
    todo: String,
}

fn ok(check: &'static str, found: impl Into<String>) -> Check {
    Check { check, result: Outcome::Ok, found: found.into(), todo: String::new() }
}

fn warn(check: &'static str, found: impl Into<String>, todo: impl Into<String>) -> Check {
    Check { check, result: Outcome::Warn, found: found.into(), todo: todo.into() }
}

fn fail(check: &'static str, found: impl Into<String>, todo: impl Into<String>) -> Check {
    Check { check, result: Outcome::Fail, found: found.into(), todo: todo.into() }
}

/// All checks.
pub(super) fn checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![root()];
    checks.extend(machines(config));
    checks.extend([
        guest(config),
        cgroups(),
        tun(),
        firewall(&config.slot_layout()),
        forward_policies(),
        ip_forward(),
    ]);
    checks.push(nbd(config));
    checks.extend([overlap(&config.slot_layout()), neighbours(), disk(&config.state_dir)]);
    checks.push(program("mke2fs", "e2fsprogs", "makes disks", Outcome::Fail));
    checks.push(program("mmdebstrap", "mmdebstrap", "only for `template create --debian`", Outcome::Warn));
    checks.extend(images(&config.state_dir));
    checks.push(port(config));
    checks
}

/// Runs all checks and shows them.
pub(super) fn run(args: &PreflightArgs, context: &Context) -> Result<u8, CliError> {
    let checks = checks(&args.state.load()?.config);
    if context.json {
        out::json(&checks)?;
    } else {
        let row = |c: &Check| vec![c.result.word().to_owned(), c.check.to_owned(), c.found.clone()];
        out::print(&view::table(&["RESULT", "CHECK", "FOUND"], checks.iter().map(row)))?;
        let todo: String = checks
            .iter()
            .filter(|c| c.result != Outcome::Ok && !c.todo.is_empty())
            .map(|c| format!("  {}: {}\n", c.check, c.todo))
            .collect();
        if !todo.is_empty() {
            out::print(&format!("\nWhat to do:\n{todo}"))?;
        }
    }
    let failed = checks.iter().any(|c| c.result == Outcome::Fail);
    Ok(if failed { error::FAILED } else { error::OK })
}

fn root() -> Check {
    match facts::is_root() {
        true => ok("root", "yes"),
        false => {
            fail("root", "no", "run `hearth serve`, `template` and `kernel` as root; clients need no root")
        }
    }
}

/// KVM, the two VMMs, and whether one of them is left.
fn machines(config: &Config) -> Vec<Check> {
    let found = vmms::find(config);
    let kvm = match &found.kvm {
        Ok(()) => ok("kvm", "runs ordinary guests"),
        Err(why) => warn(
            "kvm",
            why.clone(),
            "sandboxes run under qemu, emulated and slower; use a host with vmx or svm",
        ),
    };
    let mut checks = vec![kvm];
    let mut usable = false;
    for (kind, check) in [(VmmKind::Firecracker, "firecracker"), (VmmKind::Qemu, "qemu")] {
        checks.push(match found.program(kind) {
            Ok(path) => match version(&path) {
                Ok(line) => {
                    usable |= kind == VmmKind::Qemu || found.kvm.is_ok();
                    ok(check, format!("{line} ({})", path.display()))
                }
                Err(why) => warn(check, format!("{}: {why}", path.display()), "replace that program"),
            },
            Err(why) => {
                let (why, todo) = why.split_once("; ").map_or((why.as_str(), ""), |(why, todo)| (why, todo));
                warn(check, why, todo)
            }
        });
    }
    checks.push(match usable {
        true => ok("vmm", format!("{}: {}", found.auto, found.auto_reason)),
        false => {
            fail("vmm", "none can be used", "install qemu-system-x86, or Firecracker on a host with KVM")
        }
    });
    checks
}

/// The first line of `--version`; Firecracker prints several.
fn version(program: &Path) -> Result<String, String> {
    let output =
        Command::new(program).arg("--version").stdin(Stdio::null()).output().map_err(|e| e.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.lines().find(|l| !l.trim().is_empty()) {
        Some(line) if output.status.success() => Ok(line.trim().to_owned()),
        _ => Err(format!("--version ended with {}", output.status)),
    }
}

fn guest(config: &Config) -> Check {
    let path = vmms::guest_program(config);
    match path.is_file() {
        true => ok("guest agent", path.display().to_string()),
        false => fail(
            "guest agent",
            format!("{} is not there", path.display()),
            "put hearth-guest beside hearth, or set HEARTH_GUEST",
        ),
    }
}

fn cgroups() -> Check {
    const WANTED: [&str; 3] = ["cpu", "memory", "pids"];
    let todo = "mount cgroup2 on /sys/fs/cgroup, or boot with systemd.unified_cgroup_hierarchy=1";
    match facts::cgroup2() {
        Ok(Some(found)) => {
            let missing: Vec<&str> =
                WANTED.into_iter().filter(|w| !found.controllers.iter().any(|c| c == w)).collect();
            let place = found.mount.display();
            match missing.is_empty() {
                true => ok("cgroup v2", format!("{place} with {}", WANTED.join(", "))),
                false => warn(
                    "cgroup v2",
                    format!("{place} without {}: process tracking and kill only", missing.join(", ")),
                    "for limits too, boot with systemd.unified_cgroup_hierarchy=1",
                ),
            }
        }
        Ok(None) => fail("cgroup v2", "not mounted", todo),
        Err(e) => fail("cgroup v2", e.to_string(), todo),
    }
}

fn tun() -> Check {
    match Path::new("/dev/net/tun").exists() {
        true => ok("tun", "/dev/net/tun"),
        false => fail("tun", "/dev/net/tun is not there", "load the module: modprobe tun"),
    }
}

/// Disks of the kernel's own NBD client, with the times it is told for our server.
fn nbd(config: &Config) -> Check {
    const CHECK: &str = "nbd";
    const LOAD: &str = "modprobe nbd nbds_max=64, and have it loaded at boot";
    let mode = config.firecracker_disk;
    let times = hearth_host::nbd::Timeouts::above(hearth_vmm::block::nbd::Limits::default().request);
    match hearth_host::nbd::usable() {
        Ok(limits) => {
            let most = match config.nbd_devices {
                0 => limits.most,
                most => most.min(limits.most),
            };
            let used = match mode {
                FirecrackerDisk::File => "none used".to_owned(),
                _ => format!("so up to {most} sandboxes on Firecracker"),
            };
            let (request, dead) = (times.request.as_secs(), times.dead_connection.as_secs());
            ok(
                CHECK,
                format!(
                    "{} devices (nbds_max), {used} (disk.firecracker is {mode}); request timeout {request} s, \
                     dead-connection timeout {dead} s",
                    limits.most
                ),
            )
        }
        Err(e) if mode == FirecrackerDisk::Nbd => {
            fail(CHECK, format!("disk.firecracker is nbd: {}", e.why), LOAD)
        }
        Err(e) => ok(CHECK, format!("disks of Firecracker are files: {}", e.why)),
    }
}

fn firewall(layout: &SlotLayout) -> Check {
    if !facts::is_root() {
        return warn("nftables", "not looked at: needs root", "run preflight as root");
    }
    match net::host_firewall::census(layout) {
        Ok(_) => ok("nftables", "the kernel answers"),
        Err(e) => fail("nftables", e.to_string(), "load the module: modprobe nf_tables"),
    }
}

/// Chains of other firewalls that drop what is forwarded. The daemon adds two constant rules to them.
fn forward_policies() -> Check {
    const CHECK: &str = "forward policy";
    if !facts::is_root() {
        return warn(CHECK, "not looked at: needs root", "run preflight as root");
    }
    match net::host_firewall::obstacles() {
        Ok(chains) if chains.is_empty() => ok(CHECK, "no other firewall drops forwarded packets by default"),
        Ok(chains) => ok(CHECK, format!("DROP in {}; the daemon adds two rules there", chains.join(", "))),
        Err(e) => warn(CHECK, e.to_string(), "none; the daemon looks for itself at start"),
    }
}

fn ip_forward() -> Check {
    match facts::ip_forward() {
        Ok(true) => ok("ip_forward", "on"),
        Ok(false) => ok("ip_forward", "off; the daemon turns it on and records the old value"),
        Err(e) => warn("ip_forward", e.to_string(), "none; the daemon tries for itself"),
    }
}

fn overlap(layout: &SlotLayout) -> Check {
    let todo = "choose another network.cidr (HEARTH_NETWORK_CIDR)";
    match net::links::Links::of(layout).and_then(|links| net::routes::overlapping(layout, &links)) {
        Ok(routes) if routes.is_empty() => ok("addresses", format!("{} is free", layout.cidr)),
        Ok(routes) => fail("addresses", format!("{} overlaps {}", layout.cidr, routes.join(", ")), todo),
        Err(e) => warn("addresses", e.to_string(), "none; the daemon looks for itself at start"),
    }
}

fn neighbours() -> Check {
    match facts::neighbour_limit() {
        // Two entries for each active slot, on each side of its link.
        Ok(limit) if limit >= 1024 => {
            let most = (limit / 2).min(u64::from(SlotIndex::MAX));
            ok("neighbour table", format!("room for about {most} active sandboxes"))
        }
        Ok(limit) => warn(
            "neighbour table",
            format!("room for about {} active sandboxes", limit / 2),
            "raise net.ipv4.neigh.default.gc_thresh3",
        ),
        Err(e) => warn("neighbour table", e.to_string(), "none"),
    }
}

fn disk(state_dir: &Path) -> Check {
    match facts::free_bytes(state_dir) {
        Ok(free) => {
            let found = format!("{} free for {}", view::bytes(free), state_dir.display());
            match free {
                0..DISK_LEAST => fail("disk", found, "free at least 1 GiB, or choose another state_dir"),
                DISK_LEAST..DISK_FAIR => warn("disk", found, "templates and writable disks need more soon"),
                _ => ok("disk", found),
            }
        }
        Err(e) => warn("disk", e.to_string(), "see that state_dir can be reached"),
    }
}

fn program(name: &'static str, package: &str, what_for: &str, otherwise: Outcome) -> Check {
    // Often not in the PATH of an ordinary user.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/sbin".into(), "/sbin".into()];
    let found = std::env::split_paths(&path).chain(extra).map(|dir| dir.join(name)).find(|p| p.is_file());
    match found {
        Some(path) => ok(name, path.display().to_string()),
        None => Check {
            check: name,
            result: otherwise,
            found: format!("not there ({what_for})"),
            todo: format!("apt-get install {package}"),
        },
    }
}

fn images(state_dir: &Path) -> Vec<Check> {
    const KERNEL: &str = "hearth kernel import default --image /boot/vmlinuz-… --modules /lib/modules/…";
    const TEMPLATE: &str = "hearth template create base --debian bookworm";
    // Opening the store would make these.
    if !["kernels", "templates", "tmp"].iter().all(|d| state_dir.join(d).is_dir()) {
        let none = format!("{} holds none yet", state_dir.display());
        return vec![warn("kernels", none.clone(), KERNEL), warn("templates", none, TEMPLATE)];
    }
    let store = match Store::open(state_dir) {
        Ok(store) => store,
        Err(e) => return vec![warn("kernels", e.to_string(), "run preflight as root")],
    };
    let names =
        |check, todo, found: Result<(Vec<String>, Vec<String>), hearth_node::images::ImageError>| match found
        {
            Ok((_, broken)) if !broken.is_empty() => {
                warn(check, broken.join(", "), "remove what is broken and make it again")
            }
            Ok((names, _)) if names.is_empty() => warn(check, "none", todo),
            Ok((names, _)) => ok(check, names.join(", ")),
            Err(e) => warn(check, e.to_string(), "run preflight as root"),
        };
    let k = kernels::list(&store).map(|l| (l.found.iter().map(|k| k.name.to_string()).collect(), l.broken));
    let t = templates::list(&store).map(|l| (l.found.iter().map(|t| t.name.to_string()).collect(), l.broken));
    vec![names("kernels", KERNEL, k), names("templates", TEMPLATE, t)]
}

fn port(config: &Config) -> Check {
    let listen = config.listen;
    match facts::tcp_listeners(listen.port()) {
        Ok(found) if found.is_empty() => ok("port", format!("{listen} is free")),
        Ok(found) => match found.into_iter().find_map(|l| l.holder) {
            Some(holder) if holder.comm == "hearth" => {
                ok("port", format!("{listen} is served by hearth (pid {})", holder.pid))
            }
            Some(holder) => fail(
                "port",
                format!("{listen} is held by {} (pid {})", holder.comm, holder.pid),
                "end that process, or choose another address (HEARTH_LISTEN)",
            ),
            None => fail(
                "port",
                format!("{listen} is held by a process that cannot be seen"),
                "run preflight as root to see which, or choose another address (HEARTH_LISTEN)",
            ),
        },
        Err(e) => warn("port", e.to_string(), "none"),
    }
}
