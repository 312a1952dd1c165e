//! Reading tables, base chains and rules. What does not parse is skipped, never guessed.

use super::super::attr::{Attrs, Message, read_be32, read_be64};
use super::super::netlink::{NetlinkError, Reply, Result};
use super::{
    ACCEPT, CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TABLE, CHAIN_TYPE, DROP, GETCHAIN, GETGEN, GETRULE,
    GETTABLE, Hook, LIST_ELEM, NFGEN, Nft, RULE_CHAIN, RULE_EXPRESSIONS, RULE_HANDLE, RULE_TABLE,
    RULE_USERDATA, TABLE_NAME, TABLE_USERDATA, header,
};

/// A table as listed.
#[derive(Debug, Clone)]
pub(crate) struct SeenTable {
    /// `NFPROTO_…`.
    pub(crate) family: u8,
    /// Name.
    pub(crate) name: String,
    /// Its comment.
    pub(crate) comment: Option<String>,
}

/// A base chain as listed.
#[derive(Debug, Clone)]
pub(crate) struct SeenChain {
    /// `NFPROTO_…`.
    pub(crate) family: u8,
    /// Table.
    pub(crate) table: String,
    /// Name.
    pub(crate) name: String,
    /// A filter chain at the forward hook.
    pub(crate) filters_forward: bool,
    /// Drops what no rule decided.
    pub(crate) drops: bool,
}

/// A rule as listed.
#[derive(Debug, Clone)]
pub(crate) struct SeenRule {
    /// `NFPROTO_…`.
    pub(crate) family: u8,
    /// Table.
    pub(crate) table: String,
    /// Chain.
    pub(crate) chain: String,
    /// Number within the table.
    pub(crate) handle: u64,
    /// Its comment.
    pub(crate) comment: Option<String>,
    /// Drops or rejects every packet that reaches it.
    pub(crate) drops_all: bool,
    /// What its first comparison compares with: a link name or prefix in rules of ours.
    pub(crate) first_compared: Vec<u8>,
}

impl Nft {
    /// The generation of the rules; it grows with every change anybody makes.
    pub(crate) fn generation(&mut self) -> Result<u32> {
        let reply = self.socket().get(header(GETGEN, 0, 0))?;
        reply.attrs(NFGEN).be32(1).ok_or(NetlinkError::Malformed("a generation without number"))
    }

    /// All tables of all families.
    pub(crate) fn tables(&mut self) -> Result<Vec<SeenTable>> {
        self.list(header(GETTABLE, 0, 0), parse_table)
    }

    /// As [`Self::tables`], but what was seen comes back in any case, with whether it is all.
    pub(crate) fn tables_seen(&mut self) -> Result<(Vec<SeenTable>, bool)> {
        let (replies, whole) = self.socket().dump_seen(&header(GETTABLE, 0, 0))?;
        Ok((replies.iter().filter_map(parse_table).collect(), whole))
    }

    /// One table.
    pub(crate) fn table(&mut self, family: u8, name: &str) -> Result<Option<SeenTable>> {
        match self.socket().get(header(GETTABLE, 0, family).str(TABLE_NAME, name)) {
            Ok(reply) => Ok(Some(SeenTable {
                family,
                name: name.to_owned(),
                comment: reply.attrs(NFGEN).get(TABLE_USERDATA).and_then(comment_of),
            })),
            Err(e) if e.errno() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// All base chains of all families.
    pub(crate) fn base_chains(&mut self) -> Result<Vec<SeenChain>> {
        self.list(header(GETCHAIN, 0, 0), |r| {
            let a = r.attrs(NFGEN);
            a.get(CHAIN_HOOK)?;
            let forward = a.nested(CHAIN_HOOK).be32(1) == Some(Hook::Forward as u32);
            Some(SeenChain {
                family: *r.body.first()?,
                table: a.string(CHAIN_TABLE)?,
                name: a.string(CHAIN_NAME)?,
                filters_forward: forward && a.string(CHAIN_TYPE)? == "filter",
                drops: a.be32(CHAIN_POLICY).unwrap_or(ACCEPT) == DROP,
            })
        })
    }

    /// Rules in order, of one table or one chain.
    pub(crate) fn rules(&mut self, family: u8, table: &str, chain: Option<&str>) -> Result<Vec<SeenRule>> {
        let mut ask = header(GETRULE, 0, family).str(RULE_TABLE, table);
        if let Some(chain) = chain {
            ask = ask.str(RULE_CHAIN, chain);
        }
        let rules = self.list(ask, |r| {
            let a = r.attrs(NFGEN);
            Some(SeenRule {
                family: *r.body.first()?,
                table: a.string(RULE_TABLE)?,
                chain: a.string(RULE_CHAIN)?,
                handle: a.get(RULE_HANDLE).and_then(read_be64)?,
                comment: a.get(RULE_USERDATA).and_then(comment_of),
                drops_all: drops_all(a.nested(RULE_EXPRESSIONS)),
                first_compared: first_compared(a.nested(RULE_EXPRESSIONS)),
            })
        })?;
        // A kernel may ignore a filter it does not know.
        let wanted = |r: &SeenRule| r.table == table && chain.is_none_or(|c| r.chain == c);
        Ok(rules.into_iter().filter(wanted).collect())
    }

    fn list<T>(&mut self, ask: Message, parse: impl Fn(&Reply) -> Option<T>) -> Result<Vec<T>> {
        Ok(self.socket().dump(&ask)?.iter().filter_map(parse).collect())
    }
}

fn parse_table(reply: &Reply) -> Option<SeenTable> {
    let a = reply.attrs(NFGEN);
    Some(SeenTable {
        family: *reply.body.first()?,
        name: a.string(TABLE_NAME)?,
        comment: a.get(TABLE_USERDATA).and_then(comment_of),
    })
}

/// The comment among user data: a run of (type, length, bytes), type 0 being the comment of rules and tables.
pub(crate) fn comment_of(mut data: &[u8]) -> Option<String> {
    while let [kind, len, rest @ ..] = data {
        let value = rest.get(..usize::from(*len))?;
        if *kind == 0 {
            let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
            return Some(String::from_utf8_lossy(&value[..end]).into_owned());
        }
        data = &rest[usize::from(*len)..];
    }
    None
}

fn first_compared(expressions: Attrs<'_>) -> Vec<u8> {
    let compare =
        expressions.iter().map(|(_, e)| Attrs::new(e)).find(|e| e.string(1).as_deref() == Some("cmp"));
    compare.and_then(|e| e.nested(2).nested(3).get(1)).unwrap_or_default().to_vec()
}

/// Whether a rule drops or rejects without a condition. Counting, logging and comments are no conditions.
fn drops_all(expressions: Attrs<'_>) -> bool {
    let mut drops = false;
    for (kind, element) in expressions.iter() {
        let element = Attrs::new(element);
        let (Some(name), data) = (element.string(1), element.nested(2)) else { return false };
        match name.as_str() {
            _ if kind != LIST_ELEM => return false,
            "counter" | "log" => {}
            "match" if data.string(1).as_deref() == Some("comment") => {}
            "reject" => drops = true,
            // Target of iptables-nft.
            "target" if data.string(1).as_deref() == Some("REJECT") => drops = true,
            "immediate" => {
                let verdict = data.nested(2).nested(2).get(1).and_then(read_be32);
                match verdict {
                    Some(DROP) => drops = true,
                    _ => return false,
                }
            }
            _ => return false,
        }
    }
    drops
}
