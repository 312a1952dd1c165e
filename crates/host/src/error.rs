//! Turns an errno, with the verb and the object it struck, into a [`HostError`] of the right class. No text
//! is ever searched to decide a class.

use std::fmt::Display;
use std::io;

use hearth_core::host::{ErrorClass, HostError};

/// The class of a kernel error: what a caller may do about it.
pub(crate) fn class_of(error: &io::Error) -> ErrorClass {
    match error.raw_os_error() {
        // EAGAIN and ENOMEM pass when others let go; EBUSY and ETXTBSY when the holder ends.
        Some(libc::EBUSY | libc::EAGAIN | libc::ETXTBSY | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => {
            ErrorClass::Busy
        }
        Some(libc::ETIMEDOUT | libc::ETIME) => ErrorClass::Deadline,
        Some(
            libc::EPERM
            | libc::EACCES
            | libc::EROFS
            | libc::EINVAL
            | libc::ENOSYS
            | libc::EOPNOTSUPP
            | libc::ENAMETOOLONG
            | libc::E2BIG
            | libc::ENOEXEC,
        ) => ErrorClass::Refused,
        _ => ErrorClass::Failed,
    }
}

/// A system call failed: `doing` says which step, the error says why. The kernel's words are in the text
/// since many callers print one line only.
pub(crate) fn os(verb: &'static str, what: impl Display, doing: impl Display, error: io::Error) -> HostError {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "; run as root",
        Some(libc::EROFS) => "; remount it writable or choose another directory",
        Some(libc::EMFILE) => "; raise the limit of open files",
        _ => "",
    };
    HostError {
        verb,
        what: what.to_string(),
        why: format!("{doing}: {error}{hint}"),
        class: class_of(&error),
        source: Some(error),
    }
}

/// A failure without a kernel error behind it.
pub(crate) fn plain(
    verb: &'static str,
    what: impl Display,
    class: ErrorClass,
    why: impl Display,
) -> HostError {
    HostError { verb, what: what.to_string(), why: why.to_string(), class, source: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_errno_and_the_text_names_step_and_object() {
        let e = os("release", "mount /x", "umount", io::Error::from_raw_os_error(libc::EBUSY));
        assert_eq!(e.class, ErrorClass::Busy);
        assert!(e.to_string().starts_with("release mount /x: umount: "), "{e}");
        let e = os("ensure", "cgroup a", "mkdir /c/a", io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(e.class, ErrorClass::Refused);
        assert!(e.why.ends_with("run as root"), "{e}");
    }
}
