//! One place that turns what went wrong in this module into a [`HostError`].

use std::io;

use hearth_core::host::{ErrorClass, HostError};

use super::netlink::NetlinkError;

/// Result of a verb.
pub(crate) type Result<T> = std::result::Result<T, HostError>;

/// What is being done to what; every error of one call carries it.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    verb: &'static str,
    what: String,
}

impl Op {
    /// A verb applied to a thing.
    pub(crate) fn new(verb: &'static str, what: impl Into<String>) -> Self {
        Self { verb, what: what.into() }
    }

    fn error(&self, class: ErrorClass, why: String, source: Option<io::Error>) -> HostError {
        HostError { verb: self.verb, what: self.what.clone(), why, class, source }
    }

    /// The thing in this place is not ours.
    pub(crate) fn foreign(&self, why: impl Into<String>) -> HostError {
        self.error(ErrorClass::Foreign, why.into(), None)
    }

    /// The same call will fail again.
    pub(crate) fn refused(&self, why: impl Into<String>) -> HostError {
        self.error(ErrorClass::Refused, why.into(), None)
    }

    /// Held by something.
    pub(crate) fn busy(&self, why: impl Into<String>) -> HostError {
        self.error(ErrorClass::Busy, why.into(), None)
    }

    /// The deadline passed.
    pub(crate) fn deadline(&self, why: impl Into<String>) -> HostError {
        self.error(ErrorClass::Deadline, why.into(), None)
    }

    /// Anything else, without a cause from the kernel.
    pub(crate) fn failed(&self, why: impl Into<String>) -> HostError {
        self.error(ErrorClass::Failed, why.into(), None)
    }

    /// An error of a system call.
    pub(crate) fn io(&self, step: &str, source: io::Error) -> HostError {
        let (class, hint) = class_of(source.raw_os_error());
        self.error(class, format!("{step}{hint}"), Some(source))
    }

    /// An error of a netlink exchange.
    pub(crate) fn netlink(&self, step: &str, source: NetlinkError) -> HostError {
        let (class, hint) = class_of(source.errno());
        self.error(class, format!("{step}: {source}{hint}"), Some(source.into_io()))
    }

    /// Several errors as one, with the gravest class and all texts; `None` if there is none.
    pub(crate) fn all(&self, errors: Vec<HostError>) -> Option<HostError> {
        let class = errors.iter().map(|e| e.class).max_by_key(|c| gravity(*c))?;
        let mut errors = errors;
        if errors.len() == 1 {
            return errors.pop();
        }
        let mut texts = Vec::new();
        let mut cause = None;
        for e in errors {
            let because = e.source.as_ref().map(|s| format!(" ({s})")).unwrap_or_default();
            texts.push(format!("{}{because}", e.why));
            cause = cause.or(e.source);
        }
        Some(self.error(class, texts.join("; "), cause))
    }
}

fn gravity(class: ErrorClass) -> u8 {
    match class {
        ErrorClass::Foreign => 4,
        ErrorClass::Refused => 3,
        ErrorClass::Failed => 2,
        ErrorClass::Deadline => 1,
        ErrorClass::Busy => 0,
    }
}

fn class_of(errno: Option<i32>) -> (ErrorClass, &'static str) {
    match errno {
        Some(libc::EPERM | libc::EACCES) => {
            (ErrorClass::Refused, "; run as root or with CAP_NET_ADMIN and CAP_SYS_ADMIN")
        }
        Some(libc::EBUSY) => (ErrorClass::Busy, ""),
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT) => {
            (ErrorClass::Refused, "; the kernel lacks this feature: check its configuration and modules")
        }
        _ => (ErrorClass::Failed, ""),
    }
}
