//! Starting, proving and ending processes.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_host::process::spawn::Step;
use hearth_host::process::{self, Mounts, Signal, SpawnOptions, boot_id, liveness, spawn, wait};
use hearth_testkit::netns::Throwaway;

use crate::{SOON, end_of, helper, root_or_skip};

fn options(program: &str, args: &[&str]) -> SpawnOptions<'static> {
    let args = args.iter().map(Into::into).collect();
    SpawnOptions { program: program.into(), args, ..SpawnOptions::default() }
}

fn null() -> OwnedFd {
    File::options().read(true).write(true).open("/dev/null").expect("open /dev/null").into()
}

/// Runs it with stdout in a file and answers with what it wrote.
fn output_of(mut options: SpawnOptions<'_>) -> String {
    let mut file = tempfile::tempfile().expect("temporary file");
    let out = file.try_clone().expect("dup").into();
    options.fds.extend([(null(), 0), (out, 1), (null(), 2)]);
    let child = spawn(options).expect("spawn");
    let ended = end_of(&child);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    file.rewind().expect("rewind");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("read");
    text
}

#[test]
fn a_child_has_exactly_the_descriptors_listed() {
    // Inheritable on purpose: only the explicit list may decide.
    let inheritable = rustix::io::dup(null()).unwrap();
    let mut o = options("/bin/ls", &["/proc/self/fd"]);
    o.fds = vec![(null(), 7), (inheritable.try_clone().unwrap(), 40)];
    let text = output_of(o);
    // 3 is the directory that ls itself has open.
    let mut numbers: Vec<u32> = text.lines().map(|l| l.parse().unwrap()).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 2, 3, 7, 40]);
    drop(inheritable);
}

#[test]
fn swapped_descriptors_do_not_overwrite_each_other() {
    let mut file = tempfile::tempfile().unwrap();
    let (a, b) = (OwnedFd::from(file.try_clone().unwrap()), null());
    use std::os::fd::AsRawFd;
    // Each goes to the other's number.
    let (to_a, to_b) = (b.as_raw_fd(), a.as_raw_fd());
    let mut o = options("/bin/sh", &["-c", &format!("echo here >&{to_a}; echo lost >&{to_b}")]);
    o.fds = vec![(null(), 0), (null(), 1), (null(), 2), (a, to_a), (b, to_b)];
    assert_eq!(end_of(&spawn(o).unwrap()).code, Some(0));
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here\n");
}

#[test]
fn a_child_inherits_no_environment_no_signal_state_and_no_session() {
    let mut o = options("/usr/bin/env", &[]);
    o.env = vec![("A".into(), "1".into()), ("B".into(), "x=y".into())];
    assert_eq!(output_of(o), "A=1\nB=x=y\n");
    // Rust ignores SIGPIPE in this very process.
    let text = output_of(options("/bin/cat", &["/proc/self/status"]));
    for name in ["SigBlk", "SigIgn", "SigCgt"] {
        assert!(text.contains(&format!("{name}:\t0000000000000000\n")), "{name} in {text}");
    }
    let mut o = options("/bin/cat", &["/proc/self/stat"]);
    o.new_session = true;
    let text = output_of(o);
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    assert_eq!((fields[5], fields[6]), (fields[0], "0"), "session and terminal in {text}");
    let mut o = options("/bin/sh", &["-c", "ulimit -Sn; pwd"]);
    o.rlimit_nofile = Some(97);
    o.cwd = Some("/proc".into());
    assert_eq!(output_of(o), "97\n/proc\n");
}

#[test]
fn a_failed_spawn_names_the_step_and_leaves_no_child() {
    let fail = |o: SpawnOptions<'_>| spawn(o).unwrap_err();
    let e = fail(options("/no/such/program", &[]));
    assert_eq!(e.step, Step::Exec);
    assert!(e.to_string().starts_with("exec /no/such/program: No such file"), "{e}");
    let e = fail(options("/etc/passwd", &[]));
    assert_eq!((e.step, e.error.raw_os_error()), (Step::Exec, Some(libc::EACCES)));
    let e = fail(options("bin/true", &[]));
    assert_eq!(e.step, Step::Prepare, "{e}");
    let e = fail(SpawnOptions { cwd: Some("/no/such/dir".into()), ..options("/bin/true", &[]) });
    assert!(e.to_string().starts_with("chdir for /bin/true: "), "{e}");
    let not_a_netns = null();
    let e = fail(SpawnOptions { netns: Some(not_a_netns.as_fd()), ..options("/bin/true", &[]) });
    assert_eq!(e.step, Step::Netns, "{e}");
    let not_a_cgroup = File::open("/").unwrap();
    let e = fail(SpawnOptions { cgroup_fd: Some(not_a_cgroup.as_fd()), ..options("/bin/true", &[]) });
    assert_eq!(e.step, Step::Clone, "{e}");
    let e = fail(SpawnOptions { args: vec!["a\0b".into()], ..options("/bin/true", &[]) });
    assert_eq!(e.step, Step::Prepare, "{e}");
}

#[test]
fn many_threads_may_start_and_end_processes_at_once() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..25 {
                    assert_eq!(end_of(&spawn(options("/bin/true", &[])).unwrap()).code, Some(0));
                    spawn(options("/no/such/program", &[])).unwrap_err();
                }
            });
        }
    });
}

#[test]
fn a_process_is_proven_by_start_time_and_boot_and_signalled_only_then() {
    let child = spawn(options("/bin/sleep", &["1000"])).unwrap();
    let id = child.identity.clone();
    assert_eq!(id.boot_id, boot_id().unwrap());
    assert_eq!(liveness(&id), Liveness::Alive);
    assert_eq!(wait(child.pidfd.as_fd(), Duration::ZERO).unwrap(), None);
    let stranger = ProcessIdentity { start_time: id.start_time - 1, ..id.clone() };
    assert_eq!(liveness(&stranger), Liveness::Gone);
    process::open(&stranger).unwrap_err();
    process::release(&stranger, SOON).unwrap();
    assert_eq!(liveness(&id), Liveness::Alive);
    let pidfd = process::open(&id).unwrap();
    process::signal(pidfd.as_fd(), Signal::KILL).unwrap();
    // Ended and not yet reaped: a zombie is gone.
    let deadline = Instant::now() + SOON;
    while liveness(&id) != Liveness::Gone {
        assert!(Instant::now() < deadline, "a zombie counts as alive");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(end_of(&child).signal, Some(libc::SIGKILL));
    process::signal(pidfd.as_fd(), Signal::KILL).unwrap();
    let again = wait(child.pidfd.as_fd(), SOON).unwrap().unwrap();
    assert_eq!((again.code, again.signal), (None, None), "reaped before: it ended, nobody knows how");
    process::release(&id, SOON).unwrap();
}

#[test]
fn release_of_a_process_reaps_our_zombie() {
    let child = spawn(options("/bin/true", &[])).unwrap();
    let id = child.identity.clone();
    let deadline = Instant::now() + SOON;
    while liveness(&id) != Liveness::Gone {
        assert!(Instant::now() < deadline, "true does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    process::release(&id, SOON).unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{}", id.pid)).exists(), "the zombie is still there");
}

#[test]
fn a_child_with_a_death_signal_dies_with_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("answer");
    let mut parent = helper::start("death-signal", &said);
    let text = helper::answer(&said);
    let (pid, start_time) = text.split_once(' ').unwrap();
    let id = ProcessIdentity {
        pid: pid.parse().unwrap(),
        start_time: start_time.parse().unwrap(),
        boot_id: boot_id().unwrap().to_owned(),
        cgroup: None,
    };
    assert_eq!(liveness(&id), Liveness::Alive);
    let pidfd = process::open(&id).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let ended = wait(pidfd.as_fd(), SOON).unwrap().expect("the child outlived its parent");
    assert_eq!(ended.code, None, "not our child: nobody tells us how");
    assert_eq!(liveness(&id), Liveness::Gone);
}

/// The trap that the module's head names: the signal follows the thread, not the process.
#[test]
fn a_death_signal_follows_the_thread_that_spawned() {
    let child = std::thread::spawn(|| {
        spawn(SpawnOptions { parent_death_signal: Some(Signal::KILL), ..options("/bin/sleep", &["1000"]) })
            .unwrap()
    })
    .join()
    .unwrap();
    assert_eq!(end_of(&child).signal, Some(libc::SIGKILL));
}

#[test]
fn a_child_can_be_born_in_another_network_and_mount_namespace() {
    if !root_or_skip("a_child_can_be_born_in_another_network_and_mount_namespace") {
        return;
    }
    let netns = Throwaway::new("spawn").unwrap();
    let fd = File::open(netns.path()).unwrap();
    let inode = fd.metadata().unwrap().ino();
    let mut o = options("/bin/readlink", &["/proc/self/ns/net", "/proc/self/ns/mnt"]);
    o.netns = Some(fd.as_fd());
    o.mounts = Mounts::Own;
    let text = output_of(o);
    drop(fd);
    netns.remove().unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], format!("net:[{inode}]"));
    let mine = std::fs::read_link("/proc/thread-self/ns/mnt").unwrap();
    assert_ne!(lines[1], mine.to_string_lossy());
}
