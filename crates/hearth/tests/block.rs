//! `hearth block` as an operator has it: killed under load, served again, taken out and put in.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

const BLOCK: usize = 4096;
/// Blocks of the disk that the tests use.
const BLOCKS: usize = 2048;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

struct Disk {
    dir: TempDir,
    base: PathBuf,
    overlay: PathBuf,
    socket: PathBuf,
}

impl Disk {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let [base, overlay, socket] = ["base", "overlay", "socket"].map(|name| dir.path().join(name));
        std::fs::write(&base, vec![0xbb; BLOCKS * BLOCK]).expect("base");
        Self { dir, base, overlay, socket }
    }

    fn hearth(&self, verb: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
        command.args(["block", verb, "--base"]).arg(&self.base).arg("--overlay").arg(&self.overlay);
        command.args(more);
        command
    }

    /// A server that answers.
    fn serve(&self, more: &[&str]) -> Server {
        let mut command = self.hearth("serve", more);
        command.arg("--socket").arg(&self.socket);
        Self::started(command)
    }

    fn started(mut command: Command) -> Server {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("start");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("line");
        assert!(line.starts_with("nbd+unix:///?socket="), "{line:?}");
        Server(child)
    }

    fn client(&self) -> Client {
        let mut stream = UnixStream::connect(&self.socket).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("timeout");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("greeting");
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT\0\0\0\x01\0\0\0\0");
        stream.write_all(&hello).expect("hello");
        stream.read_exact(&mut [0; 10]).expect("export");
        Client { stream, flight: 0 }
    }
}

/// Killed, if the test ends before it.
struct Server(Child);

impl Server {
    fn kill(mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }

    /// Ends it as an operator does.
    fn end(mut self) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        let status = self.0.wait().expect("wait");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have been waited for already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

struct Client {
    stream: UnixStream,
    flight: usize,
}

impl Client {
    /// False: the server is gone.
    fn ask(&mut self, kind: u16, at: u64, len: u32, payload: &[u8]) -> bool {
        let mut frame = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
        frame.extend(kind.to_be_bytes());
        frame.extend(0_u64.to_be_bytes());
        frame.extend(at.to_be_bytes());
        frame.extend(len.to_be_bytes());
        frame.extend(payload);
        self.flight += 1;
        self.stream.write_all(&frame).is_ok()
    }

    /// Waits for all but `left` of what is in flight. False: the server is gone.
    fn settle(&mut self, left: usize) -> bool {
        while self.flight > left {
            let mut head = [0; 16];
            if self.stream.read_exact(&mut head).is_err() {
                return false;
            }
            assert_eq!(head[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "a request failed");
            self.flight -= 1;
        }
        true
    }

    fn read_all(&mut self) -> Vec<u8> {
        assert!(self.settle(0) && self.ask(0, 0, (BLOCKS * BLOCK) as u32, &[]) && self.settle(0));
        let mut disk = vec![0; BLOCKS * BLOCK];
        self.stream.read_exact(&mut disk).expect("data");
        disk
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % n
    }
}

/// What each block may hold: what it held at the last flush, and all that was written since, in order.
struct Model(Vec<Vec<u8>>);

impl Model {
    fn flushed(&mut self) {
        for block in &mut self.0 {
            *block = block.split_off(block.len() - 1);
        }
    }

    /// Takes what came back after a kill.
    fn check(&mut self, disk: &[u8]) {
        for (number, (block, allowed)) in disk.chunks(BLOCK).zip(&mut self.0).enumerate() {
            // A write is all of one byte, and whole blocks of it.
            assert!(block.iter().all(|b| *b == block[0]), "block {number} is torn");
            assert!(allowed.contains(&block[0]), "block {number} is {}, allowed is {allowed:?}", block[0]);
            *allowed = vec![block[0]];
        }
    }
}

/// Writes, zeroes and flushes until the server is gone.
fn load(client: &mut Client, model: &mut Model, random: &mut Random) {
    loop {
        for _ in 0..random.below(200) {
            let at = random.below(BLOCKS as u64 - 16);
            let blocks = 1 + random.below(16);
            let zeroes = random.below(5) == 0;
            let byte = if zeroes { 0 } else { random.below(250) as u8 + 1 };
            for block in &mut model.0[at as usize..(at + blocks) as usize] {
                block.push(byte);
            }
            let (at, len) = (at * BLOCK as u64, blocks as usize * BLOCK);
            let asked = match zeroes {
                true => client.ask(6, at, len as u32, &[]),
                false => client.ask(WRITE, at, len as u32, &vec![byte; len]),
            };
            // Writes of one block must not overtake each other, or the model would not know the last.
            if !asked || !client.settle(0) {
                return;
            }
        }
        if !client.ask(FLUSH, 0, 0, &[]) || !client.settle(0) {
            return;
        }
        model.flushed();
    }
}

#[test]
fn an_overlay_whose_server_is_killed_under_load_is_as_at_the_last_flush_or_newer() {
    let disk = Disk::new();
    let mut model = Model(vec![vec![0xbb]; BLOCKS]);
    let seed = std::process::id();
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(seed));
    for round in 0..6 {
        let server = disk.serve(&[]);
        let mut client = disk.client();
        model.check(&client.read_all());
        let pause = Duration::from_millis(50 + random.below(400));
        let (model, random) = (&mut model, &mut random);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(pause);
                server.kill();
            });
            load(&mut client, model, random);
        });
        assert!(
            model.0.iter().any(|b| b.len() > 1 || b[0] != 0xbb),
            "round {round} (seed {seed}) wrote nothing"
        );
    }
    // A socket that nobody serves any more gives way, and an end on purpose loses nothing.
    let server = disk.serve(&[]);
    let mut client = disk.client();
    let seen = client.read_all();
    model.check(&seen);
    assert!(client.ask(WRITE, 0, BLOCK as u32, &[0x77; BLOCK]) && client.settle(0));
    server.end();
    assert!(!disk.socket.exists(), "the socket is left");
    let server = disk.serve(&["--read-only"]);
    let again = disk.client().read_all();
    assert!(again[..BLOCK] == [0x77; BLOCK] && again[BLOCK..] == seen[BLOCK..]);
    server.end();
}

#[test]
fn an_object_of_a_store_is_served_as_it_is_and_below_an_overlay() {
    let mut disk = Disk::new();
    let url = format!("file://{}", disk.base.display());
    let cache = disk.dir.path().join("cache");
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth"));
    command.args(["block", "serve", "--url", &url, "--cache"]).arg(&cache).arg("--socket").arg(&disk.socket);
    let server = Disk::started(command);
    assert!(disk.client().read_all() == vec![0xbb; BLOCKS * BLOCK]);
    server.end();
    disk.base = url.into();
    let cached = ["--cache", cache.to_str().unwrap(), "--cache-mib", "16"];
    let server = disk.serve(&cached);
    let mut client = disk.client();
    assert!(client.ask(WRITE, 0, BLOCK as u32, &[0x77; BLOCK]) && client.settle(0));
    server.end();
    let server = disk.serve(&cached);
    let seen = disk.client().read_all();
    assert!(seen[..BLOCK] == [0x77; BLOCK] && seen[BLOCK..] == [0xbb; (BLOCKS - 1) * BLOCK]);
    server.end();
    // The object has changed: another base.
    std::fs::write(disk.dir.path().join("base"), vec![1; BLOCKS * BLOCK]).unwrap();
    let said = text(&disk.hearth("diff", &cached).output().unwrap());
    assert!(said.contains("another base"), "{said}");
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat()
}

#[test]
fn what_differs_can_be_taken_out_and_put_in_again() {
    let disk = Disk::new();
    let server = disk.serve(&[]);
    let mut client = disk.client();
    assert!(
        client.ask(WRITE, 100, 5000, &[0x55; 5000]) && client.ask(6, 65536, 8192, &[]) && client.settle(0)
    );
    let seen = client.read_all();
    server.end();
    let diff = disk.dir.path().join("disk.diff");
    let diff = diff.to_str().expect("a path in UTF-8");
    let output = disk.hearth("diff", &["--out", diff]).output().unwrap();
    assert!(
        text(&output).contains("8192 bytes of data and 8192 bytes of zeroes differ"),
        "{}",
        text(&output)
    );
    let other = Disk { overlay: disk.dir.path().join("other"), ..Disk::new() };
    let output = other.hearth("apply", &["--diff", diff]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let server = other.serve(&["--read-only"]);
    assert!(other.client().read_all() == seen);
    server.end();

    // A diff that was cut short makes no disk.
    let whole = std::fs::read(diff).unwrap();
    std::fs::write(diff, &whole[..whole.len() - 30]).unwrap();
    let third = Disk { overlay: disk.dir.path().join("third"), ..Disk::new() };
    let output = third.hearth("apply", &["--diff", diff]).output().unwrap();
    assert!(!output.status.success() && !third.overlay.exists(), "{}", text(&output));
}

#[test]
fn what_cannot_be_served_is_refused_with_what_to_do() {
    let disk = Disk::new();
    let server = disk.serve(&[]);
    let second = disk.hearth("serve", &["--socket", "/nowhere/socket"]).output().unwrap();
    assert!(
        text(&second).contains("in use") && text(&second).contains("stop the sandbox"),
        "{}",
        text(&second)
    );
    server.end();
    std::fs::write(&disk.base, vec![0xcc; BLOCKS * BLOCK]).unwrap();
    let other_base = disk.hearth("serve", &["--socket", "/nowhere/socket"]).output().unwrap();
    assert_eq!(other_base.status.code(), Some(2));
    assert!(text(&other_base).contains("made above another base"), "{}", text(&other_base));
    let file = Path::new("/nowhere/disk.img");
    let absent = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["block", "serve", "--socket", "/nowhere/socket", "--file"])
        .arg(file)
        .output()
        .unwrap();
    assert!(!absent.status.success() && text(&absent).contains("/nowhere/disk.img"), "{}", text(&absent));
}
