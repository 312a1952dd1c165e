//! Patterns of names: text with placeholders. Each placeholder takes the longest run of its own characters, and the
//! text behind it may not begin with one of them, so that there is one way to read a name at most.

use std::fmt;
use std::net::Ipv4Addr;

use serde::Deserialize;

/// What a placeholder stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hole {
    /// `{n}`: a slot number.
    Slot,
    /// `{sandbox}`: letters and digits.
    Sandbox,
    /// `{random}`: letters, digits and `_`.
    Random,
    /// `{address}`: the IPv4 address of a slot.
    Address,
    /// `{word}`: anything without a blank.
    Word,
}

impl Hole {
    const ALL: [(&'static str, Hole); 5] = [
        ("n", Hole::Slot),
        ("sandbox", Hole::Sandbox),
        ("random", Hole::Random),
        ("address", Hole::Address),
        ("word", Hole::Word),
    ];

    fn takes(self, c: char) -> bool {
        match self {
            Hole::Slot => c.is_ascii_digit(),
            Hole::Sandbox => c.is_ascii_alphanumeric(),
            Hole::Random => c.is_ascii_alphanumeric() || c == '_',
            Hole::Address => c.is_ascii_digit() || c == '.',
            Hole::Word => !c.is_whitespace(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Hole(Hole),
}

/// A pattern.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern {
    text: String,
    parts: Vec<Part>,
}

/// What a name says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// The slot's number.
    pub slot: Option<u32>,
    /// The slot's address.
    pub address: Option<Ipv4Addr>,
    /// The sandbox, with what makes its life unique where the pattern has that: `<sandbox>-<random>`.
    pub sandbox: Option<String>,
}

impl TryFrom<String> for Pattern {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let bad = |why: &str| format!("pattern {text:?}: {why}");
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let (before, hole) = match rest.split_once('{') {
                None => (rest, None),
                Some((before, after)) => {
                    let (name, behind) = after.split_once('}').ok_or_else(|| bad("a { is not closed"))?;
                    let hole = Hole::ALL.iter().find(|(n, _)| *n == name).ok_or_else(|| {
                        bad(&format!(
                            "no placeholder is called {{{name}}}; there are n, sandbox, random, address, word"
                        ))
                    })?;
                    (before, Some((hole.1, behind)))
                }
            };
            if let Some(Part::Hole(former)) = parts.last()
                && (before.is_empty() || before.starts_with(|c| former.takes(c)))
            {
                return Err(bad("what follows a placeholder could be part of it"));
            }
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            }
            rest = match hole {
                None => "",
                Some((hole, behind)) => {
                    parts.push(Part::Hole(hole));
                    behind
                }
            };
        }
        if !parts.iter().any(|p| matches!(p, Part::Hole(_))) {
            return Err(bad("it has no placeholder, so it names one thing alone"));
        }
        Ok(Self { text, parts })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Pattern {
    /// What `name` says, if it is of this form from end to end.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<Said> {
        let mut said = Said::default();
        let (mut sandbox, mut random) = (None, None);
        let mut rest = name;
        for part in &self.parts {
            match part {
                Part::Text(text) => rest = rest.strip_prefix(text.as_str())?,
                Part::Hole(hole) => {
                    let end = rest.find(|c| !hole.takes(c)).unwrap_or(rest.len());
                    let (value, behind) = rest.split_at(end);
                    if value.is_empty() {
                        return None;
                    }
                    rest = behind;
                    match hole {
                        Hole::Slot => {
                            let n: u32 = value.parse().ok()?;
                            // "007" parses as 7 and is not a name that anybody made.
                            (n.to_string() == value && said.slot.is_none_or(|s| s == n)).then_some(())?;
                            said.slot = Some(n);
                        }
                        Hole::Address => {
                            let address: Ipv4Addr = value.parse().ok()?;
                            (address.to_string() == value).then_some(())?;
                            said.address = Some(address);
                        }
                        Hole::Sandbox => sandbox = Some(value),
                        Hole::Random => random = Some(value),
                        Hole::Word => {}
                    }
                }
            }
        }
        said.sandbox = sandbox.map(|s| random.map_or(s.to_owned(), |r| format!("{s}-{r}")));
        rest.is_empty().then_some(said)
    }

    /// Whether a name of this form says which slot it is of.
    #[must_use]
    pub fn names_slot(&self) -> bool {
        self.parts.iter().any(|p| matches!(p, Part::Hole(Hole::Slot | Hole::Address)))
    }

    /// Whether a name of this form says which sandbox it is of.
    #[must_use]
    pub fn names_sandbox(&self) -> bool {
        self.parts.contains(&Part::Hole(Hole::Sandbox))
    }

    /// Whether names of this form carry an address.
    pub(super) fn has_address(&self) -> bool {
        self.parts.contains(&Part::Hole(Hole::Address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(text: &str) -> Pattern {
        text.to_owned().try_into().unwrap()
    }

    #[test]
    fn only_whole_names_are_read() {
        let p = pattern("ns-{n}");
        assert_eq!(p.read("ns-7").unwrap().slot, Some(7));
        for other in ["ns-", "ns-07", "ns-7x", "xns-7", "ns-7-7", "ns-99999999999"] {
            assert_eq!(p.read(other), None, "{other}");
        }
        let p = pattern("fc-{sandbox}-{random}.sock");
        assert_eq!(p.read("fc-abc1-x_9.sock").unwrap().sandbox.as_deref(), Some("abc1-x_9"));
        for other in ["fc-a.sock", "fc-a-b-c.sock", "fc-metrics-a-b.sock", "fc-a-b.sock.bak", "fc--b.sock"] {
            assert_eq!(p.read(other), None, "{other}");
        }
        let p = pattern("POSTROUTING -s {address}/32 -o {word} -j MASQUERADE");
        let said = p.read("POSTROUTING -s 10.11.0.5/32 -o eth0 -j MASQUERADE").unwrap();
        assert_eq!(said.address, Some(Ipv4Addr::new(10, 11, 0, 5)));
        assert_eq!(p.read("POSTROUTING -s 10.11.0.5/32 -o eth0 -d 1.1.1.1/32 -j MASQUERADE"), None);
    }

    #[test]
    fn a_pattern_that_could_be_read_in_two_ways_is_refused() {
        for bad in ["{n}{n}", "{n}7", "{word}x", "{sandbox}a", "ns-{m}", "ns-{n", "plain"] {
            assert!(Pattern::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,60}") {
            drop(pattern("{sandbox}-{random} {n}").read(&text));
            drop(Pattern::try_from(text));
        }
    }
}
