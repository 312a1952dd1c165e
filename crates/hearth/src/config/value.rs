//! How one value is read from TOML or from text, and written back.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use hearth_core::id::{InstanceName, VethPrefix};
use hearth_core::network::Cidr;
use hearth_node::Failpoints;

use super::{FirecrackerDisk, LogFormat, ReclaimMode, ReconcileAction, ShutdownMode, Url, VmmChoice};

/// A value as some layer gives it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Given<'a> {
    /// From the file: the type must fit.
    Toml(&'a toml::Value),
    /// From the environment or a flag: text to be parsed.
    Text(&'a str),
}

impl<'a> Given<'a> {
    fn text(self) -> Result<&'a str, String> {
        match self {
            Given::Text(s) => Ok(s),
            Given::Toml(toml::Value::String(s)) => Ok(s),
            Given::Toml(other) => Err(format!("expected text in quotes, found {}", other.type_str())),
        }
    }
}

/// A type of a configuration key.
pub(super) trait ConfigValue: Sized {
    fn read(given: Given<'_>) -> Result<Self, String>;
    /// `None` where the key is not set.
    fn write(&self) -> Option<toml::Value>;
}

macro_rules! from_text {
    ($($t:ty => $expected:literal),+ $(,)?) => {$(
        impl ConfigValue for $t {
            fn read(given: Given<'_>) -> Result<Self, String> {
                let text = given.text()?;
                text.parse().map_err(|e| {
                    let e: <$t as std::str::FromStr>::Err = e;
                    format!("{text:?}: {e}{}", $expected)
                })
            }
            fn write(&self) -> Option<toml::Value> {
                Some(toml::Value::String(self.to_string()))
            }
        }
    )+};
}

from_text!(
    InstanceName => "",
    VethPrefix => "",
    Cidr => "",
    SocketAddr => "; write ADDRESS:PORT, such as 127.0.0.1:5008",
    VmmChoice => "",
    FirecrackerDisk => "",
    ReclaimMode => "",
    ReconcileAction => "",
    ShutdownMode => "",
    LogFormat => "",
    Url => "",
);

impl ConfigValue for Option<Url> {
    fn read(given: Given<'_>) -> Result<Self, String> {
        Url::read(given).map(Some)
    }
    fn write(&self) -> Option<toml::Value> {
        self.as_ref().and_then(ConfigValue::write)
    }
}

impl ConfigValue for PathBuf {
    fn read(given: Given<'_>) -> Result<Self, String> {
        match given.text()? {
            "" => Err("the path is empty".into()),
            path => Ok(path.into()),
        }
    }
    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::String(self.display().to_string()))
    }
}

impl ConfigValue for Option<PathBuf> {
    fn read(given: Given<'_>) -> Result<Self, String> {
        PathBuf::read(given).map(Some)
    }
    fn write(&self) -> Option<toml::Value> {
        self.as_ref().and_then(ConfigValue::write)
    }
}

/// The token, the only value of this type.
impl ConfigValue for Option<String> {
    fn read(given: Given<'_>) -> Result<Self, String> {
        let token = given.text()?;
        // It travels in an HTTP header. The text itself stays out of the message.
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err("a token is printable ASCII without spaces".into());
        }
        Ok(Some(token.to_owned()))
    }
    fn write(&self) -> Option<toml::Value> {
        self.as_ref().map(|_| toml::Value::String("(hidden)".into()))
    }
}

impl ConfigValue for bool {
    fn read(given: Given<'_>) -> Result<Self, String> {
        match given {
            Given::Toml(toml::Value::Boolean(b)) => Ok(*b),
            Given::Text("true") => Ok(true),
            Given::Text("false") => Ok(false),
            _ => Err("expected true or false".into()),
        }
    }
    fn write(&self) -> Option<toml::Value> {
        self.then_some(toml::Value::Boolean(true))
    }
}

/// `boot=error,disk=delay(100)@2+kill9-after`: see `hearth_node::Failpoints`.
impl ConfigValue for Failpoints {
    fn read(given: Given<'_>) -> Result<Self, String> {
        let text = given.text()?;
        let pairs = text.split(',').map(str::trim).filter(|p| !p.is_empty());
        let pairs: Option<Vec<_>> = pairs.map(|p| p.split_once('=')).collect();
        Failpoints::parse(pairs.ok_or_else(|| format!("{text:?}: write PLACE=FAULT,…"))?)
    }
    fn write(&self) -> Option<toml::Value> {
        (*self != Failpoints::default()).then(|| toml::Value::String(self.to_string()))
    }
}

macro_rules! whole_numbers {
    ($($t:ty),+) => {$(
        impl ConfigValue for $t {
            fn read(given: Given<'_>) -> Result<Self, String> {
                let expected = concat!("expected a whole number that fits ", stringify!($t));
                match given {
                    Given::Text(s) => s.parse().map_err(|_| format!("{s:?}: {expected}")),
                    Given::Toml(toml::Value::Integer(n)) => {
                        (*n).try_into().map_err(|_| format!("{n}: {expected}"))
                    }
                    Given::Toml(other) => Err(format!("{expected}, found {}", other.type_str())),
                }
            }
            fn write(&self) -> Option<toml::Value> {
                Some(toml::Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX)))
            }
        }
    )+};
}

whole_numbers!(u32, u64, usize);

impl ConfigValue for Vec<Ipv4Addr> {
    fn read(given: Given<'_>) -> Result<Self, String> {
        let parse = |s: &str| s.trim().parse().map_err(|_| format!("{s:?} is not an IPv4 address"));
        match given {
            Given::Text(s) => s.split(',').filter(|s| !s.trim().is_empty()).map(parse).collect(),
            Given::Toml(toml::Value::Array(items)) => {
                items.iter().map(|item| parse(Given::Toml(item).text()?)).collect()
            }
            Given::Toml(other) => Err(format!("expected an array of addresses, found {}", other.type_str())),
        }
    }
    fn write(&self) -> Option<toml::Value> {
        Some(toml::Value::Array(self.iter().map(|ip| toml::Value::String(ip.to_string())).collect()))
    }
}
