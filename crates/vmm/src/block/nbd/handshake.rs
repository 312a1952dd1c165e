//! The handshake: options in, answers out, until an export is chosen. Pure: it is fed bytes and never waits, and keeps no
//! more than one option of bounded size.

use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::Export;
use super::proto::{self, *};

/// An option with more bytes than this is answered with an error and its bytes are thrown away as they come.
const LONGEST_OPTION: u32 = 64 * 1024;
/// A client that asks for more than this has no honest purpose.
const MOST_OPTIONS: u32 = 256;
/// Meta context queries in one option.
const MOST_QUERIES: u32 = 64;

/// How far it is.
#[derive(Debug)]
pub enum Progress {
    /// More bytes are needed.
    More,
    /// The transmission begins, on this export.
    Chosen(Chosen),
    /// Over: the client said so, or there is nothing it could do. Answers are to be sent first.
    Over,
}

/// What was agreed on.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// The export.
    pub export: Arc<Export>,
    /// Replies to reads come in chunks.
    pub structured: bool,
    /// BLOCK_STATUS may be asked.
    pub allocation: bool,
}

/// The server's side of a handshake.
#[derive(Debug)]
pub struct Handshake {
    exports: Arc<[Arc<Export>]>,
    flags: Option<bool>,
    options: u32,
    /// Bytes of an oversized option still to be thrown away.
    skip: u32,
    structured: bool,
    /// The export for which base:allocation was chosen.
    allocation: Option<Bytes>,
}

impl Handshake {
    /// Begins with the greeting, which goes to `out`. An empty name means the first export.
    #[must_use]
    pub fn new(exports: Arc<[Arc<Export>]>, out: &mut BytesMut) -> Self {
        out.put_u64(MAGIC);
        out.put_u64(OPTION_MAGIC);
        out.put_u16(FIXED_NEWSTYLE | NO_ZEROES);
        Self { exports, flags: None, options: 0, skip: 0, structured: false, allocation: None }
    }

    /// Takes what there is of whole options from `input`, and puts the answers into `out`.
    pub fn feed(&mut self, input: &mut BytesMut, out: &mut BytesMut) -> Progress {
        if self.flags.is_none() {
            if input.len() < 4 {
                return Progress::More;
            }
            let flags = input.get_u32();
            if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
                return Progress::Over;
            }
            self.flags = Some(flags & u32::from(NO_ZEROES) != 0);
        }
        loop {
            let thrown = (self.skip as usize).min(input.len());
            input.advance(thrown);
            self.skip -= thrown as u32;
            if self.skip > 0 || input.len() < 16 {
                return Progress::More;
            }
            let mut head = &input[..16];
            let (magic, option, len) = (head.get_u64(), head.get_u32(), head.get_u32());
            if magic != OPTION_MAGIC {
                return Progress::Over;
            }
            if len > LONGEST_OPTION {
                input.advance(16);
                self.skip = len;
                if option == OPT_EXPORT_NAME {
                    // There is no answer to this one that is not a yes.
                    return Progress::Over;
                }
                answer(out, option, REP_ERR_TOO_BIG, b"the option is too long");
                continue;
            }
            if input.len() - 16 < len as usize {
                return Progress::More;
            }
            input.advance(16);
            let body = input.split_to(len as usize).freeze();
            self.options += 1;
            if self.options > MOST_OPTIONS {
                return Progress::Over;
            }
            match self.option(option, body, out) {
                Progress::More => {}
                done => return done,
            }
        }
    }

    fn option(&mut self, option: u32, body: Bytes, out: &mut BytesMut) -> Progress {
        match option {
            OPT_EXPORT_NAME => return self.export_name(&body, out),
            OPT_ABORT => {
                answer(out, option, REP_ACK, b"");
                return Progress::Over;
            }
            OPT_LIST if !body.is_empty() => answer(out, option, REP_ERR_INVALID, b"list has no data"),
            OPT_LIST => {
                for export in self.exports.iter() {
                    let mut data = BytesMut::new();
                    data.put_u32(export.name().len() as u32);
                    data.put_slice(export.name().as_bytes());
                    answer(out, option, REP_SERVER, &data);
                }
                answer(out, option, REP_ACK, b"");
            }
            OPT_STRUCTURED_REPLY if !body.is_empty() => {
                answer(out, option, REP_ERR_INVALID, b"structured reply has no data");
            }
            OPT_STRUCTURED_REPLY => {
                self.structured = true;
                answer(out, option, REP_ACK, b"");
            }
            OPT_INFO | OPT_GO => return self.info(option, body, out),
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT => self.meta_context(option, body, out),
            _ => answer(out, option, REP_ERR_UNSUP, b"this option is not known"),
        }
        Progress::More
    }

    fn find(&self, name: &[u8]) -> Option<Arc<Export>> {
        match name {
            b"" => self.exports.first(),
            _ => self.exports.iter().find(|e| e.name().as_bytes() == name),
        }
        .cloned()
    }

    fn choose(&self, export: Arc<Export>, name: &[u8]) -> Progress {
        let allocation = self.structured && self.allocation.as_deref() == Some(name);
        Progress::Chosen(Chosen { export, structured: self.structured, allocation })
    }

    fn export_name(&self, name: &[u8], out: &mut BytesMut) -> Progress {
        let Some(export) = self.find(name) else { return Progress::Over };
        out.put_u64(export.size());
        out.put_u16(export.flags());
        if self.flags != Some(true) {
            out.put_bytes(0, 124);
        }
        self.choose(export, name)
    }

    fn info(&self, option: u32, mut body: Bytes, out: &mut BytesMut) -> Progress {
        let parsed = string(&mut body).and_then(|name| {
            let count = (body.len() >= 2).then(|| body.get_u16())?;
            (body.len() == 2 * usize::from(count)).then_some(name)
        });
        let Some(name) = parsed else {
            answer(out, option, REP_ERR_INVALID, b"the option's data makes no sense");
            return Progress::More;
        };
        let Some(export) = self.find(&name) else {
            answer(out, option, REP_ERR_UNKNOWN, b"there is no export of this name");
            return Progress::More;
        };
        let mut data = BytesMut::new();
        data.put_u16(INFO_EXPORT);
        data.put_u64(export.size());
        data.put_u16(export.flags());
        answer(out, option, REP_INFO, &data);
        data.clear();
        data.put_u16(INFO_BLOCK_SIZE);
        data.put_u32(1);
        data.put_u32(super::PREFERRED);
        data.put_u32(super::MAX_REQUEST);
        answer(out, option, REP_INFO, &data);
        while body.len() >= 2 {
            if body.get_u16() == INFO_NAME {
                data.clear();
                data.put_u16(INFO_NAME);
                data.put_slice(export.name().as_bytes());
                answer(out, option, REP_INFO, &data);
                // Asked for a thousand times, it is answered once.
                break;
            }
        }
        answer(out, option, REP_ACK, b"");
        if option == OPT_GO { self.choose(export, &name) } else { Progress::More }
    }

    fn meta_context(&mut self, option: u32, mut body: Bytes, out: &mut BytesMut) {
        let set = option == OPT_SET_META_CONTEXT;
        if set {
            // Whatever comes of it, what was set before is no more.
            self.allocation = None;
        }
        if !self.structured {
            return answer(out, option, REP_ERR_INVALID, b"structured replies come first");
        }
        let parsed = string(&mut body).and_then(|name| {
            let count = (body.len() >= 4).then(|| body.get_u32())?;
            let queries: Option<Vec<Bytes>> =
                (0..count.min(MOST_QUERIES)).map(|_| string(&mut body)).collect();
            queries.filter(|_| body.is_empty() && count <= MOST_QUERIES).map(|queries| (name, queries))
        });
        let Some((name, queries)) = parsed else {
            return answer(out, option, REP_ERR_INVALID, b"the option's data makes no sense");
        };
        if self.find(&name).is_none() {
            return answer(out, option, REP_ERR_UNKNOWN, b"there is no export of this name");
        }
        let wanted =
            |query: &Bytes| &query[..] == BASE_ALLOCATION.as_bytes() || (!set && &query[..] == b"base:");
        if queries.iter().any(wanted) || (!set && queries.is_empty()) {
            let mut data = BytesMut::new();
            data.put_u32(if set { BASE_ALLOCATION_ID } else { 0 });
            data.put_slice(BASE_ALLOCATION.as_bytes());
            answer(out, option, REP_META_CONTEXT, &data);
            if set {
                self.allocation = Some(name);
            }
        }
        answer(out, option, REP_ACK, b"");
    }
}

/// A string with its length before it.
fn string(body: &mut Bytes) -> Option<Bytes> {
    let len = (body.len() >= 4).then(|| body.get_u32() as usize)?;
    (len <= proto::LONGEST_STRING && len <= body.len()).then(|| body.split_to(len))
}

fn answer(out: &mut BytesMut, option: u32, kind: u32, data: &[u8]) {
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(option);
    out.put_u32(kind);
    out.put_u32(data.len() as u32);
    out.put_slice(data);
}
