//! Cgroups of the instance with the processes in them, and processes that look like ours and are in none.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use hearth_core::doctor::{Identity, ItemKind, Thing};
use hearth_core::process::Liveness;
use hearth_core::resource::Resource;

use super::{Scan, of_census, with_inode};
use crate::cgroup::Cgroups;
use crate::kernel_host::HostConfig;
use crate::process;

pub(super) fn scan(config: &HostConfig) -> Scan {
    let cgroups = match Cgroups::locate(&config.layout.instance) {
        Ok(cgroups) => cgroups,
        Err(e) => return Scan { things: vec![], unseen: vec![e.to_string()] },
    };
    let mut scan = of_census(ItemKind::Cgroup, cgroups.census(), |resource, thing| {
        let Resource::Cgroup { name } = resource else { return None };
        let path = cgroups.root().join(name);
        with_inode(Thing { name: path.display().to_string(), sandbox: Some(name.clone()), ..thing }, &path)
    });
    let ids: Vec<String> = scan.things.iter().filter_map(|t| t.sandbox.clone()).collect();
    for id in ids {
        match cgroups.pids(&id) {
            Ok(pids) => scan.things.extend(pids.into_iter().filter_map(|pid| of_process(pid, &id))),
            Err(e) => scan.unseen.push(e.to_string()),
        }
    }
    match look_alikes(config) {
        Ok(found) => scan.things.extend(found),
        Err(e) => scan.unseen.push(format!("process: /proc: {e}")),
    }
    scan
}

/// A process in the cgroup of a sandbox; nothing if it is gone.
fn of_process(pid: u32, id: &str) -> Option<Thing> {
    let mut identity = process::identity_of(pid).ok()?;
    identity.cgroup = Some(id.to_owned());
    if process::liveness(&identity) == Liveness::Gone {
        return None;
    }
    let asleep: Vec<_> = process::tasks(pid).into_iter().filter(|t| t.state == 'D').collect();
    let mut facts = vec![process::describe(pid)];
    facts.extend(asleep.iter().map(|task| {
        let place = task.wchan.as_deref().unwrap_or("a place that cannot be seen");
        format!("task {} sleeps in {place} and no signal ends that", task.task)
    }));
    Some(Thing {
        sandbox: Some(id.to_owned()),
        facts,
        since_ms: process::started_ms(identity.start_time),
        undead: !asleep.is_empty() && process::is_killed(pid),
        tasks: asleep,
        identity: Identity::Process(identity),
        ..Thing::new(ItemKind::Process, pid.to_string())
    })
}

/// Processes with a shim's arguments for this instance that are in none of its cgroups: no shim of ours ever was.
fn look_alikes(config: &HostConfig) -> std::io::Result<Vec<Thing>> {
    let mut found = Vec::new();
    let instance = config.layout.instance.as_str();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // One that ended since, or is hidden, is no shim.
        let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        if !is_shim(&line, &config.run_dir) || process::membership::in_instance(pid, instance) {
            continue;
        }
        let Ok(identity) = process::identity_of(pid) else { continue };
        let why = "it has the arguments of a shim of ours and is in no cgroup of this instance";
        found.push(Thing {
            facts: vec![process::describe(pid)],
            since_ms: process::started_ms(identity.start_time),
            identity: Identity::Process(identity),
            foreign: Some(why.into()),
            ..Thing::new(ItemKind::Process, pid.to_string())
        });
    }
    Ok(found)
}

/// `…/hearth shim --dir <run>/…`
fn is_shim(cmdline: &[u8], run_dir: &Path) -> bool {
    let mut words = cmdline.split(|b| *b == 0);
    let program = words.next().and_then(|w| Path::new(OsStr::from_bytes(w)).file_name());
    let rest: Vec<&[u8]> = words.collect();
    program == Some(OsStr::new("hearth"))
        && rest.first() == Some(&&b"shim"[..])
        && rest.iter().any(|w| Path::new(OsStr::from_bytes(w)).starts_with(run_dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shim_is_told_by_all_its_arguments() {
        let run = Path::new("/run/hearth/a");
        assert!(is_shim(b"/usr/bin/hearth\0shim\0--dir\0/run/hearth/a/sandboxes/x\0", run));
        for other in [
            &b"/usr/bin/hearth\0shim\0--dir\0/run/hearth/ab/sandboxes/x\0"[..],
            b"/usr/bin/hearth\0serve\0/run/hearth/a\0",
            b"vi\0shim\0/run/hearth/a/x\0",
            b"",
        ] {
            assert!(!is_shim(other, run), "{other:?}");
        }
    }
}
