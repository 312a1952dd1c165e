//! Creation of a sandbox as data: an ordered list of steps. Release is the same list backwards and accepts
//! any prefix, half a step included. Around both, the places of a life where a fault can be ordered.

use serde::{Deserialize, Serialize};

/// One step of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// State directory and first record.
    Record,
    /// Run directory for sockets and logs.
    RunDirectory,
    /// Index for the disk as a device of the kernel's, where the VMM takes it that way. It is connected by the shim.
    Nbd,
    /// Writable disk.
    Disk,
    /// Network slot from the pool.
    Slot,
    /// Control group.
    Cgroup,
    /// Shim process, connected.
    Shim,
    /// VMM started, guest ready.
    Boot,
}

impl Step {
    /// All steps in order of creation.
    pub const ALL: [Step; 8] = [
        Step::Record,
        Step::RunDirectory,
        Step::Nbd,
        Step::Disk,
        Step::Slot,
        Step::Cgroup,
        Step::Shim,
        Step::Boot,
    ];

    /// The word for it, as in failpoint names and progress lines.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Record => "record",
            Step::RunDirectory => "run-directory",
            Step::Nbd => "nbd",
            Step::Disk => "disk",
            Step::Slot => "slot",
            Step::Cgroup => "cgroup",
            Step::Shim => "shim",
            Step::Boot => "boot",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for Step {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Step::ALL
            .into_iter()
            .find(|step| step.as_str() == s)
            .ok_or_else(|| format!("no creation step is called {s:?}"))
    }
}

/// One part of the release walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReleaseStep {
    /// The shim is asked to kill its VM.
    Stop,
    /// The shim process.
    Process,
    /// The network block device: after its server, which is the shim, and before what may hang in its I/O.
    Nbd,
    /// The control group with whatever is left in it.
    Cgroup,
    /// The network slot, reset or removed.
    Slot,
    /// The run directory.
    RunDirectory,
    /// The state directory, and the record with it.
    Directory,
}

impl ReleaseStep {
    /// All parts in order of release.
    pub const ALL: [ReleaseStep; 7] = [
        ReleaseStep::Stop,
        ReleaseStep::Process,
        ReleaseStep::Nbd,
        ReleaseStep::Cgroup,
        ReleaseStep::Slot,
        ReleaseStep::RunDirectory,
        ReleaseStep::Directory,
    ];
}

/// Where the shim's block server can be made to fail. Not part of [`Place::all`]: only a sandbox whose disks are served passes
/// them, and it is its shim that does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockPlace {
    /// The disks are opened, and the overlay made.
    Open,
    /// The server of a disk serves; a fault here is its end.
    Serve,
    /// A read from the writable disk.
    Read,
    /// A write to it, zeroes and discards included.
    Write,
    /// A flush of it, whoever asks.
    Flush,
}

impl BlockPlace {
    /// All of them.
    pub const ALL: [BlockPlace; 5] =
        [BlockPlace::Open, BlockPlace::Serve, BlockPlace::Read, BlockPlace::Write, BlockPlace::Flush];
}

/// A place in the life of a node or a sandbox where the host is changed or a shim is asked for something. A
/// fault can be ordered at each, before and after its effect; the crash matrix is made from this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The start of the daemon's engine: before the census, and when it is ready.
    Start,
    /// A step of creation.
    Create(Step),
    /// Inside the step `shim`: the process is born, and nothing has noted its pid yet.
    Spawn,
    /// A command is begun in a running sandbox.
    Exec,
    /// A part of the release walk, whoever asked for it.
    Release(ReleaseStep),
    /// In the shim's block server.
    Block(BlockPlace),
}

impl Place {
    /// All places that the engine passes, in the order of a life.
    pub fn all() -> impl Iterator<Item = Place> {
        let create = Step::ALL.into_iter().flat_map(|step| {
            let spawn = (step == Step::Shim).then_some(Place::Spawn);
            std::iter::once(Place::Create(step)).chain(spawn)
        });
        let release = ReleaseStep::ALL.into_iter().map(Place::Release);
        std::iter::once(Place::Start).chain(create).chain([Place::Exec]).chain(release)
    }

    /// The word for it, as in `test.failpoints`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Place::Start => "start",
            Place::Create(step) => step.as_str(),
            Place::Spawn => "spawn",
            Place::Exec => "exec",
            Place::Release(ReleaseStep::Stop) => "release.stop",
            Place::Release(ReleaseStep::Process) => "release.process",
            Place::Release(ReleaseStep::Nbd) => "release.nbd",
            Place::Release(ReleaseStep::Cgroup) => "release.cgroup",
            Place::Release(ReleaseStep::Slot) => "release.slot",
            Place::Release(ReleaseStep::RunDirectory) => "release.run-directory",
            Place::Release(ReleaseStep::Directory) => "release.directory",
            Place::Block(BlockPlace::Open) => "block.open",
            Place::Block(BlockPlace::Serve) => "block.serve",
            Place::Block(BlockPlace::Read) => "block.read",
            Place::Block(BlockPlace::Write) => "block.write",
            Place::Block(BlockPlace::Flush) => "block.flush",
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for Place {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let all = || Place::all().chain(BlockPlace::ALL.map(Place::Block));
        all().find(|place| place.as_str() == s).ok_or_else(|| {
            let all: Vec<&str> = all().map(Place::as_str).collect();
            format!("no place is called {s:?}; there are {}", all.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_has_a_word_of_its_own() {
        for place in Place::all().chain(BlockPlace::ALL.map(Place::Block)) {
            assert_eq!(place.as_str().parse(), Ok(place));
        }
        let all = "nowhere".parse::<Place>().unwrap_err();
        assert!(all.contains("run-directory, nbd, disk") && all.contains("release.slot"), "{all}");
    }
}
