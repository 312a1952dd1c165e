//! Requests out of bytes. A head is judged before anything is allocated for it; the payload of a request that is refused is
//! thrown away as it comes. Pure: it is fed bytes and never waits.

use bytes::{Buf as _, Bytes, BytesMut};

use super::proto::{self, *};
use super::{Chosen, MAX_REQUEST};
use crate::block::Zeroes;

/// What a request asks for, checked against its export.
#[derive(Debug)]
pub enum Ask {
    /// Bytes.
    Read {
        /// From where.
        at: u64,
        /// How many.
        len: usize,
    },
    /// Bytes that came along.
    Write {
        /// To where.
        at: u64,
        /// The bytes.
        data: Bytes,
        /// Durable before the answer.
        fua: bool,
    },
    /// All that was answered is made durable.
    Flush,
    /// Not needed any more.
    Trim {
        /// From where.
        at: u64,
        /// How many bytes.
        len: u64,
        /// Durable before the answer.
        fua: bool,
    },
    /// Zeroes from now on.
    Zero {
        /// From where.
        at: u64,
        /// How many bytes.
        len: u64,
        /// How.
        how: Zeroes,
        /// Durable before the answer.
        fua: bool,
    },
    /// What there is.
    Status {
        /// From where.
        at: u64,
        /// How many bytes.
        len: u64,
        /// One extent is enough.
        one: bool,
    },
}

/// What came of the bytes so far.
#[derive(Debug)]
pub enum Taken {
    /// More bytes are needed.
    More,
    /// The next request costs this much; call again once there is room for it.
    NoRoom(usize),
    /// A request, with what it costs until it is answered.
    Request {
        /// The client's name for it.
        cookie: u64,
        /// What it asks for.
        ask: Ask,
        /// Bytes.
        cost: usize,
    },
    /// A request that is answered with this.
    Refused {
        /// The client's name for it.
        cookie: u64,
        /// Whether chunks are expected.
        read: bool,
        /// Why.
        why: Refusal,
    },
    /// The client is done.
    Disconnect,
    /// What came is no request, and where the next begins cannot be told.
    Garbage,
}

/// Why a request is not even tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not known, or with flags that are not.
    #[error("the command or one of its flags is not known")]
    Unknown,
    /// More than was announced.
    #[error("the request is larger than the largest that was announced")]
    TooLarge,
    /// Outside the disk, and not a write.
    #[error("the request reaches past the end of the disk")]
    Outside,
    /// A write outside the disk.
    #[error("there is no room past the end of the disk")]
    NoSpace,
    /// It cannot be written.
    #[error("the export is read-only")]
    ReadOnly,
    /// BLOCK_STATUS without the context, or without a length.
    #[error("block status needs base:allocation and a length")]
    NoContext,
}

impl Refusal {
    pub(super) fn errno(self) -> Errno {
        match self {
            Refusal::Unknown | Refusal::TooLarge | Refusal::Outside | Refusal::NoContext => Errno::Inval,
            Refusal::NoSpace => Errno::NoSpace,
            Refusal::ReadOnly => Errno::Perm,
        }
    }
}

/// What any request costs besides its bytes.
const COST: usize = 512;

/// Reads requests of one connection.
#[derive(Debug)]
pub struct Intake {
    chosen: Chosen,
    state: State,
}

#[derive(Debug)]
enum State {
    Head,
    Payload { head: Head, body: BytesMut },
    Skip { left: u64, cookie: u64, why: Refusal },
}

impl Intake {
    /// For what was agreed on.
    #[must_use]
    pub fn new(chosen: Chosen) -> Self {
        Self { chosen, state: State::Head }
    }

    /// The buffer of a payload that is on its way, and how much of it is missing: it may be read into directly.
    pub fn payload(&mut self) -> Option<(&mut BytesMut, usize)> {
        match &mut self.state {
            State::Payload { head, body } => {
                let missing = head.len as usize - body.len();
                Some((body, missing))
            }
            _ => None,
        }
    }

    /// Whether a request has begun that has not come whole.
    #[must_use]
    pub fn within_a_request(&self) -> bool {
        !matches!(self.state, State::Head)
    }

    /// Takes the next request, if it is there. Nothing beyond `room` bytes is allocated.
    pub fn take(&mut self, input: &mut BytesMut, room: usize) -> Taken {
        if let State::Head = self.state {
            let Some(bytes) = input.get(..REQUEST_LEN) else { return Taken::More };
            let Some(head) = Head::decode(bytes) else { return Taken::Garbage };
            if head.kind == CMD_DISC {
                return Taken::Disconnect;
            }
            let read = matches!(head.kind, CMD_READ | CMD_BLOCK_STATUS);
            let write = head.kind == CMD_WRITE;
            if let Err(why) = self.judge(&head) {
                input.advance(REQUEST_LEN);
                if !write || head.len == 0 {
                    return Taken::Refused { cookie: head.cookie, read, why };
                }
                self.state = State::Skip { left: u64::from(head.len), cookie: head.cookie, why };
            } else {
                let cost = cost(&head);
                if cost > room {
                    return Taken::NoRoom(cost);
                }
                input.advance(REQUEST_LEN);
                if !write {
                    return Taken::Request { cookie: head.cookie, ask: ask(&head), cost };
                }
                self.state = State::Payload { body: BytesMut::with_capacity(head.len as usize), head };
            }
        }
        match &mut self.state {
            State::Payload { head, body } => {
                let now = (head.len as usize - body.len()).min(input.len());
                body.extend_from_slice(&input[..now]);
                input.advance(now);
                if body.len() < head.len as usize {
                    return Taken::More;
                }
                let data = std::mem::take(body).freeze();
                let ask = Ask::Write { at: head.at, data, fua: head.flags & CMD_FLAG_FUA != 0 };
                let taken = Taken::Request { cookie: head.cookie, ask, cost: cost(head) };
                self.state = State::Head;
                taken
            }
            State::Skip { left, cookie, why } => {
                let now = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                input.advance(now);
                *left -= now as u64;
                if *left > 0 {
                    return Taken::More;
                }
                let refused = Taken::Refused { cookie: *cookie, read: false, why: *why };
                self.state = State::Head;
                refused
            }
            State::Head => Taken::More,
        }
    }

    fn judge(&self, head: &Head) -> Result<(), Refusal> {
        let export = &self.chosen.export;
        let flags = match head.kind {
            CMD_READ => CMD_FLAG_FUA | CMD_FLAG_DF,
            CMD_WRITE | CMD_TRIM | CMD_FLUSH => CMD_FLAG_FUA,
            CMD_WRITE_ZEROES => CMD_FLAG_FUA | CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
            CMD_BLOCK_STATUS => CMD_FLAG_FUA | CMD_FLAG_REQ_ONE,
            _ => return Err(Refusal::Unknown),
        };
        if head.flags & !flags != 0 || (head.flags & CMD_FLAG_DF != 0 && !self.chosen.structured) {
            return Err(Refusal::Unknown);
        }
        let writes = matches!(head.kind, CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES);
        if writes && export.read_only() {
            return Err(Refusal::ReadOnly);
        }
        if matches!(head.kind, CMD_READ | CMD_WRITE) && head.len > MAX_REQUEST {
            return Err(Refusal::TooLarge);
        }
        if head.kind == CMD_BLOCK_STATUS && (!self.chosen.allocation || head.len == 0) {
            return Err(Refusal::NoContext);
        }
        let end = head.at.checked_add(u64::from(head.len));
        match end {
            // Its position and length mean nothing.
            _ if head.kind == CMD_FLUSH => Ok(()),
            Some(end) if end <= export.size() => Ok(()),
            _ if matches!(head.kind, CMD_WRITE | CMD_WRITE_ZEROES) => Err(Refusal::NoSpace),
            _ => Err(Refusal::Outside),
        }
    }
}

fn cost(head: &Head) -> usize {
    match head.kind {
        CMD_READ | CMD_WRITE => COST + head.len as usize,
        CMD_BLOCK_STATUS => COST + 8 * super::MOST_EXTENTS,
        _ => COST,
    }
}

/// Of a head that was judged; a write has its payload besides.
fn ask(head: &Head) -> Ask {
    let (at, len, has) = (head.at, u64::from(head.len), |flag| head.flags & flag != 0);
    let fua = has(CMD_FLAG_FUA);
    match head.kind {
        proto::CMD_READ => Ask::Read { at, len: head.len as usize },
        CMD_TRIM => Ask::Trim { at, len, fua },
        CMD_WRITE_ZEROES => {
            let how = Zeroes { keep_allocated: has(CMD_FLAG_NO_HOLE), fast: has(CMD_FLAG_FAST_ZERO) };
            Ask::Zero { at, len, how, fua }
        }
        CMD_BLOCK_STATUS => Ask::Status { at, len, one: has(CMD_FLAG_REQ_ONE) },
        _ => Ask::Flush,
    }
}
