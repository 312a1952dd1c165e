//! A file system of one file whose reads and writes the kernel waits for until they are let go: FUSE, spoken by hand. The
//! system calls into it really do not return, which no double of a disk can show.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Name of the file in it.
const NAME: &str = "disk";
const ROOT: u64 = 1;
const FILE: u64 = 2;
/// Room for the largest write and its head.
const BUFFER: usize = (1 << 20) + 4096;

/// Requests of the kernel, by number (linux/fuse.h).
mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
}

/// Answers that are held back; `None` once they are let go.
type Held = Arc<Mutex<Option<Vec<Vec<u8>>>>>;

/// The mount. Dropped, it lets all go and is taken away.
pub struct Stuck {
    dir: tempfile::TempDir,
    device: File,
    held: Held,
    server: Option<JoinHandle<()>>,
}

impl Stuck {
    /// Mounts it with a file of `size` zeroes; an error says why that is not possible here.
    pub fn mount(size: u64) -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let device = device.map_err(|e| format!("/dev/fuse: {e}"))?;
        let copy = || device.try_clone().map_err(|e| e.to_string());
        // mount(8) hands on its standard input.
        let mounted = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", "fd=0,rootmode=40000,user_id=0,group_id=0", "stuck"])
            .arg(dir.path())
            .stdin(Stdio::from(copy()?))
            .output()
            .map_err(|e| format!("mount: {e}"))?;
        if !mounted.status.success() {
            return Err(format!("mount: {}", String::from_utf8_lossy(&mounted.stderr).trim()));
        }
        let held: Held = Arc::new(Mutex::new(Some(vec![])));
        let (requests, to) = (copy()?, held.clone());
        let server = Some(std::thread::spawn(move || serve(requests, size, &to)));
        Ok(Self { dir, device, held, server })
    }

    /// The file.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join(NAME)
    }

    /// Requests that the kernel waits for.
    pub fn waiting(&self) -> usize {
        self.held.lock().expect("not poisoned").as_ref().map_or(0, Vec::len)
    }

    /// Answers what waits, and all that comes from now on at once.
    pub fn let_go(&mut self) {
        for answer in self.held.lock().expect("not poisoned").take().unwrap_or_default() {
            // The request may have been interrupted meanwhile.
            self.device.write_all(&answer).unwrap_or_default();
        }
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.let_go();
        unmount(self.dir.path());
        if let Some(server) = self.server.take() {
            server.join().unwrap_or_default();
        }
    }
}

fn unmount(dir: &Path) {
    // Lazily: a test that failed may have the file open still.
    let done = Command::new("umount").arg("-l").arg(dir).status();
    assert!(done.is_ok_and(|s| s.success()) || std::thread::panicking(), "{} stays mounted", dir.display());
}

/// Answers until it is unmounted: then the read fails.
fn serve(mut device: File, size: u64, held: &Held) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(n) = device.read(&mut buffer) {
        let request = &buffer[..n];
        let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let (op, unique, node) = (number(4), &request[8..16], number(16));
        let body = match op {
            op::FORGET | op::BATCH_FORGET | op::INTERRUPT => continue,
            op::INIT => Ok(init(number(44))),
            op::LOOKUP if request[40..n - 1] == *NAME.as_bytes() => Ok(entry(size)),
            op::LOOKUP => Err(2),
            op::GETATTR => Ok(attributes_answer(u64::from(node), size)),
            op::OPEN => Ok(vec![0; 16]),
            op::RELEASE | op::FLUSH | op::DESTROY => Ok(vec![]),
            op::READ => Ok(vec![0; number(56) as usize]),
            op::WRITE => Ok([number(56).to_ne_bytes(), [0; 4]].concat()),
            _ => Err(38),
        };
        let answer = answer(unique, body);
        if matches!(op, op::READ | op::WRITE)
            && let Some(held) = held.lock().expect("not poisoned").as_mut()
        {
            held.push(answer);
            continue;
        }
        // A request that was interrupted takes no answer.
        device.write_all(&answer).unwrap_or_default();
    }
}

fn answer(unique: &[u8], body: Result<Vec<u8>, i32>) -> Vec<u8> {
    let (error, body) = body.map_or_else(|errno| (-errno, vec![]), |body| (0, body));
    let len = u32::try_from(16 + body.len()).expect("short");
    [&len.to_ne_bytes(), &error.to_ne_bytes(), unique, &body].concat()
}

/// Version 7.31 or that of the kernel if it is older; nothing optional.
fn init(minor: u32) -> Vec<u8> {
    let mut body = vec![];
    for n in [7, minor.min(31), 0, 0] {
        body.extend(u32::to_ne_bytes(n));
    }
    // Background requests, and at how many of them it is busy.
    body.extend([u16::to_ne_bytes(16), u16::to_ne_bytes(12)].concat());
    // Largest write, granularity of time in ns.
    body.extend([u32::to_ne_bytes(1 << 20), u32::to_ne_bytes(1)].concat());
    body.resize(64, 0);
    body
}

/// For good, as `entry_out` and `attr_out` begin.
const FOR_GOOD: u64 = 3600;

fn entry(size: u64) -> Vec<u8> {
    let mut body = [FILE, 0, FOR_GOOD, FOR_GOOD, 0].map(u64::to_ne_bytes).concat();
    body.extend(attributes(FILE, size));
    body
}

fn attributes_answer(node: u64, size: u64) -> Vec<u8> {
    let mut body = [FOR_GOOD, 0].map(u64::to_ne_bytes).concat();
    body.extend(attributes(node, size));
    body
}

fn attributes(node: u64, size: u64) -> Vec<u8> {
    let (mode, size) = if node == ROOT { (0o040_755, 0) } else { (0o100_600, size) };
    let mut body = [node, size, size.div_ceil(512), 0, 0, 0].map(u64::to_ne_bytes).concat();
    // Parts of seconds of three times, mode, links, user, group, device, block size, flags.
    body.extend([0, 0, 0, mode, 1, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat());
    body
}
