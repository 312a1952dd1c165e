//! Spans of what the engine does, one per step. Without a collector the global provider is one that does nothing,
//! and this costs next to nothing.

pub use opentelemetry::Context as TraceContext;
use opentelemetry::trace::{Span as _, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{KeyValue, global};

/// Begins a span below `parent`. It ends with [`end`], or when the last clone of the context is dropped.
pub(crate) fn begin(name: impl Into<std::borrow::Cow<'static, str>>, parent: &TraceContext) -> TraceContext {
    let span = global::tracer("hearth").start_with_context(name, parent);
    parent.with_span(span)
}

/// Notes the sandbox it is about.
pub(crate) fn about(span: &TraceContext, record: &hearth_core::record::Record) {
    span.span().set_attribute(KeyValue::new("hearth.sandbox", record.id.to_string()));
    span.span().set_attribute(KeyValue::new("hearth.name", record.name.to_string()));
}

/// Notes a number.
pub(crate) fn count(span: &TraceContext, name: &'static str, n: usize) {
    span.span().set_attribute(KeyValue::new(name, i64::try_from(n).unwrap_or(i64::MAX)));
}

/// Ends a span with how it went.
pub(crate) fn end<T, E: std::fmt::Display>(span: &TraceContext, result: &Result<T, E>) {
    if let Err(e) = result {
        span.span().set_status(Status::error(e.to_string()));
    }
    span.span().end();
}

/// Runs `work` within a span of its own.
///
/// # Errors
/// From the work.
pub async fn within<T, E: std::fmt::Display>(
    name: impl Into<std::borrow::Cow<'static, str>>,
    parent: &TraceContext,
    work: impl AsyncFnOnce(TraceContext) -> Result<T, E>,
) -> Result<T, E> {
    let span = begin(name, parent);
    let result = work(span.clone()).await;
    end(&span, &result);
    result
}

/// A span that ends when this is dropped, for work that is a stream.
#[derive(Debug)]
pub struct Open(opentelemetry::global::BoxedSpan);

impl Open {
    /// Begins it below `parent`, about the sandbox a client named.
    #[must_use]
    pub fn begin(name: &'static str, parent: &TraceContext, sandbox: &str) -> Self {
        let mut span = global::tracer("hearth").start_with_context(name, parent);
        span.set_attribute(KeyValue::new("hearth.sandbox", sandbox.to_owned()));
        Self(span)
    }

    /// The context for spans below it.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        TraceContext::new().with_remote_span_context(self.0.span_context().clone())
    }

    /// Notes why it did not go well.
    pub fn failed(&mut self, why: &str) {
        self.0.set_status(Status::error(why.to_owned()));
    }
}
