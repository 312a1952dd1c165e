//! Kernel and root disk of the lab: a small Debian with the tools that tests run, made once by mmdebstrap and kept
//! until its recipe changes. Runs of the machine never change it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::machine;
use crate::stop::Stop;

/// The oldest suite the product supports, so that the lab has the oldest kernel.
const SUITE: &str = "bookworm";
const PACKAGES: &str = "iproute2,nftables,iptables,nbd-client,kmod,strace,python3,busybox-static,e2fsprogs,procps,\
                        util-linux,bsdutils";
/// Not needed by programs, and half of all files.
const EXCLUDED: [&str; 4] =
    ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*"];
const HOOK: &str = include_str!("image.sh");

/// What is kept.
#[derive(Debug)]
pub(crate) struct Image {
    /// The kernel as the distribution packs it.
    pub(crate) kernel: PathBuf,
    /// An ext4 image.
    pub(crate) disk: PathBuf,
}

/// The image below `place`, made now if there is none of this recipe.
pub(crate) fn ready(place: &Path, stop: &Stop) -> Result<Image> {
    let dir = place.join("image");
    let recipe = recipe();
    if fs::read_to_string(dir.join("recipe")).is_ok_and(|text| text == recipe.join("\n")) {
        return Ok(Image::of(&dir));
    }
    println!("lab: making the image: a Debian {SUITE} with its kernel; one to three minutes, once");
    let new = tempfile::Builder::new().prefix("image.").tempdir_in(place).context("make a directory")?;
    let image = Image::of(new.path());
    let mut args = recipe.clone();
    args.extend([
        format!("--customize-hook=download /lab.vmlinuz {}", quoted(&image.kernel)),
        format!("--customize-hook=download /lab.ext4 {}", quoted(&image.disk)),
        SUITE.to_owned(),
        "/dev/null".to_owned(),
    ]);
    let log = new.path().join("log");
    machine::to_its_end("mmdebstrap", &args, &log, stop).context("make the image of the lab")?;
    fs::write(new.path().join("recipe"), recipe.join("\n")).context("write the recipe")?;
    match fs::remove_dir_all(&dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("remove {}", dir.display()));
        }
        _ => {}
    }
    fs::rename(new.keep(), &dir).with_context(|| format!("make {}", dir.display()))?;
    Ok(Image::of(&dir))
}

impl Image {
    fn of(dir: &Path) -> Self {
        Self { kernel: dir.join("vmlinuz"), disk: dir.join("root.ext4") }
    }
}

/// Everything that decides what is in the image.
fn recipe() -> Vec<String> {
    // mmdebstrap picks its mode: root where it is root, else a user namespace.
    let mut args = vec!["--variant=minbase".to_owned(), format!("--include={PACKAGES}")];
    args.extend(EXCLUDED.map(|path| format!("--dpkgopt=path-exclude={path}")));
    args.push(format!("--customize-hook={HOOK}"));
    args
}

/// For the words of a hook, which mmdebstrap splits as a shell does.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}
