//! The links whose names begin with a prefix. A dump of all links costs 75 µs each on a host with thousands; their
//! names cost 2 µs, and asking for those that matter costs what they cost alone.

use std::fs;
use std::io;

use hearth_core::network::SlotLayout;

use super::error::{Op, Result};
use super::netlink::NetlinkError;
use super::rtnl::{Link, Rtnl};

/// Of the thread: `/proc/net` is the main thread's, `/sys/class/net` that of whoever mounted it.
const NAMES: &str = "/proc/thread-self/net/dev";

/// The links that have an instance's veth prefix, as they were at one moment.
#[derive(Debug)]
pub struct Links(pub(super) Vec<Link>);

impl Links {
    /// Looks at them.
    ///
    /// # Errors
    /// If the kernel cannot be asked.
    pub fn of(layout: &SlotLayout) -> Result<Self> {
        let op = Op::new("census", "links");
        let mut rtnl = Rtnl::open().map_err(|e| op.netlink("open a route socket", e))?;
        let links = with_prefix(&mut rtnl, layout.veth_prefix.as_str());
        links.map(Self).map_err(|e| op.netlink("list links", e))
    }
}

/// All links with names that begin with `prefix`, by name. One that comes or goes meanwhile may or may not be there.
pub(super) fn with_prefix(rtnl: &mut Rtnl, prefix: &str) -> std::result::Result<Vec<Link>, NetlinkError> {
    let text = fs::read_to_string(NAMES).map_err(NetlinkError::Socket)?;
    let names = names(&text).ok_or_else(|| {
        let why = format!("{NAMES} is not of the known form");
        NetlinkError::Socket(io::Error::new(io::ErrorKind::InvalidData, why))
    })?;
    let mut names: Vec<String> = names.filter(|n| n.starts_with(prefix)).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    Ok(rtnl.links_named(&names)?.into_iter().flatten().collect())
}

/// The names in `/proc/net/dev`: two lines of headings, then `  name: 1 2 3 …`. A name has no space and no colon
/// (dev_valid_name in net/core/dev.c).
fn names(text: &str) -> Option<impl Iterator<Item = &str>> {
    let mut lines = text.lines();
    let headings = [lines.next()?, lines.next()?];
    (headings[0].starts_with("Inter-") && headings[1].trim_start().starts_with("face")).then_some(())?;
    Some(lines.filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_another_form_is_refused() {
        let text = "Inter-|   Receive\n face |bytes\n    lo:  10 0\nhth12:1 2\n  hth7: 0 0\n";
        assert_eq!(names(text).unwrap().collect::<Vec<_>>(), ["lo", "hth12", "hth7"]);
        for other in ["", "lo: 1 2", "Inter-|\nlo: 1\n"] {
            assert!(names(other).is_none(), "{other:?}");
        }
        assert!(names(&fs::read_to_string(NAMES).unwrap()).unwrap().any(|n| n == "lo"));
    }
}
