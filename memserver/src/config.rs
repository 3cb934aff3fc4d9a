//! Settings of the daemon: command line, environment, file, defaults.
//!
//! The rule it keeps: a flag beats the environment, which beats the file, which beats the default,
//! and a key that nobody knows is an error instead of a setting that silently does nothing. Opening
//! sockets is left to [`crate::Server`].

mod values;

use std::{
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};
use farpage_fabric::{Allowance, host::Origin, server::SocketAccess};
use farpage_wire::{Endpoint, Persistence, PublicKey, UnknownVariable};
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use self::values::{list, size, time};
use crate::{
    Handover, Server, TiersError,
    server::{DEFAULT_GRACE, DEFAULT_LEASE, DEFAULT_RECONNECT_GRACE, check_tiers},
};

farpage_wire::debug_as_display!(ConfigError);

/// Lends this machine's memory to farpage clients.
#[derive(Debug, Parser)]
#[command(name = "farpage-memserver", version, about, after_help = PRECEDENCE)]
pub struct Cli {
    /// Command to run.
    #[command(subcommand)]
    pub command: Command,
    /// Flags that choose the log, for every command.
    #[command(flatten)]
    pub log: LogArgs,
}

const PRECEDENCE: &str = "\
Logs go to standard error, results to standard output. Exit status: 0 success, 1 failure, 2 wrong usage.";

const SERVE_HELP: &str = "\
Every setting may come from a flag, from its FARPAGE_MEMSERVER_* variable, or from the TOML file that --config names;
a flag beats the variable, the variable beats the file. The file's keys are the flags' names:

    listen = [\"shm:///run/farpage.sock\", \"tcp://0.0.0.0:7400\"]
    capacity = \"8GiB\"
    socket-access = \"owner\"
    lease = \"60s\"
    reconnect-grace = \"10s\"
    grace = \"5s\"
    drain-timeout = \"0s\"
    persist = \"/var/lib/farpage\"
    persist-async = false
    operator-key = [\"/etc/farpage/operators\"]
    log = \"json\"
    log-level = \"info\"

SIGTERM and SIGINT drain: no new clients, those that are there get the grace to finish, then the server exits with 0.
With --drain-timeout they move their memory to their other servers first; the server exits once no client has memory here.
A second signal exits at once. SIGUSR2 replaces the process by the program at its path, which has all that is lent and serves on;
if that cannot serve, this process does. SIGHUP does the same to read the file of --config again; without one, or with a terminal as standard error, it is logged and ignored.
Under systemd, with FileDescriptorStoreMax=, SIGTERM leaves all that is lent to the next process, unless there is a --drain-timeout.

Whoever can connect can borrow memory: a tcp or rdma endpoint has no access control of its own and belongs on a trusted network. Named regions belong
to the key of the client that published them: nobody else can open, replace, list or remove them, except that an operator can list and remove all.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Lend memory until told to stop.
    #[command(after_help = SERVE_HELP)]
    Serve(Box<ServeArgs>),
    /// Print the figures of a running server.
    Stat(StatArgs),
    /// List the named regions of your key, and of all keys if yours is the operator's.
    Names(NamesArgs),
    /// Remove a named region, and free its memory.
    Remove(RemoveArgs),
    /// Print your public key; the key file is made if there is none.
    Key(KeyArgs),
}

/// Flags of `serve`, and settings of the file. Absent flags come from the file or the defaults.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServeArgs {
    /// TOML file with settings.
    #[arg(long, value_name = "FILE", env = "FARPAGE_MEMSERVER_CONFIG")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Endpoint to listen on: shm:///path, tcp://host:port or rdma://host:port; repeat the flag for
    /// several [default: the socket farpage.sock in /run for root, in $XDG_RUNTIME_DIR for others].
    #[arg(
        long,
        value_name = "URL",
        env = "FARPAGE_MEMSERVER_LISTEN",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "list")]
    pub listen: Vec<Endpoint>,
    /// The most memory to lend at any time, such as 8GiB [default: half of what is available now].
    #[arg(long, value_name = "SIZE", env = "FARPAGE_MEMSERVER_CAPACITY", value_parser = farpage_wire::parse_size)]
    #[serde(deserialize_with = "size")]
    pub capacity: Option<ByteSize>,
    /// The most memory to hold for lent bytes, such as 2GiB; the rest of --capacity is in --spill.
    /// The server's own code and stacks come on top [default: all lent bytes may be in memory].
    #[arg(long, value_name = "SIZE", env = "FARPAGE_MEMSERVER_MEMORY", value_parser = farpage_wire::parse_size)]
    #[serde(deserialize_with = "size")]
    pub memory: Option<ByteSize>,
    /// A directory on a disk for lent bytes beyond --memory. The file there is as large as
    /// --capacity, has no name, and is gone with the server: nothing in it outlives a restart. With
    /// a spill file, clients over rdma need an adapter with on-demand paging at the server.
    #[arg(long, value_name = "DIR", env = "FARPAGE_MEMSERVER_SPILL")]
    pub spill: Option<PathBuf>,
    /// A directory on a disk that keeps published names, with their bytes: a server that is started
    /// with the directory again has them, also after a kill or a power cut. A publication is on the
    /// disk before it is answered. The directory has to exist, and is one server's at a time.
    #[arg(long, value_name = "DIR", env = "FARPAGE_MEMSERVER_PERSIST")]
    pub persist: Option<PathBuf>,
    /// Answer publications before they are on the disk of --persist. After a crash a name may be an
    /// older version, and is a whole one.
    #[arg(
        long,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        value_name = "BOOL",
        env = "FARPAGE_MEMSERVER_PERSIST_ASYNC"
    )]
    pub persist_async: Option<bool>,
    /// The weight of the clients of one address, or over shm of one user, such as 10.0.0.7=4 or
    /// user:1000=2; repeat the flag for several. When memory is short, these clients keep the part
    /// of --memory that their weight is of all weights [default: 1 for each].
    #[arg(
        long,
        value_name = "WHO=WEIGHT",
        env = "FARPAGE_MEMSERVER_SHARE",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "list")]
    pub share: Vec<ShareWeight>,
    /// Users who may connect to shm:// sockets [default: owner].
    #[arg(long, value_enum, env = "FARPAGE_MEMSERVER_SOCKET_ACCESS")]
    pub socket_access: Option<Access>,
    /// Time after which a silent client loses its memory, even if a debugger stopped the client
    /// [default: 60s].
    #[arg(long, value_name = "DURATION", env = "FARPAGE_MEMSERVER_LEASE", value_parser = farpage_wire::parse_time)]
    #[serde(deserialize_with = "time")]
    pub lease: Option<Duration>,
    /// Time for a client over tcp or rdma to come back after its connection closed without a
    /// goodbye. Afterwards the client loses its memory; over shm at once [default: 10s].
    #[arg(long, value_name = "DURATION", env = "FARPAGE_MEMSERVER_RECONNECT_GRACE", value_parser = farpage_wire::parse_time)]
    #[serde(deserialize_with = "time")]
    pub reconnect_grace: Option<Duration>,
    /// Time for clients to finish after SIGTERM [default: 5s].
    #[arg(long, value_name = "DURATION", env = "FARPAGE_MEMSERVER_GRACE", value_parser = farpage_wire::parse_time)]
    #[serde(deserialize_with = "time")]
    pub grace: Option<Duration>,
    /// Time after SIGTERM for clients to move their memory to other servers, which their runtimes
    /// do by themselves. The server ends when no client has memory here. Replaces --grace [default:
    /// 0: nobody is asked].
    #[arg(long, value_name = "DURATION", env = "FARPAGE_MEMSERVER_DRAIN_TIMEOUT", value_parser = farpage_wire::parse_time)]
    #[serde(deserialize_with = "time")]
    pub drain_timeout: Option<Duration>,
    /// Key that may list and remove all named regions: a public key as `farpage-memserver key`
    /// prints it, or a file with one in each line; repeat the flag for several [default: none].
    #[arg(
        long,
        value_name = "KEY|FILE",
        env = "FARPAGE_MEMSERVER_OPERATOR_KEY",
        value_delimiter = ','
    )]
    #[serde(deserialize_with = "list")]
    pub operator_key: Vec<String>,
    /// The most memory to lend to clients of one address, or over shm of one user, together
    /// [default: all of the capacity].
    #[arg(
        long,
        value_name = "SIZE",
        env = "FARPAGE_MEMSERVER_CAPACITY_PER_ADDRESS",
        value_parser = farpage_wire::parse_size
    )]
    #[serde(deserialize_with = "size")]
    pub capacity_per_address: Option<ByteSize>,
    /// The most extents of clients of one address, or over shm of one user, together. An array
    /// takes one per GiB, and at least one [default: three quarters of the server's limit, which is
    /// half of `ulimit -n`].
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FARPAGE_MEMSERVER_EXTENTS_PER_ADDRESS"
    )]
    pub extents_per_address: Option<usize>,
    /// The most connections from one address, or over shm of one user. A program has one
    /// connection, and one per worker thread [default: three quarters of the server's limit, over
    /// all endpoints].
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FARPAGE_MEMSERVER_CONNECTIONS_PER_ADDRESS"
    )]
    pub connections_per_address: Option<usize>,
    /// The most data connections of one client [default: a quarter of the server's limit, which is
    /// 4096 or a quarter of `ulimit -n`].
    #[arg(
        long,
        value_name = "NUMBER",
        env = "FARPAGE_MEMSERVER_CONNECTIONS_PER_CLIENT"
    )]
    pub connections_per_client: Option<usize>,
    /// Descriptor of the state of an earlier process, which this one takes over from.
    #[arg(long, value_name = "DESCRIPTOR", hide = true)]
    #[serde(skip)]
    pub take_over: Option<i32>,
    /// Ends once everything is found to be there that taking over needs.
    #[arg(long, hide = true, requires = "take_over")]
    #[serde(skip)]
    pub rehearse: bool,
    /// Format of log lines in the file. The flag is one of every command: see [`LogArgs`].
    #[arg(skip)]
    pub log: Option<LogFormat>,
    /// Events to log, in the file.
    #[arg(skip)]
    pub log_level: Option<String>,
}

/// Flags of `stat`.
#[derive(Args, Clone, Debug)]
pub struct StatArgs {
    /// The server to ask: shm:///path, tcp://host:port or rdma://host:port.
    #[arg(long, value_name = "URL", env = "FARPAGE_MEMSERVER_ENDPOINT")]
    pub endpoint: Endpoint,
    /// One JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// Flags that choose a key.
#[derive(Args, Clone, Debug, Default)]
pub struct KeyArgs {
    /// Your key file [default: $XDG_CONFIG_HOME/farpage/key or ~/.config/farpage/key].
    #[arg(long, value_name = "FILE", env = "FARPAGE_KEY_FILE")]
    pub key_file: Option<PathBuf>,
}

/// Flags of `names`.
#[derive(Args, Clone, Debug)]
pub struct NamesArgs {
    /// Server to ask, and format of the answer.
    #[command(flatten)]
    pub ask: StatArgs,
    /// Key to ask with.
    #[command(flatten)]
    pub key: KeyArgs,
}

/// Flags of `remove`.
#[derive(Args, Clone, Debug)]
pub struct RemoveArgs {
    /// The region's name.
    pub name: String,
    /// The server to ask: shm:///path, tcp://host:port or rdma://host:port.
    #[arg(long, value_name = "URL", env = "FARPAGE_MEMSERVER_ENDPOINT")]
    pub endpoint: Endpoint,
    /// Public key of the region's owner, as `names` prints it, if not yours: for the operator.
    #[arg(long, value_name = "KEY")]
    pub owner: Option<PublicKey>,
    /// Key to act with.
    #[command(flatten)]
    pub key: KeyArgs,
}

/// Flags that choose the log.
#[derive(Args, Clone, Debug, Default)]
pub struct LogArgs {
    /// Format of log lines [default: human].
    #[arg(long, value_enum, global = true, env = "FARPAGE_MEMSERVER_LOG")]
    pub log: Option<LogFormat>,
    /// Events to log: error, warn, info, debug, trace, or per module as in farpage_memserver=debug
    /// [default: info].
    #[arg(long, value_name = "LEVEL", global = true, env = "FARPAGE_LOG")]
    pub log_level: Option<String>,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// One readable line per event.
    #[default]
    Human,
    /// One JSON object per event.
    Json,
}

/// Users who may connect to `shm://` sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// The user that the server runs as.
    #[default]
    Owner,
    /// The group that the server runs as, besides the user.
    Group,
}

impl From<Access> for SocketAccess {
    fn from(access: Access) -> Self {
        match access {
            Access::Owner => Self::Owner,
            Access::Group => Self::Group,
        }
    }
}

/// The weight of one origin's share of `--memory`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareWeight {
    /// Origin of the share's clients.
    pub of: Origin,
    /// Weight of the share, from 1 to 1000.
    pub weight: u32,
}

impl FromStr for ShareWeight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no share: write an address or user:NUMBER, and a weight from 1 to 1000, as in 10.0.0.7=4"
            )
        };
        let (of, weight) = text.split_once('=').ok_or_else(wrong)?;
        let of = match of.strip_prefix("user:") {
            Some(user) => Origin::User(user.parse().map_err(|_| wrong())?),
            None => Origin::from(of.parse::<IpAddr>().map_err(|_| wrong())?),
        };
        let weight = weight
            .parse()
            .ok()
            .filter(|weight| (1..=1000).contains(weight));
        let weight = weight.ok_or_else(wrong)?;
        Ok(Self { of, weight })
    }
}

/// All settings of `serve`, settled.
#[derive(Clone, Debug)]
pub struct Config {
    /// Endpoints to listen on; at least one.
    pub listen: Vec<Endpoint>,
    /// The most memory to lend.
    pub capacity_bytes: u64,
    /// True if the capacity is the default, which the log should say.
    pub capacity_is_default: bool,
    /// The most memory to hold for lent bytes, if that may be less than all of them.
    pub memory_bytes: Option<u64>,
    /// The directory of the spill file.
    pub spill: Option<PathBuf>,
    /// The directory of published names, and the time at which they are there.
    pub persist: Option<(PathBuf, Persistence)>,
    /// Weights of shares; all others have weight 1.
    pub shares: Vec<ShareWeight>,
    /// Users who may connect to `shm://` sockets.
    pub access: SocketAccess,
    /// Time after which a silent client loses its memory.
    pub lease: Duration,
    /// Time for a client to come back after its connection was closed.
    pub reconnect_grace: Duration,
    /// Time for clients to finish after SIGTERM.
    pub grace: Duration,
    /// Time for clients to move their memory away after SIGTERM. Zero: nobody is asked.
    pub drain_timeout: Duration,
    /// Keys whose holders may list and remove all named regions.
    pub operators: Vec<PublicKey>,
    /// The most memory to lend to clients of one address.
    pub capacity_per_address: Option<u64>,
    /// The most extents of clients of one address.
    pub extents_per_address: Option<usize>,
    /// The most connections from one address.
    pub connections_per_address: Option<usize>,
    /// The most data connections of one client.
    pub connections_per_client: Option<usize>,
    /// Format of log lines.
    pub log: LogFormat,
    /// Filter of the logged events, in the syntax of `tracing_subscriber::EnvFilter`.
    pub log_level: String,
}

/// Reason why there is no configuration.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file is not there or not readable.
    #[error("cannot read the configuration file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        r#source: io::Error,
    },
    /// The file is not TOML, has a key that nobody knows, or a value of the wrong kind.
    #[error("the configuration file {path} is wrong: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Position and cause.
        reason: String,
    },
    /// A setting has a value that cannot work.
    #[error("{setting} is {value}: {reason}")]
    Value {
        /// The setting's name.
        setting: &'static str,
        /// Value of the setting.
        value: String,
        /// Cause and remedy.
        reason: &'static str,
    },
    /// A text that is neither a public key nor a file of public keys.
    #[error(
        "operator-key is {given:?}, which is neither a public key nor a file with public keys: {reason}"
    )]
    Keys {
        /// The text.
        given: String,
        /// The cause.
        reason: String,
    },
    /// An unknown variable of the environment.
    #[error(transparent)]
    Variable(#[from] UnknownVariable),
    /// Settings for lending more than memory that do not fit together.
    #[error(transparent)]
    Tiers(#[from] TiersError),
    /// An empty list of endpoints, and no place for a default.
    #[error(
        "no --listen was given, and XDG_RUNTIME_DIR is not set to put a socket in: name one, as in --listen shm:///tmp/farpage.sock"
    )]
    NowhereToListen,
}

impl Config {
    /// Settles `flags`, the file that `flags` names, and the defaults. The environment is merged
    /// into `flags` already.
    pub fn settle(flags: &ServeArgs, log: &LogArgs) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => ServeArgs::read(path)?,
            None => ServeArgs::default(),
        };
        let mut listen = either(&flags.listen, file.listen);
        if listen.is_empty() {
            listen.push(default_endpoint().ok_or(ConfigError::NowhereToListen)?);
        }
        let capacity = flags.capacity.or(file.capacity);
        let persist = flags.persist.clone().or(file.persist);
        let when = match flags.persist_async.or(file.persist_async) {
            Some(true) if persist.is_none() => {
                return Err(ConfigError::Value {
                    setting: "persist-async",
                    value: "true".to_owned(),
                    reason: "there is no directory to write to; give one (--persist), or leave it out",
                });
            }
            Some(true) => Persistence::Soon,
            _ => Persistence::AtOnce,
        };
        let config = Self {
            listen,
            capacity_bytes: capacity.map_or_else(|| available_bytes() / 2, |size| size.as_u64()),
            capacity_is_default: capacity.is_none(),
            memory_bytes: flags.memory.or(file.memory).map(|size| size.as_u64()),
            spill: flags.spill.clone().or(file.spill),
            persist: persist.map(|directory| (directory, when)),
            shares: either(&flags.share, file.share),
            access: flags
                .socket_access
                .or(file.socket_access)
                .unwrap_or_default()
                .into(),
            lease: flags.lease.or(file.lease).unwrap_or(DEFAULT_LEASE),
            reconnect_grace: (flags.reconnect_grace)
                .or(file.reconnect_grace)
                .unwrap_or(DEFAULT_RECONNECT_GRACE),
            grace: flags.grace.or(file.grace).unwrap_or(DEFAULT_GRACE),
            drain_timeout: (flags.drain_timeout)
                .or(file.drain_timeout)
                .unwrap_or_default(),
            operators: operators(&either(&flags.operator_key, file.operator_key))?,
            capacity_per_address: (flags.capacity_per_address)
                .or(file.capacity_per_address)
                .map(|size| size.as_u64()),
            extents_per_address: flags.extents_per_address.or(file.extents_per_address),
            connections_per_address: (flags.connections_per_address)
                .or(file.connections_per_address),
            connections_per_client: flags.connections_per_client.or(file.connections_per_client),
            log: log.log.or(file.log).unwrap_or_default(),
            log_level: log
                .log_level
                .clone()
                .or(file.log_level)
                .unwrap_or_else(|| "info".to_owned()),
        };
        config.check()
    }

    /// Keeps the capacity of an earlier process, if no other is set: what that process lends is not
    /// available any more.
    pub fn go_on_from(&mut self, handed: &Handover) {
        if self.capacity_is_default {
            self.capacity_bytes = handed.capacity_bytes();
        }
    }

    fn check(self) -> Result<Self, ConfigError> {
        for (setting, bytes) in [
            ("capacity", Some(self.capacity_bytes)),
            ("capacity-per-address", self.capacity_per_address),
        ] {
            if let Some(bytes) = bytes.filter(|bytes| *bytes < LEAST_CAPACITY_BYTES) {
                return Err(ConfigError::Value {
                    setting,
                    value: format!("{bytes} bytes"),
                    reason: "no client could be lent an array; give it 1MiB or more, such as 8GiB (a plain number is bytes)",
                });
            }
        }
        let limits = [
            (
                "extents-per-address",
                self.extents_per_address == Some(0),
                "no client could be lent anything; give it 1 or more, or leave it out",
            ),
            (
                "connections-per-address",
                self.connections_per_address == Some(0),
                "no client could connect; give it 1 or more, or leave it out",
            ),
            (
                "connections-per-client",
                self.connections_per_client == Some(0),
                "no client could read or write; give it 1 or more, or leave it out",
            ),
        ];
        if let Some((setting, _, reason)) = limits.into_iter().find(|(_, is_none, _)| *is_none) {
            return Err(ConfigError::Value {
                setting,
                value: "0".to_owned(),
                reason,
            });
        }
        log_filter(&self.log_level)?;
        check_tiers(
            self.memory_bytes,
            self.capacity_bytes,
            self.spill.is_some(),
            !self.shares.is_empty(),
        )?;
        for (setting, time, reason) in [
            (
                "lease",
                self.lease,
                "a client could not renew it in time; give it 100ms or more",
            ),
            (
                "reconnect-grace",
                self.reconnect_grace,
                "a client that was cut off could not come back in time; give it 100ms or more",
            ),
        ] {
            if time < SHORTEST_LEASE {
                let value = humantime::format_duration(time).to_string();
                return Err(ConfigError::Value {
                    setting,
                    value,
                    reason,
                });
            }
        }
        Ok(self)
    }
}

impl From<Config> for Server {
    fn from(config: Config) -> Self {
        let weights = config.shares.iter().map(|share| (share.of, share.weight));
        Self {
            listen: config.listen,
            capacity_bytes: config.capacity_bytes,
            lease: config.lease,
            reconnect_grace: config.reconnect_grace,
            grace: config.grace,
            drain_timeout: config.drain_timeout,
            access: config.access,
            operators: config.operators,
            connections_per_address: config.connections_per_address,
            connections_per_client: config.connections_per_client,
            capacity_per_address: config.capacity_per_address,
            extents_per_address: config.extents_per_address,
            memory_bytes: config.memory_bytes,
            spill: config.spill,
            persist: config.persist,
            weights: weights.collect(),
        }
    }
}

/// Smallest capacity. A smaller size is one whose unit was left out. An array takes 64 KiB at
/// least, and most take 16 MiB.
const LEAST_CAPACITY_BYTES: u64 = 1 << 20;

/// Shortest lease and reconnect grace. Clients renew a few times per lease, from a thread that
/// competes for a core: scheduling delays alone would end shorter sessions.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// Returns the filter of the logged events.
///
/// # Errors
/// [`ConfigError`]: `level` is none.
pub fn log_filter(level: &str) -> Result<EnvFilter, ConfigError> {
    EnvFilter::try_new(level).map_err(|error| ConfigError::Value {
        setting: "log-level",
        value: format!("{level:?} ({error})"),
        reason: "give it error, warn, info, debug or trace",
    })
}

/// Returns the values of the flags, or if there are none those of the file.
fn either<T: Clone>(flags: &[T], file: Vec<T>) -> Vec<T> {
    match flags.is_empty() {
        true => file,
        false => flags.to_vec(),
    }
}

impl ServeArgs {
    /// Reads the settings of a file.
    fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|error| ConfigError::Parse {
            path: path.to_owned(),
            reason: error.to_string().trim_end().to_owned(),
        })
    }
}

/// Returns the public keys in `given`, and those in the files that `given` names.
fn operators(given: &[String]) -> Result<Vec<PublicKey>, ConfigError> {
    let mut keys = Vec::new();
    for text in given {
        let wrong = |reason: String| ConfigError::Keys {
            given: text.clone(),
            reason,
        };
        if let Ok(key) = text.parse() {
            keys.push(key);
            continue;
        }
        let file = fs::read_to_string(text).map_err(|error| wrong(error.to_string()))?;
        let lines = file.lines().map(str::trim);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let key = line.parse::<PublicKey>();
            keys.push(key.map_err(|error| wrong(format!("a line of it is none; {error}")))?);
        }
    }
    Ok(keys)
}

/// Returns the default endpoint of a server: a socket that only this user (root: this host's root)
/// can create.
pub fn default_endpoint() -> Option<Endpoint> {
    let directory = match nix::unistd::geteuid().is_root() {
        true => PathBuf::from("/run"),
        false => PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?),
    };
    format!("shm://{}", directory.join("farpage.sock").display())
        .parse()
        .ok()
}

/// Returns the bytes that could be lent now without swapping: the kernel's available memory, within
/// the limits of this process's control groups.
pub fn available_bytes() -> u64 {
    Allowance::of_this_process().available_bytes
}

#[cfg(test)]
mod tests;
