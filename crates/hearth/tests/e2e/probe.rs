//! What a supervisor asks: one HTTP request from inside a test's network namespace.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use hearth_testkit::netns::Throwaway;

/// Status and body of `GET path` on a loopback port, `None` while nobody answers.
pub fn get(netns: &Throwaway, port: u16, path: &str) -> Option<(u16, String)> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    // A socket stays in the namespace it was made in.
    let stream = hearth_host::net::netns::enter(&netns.path(), || Ok(TcpStream::connect(address)));
    let mut stream = stream.unwrap().ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}
