//! Netlink messages as bytes: a builder with nested attributes, and a reader that never trusts a length.

use std::net::Ipv4Addr;

const NLA_F_NESTED: u16 = 0x8000;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Rounds up to the alignment of messages and attributes.
pub(crate) fn align4(n: usize) -> usize {
    n.saturating_add(3) & !3
}

/// First two bytes, host order.
pub(crate) fn read_u16(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.first_chunk()?))
}

/// First four bytes, host order.
pub(crate) fn read_u32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.first_chunk()?))
}

/// First four bytes, host order, signed.
pub(crate) fn read_i32(bytes: &[u8]) -> Option<i32> {
    Some(i32::from_ne_bytes(*bytes.first_chunk()?))
}

/// First four bytes, network order.
pub(crate) fn read_be32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.first_chunk()?))
}

/// First eight bytes, network order.
pub(crate) fn read_be64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.first_chunk()?))
}

/// A request under construction.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    kind: u16,
    flags: u16,
    body: Vec<u8>,
    too_long: bool,
}

impl Message {
    /// A message with a type and flags beyond those the socket adds.
    pub(crate) fn new(kind: u16, flags: u16) -> Self {
        Self { kind, flags, body: Vec::with_capacity(128), too_long: false }
    }

    /// What has been put in so far.
    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    /// A fixed header, or part of one.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.body.extend_from_slice(bytes);
        self
    }

    /// An attribute.
    pub(crate) fn attr(self, kind: u16, value: &[u8]) -> Self {
        self.framed(kind, |m| m.raw(value))
    }

    /// A number of one byte.
    pub(crate) fn u8(self, kind: u16, value: u8) -> Self {
        self.attr(kind, &[value])
    }

    /// A number in host order.
    pub(crate) fn u32(self, kind: u16, value: u32) -> Self {
        self.attr(kind, &value.to_ne_bytes())
    }

    /// A number in network order, as netfilter wants all of them.
    pub(crate) fn be32(self, kind: u16, value: u32) -> Self {
        self.attr(kind, &value.to_be_bytes())
    }

    /// A number in network order.
    pub(crate) fn be64(self, kind: u16, value: u64) -> Self {
        self.attr(kind, &value.to_be_bytes())
    }

    /// An address.
    pub(crate) fn ip(self, kind: u16, value: Ipv4Addr) -> Self {
        self.attr(kind, &value.octets())
    }

    /// A string with the NUL that the kernel wants.
    pub(crate) fn str(self, kind: u16, value: &str) -> Self {
        self.framed(kind, |m| m.raw(value.as_bytes()).raw(&[0]))
    }

    /// Attributes inside an attribute.
    pub(crate) fn nest(self, kind: u16, inner: impl FnOnce(Self) -> Self) -> Self {
        self.framed(kind | NLA_F_NESTED, inner)
    }

    fn framed(mut self, kind: u16, inner: impl FnOnce(Self) -> Self) -> Self {
        let start = self.body.len();
        self.body.extend_from_slice(&[0, 0]);
        self.body.extend_from_slice(&kind.to_ne_bytes());
        self = inner(self);
        match u16::try_from(self.body.len() - start) {
            Ok(len) => self.body[start..start + 2].copy_from_slice(&len.to_ne_bytes()),
            Err(_) => self.too_long = true,
        }
        self.body.resize(align4(self.body.len()), 0);
        self
    }

    /// Appends the finished message to `out`; false if a length does not fit.
    pub(crate) fn write(self, out: &mut Vec<u8>, flags: u16, seq: u32) -> bool {
        let Ok(len) = u32::try_from(self.body.len() + 16) else { return false };
        out.extend_from_slice(&len.to_ne_bytes());
        out.extend_from_slice(&self.kind.to_ne_bytes());
        out.extend_from_slice(&(self.flags | flags).to_ne_bytes());
        out.extend_from_slice(&seq.to_ne_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.body);
        out.resize(align4(out.len()), 0);
        !self.too_long
    }
}

/// Attributes received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attrs<'a>(&'a [u8]);

impl<'a> Attrs<'a> {
    /// Reads `bytes` as a run of attributes.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// All attributes, up to the first one whose length is a lie.
    pub(crate) fn iter(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let len = usize::from(read_u16(rest)?);
            let kind = read_u16(rest.get(2..)?)? & NLA_TYPE_MASK;
            let value = rest.get(4..len)?;
            rest = rest.get(align4(len)..).unwrap_or_default();
            Some((kind, value))
        })
    }

    /// The value of one attribute.
    pub(crate) fn get(self, kind: u16) -> Option<&'a [u8]> {
        self.iter().find(|(k, _)| *k == kind).map(|(_, v)| v)
    }

    /// The attributes inside an attribute; none if it is absent.
    pub(crate) fn nested(self, kind: u16) -> Attrs<'a> {
        Attrs(self.get(kind).unwrap_or_default())
    }

    /// A number in host order.
    pub(crate) fn u32(self, kind: u16) -> Option<u32> {
        read_u32(self.get(kind)?)
    }

    /// A number in network order.
    pub(crate) fn be32(self, kind: u16) -> Option<u32> {
        read_be32(self.get(kind)?)
    }

    /// An address.
    pub(crate) fn ip(self, kind: u16) -> Option<Ipv4Addr> {
        self.be32(kind).map(Ipv4Addr::from)
    }

    /// A string, without its NUL.
    pub(crate) fn string(self, kind: u16) -> Option<String> {
        let bytes = self.get(kind)?;
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_attributes_read_back() {
        let m = Message::new(1, 0).str(3, "abcd").nest(18, |m| m.u8(1, 7).be32(2, 0x0102_0304)).u32(4, 9);
        let a = Attrs::new(m.body());
        assert_eq!(a.string(3).as_deref(), Some("abcd"));
        assert_eq!(a.nested(18).get(1), Some(&[7u8][..]));
        assert_eq!(a.nested(18).be32(2), Some(0x0102_0304));
        assert_eq!(a.u32(4), Some(9));
        assert_eq!(a.iter().count(), 3);
    }

    #[test]
    fn a_length_that_lies_ends_the_list() {
        for bytes in [&[3u8, 0, 1, 0][..], &[200, 0, 1, 0, 1, 2], &[0, 0, 0, 0], &[8, 0], &[]] {
            assert_eq!(Attrs::new(bytes).iter().count(), 0, "{bytes:?}");
        }
    }

    #[test]
    fn an_attribute_over_64_kib_is_refused_not_cut() {
        let mut out = Vec::new();
        assert!(!Message::new(1, 0).attr(1, &vec![0; 70_000]).write(&mut out, 0, 1));
    }
}
