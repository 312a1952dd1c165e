//! `hearth shim --dir RUN_DIR`: the process around one VM. It reads its spec, binds its socket, serves
//! [`ShimService`](hearth_api::shim::shim_service_server::ShimService), and ends when the VM has ended. It
//! needs no daemon once it runs, and must not care whether one is there.
//!
//! The runtime has one thread, the main one, because the VMM's parent-death signal follows the thread that
//! started it: everything here, the machine included, runs inside the one `block_on`. Nothing that starts a
//! VMM may move to `spawn_blocking`.

mod exec;
mod service;
mod status;

use std::io::IsTerminal as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hearth_api::shim::shim_service_server::ShimServiceServer;
use hearth_core::shim::{SHIM_PROTOCOL, SHIM_SOCKET, SHIM_SPEC_FILE, ShimSpec};
use hearth_vmm::backend::check_socket_path;
use hearth_vmm::machine::{Machine, MachineHandle};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use service::Service;

/// After the VM's end: time for callers to fetch their last answer.
const LINGER: Duration = Duration::from_secs(1);

/// Runs the shim of `dir` until its VM has ended. Must be called on the main thread, outside any runtime.
///
/// # Errors
/// If the spec cannot be read, is of a newer protocol, or the socket cannot be bound. How the VM ended is no
/// error: it is in the exit record.
pub(crate) fn run(dir: &Path) -> anyhow::Result<ExitCode> {
    let spec = read_spec(dir)?;
    leave_oom_shield(Path::new("/proc/self/oom_score_adj"))?;
    // Standard error is the shim's log file. A second subscriber means that the caller has set up its own.
    let subscriber = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_max_level(tracing::Level::INFO);
    if subscriber.try_init().is_err() {
        tracing::debug!("logging was set up by the caller");
    }
    // All tasks are polled below this line on this thread, so every message carries the id.
    let _span = tracing::info_span!("shim", sandbox = %spec.id).entered();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    let served = runtime.block_on(serve(dir, spec));
    // What a store's file system or a name server still keeps must not keep us: nobody waits for its answer.
    runtime.shutdown_timeout(LINGER);
    served?;
    Ok(ExitCode::SUCCESS)
}

/// A daemon may be shielded from the kernel's OOM killer, and the shield is inherited. A guest must not have
/// it: the kernel would end everybody else first.
fn leave_oom_shield(file: &Path) -> anyhow::Result<()> {
    let score = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    if score.trim().parse().is_ok_and(|score: i32| score < 0) {
        std::fs::write(file, "0").with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

fn read_spec(dir: &Path) -> anyhow::Result<ShimSpec> {
    let path = dir.join(SHIM_SPEC_FILE);
    let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    // The version first: a newer spec may not parse as ours.
    #[derive(serde::Deserialize)]
    struct Version {
        protocol: u32,
    }
    let Version { protocol } = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} has no protocol version", path.display()))?;
    if protocol > SHIM_PROTOCOL {
        bail!(
            "{} is of shim protocol {protocol}, this shim ({}) knows up to {SHIM_PROTOCOL}: \
             start the shim from the same release as the daemon",
            path.display(),
            env!("CARGO_PKG_VERSION")
        );
    }
    serde_json::from_slice(&bytes).with_context(|| format!("read {}", path.display()))
}

async fn serve(dir: &Path, spec: ShimSpec) -> anyhow::Result<()> {
    let socket = dir.join(SHIM_SOCKET);
    let listener = bind(&socket)?;
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let id = spec.id.clone();
    let (machine, handle) = Machine::new(spec);
    let done = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let server = tonic::transport::Server::builder()
        .add_service(ShimServiceServer::new(Service::new(id, handle.clone())))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), done.clone().cancelled_owned());
    tasks.spawn(async move {
        // The VM goes on without its server: the daemon sees the silence and ends the cgroup if it must.
        if let Err(e) = server.await {
            tracing::error!(error = %e, "the shim's server failed");
        }
    });
    let life = machine.run();
    tokio::pin!(life);
    loop {
        tokio::select! {
            _ = &mut life => break,
            _ = terminate.recv() => stop_now(&mut tasks, handle.clone(), "SIGTERM"),
            _ = interrupt.recv() => stop_now(&mut tasks, handle.clone(), "SIGINT"),
        }
    }
    done.cancel();
    let answered = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(LINGER, answered).await.is_err() {
        tracing::info!(after = ?LINGER, "a caller did not fetch its last answer");
    }
    remove_socket(&socket);
    Ok(())
}

fn stop_now(tasks: &mut JoinSet<()>, handle: MachineHandle, why: &'static str) {
    tracing::info!(signal = why, "stopping");
    tasks.spawn(async move {
        if let Err(e) = handle.stop(Duration::ZERO).await {
            tracing::error!(error = %e, "stop");
        }
    });
}

/// Binds a socket, for its owner only. A socket that nobody serves gives way.
pub(crate) fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt as _;
    check_socket_path(path)?;
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        bail!("somebody else serves {}", path.display());
    }
    remove_socket(path);
    let listener = UnixListener::bind(path).with_context(|| format!("bind {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("set the mode of {}", path.display()))?;
    Ok(listener)
}

/// Removes a socket that this process served.
pub(crate) fn remove_socket(path: &Path) {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(error = %e, file = %path.display(), "the socket is left");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
