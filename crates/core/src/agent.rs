//! The protocol between shim and guest agent.
//!
//! Transport: one byte stream per VM (a virtio-serial port on qemu, a vsock connection on Firecracker, a
//! socket pair in tests). The host opens with [`HELLO`] repeated until the agent answers [`WELCOME`]; what an
//! earlier host left in the pipe is skipped. Then both speak yamux, the host as client. Each request opens a
//! stream of its own and sends one JSON message framed as below. `Exec` streams then carry frames in both
//! directions until [`FrameKind::Exit`] or [`FrameKind::Error`]; every other request is answered by one
//! [`Response`]. A signal has its own stream, so that it passes a stdin nobody reads.
//!
//! Frame: kind (1 byte), length of the payload (4 bytes, little endian), payload.

use serde::{Deserialize, Serialize};

/// First bytes from the host, then eight random bytes that [`WELCOME`] must repeat.
pub const HELLO: &[u8; 8] = b"HEARTH>1";
/// First bytes from the agent, then the eight bytes of the hello.
pub const WELCOME: &[u8; 8] = b"HEARTH<1";
/// Port the agent listens on where the transport is vsock.
pub const VSOCK_PORT: u32 = 1024;
/// Name of the agent's virtio-serial port.
pub const SERIAL_PORT: &str = "hearth.agent";
/// Largest payload of one frame.
pub const MAX_FRAME: usize = 64 * 1024;
/// Bytes of a frame's head.
pub const FRAME_HEAD: usize = 5;
/// yamux: streams at once, each with a 256 KiB window; bounds the memory of either side.
pub const MAX_STREAMS: usize = 64;

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// JSON [`Request`], first frame of each stream.
    Request = 1,
    /// JSON [`Response`].
    Response = 2,
    /// Bytes for the command's stdin.
    Stdin = 3,
    /// End of the command's stdin; no payload.
    StdinEnd = 4,
    /// Bytes of the command's stdout (or of its terminal).
    Stdout = 5,
    /// Bytes of the command's stderr.
    Stderr = 6,
    /// JSON [`Started`]: the command runs.
    Started = 7,
    /// JSON [`ExecExit`]: it ended and all its output was sent.
    Exit = 8,
    /// JSON [`AgentError`]: it could not be started.
    Error = 9,
}

impl FrameKind {
    /// The kind with this number.
    #[must_use]
    pub fn from_byte(b: u8) -> Option<Self> {
        use FrameKind::{Error, Exit, Request, Response, Started, Stderr, Stdin, StdinEnd, Stdout};
        [Request, Response, Stdin, StdinEnd, Stdout, Stderr, Started, Exit, Error]
            .into_iter()
            .find(|k| *k as u8 == b)
    }
}

/// What the host asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub enum Request {
    /// First request after boot: hostname, network, environment.
    Configure(GuestConfig),
    /// Runs a command.
    Exec(ExecRequest),
    /// Signals a command started on this agent, and its process group.
    Signal {
        /// [`ExecRequest::id`].
        exec: String,
        /// Number as on x86-64 Linux.
        signal: i32,
    },
    /// Sets the size of a command's terminal.
    Resize {
        /// [`ExecRequest::id`].
        exec: String,
        /// Rows.
        rows: u16,
        /// Columns.
        cols: u16,
    },
    /// Syncs disks, then powers off.
    Shutdown,
    /// Answered at once.
    Ping,
}

/// Guest settings that are not part of a template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Hostname.
    pub hostname: String,
    /// Address, gateway and name servers; `None` leaves the guest with loopback only.
    pub net: Option<GuestNet>,
    /// Environment of every command.
    pub env: Vec<(String, String)>,
    /// Milliseconds since the Unix epoch, for the guest's clock.
    pub now_ms: u64,
}

/// Network settings of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNet {
    /// Its address.
    pub address: std::net::Ipv4Addr,
    /// Prefix length.
    pub prefix_len: u8,
    /// Default gateway.
    pub gateway: std::net::Ipv4Addr,
    /// Name servers.
    pub dns: Vec<std::net::Ipv4Addr>,
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Chosen by the host, unique per agent.
    pub id: String,
    /// Program (looked up in PATH when it has no `/`) and arguments.
    pub argv: Vec<String>,
    /// Added to, and overriding, the environment of [`GuestConfig`].
    pub env: Vec<(String, String)>,
    /// Working directory; the user's home if empty.
    pub workdir: String,
    /// `name`, `uid`, `name:group` or `uid:gid`; root if empty. Names are looked up in the guest.
    pub user: String,
    /// A terminal of this size instead of three pipes.
    pub tty: Option<TtySize>,
    /// Whether stdin is used; without it the command reads `/dev/null`.
    pub stdin: bool,
}

/// Size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TtySize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub cols: u16,
}

/// The command runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// In the guest.
    pub pid: u32,
}

/// How a command ended: one of the two is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecExit {
    /// Exit code.
    pub code: Option<i32>,
    /// Signal that ended it.
    pub signal: Option<i32>,
}

impl ExecExit {
    /// What a shell's `$?` would be: the code, or 128 + signal.
    #[must_use]
    pub fn status(self) -> i32 {
        self.code.unwrap_or_else(|| 128 + self.signal.unwrap_or(0))
    }
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct AgentError {
    /// Which sort.
    pub kind: AgentErrorKind,
    /// In words, with the object.
    pub message: String,
}

/// Sorts of agent errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentErrorKind {
    /// No such program, directory or user (a shell's 127).
    NotFound,
    /// It is there but cannot be run (a shell's 126).
    NotExecutable,
    /// No command with that id runs.
    NoSuchExec,
    /// The request makes no sense.
    Invalid,
    /// The guest's kernel refused.
    Failed,
}

/// Answer to every request but `Exec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// Done.
    Done,
    /// Not done.
    Failed(AgentError),
}
