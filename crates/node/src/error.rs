//! What the engine answers when it does not do what was asked.

use hearth_core::host::HostError;
use hearth_core::steps::Step;

use crate::images;
use crate::status::Desired;

/// A request to the engine failed. Each variant is one reaction of a caller.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The engine has not finished its start; ask again.
    #[error("the node is starting: {0}")]
    Starting(String),
    /// The node takes no new sandboxes.
    #[error("{0}")]
    Closed(String),
    /// The operator wants no new sandboxes here at present.
    #[error("the node takes no new sandboxes: {why}")]
    NotActive {
        /// What is wanted instead.
        desired: Desired,
        /// In words, with the way back.
        why: &'static str,
    },
    /// Bad input; nothing was made.
    #[error("{0}")]
    Invalid(String),
    /// No such thing.
    #[error("{0}")]
    NotFound(String),
    /// The name is taken.
    #[error("{0}")]
    AlreadyExists(String),
    /// A bounded resource is used up.
    #[error("{0}")]
    Exhausted(String),
    /// What was asked does not fit the present state or the host.
    #[error("{0}")]
    Precondition(String),
    /// The caller went away or deleted the sandbox while it was made.
    #[error("{0}")]
    Cancelled(String),
    /// A step of creation failed; what was made was released.
    #[error("creation of sandbox {name} failed at step {step}: {why}")]
    Step {
        /// Which sandbox.
        name: String,
        /// Where.
        step: Step,
        /// What failed and what to do.
        why: String,
    },
    /// A release did not finish; it is retried.
    #[error("sandbox {name} is stuck: {why}; it is retried, see `hearth inspect {name}`")]
    Stuck {
        /// Which sandbox.
        name: String,
        /// What is left and why.
        why: String,
    },
    /// The sandbox ended while something was asked of it.
    #[error("{0}")]
    Gone(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl From<HostError> for EngineError {
    fn from(e: HostError) -> Self {
        EngineError::Failed(chain(&e))
    }
}

impl From<images::ImageError> for EngineError {
    fn from(e: images::ImageError) -> Self {
        use images::ErrorClass;
        let text = chain(&e);
        match e.class() {
            ErrorClass::NotFound => EngineError::NotFound(text),
            ErrorClass::Exists => EngineError::AlreadyExists(text),
            ErrorClass::Busy => EngineError::Precondition(text),
            ErrorClass::Invalid => EngineError::Invalid(text),
            ErrorClass::Stopped => EngineError::Cancelled(text),
            ErrorClass::Host => EngineError::Failed(text),
        }
    }
}

/// An error with its causes in one line; each cause once.
#[must_use]
pub fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
