//! Commands that need the daemon's configuration: where the file is, and `hearth serve` with a flag per key.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use tracing_subscriber::filter::Targets;

use super::Context;
use super::error::CliError;
use super::out;
use crate::config::LogConfig;
use crate::config::keys::{KEYS, Key};
use crate::config::layers::{self, Loaded};
use crate::logging::Log;

pub(super) const SERVE_EXAMPLES: &str = "\
Examples:
  hearth serve
  hearth serve --instance blue --listen 127.0.0.1:5018 --cidr 10.13.0.0/16 \\
      --veth-prefix blu
  HEARTH_RECLAIM_MODE=off hearth serve --log-format json
  hearth serve --print-config > /etc/hearth/hearth.toml

Every setting has a TOML key, a variable and a flag: `cidr` in [network] is
HEARTH_NETWORK_CIDR and --network-cidr. Flags win over variables, variables over
the file, the file over defaults. HEARTH_LOG sets the log filter (default info),
such as HEARTH_LOG=hearth_node=debug,info.";

/// Which configuration file.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ConfigFile {
    /// Configuration file, which must exist; else /etc/hearth/hearth.toml is read if it is there
    #[arg(long, env = "HEARTH_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

impl ConfigFile {
    /// Loads file and environment, with these flags above them.
    pub(super) fn load(&self, flags: &[(&'static Key, String)]) -> Result<Loaded, CliError> {
        let file = self.config.as_deref().filter(|p| !p.as_os_str().is_empty());
        layers::load(file, std::env::vars_os(), flags)
            .map_err(|e| CliError::usage("configuration", e.to_string()))
    }
}

/// Configuration of commands that work on the state directory.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct StateArgs {
    #[command(flatten)]
    file: ConfigFile,
    /// State directory, if not the configured one
    #[arg(long, value_name = "DIR")]
    state_dir: Option<String>,
}

impl StateArgs {
    /// Loads the configuration.
    pub(super) fn load(&self) -> Result<Loaded, CliError> {
        let key = KEYS.iter().find(|k| k.name == "state_dir");
        let flags: Vec<_> = key.zip(self.state_dir.clone()).into_iter().collect();
        self.file.load(&flags)
    }
}

/// One flag per configuration key.
#[derive(Debug, Clone, Default)]
pub(super) struct KeyFlags(Vec<(&'static Key, String)>);

impl clap::Args for KeyFlags {
    fn augment_args(command: Command) -> Command {
        KEYS.iter().fold(command, |command, key| {
            let heading = match key.section() {
                "" => "Settings".to_owned(),
                section => format!("Settings [{section}]"),
            };
            let short_form = (key.section() == "network").then(|| key.leaf().replace('_', "-"));
            command.arg(
                Arg::new(key.name)
                    .long(key.flag())
                    .visible_aliases(short_form)
                    .hide(key.hidden())
                    .value_name(key.placeholder)
                    .help(key.help)
                    .help_heading(heading)
                    .action(ArgAction::Set),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KeyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |key: &'static Key| matches.get_one::<String>(key.name).map(|value| (key, value.clone()));
        Ok(Self(KEYS.iter().filter_map(given).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Arguments of `hearth serve`.
#[derive(Debug, clap::Args)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    file: ConfigFile,
    /// Print the configuration, with the source of each value, and end
    #[arg(long)]
    print_config: bool,
    #[command(flatten)]
    keys: KeyFlags,
}

/// `hearth serve`.
pub(super) fn serve(args: &ServeArgs, context: &Context) -> Result<ExitCode, CliError> {
    let loaded = args.file.load(&args.keys.0)?;
    if args.print_config {
        if context.json {
            out::json(&loaded.to_json())?;
        } else {
            out::print(&loaded.to_toml())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let log = start_log(&loaded.config.log, "info")?;
    for note in &loaded.notes {
        tracing::warn!("{note}");
    }
    crate::serve::run(&loaded.config, log.lines()).map_err(|e| CliError::failed("serve", format!("{e:#}")))
}

/// Starts logging. `filter` holds where HEARTH_LOG is not set.
pub(super) fn start_log(config: &LogConfig, filter: &str) -> Result<Log, CliError> {
    let wanted = std::env::var("HEARTH_LOG").ok().filter(|v| !v.is_empty());
    let filter: Targets = wanted.as_deref().unwrap_or(filter).parse().map_err(|e| {
        CliError::usage("HEARTH_LOG", format!("{e}")).todo("write such as info or hearth_node=debug,info")
    })?;
    Log::start(config, filter).map_err(|e| CliError::failed("cannot start logging", format!("{e:#}")))
}
