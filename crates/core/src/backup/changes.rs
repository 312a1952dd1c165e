//! What must be done to have the rules of a backup back: for each table that differs one script, which its program
//! carries out in one transaction.
//!
//! - iptables: the chains' rules are compared and only the differences are put in or taken out, by position and with
//!   `--noflush`. A whole table written back would be made anew: other counters, other chains and another place in what
//!   nft lists.
//! - nft: the contents of a table are taken out and put in again, the table itself stays where it is. Its counters begin
//!   at 0.
//!
//! A table that is not in the backup is left: whoever made it since then may need it. So are hearth's own tables, which
//! their daemons make and check.

use std::collections::BTreeMap;

use similar::{Algorithm, DiffOp, TextDiff, capture_diff_slices};

use super::{Backup, Content, Part, Table, Tool};

/// A table that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Who carries out the script.
    pub tool: Tool,
    /// As the program calls it.
    pub table: String,
    /// Lines that come back.
    pub added: usize,
    /// Lines that go.
    pub removed: usize,
    /// Both, as a unified diff from now to then.
    pub diff: String,
    /// What the program is given.
    pub script: String,
}

/// A backup beside what is there now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    /// What differs and can be put back.
    pub changes: Vec<Change>,
    /// What differs and stays as it is, in words.
    pub left: Vec<String>,
    /// What cannot be compared, in words.
    pub unseen: Vec<String>,
}

/// Compares.
#[must_use]
pub fn compare(then: &Backup, now: &[Part]) -> Comparison {
    let mut found = Comparison::default();
    for part in &then.parts {
        let tool = part.tool;
        let nothing = Part { tool, content: Content::Empty };
        let there = now.iter().find(|p| p.tool == tool).unwrap_or(&nothing);
        match (&part.content, &there.content) {
            (Content::Absent(why), _) => {
                found.left.push(format!("{tool}: not in the backup: {why}"));
                continue;
            }
            (Content::Saved(_), Content::Absent(why)) => {
                found.unseen.push(format!("{tool}: its rules cannot be seen now: {why}"));
                continue;
            }
            _ => {}
        }
        let (old, new) = (part.tables(), there.tables());
        for table in &old {
            let seen = new.iter().find(|t| t.name == table.name);
            if seen.is_some_and(|seen| seen.text == table.text) {
                continue;
            }
            if tool == Tool::Nft && is_own(table.name) {
                found.left.push(format!("table {}: hearth's own, its daemon makes it", table.name));
            } else if let Some(other) = elsewhere(tool, table.name, now) {
                found.unseen.push(format!(
                    "{tool} table {}: it is {other}'s by now, which shows it in another form; compare it by hand",
                    table.name
                ));
            } else {
                found.changes.push(change(tool, table, seen));
            }
        }
        for table in new.iter().filter(|t| old.iter().all(|o| o.name != t.name)) {
            let of_iptables = |t: &Tool| t.family_in_nft().is_some();
            let moved = Tool::ALL.into_iter().filter(of_iptables).chain([Tool::Nft]);
            let known = moved
                .filter(|t| *t != tool)
                .any(|t| in_parts(t, &name_for(tool, table.name, t), &then.parts));
            // Told above, where it is in the backup.
            if !known {
                found.left.push(format!("{tool} table {}: it is not in the backup and stays", table.name));
            }
        }
    }
    found
}

fn is_own(table: &str) -> bool {
    table.starts_with("inet hearth-")
}

/// A table's name as another program has it.
fn name_for(from: Tool, name: &str, to: Tool) -> String {
    match (from.family_in_nft(), to.family_in_nft()) {
        (Some(family), None) => format!("{family} {name}"),
        (None, Some(family)) => name.strip_prefix(&format!("{family} ")).unwrap_or_default().to_owned(),
        _ => String::new(),
    }
}

fn in_parts(tool: Tool, name: &str, parts: &[Part]) -> bool {
    let mut of_tool = parts.iter().filter(|p| p.tool == tool);
    of_tool.any(|p| p.tables().iter().any(|t| t.name == name))
}

/// Who shows a table now that another program showed then: iptables gives one up that has what it does not know.
fn elsewhere(tool: Tool, name: &str, now: &[Part]) -> Option<Tool> {
    Tool::ALL.into_iter().find(|t| *t != tool && in_parts(*t, &name_for(tool, name, *t), now))
}

fn change(tool: Tool, then: &Table<'_>, now: Option<&Table<'_>>) -> Change {
    let text = now.map_or("", |t| t.text);
    let diff = TextDiff::configure().algorithm(Algorithm::Patience).diff_lines(text, then.text);
    let count = |tag| diff.iter_all_changes().filter(|c| c.tag() == tag).count();
    let (added, removed) = (count(similar::ChangeTag::Insert), count(similar::ChangeTag::Delete));
    let diff = diff.unified_diff().context_radius(1).to_string();
    let script = match tool {
        Tool::Nft => rebuild(then, now),
        _ => edit(then, text),
    };
    Change { tool, table: then.name.to_owned(), added, removed, diff, script }
}

/// Chains with their policies, and the rules of each.
#[derive(Debug, Default)]
struct Chains<'a> {
    policies: Vec<(&'a str, &'a str)>,
    rules: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Chains<'a> {
    fn of(text: &'a str) -> Self {
        let mut chains = Self::default();
        for line in text.lines() {
            if let Some((name, rest)) = line.strip_prefix(':').and_then(|l| l.split_once(' ')) {
                chains.policies.push((name, rest.split(' ').next().unwrap_or("-")));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let (chain, rest) = rule.split_once(' ').unwrap_or((rule, ""));
                chains.rules.entry(chain).or_default().push(rest);
            }
        }
        chains
    }

    fn policy(&self, chain: &str) -> Option<&'a str> {
        self.policies.iter().find(|(name, _)| *name == chain).map(|(_, policy)| *policy)
    }

    fn rules(&self, chain: &str) -> &[&'a str] {
        self.rules.get(chain).map_or(&[], Vec::as_slice)
    }
}

/// The differences of an iptables table.
fn edit(then: &Table<'_>, now: &str) -> String {
    let (wanted, there) = (Chains::of(then.text), Chains::of(now));
    let mut lines = vec![format!("*{}", then.name)];
    // First what rules may jump to. A line for a chain of the operator's that is there would empty it.
    for (chain, policy) in &wanted.policies {
        match there.policy(chain) {
            None if *policy == "-" => lines.push(format!(":{chain} - [0:0]")),
            seen if *policy != "-" && seen.unwrap_or("ACCEPT") != *policy => {
                lines.push(format!(":{chain} {policy} [0:0]"));
            }
            _ => {}
        }
    }
    let surplus: Vec<&str> =
        there.policies.iter().map(|(c, _)| *c).filter(|c| wanted.policy(c).is_none()).collect();
    for (chain, _) in &wanted.policies {
        edit_chain(chain, there.rules(chain), wanted.rules(chain), &mut lines);
    }
    // Last what no rule jumps to any more; they may jump to each other.
    lines.extend(surplus.iter().map(|chain| format!("-F {chain}")));
    lines.extend(surplus.iter().map(|chain| format!("-X {chain}")));
    lines.push("COMMIT\n".into());
    lines.join("\n")
}

/// One chain from the first rule to the last: what is before the position is as wanted.
fn edit_chain(chain: &str, now: &[&str], then: &[&str], lines: &mut Vec<String>) {
    let (mut at, mut len) = (1, now.len());
    let put = |rules: &[&str], at: &mut usize, len: &mut usize, lines: &mut Vec<String>| {
        for rule in rules {
            // After the last one there is no rule to put it before.
            let line =
                if *at > *len { format!("-A {chain} {rule}") } else { format!("-I {chain} {at} {rule}") };
            lines.push(line.trim_end().to_owned());
            *at += 1;
            *len += 1;
        }
    };
    for op in capture_diff_slices(Algorithm::Patience, now, then) {
        if let DiffOp::Equal { len: same, .. } = op {
            at += same;
            continue;
        }
        for _ in op.old_range() {
            lines.push(format!("-D {chain} {at}"));
            len -= 1;
        }
        put(&then[op.new_range()], &mut at, &mut len, lines);
    }
}

/// The contents of an nft table out and in again.
fn rebuild(then: &Table<'_>, now: Option<&Table<'_>>) -> String {
    let Some(now) = now else { return then.text.to_owned() };
    let name = then.name;
    if header(now.text) != header(then.text) {
        // What a table says of itself cannot be changed.
        return format!("delete table {name}\n{}", then.text);
    }
    let mut script = format!("flush table {name}\n");
    let mut objects: Vec<(&str, &str)> = objects(now.text);
    // Elements of maps jump to chains, and rules, which are gone, name all the rest.
    let rank = |kind: &str| match kind {
        "map" => 0,
        "set" => 1,
        "chain" => 2,
        "flowtable" => 3,
        _ => 4,
    };
    objects.sort_by_key(|(kind, _)| rank(kind));
    for (kind, object) in objects {
        script.push_str(&format!("delete {kind} {name} {object}\n"));
    }
    script + then.text
}

/// A table's own lines: flags and comment.
fn header(text: &str) -> Vec<&str> {
    let own = |l: &&str| l.starts_with('\t') && !l.starts_with("\t\t") && !l.ends_with('{') && *l != "\t}";
    text.lines().filter(own).collect()
}

/// Kind and name of everything in a table.
fn objects(text: &str) -> Vec<(&str, &str)> {
    let heads = text.lines().filter(|l| !l.starts_with("\t\t"));
    heads.filter_map(|l| l.strip_prefix('\t')?.strip_suffix(" {")?.rsplit_once(' ')).collect()
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
