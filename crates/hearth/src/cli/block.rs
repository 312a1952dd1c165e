//! `hearth block`: looks into a disk without its VM: serves it over a unix socket, or takes out and puts in what differs from
//! its base. It needs no daemon and no root, only the files.

mod attach;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use hearth_vmm::block::nbd::{Export, Limits, Server};
use hearth_vmm::block::{
    Backend, ChunkCache, FileBackend, LEAST_CACHE, Limit, Overlay, OverlayError, Pool, RemoteBackend,
    RemoteOptions, diff,
};
use serde_json::json;
use tokio::io::{BufReader, BufWriter};
use tokio_util::sync::CancellationToken;

use super::error::{self, CliError};
use super::signals::{self, Signals};
use super::{Context, out};
use crate::shim::{bind, remove_socket};

const SERVE_EXAMPLES: &str = "\
Examples:
  hearth block serve --file disk.img --socket /run/disk.sock
  hearth block serve --base rootfs.ext4 --overlay disk.overlay --socket /run/disk.sock --read-only
  hearth block serve --url s3://images/rootfs.ext4 --cache /var/cache/chunks --socket /run/disk.sock
  nbdinfo 'nbd+unix:///?socket=/run/disk.sock'
  qemu-nbd -r -c /dev/nbd0 'nbd+unix:///?socket=/run/disk.sock'";

/// Threads for the calls of one disk.
const THREADS: usize = 16;
/// To open, or to sync at the end.
const PATIENCE: Duration = Duration::from_secs(60);
/// A whole disk may take long; whoever waits can stop it.
const WHOLE_DISK: Duration = Duration::from_secs(24 * 3600);

/// The commands.
#[derive(Debug, Subcommand)]
pub(super) enum BlockCommand {
    /// Serve a disk over NBD on a unix socket, until a signal
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Connect a disk to a device of the kernel's, until a signal
    #[command(after_help = attach::EXAMPLES)]
    Attach(attach::AttachArgs),
    /// Write what differs from the base to a file, or show how much it is
    #[command(
        after_help = "Examples:\n  hearth block diff --base rootfs.ext4 --overlay disk.overlay\n  hearth block diff --base rootfs.ext4 --overlay disk.overlay --out disk.diff"
    )]
    Diff {
        #[command(flatten)]
        disk: OverlayArgs,
        /// The file to write; it must not exist
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Make an overlay out of a base and a diff
    #[command(
        after_help = "Examples:\n  hearth block apply --base rootfs.ext4 --overlay new.overlay --diff disk.diff"
    )]
    Apply {
        #[command(flatten)]
        disk: OverlayArgs,
        /// What `hearth block diff` wrote
        #[arg(long, value_name = "FILE")]
        diff: PathBuf,
    },
}

/// A base, and the file with what differs.
#[derive(Debug, Args)]
pub(super) struct OverlayArgs {
    /// Image that is never written, or the URL of one
    #[arg(long, value_name = "IMAGE|URL")]
    base: PathBuf,
    /// File with what differs from it
    #[arg(long, value_name = "FILE")]
    overlay: PathBuf,
    #[command(flatten)]
    cache: CacheArgs,
}

/// Where chunks of remote objects are kept.
#[derive(Debug, Clone, Args)]
pub(super) struct CacheArgs {
    /// Keep what was fetched here, for all who name this directory; without it a few chunks are kept in memory
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Size of it, MiB
    #[arg(long, value_name = "N", default_value_t = 1024, requires = "cache", value_parser = clap::value_parser!(u64).range(LEAST_CACHE >> 20..=1 << 30))]
    cache_mib: u64,
}

/// Arguments of `hearth block serve`.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    disk: DiskArgs,
    /// Unix socket to serve on (0600)
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Clients at once
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections, value_parser = at_least_one)]
    connections: usize,
}

/// A disk to be served.
#[derive(Debug, Args)]
pub(super) struct DiskArgs {
    /// A plain image or block device
    #[arg(long, value_name = "FILE", conflicts_with_all = ["base", "overlay", "url"], required_unless_present_any = ["base", "url"])]
    file: Option<PathBuf>,
    /// An object of a store, read only: s3, gs, az, http, https or file
    #[arg(long, value_name = "URL", conflicts_with_all = ["base", "overlay"])]
    url: Option<String>,
    /// Image that is never written, or the URL of one, below an overlay
    #[arg(long, value_name = "IMAGE|URL", requires = "overlay")]
    base: Option<PathBuf>,
    /// File with what differs from the base; made if it is not there
    #[arg(long, value_name = "FILE", requires = "base")]
    overlay: Option<PathBuf>,
    /// Let nobody write
    #[arg(long)]
    read_only: bool,
    #[command(flatten)]
    cache: CacheArgs,
}

impl DiskArgs {
    async fn open(self) -> Result<Arc<dyn Backend>, CliError> {
        match (self.file, self.url, self.base, self.overlay) {
            (Some(file), ..) => Ok(open_file(&file, self.read_only)?),
            (None, Some(url), ..) => Ok(open_url(&url, &self.cache).await?),
            (None, None, Some(base), Some(overlay)) => {
                let make = !self.read_only && !overlay.exists();
                let disk = OverlayArgs { base, overlay, cache: self.cache };
                Ok(open_overlay(&disk, self.read_only, make).await?)
            }
            _ => Err(CliError::usage("no disk", "give --file, --url, or --base and --overlay")),
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "a number of at least 1".into())
}

/// Runs one of them, on this thread and the disk's own.
pub(super) fn run(command: BlockCommand, context: &Context) -> Result<u8, CliError> {
    // What the server has to say of a disk that fails goes where errors go.
    drop(tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).try_init());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| CliError::failed("cannot start", e.to_string()))?;
    let done = runtime.block_on(async {
        match command {
            BlockCommand::Serve(args) => serve(args, context).await,
            BlockCommand::Attach(args) => attach::run(args, context).await,
            BlockCommand::Diff { disk, out } => {
                until_signal(write_diff(&disk, out.as_deref(), context)).await
            }
            BlockCommand::Apply { disk, diff } => until_signal(apply_diff(&disk, &diff, context)).await,
        }
    });
    // A call that the kernel keeps must not keep us: it was told.
    runtime.shutdown_background();
    done
}

/// A signal ends it where it is; what it made so far is left to its own clean-up.
async fn until_signal(work: impl Future<Output = Result<u8, CliError>>) -> Result<u8, CliError> {
    let mut signals = Signals::new()?;
    tokio::select! {
        done = work => done,
        signal = signals.next() => {
            Err(CliError::interrupted(signal, "cancelled", format!("{} came before the end", signals::name(signal))))
        }
    }
}

fn open_file(path: &Path, read_only: bool) -> Result<Arc<FileBackend>, CliError> {
    let name = path.display().to_string();
    FileBackend::open(path, read_only, Pool::new(&name, THREADS))
        .map(Arc::new)
        .map_err(|e| CliError::failed(format!("cannot open {name}"), e.to_string()))
}

async fn open_url(url: &str, cache: &CacheArgs) -> Result<Arc<RemoteBackend>, CliError> {
    let chunks = match &cache.cache {
        None => None,
        Some(dir) => {
            let opened = ChunkCache::open(dir, cache.cache_mib << 20);
            let fail =
                |e: std::io::Error| CliError::failed(format!("cannot use {}", dir.display()), e.to_string());
            Some(Arc::new(opened.map_err(fail)?))
        }
    };
    let (pool, limit) = (Pool::new("the cache", THREADS), Limit::within(PATIENCE));
    RemoteBackend::open(url, RemoteOptions::default(), chunks, pool, &limit)
        .await
        .map(Arc::new)
        .map_err(|e| CliError::failed("cannot open the disk", e.to_string()))
}

/// A base that is not on this host.
fn as_url(base: &Path) -> Option<&str> {
    base.to_str().filter(|text| text.contains("://"))
}

async fn open_overlay(disk: &OverlayArgs, read_only: bool, make: bool) -> Result<Arc<Overlay>, CliError> {
    let base: Arc<dyn Backend> = match as_url(&disk.base) {
        Some(url) => open_url(url, &disk.cache).await?,
        None => open_file(&disk.base, true)?,
    };
    let pool = Pool::new(&disk.overlay.display().to_string(), THREADS);
    let limit = Limit::within(PATIENCE);
    let opened = if make {
        let size = base.size();
        Overlay::create(&disk.overlay, base, size, pool, &limit).await
    } else {
        Overlay::open(&disk.overlay, base, read_only, pool, &limit).await
    };
    opened.map(Arc::new).map_err(|e| refused(disk, &e))
}

fn refused(disk: &OverlayArgs, e: &OverlayError) -> CliError {
    let what = format!("cannot use {}", disk.overlay.display());
    match e {
        OverlayError::OtherBase { .. } => {
            CliError::usage(what, e.to_string()).todo("name the image it was made above with --base")
        }
        OverlayError::InUse { .. } => {
            CliError::failed(what, e.to_string()).todo("stop the sandbox or the server that has it")
        }
        _ => CliError::failed(what, e.to_string()),
    }
}

async fn serve(args: ServeArgs, context: &Context) -> Result<u8, CliError> {
    let mut signals = Signals::new()?;
    let disk = args.disk.open().await?;
    let what = format!("cannot serve on {}", args.socket.display());
    let listener = bind(&args.socket).map_err(|e| CliError::failed(what, format!("{e:#}")))?;
    let limits = Limits { connections: args.connections, ..Limits::default() };
    let server = Server::new(vec![Export::new("disk", disk.clone())], limits);
    let stop = CancellationToken::new();
    let uri = format!("nbd+unix:///?socket={}", args.socket.display());
    if context.json {
        out::json(&json!({ "uri": uri, "size": disk.size(), "read_only": disk.read_only() }))?;
    } else {
        out::line(&format!(
            "{uri} ({} bytes{})",
            disk.size(),
            if disk.read_only() { ", read-only" } else { "" }
        ))?;
    }
    let serving = server.run(listener, stop.clone());
    tokio::pin!(serving);
    let mut synced = Ok(());
    let served = tokio::select! {
        served = &mut serving => served,
        _ = signals.next() => {
            // What clients wrote and did not flush is kept too: the operator means well.
            synced = disk.flush(&Limit::within(PATIENCE)).await;
            stop.cancel();
            serving.await
        }
    };
    remove_socket(&args.socket);
    synced.map_err(|e| CliError::failed("not all that was written is safe", e.to_string()))?;
    match served.leaked {
        0 => Ok(error::OK),
        n => {
            Err(CliError::failed("the disk did not get quiet", format!("the kernel still has {n} requests")))
        }
    }
}

async fn write_diff(disk: &OverlayArgs, to: Option<&Path>, context: &Context) -> Result<u8, CliError> {
    let overlay = open_overlay(disk, true, false).await?;
    let (data, zero) = overlay.changed();
    if let Some(path) = to {
        let fail = |e: String| CliError::failed(format!("cannot write {}", path.display()), e);
        let file = tokio::fs::File::create_new(path).await.map_err(|e| fail(e.to_string()))?;
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        let written = match diff::export(&overlay, &mut writer, &Limit::within(WHOLE_DISK)).await {
            Ok(_) => writer.into_inner().sync_all().await.map_err(|e| e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        if let Err(e) = written {
            // Half a diff is of no use; the first error is the one that matters.
            drop(tokio::fs::remove_file(path).await);
            return Err(fail(e));
        }
    }
    tell(data * hearth_vmm::block::BLOCK, zero * hearth_vmm::block::BLOCK, context)
}

async fn apply_diff(disk: &OverlayArgs, diff: &Path, context: &Context) -> Result<u8, CliError> {
    let fail = |e: String| CliError::failed(format!("cannot apply {}", diff.display()), e);
    let file = tokio::fs::File::open(diff).await.map_err(|e| fail(e.to_string()))?;
    let overlay = open_overlay(disk, false, true).await?;
    let mut reader = BufReader::with_capacity(1 << 20, file);
    match diff::apply(&mut reader, &*overlay, &Limit::within(WHOLE_DISK)).await {
        Ok((data, zero)) => tell(data, zero, context),
        Err(e) => {
            // It was made here, and is neither base nor disk.
            drop(tokio::fs::remove_file(&disk.overlay).await);
            Err(fail(e.to_string()))
        }
    }
}

fn tell(data: u64, zero: u64, context: &Context) -> Result<u8, CliError> {
    if context.json {
        out::json(&json!({ "data_bytes": data, "zero_bytes": zero }))?;
    } else {
        out::line(&format!("{data} bytes of data and {zero} bytes of zeroes differ from the base"))?;
    }
    Ok(error::OK)
}
