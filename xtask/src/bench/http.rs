//! HTTP/1.1 as plain as a supervisor speaks it: one connection kept open, `GET` only, bodies of known length.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How long an answer may take. Far more than any target, so that a slow answer is measured, not lost.
const WITHIN: Duration = Duration::from_secs(30);
/// No page of the daemon is larger.
const LARGEST: usize = 16 << 20;

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Status code.
    pub(crate) code: u16,
    /// As text.
    pub(crate) body: String,
}

/// One open connection.
#[derive(Debug)]
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects; refused at once if nobody listens.
    pub(crate) fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, WITHIN)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(WITHIN))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Asks and reads the whole answer.
    pub(crate) fn get(&mut self, path: &str) -> Result<Answer> {
        self.0.get_mut().write_all(format!("GET {path} HTTP/1.1\r\nHost: node\r\n\r\n").as_bytes())?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let code = line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let code = code.with_context(|| format!("GET {path}: no status in {line:?}"))?;
        let mut length: Option<usize> = None;
        let mut chunked = false;
        loop {
            line.clear();
            self.0.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().ok();
            }
            chunked |= name.eq_ignore_ascii_case("transfer-encoding") && value.contains("chunked");
        }
        let body =
            if chunked { self.chunks()? } else { self.bytes(length.context("an answer without a length")?)? };
        Ok(Answer { code, body: String::from_utf8_lossy(&body).into_owned() })
    }

    fn bytes(&mut self, length: usize) -> Result<Vec<u8>> {
        anyhow::ensure!(length <= LARGEST, "an answer of {length} bytes");
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        Ok(body)
    }

    fn chunks(&mut self) -> Result<Vec<u8>> {
        let mut body = vec![];
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line)?;
            let length = usize::from_str_radix(line.trim_end(), 16).context("length of a chunk")?;
            body.extend(self.bytes(length)?);
            self.bytes(2)?;
            if length == 0 {
                return Ok(body);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn answers_are_read_one_after_the_other_on_one_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let answers: [&[u8]; 2] = [
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 3\r\n\r\nno\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nyes!\r\n1\r\n\n\r\n0\r\n\r\n",
            ];
            for answer in answers {
                let mut head = BufReader::new(&stream);
                let mut line = String::new();
                while head.read_line(&mut line).unwrap() > 2 {
                    line.clear();
                }
                stream.write_all(answer).unwrap();
            }
        });
        let mut connection = Connection::open(address).unwrap();
        let first = connection.get("/health").unwrap();
        assert_eq!((first.code, first.body.as_str()), (503, "no\n"));
        let second = connection.get("/health").unwrap();
        assert_eq!((second.code, second.body.as_str()), (200, "yes!\n"));
        server.join().unwrap();
    }
}
