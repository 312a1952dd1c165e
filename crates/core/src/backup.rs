//! A backup of the host's firewall rules: what one file holds, and how it is written and read. The first line is a JSON
//! object that says when, where and why; then comes a part for each program that shows rules, as its own text. What must
//! be done to have those rules back is in [`changes`].
//!
//! The text is free of what differs from one look to the next: dates, packet counters, handles.

pub mod changes;

use std::fmt::{self, Write as _};

use serde::{Deserialize, Serialize};

/// The form of the file that this code writes and reads.
pub const FORM: u32 = 1;
const END: &str = "## end";

/// Who shows rules, and puts them back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tool {
    /// IPv4 rules of iptables, kept in nf_tables.
    IptablesNft,
    /// IPv6 rules of iptables, kept in nf_tables.
    Ip6tablesNft,
    /// IPv4 rules of the older iptables.
    IptablesLegacy,
    /// IPv6 rules of the older iptables.
    Ip6tablesLegacy,
    /// Every table of nf_tables that iptables does not show.
    Nft,
}

impl Tool {
    /// All, in the order of the file.
    pub const ALL: [Tool; 5] =
        [Tool::IptablesNft, Tool::Ip6tablesNft, Tool::IptablesLegacy, Tool::Ip6tablesLegacy, Tool::Nft];

    /// The program, without `-save` or `-restore`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Tool::IptablesNft => "iptables-nft",
            Tool::Ip6tablesNft => "ip6tables-nft",
            Tool::IptablesLegacy => "iptables-legacy",
            Tool::Ip6tablesLegacy => "ip6tables-legacy",
            Tool::Nft => "nft",
        }
    }

    /// How nf_tables calls the family of a table that iptables keeps there.
    #[must_use]
    pub fn family_in_nft(self) -> Option<&'static str> {
        match self {
            Tool::IptablesNft => Some("ip"),
            Tool::Ip6tablesNft => Some("ip6"),
            _ => None,
        }
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a program showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Its text, by [`normal`].
    Saved(String),
    /// There are no rules of its kind, so it was not asked.
    Empty,
    /// They could not be seen: why.
    Absent(String),
}

/// The rules one program shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Which.
    pub tool: Tool,
    /// What it showed.
    pub content: Content,
}

impl Part {
    /// Its tables; none if it could not be seen.
    #[must_use]
    pub fn tables(&self) -> Vec<Table<'_>> {
        match &self.content {
            Content::Saved(text) => tables(self.tool, text),
            Content::Empty | Content::Absent(_) => vec![],
        }
    }
}

/// One table of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table<'a> {
    /// `filter` for iptables, `inet name` for nft.
    pub name: &'a str,
    /// All its lines.
    pub text: &'a str,
}

/// When, where and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORM`].
    pub form: u32,
    /// Unix time in milliseconds.
    pub taken_at_ms: u64,
    /// The same for people, UTC.
    pub taken_at: String,
    /// Name of the host.
    pub host: String,
    /// Release of its kernel.
    pub kernel: String,
    /// Whose configuration was in force.
    pub instance: String,
    /// What was about to be done.
    pub reason: String,
}

/// A backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backup {
    /// When, where and why.
    pub header: Header,
    /// One for each program.
    pub parts: Vec<Part>,
}

/// Why a file is no backup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// Nothing of ours.
    #[error("it is no backup of hearth: {0}")]
    Other(String),
    /// Of another version.
    #[error("its form is {0}, this program knows {FORM}")]
    Form(u32),
    /// The end is missing, so it may be cut short.
    #[error("it has no end, so a part may be missing; nothing of it is used")]
    CutShort,
    /// A part that this code does not know.
    #[error("line {0} begins a part that is not known: {1:?}")]
    Part(usize, String),
}

impl fmt::Display for Backup {
    /// The text of the file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = serde_json::to_string(&self.header).map_err(|_| fmt::Error)?;
        writeln!(f, "{header}")?;
        for Part { tool, content } in &self.parts {
            match content {
                Content::Saved(text) => write!(f, "## {tool}: saved\n{text}")?,
                Content::Empty => writeln!(f, "## {tool}: empty")?,
                Content::Absent(why) => writeln!(f, "## {tool}: absent: {}", why.replace('\n', " "))?,
            }
        }
        writeln!(f, "{END}")
    }
}

impl std::str::FromStr for Backup {
    type Err = BackupError;

    fn from_str(text: &str) -> Result<Self, BackupError> {
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        let header: serde_json::Value =
            serde_json::from_str(first).map_err(|e| BackupError::Other(format!("its first line: {e}")))?;
        // The form first: another one may have other fields.
        let form = header["form"].as_u64().and_then(|n| u32::try_from(n).ok());
        let form = form.ok_or_else(|| BackupError::Other("its first line has no form".into()))?;
        if form != FORM {
            return Err(BackupError::Form(form));
        }
        let header = serde_json::from_value(header).map_err(|e| BackupError::Other(e.to_string()))?;
        let mut parts: Vec<Part> = Vec::new();
        for (n, line) in rest.lines().enumerate() {
            if line == END {
                return Ok(Self { header, parts });
            }
            if let Some(what) = line.strip_prefix("## ") {
                parts.push(heading(what).ok_or_else(|| BackupError::Part(n + 2, what.to_owned()))?);
                continue;
            }
            match parts.last_mut().map(|p| &mut p.content) {
                Some(Content::Saved(text)) => writeln!(text, "{line}").unwrap_or_default(),
                _ => return Err(BackupError::Other(format!("line {} belongs to no part", n + 2))),
            }
        }
        Err(BackupError::CutShort)
    }
}

fn heading(text: &str) -> Option<Part> {
    let (tool, state) = text.split_once(": ")?;
    let tool = Tool::ALL.into_iter().find(|t| t.as_str() == tool)?;
    let content = match state {
        "saved" => Content::Saved(String::new()),
        "empty" => Content::Empty,
        _ => Content::Absent(state.strip_prefix("absent: ")?.to_owned()),
    };
    Some(Part { tool, content })
}

/// A program's text without what differs from one look to the next: comments with dates, and the counters of chains.
#[must_use]
pub fn normal(tool: Tool, text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        match line.rsplit_once(" [") {
            Some((chain, _)) if tool != Tool::Nft && line.starts_with(':') => {
                kept.push_str(chain);
                kept.push_str(" [0:0]");
            }
            // iptables-nft ends some lines with a blank.
            _ if tool != Tool::Nft => kept.push_str(line.trim_end()),
            _ => kept.push_str(line),
        }
        kept.push('\n');
    }
    kept
}

fn tables(tool: Tool, text: &str) -> Vec<Table<'_>> {
    let (mut found, mut open, mut at) = (Vec::new(), None, 0);
    for line in text.split_inclusive('\n') {
        let (begin, bare) = (at, line.trim_end_matches('\n'));
        at += line.len();
        let name = match tool {
            Tool::Nft => bare.strip_prefix("table ").and_then(|l| l.strip_suffix(" {")),
            _ => bare.strip_prefix('*'),
        };
        if let Some(name) = name {
            open = Some((begin, name));
        }
        if let Some((begin, name)) = open.filter(|_| bare == if tool == Tool::Nft { "}" } else { "COMMIT" }) {
            found.push(Table { name, text: &text[begin..at] });
            open = None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn backup(parts: Vec<Part>) -> Backup {
        let header = Header {
            form: FORM,
            taken_at_ms: 1_700_000_000_000,
            taken_at: "2023-11-14T22:13:20Z".into(),
            host: "node-1".into(),
            kernel: "6.1.0".into(),
            instance: "default".into(),
            reason: "reclaim".into(),
        };
        Backup { header, parts }
    }

    fn sample() -> Backup {
        let saved = |text: &str| Content::Saved(text.to_owned());
        backup(vec![
            Part { tool: Tool::IptablesNft, content: saved("*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT\n") },
            Part { tool: Tool::IptablesLegacy, content: Content::Absent("not\ninstalled".into()) },
            Part { tool: Tool::Ip6tablesNft, content: Content::Empty },
            Part {
                tool: Tool::Nft,
                content: saved("table inet a {\n\tchain b {\n\t}\n}\ntable ip c {\n}\n"),
            },
        ])
    }

    #[test]
    fn what_is_written_is_read() {
        let text = sample().to_string();
        let read: Backup = text.parse().unwrap();
        assert_eq!(read.to_string(), text);
        assert_eq!(read.header, sample().header);
        assert_eq!(read.parts[1].content, Content::Absent("not installed".into()));
        let names: Vec<&str> = read.parts[3].tables().iter().map(|t| t.name).collect();
        assert_eq!(names, ["inet a", "ip c"]);
        assert_eq!(read.parts[3].tables()[0].text, "table inet a {\n\tchain b {\n\t}\n}\n");
        assert_eq!(read.parts[0].tables()[0].name, "filter");
    }

    #[test]
    fn a_file_that_is_cut_or_of_another_kind_is_refused() {
        let text = sample().to_string();
        for at in (1..text.len()).filter(|at| text.is_char_boundary(*at)) {
            let cut = text[..at].parse::<Backup>();
            // Only the last newline may be missing.
            assert_eq!(cut.is_ok(), at == text.len() - 1, "cut at {at}: {cut:?}");
        }
        assert!(matches!("*filter\nCOMMIT\n".parse::<Backup>(), Err(BackupError::Other(_))));
        let later = text.replacen("\"form\":1", "\"form\":2", 1);
        assert_eq!(later.parse::<Backup>(), Err(BackupError::Form(2)));
        let strange = text.replace("## nft: saved", "## pf: saved");
        assert!(matches!(strange.parse::<Backup>(), Err(BackupError::Part(8, _))), "{strange}");
    }

    #[test]
    fn dates_and_counters_are_left_out_and_nothing_else() {
        let text = "# Generated by iptables-save on Mon\n*filter\n:FORWARD ACCEPT [12:3400]\n:own - [0:0]\n\
                    -A FORWARD -m comment --comment \"a [b]\" -j DROP \nCOMMIT\n# Completed on Mon\n";
        assert_eq!(
            normal(Tool::IptablesNft, text),
            "*filter\n:FORWARD ACCEPT [0:0]\n:own - [0:0]\n-A FORWARD -m comment --comment \"a [b]\" -j DROP\nCOMMIT\n"
        );
        let nft = "# Warning\ntable ip a {\n\n\tset b {\n\t}\n}\n";
        assert_eq!(normal(Tool::Nft, nft), "table ip a {\n\n\tset b {\n\t}\n}\n");
    }
}
