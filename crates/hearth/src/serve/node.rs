//! `hearth.v1.NodeService`. Answers from the first moment, whatever the engine does.

use std::sync::Arc;

use hearth_api::v1;
use hearth_api::v1::node_service_server::NodeService;
use hearth_core::host::Host;
use tonic::{Request, Response, Status};

use super::Node;

/// The service over one node.
pub(crate) struct NodeInfo<H>(pub(crate) Arc<Node<H>>);

#[tonic::async_trait]
impl<H: Host> NodeService for NodeInfo<H> {
    async fn info(&self, _: Request<v1::InfoRequest>) -> Result<Response<v1::InfoResponse>, Status> {
        let node = &self.0;
        let config = node.engine.config();
        let report = node.status.subscribe().borrow().clone();
        Ok(Response::new(v1::InfoResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            instance: config.layout.instance.to_string(),
            status: report.status.as_str().into(),
            reason: report.reason,
            pid: std::process::id(),
            started_at_ms: node.started_at_ms,
            state_dir: config.state_dir.display().to_string(),
            run_dir: config.run_dir.display().to_string(),
            vmm: config.vmms.auto.to_string(),
            vmm_reason: config.vmms.auto_reason.clone(),
            sandboxes: u32::try_from(node.engine.sandbox_count()).unwrap_or(u32::MAX),
            slots: node.engine.slot_counts().into_iter().collect(),
            slot_capacity: config.layout.cidr.slot_capacity(),
        }))
    }
}
