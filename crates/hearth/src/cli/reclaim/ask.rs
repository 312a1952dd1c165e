//! Questions before each thing is removed.

use std::collections::BTreeSet;
use std::io::{BufRead, Write};

use hearth_core::doctor::ItemKind;
use hearth_core::reclaim_plan::{Action, words};

/// What was answered for whole kinds.
#[derive(Debug)]
pub(super) struct Questions {
    total: usize,
    all_of: BTreeSet<ItemKind>,
}

impl Questions {
    pub(super) fn new(total: usize) -> Self {
        Self { total, all_of: BTreeSet::new() }
    }

    /// Asks until it is answered.
    ///
    /// # Errors
    /// The questions end here: the reader said so, or nobody answers.
    pub(super) fn ask(
        &mut self,
        action: &Action,
        from: &mut impl BufRead,
        to: &mut impl Write,
    ) -> Result<bool, String> {
        if self.all_of.contains(&action.kind) {
            return Ok(true);
        }
        let Action { number, kind, name, does, evidence, goes_with, identity, .. } = action;
        let why = evidence.first().map_or("", String::as_str);
        let mut question = format!("\n[{number}/{}] {kind} {name}\n  {why}\n  {does}\n", self.total);
        if !goes_with.is_empty() {
            question.push_str(&format!("  with it go {}\n", goes_with.join(", ")));
        }
        let prompt = format!("Remove it? [y]es, [n]o, [a]ll of kind {kind}, [s]how evidence, [q]uit: ");
        let gone = |e: std::io::Error| format!("nobody answers: {e}");
        to.write_all(question.as_bytes()).map_err(gone)?;
        loop {
            to.write_all(prompt.as_bytes()).and_then(|()| to.flush()).map_err(gone)?;
            let mut answer = String::new();
            if from.read_line(&mut answer).map_err(gone)? == 0 {
                return Err("nobody answers".into());
            }
            match answer.trim().to_ascii_lowercase().as_str() {
                "y" | "yes" => return Ok(true),
                "n" | "no" => return Ok(false),
                "a" | "all" => {
                    self.all_of.insert(*kind);
                    return Ok(true);
                }
                "q" | "quit" => return Err("stopped".into()),
                "s" | "show" => {
                    let shown = evidence.iter().map(|e| format!("  {e}\n")).collect::<String>();
                    let shown = format!("{shown}  known again by: {}\n", words(identity));
                    to.write_all(shown.as_bytes()).map_err(gone)?;
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_core::doctor::Identity;

    fn action(kind: ItemKind, number: usize) -> Action {
        Action {
            number,
            kind,
            name: format!("thing-{number}"),
            slot: None,
            sandbox: None,
            does: "unlink".into(),
            identity: Identity::Inode { device: 1, inode: 77 },
            since_ms: None,
            evidence: vec!["nobody has it".into(), "a kernel fact".into()],
            goes_with: vec![],
        }
    }

    #[test]
    fn each_answer_does_what_it_says() {
        let mut answers = &b"s\nwhat\ny\nN\na\nq\n"[..];
        let mut shown = Vec::new();
        let mut questions = Questions::new(9);
        let mut ask = |kind, n| questions.ask(&action(kind, n), &mut answers, &mut shown);
        assert_eq!(ask(ItemKind::Socket, 1), Ok(true));
        assert_eq!(ask(ItemKind::Socket, 2), Ok(false));
        assert_eq!(ask(ItemKind::Socket, 3), Ok(true));
        // All of its kind: not asked again.
        assert_eq!(ask(ItemKind::Socket, 4), Ok(true));
        assert_eq!(ask(ItemKind::Netns, 5), Err("stopped".into()));
        assert_eq!(ask(ItemKind::Netns, 6), Err("nobody answers".into()));
        let shown = String::from_utf8(shown).unwrap();
        assert!(shown.contains("a kernel fact") && shown.contains("inode 77"), "{shown}");
        assert!(!shown.contains("thing-4"), "{shown}");
        assert!(shown.lines().all(|l| l.len() <= 160), "{shown}");
    }
}
