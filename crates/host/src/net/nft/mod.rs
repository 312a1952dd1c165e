//! nf_tables by netlink: just the tables, chains and rules this crate makes, and enough reading to recognise
//! foreign chains that would drop its traffic. The `nft` program is never run.
//!
//! A socket that deleted something waits for a grace period (13 ms) when it is closed, so callers keep one open
//! for all they do.

pub(crate) mod expr;
pub(crate) mod read;

use super::attr::Message;
use super::netlink::{F_APPEND, F_CREATE, NETFILTER, Result, Socket};
use expr::Expr;

/// `NFPROTO_INET`: IPv4 and IPv6 together.
pub(crate) const INET: u8 = 1;
/// `NFPROTO_IPV4`.
pub(crate) const IPV4: u8 = 2;

const SUBSYSTEM: u16 = 10 << 8;
const NEWTABLE: u16 = SUBSYSTEM;
const GETTABLE: u16 = SUBSYSTEM | 1;
const DELTABLE: u16 = SUBSYSTEM | 2;
const NEWCHAIN: u16 = SUBSYSTEM | 3;
const GETCHAIN: u16 = SUBSYSTEM | 4;
const NEWRULE: u16 = SUBSYSTEM | 6;
const GETRULE: u16 = SUBSYSTEM | 7;
const DELRULE: u16 = SUBSYSTEM | 8;
const GETGEN: u16 = SUBSYSTEM | 16;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// `struct nfgenmsg`.
const NFGEN: usize = 4;

const TABLE_NAME: u16 = 1;
const TABLE_USERDATA: u16 = 6;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;
const LIST_ELEM: u16 = 1;

/// `NF_DROP`, also as a chain's policy.
pub(crate) const DROP: u32 = 0;
/// `NF_ACCEPT`, also as a chain's policy.
pub(crate) const ACCEPT: u32 = 1;

/// Where a base chain hooks in (`NF_INET_…`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// Before the routing decision.
    Prerouting = 0,
    /// To a process of this namespace.
    Input = 1,
    /// From one link to another.
    Forward = 2,
    /// After the routing decision.
    Postrouting = 4,
}

/// A base chain with its rules.
#[derive(Debug, Clone)]
pub(crate) struct Chain {
    /// Name within the table.
    pub(crate) name: &'static str,
    /// `filter` or `nat`.
    pub(crate) kind: &'static str,
    /// Where.
    pub(crate) hook: Hook,
    /// Lower runs earlier.
    pub(crate) priority: i32,
    /// [`ACCEPT`] or [`DROP`].
    pub(crate) policy: u32,
    /// In order.
    pub(crate) rules: Vec<Vec<Expr>>,
}

/// A table of ours, wanted as a whole. Its comment carries a fingerprint of the content, so that a look at the
/// table tells whether it was made by this version for this layout.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    /// Name; family is inet.
    pub(crate) name: String,
    /// All of it.
    pub(crate) chains: Vec<Chain>,
}

impl Table {
    /// Rules in all chains.
    pub(crate) fn rule_count(&self) -> usize {
        self.chains.iter().map(|c| c.rules.len()).sum()
    }

    /// The comment on the table: FNV-1a over the messages that make its content.
    pub(crate) fn fingerprint(&self) -> String {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in self.content().iter().flat_map(|m| m.body()) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
        format!("hearth rules {hash:016x}")
    }

    fn content(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        for chain in &self.chains {
            messages.push(new_chain(&self.name, chain));
            for rule in &chain.rules {
                messages.push(new_rule(INET, &self.name, chain.name, rule, None, F_APPEND));
            }
        }
        messages
    }

    /// The messages that put this table in the place of whatever has its name, in one transaction. Adding before
    /// deleting makes the deletion succeed on every kernel (`DESTROY` needs Linux 6.3).
    pub(crate) fn replace(&self, there: bool) -> Vec<Message> {
        let mut messages = Vec::new();
        if there {
            messages.push(header(NEWTABLE, F_CREATE, INET).str(TABLE_NAME, &self.name));
            messages.push(delete_table(INET, &self.name));
        }
        messages.push(
            header(NEWTABLE, F_CREATE, INET)
                .str(TABLE_NAME, &self.name)
                .attr(TABLE_USERDATA, &comment(&self.fingerprint())),
        );
        messages.extend(self.content());
        messages
    }
}

fn header(kind: u16, flags: u16, family: u8) -> Message {
    Message::new(kind, flags).raw(&[family, 0, 0, 0])
}

fn batch(kind: u16) -> Message {
    Message::new(kind, 0).raw(&[0, 0]).raw(&10u16.to_be_bytes())
}

fn new_chain(table: &str, chain: &Chain) -> Message {
    header(NEWCHAIN, F_CREATE, INET)
        .str(CHAIN_TABLE, table)
        .str(CHAIN_NAME, chain.name)
        .nest(CHAIN_HOOK, |m| m.be32(1, chain.hook as u32).be32(2, chain.priority.cast_unsigned()))
        .be32(CHAIN_POLICY, chain.policy)
        .str(CHAIN_TYPE, chain.kind)
}

/// A rule; at the end of the chain with `F_APPEND`, at its head without.
pub(crate) fn new_rule(
    family: u8,
    table: &str,
    chain: &str,
    rule: &[Expr],
    tag: Option<&str>,
    place: u16,
) -> Message {
    let m = header(NEWRULE, F_CREATE | place, family)
        .str(RULE_TABLE, table)
        .str(RULE_CHAIN, chain)
        .nest(RULE_EXPRESSIONS, |m| rule.iter().fold(m, |m, e| m.nest(LIST_ELEM, |m| e.write(m))));
    match tag {
        Some(tag) => m.attr(RULE_USERDATA, &comment(tag)),
        None => m,
    }
}

/// Deletes one rule by handle.
pub(crate) fn delete_rule(family: u8, table: &str, chain: &str, handle: u64) -> Message {
    header(DELRULE, 0, family).str(RULE_TABLE, table).str(RULE_CHAIN, chain).be64(RULE_HANDLE, handle)
}

/// Deletes a table with all in it; `ENOENT` if it is gone.
pub(crate) fn delete_table(family: u8, name: &str) -> Message {
    header(DELTABLE, 0, family).str(TABLE_NAME, name)
}

/// A comment in the encoding of nft(8) and iptables-nft: type 0, length, text with NUL.
pub(crate) fn comment(text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(127)];
    let mut bytes = vec![0, u8::try_from(text.len() + 1).unwrap_or(128)];
    bytes.extend_from_slice(text);
    bytes.push(0);
    bytes
}

/// A socket to nf_tables.
#[derive(Debug)]
pub(crate) struct Nft(Socket);

impl Nft {
    /// Opens one in the calling thread's network namespace.
    pub(crate) fn open() -> Result<Self> {
        Socket::open(NETFILTER).map(Self)
    }

    /// The socket, for the other users of nfnetlink.
    pub(crate) fn socket(&mut self) -> &mut Socket {
        &mut self.0
    }

    /// Commits all messages or none. With a generation the commit fails with `ERESTART` if anybody changed the
    /// rules since it was read.
    pub(crate) fn commit(&mut self, messages: Vec<Message>, generation: Option<u32>) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let begin = batch(BATCH_BEGIN);
        let mut all = vec![match generation {
            Some(id) => begin.be32(1, id),
            None => begin,
        }];
        all.extend(messages);
        all.push(batch(BATCH_END));
        self.0.transaction(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_reads_back_as_nft_writes_it() {
        assert_eq!(comment("hearth-x"), b"\x00\x09hearth-x\x00");
        assert_eq!(read::comment_of(&comment("hearth-x")).as_deref(), Some("hearth-x"));
        assert_eq!(read::comment_of(b"\x01\x01x\x00\x03ab\x00").as_deref(), Some("ab"));
        for cut in [&b""[..], b"\x00", b"\x00\x09hea"] {
            assert_eq!(read::comment_of(cut), None);
        }
    }
}
