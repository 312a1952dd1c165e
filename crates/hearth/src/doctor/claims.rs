//! Who claims what: the records on disk, and the daemon's books where it shows them.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_api::v1::{BooksRequest, BooksResponse};
use hearth_core::doctor::{Booked, BookedSlot, Books, Claims, Daemon, Recorded};
use hearth_core::host::Host as _;
use hearth_core::process::{Liveness, ProcessIdentity};
use hearth_core::record::Record;
use hearth_host::cgroup::Cgroups;
use hearth_host::kernel_host::KernelHost;
use hearth_host::{lock, process};
use hearth_node::Records;
use serde::Serialize;

use super::{blocking, host_config};
use crate::cli::Client;
use crate::config::Config;

/// How long the daemon may take to answer before it counts as hung.
const ANSWER: Duration = Duration::from_secs(2);

/// Where the daemon is asked.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub(crate) addr: String,
}

/// What is known of the daemon.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DaemonSeen {
    /// up, silent or down.
    pub(crate) state: &'static str,
    pub(crate) pid: Option<u32>,
    pub(crate) address: String,
    /// Why it is silent.
    pub(crate) why: Option<String>,
}

/// One look at both.
pub(super) struct LookedUp {
    pub(super) claims: Claims,
    pub(super) daemon: Daemon,
    pub(super) seen: DaemonSeen,
    pub(super) unseen: Vec<String>,
}

/// Reads the records and asks the daemon.
pub(super) async fn look_up(config: &Config, source: &Source) -> LookedUp {
    let host = host_config(config);
    let instance = config.instance.clone();
    let disk = blocking(move || {
        let records = Records::new(&host.state_dir).load();
        let holder = holder(&host.run_dir, &instance);
        // Without cgroups the other facts of a process have to do.
        let kernel = KernelHost::new(host).ok();
        let liveness =
            |p: &ProcessIdentity| kernel.as_ref().map_or_else(|| process::liveness(p), |k| k.liveness(p));
        let records = records.map(|loaded| {
            let usable: BTreeMap<String, Recorded> =
                loaded.records.iter().map(|r| (r.id.to_string(), recorded(r, liveness))).collect();
            (usable, loaded.unreadable)
        });
        (records, holder)
    });
    let (disk, books) = futures::join!(disk, ask(&source.addr));
    let mut claims = Claims::default();
    let mut unseen = Vec::new();
    let (records, holder) = match disk {
        Ok((records, holder)) => (records.map_err(|e| e.to_string()), holder),
        Err(why) => (Err(why.clone()), Err(why)),
    };
    match records {
        Ok((usable, unusable)) => (claims.records, claims.unusable) = (Some(usable), unusable),
        Err(why) => {
            unseen
                .push(format!("record: {}: {why}", config.instance_state_dir().join("sandboxes").display()));
        }
    }
    let books = books.and_then(|books| {
        if books.instance == config.instance.as_str() {
            return Ok(books);
        }
        Err(format!("the daemon at {} is that of instance {}", source.addr, books.instance))
    });
    let (daemon, pid) = match (books, holder) {
        (Ok(books), _) => {
            let pid = books.pid;
            claims.books = Some(booked(books));
            (Daemon::Up, Some(pid))
        }
        (Err(_), Ok(None)) => (Daemon::Down, None),
        (Err(why), Ok(Some(pid))) => {
            let who = pid.map_or("a process that cannot be seen".to_owned(), |pid| format!("pid {pid}"));
            (Daemon::Silent(format!("{who} holds the instance's lock, but {why}")), pid)
        }
        (Err(why), Err(lock)) => {
            (Daemon::Silent(format!("{why}; whether one runs cannot be seen: {lock}")), None)
        }
    };
    let (state, why) = match &daemon {
        Daemon::Up => ("up", None),
        Daemon::Down => ("down", None),
        Daemon::Silent(why) => ("silent", Some(why.clone())),
    };
    if let Some(why) = &why {
        unseen.push(format!("daemon: {why}"));
    }
    let seen = DaemonSeen { state, pid, address: source.addr.clone(), why };
    LookedUp { claims, daemon, seen, unseen }
}

/// Who holds the instance's lock or its name on this host; an inner nothing: a process that cannot be seen.
fn holder(
    run_dir: &std::path::Path,
    instance: &hearth_core::id::InstanceName,
) -> Result<Option<Option<u32>>, String> {
    let held = lock::holder(&run_dir.join("lock")).map_err(|e| format!("{}: {e}", run_dir.display()))?;
    // A reclaim by hand holds both itself while it looks.
    let others = |held: Option<Option<u32>>| held.filter(|pid| *pid != Some(std::process::id()));
    if others(held).is_some() {
        return Ok(held);
    }
    let Ok(cgroups) = Cgroups::locate(instance) else { return Ok(None) };
    let held = lock::holder(cgroups.root()).map_err(|e| format!("{}: {e}", cgroups.root().display()))?;
    Ok(others(held))
}

fn recorded(record: &Record, liveness: impl Fn(&ProcessIdentity) -> Liveness) -> Recorded {
    Recorded {
        name: record.name.to_string(),
        state: record.state,
        slot: record.slot.map(hearth_core::network::SlotIndex::get),
        shim: record.shim.clone(),
        alive: record.shim.as_ref().map_or(Liveness::Gone, liveness),
        this_boot: process::boot_id().is_ok_and(|id| id == record.boot_id),
        stuck: record.stuck.clone(),
        created_at_ms: record.created_at_ms,
    }
}

/// The daemon's books, or why it does not show them, as the end of a sentence.
async fn ask(addr: &str) -> Result<BooksResponse, String> {
    let asked = async {
        let client = Client::connect(addr, false).await.map_err(|e| e.line())?;
        let answer = client.nodes().books(BooksRequest {}).await;
        answer.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            tonic::Code::Unimplemented => "it is older than this program and has no books to show".to_owned(),
            tonic::Code::Unauthenticated => "it wants its token: set HEARTH_TOKEN".to_owned(),
            _ => status.message().to_owned(),
        })
    };
    match tokio::time::timeout(ANSWER, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("does not answer at {addr} within {} s", ANSWER.as_secs())),
    }
}

fn booked(books: BooksResponse) -> Books {
    Books {
        slots: books.slots.into_iter().map(|s| (s.slot, BookedSlot { state: s.state, why: s.why })).collect(),
        sandboxes: books
            .sandboxes
            .into_iter()
            .map(|s| (s.id, Booked { name: s.name, state: s.state, slot: (s.slot != 0).then_some(s.slot) }))
            .collect(),
        releasing: books.releasing.into_iter().collect(),
    }
}
