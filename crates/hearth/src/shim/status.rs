//! Errors of machine and agent as gRPC statuses. Nothing is retried here, and no text decides a code.

use hearth_api::EXIT_STATUS_METADATA;
use hearth_core::agent::{AgentError, AgentErrorKind};
use hearth_core::exit::ExitRecord;
use hearth_vmm::agent::AgentClientError;
use hearth_vmm::machine::MachineError;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

/// The sandbox ended before or during the call.
pub(super) fn exited(record: &ExitRecord) -> Status {
    Status::unavailable(MachineError::Exited(record.clone()).to_string())
}

/// A machine's error, but for the end of the sandbox.
pub(super) fn of_machine(error: &MachineError) -> Status {
    let code = match error {
        MachineError::Exited(_) => Code::Unavailable,
        MachineError::NotRunning => Code::FailedPrecondition,
        MachineError::Vmm(_) | MachineError::Lost => Code::Internal,
    };
    Status::new(code, chain(error))
}

/// An agent's error; [`AgentClientError::Closed`] only if the VM goes on.
pub(super) fn of_agent(error: &AgentClientError) -> Status {
    let code = match error {
        AgentClientError::Agent(e) => match e.kind {
            AgentErrorKind::NotFound | AgentErrorKind::NoSuchExec => Code::NotFound,
            AgentErrorKind::NotExecutable => Code::PermissionDenied,
            AgentErrorKind::Invalid => Code::InvalidArgument,
            AgentErrorKind::Failed => Code::Internal,
        },
        AgentClientError::TooLarge { .. } => Code::InvalidArgument,
        AgentClientError::Busy { .. } => Code::ResourceExhausted,
        AgentClientError::Timeout { .. } | AgentClientError::HandshakeTimeout { .. } => {
            Code::DeadlineExceeded
        }
        AgentClientError::Closed { .. } | AgentClientError::Transport(_) => Code::Unavailable,
        AgentClientError::InputClosed => Code::FailedPrecondition,
        AgentClientError::Protocol { .. } => Code::Internal,
    };
    let mut status = Status::new(code, chain(error));
    let exit_status = match error {
        AgentClientError::Agent(AgentError { kind: AgentErrorKind::NotFound, .. }) => Some(127),
        AgentClientError::Agent(AgentError { kind: AgentErrorKind::NotExecutable, .. }) => Some(126),
        _ => None,
    };
    if let Some(number) = exit_status {
        status.metadata_mut().insert(EXIT_STATUS_METADATA, MetadataValue::from(number));
    }
    status
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_not_found_with_the_agents_words() {
        let agent = |kind| {
            let message = "nosuch: not in PATH".to_owned();
            of_agent(&AgentClientError::Agent(AgentError { kind, message }))
        };
        let status = agent(AgentErrorKind::NotFound);
        assert_eq!((status.code(), status.message()), (Code::NotFound, "nosuch: not in PATH"));
        assert_eq!(status.metadata().get(EXIT_STATUS_METADATA).unwrap(), "127");
        assert_eq!(agent(AgentErrorKind::NotExecutable).code(), Code::PermissionDenied);
        assert_eq!(agent(AgentErrorKind::Invalid).code(), Code::InvalidArgument);
    }
}
