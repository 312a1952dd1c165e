//! `hearth.v1.EventService`: the journal to whoever watches it.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use hearth_api::v1;
use hearth_api::v1::event_service_server::EventService;
use hearth_core::event::Event;
use hearth_core::host::Host;
use hearth_node::events::{From, Item, Reader};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::Node;

/// Messages on their way to one client; behind them it is the reader that waits.
const AHEAD: usize = 64;

type Messages = Pin<Box<dyn Stream<Item = Result<v1::EventMessage, Status>> + Send>>;

/// The service over one node.
pub(crate) struct EventStreams<H>(pub(crate) Arc<Node<H>>);

#[tonic::async_trait]
impl<H: Host> EventService for EventStreams<H> {
    type WatchStream = Messages;

    async fn watch(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchEventsRequest { since, follow } = request.into_inner();
        let from = match since {
            Some(seq) => From::After(seq),
            None if follow => From::Now,
            None => From::Oldest,
        };
        let reader = tokio::select! {
            reader = self.0.engine.events().read(from) => reader,
            () = self.0.ended.cancelled() => return Err(Status::unavailable("the daemon ends")),
        };
        let reader = reader.map_err(|e| Status::out_of_range(e.to_string()))?;
        let (out, messages) = mpsc::channel(AHEAD);
        let ended = self.0.ended.clone();
        self.0.spawn(async move {
            tokio::select! {
                () = pass_on(reader, follow, &out) => {}
                () = ended.cancelled() => {}
                () = out.closed() => {}
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

async fn pass_on(mut reader: Reader, follow: bool, out: &mpsc::Sender<Result<v1::EventMessage, Status>>) {
    loop {
        let item = match follow {
            true => reader.next().await.map(Some),
            false => reader.ready().await,
        };
        let item = match item {
            Ok(Some(item)) => Ok(message(item)),
            Ok(None) => return,
            Err(e) => Err(Status::unavailable(format!("the journal cannot be read: {e}"))),
        };
        let last = item.is_err();
        if out.send(item).await.is_err() || last {
            return;
        }
    }
}

fn message(item: Item) -> v1::EventMessage {
    use v1::event_message::Message;
    let message = match item {
        Item::Gap { first, last } => Message::Gap(v1::Gap { first, last }),
        Item::Event(event) => {
            let Event { seq, at_ms, kind, sandbox, name, reason, evidence } = Arc::unwrap_or_clone(event);
            let evidence = evidence.into_iter().collect();
            Message::Event(v1::Event { seq, at_ms, kind, sandbox, name, reason, evidence })
        }
    };
    v1::EventMessage { message: Some(message) }
}
