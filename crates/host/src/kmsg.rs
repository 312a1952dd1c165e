//! The kernel's own word on a process it killed for want of memory, from its message buffer. Read only; a host that
//! does not show it (no right, a container) is no error.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;

/// Records looked at; the buffer of a usual kernel holds fewer.
const MOST: usize = 200_000;

/// What the kernel said about killing `pid`, the last time it did; `None` if it did not or its messages cannot be
/// read.
#[must_use]
pub fn oom_kill_of(pid: u32) -> Option<String> {
    let mut messages = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open("/dev/kmsg").ok()?;
    // One read is one record (Documentation/ABI/testing/dev-kmsg); none is longer than this.
    let mut record = [0; 8192];
    let mut found = None;
    for _ in 0..MOST {
        match messages.read(&mut record) {
            Ok(0) => break,
            Ok(n) => {
                let text = String::from_utf8_lossy(&record[..n]);
                if let Some(words) = told(&text, pid) {
                    found = Some(words.to_owned());
                }
            }
            // Overwritten while we read: the next read goes on after the gap.
            Err(e) if e.raw_os_error() == Some(libc::EPIPE) || e.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    found
}

/// The message of a record (`priority,sequence,time,flags;message`) if it tells of this kill.
fn told(record: &str, pid: u32) -> Option<&str> {
    let message = record.split_once(';')?.1.lines().next()?;
    let killed = format!("Killed process {pid} (");
    // Kernel messages alone: priority below 8 is facility 0. Others may be written by any privileged program.
    let from_kernel = record.split(',').next()?.parse::<u32>().is_ok_and(|priority| priority < 8);
    (from_kernel && message.contains("ut of memory: ") && message.contains(&killed)).then_some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernels_word_on_this_very_pid_counts() {
        let record = "3,1234,98765,-;Memory cgroup out of memory: Killed process 42 (qemu) total-vm:1kB\n SUBSYSTEM=x\n";
        assert!(told(record, 42).is_some_and(|m| m.ends_with("total-vm:1kB")));
        assert_eq!(told(record, 4), None);
        assert_eq!(told(&record.replacen('3', "11", 1), 42), None, "written by a program");
        assert!(told("3,1,1,-;Out of memory: Killed process 42 (x)\n", 42).is_some());
        assert_eq!(told("3,1,1,-;Killed process 42 (x)\n", 42), None);
        assert_eq!(oom_kill_of(u32::MAX), None);
    }
}
