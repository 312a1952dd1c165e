//! QEMU's monitor protocol (QMP): one JSON object a line. A greeting, then one answer for each command, with
//! events in between at any time.
//!
//! There is no task: answers are read by the call that waits for them, events while nothing else is to do
//! ([`Qmp::event`], which may be dropped at any point). Each call has a deadline; a call that was dropped or
//! timed out leaves an answer behind, which the next one tells from its own by the id.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::backend::VmmEvent;

/// Longest line read; the longest that our commands cause is a few KiB.
const MAX_LINE: usize = 256 * 1024;
/// Events kept until somebody asks.
const MAX_EVENTS: usize = 16;

/// A monitor call that failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The connection ended.
    #[error("{command}: the connection ended")]
    Broken {
        /// Command.
        command: &'static str,
        /// How.
        #[source]
        source: io::Error,
    },
    /// The answer to a question has another form than we know.
    #[error("{command}: the answer is not understood")]
    Answer {
        /// Command.
        command: &'static str,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// QEMU said something that is not QMP.
    #[error("not understood: {line}")]
    NotUnderstood {
        /// The line.
        line: String,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// It answered no.
    #[error("{command}: refused: {desc}")]
    Refused {
        /// Command.
        command: &'static str,
        /// Its words.
        desc: String,
    },
    /// It did not answer.
    #[error("{command}: no answer within {after:?}")]
    Deadline {
        /// Command.
        command: &'static str,
        /// The limit.
        after: Duration,
    },
}

/// Any line QEMU sends.
#[derive(Debug, Deserialize, PartialEq)]
struct Line {
    #[serde(rename = "QMP")]
    greeting: Option<serde_json::Value>,
    event: Option<String>,
    #[serde(default)]
    data: EventData,
    id: Option<u64>,
    #[serde(rename = "return", default)]
    answer: serde_json::Value,
    error: Option<Refusal>,
}

/// The fields of events that we look at.
#[derive(Debug, Default, Deserialize, PartialEq)]
struct EventData {
    reason: Option<String>,
}

#[derive(Debug, Deserialize, PartialEq)]
struct Refusal {
    desc: String,
}

/// A monitor connection.
#[derive(Debug)]
pub(super) struct Qmp {
    stream: UnixStream,
    buffer: Vec<u8>,
    next_id: u64,
    events: VecDeque<VmmEvent>,
    ended: bool,
}

impl Qmp {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { stream, buffer: Vec::new(), next_id: 1, events: VecDeque::new(), ended: false }
    }

    /// Waits for the greeting and leaves negotiation mode.
    pub(super) async fn start(&mut self, limit: Duration) -> Result<(), QmpError> {
        let command = "greeting";
        let greeting = async {
            while self.line(command).await?.greeting.is_none() {}
            Ok(())
        };
        timeout(limit, greeting).await.unwrap_or(Err(QmpError::Deadline { command, after: limit }))?;
        self.execute("qmp_capabilities", limit).await
    }

    /// Runs a command without arguments whose answer says nothing.
    pub(super) async fn execute(&mut self, command: &'static str, limit: Duration) -> Result<(), QmpError> {
        self.ask(command, limit).await.map(drop)
    }

    /// Asks a question without arguments.
    pub(super) async fn query<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
        limit: Duration,
    ) -> Result<T, QmpError> {
        let answer = self.ask(command, limit).await?;
        serde_json::from_value(answer).map_err(|source| QmpError::Answer { command, source })
    }

    async fn ask(&mut self, command: &'static str, limit: Duration) -> Result<serde_json::Value, QmpError> {
        let id = self.next_id;
        self.next_id += 1;
        let talk = async {
            let text = format!("{}\n", json!({ "execute": command, "id": id }));
            self.stream
                .write_all(text.as_bytes())
                .await
                .map_err(|source| QmpError::Broken { command, source })?;
            loop {
                let line = self.line(command).await?;
                if line.id == Some(id) {
                    return match line.error {
                        Some(Refusal { desc }) => Err(QmpError::Refused { command, desc }),
                        None => Ok(line.answer),
                    };
                }
            }
        };
        timeout(limit, talk).await.unwrap_or(Err(QmpError::Deadline { command, after: limit }))
    }

    /// The next event we care about; never again once the connection ended.
    pub(super) async fn event(&mut self) -> VmmEvent {
        loop {
            if let Some(event) = self.events.pop_front() {
                return event;
            }
            if self.ended {
                return std::future::pending().await;
            }
            if let Err(e) = self.line("event").await {
                tracing::debug!(error = %e, "the monitor ended");
                self.ended = true;
            }
        }
    }

    /// Reads one line and keeps it if it is an event. Bytes of a line not yet whole stay in the buffer, so
    /// that this may be dropped.
    async fn line(&mut self, command: &'static str) -> Result<Line, QmpError> {
        let broken = |source| QmpError::Broken { command, source };
        let end = loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                break end;
            }
            if self.buffer.len() > MAX_LINE {
                return Err(broken(io::Error::new(io::ErrorKind::InvalidData, "a line without an end")));
            }
            if self.stream.read_buf(&mut self.buffer).await.map_err(broken)? == 0 {
                return Err(broken(io::ErrorKind::UnexpectedEof.into()));
            }
        };
        let text: Vec<u8> = self.buffer.drain(..=end).collect();
        let line = parse(&text)?;
        if let Some(event) = meaning(&line) {
            self.events.truncate(MAX_EVENTS - 1);
            self.events.push_back(event);
        }
        Ok(line)
    }
}

fn parse(text: &[u8]) -> Result<Line, QmpError> {
    serde_json::from_slice(text).map_err(|source| QmpError::NotUnderstood {
        line: String::from_utf8_lossy(text).trim().chars().take(200).collect(),
        source,
    })
}

fn meaning(line: &Line) -> Option<VmmEvent> {
    match line.event.as_deref()? {
        "SHUTDOWN" => {
            let reason = line.data.reason.clone().unwrap_or_else(|| "unknown".to_owned());
            Some(VmmEvent::GuestStopped { reason })
        }
        other => {
            tracing::debug!(event = other, "monitor");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}"#;
    const SECOND: Duration = Duration::from_secs(5);

    #[test]
    fn lines_as_qemu_writes_them_are_understood() {
        assert!(parse(GREETING.as_bytes()).unwrap().greeting.is_some());
        let line = parse(br#"{"return": {}, "id": 7}"#).unwrap();
        assert_eq!((line.id, line.error), (Some(7), None));
        let line = parse(br#"{"id": 8, "error": {"class": "CommandNotFound", "desc": "The command x has not been found"}}"#);
        assert_eq!(line.unwrap().error.unwrap().desc, "The command x has not been found");
        let line = parse(br#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}"#);
        assert_eq!(meaning(&line.unwrap()), Some(VmmEvent::GuestStopped { reason: "guest-reset".into() }));
        assert_eq!(meaning(&parse(br#"{"event": "STOP", "timestamp": {}}"#).unwrap()), None);
        assert!(parse(b"QEMU 7.2").unwrap_err().to_string().contains("QEMU 7.2"));
    }

    #[tokio::test]
    async fn a_late_answer_is_not_taken_for_the_next_and_events_are_kept() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::new(ours);
        theirs.write_all(format!("{GREETING}\n{{\"return\": {{}}, \"id\": 1}}\n").as_bytes()).await.unwrap();
        qmp.start(SECOND).await.unwrap();
        let slow = qmp.execute("stop", Duration::from_millis(20)).await;
        assert!(matches!(slow, Err(QmpError::Deadline { command: "stop", .. })), "{slow:?}");
        let event = r#"{"event": "SHUTDOWN", "data": {"reason": "guest-shutdown"}}"#;
        let text = format!(
            "{{\"return\": {{}}, \"id\": 2}}\n{event}\n{{\"id\": 3, \"error\": {{\"desc\": \"no\"}}}}\n"
        );
        theirs.write_all(text.as_bytes()).await.unwrap();
        let refused = qmp.execute("cont", SECOND).await;
        assert!(matches!(&refused, Err(QmpError::Refused { desc, .. }) if desc == "no"), "{refused:?}");
        drop(theirs);
        assert_eq!(qmp.event().await, VmmEvent::GuestStopped { reason: "guest-shutdown".into() });
        assert!(timeout(Duration::from_millis(20), qmp.event()).await.is_err());
        assert!(matches!(qmp.execute("cont", SECOND).await, Err(QmpError::Broken { .. })));
    }
}
