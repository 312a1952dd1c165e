//! One command: gRPC stream ⇄ agent. Back-pressure goes end to end: a client that does not read stops the
//! command's output, a command that does not read stops the client's input, and neither holds more than a few
//! chunks here. When the caller goes away the command goes on, with its stdin ended.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use hearth_api::v1::exec_input::Input;
use hearth_api::v1::exec_output::Output;
use hearth_api::v1::{ExecExit, ExecInput, ExecOutput, ExecStart, ExecStarted};
use hearth_core::agent::{ExecRequest, TtySize};
use hearth_vmm::agent::{self, AgentClient, AgentClientError, ExecEvent};
use tokio::task::JoinSet;
use tonic::{Status, Streaming};

use super::service::Service;

/// What a caller of Exec reads.
pub(super) type OutputStream = Pin<Box<dyn Stream<Item = Result<ExecOutput, Status>> + Send>>;

/// The request of the first message, which must be a start.
pub(super) async fn first(input: &mut Streaming<ExecInput>, id: String) -> Result<ExecRequest, Status> {
    match input.message().await?.and_then(|m| m.input) {
        Some(Input::Start(start)) => request(start, id),
        _ => Err(Status::invalid_argument("the first message of Exec must be a start")),
    }
}

fn request(start: ExecStart, id: String) -> Result<ExecRequest, Status> {
    if start.argv.is_empty() {
        return Err(Status::invalid_argument("argv is empty: name a program"));
    }
    let tty = start.tty.map(|size| tty_size(&size)).transpose()?;
    // A map has no order; the agent gets a stable one.
    let mut env: Vec<(String, String)> = start.env.into_iter().collect();
    env.sort();
    Ok(ExecRequest {
        id,
        argv: start.argv,
        env,
        workdir: start.workdir,
        user: start.user,
        tty,
        stdin: start.stdin,
    })
}

/// A terminal size that fits the kernel's 16 bits.
pub(super) fn tty_size(size: &hearth_api::v1::TtySize) -> Result<TtySize, Status> {
    let fit = |n: u32| {
        u16::try_from(n).map_err(|_| Status::invalid_argument(format!("a terminal of {n} characters")))
    };
    Ok(TtySize { rows: fit(size.rows)?, cols: fit(size.cols)? })
}

/// Starts the command and answers with its output once it runs.
pub(super) async fn start(
    service: &Service,
    agent: &AgentClient,
    input: Streaming<ExecInput>,
    request: ExecRequest,
) -> Result<OutputStream, Status> {
    let exec_id = request.id.clone();
    let command = match agent.exec(request).await {
        Ok(command) => command,
        Err(e) => return Err(service.status(e).await),
    };
    // Owned by the output: the input ends with it.
    let mut tasks = JoinSet::new();
    tasks.spawn(feed(input, command.input));
    let mut running = Running { service: service.clone(), output: command.output, exec_id, _tasks: tasks };
    // A command that cannot be started fails the call itself.
    let Some(started) = running.next().await? else {
        return Err(Status::internal("the agent ended the command's stream without a word"));
    };
    let rest = futures::stream::try_unfold(running, |mut running| async move {
        let next = running.next().await?;
        Ok(next.map(|message| (message, running)))
    });
    Ok(Box::pin(futures::stream::once(async { Ok(started) }).chain(rest)))
}

struct Running {
    service: Service,
    output: agent::ExecOutput,
    exec_id: String,
    _tasks: JoinSet<()>,
}

impl Running {
    async fn next(&mut self) -> Result<Option<ExecOutput>, Status> {
        let event = match self.output.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(None),
            Err(e) => return Err(self.service.status(e).await),
        };
        let output = match event {
            ExecEvent::Started(s) => {
                Output::Started(ExecStarted { exec_id: self.exec_id.clone(), pid: s.pid })
            }
            ExecEvent::Stdout(bytes) => Output::Stdout(bytes.into()),
            ExecEvent::Stderr(bytes) => Output::Stderr(bytes.into()),
            ExecEvent::Exit(exit) => {
                Output::Exit(ExecExit { status: exit.status(), signal: exit.signal.unwrap_or(0) })
            }
        };
        Ok(Some(ExecOutput { output: Some(output) }))
    }
}

/// Moves the caller's input to the command until either ends. Dropping the input's end ends stdin, whether
/// the caller said so, closed its side, or went away.
async fn feed(mut from: Streaming<ExecInput>, to: agent::ExecInput) {
    loop {
        let chunk = match from.message().await {
            Ok(Some(ExecInput { input: Some(Input::Stdin(chunk)) })) => chunk,
            Ok(Some(ExecInput { input: Some(Input::StdinEnd(_)) }) | None) => return to.end(),
            Ok(Some(ExecInput { input: None | Some(Input::Start(_)) })) => {
                tracing::debug!("a message that is no input was skipped");
                continue;
            }
            Err(e) => {
                tracing::debug!(error = %e, "the caller's input ended");
                return;
            }
        };
        match to.write(chunk.into()).await {
            Ok(()) => {}
            // The command ended: what is left has no reader, as with a pipe.
            Err(AgentClientError::InputClosed) => return,
            Err(e) => {
                tracing::debug!(error = %e, "input of a command");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_checked_and_its_environment_sorted() {
        let env = [("B", "2"), ("A", "1")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let start = ExecStart { argv: vec!["ls".into()], env: env.into(), ..Default::default() };
        let made = request(start.clone(), "x1".into()).unwrap();
        assert_eq!(made.env[0].0, "A");
        assert_eq!(
            request(ExecStart::default(), "x".into()).unwrap_err().code(),
            tonic::Code::InvalidArgument
        );
        let tty = Some(hearth_api::v1::TtySize { rows: 70_000, cols: 80 });
        assert_eq!(
            request(ExecStart { tty, ..start }, "x".into()).unwrap_err().code(),
            tonic::Code::InvalidArgument
        );
    }
}
