//! What goes into the lab for one run: fresh static binaries, the test programs asked for, and the suite as a shell
//! script, on an ext4 disk made without root.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::Item;
use super::image::Image;
use crate::program;

const INIT: &str = include_str!("guest.sh");
/// Room for what tests write: kernels, templates, sparse disks of sandboxes. Sparse outside as well. MiB.
const ROOM: u64 = 2048;

/// Builds what the suite needs and makes the disk, in `dir`.
pub(crate) fn make(
    root: &Path,
    suite: &[Item],
    image: &Image,
    firecracker: Option<&Path>,
    dir: &Path,
) -> Result<PathBuf> {
    let tree = dir.join("payload");
    for part in ["bin", "tests", "state"] {
        fs::create_dir_all(tree.join(part)).with_context(|| format!("make {}", tree.display()))?;
    }
    if suite.iter().any(needs_hearth) {
        for (name, program) in products(root)? {
            take(&program, &tree.join("bin").join(name))?;
        }
    }
    if let Some(program) = firecracker {
        take(program, &tree.join("bin/firecracker"))?;
    }
    for (package, target) in programs(suite) {
        // Of the whole workspace: a package alone is built with other features, and all it needs once more.
        let built = build(root, &["test", "--no-run", "--workspace", "--test", target])?;
        let found = built.iter().find(|b| b.test && b.target == target && b.package == package);
        let found = found.with_context(|| format!("{package} has no test program {target}"))?;
        take(&found.path, &tree.join("tests").join(test_file(package, target)))?;
    }
    fs::copy(&image.kernel, tree.join("vmlinuz")).context("copy the kernel")?;
    fs::write(tree.join("suite"), script(suite)).context("write the suite")?;
    fs::write(tree.join("init"), INIT).context("write init")?;
    fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755)).context("write init")?;
    let disk = dir.join("payload.ext4");
    let size = format!("{}M", mib_of(&tree)? + ROOM);
    let (from, to) = (tree.display().to_string(), disk.display().to_string());
    // The journal would only cost time on a disk that lives for minutes.
    let options = ["-q", "-t", "ext4", "-O", "^has_journal", "-E", "root_owner=0:0", "-d"];
    program::run("mke2fs", &[&options[..], &[&from, &to, &size]].concat(), "")?;
    fs::remove_dir_all(&tree).with_context(|| format!("remove {}", tree.display()))?;
    Ok(disk)
}

/// The product: what `HEARTH_BIN` and `HEARTH_GUEST` name, as for other tests, or fresh release binaries.
fn products(root: &Path) -> Result<[(&'static str, PathBuf); 2]> {
    if let (Some(hearth), Some(guest)) = (std::env::var_os("HEARTH_BIN"), std::env::var_os("HEARTH_GUEST")) {
        return Ok([("hearth", hearth.into()), ("hearth-guest", guest.into())]);
    }
    let built = build(root, &["build", "--release", "-p", "hearth", "-p", "hearth-guest"])?;
    let path = |name: &'static str| {
        let found = built.iter().find(|b| b.target == name);
        anyhow::Ok((name, found.with_context(|| format!("cargo built no {name}"))?.path.clone()))
    };
    Ok([path("hearth")?, path("hearth-guest")?])
}

/// The test programs of a suite, each once.
fn programs(suite: &[Item]) -> BTreeSet<(&str, &str)> {
    let programs = suite.iter().filter_map(|item| match item {
        Item::Test { package, target, .. } => Some((package.as_str(), target.as_str())),
        Item::Command(_) => None,
    });
    programs.collect()
}

/// Whether it runs the product, for which a kernel and a template are there too. The host crate alone does not.
fn needs_hearth(item: &Item) -> bool {
    !matches!(item, Item::Test { package, .. } if package == "hearth-host")
}

fn test_file(package: &str, target: &str) -> String {
    format!("{package}-{target}")
}

/// A program that cargo built.
struct Built {
    package: String,
    target: String,
    test: bool,
    path: PathBuf,
}

/// Runs cargo and answers with the programs it names.
fn build(root: &Path, args: &[&str]) -> Result<Vec<Built>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(args).args(["--locked", "--message-format=json-render-diagnostics"]).current_dir(root);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("run cargo")?;
    ensure!(output.status.success(), "cargo {}: {}", args.join(" "), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>();
    let messages = messages.context("read what cargo built")?;
    let programs = messages.iter().filter_map(|message| {
        Some(Built {
            package: package_of(message["package_id"].as_str()?).to_owned(),
            target: message["target"]["name"].as_str()?.to_owned(),
            test: message["profile"]["test"].as_bool()?,
            path: message["executable"].as_str()?.into(),
        })
    });
    Ok(programs.collect())
}

/// The name in cargo's id of a package: after `#`, or the last directory where the two are the same.
fn package_of(id: &str) -> &str {
    let (path, rest) = id.rsplit_once('#').unwrap_or((id, ""));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(path),
    }
}

/// Copies a program without what only a debugger reads: that is nine tenths of a test program.
fn take(program: &Path, to: &Path) -> Result<()> {
    let (from, to) = (program.display().to_string(), to.display().to_string());
    program::run("strip", &["--strip-debug", "-o", &to, &from], "").map(|_| ())
}

/// The suite as the lab's init reads it.
fn script(suite: &[Item]) -> String {
    let mut script = String::new();
    if suite.iter().any(needs_hearth) {
        script.push_str("prepare_state || exit\n");
    }
    for (number, item) in suite.iter().enumerate() {
        let what = match item {
            Item::Test { package, target, filter } => {
                let filter = if filter.is_empty() { String::new() } else { quoted(filter) };
                format!("/lab/tests/{} {filter}", test_file(package, target))
            }
            Item::Command(command) => format!("run_command {}", quoted(command)),
        };
        script.push_str(&format!("item {number} {} {what}\n", quoted(&item.name())));
    }
    script
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Size of all files below `dir`, rounded up to MiB each.
fn mib_of(dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let entry = entry?;
        let meta = entry.metadata()?;
        sum += match (meta.is_dir(), meta.is_file()) {
            (true, _) => mib_of(&entry.path())?,
            (_, true) => (meta.len() >> 20) + 1,
            _ => bail!("{} is neither file nor directory", entry.path().display()),
        };
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_package_is_in_its_id() {
        assert_eq!(package_of("path+file:///w/crates/vmm#hearth-vmm@0.1.0"), "hearth-vmm");
        assert_eq!(package_of("path+file:///w/crates/hearth#0.1.0"), "hearth");
    }

    #[test]
    fn a_suite_survives_the_shell_and_says_what_needs_state() {
        let test = Item::test("hearth-host:kernel").unwrap();
        assert_eq!(
            script(std::slice::from_ref(&test)),
            "item 0 'hearth-host:kernel' /lab/tests/hearth-host-kernel \n"
        );
        let command = Item::Command("echo 'a b'".into());
        let lines = script(&[test, command]);
        assert!(lines.starts_with("prepare_state || exit\nitem 0 "), "{lines}");
        let last = lines.lines().last().unwrap();
        // What the shell makes of it is what was asked for.
        let ask = format!("item() {{ shift; printf '%s|' \"$@\"; }}\n{last}");
        assert_eq!(program::run("sh", &["-c", &ask], "").unwrap(), "echo 'a b'|run_command|echo 'a b'|");
    }
}
