//! Network resources of an instance: one file per kind, verbs `census`, `ensure`, `release`.
//!
//! | kind | module | where it lives |
//! |---|---|---|
//! | netns | [`netns`] | bind mount in `/run/netns` |
//! | veth | [`veth`] | host end in the calling thread's namespace, `uplink` in the slot's |
//! | tap | [`tap`] | in the slot's namespace |
//! | sandbox-firewall | [`sandbox_firewall`] | one nft table in the slot's namespace |
//! | host-firewall | [`host_firewall`] | one constant nft table, tagged rules in foreign chains, one sysctl |
//!
//! Every verb takes `(&SlotLayout, SlotIndex)`, `release` also how long it may take; the host firewall takes the
//! layout and the path of its record. All block, all may be repeated. "The host" is the network namespace of the
//! calling thread, so the tests play a host in a throwaway one. Law 3 holds inside each: what has our name but is
//! of another nature, or a veth that neither its alias nor its other end proves ours, is
//! [`Foreign`](hearth_core::host::ErrorClass::Foreign) and never touched.
//!
//! Below them: `attr` and `netlink` (messages and sockets), `rtnl` (links, addresses, routes), `nft` (tables,
//! chains, rules), `conntrack`. Nothing here runs a program, except `legacy`, `rules` and `rulesets`, which deal in the
//! programs' own text.

pub(crate) mod attr;
mod conntrack;
mod error;
mod foreign_chains;
mod forwarding;
pub(crate) mod holders;
pub mod host_firewall;
mod legacy;
pub mod links;
pub(crate) mod netlink;
pub mod netns;
mod nft;
pub mod routes;
mod rtnl;
pub mod rules;
pub mod rulesets;
pub mod sandbox_firewall;
pub mod slot;
pub mod tap;
pub mod veth;
