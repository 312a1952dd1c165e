//! What the daemon tells others of itself: `[events]`, `[webhook]`, `[otlp]`, `[log]`, `[metrics]`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::Config;

/// `[events]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventsConfig {
    /// Most MiB of the journal that are kept; 0: in memory alone.
    pub(crate) keep_mib: u64,
}

/// `[webhook]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WebhookConfig {
    /// Where events are posted; `None`: nowhere.
    pub(crate) url: Option<Url>,
    /// File with the secret that signs them.
    pub(crate) secret_file: Option<PathBuf>,
    /// Certificates that are trusted instead of the host's roots.
    pub(crate) ca_file: Option<PathBuf>,
    /// How long events are posted again that are refused for what they are.
    pub(crate) give_up_seconds: u64,
}

impl Default for WebhookConfig {
    fn default() -> Self {
        Self { url: None, secret_file: None, ca_file: None, give_up_seconds: 600 }
    }
}

/// `[otlp]`
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OtlpConfig {
    /// Collector that takes OTLP over gRPC; `None`: no traces.
    pub(crate) endpoint: Option<Url>,
    /// Certificates that are trusted instead of the host's roots.
    pub(crate) ca_file: Option<PathBuf>,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LogConfig {
    /// Form of log lines.
    pub(crate) format: LogFormat,
    /// Where they go; `None`: stderr.
    pub(crate) file: Option<PathBuf>,
    /// Size of the log file at which it is turned over, MiB.
    pub(crate) file_mib: u64,
}

/// `[metrics]`
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MetricsConfig {
    /// Whether each sandbox has series of its own.
    pub(crate) per_sandbox: bool,
}

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    Human,
    /// One object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "human" => Ok(LogFormat::Human),
            "json" => Ok(LogFormat::Json),
            _ => Err(format!("{s:?} is none of human, json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LogFormat::Human => "human",
            LogFormat::Json => "json",
        })
    }
}

/// An address that begins with `http://` or `https://`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url(hyper::Uri);

impl Url {
    /// As hyper takes it.
    pub(crate) fn uri(&self) -> hyper::Uri {
        self.0.clone()
    }
}

impl FromStr for Url {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let uri: hyper::Uri = s.parse().map_err(|e| format!("{e}"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err("write http://HOST:PORT/PATH or https://…".into());
        }
        // It is shown in logs and by --print-config.
        if uri.authority().is_some_and(|a| a.as_str().contains('@')) {
            return Err("a password has no place in it".into());
        }
        Ok(Self(uri))
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What must hold between these keys.
pub(super) fn check(config: &Config) -> Result<(), (&'static str, String)> {
    let hook = &config.webhook;
    if hook.url.is_some() && hook.secret_file.is_none() {
        let why = "webhook.url is set, and whoever gets events must be able to tell that they are ours";
        return Err(("webhook.secret_file", format!("{why}; name a file with a secret")));
    }
    if config.log.file_mib == 0 {
        return Err(("log.file_mib", "0 is not allowed; use 1 or more".into()));
    }
    for (key, path) in [
        ("webhook.secret_file", &hook.secret_file),
        ("webhook.ca_file", &hook.ca_file),
        ("otlp.ca_file", &config.otlp.ca_file),
        ("log.file", &config.log.file),
    ] {
        if let Some(path) = path.as_ref().filter(|p| !p.is_absolute()) {
            return Err((key, format!("{path:?} is not absolute; write the whole path")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_the_first_event() {
        for good in ["http://127.0.0.1:9000/hook", "https://example.org/a?b=c"] {
            assert_eq!(good.parse::<Url>().unwrap().to_string(), good);
        }
        for bad in ["", "example.org", "ftp://a/b", "http://", "http:///x", "https://me:secret@example.org/"]
        {
            assert!(bad.parse::<Url>().is_err(), "{bad}");
        }
    }
}
