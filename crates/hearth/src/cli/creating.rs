//! Creating and deleting a sandbox from the client's side. A create that is given up is waited for until the
//! daemon says that nothing of it is left.

use std::time::Duration;

use hearth_api::v1::create_progress::Progress as Report;
use hearth_api::v1::{CreateRequest, DeleteRequest, GetRequest, Sandbox};
use hearth_core::id::{SandboxName, TemplateName};
use tokio::time::Instant;
use tonic::Code;

use super::client::Client;
use super::error::CliError;
use super::out;
use super::parse;
use super::progress::Progress;
use super::signals::{self, Signals};

/// How long a cancelled create may take to be gone before we stop watching.
const UNTIL_GONE: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A wait longer than this says what it waits for.
const SAY_AFTER: Duration = Duration::from_secs(2);

/// What a sandbox is made of; the same for `run` and `create`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct SandboxArgs {
    /// Name of the sandbox; made up if absent
    #[arg(long)]
    pub(super) name: Option<SandboxName>,
    /// Variable of every command in it; NAME alone takes the value from here; may be repeated
    #[arg(long, short = 'e', value_name = "NAME=VALUE", value_parser = parse::env)]
    pub(super) env: Vec<(String, String)>,
    /// Virtual CPUs
    #[arg(long, value_name = "N", value_parser = parse::cpus, default_value = "1")]
    pub(super) cpus: u32,
    /// Memory: MiB as 512 or 512M, GiB as 1G
    #[arg(long, value_name = "SIZE", value_parser = parse::memory, default_value = "256M")]
    pub(super) memory: u64,
    /// Writable disk, sizes as for --memory
    #[arg(long, value_name = "SIZE", value_parser = parse::disk, default_value = "512M")]
    pub(super) disk: u64,
    /// Most that its disks move, a size per second; as the node has it if absent
    #[arg(long, value_name = "SIZE", value_parser = parse::disk_bandwidth)]
    pub(super) disk_bandwidth: Option<u64>,
    /// Most requests per second to its disks; as the node has it if absent
    #[arg(long, value_name = "N", value_parser = parse::disk_iops)]
    pub(super) disk_iops: Option<u64>,
    /// After a pause, what N milliseconds would have allowed may come at once
    #[arg(long, value_name = "N", value_parser = parse::disk_burst)]
    pub(super) disk_burst_ms: Option<u64>,
    /// End of its life, counted from its creation: 30s, 5m, 2h; none if absent
    #[arg(long, value_name = "TIME", value_parser = parse::timeout)]
    pub(super) timeout: Option<u64>,
    /// Whether it has a network: on or off
    #[arg(long, value_name = "on|off", value_parser = parse::on_off, default_value = "on", action = clap::ArgAction::Set)]
    pub(super) net: bool,
    /// What runs it: auto, firecracker or qemu
    #[arg(long, value_name = "VMM", value_parser = parse::vmm, default_value = "auto")]
    pub(super) vmm: String,
}

impl SandboxArgs {
    /// The request. It always has a name, so that a create can be looked for after it was given up.
    pub(super) fn request(&self, template: &TemplateName) -> CreateRequest {
        CreateRequest {
            name: self.name.as_ref().map_or_else(made_up_name, SandboxName::to_string),
            template: template.to_string(),
            cpus: self.cpus,
            memory_mib: self.memory,
            disk_mib: self.disk,
            timeout_seconds: self.timeout.unwrap_or(0),
            net: Some(self.net),
            vmm: self.vmm.clone(),
            env: self.env.iter().cloned().collect(),
            disk_mib_per_second: self.disk_bandwidth.unwrap_or(0),
            disk_iops: self.disk_iops.unwrap_or(0),
            disk_burst_ms: self.disk_burst_ms.unwrap_or(0),
        }
    }
}

fn made_up_name() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // Keyed at random by std; it must only be unlikely to meet another, the daemon refuses a taken name.
    format!("sb-{:010x}", RandomState::new().build_hasher().finish() & 0xff_ffff_ffff)
}

/// Creates a sandbox. At a signal the create is taken back, and the error says whether that was seen.
pub(super) async fn create(
    client: &Client,
    request: CreateRequest,
    progress: &mut Progress,
    signals: &mut Signals,
) -> Result<Sandbox, CliError> {
    let name = request.name.clone();
    let what = format!("cannot create a sandbox from {:?}", request.template);
    let created = tokio::select! {
        created = follow(client, request, &what, progress) => created,
        number = signals.next() => {
            progress.step("taking back what was made");
            let gone = take_back(client, &name, signals).await;
            progress.finish();
            return Err(match gone {
                Ok(()) => CliError::interrupted(number, &what, format!("stopped by {}; nothing was left", signals::name(number))),
                Err(why) => CliError::interrupted(number, &what, why),
            });
        }
    };
    progress.finish();
    created
}

async fn follow(
    client: &Client,
    request: CreateRequest,
    what: &str,
    progress: &mut Progress,
) -> Result<Sandbox, CliError> {
    let call = |mut sandboxes: super::client::Sandboxes| {
        let request = request.clone();
        async move { sandboxes.create(request).await }
    };
    let mut stream = client.call(what, call).await?.into_inner();
    loop {
        let message = stream.message().await.map_err(|s| CliError::from_status(what, &s))?;
        match message.map(|m| m.progress) {
            Some(Some(Report::Step(s))) => progress.step(&format!("{} ({}/{})", s.step, s.number, s.total)),
            Some(Some(Report::Sandbox(sandbox))) => return Ok(sandbox),
            Some(None) => {}
            None => return Err(CliError::failed(what, "the daemon ended the call early; see its log")),
        }
    }
}

/// After the create call was dropped: waits until the daemon knows no such sandbox. One that came to life at
/// the last moment is deleted.
async fn take_back(client: &Client, name: &str, signals: &mut Signals) -> Result<(), String> {
    let by = Instant::now() + UNTIL_GONE;
    loop {
        let mut sandboxes = client.sandboxes();
        let look = async {
            let answer = sandboxes.get(GetRequest { sandbox: name.to_owned(), ..Default::default() }).await?;
            if answer.into_inner().sandbox.is_some_and(|s| s.state == "running") {
                sandboxes.delete(DeleteRequest { sandbox: name.to_owned() }).await?;
            }
            Ok::<(), tonic::Status>(())
        };
        let answer = tokio::select! {
            answer = look => answer,
            _ = signals.next() => return Err(format!("stopped again; the daemon goes on removing {name:?}")),
            () = tokio::time::sleep_until(by) => {
                return Err(format!("{name:?} is still being removed; `hearth inspect {name}` says why"));
            }
        };
        match answer {
            Err(status) if status.code() == Code::NotFound => return Ok(()),
            Err(status) => {
                return Err(format!("whether {name:?} is gone could not be seen: {}", status.message()));
            }
            Ok(()) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// Deletes a sandbox that this command made, and waits until it is gone. Gone already is fine.
pub(super) async fn delete(
    client: &Client,
    id: &str,
    name: &str,
    signals: &mut Signals,
) -> Result<(), CliError> {
    let what = format!("cannot delete sandbox {name:?}");
    let mut sandboxes = client.sandboxes();
    let call = sandboxes.delete(DeleteRequest { sandbox: id.to_owned() });
    tokio::pin!(call);
    let mut said = Box::pin(tokio::time::sleep(SAY_AFTER));
    let mut told = false;
    loop {
        tokio::select! {
            answer = &mut call => return match answer {
                Ok(_) => Ok(()),
                Err(status) if status.code() == Code::NotFound => Ok(()),
                Err(status) => Err(CliError::from_status(&what, &status)
                    .todo(format!("`hearth rm {name}` tries again, `hearth inspect {name}` says what is left"))),
            },
            number = signals.next() => {
                if told {
                    let why = "stopped while it was being deleted; the daemon goes on";
                    return Err(CliError::interrupted(number, &what, why));
                }
                told = true;
                out::note(&format!("deleting sandbox {name}; once more leaves that to the daemon"));
            }
            () = &mut said, if !told => {
                told = true;
                out::note(&format!("waiting until sandbox {name} is gone"));
            }
        }
    }
}
