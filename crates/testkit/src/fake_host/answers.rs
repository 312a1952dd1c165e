//! The fake's answers to the engine: the semantics of the kernel host, in memory.

use std::fs;
use std::io::{Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;

use hearth_core::host::{
    Census, ErrorClass, Host, HostError, NbdSeen, Pace, Sighting, SlotRelease, SlotSeen, SpawnSpec, Spawned,
};
use hearth_core::network::SlotIndex;
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::resource::{Kind, Resource};
use hearth_core::stuck::Holder;

use super::{FIRST_PID, FakeHost, Fault, ProcessHandle, Verb, after, error};

impl Host for FakeHost {
    fn census(&self, kind: Kind) -> Result<Census, HostError> {
        let fault = self.begin(Verb::Census, kind, kind.as_str(), Duration::ZERO)?;
        if fault == Some(Fault::Incomplete) {
            return Ok(Census { incomplete: vec!["ordered by the test".into()], ..Census::default() });
        }
        if kind == Kind::Record {
            let why = "records are files of the engine, not of the host";
            return Err(error(Verb::Census, "records", ErrorClass::Refused, why));
        }
        let mut census = if kind == Kind::Directory { self.directories() } else { Census::default() };
        let inner = self.lock();
        for sighting in &mut census.ours {
            if let Resource::Directory { path } = &sighting.resource
                && inner.half_directories.contains(path)
            {
                sighting.facts = "half made".into();
            }
        }
        for (resource, whole) in inner.things.iter().filter(|(r, _)| r.kind() == kind) {
            let facts = if *whole { "whole" } else { "half made" };
            census.ours.push(Sighting { resource: resource.clone(), facts: facts.into() });
        }
        if kind == Kind::Process {
            for (process, cgroup) in inner.processes.values().filter(|(p, _)| p.ended().is_none()) {
                let resource = Resource::Process { process: process.identity().clone() };
                census.ours.push(Sighting { resource, facts: format!("in cgroup {cgroup}") });
            }
        }
        for (resource, why) in inner.foreign.iter().filter(|(r, _)| r.kind() == kind) {
            census.ours.retain(|s| s.resource != *resource);
            census.foreign.insert(resource.to_string(), why.clone());
        }
        census.ours.sort_by_key(|s| s.resource.to_string());
        Ok(census)
    }

    fn ensure(&self, resource: &Resource) -> Result<(), HostError> {
        let what = resource.to_string();
        let fault = self.begin(Verb::Ensure, resource.kind(), &what, Duration::ZERO)?;
        let mut inner = self.lock();
        self.check(Verb::Ensure, &inner, resource)?;
        let fail = |class, why: &str| Err(error(Verb::Ensure, &what, class, why));
        let whole = !matches!(fault, Some(Fault::HalfDone(_)));
        match resource {
            Resource::Process { .. } => return fail(ErrorClass::Refused, "a process is spawned"),
            Resource::Nbd { .. } => return fail(ErrorClass::Refused, "a device is connected by its server"),
            Resource::Veth { slot } | Resource::Tap { slot } | Resource::SandboxFirewall { slot } => {
                if inner.things.get(&Resource::Netns { slot: *slot }) != Some(&true) {
                    return fail(ErrorClass::Refused, "the slot's namespace is absent");
                }
                inner.things.insert(resource.clone(), whole);
            }
            Resource::Directory { path } => {
                if let Err(e) = fs::create_dir_all(path) {
                    return fail(ErrorClass::Foreign, &e.to_string());
                }
                if whole {
                    inner.half_directories.retain(|p| p != path);
                } else {
                    inner.half_directories.push(path.clone());
                }
            }
            _ => drop(inner.things.insert(resource.clone(), whole)),
        }
        after(Verb::Ensure, &what, fault)
    }

    fn release(&self, resource: &Resource, within: Duration) -> Result<(), HostError> {
        let what = resource.to_string();
        let fault = self.begin(Verb::Release, resource.kind(), &what, within)?;
        let mut inner = self.lock();
        self.check(Verb::Release, &inner, resource)?;
        // On the kernel it could hang, and all generic netlink with it.
        if let Resource::Nbd { sandbox, .. } = resource
            && !inner.pretended.contains(&Kind::Process)
            && inner.processes.values().any(|(p, cgroup)| cgroup == sandbox.as_str() && p.ended().is_none())
        {
            return Err(error(Verb::Release, &what, ErrorClass::Failed, "its server lives"));
        }
        if matches!(fault, Some(Fault::HalfDone(_))) {
            if let Some(whole) = inner.things.get_mut(resource) {
                *whole = false;
            }
        } else {
            self.remove(&mut inner, resource)?;
        }
        after(Verb::Release, &what, fault)
    }

    fn census_slots(&self) -> Result<Census, HostError> {
        let mut census = self.census(Kind::Netns)?;
        let links = self.census(Kind::Veth)?;
        census.ours.extend(links.ours);
        census.foreign.extend(links.foreign);
        census.incomplete.extend(links.incomplete);
        Ok(census)
    }

    fn release_slots(&self, slots: &[SlotIndex], order: &SlotRelease<'_>, seen: &mut SlotSeen<'_>) {
        let mut waiting = slots;
        while !waiting.is_empty() {
            let n = match (order.pace)() {
                Pace::AtMost(n) => n.min(waiting.len()),
                Pace::Wait(time) => {
                    std::thread::sleep(time);
                    continue;
                }
                Pace::End => return,
            };
            let (batch, rest) = waiting.split_at(n);
            waiting = rest;
            for slot in batch {
                // Past every error, as the kernel host does; the first tells.
                let parts = Resource::of_slot(*slot);
                let results: Vec<_> = parts.iter().map(|part| self.release(part, order.within)).collect();
                seen(*slot, results.into_iter().collect());
            }
        }
    }

    fn reset_slot(&self, slot: SlotIndex) -> Result<(), HostError> {
        let what = format!("slot {slot}");
        let fault = self.begin(Verb::Reset, Kind::Netns, &what, Duration::ZERO)?;
        let mut inner = self.lock();
        if let Some(part) = Resource::of_slot(slot).iter().find(|r| inner.things.get(r) != Some(&true)) {
            return Err(error(Verb::Reset, &what, ErrorClass::Refused, &format!("{part} is not whole")));
        }
        if let Some(Fault::HalfDone(_)) = fault {
            inner.things.insert(Resource::SandboxFirewall { slot }, false);
        } else {
            *inner.resets.entry(slot).or_default() += 1;
        }
        after(Verb::Reset, &what, fault)
    }

    fn conflict(&self) -> Result<Option<String>, HostError> {
        Ok(self.lock().conflict.clone())
    }

    fn nbd_limit(&self) -> Result<u32, HostError> {
        let none =
            || error(Verb::Census, "nbd", ErrorClass::Refused, "the kernel has no module nbd: modprobe nbd");
        self.lock().nbd_limit.ok_or_else(none)
    }

    fn look_at_nbd(&self, index: u32) -> Result<NbdSeen, HostError> {
        let what = format!("nbd{index}");
        self.begin(Verb::Census, Kind::Nbd, &what, Duration::ZERO)?;
        let inner = self.lock();
        if inner.nbd_limit.is_none_or(|limit| index >= limit) {
            return Err(error(Verb::Census, &what, ErrorClass::Failed, "there is no such index"));
        }
        let has = |r: &Resource| matches!(r, Resource::Nbd { index: i, .. } if *i == index);
        let unquiet = |owner, facts: &str| NbdSeen::Unquiet { owner, facts: facts.to_owned() };
        if let Some((_, why)) = inner.foreign.iter().find(|(r, _)| has(r)) {
            return Ok(unquiet(None, why));
        }
        Ok(match inner.things.keys().find(|r| has(r)) {
            Some(Resource::Nbd { sandbox, .. }) => unquiet(Some(sandbox.clone()), "connected"),
            _ => NbdSeen::Quiet,
        })
    }

    fn free_bytes(&self, _: &Path) -> Result<u64, HostError> {
        Ok(u64::MAX)
    }

    fn copy_sparse(&self, from: &fs::File, to: &Path) -> Result<(), HostError> {
        let copied = from.try_clone().and_then(|mut from| {
            from.seek(SeekFrom::Start(0))?;
            std::io::copy(&mut from, &mut fs::File::create_new(to)?)
        });
        let fail = |e: std::io::Error| {
            error(Verb::Ensure, &to.display().to_string(), ErrorClass::Failed, &e.to_string())
        };
        copied.map(|_| ()).map_err(fail)
    }

    fn spawn(&self, spec: &SpawnSpec) -> Result<Spawned, HostError> {
        let what = spec.program.display().to_string();
        let fault = self.begin(Verb::Spawn, Kind::Process, &what, Duration::ZERO)?;
        let fail = |class, why: &str| error(Verb::Spawn, &what, class, why);
        let handle = {
            let mut inner = self.lock();
            if inner.things.get(&Resource::Cgroup { name: spec.cgroup.clone() }) != Some(&true) {
                return Err(fail(ErrorClass::Failed, "the cgroup is absent"));
            }
            if !spec.program.is_absolute() || !spec.program.is_file() {
                return Err(fail(ErrorClass::Failed, "exec: there is no such program"));
            }
            if let Err(e) = fs::OpenOptions::new().append(true).create(true).open(&spec.log) {
                return Err(fail(ErrorClass::Failed, &format!("open log: {e}")));
            }
            let n = inner.spawned;
            inner.spawned += 1;
            let identity = ProcessIdentity {
                pid: FIRST_PID + n,
                start_time: 1_000 + u64::from(n),
                boot_id: self.boot_id.clone(),
                cgroup: Some(spec.cgroup.clone()),
            };
            let handle =
                ProcessHandle::new(identity).map_err(|e| fail(ErrorClass::Failed, &e.to_string()))?;
            inner.processes.insert(FIRST_PID + n, (handle.clone(), spec.cgroup.clone()));
            handle
        };
        // Not under the lock: the test's code may look at the host.
        let on_spawn = self.on_spawn.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(f) = on_spawn
            && let Err(why) = f(spec, handle.clone())
        {
            handle.kill();
            return Err(fail(ErrorClass::Failed, &why));
        }
        after(Verb::Spawn, &what, fault)?;
        let pidfd = handle.descriptor().map_err(|e| fail(ErrorClass::Failed, &e.to_string()))?;
        Ok(Spawned { identity: handle.identity().clone(), pidfd })
    }

    fn holders(&self, resource: &Resource) -> Vec<Holder> {
        let inner = self.lock();
        let alive = inner.processes.iter().filter(|(_, (p, _))| p.ended().is_none());
        let theirs = alive.filter(|(_, (p, cgroup))| match resource {
            Resource::Process { process } => p.identity() == process,
            Resource::Cgroup { name } => cgroup == name,
            _ => false,
        });
        let holder = |pid: u32| Holder {
            pid,
            task: pid,
            name: "fake".into(),
            state: 'D',
            wchan: Some("fake_wait".into()),
            stack: vec!["fake_wait+0x1/0x2".into()],
        };
        theirs.map(|(pid, _)| holder(*pid)).collect()
    }

    fn liveness(&self, process: &ProcessIdentity) -> Liveness {
        if process.boot_id != self.boot_id {
            return Liveness::Gone;
        }
        let inner = self.lock();
        if let Some(why) = inner.unknown.get(&process.pid) {
            return Liveness::Unknown(why.clone());
        }
        match inner.processes.get(&process.pid) {
            Some((p, _)) if p.identity() == process && p.ended().is_none() => Liveness::Alive,
            _ => Liveness::Gone,
        }
    }

    fn open_process(&self, process: &ProcessIdentity) -> Result<OwnedFd, HostError> {
        let fail = |class, why: &str| HostError {
            verb: "open",
            what: format!("process {}", process.pid),
            why: why.to_owned(),
            class,
            source: None,
        };
        match self.liveness(process) {
            Liveness::Alive => {}
            Liveness::Gone => return Err(fail(ErrorClass::Refused, "it ended or is not the same")),
            Liveness::Unknown(why) => return Err(fail(ErrorClass::Failed, &why)),
        }
        let handle = self.lock().processes.get(&process.pid).map(|(p, _)| p.clone());
        let handle = handle.ok_or_else(|| fail(ErrorClass::Refused, "it ended"))?;
        handle.descriptor().map_err(|e| fail(ErrorClass::Failed, &e.to_string()))
    }

    fn boot_id(&self) -> &str {
        &self.boot_id
    }
}
