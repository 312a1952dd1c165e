//! `hearth template` and `hearth kernel`: the engine's image library, run here on the state directory. The
//! work is synchronous, so it has a thread of its own; a signal sets its stop flag and is then waited out.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::BytesMut;
use clap::{ArgGroup, Args, Subcommand};
use hearth_core::block::RemoteDisk;
use hearth_core::id::{KernelName, TemplateName};
use hearth_core::image::{Kernel, Template};
use hearth_node::images::template::{Options, Source, TarInput};
use hearth_node::images::{
    ErrorClass, ImageError, Job, Listing, Store, kernel as kernels, template as templates,
};
use hearth_vmm::block::{Backend as _, Limit, Pool, RemoteBackend, RemoteOptions, Version};
use serde_json::{Value, json};

use super::Context;
use super::configured::StateArgs;
use super::error::{self, CliError};
use super::out;
use super::parse;
use super::progress::{Progress, Show};
use super::signals::{self, Signals};
use super::stdio::StoppableStdin;
use super::view;

/// Time to find a remote image.
const LOOK: Duration = Duration::from_secs(60);
/// Bytes up to the end of an ext4's first superblock.
const EXT4_HEAD: usize = 2048;
/// Where its magic number is, and what.
const EXT4_MAGIC: (usize, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);

/// `hearth template …`
#[derive(Debug, Subcommand)]
pub(super) enum TemplateCommand {
    /// Make a template from a directory, a tar, an image, a remote image, a Debian suite, or a kernel alone
    #[command(after_help = "\
Examples:
  hearth template create base --debian bookworm --include python3,curl
  docker export web | hearth template create web --tar -
  hearth template create box --dir /srv/rootfs --kernel debian
  hearth template create far --remote s3://images/rootfs.ext4
  hearth template create flat --kernel-only --kernel tiny")]
    Create(Box<TemplateArgs>),
    /// List templates
    #[command(
        visible_alias = "list",
        after_help = "Examples:\n  hearth template ls\n  hearth template ls --json"
    )]
    Ls(StateArgs),
    /// Remove templates that no sandbox uses
    #[command(after_help = "Examples:\n  hearth template rm base web")]
    Rm {
        /// Names of the templates
        #[arg(required = true, value_name = "NAME")]
        names: Vec<TemplateName>,
        #[command(flatten)]
        state: StateArgs,
    },
}

/// Arguments of `hearth template create`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("source").required(true).args(["dir", "tar", "image", "remote", "debian", "kernel_only"]))]
pub(super) struct TemplateArgs {
    /// Name of the new template
    name: TemplateName,
    /// From a directory
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// From a tar, plain or packed, as `docker export` makes it; - for stdin
    #[arg(long, value_name = "FILE|-")]
    tar: Option<PathBuf>,
    /// From an ext4 image
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// From an ext4 image in a store, which stays there and is read as it is needed: s3, gs, az, http, https or file
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
    /// From a Debian or Ubuntu suite, through mmdebstrap
    #[arg(long, value_name = "SUITE")]
    debian: Option<String>,
    /// More packages, for --debian
    #[arg(long, value_name = "PKG,…", value_delimiter = ',')]
    #[arg(requires = "debian", conflicts_with_all = ["dir", "tar", "image", "remote", "kernel_only"])]
    include: Vec<String>,
    /// No root disk: the kernel runs alone
    #[arg(long)]
    kernel_only: bool,
    /// Kernel it boots with; the only one, or the one called default, if absent
    #[arg(long, value_name = "NAME")]
    kernel: Option<KernelName>,
    /// Size of the root disk; the contents and some slack if absent
    #[arg(long, value_name = "SIZE", value_parser = parse::disk)]
    size: Option<u64>,
    /// Replace a template of that name
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    state: StateArgs,
}

/// `hearth kernel …`
#[derive(Debug, Subcommand)]
pub(super) enum KernelCommand {
    /// Import a kernel: the ELF is taken out, the modules a guest needs are kept
    #[command(after_help = "\
Examples:
  hearth kernel import default --image /boot/vmlinuz-$(uname -r) \\
      --modules /lib/modules/$(uname -r)
  hearth kernel import tiny --image vmlinux")]
    Import {
        /// Name of the new kernel
        name: KernelName,
        /// vmlinuz (bzImage) or ELF vmlinux
        #[arg(long, value_name = "FILE")]
        image: PathBuf,
        /// Its module tree, such as /lib/modules/<release>; not needed if all is built in
        #[arg(long, value_name = "DIR")]
        modules: Option<PathBuf>,
        /// Replace a kernel of that name
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        state: StateArgs,
    },
    /// List kernels
    #[command(
        visible_alias = "list",
        after_help = "Examples:\n  hearth kernel ls\n  hearth kernel ls --json"
    )]
    Ls(StateArgs),
    /// Remove kernels that no template uses
    #[command(after_help = "Examples:\n  hearth kernel rm old")]
    Rm {
        /// Names of the kernels
        #[arg(required = true, value_name = "NAME")]
        names: Vec<KernelName>,
        #[command(flatten)]
        state: StateArgs,
    },
}

/// `hearth template …`
pub(super) async fn template(command: TemplateCommand, context: &Context) -> Result<u8, CliError> {
    match command {
        TemplateCommand::Create(args) => create(*args, context).await,
        TemplateCommand::Ls(state) => {
            let listing = read(&state, templates::list)?;
            let row = |t: &Template| {
                let size = if t.rootfs { view::bytes(t.rootfs_bytes) } else { "-".into() };
                vec![t.name.to_string(), t.kernel.to_string(), size, age(t.created_at_ms), t.source.clone()]
            };
            show(&listing, &["NAME", "KERNEL", "SIZE", "AGE", "SOURCE"], row, template_json, context)
        }
        TemplateCommand::Rm { names, state } => {
            remove(names, &state, context, "template", templates::remove).await
        }
    }
}

/// `hearth kernel …`
pub(super) async fn kernel(command: KernelCommand, context: &Context) -> Result<u8, CliError> {
    match command {
        KernelCommand::Import { name, image, modules, force, state } => {
            let what = format!("cannot import kernel {:?}", name.as_str());
            let state = state.load()?.config.state_dir;
            let imported = work(context, &what, move |job| {
                kernels::import(&Store::open(&state)?, &name, &image, modules.as_deref(), force, job)
            })
            .await?;
            if context.json {
                let mut object = kernel_json(&imported.kernel);
                object["notes"] = json!(imported.notes);
                out::json(&object)?;
            } else {
                imported.notes.iter().for_each(|note| out::note(note));
                out::line(&format!(
                    "kernel {} ({}) is ready",
                    imported.kernel.name, imported.kernel.release
                ))?;
            }
            Ok(error::OK)
        }
        KernelCommand::Ls(state) => {
            let listing = read(&state, kernels::list)?;
            let row = |k: &Kernel| {
                let modules = k.modules.len().to_string();
                vec![k.name.to_string(), k.release.clone(), modules, age(k.created_at_ms), k.source.clone()]
            };
            show(&listing, &["NAME", "RELEASE", "MODULES", "AGE", "SOURCE"], row, kernel_json, context)
        }
        KernelCommand::Rm { names, state } => remove(names, &state, context, "kernel", kernels::remove).await,
    }
}

async fn create(args: TemplateArgs, context: &Context) -> Result<u8, CliError> {
    let what = format!("cannot create template {:?}", args.name.as_str());
    let state = args.state.load()?.config.state_dir;
    let stop = Arc::new(AtomicBool::new(false));
    let source = match &args.remote {
        Some(url) => Source::Remote(look(url, &what).await?),
        None => source(&args, &stop),
    };
    let options = Options { kernel: args.kernel, force: args.force, size_mib: args.size };
    let made = work_until(context, &what, stop, move |job| {
        templates::create(&Store::open(&state)?, &args.name, source, &options, job)
    })
    .await?;
    if context.json {
        out::json(&template_json(&made))?;
    } else {
        let size = if made.rootfs { format!(", {}", view::bytes(made.rootfs_bytes)) } else { String::new() };
        out::line(&format!("template {} (kernel {}{size}) is ready", made.name, made.kernel))?;
    }
    Ok(error::OK)
}

fn source(args: &TemplateArgs, stop: &Arc<AtomicBool>) -> Source<'static> {
    if let Some(dir) = &args.dir {
        Source::Directory(dir.clone())
    } else if let Some(tar) = &args.tar {
        if tar == Path::new("-") {
            let reader = Box::new(StoppableStdin::start(Arc::clone(stop)));
            Source::Tar(TarInput::Reader { reader, label: "stdin".into() })
        } else {
            Source::Tar(TarInput::File(tar.clone()))
        }
    } else if let Some(image) = &args.image {
        Source::Image(image.clone())
    } else if let Some(suite) = &args.debian {
        Source::Debian { suite: suite.clone(), include: args.include.clone() }
    } else {
        Source::KernelOnly
    }
}

/// Finds an object of a store and notes its version.
async fn look(url: &str, what: &str) -> Result<RemoteDisk, CliError> {
    let failed = |why: String| CliError::failed(what.to_owned(), why);
    let limit = Limit::within(LOOK);
    let pool = Pool::new("the cache", 1);
    let disk = RemoteBackend::open(url, RemoteOptions::default(), None, pool, &limit);
    let disk = disk.await.map_err(|e| failed(e.to_string()))?;
    let Version { size, mark } = disk.version();
    let head = if size < EXT4_HEAD as u64 {
        BytesMut::new()
    } else {
        disk.read_at(0, EXT4_HEAD, BytesMut::new(), &limit).await.map_err(|e| failed(e.to_string()))?
    };
    disk.close(Duration::ZERO).await;
    if head.get(EXT4_MAGIC.0..EXT4_MAGIC.0 + 2) != Some(&EXT4_MAGIC.1) {
        return Err(CliError::usage(what.to_owned(), format!("{url} is no ext4 image")));
    }
    Ok(RemoteDisk { url: url.to_owned(), bytes: size, mark })
}

async fn work<T: Send + 'static>(
    context: &Context,
    what: &str,
    run: impl FnOnce(&Job<'_>) -> Result<T, ImageError> + Send + 'static,
) -> Result<T, CliError> {
    work_until(context, what, Arc::new(AtomicBool::new(false)), run).await
}

/// Runs a piece of work with progress on stderr. At a signal it is told to stop, and waited for.
async fn work_until<T: Send + 'static>(
    context: &Context,
    what: &str,
    stop: Arc<AtomicBool>,
    run: impl FnOnce(&Job<'_>) -> Result<T, ImageError> + Send + 'static,
) -> Result<T, CliError> {
    let mut signals = Signals::new()?;
    let progress = Arc::new(Mutex::new(Progress::new(Show::for_work(context.json))));
    let (shown, flag) = (Arc::clone(&progress), Arc::clone(&stop));
    let mut task = tokio::task::spawn_blocking(move || {
        let report = |p: hearth_node::images::Progress<'_>| {
            shown.lock().unwrap_or_else(PoisonError::into_inner).advance(p.step, p.done, p.total);
        };
        run(&Job { progress: &report, stop: &flag })
    });
    let mut signal = None;
    let ended = loop {
        tokio::select! {
            ended = &mut task => break ended,
            number = signals.next() => {
                stop.store(true, Ordering::Relaxed);
                signal = Some(number);
                progress.lock().unwrap_or_else(PoisonError::into_inner).step("stopping");
            }
        }
    };
    progress.lock().unwrap_or_else(PoisonError::into_inner).finish();
    match ended.map_err(|e| CliError::failed(what, e.to_string()))? {
        Ok(done) => Ok(done),
        Err(e) if e.class() == ErrorClass::Stopped => {
            let number = signal.unwrap_or(2);
            Err(CliError::interrupted(
                number,
                what,
                format!("stopped by {}; nothing was left", signals::name(number)),
            ))
        }
        Err(e) => Err(image_error(what, &e)),
    }
}

fn image_error(what: &str, e: &ImageError) -> CliError {
    let mut why = e.to_string();
    let mut source = e.source();
    while let Some(cause) = source {
        why.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    match e.class() {
        ErrorClass::Invalid => CliError::usage(what, why),
        _ => CliError::failed(what, why),
    }
}

/// Lists without making a state directory where there is none.
fn read<T>(
    state: &StateArgs,
    list: impl FnOnce(&Store) -> Result<Listing<T>, ImageError>,
) -> Result<Listing<T>, CliError> {
    let dir = state.load()?.config.state_dir;
    if !dir.join("templates").exists() {
        return Ok(Listing { found: Vec::new(), broken: Vec::new() });
    }
    let what = format!("cannot list {}", dir.display());
    Store::open(&dir).and_then(|store| list(&store)).map_err(|e| image_error(&what, &e))
}

fn show<T>(
    listing: &Listing<T>,
    header: &[&str],
    row: impl Fn(&T) -> Vec<String>,
    object: impl Fn(&T) -> Value,
    context: &Context,
) -> Result<u8, CliError> {
    if context.json {
        out::json(&listing.found.iter().map(object).collect::<Vec<_>>())?;
    } else {
        out::print(&view::table(header, listing.found.iter().map(row)))?;
    }
    for broken in &listing.broken {
        CliError::failed("cannot be used", broken.as_str()).report(context.json);
    }
    Ok(if listing.broken.is_empty() { error::OK } else { error::FAILED })
}

async fn remove<N: std::fmt::Display + Clone + Send + 'static>(
    names: Vec<N>,
    state: &StateArgs,
    context: &Context,
    kind: &str,
    remove: impl Fn(&Store, &N, &Job<'_>) -> Result<(), ImageError> + Copy + Send + 'static,
) -> Result<u8, CliError> {
    let dir = state.load()?.config.state_dir;
    let mut code = error::OK;
    let mut objects = Vec::new();
    for name in names {
        let what = format!("cannot remove {kind} \"{name}\"");
        let (dir, one) = (dir.clone(), name.clone());
        let result = work(context, &what, move |job| remove(&Store::open(&dir)?, &one, job)).await;
        let error = result.as_ref().err().map(CliError::to_json);
        objects.push(json!({ kind: name.to_string(), "deleted": error.is_none(), "error": error }));
        match result {
            Ok(()) if !context.json => out::line(&name.to_string())?,
            Ok(()) => {}
            Err(e) => {
                e.report(context.json);
                code = error::FAILED;
            }
        }
    }
    if context.json {
        out::json(&objects)?;
    }
    Ok(code)
}

fn age(created_at_ms: u64) -> String {
    view::span(view::now_ms().saturating_sub(created_at_ms))
}

fn template_json(t: &Template) -> Value {
    serde_json::to_value(t).unwrap_or_default()
}

fn kernel_json(k: &Kernel) -> Value {
    serde_json::to_value(k).unwrap_or_default()
}
