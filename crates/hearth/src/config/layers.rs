//! Puts the configuration together: defaults, then the file, then `HEARTH_` variables, then flags. Remembers
//! which layer gave each value, so that every error and `--print-config` can name it.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use super::Config;
use super::keys::{KEYS, Key};
use super::value::Given;

/// Read if it is there and no other file is named.
pub(crate) const DEFAULT_FILE: &str = "/etc/hearth/hearth.toml";
/// Variables of the client and of tests; not configuration.
const OTHER_VARIABLES: &[&str] = &["HEARTH_ADDR", "HEARTH_CONFIG", "HEARTH_LOG"];

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// Built in.
    Default,
    /// A configuration file.
    File(PathBuf),
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Default => f.write_str("default"),
            Source::File(path) => write!(f, "file {}", path.display()),
            Source::Variable(name) => write!(f, "environment {name}"),
            Source::Flag(name) => write!(f, "flag --{name}"),
        }
    }
}

/// A configuration that cannot be used: what, why and what to do in one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigError(pub(crate) String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// A configuration and how it came about.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    /// The values.
    pub(crate) config: Config,
    /// One source per entry of [`KEYS`].
    sources: Vec<Source>,
    /// Things to tell that are no errors.
    pub(crate) notes: Vec<String>,
}

/// Loads all layers. `file` is what `--config` or `HEARTH_CONFIG` names; `flags` are pairs of key and value.
///
/// # Errors
/// The first value that cannot be used, with its source.
pub(crate) fn load(
    file: Option<&Path>,
    env: impl IntoIterator<Item = (OsString, OsString)>,
    flags: &[(&'static Key, String)],
) -> Result<Loaded, ConfigError> {
    let mut loaded =
        Loaded { config: Config::default(), sources: vec![Source::Default; KEYS.len()], notes: Vec::new() };
    match file {
        Some(path) => loaded.apply_file(path)?,
        None if Path::new(DEFAULT_FILE).exists() => loaded.apply_file(Path::new(DEFAULT_FILE))?,
        None => {}
    }
    loaded.apply_environment(env)?;
    for (key, value) in flags {
        loaded.apply(key, Given::Text(value), Source::Flag(key.flag()))?;
    }
    if let Err((name, why)) = loaded.config.check() {
        let source = loaded.source(name);
        return Err(ConfigError(format!("{name} ({source}): {why}")));
    }
    Ok(loaded)
}

impl Loaded {
    fn apply(&mut self, key: &'static Key, given: Given<'_>, source: Source) -> Result<(), ConfigError> {
        (key.set)(&mut self.config, given)
            .map_err(|why| ConfigError(format!("{} ({source}): {why}", key.name)))?;
        if let Some(i) = KEYS.iter().position(|k| k.name == key.name) {
            self.sources[i] = source;
        }
        Ok(())
    }

    /// The layer that gave a key its value.
    pub(crate) fn source(&self, name: &str) -> &Source {
        KEYS.iter().position(|k| k.name == name).map_or(&Source::Default, |i| &self.sources[i])
    }

    fn apply_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|e| {
            ConfigError(format!(
                "configuration file {} could not be read: {e}; name another by --config",
                path.display()
            ))
        })?;
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
            ConfigError(format!(
                "{} line {line} is not TOML: {}",
                path.display(),
                e.message().replace('\n', ", ")
            ))
        })?;
        for (name, value) in &table {
            match value {
                toml::Value::Table(section) => {
                    for (leaf, value) in section {
                        self.apply_file_key(path, &format!("{name}.{leaf}"), value)?;
                    }
                }
                value => self.apply_file_key(path, name, value)?,
            }
        }
        Ok(())
    }

    fn apply_file_key(&mut self, path: &Path, name: &str, value: &toml::Value) -> Result<(), ConfigError> {
        match KEYS.iter().find(|k| k.name == name) {
            Some(key) => self.apply(key, Given::Toml(value), Source::File(path.to_owned())),
            None => {
                let hint = match nearest_key(name) {
                    Some(key) if key.section().is_empty() => format!("did you mean {:?}?", key.leaf()),
                    Some(key) => format!("did you mean {:?} in [{}]?", key.leaf(), key.section()),
                    None => "see `hearth serve --print-config` for all keys".into(),
                };
                Err(ConfigError(format!("{}: unknown key {name:?}; {hint}", path.display())))
            }
        }
    }

    fn apply_environment(
        &mut self,
        env: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<(), ConfigError> {
        // Sorted, so that of two faults the same one is always named.
        let mut env: Vec<(String, OsString)> = env
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, value)| name.starts_with("HEARTH_") && !value.is_empty())
            .collect();
        env.sort();
        for (name, value) in env {
            if let Some(key) = KEYS.iter().find(|k| k.variable() == name) {
                let Some(value) = value.to_str() else {
                    return Err(ConfigError(format!("{} (environment {name}): not UTF-8", key.name)));
                };
                self.apply(key, Given::Text(value), Source::Variable(name))?;
            } else if !OTHER_VARIABLES.contains(&name.as_str()) && !name.starts_with("HEARTH_TEST_") {
                let near = KEYS.iter().map(Key::variable).min_by_key(|v| distance(v, &name));
                match near {
                    Some(near) if distance(&near, &name) <= 2 => {
                        return Err(ConfigError(format!("unknown variable {name}; did you mean {near}?")));
                    }
                    // Kubernetes, for one, sets HEARTH_PORT and the like for a service called hearth.
                    _ => {
                        self.notes.push(format!("variable {name} is not a setting of hearth and is ignored"))
                    }
                }
            }
        }
        Ok(())
    }

    /// The configuration as TOML, the source of each value as a comment.
    pub(crate) fn to_toml(&self) -> String {
        let mut out = String::new();
        let mut section = "";
        for (key, source) in KEYS.iter().zip(&self.sources) {
            if key.hidden() && *source == Source::Default {
                continue;
            }
            if key.section() != section {
                section = key.section();
                out.push_str(&format!("\n[{section}]\n"));
            }
            let line = match (key.get)(&self.config) {
                // A secret is not printed, so the line must not pass for a value either.
                Some(_) if key.name == "token" => "# token = (hidden)".to_owned(),
                Some(value) => format!("{} = {value}", key.leaf()),
                None => format!("# {} =", key.leaf()),
            };
            let source = match (key.get)(&self.config) {
                Some(_) => source.to_string(),
                None => "not set".to_owned(),
            };
            out.push_str(&format!("{line:<38} # {source}\n"));
        }
        out
    }

    /// The same as one JSON object: key → value and source.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let entry = |key: &Key, source: &Source| {
            let value = (key.get)(&self.config).map(|v| serde_json::to_value(v).unwrap_or_default());
            (key.name.to_owned(), serde_json::json!({ "value": value, "source": source.to_string() }))
        };
        KEYS.iter().zip(&self.sources).map(|(key, source)| entry(key, source)).collect()
    }
}

fn nearest_key(name: &str) -> Option<&'static Key> {
    // A key put into the wrong section is as likely as a typing mistake.
    let leaf = name.rsplit('.').next().unwrap_or(name);
    let cost = |key: &Key| distance(key.name, name).min(distance(key.leaf(), leaf) + 1);
    KEYS.iter().min_by_key(|key| cost(key)).filter(|key| cost(key) <= 3)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    fn error(text: &str) -> String {
        load(Some(file(text).path()), [], &[]).unwrap_err().0
    }

    #[test]
    fn the_defaults_pass_their_own_check() {
        let loaded = load(Some(file("").path()), [], &[]).unwrap();
        assert_eq!(loaded.config, Config::default());
        assert_eq!(loaded.config.instance_run_dir(), Path::new("/run/hearth/default"));
        assert_eq!(
            loaded.config.slot_layout().netns(hearth_core::network::SlotIndex::new(3).unwrap()),
            "hearth-default-3"
        );
    }

    #[test]
    fn what_print_config_prints_is_read_back_as_the_same() {
        let first =
            load(None, env(&[("HEARTH_NETWORK_DNS", "9.9.9.9, 1.0.0.1"), ("HEARTH_VMM", "qemu")]), &[]);
        let first = first.unwrap();
        let again = load(Some(file(&first.to_toml()).path()), [], &[]).unwrap();
        assert_eq!(first.config, again.config);
    }

    #[test]
    fn unknown_keys_name_the_file_and_the_nearest_known_one() {
        assert!(error("instnce = \"a\"").ends_with("unknown key \"instnce\"; did you mean \"instance\"?"));
        assert!(error("[network]\ncdir = \"a\"").ends_with("did you mean \"cidr\" in [network]?"));
        assert!(error("cidr = \"10.0.0.0/16\"").ends_with("did you mean \"cidr\" in [network]?"));
        assert!(error("[zebra]\nstripes = 1").ends_with("for all keys"));
    }

    #[test]
    fn bad_values_name_key_and_source() {
        assert!(error("listen = 5008").contains("listen (file /"));
        assert!(error("[network]\nslot_pool = -1").contains("-1: expected a whole number"));
        assert!(error("a = = 1\n").contains("line 1 is not TOML"));
        assert!(error("[network]\ncidr = \"10.0.0.0/31\"").contains("has no room for a slot"));
        let err = load(None, env(&[("HEARTH_RECLAIM_MODE", "sometimes")]), &[]).unwrap_err().0;
        assert_eq!(
            err,
            "reclaim.mode (environment HEARTH_RECLAIM_MODE): \"sometimes\": \"sometimes\" is none of background, blocking, off"
        );
    }

    #[test]
    fn a_token_is_in_no_output() {
        let loaded =
            load(None, env(&[("HEARTH_TOKEN", "s3cret"), ("HEARTH_LISTEN", "0.0.0.0:1")]), &[]).unwrap();
        let shown = format!("{loaded:?}{}{}", loaded.to_toml(), loaded.to_json());
        assert!(!shown.contains("s3cret"), "{shown}");
        assert_eq!(loaded.config.token.as_deref(), Some("s3cret"));
    }

    #[test]
    fn a_mistyped_variable_is_refused_and_a_strange_one_ignored() {
        assert!(load(None, env(&[("HEARTH_INSTANC", "a")]), &[]).unwrap_err().0.contains("HEARTH_INSTANCE"));
        let loaded = load(None, env(&[("HEARTH_PORT_80_TCP_ADDR", "10.0.0.1")]), &[]).unwrap();
        assert_eq!(loaded.notes.len(), 1);
    }

    #[test]
    fn long_run_directories_are_refused_before_a_socket_fails() {
        let dir = format!("run_dir = \"/{}\"", "x".repeat(80));
        assert!(error(&dir).contains("too long"));
        assert!(error("state_dir = \"here\"").contains("not absolute"));
    }
}
