//! Which cgroup a process is in: with pid, start time and boot the fourth fact of its identity.

use hearth_core::process::Liveness;

/// Of a process just seen alive by its other facts: whether it is in the cgroup `<…>/hearth/<instance>/<name>`
/// or below it. In another one it is not the recorded process, whatever its numbers say.
pub(crate) fn judge(pid: u32, instance: &str, name: &str) -> Liveness {
    match std::fs::read_to_string(format!("/proc/{pid}/cgroup")) {
        Ok(text) => match path_in(&text) {
            Some(path) if is_at_or_below(path, &["hearth", instance, name]) => Liveness::Alive,
            Some(_) => Liveness::Gone,
            None => Liveness::Unknown(format!("/proc/{pid}/cgroup names no cgroup2")),
        },
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Liveness::Gone,
        Err(e) => Liveness::Unknown(format!("/proc/{pid}/cgroup: {e}")),
    }
}

/// Whether a process is in a cgroup of this instance; not if that cannot be read.
pub(crate) fn in_instance(pid: u32, instance: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| {
        path_in(&text).is_some_and(|path| {
            path.split('/').collect::<Vec<_>>().windows(2).any(|w| w == ["hearth", instance])
        })
    })
}

/// The path of a process's cgroup2, if it can be read.
pub(crate) fn path_of(pid: u32) -> Option<String> {
    path_in(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?).map(str::to_owned)
}

/// The line of cgroup2 (cgroups(7)): hierarchy 0, no controllers.
fn path_in(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

/// By the path's last parts, since a cgroup namespace hides or changes the first.
fn is_at_or_below(path: &str, tail: &[&str; 3]) -> bool {
    // A process on its way out may have seen its cgroup removed.
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let parts: Vec<&str> = path.split('/').collect();
    parts.windows(tail.len()).any(|w| w == tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_names_in_their_order_count() {
        let tail = ["hearth", "default", "aaaaaaaaaaaaaaaa"];
        for ours in [
            "/hearth/default/aaaaaaaaaaaaaaaa",
            "/../hearth/default/aaaaaaaaaaaaaaaa/vmm",
            "/hearth/default/aaaaaaaaaaaaaaaa (deleted)",
        ] {
            assert!(is_at_or_below(ours, &tail), "{ours}");
        }
        for other in [
            "/",
            "/hearth/default",
            "/hearth/other/aaaaaaaaaaaaaaaa",
            "/hearth/default/aaaaaaaaaaaaaaaab",
            "/user.slice/hearth-default-aaaaaaaaaaaaaaaa",
        ] {
            assert!(!is_at_or_below(other, &tail), "{other}");
        }
        assert_eq!(path_in("9:name=systemd:/x\n0::/hearth/a/b\n"), Some("/hearth/a/b"));
        assert_eq!(path_in("9:name=systemd:/x\n"), None);
    }

    #[test]
    fn this_process_is_in_no_cgroup_of_ours() {
        assert_ne!(judge(std::process::id(), "default", "aaaaaaaaaaaaaaaa"), Liveness::Alive);
        assert_eq!(judge(u32::MAX, "default", "aaaaaaaaaaaaaaaa"), Liveness::Gone);
    }
}
