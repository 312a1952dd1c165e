//! `bench scrape`: what `/metrics` of a node with many sandboxes costs, with and without series of each sandbox.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::StreamExt as _;
use hearth_api::v1::sandbox_service_client::SandboxServiceClient;
use hearth_api::v1::{CreateRequest, DeleteRequest, ListRequest};
use hearth_host::test_support::{in_private_namespaces, is_root};
use tonic::transport::{Channel, Endpoint};

use super::daemon::{self, Daemon, Ground};
use super::http::Connection;
use super::stats::{ms, percentile};
use super::table::{Table, Target, Unit};
use crate::program;
use crate::stop::Stop;

/// Scrapes that are timed.
const SCRAPES: usize = 50;
/// Calls at once while sandboxes are made and deleted.
const AT_ONCE: usize = 8;
/// How long a daemon may take to be ready.
const READY: Duration = Duration::from_secs(120);

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Sandboxes of the VMM `process`.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    sandboxes: u32,
    /// The daemon; a release build if there is one.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// State directory with kernel and template.
    #[arg(long, value_name = "DIR", env = "HEARTH_TEST_STATE")]
    state: PathBuf,
    /// The template to create from.
    #[arg(long, value_name = "NAME", default_value = "busybox")]
    template: String,
    /// A target that is not met is a failure.
    #[arg(long)]
    strict: bool,
}

/// Whether the run counts as good.
pub(crate) fn run(args: &Args, stop: &Stop) -> Result<bool> {
    ensure!(is_root(), "the benchmark makes namespaces and links: run it as root");
    let binary = daemon::binary(args.binary.as_deref())?;
    let mut table = Table::new(&[args.sandboxes]);
    let on_a_host = || {
        program::run("ip", &["link", "set", "lo", "up"], "")?;
        let ground = Ground::new(Some(&binary), Some(&args.state))?;
        let measured = measure(args, &ground, &mut table, stop);
        measured.and(ground.clean())
    };
    in_private_namespaces(on_a_host).context("make namespaces")??;
    println!("{}", table.text());
    Ok(!args.strict || table.all_met())
}

fn measure(args: &Args, ground: &Ground, table: &mut Table, stop: &Stop) -> Result<()> {
    let daemon = ready(ground, "")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let made = runtime.block_on(create_all(args, &daemon, stop));
    let plain = made.and_then(|()| scrape(args, &daemon, table, ["scrape", "scrape, bytes"]));
    // The next one takes the sandboxes over.
    daemon.end()?;
    let daemon = ready(ground, "[metrics]\nper_sandbox = true\n")?;
    let names = ["scrape with series of each sandbox", "scrape with series of each sandbox, bytes"];
    let each = plain.and_then(|()| scrape(args, &daemon, table, names));
    let deleted = runtime.block_on(delete_all(&daemon));
    daemon.end()?;
    each.and(deleted)
}

fn ready(ground: &Ground, lines: &str) -> Result<Daemon> {
    let mut daemon = ground.start(lines)?;
    let end = Instant::now() + READY;
    loop {
        daemon.check()?;
        if let Ok(mut connection) = Connection::open(daemon.address)
            && connection.get("/health").is_ok_and(|answer| answer.code == 200)
        {
            return Ok(daemon);
        }
        ensure!(Instant::now() < end, "the daemon is not ready: {}", daemon.last_words());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn scrape(args: &Args, daemon: &Daemon, table: &mut Table, [time, size]: [&'static str; 2]) -> Result<()> {
    let mut connection = Connection::open(daemon.address)?;
    let (mut took, mut bytes) = (vec![], 0);
    for _ in 0..SCRAPES {
        let begun = Instant::now();
        let answer = connection.get("/metrics")?;
        took.push(begun.elapsed());
        let running = format!("hearth_sandboxes{{state=\"running\"}} {}", args.sandboxes);
        ensure!(answer.body.contains(&running), "not all sandboxes run: {}", daemon.last_words());
        bytes = answer.body.len().max(bytes);
    }
    let at = args.sandboxes;
    for (name, percent) in [("p50", 50), ("p95", 95), ("longest", 100)] {
        let value = percentile(&took, percent).map(ms);
        table.set(format!("{time}, {name}"), Unit::Ms, Some(Target::AtMost(50.0)), at, value);
    }
    let bytes = u32::try_from(bytes).context("a scrape of gigabytes")?;
    table.set(size, Unit::Count, Some(Target::AtMost(2e6)), at, Some(f64::from(bytes)));
    Ok(())
}

async fn client(daemon: &Daemon) -> Result<SandboxServiceClient<Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", daemon.address))?.tcp_nodelay(true);
    Ok(SandboxServiceClient::new(endpoint.connect().await.context("connect")?))
}

async fn create_all(args: &Args, daemon: &Daemon, stop: &Stop) -> Result<()> {
    let client = client(daemon).await?;
    let creates = (0..args.sandboxes).map(|n| {
        let mut client = client.clone();
        let request = CreateRequest {
            name: format!("s{n}"),
            template: args.template.clone(),
            vmm: "process".into(),
            disk_mib: 16,
            ..CreateRequest::default()
        };
        async move {
            stop.check()?;
            let mut progress = client.create(request).await?.into_inner();
            while progress.message().await?.is_some() {}
            anyhow::Ok(())
        }
    });
    let mut creates = futures::stream::iter(creates).buffer_unordered(AT_ONCE);
    while let Some(created) = creates.next().await {
        created?;
    }
    Ok(())
}

async fn delete_all(daemon: &Daemon) -> Result<()> {
    let mut client = client(daemon).await?.max_decoding_message_size(64 << 20);
    let all = client.list(ListRequest::default()).await?.into_inner().sandboxes;
    let deletes = all.into_iter().map(|sandbox| {
        let mut client = client.clone();
        async move { client.delete(DeleteRequest { sandbox: sandbox.id }).await }
    });
    let mut deletes = futures::stream::iter(deletes).buffer_unordered(AT_ONCE);
    while let Some(deleted) = deletes.next().await {
        deleted?;
    }
    Ok(())
}
