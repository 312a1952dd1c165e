//! `hearth doctor report`: one JSON file with what a bug report needs and no secret: a token is shown as set or not,
//! and of a sandbox's environment the names alone.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{LookArgs, source};
use crate::cli::Context;
use crate::cli::client::Client;
use crate::cli::error::{self, CliError};
use crate::cli::{out, preflight};
use crate::config::Config;
use crate::doctor::host_config;

/// Files of the kernel that say how the host is doing.
const OF_THE_KERNEL: [&str; 7] = [
    "/proc/version",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/pressure/cpu",
    "/proc/pressure/memory",
    "/proc/pressure/io",
];
/// Name under which a value was that is not told.
const REMOVED: &str = "(removed)";

/// Writes it. The exit code is 0 whatever was found: the report is what was asked for.
pub(super) async fn write(look: &LookArgs, to: &Path, context: &Context) -> Result<u8, CliError> {
    let failed =
        |e: std::io::Error| CliError::failed(format!("cannot write {}", to.display()), e.to_string());
    let loaded = look.loaded()?;
    // Before the looks, so that nothing is looked for in vain; private until somebody sends it.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(failed)?;
    let config = &loaded.config;
    let source = source(config, context);
    let diagnosis = look.diagnose(context).await?;
    let node = match Client::connect(&source.addr, true).await {
        Ok(client) => client.nodes().info(hearth_api::v1::InfoRequest {}).await.map_or_else(
            |status| json!({ "error": status.message() }),
            |info| crate::cli::node::info_json(&info.into_inner()),
        ),
        Err(e) => json!({ "error": e.line() }),
    };
    let host: Map<String, Value> = OF_THE_KERNEL
        .iter()
        .chain(&["/etc/os-release"])
        .map(|path| ((*path).to_owned(), fs::read_to_string(path).map_or(Value::Null, Value::from)))
        .collect();
    let report = json!({
        "schema": 1,
        "version": env!("CARGO_PKG_VERSION"),
        "doctor": diagnosis,
        "node": node,
        "preflight": preflight::checks(config),
        // A token is hidden there.
        "config": loaded.to_json(),
        "records": records(config),
        "host": host,
    });
    let text = serde_json::to_string_pretty(&report)
        .map_err(|e| CliError::failed("cannot write the report", e.to_string()))?;
    file.write_all(text.as_bytes()).and_then(|()| file.write_all(b"\n")).map_err(failed)?;
    if context.json {
        out::json(&json!({ "report": to, "findings": diagnosis.findings }))?;
    } else {
        out::line(&format!(
            "wrote {} with {} findings; it has names and addresses of this host in it: read it before you send it",
            to.display(),
            diagnosis.findings
        ))?;
    }
    Ok(error::OK)
}

/// The records as they are on disk, or why not.
fn records(config: &Config) -> Value {
    let dir = host_config(config).state_dir.join("sandboxes");
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) => return json!({ "error": format!("{}: {e}", dir.display()) }),
    };
    let mut all = Map::new();
    for entry in entries.flatten() {
        let path = entry.path().join(hearth_core::record::RECORD_FILE);
        let record = match fs::read(&path).map(|text| serde_json::from_slice::<Value>(&text)) {
            Ok(Ok(record)) => without_environment(record),
            // Not its text: what does not parse cannot be cleared of secrets.
            Ok(Err(e)) => json!({ "error": e.to_string() }),
            Err(e) => json!({ "error": e.to_string() }),
        };
        all.insert(entry.file_name().to_string_lossy().into_owned(), record);
    }
    Value::Object(all)
}

fn without_environment(mut record: Value) -> Value {
    if let Some(env) = record.pointer_mut("/spec/env").and_then(Value::as_array_mut) {
        for pair in env {
            match pair.as_array_mut().map(Vec::as_mut_slice) {
                Some([_, value]) => *value = REMOVED.into(),
                _ => *pair = REMOVED.into(),
            }
        }
    }
    record
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_environment_are_removed_and_names_stay() {
        let record =
            json!({ "id": "a", "spec": { "env": [["KEY", "s3cret"], "OTHER=s3cret", { "X": "s3cret" }] } });
        let text = without_environment(record).to_string();
        assert!(!text.contains("s3cret") && text.contains("KEY"), "{text}");
    }
}
