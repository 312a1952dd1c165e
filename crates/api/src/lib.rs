//! gRPC definitions of hearth: what `proto/` says, as Rust. [`v1`] is the contract with clients, [`shim`]
//! the one between daemon and shim.

/// Generated code, nested as its packages are since it refers across them.
#[allow(missing_docs, unreachable_pub, clippy::all)]
mod hearth {
    pub mod v1 {
        tonic::include_proto!("hearth.v1");
    }
    pub mod shim {
        pub mod v1 {
            tonic::include_proto!("hearth.shim.v1");
        }
    }
}

pub use hearth::shim::v1 as shim;
pub use hearth::v1;

/// Metadata of the status that ends an `Exec` whose command could not be started: what a shell's `$?` would
/// be, 127 for a program that is not there, 126 for one that cannot be run.
pub const EXIT_STATUS_METADATA: &str = "hearth-exit-status";

/// All descriptors, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("descriptors");

/// Domain of the `google.rpc.ErrorInfo` in an `UNAVAILABLE` answer to a create that the node does not want at
/// present; its reason is what is wanted instead: `STANDBY` or `DRAINING`.
pub const ERROR_DOMAIN: &str = "hearth";
