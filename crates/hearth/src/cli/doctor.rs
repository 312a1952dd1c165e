//! `hearth doctor`: shows a diagnosis, once or again and again, and bundles one for a bug report.

mod report;
pub(super) mod text;

use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use hearth_core::layout::Layout;

use super::Context;
use super::configured::StateArgs;
use super::error::{self, CliError};
use super::signals::Signals;
use super::{out, parse};
use crate::config::Config;
use crate::config::layers::Loaded;
use crate::doctor::{Diagnosis, Source, diagnose, diagnose_layout, layouts};

pub(super) const EXAMPLES: &str = "\
Examples:
  hearth doctor
  hearth doctor --all
  hearth doctor --watch 10s
  hearth doctor --layout e2b
  hearth doctor --json | jq '.items[] | select(.state == \"leaked\")'
  hearth doctor report --to report.json

The exit code is 1 if there is a finding, or if something could not be seen: what
is not seen is not clean. Everything can be seen as root alone.";

/// Arguments of `hearth doctor`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    look: LookArgs,
    /// List everything, not the findings alone
    #[arg(long)]
    all: bool,
    /// Look again every so often until stopped
    #[arg(long, value_name = "TIME", value_parser = parse::timeout, num_args = 0..=1, default_missing_value = "5s")]
    watch: Option<u64>,
    #[command(subcommand)]
    command: Option<DoctorCommand>,
}

/// What is looked at.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct LookArgs {
    #[command(flatten)]
    state: StateArgs,
    /// Whose things: hearth, e2b, or a file that describes another orchestrator's
    #[arg(long, value_name = "NAME|FILE", default_value = "hearth")]
    layout: String,
}

#[derive(Debug, Subcommand)]
enum DoctorCommand {
    /// Write what a bug report needs to a file, without secrets
    #[command(after_help = "Examples:\n  hearth doctor report --to report.json")]
    Report {
        #[command(flatten)]
        look: LookArgs,
        /// The file, which must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
    },
}

/// Looks, and shows it.
pub(super) async fn run(args: DoctorArgs, context: &Context) -> Result<u8, CliError> {
    if let Some(DoctorCommand::Report { look, to }) = args.command {
        return report::write(&look, &to, context).await;
    }
    let Some(seconds) = args.watch else {
        let diagnosis = args.look.diagnose(context).await?;
        if context.json {
            out::json(&diagnosis)?;
        } else {
            out::print(&text::diagnosis(&diagnosis, args.all, text::width()))?;
        }
        return Ok(code(&diagnosis));
    };
    let mut signals = Signals::new()?;
    let mut last = error::OK;
    loop {
        let diagnosis = tokio::select! {
            diagnosis = args.look.diagnose(context) => diagnosis?,
            _ = signals.next() => return Ok(last),
        };
        last = code(&diagnosis);
        if context.json {
            let line = serde_json::to_string(&diagnosis);
            out::line(&line.map_err(|e| CliError::failed("cannot write output", e.to_string()))?)?;
        } else {
            let begin = if out::is_terminal() { text::CLEAR } else { "" };
            out::print(&format!("{begin}{}\n", text::diagnosis(&diagnosis, args.all, text::width())))?;
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(seconds.max(1))) => {}
            _ = signals.next() => return Ok(last),
        }
    }
}

/// Whether anybody should look.
fn code(diagnosis: &Diagnosis) -> u8 {
    if diagnosis.is_clean() { error::OK } else { error::FAILED }
}

impl LookArgs {
    /// The configuration of the instance, with the sources of its values.
    pub(super) fn loaded(&self) -> Result<Loaded, CliError> {
        self.state.load()
    }

    /// Another orchestrator's layout; nothing for our own.
    pub(super) fn layout(&self) -> Result<Option<Layout>, CliError> {
        layouts::load(&self.layout).map_err(|why| CliError::usage("--layout", why))
    }

    /// One diagnosis.
    pub(super) async fn diagnose(&self, context: &Context) -> Result<Diagnosis, CliError> {
        if let Some(layout) = self.layout()? {
            let failed = |why| CliError::failed("cannot look at this host", why);
            return diagnose_layout(&layout).await.map_err(failed);
        }
        let config = self.loaded()?.config;
        Ok(diagnose(&config, &source(&config, context)).await)
    }
}

/// Where the instance's daemon is: as said, or where its configuration lets it listen.
pub(super) fn source(config: &Config, context: &Context) -> Source {
    let addr = if context.addr_given { context.addr.clone() } else { config.listen.to_string() };
    Source { addr }
}
