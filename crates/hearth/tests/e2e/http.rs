//! One HTTP request from inside a test's network namespace.

use hearth_testkit::netns::Throwaway;

/// Status and body of `GET path` on a loopback port, `None` while nobody answers. By bash, which can open a
/// connection without a program that may not be installed.
pub fn get(netns: &Throwaway, port: u16, path: &str) -> Option<(u16, String)> {
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{port} && printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3 && timeout 20 cat <&3"
    );
    let out = netns.command("bash").args(["-c", &script]).output().unwrap();
    let answer = String::from_utf8(out.stdout).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}
