//! `net.ipv4.ip_forward` of the host, with the old value on record before it is changed.
//!
//! Inside the slots' namespaces forwarding is turned on per link by `rtnl`, not here.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::{Op, Result};

/// Shows the value of the calling thread's namespace.
const FILE: &str = "/proc/sys/net/ipv4/ip_forward";
const NAME: &str = "net.ipv4.ip_forward";
const WANTED: &str = "1";

/// What was changed, for the way back.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Which setting.
    sysctl: String,
    /// Its value before.
    old: String,
    /// The value given to it.
    set: String,
}

/// Turns forwarding on, if it is off.
pub(crate) fn ensure(op: &Op, record: &Path) -> Result<()> {
    let old = current(op)?;
    if old == WANTED {
        return Ok(());
    }
    // A record of an earlier change stays: its old value is the host's own.
    if read(op, record)?.is_none() {
        let content = Record { sysctl: NAME.into(), old, set: WANTED.into() };
        write(record, &content)
            .map_err(|e| op.io(&format!("record the old value in {}", record.display()), e))?;
    }
    fs::write(FILE, WANTED).map_err(|e| op.io(&format!("set {NAME}"), e))
}

/// Gives the old value back, unless somebody changed it since or `others` still need it.
pub(crate) fn release(op: &Op, record: &Path, others: &[String]) -> Result<()> {
    let Some(content) = read(op, record)? else { return Ok(()) };
    if !others.is_empty() {
        tracing::warn!(setting = NAME, ?others, "left on: other instances need it");
    } else if current(op)? == content.set {
        fs::write(FILE, &content.old).map_err(|e| op.io(&format!("restore {NAME}"), e))?;
    } else {
        tracing::info!(setting = NAME, "left alone: it was changed since");
    }
    match fs::remove_file(record) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(op.io(&format!("remove {}", record.display()), e))
        }
        _ => Ok(()),
    }
}

fn current(op: &Op) -> Result<String> {
    let text = fs::read_to_string(FILE).map_err(|e| op.io(&format!("read {NAME}"), e))?;
    Ok(text.trim().to_owned())
}

fn read(op: &Op, path: &Path) -> Result<Option<Record>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(op.io(&format!("read {}", path.display()), e)),
    };
    match serde_json::from_str::<Record>(&text) {
        Ok(r) if r.sysctl == NAME && matches!(r.old.as_str(), "0" | "1") => Ok(Some(r)),
        _ => Err(op.refused(format!(
            "{} is no record of {NAME}; set the value you want by hand and remove the file",
            path.display()
        ))),
    }
}

/// New file, then rename: a crash leaves the old content or the new one.
fn write(path: &Path, content: &Record) -> io::Result<()> {
    let parent = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(parent)?;
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(content)?)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(parent)?.sync_all()
}
