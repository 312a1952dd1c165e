//! One suite for every [`Host`]: what the engine relies on, asked of the fake and of the kernel alike. A
//! violation panics with the kind, the resource and what was seen.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use hearth_core::host::{ErrorClass, Host, SpawnSpec};
use hearth_core::network::SlotIndex;
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::resource::{Kind, Resource};

/// How long one release may take on a loaded machine.
const WITHIN: Duration = Duration::from_secs(20);

/// A foreign thing that looks like one of ours, planted by the caller.
pub struct Planted {
    /// What it is, for messages.
    pub what: String,
    /// Whether it is as it was.
    pub untouched: Box<dyn Fn() -> bool>,
    /// Takes it away again.
    pub remove: Box<dyn FnOnce()>,
}

/// Plants a foreign look-alike of a kind, where the host allows it.
pub type Plant<'a> = dyn Fn(Kind) -> Option<Planted> + 'a;

/// The host under test and what it may use.
pub struct Subject<'a> {
    /// The host.
    pub host: &'a dyn Host,
    /// Its instance's state directory.
    pub state_dir: &'a Path,
    /// Its instance's run directory.
    pub run_dir: &'a Path,
    /// At least two slots that nothing else uses.
    pub slots: RangeInclusive<u32>,
    /// Kinds left out; [`Kind::Record`] always is.
    pub skip: &'a [Kind],
    /// Look-alikes.
    pub plant: Option<&'a Plant<'a>>,
}

/// Runs the suite and answers with the kinds that were tried.
///
/// # Panics
/// On any violation.
pub fn run(subject: &Subject<'_>) -> Vec<Kind> {
    let tried: Vec<Kind> =
        Kind::ALL.into_iter().filter(|k| *k != Kind::Record && !subject.skip.contains(k)).collect();
    let slots: Vec<SlotIndex> = subject.slots.clone().filter_map(SlotIndex::new).collect();
    assert!(slots.len() >= 2, "the suite needs two slots");
    let suite = Suite { host: subject.host, subject };
    for kind in &tried {
        let planted = subject.plant.and_then(|plant| plant(*kind));
        suite.kind(*kind, &slots);
        if let Some(planted) = planted {
            suite.foreign_is_untouched(*kind, planted);
        }
    }
    if [Kind::Netns, Kind::Veth, Kind::Tap, Kind::SandboxFirewall].iter().all(|k| tried.contains(k)) {
        suite.whole_slots(&slots);
    }
    tried
}

struct Suite<'a> {
    host: &'a dyn Host,
    subject: &'a Subject<'a>,
}

impl Suite<'_> {
    fn kind(&self, kind: Kind, slots: &[SlotIndex]) {
        let slot = slots[0];
        match kind {
            Kind::Record => {}
            Kind::Netns => self.round_trip(&Resource::Netns { slot }),
            Kind::Veth | Kind::Tap | Kind::SandboxFirewall => {
                let parts = Resource::of_slot(slot);
                let (before, rest) = parts.split_at(parts.iter().position(|r| r.kind() == kind).unwrap_or(0));
                // Without its namespace a part is absent and that is no error.
                self.release(&rest[0]);
                before.iter().for_each(|r| self.ensure(r));
                self.round_trip(&rest[0]);
                before.iter().rev().for_each(|r| self.release(r));
            }
            Kind::HostFirewall => self.round_trip(&Resource::HostFirewall),
            Kind::Cgroup => {
                self.round_trip(&Resource::Cgroup { name: "conformance00000".into() });
                for name in ["", "..", "../x", "a/b", "A"] {
                    self.refused(&Resource::Cgroup { name: name.into() });
                }
            }
            Kind::Directory => self.directories(),
            Kind::Mount => {
                let path = self.subject.run_dir.join("sandboxes/conformance00000/mnt");
                self.round_trip(&Resource::Mount { path });
                self.refused(&Resource::Mount { path: "/conformance00000".into() });
                self.refused(&Resource::Mount { path: self.subject.run_dir.join("a/../../x") });
                let parent = self.subject.run_dir.join("sandboxes/conformance00000");
                self.release(&Resource::Directory { path: parent });
            }
            Kind::Process => self.processes(),
            Kind::Nbd => {
                // Beyond any that a kernel has by itself.
                let sandbox = "conformance00000".parse().expect("id");
                let resource = Resource::Nbd { index: 4_000, sandbox };
                assert_eq!(self.seen(&resource), 0, "{resource} was there before the test");
                self.refused(&resource);
                self.release(&resource);
                self.release(&resource);
            }
        }
    }

    fn round_trip(&self, resource: &Resource) {
        let others = self.others(resource);
        assert_eq!(self.seen(resource), 0, "{resource} was there before the test");
        self.release(resource);
        self.ensure(resource);
        assert_eq!(self.seen(resource), 1, "{resource} after ensure");
        self.ensure(resource);
        assert_eq!(self.seen(resource), 1, "{resource} after a second ensure");
        self.release(resource);
        assert_eq!(self.seen(resource), 0, "{resource} after release");
        self.release(resource);
        self.ensure(resource);
        assert_eq!(self.seen(resource), 1, "{resource} in its second life");
        assert_eq!(self.others(resource), others, "others of this kind while {resource} was there");
        self.release(resource);
        assert_eq!(self.others(resource), others, "others of this kind after {resource}");
        assert_eq!(self.seen(resource), 0, "{resource} after its second life");
    }

    fn directories(&self) {
        let subject = self.subject;
        for base in [subject.run_dir, subject.state_dir] {
            let path = base.join("sandboxes/conformance00000");
            let resource = Resource::Directory { path: path.clone() };
            self.round_trip(&resource);
            self.ensure(&resource);
            fs::create_dir(path.join("inside")).expect("mkdir inside");
            fs::write(path.join("inside/file"), "x").expect("write inside");
            let outside = base.join("sandboxes/conform1");
            self.ensure(&Resource::Directory { path: outside.clone() });
            fs::write(outside.join("kept"), "x").expect("write outside");
            std::os::unix::fs::symlink(&outside, path.join("link")).expect("symlink");
            self.release(&resource);
            assert!(!path.exists(), "{resource} is still there");
            assert!(outside.join("kept").exists(), "{resource}: the symlink in it was followed");
            self.release(&Resource::Directory { path: outside.clone() });
            std::os::unix::fs::symlink(base, &outside).expect("symlink");
            let in_place = Resource::Directory { path: outside.clone() };
            let error =
                self.host.release(&in_place, WITHIN).expect_err("a symlink in the place was released");
            assert_eq!(error.class, ErrorClass::Foreign, "{error}");
            fs::remove_file(&outside).expect("remove the symlink");
            let deep = Resource::Directory { path: base.join("sandboxes/conformance00000/a/b") };
            self.ensure(&deep);
            self.release(&deep);
            self.release(&resource);
        }
        for path in
            [Path::new("/"), Path::new("/tmp"), Path::new("relative"), subject.run_dir, subject.state_dir]
        {
            self.refused(&Resource::Directory { path: path.to_owned() });
        }
        for escape in ["..", "sandboxes/../../x", "../x"] {
            self.refused(&Resource::Directory { path: subject.run_dir.join(escape) });
        }
    }

    fn processes(&self) {
        let cgroup = Resource::Cgroup { name: "conformance00000".into() };
        let dir = Resource::Directory { path: self.subject.run_dir.join("sandboxes/conformance00000") };
        self.ensure(&dir);
        let spec = |program: &str| SpawnSpec {
            program: program.into(),
            args: vec!["1000".into()],
            env: Vec::new(),
            cgroup: "conformance00000".into(),
            log: self.subject.run_dir.join("sandboxes/conformance00000/log"),
        };
        self.host.spawn(&spec("/bin/sleep")).expect_err("spawned into an absent cgroup");
        self.ensure(&cgroup);
        let error = self.host.spawn(&spec("/no/such/program")).expect_err("spawned an absent program");
        assert!(error.to_string().contains("/no/such/program"), "the error does not name it: {error}");
        let spawned = self.host.spawn(&spec("/bin/sleep")).expect("spawn");
        let process = spawned.identity.clone();
        let resource = Resource::Process { process: process.clone() };
        assert_eq!(process.boot_id, self.host.boot_id(), "boot id of {resource}");
        assert_eq!(self.host.liveness(&process), Liveness::Alive, "{resource}");
        assert_eq!(self.seen(&resource), 1, "{resource} after spawn");
        drop(self.host.open_process(&process).expect("open"));
        for wrong in [
            ProcessIdentity { start_time: process.start_time + 1, ..process.clone() },
            ProcessIdentity { boot_id: "another boot".into(), ..process.clone() },
            // A stranger with all its numbers, as after a pid came round.
            ProcessIdentity { cgroup: Some("conformance00001".into()), ..process.clone() },
        ] {
            assert_eq!(self.host.liveness(&wrong), Liveness::Gone, "{wrong:?}");
            self.host.open_process(&wrong).expect_err("opened a process that is not the same");
            // One that is a child of ours in another cgroup may be told; it is not touched either.
            drop(self.host.release(&Resource::Process { process: wrong }, WITHIN));
            assert_eq!(self.host.liveness(&process), Liveness::Alive, "a stranger's signal hit {resource}");
        }
        self.refused(&resource);
        assert!(self.host.holders(&cgroup).iter().any(|h| h.pid == process.pid), "holders of {cgroup}");
        let second = self.host.spawn(&spec("/bin/sleep")).expect("spawn");
        self.release(&resource);
        assert_eq!(self.host.liveness(&process), Liveness::Gone, "{resource} after release");
        assert_eq!(self.seen(&resource), 0, "{resource} after release");
        self.release(&resource);
        let rest = second.identity;
        assert_eq!(self.host.liveness(&rest), Liveness::Alive, "the other process in the cgroup");
        self.release(&cgroup);
        assert_eq!(self.host.liveness(&rest), Liveness::Gone, "a process after the release of its cgroup");
        assert_eq!(self.seen(&cgroup), 0, "{cgroup} after release");
        self.host.open_process(&rest).expect_err("opened a process that is gone");
        // Reaps it where it is a child of ours.
        self.release(&Resource::Process { process: rest });
        self.release(&dir);
    }

    fn whole_slots(&self, slots: &[SlotIndex]) {
        let [first, second] = [slots[0], slots[1]];
        self.host.reset_slot(first).expect_err("an absent slot was reset");
        for slot in [first, second] {
            Resource::of_slot(slot).iter().for_each(|r| self.ensure(r));
        }
        self.host.reset_slot(first).expect("reset of a whole slot");
        self.host.reset_slot(first).expect("second reset of a whole slot");
        for part in Resource::of_slot(first) {
            assert_eq!(self.seen(&part), 1, "{part} after reset");
            self.ensure(&part);
        }
        // In the order of creation instead of backwards: the namespace takes the rest with it.
        for part in Resource::of_slot(first) {
            self.release(&part);
            assert_eq!(self.seen(&part), 0, "{part} after its namespace");
        }
        for part in Resource::of_slot(second) {
            assert_eq!(self.seen(&part), 1, "{part} while slot {first} went");
        }
        for part in Resource::of_slot(second).iter().rev() {
            self.release(part);
            assert_eq!(self.seen(part), 0, "{part} released backwards");
        }
    }

    fn foreign_is_untouched(&self, kind: Kind, planted: Planted) {
        let what = &planted.what;
        let census = self.host.census(kind).expect("census");
        let taken = census.ours.iter().find(|s| s.resource.to_string().contains(what.as_str()));
        assert!(taken.is_none(), "foreign {what} is listed as ours: {taken:?}");
        assert!((planted.untouched)(), "foreign {what} was changed");
        (planted.remove)();
    }

    fn ensure(&self, resource: &Resource) {
        if let Err(e) = self.host.ensure(resource) {
            panic!("{resource}: {e}");
        }
    }

    fn release(&self, resource: &Resource) {
        if let Err(e) = self.host.release(resource, WITHIN) {
            panic!("{resource}: {e}");
        }
    }

    /// `ensure` says that it will never do this; `release` too, but for what is not made by name.
    fn refused(&self, resource: &Resource) {
        let error = self.host.ensure(resource).expect_err("made what must be refused");
        assert_eq!(error.class, ErrorClass::Refused, "{error}");
        if !matches!(resource.kind(), Kind::Process | Kind::Nbd) {
            let error = self.host.release(resource, WITHIN).expect_err("released what must be refused");
            assert_eq!(error.class, ErrorClass::Refused, "{error}");
        }
    }

    /// How often the census lists it, with the census complete.
    fn seen(&self, resource: &Resource) -> usize {
        let census = self.host.census(resource.kind()).expect("census");
        assert!(census.incomplete.is_empty(), "census of {}: {:?}", resource.kind(), census.incomplete);
        census.ours.iter().filter(|s| s.resource == *resource).count()
    }

    fn others(&self, resource: &Resource) -> Vec<String> {
        let census = self.host.census(resource.kind()).expect("census");
        let mut names: Vec<String> = census
            .ours
            .into_iter()
            .filter(|s| s.resource != *resource)
            .map(|s| s.resource.to_string())
            .collect();
        names.sort();
        names
    }
}
