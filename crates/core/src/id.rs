//! Names and ids, each with its grammar. A value of one of these types is safe to put into a path, a link
//! name or a table name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing was given.
    #[error("{what} is empty")]
    Empty {
        /// Which name.
        what: &'static str,
    },
    /// More bytes than the grammar allows.
    #[error("{what} has {len} bytes; at most {max} are allowed")]
    TooLong {
        /// Which name.
        what: &'static str,
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// Fewer bytes than the grammar asks for.
    #[error("{what} has {len} bytes; {min} are needed")]
    TooShort {
        /// Which name.
        what: &'static str,
        /// Bytes given.
        len: usize,
        /// Bytes needed.
        min: usize,
    },
    /// A character outside the grammar.
    #[error("{what} {given:?} has the character {found:?}; use {allowed}")]
    BadCharacter {
        /// Which name.
        what: &'static str,
        /// The name as given.
        given: String,
        /// The first character refused.
        found: char,
        /// The grammar in words.
        allowed: &'static str,
    },
    /// A word hearth uses itself.
    #[error("{what} {given:?} is reserved; choose another")]
    Reserved {
        /// Which name.
        what: &'static str,
        /// The name as given.
        given: String,
    },
}

const LABEL: &str = "lower-case letters, digits and, inside, '-', '_' or '.'";

fn label(what: &'static str, s: &str, max: usize, inner: &str) -> Result<(), NameError> {
    if s.is_empty() {
        return Err(NameError::Empty { what });
    }
    if s.len() > max {
        return Err(NameError::TooLong { what, len: s.len(), max });
    }
    let last = s.chars().count() - 1;
    for (i, c) in s.chars().enumerate() {
        let plain = c.is_ascii_lowercase() || c.is_ascii_digit();
        if !(plain || (i != 0 && i != last && inner.contains(c))) {
            return Err(NameError::BadCharacter { what, given: s.to_owned(), found: c, allowed: LABEL });
        }
    }
    Ok(())
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(s: &str) -> Result<Self, NameError> {
                let check: fn(&str) -> Result<(), NameError> = $check;
                check(s)?;
                Ok(Self(s.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(s: String) -> Result<Self, NameError> {
                s.parse()
            }
        }

        impl From<$name> for String {
            fn from(n: $name) -> String {
                n.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name_type!(
    /// Identity of one life of a sandbox: 16 lower-case letters and digits, never used twice, so that a late
    /// clean-up cannot touch the next life of the same name.
    SandboxId,
    "sandbox id",
    |s| {
        label("sandbox id", s, SandboxId::LEN, "")?;
        if s.len() < SandboxId::LEN {
            return Err(NameError::TooShort { what: "sandbox id", len: s.len(), min: SandboxId::LEN });
        }
        Ok(())
    }
);

impl SandboxId {
    /// Length in bytes.
    pub const LEN: usize = 16;

    /// An id from 16 random bytes, five bits of each used (80 bits).
    #[must_use]
    pub fn from_random(bytes: [u8; Self::LEN]) -> Self {
        const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
        Self(bytes.iter().map(|b| ALPHABET[usize::from(b % 32)] as char).collect())
    }
}

name_type!(
    /// What a user calls a sandbox; unique among the living of one instance.
    SandboxName,
    "sandbox name",
    |s| label("sandbox name", s, 63, "-_.")
);

name_type!(
    /// Name of a template.
    TemplateName,
    "template name",
    |s| label("template name", s, 63, "-_.")
);

name_type!(
    /// Name of an imported guest kernel.
    KernelName,
    "kernel name",
    |s| label("kernel name", s, 63, "-_.")
);

name_type!(
    /// Name of a daemon instance: the tag in every host resource it makes.
    InstanceName,
    "instance name",
    |s| {
        label("instance name", s, 32, "-")?;
        match s {
            // These directories of the state directory are shared by all instances.
            "backups" | "blanks" | "chunks" | "templates" | "kernels" | "tmp" => {
                Err(NameError::Reserved { what: "instance name", given: s.to_owned() })
            }
            _ => Ok(()),
        }
    }
);

name_type!(
    /// First part of a host veth's name. Interface names have at most 15 bytes (IFNAMSIZ - 1) and the slot
    /// number has up to five.
    VethPrefix,
    "veth prefix",
    |s| label("veth prefix", s, 10, "-_")
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_would_break_a_path() {
        for bad in ["", "a/b", "..", ".a", "a.", "A", "a b", "ä", "a\0b", "-a", &"x".repeat(300)] {
            assert!(bad.parse::<SandboxName>().is_err(), "{bad:?} was taken");
        }
        let err = "x".repeat(300).parse::<SandboxName>().unwrap_err();
        assert_eq!(err.to_string(), "sandbox name has 300 bytes; at most 63 are allowed");
        assert!("web-1.a_b".parse::<SandboxName>().is_ok());
    }

    #[test]
    fn instance_names_do_not_collide_with_shared_directories() {
        assert!("templates".parse::<InstanceName>().is_err());
        assert!("backups".parse::<InstanceName>().is_err());
        assert!("prod-2".parse::<InstanceName>().is_ok());
        assert!("prod.2".parse::<InstanceName>().is_err());
    }

    #[test]
    fn random_ids_parse() {
        let id = SandboxId::from_random([255; 16]);
        assert_eq!(id.as_str().parse::<SandboxId>().unwrap(), id);
        // A directory somebody else put beside ours must not pass for one.
        for other in ["backup", "tmp", "old-backup-of-x1"] {
            assert!(other.parse::<SandboxId>().is_err(), "{other}");
        }
    }

    #[test]
    fn a_bad_name_in_a_file_is_an_error_not_a_value() {
        assert!(serde_json::from_str::<SandboxName>("\"../x\"").is_err());
    }
}
