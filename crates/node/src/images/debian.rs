//! A Debian or Ubuntu root tree through mmdebstrap, from the mirror the host itself uses for the suite.

use std::path::{Path, PathBuf};

use super::error::{ImageError, io};
use super::job::Job;
use super::program::{self, Program, Running, search_path};
use super::space;
use super::store::Work;
use super::tarball::is_root;

const MMDEBSTRAP: Program = Program { name: "mmdebstrap", package: "mmdebstrap" };
const APT_CONFIG: Program = Program { name: "apt-config", package: "apt" };

/// Free space below which it is not begun; minbase with its downloads takes about half.
const LEAST: u64 = 1 << 30;
/// Documentation a sandbox hardly reads: half of the files.
const EXCLUDED: [&str; 5] = [
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/locale/*",
    "/usr/share/info/*",
    "/usr/share/lintian/*",
];
/// Settings of the host's apt that tell how its mirror can be used.
const HOST_SETTINGS: [&str; 7] = [
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
    "Acquire::Retries",
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
    "Acquire::http::Proxy-Auto-Detect",
    "Acquire::https::Verify-Peer",
];
const REMEDY: &str = "Check that the suite and the packages exist, that the package mirror answers (`apt-get \
                      update`), and that the keys of the suite are installed (debian-archive-keyring, \
                      ubuntu-keyring).";

/// Checks names that become arguments.
pub(super) fn check(suite: &str, include: &[String]) -> Result<(), ImageError> {
    let word = |s: &str, extra: &str| {
        s.len() <= 128
            && s.starts_with(|c: char| c.is_ascii_alphanumeric())
            && s.chars().all(|c| c.is_ascii_alphanumeric() || extra.contains(c))
    };
    if !word(suite, "-.") {
        let why = format!("{suite:?} is not the name of a suite; use one like bookworm");
        return Err(ImageError::Option { field: "debian", why });
    }
    match include.iter().find(|p| !word(p, "+-.:=~")) {
        Some(bad) => {
            let why = format!("{bad:?} is not the name of a package");
            Err(ImageError::Option { field: "include", why })
        }
        None => Ok(()),
    }
}

/// Builds the tree in the work area and returns its directory.
pub(super) fn bootstrap(
    suite: &str,
    include: &[String],
    work: &Work,
    job: &Job<'_>,
) -> Result<PathBuf, ImageError> {
    check(suite, include)?;
    if !is_root() {
        return Err(ImageError::NeedsRoot { what: "a Debian template" });
    }
    let mut cmd = MMDEBSTRAP.command()?;
    space::require(work.dir(), "the template", LEAST, job)?;
    let dir = work.dir().join("root");
    cmd.args(["--mode=root", "--variant=minbase", "--format=directory"]);
    if !include.is_empty() {
        cmd.arg(format!("--include={}", include.join(",")));
    }
    for path in EXCLUDED {
        cmd.arg(format!("--dpkgopt=path-exclude={path}"));
    }
    for setting in host_settings(work, job) {
        cmd.arg(format!("--aptopt={setting}"));
    }
    cmd.arg(suite).arg(&dir);
    if let Some(sources) = host_sources(Path::new("/etc/apt"), suite) {
        let path = work.dir().join("hearth.sources");
        std::fs::write(&path, sources).map_err(io("write", &path))?;
        cmd.arg(path);
    }
    // Its helpers (ldconfig, start-stop-daemon) are in the sbin directories.
    cmd.env("PATH", search_path()).env("TMPDIR", work.dir()).env("DEBIAN_FRONTEND", "noninteractive");
    cmd.stdin(work.lock_for_child()?);
    let mut lines = 0;
    let mut step = "starting mmdebstrap".to_owned();
    let ended = Running::start(MMDEBSTRAP, cmd, work.dir())?.finish(job, &mut |new| {
        for line in new {
            lines += 1;
            if let Some(text) = line.strip_prefix("I: ") {
                step = text.to_owned();
            }
        }
        job.report(&step, lines, None);
    })?;
    if !ended.success() {
        return Err(space::explain(ended.failure(REMEDY), work.dir(), "the template", LEAST));
    }
    tidy(&dir)?;
    Ok(dir)
}

/// Takes what belongs to this host out of the tree and checks that there is something to run in it.
fn tidy(dir: &Path) -> Result<(), ImageError> {
    for file in ["etc/resolv.conf", "etc/hostname"] {
        let path = dir.join(file);
        if std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_file()) {
            std::fs::write(&path, "").map_err(io("empty", &path))?;
        }
    }
    let options = dir.join("etc/apt/apt.conf.d/99mmdebstrap");
    match std::fs::remove_file(&options) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io("remove", &options)(e)),
        _ => {}
    }
    let filled = |d: &str| std::fs::read_dir(dir.join(d)).is_ok_and(|mut e| e.next().is_some());
    if filled("usr/bin") || filled("bin") {
        return Ok(());
    }
    Err(ImageError::Source {
        path: dir.to_owned(),
        why: "mmdebstrap ended well but left nothing in /bin and /usr/bin; run it by hand to see why".into(),
    })
}

/// Settings the host's apt needs for its mirror; without apt-config there are none.
fn host_settings(work: &Work, job: &Job<'_>) -> Vec<String> {
    let Ok(mut cmd) = APT_CONFIG.command() else { return Vec::new() };
    cmd.args(["dump", "--no-empty"]);
    match program::run(APT_CONFIG, cmd, work.dir(), job) {
        Ok(ended) if ended.success() => pick_settings(&ended.output()),
        _ => Vec::new(),
    }
}

fn pick_settings(dump: &str) -> Vec<String> {
    let known = |line: &&str| line.split_once(' ').is_some_and(|(k, _)| HOST_SETTINGS.contains(&k));
    dump.lines().filter(known).map(str::to_owned).collect()
}

/// The host's sources of a suite and its updates in deb822 form, or `None` if it has none.
fn host_sources(etc_apt: &Path, suite: &str) -> Option<String> {
    let mut files = vec![etc_apt.join("sources.list")];
    let mut parts: Vec<PathBuf> = std::fs::read_dir(etc_apt.join("sources.list.d"))
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    parts.sort();
    files.append(&mut parts);
    let mut stanzas = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|e| e.to_str()) {
            Some("sources") => stanzas.extend(text.split("\n\n").filter_map(|s| deb822(s, suite))),
            Some("list") => stanzas.extend(text.lines().filter_map(|l| one_line(l, suite))),
            _ => {}
        }
    }
    // Updates alone are not a suite to bootstrap from.
    let base = stanzas.iter().any(|(suites, _)| suites.iter().any(|s| s == suite));
    base.then(|| stanzas.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n"))
}

/// The suites of a source that belong to `suite`.
fn belonging<'a>(suites: impl Iterator<Item = &'a str>, suite: &str) -> Vec<String> {
    let ours = |s: &&str| {
        s.strip_prefix(suite).is_some_and(|r| matches!(r, "" | "-updates" | "-security" | "/updates"))
    };
    suites.filter(ours).map(str::to_owned).collect()
}

/// One stanza, cut down to the suite. A distribution's own archive has a component `main`; others (Docker,
/// vendors) that use the same suite name have not.
fn deb822(stanza: &str, suite: &str) -> Option<(Vec<String>, String)> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in stanza.lines().filter(|l| !l.starts_with('#') && !l.trim().is_empty()) {
        if line.starts_with([' ', '\t']) {
            let (_, value) = fields.last_mut()?;
            value.push('\n');
            value.push_str(line);
        } else {
            let (key, value) = line.split_once(':')?;
            fields.push((key.trim().to_owned(), value.trim().to_owned()));
        }
    }
    let get = |key: &str| fields.iter().find(|(k, _)| k.eq_ignore_ascii_case(key)).map(|(_, v)| v.as_str());
    let has = |key: &str, word: &str| get(key).is_some_and(|v| v.split_whitespace().any(|w| w == word));
    if !has("Types", "deb") || !has("Components", "main") || has("Enabled", "no") {
        return None;
    }
    let suites = belonging(get("Suites")?.split_whitespace(), suite);
    if suites.is_empty() {
        return None;
    }
    let mut text = String::new();
    for (key, value) in &fields {
        let value = match key.to_ascii_lowercase().as_str() {
            "types" => "deb",
            "suites" => &suites.join(" "),
            _ => value,
        };
        text.push_str(&format!("{key}: {value}\n"));
    }
    Some((suites, text))
}

/// One line of a sources.list, as a stanza.
fn one_line(line: &str, suite: &str) -> Option<(Vec<String>, String)> {
    let rest = line.split('#').next()?.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(r) => r.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, name) = (words.next()?, words.next()?);
    let components: Vec<&str> = words.collect();
    let suites = belonging(std::iter::once(name), suite);
    if suites.is_empty() || !components.contains(&"main") {
        return None;
    }
    let mut text = format!("Types: deb\nURIs: {uri}\nSuites: {name}\nComponents: {}\n", components.join(" "));
    for option in options.split_whitespace() {
        let (key, value) = option.split_once('=')?;
        let key = match key {
            "arch" => "Architectures",
            "signed-by" => "Signed-By",
            "trusted" => "Trusted",
            "check-valid-until" => "Check-Valid-Until",
            _ => continue,
        };
        text.push_str(&format!("{key}: {}\n", value.replace(',', " ")));
    }
    Some((suites, text))
}

#[cfg(test)]
#[path = "debian_tests.rs"]
mod tests;
