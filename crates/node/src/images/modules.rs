//! Which modules a guest needs, found in a tree as below /lib/modules and put in load order.
//!
//! Dependencies come from each module's own `.modinfo`, since a package unpacked by dpkg-deb has no
//! modules.dep yet. A name that is nowhere in the tree is taken as built in; where the tree has
//! modules.builtin a truly missing one is told apart and noted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::elf::{self, ModInfo};
use super::error::{ImageError, io};
use super::job::Job;
use super::mem::{LimitError, decoder, read_limited};

/// What a guest is made of: disks, network, console, entropy, overlay root, vsock.
const WANTED: [&str; 9] = [
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_console",
    "virtio_rng",
    "ext4",
    "overlay",
    "vmw_vsock_virtio_transport",
];
/// Largest module, unpacked.
const MAX_MODULE: usize = 256 << 20;
/// Directories of depmod's search order that override the kernel's own.
const OVERRIDES: [&str; 2] = ["updates", "extra"];

/// One module, unpacked.
#[derive(Debug)]
pub(super) struct Module {
    /// File name to store it under.
    pub(super) file: String,
    pub(super) data: Vec<u8>,
}

/// What a tree gave.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    /// In load order.
    pub(super) modules: Vec<Module>,
    /// From their vermagic.
    pub(super) release: Option<String>,
    /// For the user.
    pub(super) notes: Vec<String>,
}

/// Finds the tree of one release at or below `path`: itself, or the only one (or the one of `release`)
/// among its children, where `lib/modules` of an unpacked package counts as well.
pub(super) fn locate(path: &Path, release: Option<&str>) -> Result<PathBuf, ImageError> {
    let fault = |why: String| ImageError::Modules { path: path.to_owned(), why };
    if !path.is_dir() {
        return Err(fault("it is not a directory; give /lib/modules/<release> or its like".into()));
    }
    let is_release = |p: &Path| p.join("kernel").is_dir() || p.join("modules.builtin").is_file();
    if is_release(path) {
        return Ok(path.to_owned());
    }
    let parents = [path.join("lib/modules"), path.join("usr/lib/modules"), path.to_owned()];
    for parent in parents.iter().filter(|p| p.is_dir()) {
        let entries = std::fs::read_dir(parent).map_err(io("list", parent))?;
        let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| is_release(p)).collect();
        found.sort();
        if let Some(exact) = found.iter().find(|p| p.file_name().and_then(|n| n.to_str()) == release) {
            return Ok(exact.clone());
        }
        match found.as_slice() {
            [] => {}
            [one] => return Ok(one.clone()),
            many => {
                let names: Vec<_> =
                    many.iter().filter_map(|p| p.file_name()).map(|n| n.to_string_lossy()).collect();
                return Err(fault(format!(
                    "it holds several releases ({}); give the directory of one",
                    names.join(", ")
                )));
            }
        }
    }
    Ok(path.to_owned())
}

/// Chooses the wanted modules of the tree and what they need.
pub(super) fn choose(tree: &Path, job: &Job<'_>) -> Result<Chosen, ImageError> {
    let index = index(tree, job)?;
    let builtin = builtin(tree)?;
    if index.is_empty() && builtin.is_none() {
        return Err(ImageError::Modules {
            path: tree.to_owned(),
            why: "no kernel module is in it; give /lib/modules/<release> or its like".into(),
        });
    }
    let mut loader = Loader {
        index,
        builtin,
        job,
        state: BTreeMap::new(),
        chosen: Chosen::default(),
        release_of: String::new(),
    };
    for (i, name) in WANTED.iter().enumerate() {
        job.report("choosing modules", i as u64, Some(WANTED.len() as u64));
        if !loader.visit(name)? && loader.missing(name) {
            loader.chosen.notes.push(format!(
                "module {name} is neither in the tree nor built in; guests of this kernel lack it"
            ));
        }
    }
    Ok(loader.chosen)
}

/// `virtio-rng.ko.xz` → `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let (stem, rest) = file.split_once(".ko")?;
    let known = matches!(rest, "" | ".xz" | ".zst" | ".gz");
    let plain = stem.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    (known && plain && !stem.is_empty()).then(|| stem.replace('-', "_"))
}

fn index(tree: &Path, job: &Job<'_>) -> Result<BTreeMap<String, PathBuf>, ImageError> {
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    let rank = |p: &Path| {
        let first = p.strip_prefix(tree).ok().and_then(|p| p.iter().next()).and_then(|c| c.to_str());
        OVERRIDES.iter().position(|o| Some(*o) == first).unwrap_or(OVERRIDES.len())
    };
    let mut dirs = vec![tree.to_owned()];
    while let Some(dir) = dirs.pop() {
        job.check()?;
        for entry in std::fs::read_dir(&dir).map_err(io("list", &dir))? {
            let entry = entry.map_err(io("list", &dir))?;
            let path = entry.path();
            // Links are not followed: `build` and `source` lead out of the tree.
            let kind = entry.file_type().map_err(io("inspect", &path))?;
            if kind.is_dir() {
                dirs.push(path);
            } else if kind.is_file()
                && let Some(name) = entry.file_name().to_str().and_then(module_name)
            {
                let better = found.get(&name).is_none_or(|old| (rank(&path), &path) < (rank(old), old));
                if better {
                    found.insert(name, path);
                }
            }
        }
    }
    Ok(found)
}

fn builtin(tree: &Path) -> Result<Option<BTreeSet<String>>, ImageError> {
    let path = tree.join("modules.builtin");
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            let files = text.lines().filter_map(|l| l.rsplit('/').next());
            Ok(Some(files.filter_map(module_name).collect()))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io("read", &path)(e)),
    }
}

struct Loader<'a> {
    index: BTreeMap<String, PathBuf>,
    builtin: Option<BTreeSet<String>>,
    job: &'a Job<'a>,
    /// Whether it will be loaded; entered before its dependencies, so a cycle ends.
    state: BTreeMap<String, bool>,
    chosen: Chosen,
    release_of: String,
}

impl Loader<'_> {
    fn missing(&self, name: &str) -> bool {
        self.builtin.as_ref().is_some_and(|b| !b.contains(name)) && !self.index.contains_key(name)
    }

    /// Puts a module and, before it, what it needs into the list. `false` if it is not in the tree or
    /// cannot be loaded.
    fn visit(&mut self, name: &str) -> Result<bool, ImageError> {
        let name = name.replace('-', "_");
        if let Some(known) = self.state.get(&name) {
            return Ok(*known);
        }
        self.job.check()?;
        let Some(path) = self.index.get(&name).cloned() else { return Ok(false) };
        self.state.insert(name.clone(), true);
        let (data, info) = read_module(&path, self.job)?;
        self.same_release(&path, &info)?;
        for soft in &info.soft {
            // Often an alias; `crc32c` is served by `crc32c_generic`.
            if !self.visit(soft)? {
                self.visit(&format!("{soft}_generic"))?;
            }
        }
        for needed in &info.depends {
            // `depends=` never names what is built in.
            if !self.visit(needed)? {
                self.chosen.notes.push(format!(
                    "module {name} needs {needed}, which is not in the tree; guests of this kernel lack {name}"
                ));
                self.state.insert(name, false);
                return Ok(false);
            }
        }
        let stem = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.split_once(".ko"));
        let file = format!("{}.ko", stem.map_or(name.as_str(), |(s, _)| s));
        self.chosen.modules.push(Module { file, data });
        Ok(true)
    }

    fn same_release(&mut self, path: &Path, info: &ModInfo) -> Result<(), ImageError> {
        match (&self.chosen.release, &info.release) {
            (Some(known), Some(found)) if known != found => Err(ImageError::Modules {
                path: path.to_owned(),
                why: format!(
                    "it is of release {found}, but {} is of {known}; give the tree of one kernel",
                    self.release_of
                ),
            }),
            (None, Some(found)) => {
                self.chosen.release = Some(found.clone());
                self.release_of = path.display().to_string();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn read_module(path: &Path, job: &Job<'_>) -> Result<(Vec<u8>, ModInfo), ImageError> {
    let fault = |why: String| ImageError::Modules { path: path.to_owned(), why };
    let file = std::fs::File::open(path).map_err(io("open", path))?;
    let reader = decoder(std::io::BufReader::new(file)).map_err(io("read", path))?;
    let data = read_limited(reader, MAX_MODULE, job).map_err(|e| match e {
        LimitError::Stopped => ImageError::Stopped,
        LimitError::Bad(why) => fault(format!("it cannot be unpacked: {why}")),
    })?;
    let info = elf::modinfo(&data).map_err(|why| fault(format!("it is not a kernel module: {why}")))?;
    Ok((data, info))
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::module_elf;
    use super::*;
    use std::sync::atomic::AtomicBool;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn add(&self, path: &str, info: &[&str]) {
            self.file(path, &module_elf(info));
        }

        fn file(&self, path: &str, data: &[u8]) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, data).unwrap();
        }

        fn choose(&self) -> Result<Chosen, ImageError> {
            choose(self.0.path(), &Job::quiet(&AtomicBool::new(false)))
        }
    }

    fn files(chosen: &Chosen) -> Vec<&str> {
        chosen.modules.iter().map(|m| m.file.as_str()).collect()
    }

    #[test]
    fn dependencies_come_first_and_names_are_loose() {
        let tree = Tree::new();
        let magic = "vermagic=6.1.0-t SMP";
        tree.add("kernel/d/virtio_net.ko", &["depends=virtio-ring,virtio,net_failover", magic]);
        tree.file(
            "kernel/d/net_failover.ko.zst",
            &zstd::encode_all(&module_elf(&["depends=failover", magic])[..], 1).unwrap(),
        );
        tree.add("kernel/d/failover.ko", &["depends=", magic]);
        tree.add("kernel/d/virtio_ring.ko", &["depends=virtio", magic]);
        tree.add("kernel/d/virtio.ko", &["depends=", magic]);
        tree.add("kernel/d/virtio-rng.ko", &["depends=virtio", magic]);
        tree.add("kernel/fs/ext4.ko", &["depends=jbd2", "softdep=pre: crc32c", magic]);
        tree.add("kernel/fs/jbd2.ko", &["depends=", magic]);
        tree.add("kernel/fs/crc32c_generic.ko", &["depends=", magic]);
        tree.add("updates/virtio.ko", &["depends=", magic, "note=newer"]);
        tree.file("modules.builtin", b"kernel/o/overlay.ko\nkernel/v/virtio_blk.ko\n");
        let chosen = tree.choose().unwrap();
        assert_eq!(
            files(&chosen),
            [
                "virtio.ko",
                "virtio_ring.ko",
                "failover.ko",
                "net_failover.ko",
                "virtio_net.ko",
                "virtio-rng.ko",
                "crc32c_generic.ko",
                "jbd2.ko",
                "ext4.ko"
            ]
        );
        assert!(chosen.modules[0].data.windows(5).any(|w| w == b"newer"));
        assert_eq!(chosen.release.as_deref(), Some("6.1.0-t"));
        let noted = |name: &str| chosen.notes.iter().any(|n| n.contains(name));
        assert!(noted("virtio_pci") && noted("virtio_console"), "{:?}", chosen.notes);
        assert!(!noted("overlay") && !noted("virtio_blk"), "{:?}", chosen.notes);
    }

    #[test]
    fn a_missing_dependency_or_a_cycle_is_survived() {
        let tree = Tree::new();
        tree.add("virtio_blk.ko", &["depends=nowhere"]);
        tree.add("virtio_net.ko", &["depends=a"]);
        tree.add("a.ko", &["depends=virtio_net"]);
        let chosen = tree.choose().unwrap();
        assert_eq!(files(&chosen), ["a.ko", "virtio_net.ko"]);
        assert_eq!(chosen.notes.len(), 1);
        assert!(chosen.notes[0].contains("needs nowhere"));
    }

    #[test]
    fn bad_trees_are_refused() {
        let tree = Tree::new();
        assert!(tree.choose().unwrap_err().to_string().contains("no kernel module"));
        tree.file("virtio_blk.ko", b"\x7fELF");
        assert!(tree.choose().unwrap_err().to_string().contains("not a kernel module"));
        tree.file("virtio_blk.ko.xz", b"");
        std::fs::remove_file(tree.0.path().join("virtio_blk.ko")).unwrap();
        tree.file("virtio_blk.ko.xz", b"\xfd7zXZ\0broken");
        assert!(tree.choose().unwrap_err().to_string().contains("cannot be unpacked"));
        let tree = Tree::new();
        tree.add("virtio_blk.ko", &["vermagic=1 x"]);
        tree.add("virtio_net.ko", &["vermagic=2 x"]);
        assert!(tree.choose().unwrap_err().to_string().contains("of release 2"));
    }

    #[test]
    fn the_release_directory_is_found() {
        let tree = Tree::new();
        let root = tree.0.path();
        tree.add("lib/modules/6.1/kernel/a.ko", &[]);
        assert_eq!(locate(root, None).unwrap(), root.join("lib/modules/6.1"));
        assert_eq!(locate(&root.join("lib/modules"), None).unwrap(), root.join("lib/modules/6.1"));
        assert_eq!(locate(&root.join("lib/modules/6.1"), None).unwrap(), root.join("lib/modules/6.1"));
        tree.add("lib/modules/6.2/kernel/a.ko", &[]);
        assert_eq!(locate(root, Some("6.2")).unwrap(), root.join("lib/modules/6.2"));
        assert!(locate(root, None).unwrap_err().to_string().contains("several releases (6.1, 6.2)"));
        assert!(locate(&root.join("nothing"), None).is_err());
        assert_eq!(module_name("virtio-rng.ko.gz").as_deref(), Some("virtio_rng"));
        assert_eq!(module_name("a b.ko"), None);
        assert_eq!(module_name("x.ko.tmp"), None);
    }
}
