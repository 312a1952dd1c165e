//! Only `host` (and `guest`, inside the VM) may name the crates that make system calls, and only `host` may
//! run the programs that change a host's network or mounts. Test code is exempt: it plays the kernel's part.

use anyhow::{Context, Result};

use super::tree::{File, Tree};
use super::{Finding, Outcome, strip};

/// Crates that reach the kernel, as named in a manifest; names with `netlink-` in front count too.
const KERNEL_CRATES: &[&str] = &[
    "caps",
    "cgroups-rs",
    "libc",
    "linux-raw-sys",
    "neli",
    "nftables",
    "nftnl",
    "nix",
    "procfs",
    "rtnetlink",
    "rustables",
    "rustix",
    "syscalls",
    "userfaultfd",
];
/// Programs that change the host's network or mounts.
const KERNEL_PROGRAMS: &[&str] = &[
    "ip",
    "ip6tables",
    "iptables",
    "iptables-legacy",
    "iptables-nft",
    "iptables-restore",
    "iptables-save",
    "modprobe",
    "mount",
    "nft",
    "nsenter",
    "sysctl",
    "tc",
    "umount",
    "unshare",
];

/// Manifests, sources and programs.
pub(crate) fn check(tree: &Tree) -> Result<Outcome> {
    let mut findings = vec![];
    for file in &tree.manifests {
        if !may_reach_kernel(file.member()) {
            findings.extend(in_manifest(file)?);
        }
    }
    for file in tree.rust.iter().filter(|f| !f.is_test()) {
        if !may_reach_kernel(file.member()) {
            findings.extend(in_source(file));
        }
        // The test kit plays the host's part; chores make and remove leftovers, and ship with nothing.
        if !["host", "testkit", "xtask"].contains(&file.member()) {
            findings.extend(programs(file));
        }
    }
    Ok(Outcome::of(findings))
}

fn may_reach_kernel(member: &str) -> bool {
    member == "host" || member == "guest"
}

fn is_kernel_crate(name: &str) -> bool {
    KERNEL_CRATES.contains(&name) || name.starts_with("netlink-")
}

fn in_manifest(file: &File) -> Result<Vec<Finding>> {
    let manifest: toml::Table =
        file.text.parse().with_context(|| format!("cannot read {}", file.path.display()))?;
    let mut tables: Vec<&toml::Table> = vec![];
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let scopes = targets.into_iter().flat_map(|t| t.values().filter_map(toml::Value::as_table));
    for scope in std::iter::once(&manifest).chain(scopes) {
        for key in ["dependencies", "build-dependencies"] {
            tables.extend(scope.get(key).and_then(toml::Value::as_table));
        }
    }
    let mut findings = vec![];
    for (key, value) in tables.into_iter().flatten() {
        // A renamed dependency is what it was before.
        let name = value.get("package").and_then(toml::Value::as_str).unwrap_or(key);
        if is_kernel_crate(name) {
            let line = super::arrows::line_of_dependency(&file.text, key);
            findings.push(Finding::new(
                &file.path,
                line,
                format!("only host and guest may depend on {name}"),
            ));
        }
    }
    Ok(findings)
}

fn in_source(file: &File) -> Vec<Finding> {
    let mut findings = vec![];
    for (at, line) in file.code().lines().enumerate() {
        for name in path_heads(line) {
            if is_kernel_crate(&name.replace('_', "-")) {
                let what = format!("only host and guest may name {name}; ask host for it");
                findings.push(Finding::new(&file.path, at + 1, what));
            }
        }
    }
    findings
}

/// Identifiers that begin a path (`libc::getpid`) or that `use` or `extern crate` names.
fn path_heads(line: &str) -> Vec<&str> {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let mut heads = vec![];
    let mut at = 0;
    while let Some(begin) = line[at..].find(word).map(|b| at + b) {
        let end = line[begin..].find(|c| !word(c)).map_or(line.len(), |e| begin + e);
        let before = line[..begin].trim_end();
        // `a::libc::b` is something of `a`; `::libc::b` is the crate.
        let inside_path = before.strip_suffix("::").is_some_and(|b| b.ends_with(|c| word(c) || c == '>'));
        let named = before.ends_with("use") || before.ends_with("extern crate") || before.ends_with("use ::");
        if (line[end..].starts_with("::") && !inside_path) || named {
            heads.push(&line[begin..end]);
        }
        at = end;
    }
    heads
}

fn programs(file: &File) -> Vec<Finding> {
    let code = strip::blank(&file.text, strip::Strings::Keep);
    // Test modules are found in the text without literals, where braces balance.
    let plain = file.code();
    let mut findings = vec![];
    for (at, (line, shown)) in code.lines().zip(plain.lines()).enumerate() {
        let Some((_, argument)) = line.split_once("Command::new(\"") else { continue };
        if !shown.contains("Command::new(") {
            continue; // In a test module.
        }
        let program = argument.split('"').next().unwrap_or_default();
        let name = program.rsplit('/').next().unwrap_or_default();
        if KERNEL_PROGRAMS.contains(&name) {
            findings.push(Finding::new(&file.path, at + 1, format!("only host may run {name}")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tree::planted::{places, tree};

    #[test]
    fn a_manifest_that_names_a_kernel_crate_is_refused() {
        let fault = "[package]\nname = \"x\"\n[dependencies]\nserde = \"1\"\nlibc = \"0.2\"\n";
        let (_dir, tree) = tree(&[
            ("crates/host/Cargo.toml", fault),
            ("crates/guest/Cargo.toml", fault),
            ("crates/node/Cargo.toml", fault),
            ("crates/api/Cargo.toml", "[dev-dependencies]\nlibc = \"0.2\"\n"),
            ("crates/vmm/Cargo.toml", "[target.'cfg(unix)'.dependencies]\nnetlink-sys = \"1\"\n"),
            ("crates/core/Cargo.toml", "[dependencies]\nharmless = { package = \"nix\", version = \"1\" }\n"),
        ]);
        assert_eq!(
            places(&check(&tree).unwrap().findings),
            [
                ("crates/core/Cargo.toml".into(), 2),
                ("crates/node/Cargo.toml".into(), 5),
                ("crates/vmm/Cargo.toml".into(), 2)
            ]
        );
    }

    #[test]
    fn sources_that_name_a_kernel_crate_are_refused() {
        let fault = "//! libc::getpid\nuse rustix::fs;\nfn f() { libc::getpid(); }\n";
        let (_dir, tree) = tree(&[
            ("crates/host/src/a.rs", fault),
            ("crates/node/src/a.rs", fault),
            ("crates/node/tests/a.rs", fault),
            ("crates/vmm/src/a.rs", "//! x\nuse crate::nix::Thing;\nmod nix;\nlet libc = \"libc::x\";\n"),
            ("crates/api/src/a.rs", "//! x\n#[cfg(test)]\nmod tests {\n    use libc::c_int;\n}\n"),
            ("crates/core/src/a.rs", "//! x\nfn f(x: ::netlink_sys::Socket) {}\npub use nix;\n"),
        ]);
        assert_eq!(
            places(&check(&tree).unwrap().findings),
            [
                ("crates/core/src/a.rs".into(), 2),
                ("crates/core/src/a.rs".into(), 3),
                ("crates/node/src/a.rs".into(), 2),
                ("crates/node/src/a.rs".into(), 3)
            ]
        );
    }

    #[test]
    fn programs_that_change_the_network_run_in_host_only() {
        let fault = "//! x\nfn f() { Command::new(\"/usr/sbin/iptables\"); Command::new(\"mmdebstrap\"); }\n";
        let test = "//! x\n#[cfg(test)]\nmod tests {\n    fn f() { Command::new(\"nft\"); }\n}\n";
        let (_dir, tree) = tree(&[
            ("crates/host/src/a.rs", fault),
            ("crates/hearth/src/a.rs", fault),
            ("crates/node/src/a.rs", test),
            ("crates/guest/src/a.rs", "//! x\nfn f() { Command::new(\"ip\"); }\n"),
            ("xtask/src/a.rs", fault),
        ]);
        assert_eq!(
            places(&check(&tree).unwrap().findings),
            [("crates/guest/src/a.rs".into(), 2), ("crates/hearth/src/a.rs".into(), 2)]
        );
    }
}
