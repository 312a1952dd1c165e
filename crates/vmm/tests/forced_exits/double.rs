//! The double: this test program executed again, as a VMM with Firecracker's API and a metrics FIFO, and no guest.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where its API socket is to be.
const SOCKET: &str = "HEARTH_TEST_DOUBLE_SOCKET";
/// File beside the socket that says how it behaves; absent: well.
pub const MODE: &str = "mode";

/// A program that the machine starts as if it were Firecracker.
pub fn program(dir: &Path) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let script = dir.join("double.sh");
    // The machine's arguments are Firecracker's; the test harness has its own.
    let text = format!(
        "#!/bin/sh\n{SOCKET}=\"$2\" exec {own:?} --exact double::double --nocapture --test-threads=1\n"
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    script
}

#[test]
fn double() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let listener = UnixListener::bind(&socket).unwrap();
    let mode = socket.with_file_name(MODE);
    let mut fifo = None;
    for stream in listener.incoming() {
        serve(stream.unwrap(), &mode, &mut fifo);
    }
}

/// One connection, one request: that is how the machine asks. A caller that went away is no matter.
fn serve(stream: UnixStream, mode: &Path, fifo: &mut Option<std::fs::File>) {
    let mut reader = BufReader::new(&stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        match reader.read_line(&mut line) {
            Ok(n) if n > 2 => {}
            _ => break,
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    if head.is_empty() || reader.read_exact(&mut body).is_err() {
        return;
    }
    let body = String::from_utf8(body).unwrap();
    if head.starts_with("PUT /metrics ") {
        let path = body.split('"').nth(3).unwrap();
        *fifo = Some(OpenOptions::new().read(true).write(true).open(path).unwrap());
    }
    let mode = if body.contains("FlushMetrics") { std::fs::read_to_string(mode).ok() } else { None };
    let answer = match mode.as_deref() {
        Some("500") => "HTTP/1.1 500 \r\nContent-Length: 23\r\n\r\n{\"fault_message\":\"full\"}".to_owned(),
        Some("close") => return,
        Some("hang") => {
            // Until the caller has had enough.
            drop(reader.read(&mut [0]));
            return;
        }
        other => {
            if body.contains("FlushMetrics") {
                let line = b"{\"utc_timestamp_ms\":1,\"block\":{\"read_bytes\":512,\"read_count\":1}}\n";
                fifo.as_mut().unwrap().write_all(line).unwrap();
            }
            if other == Some("slow") {
                std::thread::sleep(Duration::from_secs(1));
            }
            "HTTP/1.1 204 \r\n\r\n".to_owned()
        }
    };
    drop((&stream).write_all(answer.as_bytes()));
}
