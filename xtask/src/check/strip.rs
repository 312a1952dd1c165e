//! Rust text with the parts blanked that a word search must not see. Lines keep their numbers. This is a
//! scanner, not a parser: enough for code that rustfmt accepts.

/// What happens to string and character literals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strings {
    Keep,
    Blank,
}

/// `text` with comments, and literals if so asked, replaced by spaces.
pub(crate) fn blank(text: &str, strings: Strings) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        let (length, hide) = match rest {
            ['/', '/', ..] => (until_newline(rest), true),
            ['/', '*', ..] => (block_comment(rest), true),
            _ => match literal(&chars, at) {
                Some(length) => (length, strings == Strings::Blank),
                None => (1, false),
            },
        };
        for &c in &rest[..length] {
            out.push(if hide && c != '\n' { ' ' } else { c });
        }
        at += length;
    }
    out
}

/// Blanks each item that follows `#[cfg(test)]`, in code whose comments and literals are blanked.
pub(crate) fn without_tests(code: &str) -> String {
    const MARK: &str = "#[cfg(test)]";
    let mut out = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(begin) = rest.find(MARK) {
        let (before, from) = rest.split_at(begin);
        out.push_str(before);
        let length = item_length(from);
        out.extend(from[..length].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = &from[length..];
    }
    out.push_str(rest);
    out
}

/// Bytes up to the end of the item: its closing brace, or a semicolon before any brace.
fn item_length(from: &str) -> usize {
    let mut depth = 0usize;
    for (at, c) in from.char_indices() {
        match c {
            ';' if depth == 0 => return at + 1,
            '{' => depth += 1,
            '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    from.len()
}

fn until_newline(rest: &[char]) -> usize {
    rest.iter().position(|&c| c == '\n').unwrap_or(rest.len())
}

fn block_comment(rest: &[char]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => {
                depth += 1;
                at += 2;
            }
            ['*', '/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

/// Length of the literal that begins at `at`, if one does.
fn literal(chars: &[char], at: usize) -> Option<usize> {
    let rest = &chars[at..];
    let in_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match rest {
        ['"', ..] => Some(quoted(rest, '"')),
        ['r', '#' | '"', ..] if !in_word => raw(rest, 1),
        ['b' | 'c', 'r', '#' | '"', ..] if !in_word => raw(rest, 2),
        // A lifetime has no closing quote right after its first character.
        ['\'', '\\', ..] => Some(quoted(rest, '\'')),
        ['\'', _, '\'', ..] => Some(3),
        _ => None,
    }
}

fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw(rest: &[char], prefix: usize) -> Option<usize> {
    let hashes = rest[prefix..].iter().take_while(|&&c| c == '#').count();
    if rest.get(prefix + hashes) != Some(&'"') {
        return None; // A raw identifier.
    }
    let mut at = prefix + hashes + 1;
    while at < rest.len() {
        let closes =
            rest[at] == '"' && rest[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes;
        if closes {
            return Some(at + 1 + hashes);
        }
        at += 1;
    }
    Some(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_vanish_and_lines_stay() {
        let text = "a /* x /* y */ \n z */ b // c\n\"d\\\" e\" f r#\"g\" h\"# i 'j' '\\'' &'k l b\"m\" r#n";
        let out = blank(text, Strings::Blank);
        assert_eq!(out.split_whitespace().collect::<Vec<_>>(), ["a", "b", "f", "i", "&'k", "l", "b", "r#n"]);
        assert_eq!(out.lines().count(), text.lines().count());
        assert!(blank("x \"y\" // z", Strings::Keep).contains("\"y\""));
    }

    #[test]
    fn test_modules_vanish() {
        let code = "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() { c }\n}\nfn d() {}\n#[cfg(test)]\nmod e;\nfn f() {}";
        let out = without_tests(code);
        assert!(out.contains("fn a") && out.contains("fn d") && out.contains("fn f"));
        assert!(!out.contains("fn b") && !out.contains("mod e"));
        assert_eq!(out.lines().count(), code.lines().count());
    }
}
