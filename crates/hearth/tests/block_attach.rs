//! `hearth block attach` with the kernel's client: a file system on it, mounted many times, and the stop. Needs root and the
//! module nbd, which the lab has (`cargo xtask lab hearth:block_attach`).

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hearth_host::nbd;

const CYCLES: usize = 100;
const DISK: u64 = 64 << 20;
/// From the signal to the end of the command, the device quiet.
const STOP: Duration = Duration::from_secs(10);

fn nbd_or_skip(test: &str) -> bool {
    let there = hearth_host::test_support::is_root() && matches!(nbd::limits(), Ok(Some(_)));
    if !there {
        hearth_testkit::skip(test, "needs root and the module nbd, as in the lab");
    }
    there
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().expect("run");
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

/// The product: in the lab it is not where cargo built it.
fn hearth() -> Command {
    let program = std::env::var_os("HEARTH_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_hearth").into());
    Command::new(program)
}

struct Attached {
    child: Child,
    device: String,
    index: u32,
}

impl Attached {
    fn new(dir: &Path) -> Self {
        let mut command = hearth();
        command.args(["block", "attach", "--base"]).arg(dir.join("base"));
        command.arg("--overlay").arg(dir.join("overlay")).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("line");
        let device = line.split(' ').next().expect("device").trim().to_owned();
        let index = device.strip_prefix("/dev/nbd").and_then(|n| n.parse().ok());
        Self { child, index: index.unwrap_or_else(|| panic!("no device in {line:?}")), device }
    }

    /// As an operator ends it.
    fn stop(mut self) {
        run("kill", &["-TERM", &self.child.id().to_string()]);
        let began = Instant::now();
        let status = self.child.wait().expect("wait");
        assert!(status.success() && began.elapsed() < STOP, "{status} after {:?}", began.elapsed());
        assert_eq!(nbd::look(self.index).expect("look").unquiet(), None);
    }
}

#[test]
fn a_file_system_on_an_attached_disk_survives_a_hundred_mounts_and_the_stop() {
    if !nbd_or_skip("a_file_system_on_an_attached_disk_survives_a_hundred_mounts_and_the_stop") {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let dir = tmp.path();
    std::fs::File::create(dir.join("base")).unwrap().set_len(DISK).unwrap();
    let point = dir.join("mnt");
    std::fs::create_dir(&point).unwrap();
    let mount = point.to_str().unwrap();
    let attached = Attached::new(dir);
    run("mkfs.ext4", &["-q", &attached.device]);
    for cycle in 0..CYCLES {
        run("mount", &["-t", "ext4", &attached.device, mount]);
        for before in 0..cycle {
            let text = std::fs::read_to_string(point.join(before.to_string())).unwrap();
            assert_eq!(text, format!("cycle {before}"));
        }
        std::fs::write(point.join(cycle.to_string()), format!("cycle {cycle}")).unwrap();
        run("umount", &[mount]);
    }
    run("fsck.ext4", &["-f", "-n", &attached.device]);
    attached.stop();
    // What was written is in the overlay, for the next server.
    let attached = Attached::new(dir);
    run("fsck.ext4", &["-f", "-n", &attached.device]);
    run("mount", &["-t", "ext4", "-o", "ro", &attached.device, mount]);
    assert_eq!(std::fs::read_to_string(point.join("99")).unwrap(), "cycle 99");
    run("umount", &[mount]);
    attached.stop();
}
