//! `hearth.v1.TemplateService`: the template library behind the API. Builds run on threads that may wait;
//! ending the call ends the build.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::Stream;
use hearth_api::v1;
use hearth_api::v1::create_template_request::Source as SourceMessage;
use hearth_api::v1::template_service_server::TemplateService;
use hearth_core::host::Host;
use hearth_core::id::TemplateName;
use hearth_node::EngineError;
use hearth_node::images::template::{Options, Source, TarInput};
use hearth_node::images::{Job, Progress, Store, template};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::Node;
use super::convert::{self, parse};

type Reply<T> = Result<Response<T>, Status>;
type CreateMessage = Result<v1::CreateTemplateProgress, Status>;

/// The service over one node.
pub(crate) struct Templates<H>(pub(crate) Arc<Node<H>>);

impl<H: Host> Templates<H> {
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, Status> {
        let dir = self.0.engine.config().store_dir.clone();
        let call = async move {
            let work = move || work(&Store::open(&dir)?);
            let joined = tokio::task::spawn_blocking(work).await;
            joined.unwrap_or_else(|e| Err(EngineError::Failed(format!("the call's thread failed: {e}"))))
        };
        self.0.call(call).await
    }
}

fn source(message: Option<SourceMessage>) -> Result<Source<'static>, EngineError> {
    let path = |text: String| {
        let path = PathBuf::from(&text);
        match path.is_absolute() {
            true => Ok(path),
            false => Err(EngineError::Invalid(format!("{text:?} is not an absolute path on the node"))),
        }
    };
    Ok(match message {
        Some(SourceMessage::Directory(dir)) => Source::Directory(path(dir)?),
        Some(SourceMessage::Tar(tar)) => Source::Tar(TarInput::File(path(tar)?)),
        Some(SourceMessage::Image(image)) => Source::Image(path(image)?),
        Some(SourceMessage::Debian(d)) => Source::Debian { suite: d.suite, include: d.include },
        Some(SourceMessage::KernelOnly(_)) => Source::KernelOnly,
        None => return Err(EngineError::Invalid("no source given for the template".into())),
    })
}

#[tonic::async_trait]
impl<H: Host> TemplateService for Templates<H> {
    type CreateTemplateStream = Pin<Box<dyn Stream<Item = CreateMessage> + Send>>;

    async fn create_template(
        &self,
        request: Request<v1::CreateTemplateRequest>,
    ) -> Reply<Self::CreateTemplateStream> {
        let request = request.into_inner();
        let status = |e: EngineError| convert::status(&e);
        let name: TemplateName = parse(&request.name).map_err(status)?;
        let source = source(request.source).map_err(status)?;
        let reads_files = matches!(source, Source::Directory(_) | Source::Tar(_) | Source::Image(_));
        if reads_files && !self.0.has_token {
            // Without a token every local user reaches this port, and this daemon reads as root.
            return Err(Status::failed_precondition(
                "files of the node are read on request only where a token is set (HEARTH_TOKEN); as root, \
                 `hearth template create` on the node needs none",
            ));
        }
        let kernel = match request.kernel.as_str() {
            "" => None,
            kernel => Some(parse(kernel).map_err(status)?),
        };
        let options = Options { kernel, force: request.force, size_mib: None };
        let dir = self.0.engine.config().store_dir.clone();
        let (out, messages) = mpsc::channel::<CreateMessage>(8);
        let stop = Arc::new(AtomicBool::new(false));

        let (closed, ended) = (out.clone(), Arc::clone(&stop));
        let (done, finished) = tokio::sync::oneshot::channel::<()>();
        self.0.spawn(async move {
            tokio::select! {
                () = closed.closed() => ended.store(true, Ordering::Relaxed),
                _ = finished => {}
            }
        });
        let build = tokio::task::spawn_blocking(move || {
            let last = build(&dir, &name, source, &options, &stop, &out);
            // Nobody may be listening any more; the build then ended as stopped and left nothing.
            drop(out.blocking_send(last));
            drop(done);
        });
        self.0.spawn(async move {
            if let Err(e) = build.await {
                tracing::error!("a template build's thread failed: {e}");
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }

    async fn list_templates(&self, _: Request<v1::ListTemplatesRequest>) -> Reply<v1::ListTemplatesResponse> {
        let listing = self.blocking(|store| Ok(template::list(store)?)).await?;
        for broken in listing.broken {
            tracing::warn!("a template cannot be used: {broken}");
        }
        let templates = listing.found.iter().map(convert::template).collect();
        Ok(Response::new(v1::ListTemplatesResponse { templates }))
    }

    async fn delete_template(
        &self,
        request: Request<v1::DeleteTemplateRequest>,
    ) -> Reply<v1::DeleteTemplateResponse> {
        let name: TemplateName = parse(&request.into_inner().name).map_err(|e| convert::status(&e))?;
        self.blocking(move |store| {
            let go_on = AtomicBool::new(false);
            Ok(template::remove(store, &name, &Job::quiet(&go_on))?)
        })
        .await?;
        Ok(Response::new(v1::DeleteTemplateResponse {}))
    }
}

fn build(
    dir: &std::path::Path,
    name: &TemplateName,
    source: Source<'static>,
    options: &Options,
    stop: &AtomicBool,
    out: &mpsc::Sender<CreateMessage>,
) -> CreateMessage {
    let progress = |p: Progress<'_>| {
        let build =
            v1::BuildProgress { step: p.step.to_owned(), done: p.done, total: p.total.unwrap_or_default() };
        let message = v1::CreateTemplateProgress {
            progress: Some(v1::create_template_progress::Progress::Build(build)),
        };
        // A slow listener misses a few of many such messages.
        drop(out.try_send(Ok(message)));
    };
    let made = Store::open(dir).and_then(|store| {
        template::create(&store, name, source, options, &Job { progress: &progress, stop })
    });
    match made {
        Ok(made) => Ok(v1::CreateTemplateProgress {
            progress: Some(v1::create_template_progress::Progress::Template(convert::template(&made))),
        }),
        Err(e) => Err(convert::status(&e.into())),
    }
}
