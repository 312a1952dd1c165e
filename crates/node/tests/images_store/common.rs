//! Inputs made in code, a store in a temporary directory, and looks into images.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use hearth_core::image::Template;
use hearth_node::images::template::{self, Options, Source, TarInput};
use hearth_node::images::{ImageError, Job, Store, kernel};

pub(crate) static GO: AtomicBool = AtomicBool::new(false);

pub(crate) fn job() -> Job<'static> {
    Job::quiet(&GO)
}

/// A store with a kernel `default`, and room for inputs beside it.
pub(crate) struct Bench {
    dir: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("state")).unwrap();
        let bench = Self { dir, store };
        let image = bench.input("vmlinux", &kernel_elf("6.1.0-test"));
        kernel::import(&bench.store, &"default".parse().unwrap(), &image, None, false, &job()).unwrap();
        bench
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn input(&self, name: &str, data: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, data).unwrap();
        path
    }

    pub(crate) fn state(&self, name: &str) -> PathBuf {
        self.store.state_dir().join(name)
    }

    /// Everything in the store: path, kind, size, inode.
    pub(crate) fn listing(&self) -> BTreeMap<PathBuf, (u32, u64, u64)> {
        let mut seen = BTreeMap::new();
        let mut dirs = vec![self.store.state_dir().to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                let meta = std::fs::symlink_metadata(&path).unwrap();
                if meta.is_dir() {
                    dirs.push(path.clone());
                }
                let size = if meta.is_dir() { 0 } else { meta.len() };
                seen.insert(path, (meta.mode(), size, meta.ino()));
            }
        }
        seen
    }

    pub(crate) fn create(&self, name: &str, source: Source<'_>) -> Result<Template, ImageError> {
        self.create_with(name, source, &Options::default())
    }

    pub(crate) fn create_with(
        &self,
        name: &str,
        source: Source<'_>,
        options: &Options,
    ) -> Result<Template, ImageError> {
        template::create(&self.store, &name.parse().unwrap(), source, options, &job())
    }

    pub(crate) fn rootfs(&self, name: &str) -> PathBuf {
        template::rootfs_path(&self.store, &name.parse().unwrap())
    }
}

pub(crate) fn tar_file(path: &Path) -> Source<'static> {
    Source::Tar(TarInput::File(path.to_owned()))
}

/// Says why a test is skipped; `true` if it must be.
pub(crate) fn skip(test: &str, programs: &[&str]) -> bool {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        hearth_testkit::skip(test, "needs root");
        return true;
    }
    let dirs = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    match programs.iter().find(|p| !dirs.iter().any(|d| Path::new(d).join(p).is_file())) {
        Some(missing) => {
            hearth_testkit::skip(test, &format!("{missing} is not installed"));
            true
        }
        None => false,
    }
}

/// What debugfs says of an image.
pub(crate) fn debugfs(image: &Path, request: &str) -> String {
    let out = Command::new("debugfs")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .args(["-R", request])
        .arg(image)
        .output()
        .unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

pub(crate) fn assert_sound(image: &Path) {
    let out = Command::new("e2fsck")
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .arg("-fn")
        .arg(image)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
}

/// A kernel-like ELF with a banner.
pub(crate) fn kernel_elf(release: &str) -> Vec<u8> {
    let body = format!("....Linux version {release} (me)....");
    let mut e = vec![0; 64 + 56];
    e[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    e[16..20].copy_from_slice(&[2, 0, 62, 0]);
    e[32] = 64;
    e[54] = 56;
    e[56] = 1;
    e[64] = 1;
    e[64 + 8] = 120;
    e[64 + 32..64 + 40].copy_from_slice(&(body.len() as u64).to_le_bytes());
    e.extend_from_slice(body.as_bytes());
    e
}

/// A module-like ELF.
pub(crate) fn module_elf(modinfo: &[&str]) -> Vec<u8> {
    let mut e = vec![0; 64];
    e[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    e[16..20].copy_from_slice(&[1, 0, 62, 0]);
    let names = b"\0.modinfo\0.shstrtab\0";
    let info = modinfo.join("\0");
    let (at_names, at_info) = (64, 64 + names.len());
    e.extend_from_slice(names);
    e.extend_from_slice(info.as_bytes());
    let table = e.len() as u64;
    for (name, start, len) in [(0_u32, 0, 0), (1, at_info, info.len()), (10, at_names, names.len())] {
        let mut h = [0_u8; 64];
        h[..4].copy_from_slice(&name.to_le_bytes());
        h[24..32].copy_from_slice(&(start as u64).to_le_bytes());
        h[32..40].copy_from_slice(&(len as u64).to_le_bytes());
        e.extend_from_slice(&h);
    }
    e[40..48].copy_from_slice(&table.to_le_bytes());
    e[58..64].copy_from_slice(&[64, 0, 3, 0, 2, 0]);
    e
}

/// A bzImage with a gzip payload.
pub(crate) fn bzimage(elf: &[u8], release: &str) -> Vec<u8> {
    let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    w.write_all(elf).unwrap();
    let payload = w.finish().unwrap();
    let mut image = vec![0; 1024];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
    image[0x300..0x300 + release.len()].copy_from_slice(release.as_bytes());
    image[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    image.extend_from_slice(&payload);
    image
}

/// A header with a name of at most 100 bytes, unchecked.
pub(crate) fn tar_header(kind: tar::EntryType, name: &str, size: u64) -> tar::Header {
    let mut h = tar::Header::new_gnu();
    h.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    h.set_entry_type(kind);
    h.set_mode(0o644);
    h.set_size(size);
    h.set_uid(0);
    h.set_gid(0);
    h.set_mtime(1_600_000_000);
    h.set_cksum();
    h
}

/// The value debugfs and setcap know as `cap_net_raw=ep`; it holds zero bytes.
pub(crate) const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A small root as `docker export` would write it.
pub(crate) fn docker_like_tar() -> Vec<u8> {
    use tar::EntryType;
    let mut b = tar::Builder::new(Vec::new());
    let mut add = |mut h: tar::Header, mode: u32, uid: u64, data: &[u8]| {
        h.set_mode(mode);
        h.set_uid(uid);
        h.set_gid(uid + 1);
        h.set_cksum();
        b.append(&h, data).unwrap();
    };
    add(tar_header(EntryType::Directory, "bin/", 0), 0o755, 0, b"");
    add(tar_header(EntryType::Regular, "bin/tool", 6), 0o4755, 0, b"binary");
    let mut link = tar_header(EntryType::Link, "bin/other", 0);
    link.set_link_name_literal("bin/tool").unwrap();
    add(link, 0o4755, 0, b"");
    add(tar_header(EntryType::Directory, "dev/", 0), 0o755, 0, b"");
    let mut device = tar_header(EntryType::Char, "dev/null", 0);
    device.set_device_major(1).unwrap();
    device.set_device_minor(3).unwrap();
    add(device, 0o666, 0, b"");
    add(tar_header(EntryType::Directory, "etc/", 0), 0o755, 0, b"");
    let mut symlink = tar_header(EntryType::Symlink, "etc/editor", 0);
    symlink.set_link_name_literal("/usr/bin/vi").unwrap();
    add(symlink, 0o777, 0, b"");
    add(tar_header(EntryType::Regular, "etc/owned", 2), 0o640, 1234, b"me");
    b.append_pax_extensions([
        ("SCHILY.xattr.security.capability", &CAPABILITY[..]),
        ("SCHILY.xattr.user.note", b"line 1\nline 2"),
    ])
    .unwrap();
    let mut h = tar_header(EntryType::Regular, "bin/ping", 4);
    h.set_mode(0o755);
    h.set_cksum();
    b.append(&h, &b"ping"[..]).unwrap();
    b.into_inner().unwrap()
}

/// Puts a sandbox record that names a template below `<state>/<instance>/sandboxes/`.
pub(crate) fn record(bench: &Bench, instance: &str, template: &str) -> PathBuf {
    let dir = bench.state(instance).join("sandboxes/abcdefghijkmnpqr");
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("record.json");
    let text = format!(
        "{{\"schema\": 99, \"id\": \"abcdefghijkmnpqr\", \"name\": \"web\", \"spec\": {{\"template\": \"{template}\"}}}}"
    );
    std::fs::write(&path, text).unwrap();
    path
}
