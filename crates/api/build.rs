//! Compiles the .proto files with protox, so that no protoc is needed.

use std::io::Error;
use std::path::PathBuf;

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "hearth/v1/events.proto",
        "hearth/v1/exec.proto",
        "hearth/v1/sandbox.proto",
        "hearth/v1/usage.proto",
        "hearth/v1/node.proto",
        "hearth/v1/template.proto",
        "hearth/shim/v1/shim.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"]).map_err(Error::other)?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().build_transport(true).compile_fds(descriptors)?;
    Ok(())
}
