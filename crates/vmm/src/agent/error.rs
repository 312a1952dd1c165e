//! What can go wrong between the shim and the guest agent.

use std::time::Duration;

use hearth_core::agent::{AgentError, MAX_FRAME};

/// Why a call to the guest agent failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentClientError {
    /// No welcome before the deadline.
    #[error("the guest agent did not answer the hello in time ({skipped} other bytes were read)")]
    HandshakeTimeout {
        /// Bytes that were not the welcome: zero means that the guest never wrote.
        skipped: u64,
    },
    /// The transport failed or ended during the handshake.
    #[error("the connection to the guest failed during the handshake")]
    Transport(#[source] std::io::Error),
    /// The connection ended: the guest powered off, the VMM died, or the client was closed.
    #[error("the connection to the guest agent is closed: {reason}")]
    Closed {
        /// As far as known.
        reason: String,
    },
    /// The agent answered, with an error.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The agent did not keep to the protocol.
    #[error("the guest agent broke the protocol: {what}")]
    Protocol {
        /// What it did.
        what: String,
    },
    /// No answer in time.
    #[error("no answer from the guest agent to {call} within {after:?}")]
    Timeout {
        /// Which call.
        call: &'static str,
        /// The limit.
        after: Duration,
    },
    /// Too many commands at once.
    #[error("{limit} commands run in this guest, which is the most at once")]
    Busy {
        /// The limit.
        limit: usize,
    },
    /// The request does not fit a frame.
    #[error("the request is {bytes} bytes long, the most is {MAX_FRAME}")]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
    /// Input for a command that ended, or whose stdin was ended.
    #[error("the command takes no more input")]
    InputClosed,
}
