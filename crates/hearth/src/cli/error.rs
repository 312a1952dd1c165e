//! What went wrong, why, and what to do: one line for people, one object for programs, one exit code.

use hearth_api::EXIT_STATUS_METADATA;
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::out;

/// All went well.
pub(super) const OK: u8 = 0;
/// The command failed, or a check found something.
pub(super) const FAILED: u8 = 1;
/// Wrong usage or input.
pub(super) const USAGE: u8 = 2;
/// No daemon answers.
pub(super) const UNREACHABLE: u8 = 3;
/// Nobody reads our output any more: what a shell reports of a program that SIGPIPE ended.
pub(super) const BROKEN_PIPE: u8 = 128 + 13;

/// A command that did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CliError {
    what: String,
    why: String,
    todo: Option<String>,
    /// Exit code of the process.
    pub(super) code: u8,
    grpc: Option<Code>,
    /// Nothing is to be said: the reader of our output left.
    silent: bool,
}

impl CliError {
    fn new(code: u8, what: impl Into<String>, why: impl Into<String>) -> Self {
        let (what, why) = (what.into(), why.into());
        Self { what, why, todo: None, code, grpc: None, silent: false }
    }

    /// Something did not work.
    pub(super) fn failed(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(FAILED, what, why)
    }

    /// The user's input cannot be used.
    pub(super) fn usage(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(USAGE, what, why)
    }

    /// Nobody answers at `addr`.
    pub(super) fn unreachable(addr: &str, why: impl Into<String>) -> Self {
        Self::new(UNREACHABLE, format!("no daemon answers at {addr}"), why).todo(
            "start one with `hearth serve`, name another with --addr, or use `hearth run --standalone` for one \
             command without a daemon",
        )
    }

    /// Our own output has no reader any more.
    pub(super) fn broken_pipe() -> Self {
        Self { silent: true, ..Self::new(BROKEN_PIPE, "output", "nobody reads it") }
    }

    /// The user stopped it by a signal.
    pub(super) fn interrupted(signal: i32, what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(u8::try_from(128 + signal).unwrap_or(FAILED), what, why)
    }

    /// An answer of the daemon.
    pub(super) fn from_status(what: impl Into<String>, status: &Status) -> Self {
        let why = match status.message() {
            "" => status.code().description().to_owned(),
            text => text.to_owned(),
        };
        let not_started =
            status.metadata().get(EXIT_STATUS_METADATA).and_then(|v| v.to_str().ok()?.parse().ok());
        let code = match status.code() {
            Code::InvalidArgument => USAGE,
            _ => not_started.unwrap_or(FAILED),
        };
        let error = Self { grpc: Some(status.code()), ..Self::new(code, what, why) };
        // What else to do, the daemon says itself.
        match status.code() {
            Code::Unauthenticated => error.todo("set HEARTH_TOKEN to the daemon's token"),
            // A node that does not want to says so in a detail, and its message how that ends.
            Code::Unavailable if status.get_details_error_info().is_some() => error,
            Code::Unavailable => error.todo("see the daemon's log; `hearth ls` shows what runs"),
            _ => error,
        }
    }

    /// Says what to do.
    pub(super) fn todo(self, todo: impl Into<String>) -> Self {
        Self { todo: Some(todo.into()), ..self }
    }

    /// What is wrong, without what was tried.
    pub(super) fn why(&self) -> &str {
        &self.why
    }

    /// The one line.
    pub(crate) fn line(&self) -> String {
        let todo = self.todo.as_ref().map(|t| format!("; {t}")).unwrap_or_default();
        format!("{}: {}{todo}", self.what, self.why)
    }

    /// The object inside `{"error": …}`.
    pub(super) fn to_json(&self) -> serde_json::Value {
        json!({
            "message": self.line(),
            "what": self.what,
            "why": self.why,
            "todo": self.todo,
            "exit_code": self.code,
            "grpc_code": self.grpc.map(|c| format!("{c:?}")),
        })
    }

    /// Prints it to stderr.
    pub(super) fn report(&self, json: bool) {
        if self.silent {
        } else if json {
            out::note_raw(&json!({ "error": self.to_json() }).to_string());
        } else {
            out::note(&self.line());
        }
    }
}

impl From<std::io::Error> for CliError {
    fn from(e: std::io::Error) -> Self {
        if e.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::broken_pipe();
        }
        Self::failed("cannot write output", e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_become_exit_codes() {
        let code = |c| CliError::from_status("x", &Status::new(c, "y")).code;
        assert_eq!(code(Code::InvalidArgument), USAGE);
        assert_eq!(code(Code::NotFound), FAILED);
        assert_eq!(code(Code::Unavailable), FAILED);
        assert_eq!(CliError::unreachable("a", "b").code, UNREACHABLE);
    }
}
