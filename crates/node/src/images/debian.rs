//! A Debian or Ubuntu root tree through mmdebstrap, from the mirror the host itself uses for the suite.
//!
//! The host's apt configuration may hold passwords (of a mirror, of a proxy). It is used to fetch, from files only
//! root can read and never as arguments, and nothing of it stays in the tree but the plain sources.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{ImageError, io};
use super::job::Job;
use super::program::{self, Limit, Program, Running, search_path};
use super::space;
use super::store::Work;
use super::tarball::is_root;

const MMDEBSTRAP: Program = Program { name: "mmdebstrap", package: "mmdebstrap" };
const APT_CONFIG: Program = Program { name: "apt-config", package: "apt" };

const DUMP: Limit =
    Limit { after: Duration::from_secs(10), remedy: "Run `apt-config dump` by hand to see why." };

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
    let settings = host_settings(work, job);
    if !settings.is_empty() {
        // mmdebstrap appends it to 99mmdebstrap, which `tidy` removes. Its own APT_CONFIG replaces one of ours.
        let path = write_secret(work.dir(), "hearth.conf", &settings.join("\n"))?;
        let mut option = std::ffi::OsString::from("--aptopt=");
        option.push(path);
        cmd.arg(option);
    }
    cmd.arg(suite).arg(&dir);
    if let Some(sources) = host_sources(Path::new("/etc/apt"), suite) {
        cmd.arg(write_secret(work.dir(), "hearth.sources", &sources)?);
    }
    // Its helpers (ldconfig, start-stop-daemon) are in the sbin directories.
    cmd.env("PATH", search_path()).env("TMPDIR", work.dir()).env("DEBIAN_FRONTEND", "noninteractive");
    cmd.stdin(work.lock_for_child()?);
    let mut lines = 0;
    let mut step = "starting mmdebstrap".to_owned();
    let ended = Running::start(MMDEBSTRAP, cmd, work.dir(), Limit::TEMPLATE)?.finish(job, &mut |new| {
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
    tidy(&dir, suite)?;
    Ok(dir)
}

/// Writes what may hold a password.
fn write_secret(dir: &Path, name: &str, text: &str) -> Result<PathBuf, ImageError> {
    let path = dir.join(name);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let mut file = file.map_err(io("create", &path))?;
    file.write_all(format!("{text}\n").as_bytes()).map_err(io("write", &path))?;
    Ok(path)
}

/// Takes what belongs to this host out of the tree and checks that there is something to run in it.
fn tidy(dir: &Path, suite: &str) -> Result<(), ImageError> {
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
    plain_sources(dir, suite)?;
    let filled = |d: &str| std::fs::read_dir(dir.join(d)).is_ok_and(|mut e| e.next().is_some());
    if filled("usr/bin") || filled("bin") {
        return Ok(());
    }
    Err(ImageError::Source {
        path: dir.to_owned(),
        why: "mmdebstrap ended well but left nothing in /bin and /usr/bin; run it by hand to see why".into(),
    })
}

/// Replaces the sources in the tree, which are those used to fetch, by what the guest itself can use.
fn plain_sources(dir: &Path, suite: &str) -> Result<(), ImageError> {
    let etc_apt = dir.join("etc/apt");
    // What mmdebstrap wrote: packages may have brought sources of their own.
    let written = |f: &PathBuf| {
        f.file_name().and_then(|n| n.to_str()).is_some_and(|n| n == "sources.list" || n.starts_with("0000"))
    };
    let files: Vec<PathBuf> = source_files(&etc_apt).into_iter().filter(written).collect();
    let stanzas = stanzas(&files, suite);
    if stanzas.is_empty() {
        // Not the host's, else they would be understood.
        return Ok(());
    }
    for file in files {
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io("remove", &file)(e)),
            _ => {}
        }
    }
    let texts: Vec<String> = stanzas.iter().filter_map(|(_, text)| plain(text, dir)).collect();
    if texts.is_empty() {
        return Ok(());
    }
    let path = etc_apt.join("sources.list.d/base.sources");
    std::fs::write(&path, texts.join("\n")).map_err(io("write", &path))?;
    // Every user of the guest may read it, whatever this process's umask.
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).map_err(io("open up", &path))
}

/// A stanza without user names, passwords, places on this host and keys that are not in the tree.
fn plain(stanza: &str, dir: &Path) -> Option<String> {
    let mut text = String::new();
    for (key, value) in fields(stanza)? {
        let value = match key.to_ascii_lowercase().as_str() {
            "uris" => {
                let uris = value.split_whitespace().filter_map(without_user);
                let uris = uris.collect::<Vec<_>>().join(" ");
                if uris.is_empty() {
                    return None;
                }
                uris
            }
            // A key in the stanza itself, fingerprints, or files.
            "signed-by" if value.contains('\n') => value,
            "signed-by" => {
                let there = |w: &&str| !w.contains('/') || dir.join(w.trim_start_matches('/')).is_file();
                let words = value.split(|c: char| c.is_whitespace() || c == ',');
                let kept: Vec<&str> = words.filter(|w| !w.is_empty()).filter(there).collect();
                if kept.is_empty() {
                    continue;
                }
                kept.join(" ")
            }
            "types" | "suites" | "components" | "architectures" | "trusted" | "check-valid-until" => value,
            _ => continue,
        };
        text.push_str(&format!("{key}: {value}\n"));
    }
    Some(text)
}

/// A URI without user and password; none if it is a place on this host.
fn without_user(uri: &str) -> Option<String> {
    let (scheme, rest) = uri.split_once("://")?;
    if !matches!(scheme, "http" | "https" | "ftp" | "mirror+http" | "mirror+https" | "tor+http" | "tor+https")
    {
        return None;
    }
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    Some(format!("{scheme}://{host}{path}"))
}

/// Settings the host's apt needs for its mirror; without apt-config there are none.
fn host_settings(work: &Work, job: &Job<'_>) -> Vec<String> {
    let Ok(mut cmd) = APT_CONFIG.command() else { return Vec::new() };
    cmd.args(["dump", "--no-empty"]);
    match program::run(APT_CONFIG, cmd, work.dir(), DUMP, job) {
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
    let stanzas = stanzas(&source_files(etc_apt), suite);
    // Updates alone are not a suite to bootstrap from.
    let base = stanzas.iter().any(|(suites, _)| suites.iter().any(|s| s == suite));
    base.then(|| stanzas.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n"))
}

/// The files in which apt looks for sources.
fn source_files(etc_apt: &Path) -> Vec<PathBuf> {
    let mut files = vec![etc_apt.join("sources.list")];
    let mut parts: Vec<PathBuf> = std::fs::read_dir(etc_apt.join("sources.list.d"))
        .map(|entries| entries.flatten().map(|e| e.path()).collect())
        .unwrap_or_default();
    parts.sort();
    files.append(&mut parts);
    files
}

/// Suites and text of each source that belongs to `suite`.
fn stanzas(files: &[PathBuf], suite: &str) -> Vec<(Vec<String>, String)> {
    let mut stanzas = Vec::new();
    for file in files {
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        match file.extension().and_then(|e| e.to_str()) {
            Some("sources") => stanzas.extend(text.split("\n\n").filter_map(|s| deb822(s, suite))),
            Some("list") => stanzas.extend(text.lines().filter_map(|l| one_line(l, suite))),
            _ => {}
        }
    }
    stanzas
}

/// The suites of a source that belong to `suite`.
fn belonging<'a>(suites: impl Iterator<Item = &'a str>, suite: &str) -> Vec<String> {
    let ours = |s: &&str| {
        s.strip_prefix(suite).is_some_and(|r| matches!(r, "" | "-updates" | "-security" | "/updates"))
    };
    suites.filter(ours).map(str::to_owned).collect()
}

/// The fields of a stanza; lines that go on with one keep their line breaks.
fn fields(stanza: &str) -> Option<Vec<(String, String)>> {
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
    Some(fields)
}

/// One stanza, cut down to the suite. A distribution's own archive has a component `main`; others (Docker,
/// vendors) that use the same suite name have not.
fn deb822(stanza: &str, suite: &str) -> Option<(Vec<String>, String)> {
    let fields = fields(stanza)?;
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
        text.push_str(&format!("{key}: {}\n", value.trim_matches('"').replace(',', " ")));
    }
    Some((suites, text))
}

#[cfg(test)]
#[path = "debian_tests.rs"]
mod tests;
