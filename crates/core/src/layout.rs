//! Another orchestrator's ways as data: how it calls slots, files, cgroups and processes, and which rules it makes on
//! the host. What fits from end to end is its own by name; whether anybody still has it is [`judge`]'s business.

mod judge;
mod pattern;

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::Deserialize;

use crate::network::Cidr;

pub use judge::{Parent, judge};
pub use pattern::{Pattern, Said};

/// The layouts that come with the program, by name; each a TOML text.
pub const BUILT_IN: [(&str, &str); 1] = [("e2b", include_str!("../layouts/e2b.toml"))];

/// One orchestrator.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// What it is called.
    pub name: String,
    /// Its network slots.
    pub slots: Slots,
    /// Its processes.
    pub processes: Processes,
    /// Files per sandbox.
    #[serde(default)]
    pub files: Files,
    /// Its cgroups.
    pub cgroups: Option<Cgroups>,
    /// Rules of iptables per slot.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Elements per slot in sets of nftables.
    #[serde(default)]
    pub elements: Vec<Element>,
}

/// Network slots.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slots {
    /// Names in `/run/netns`.
    pub netns: Pattern,
    /// The host's end of the link.
    pub veth: Pattern,
    /// Least number.
    pub first: u32,
    /// Greatest number.
    pub last: u32,
    /// `{address}` is the n-th of these.
    pub addresses: Option<Cidr>,
}

/// Processes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processes {
    /// What a VMM looks like.
    pub vmm: Vec<Vmm>,
    /// Names of the daemon's program.
    pub daemons: Vec<String>,
    /// Names of programs that adopt what lost its parent.
    #[serde(default)]
    pub reapers: Vec<String>,
}

/// A VMM's command line.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vmm {
    /// Last part of the program's path.
    pub program: String,
    /// Option that the path of its API socket follows.
    pub socket: String,
}

/// Files per sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Where they are, not below.
    pub directories: Vec<PathBuf>,
    /// Names of Unix sockets.
    #[serde(default)]
    pub sockets: Vec<Pattern>,
    /// Names of FIFOs.
    #[serde(default)]
    pub fifos: Vec<Pattern>,
}

/// Cgroups.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cgroups {
    /// Below the mount of cgroup2.
    pub parent: PathBuf,
    /// Last part of the path.
    pub name: Pattern,
}

/// A rule of iptables.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Its table.
    pub table: String,
    /// Chain and rule, as `iptables-save` writes them behind `-A`.
    pub rule: Pattern,
}

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Element {
    /// Family of the table.
    pub family: String,
    /// Name of the table.
    pub table: String,
    /// Name of the set.
    pub set: String,
    /// The element, as nft writes it.
    pub element: Pattern,
}

impl Layout {
    /// What no key can say by itself.
    ///
    /// # Errors
    /// Names the key at fault.
    pub fn check(&self) -> Result<(), String> {
        let patterns = |key: &str, pattern: &Pattern, well: bool, what: &str| {
            if well { Ok(()) } else { Err(format!("{key}: {pattern} does not say which {what} it is of")) }
        };
        let Slots { netns, veth, first, last, addresses } = &self.slots;
        patterns("slots.netns", netns, netns.names_slot(), "slot")?;
        patterns("slots.veth", veth, veth.names_slot(), "slot")?;
        if *first == 0 || first > last {
            return Err(format!("slots: numbers from {first} to {last} are none; count from 1"));
        }
        let of_slots = self.rules.iter().map(|r| ("rules", &r.rule));
        for (key, pattern) in of_slots.chain(self.elements.iter().map(|e| ("elements", &e.element))) {
            patterns(key, pattern, pattern.names_slot(), "slot")?;
            if pattern.has_address() && addresses.is_none() {
                return Err(format!("{key}: {pattern} has an {{address}}; set slots.addresses"));
            }
        }
        let files = self.files.sockets.iter().chain(&self.files.fifos).map(|p| ("files", p));
        for (key, pattern) in files.chain(self.cgroups.iter().map(|c| ("cgroups.name", &c.name))) {
            patterns(key, pattern, pattern.names_sandbox(), "sandbox")?;
        }
        if let Some(directory) = self.files.directories.iter().find(|d| !d.is_absolute()) {
            return Err(format!("files.directories: {} is not absolute", directory.display()));
        }
        let parent = self.cgroups.as_ref().map(|c| c.parent.as_path());
        if parent.is_some_and(|p| p.components().any(|c| !matches!(c, std::path::Component::Normal(_)))) {
            return Err("cgroups.parent: write the path below the mount of cgroup2, such as e2b".into());
        }
        Ok(())
    }

    /// The slot that a name speaks of, if it is of that form and the number is one of its own.
    #[must_use]
    pub fn slot_of(&self, pattern: &Pattern, name: &str) -> Option<u32> {
        let said = pattern.read(name)?;
        let by_address = match said.address {
            None => None,
            Some(address) => Some(self.number_of(address)?),
        };
        let slot = match (said.slot, by_address) {
            (Some(a), Some(b)) if a != b => return None,
            (a, b) => a.or(b)?,
        };
        (self.slots.first..=self.slots.last).contains(&slot).then_some(slot)
    }

    fn number_of(&self, address: Ipv4Addr) -> Option<u32> {
        let net = self.slots.addresses?;
        net.contains(address).then(|| u32::from(address) - u32::from(net.base()))
    }

    /// The slot that a rule of iptables speaks of, if it is one of this orchestrator's.
    #[must_use]
    pub fn slot_of_rule(&self, table: &str, rule: &str) -> Option<u32> {
        self.rules.iter().filter(|r| r.table == table).find_map(|r| self.slot_of(&r.rule, rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The built-in layout, by another parser's value: the crate itself reads no TOML.
    pub(crate) fn e2b() -> Layout {
        serde_json::from_value(serde_json::json!({
            "name": "e2b",
            "slots": { "netns": "ns-{n}", "veth": "veth-{n}", "first": 1, "last": 32766, "addresses": "10.11.0.0/16" },
            "processes": {
                "vmm": [{ "program": "firecracker", "socket": "--api-sock" }],
                "daemons": ["orchestrator"],
                "reapers": ["systemd"]
            },
            "rules": [
                { "table": "filter", "rule": "FORWARD -i veth-{n} -o {word} -j ACCEPT" },
                { "table": "nat", "rule": "POSTROUTING -s {address}/32 -o {word} -j MASQUERADE" }
            ]
        }))
        .unwrap()
    }

    #[test]
    fn rules_that_only_mention_a_slot_are_nobodys() {
        let layout = e2b();
        layout.check().unwrap();
        assert_eq!(layout.slot_of_rule("filter", "FORWARD -i veth-310 -o eth0 -j ACCEPT"), Some(310));
        assert_eq!(
            layout.slot_of_rule("nat", "POSTROUTING -s 10.11.1.44/32 -o eth0 -j MASQUERADE"),
            Some(300)
        );
        for (table, rule) in [
            ("nat", "FORWARD -i veth-310 -o eth0 -j ACCEPT"),
            ("filter", "FORWARD -i veth-310 -j DROP"),
            ("filter", "FORWARD -i veth-32767 -o eth0 -j ACCEPT"),
            ("filter", "FORWARD -i veth-0 -o eth0 -j ACCEPT"),
            ("filter", "FORWARD -s 10.11.0.5/32 -i veth-310 -o eth0 -j ACCEPT"),
            ("nat", "POSTROUTING -s 10.12.0.5/32 -o eth0 -j MASQUERADE"),
            ("nat", "POSTROUTING -s 10.11.0.0/16 -o eth0 -j MASQUERADE"),
        ] {
            assert_eq!(layout.slot_of_rule(table, rule), None, "{rule}");
        }
    }

    #[test]
    fn a_layout_that_names_no_slot_is_refused() {
        let mut layout = e2b();
        layout.slots.addresses = None;
        assert!(layout.check().unwrap_err().contains("slots.addresses"));
        layout = e2b();
        layout.slots.netns = String::from("ns-{word}").try_into().unwrap();
        assert!(layout.check().unwrap_err().contains("slots.netns"));
        layout = e2b();
        layout.cgroups =
            Some(Cgroups { parent: "../x".into(), name: String::from("sbx-{sandbox}").try_into().unwrap() });
        assert!(layout.check().unwrap_err().contains("cgroups.parent"));
    }
}
