//! `farpage-memserver`: the daemon, and the commands that look at one or manage its names.
//!
//! The rule it keeps: exit 0 for success and for a drain on request, 1 for what the world refused,
//! 2 for wrong usage. Everything else is left to the library.

// `println!` panics when nobody reads any more.
#![deny(clippy::print_stdout)]

mod log;

use std::{
    env,
    io::{self, IsTerminal, Write},
    process::{self, ExitCode},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use bytesize::ByteSize;
use clap::Parser;
use farpage_fabric::{SessionOptions, Visit, key::Key};
use farpage_memserver::{
    Handover, Server, ServiceManager, Signals, Successor,
    config::{
        Cli, Command, Config, ConfigError, KeyArgs, LogArgs, LogFormat, NamesArgs, RemoveArgs,
        ServeArgs, StatArgs, available_bytes, log_filter,
    },
};
use farpage_wire::{
    ClientStat, Durability, Endpoint, NamedRegion, PersistStat, ServerStat, ShareStat, TierStat,
    check_environment,
};
use signal_hook::consts::{SIGHUP, SIGUSR2};
use tracing::{info, warn};
use tracing_subscriber::fmt::MakeWriter;

use crate::log::LogWriter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farpage-memserver: {error:#}");
            match error.is::<ConfigError>() {
                true => ExitCode::from(2),
                false => ExitCode::FAILURE,
            }
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    check_environment().map_err(ConfigError::from)?;
    match &cli.command {
        Command::Serve(flags) => serve(flags, &cli.log),
        Command::Stat(flags) => stat(flags, &cli.log),
        Command::Names(flags) => names(flags, &cli.log),
        Command::Remove(flags) => remove(flags, &cli.log),
        Command::Key(flags) => key(flags).and_then(|key| say(&format!("{}\n", key.public()))),
    }
}

fn serve(flags: &ServeArgs, log: &LogArgs) -> anyhow::Result<()> {
    // Before the first thread: all others leave signals to that one.
    let (signals, asked) =
        Signals::take().context("cannot take SIGTERM, SIGINT, SIGHUP and SIGUSR2")?;
    let mut config = Config::settle(flags, log)?;
    let mut handed = flags.take_over.map(Handover::inherit).transpose()?;
    if let Some(handed) = &handed {
        config.go_on_from(handed);
    }
    let manager = ServiceManager::of_this_process();
    // Behind all that may fail.
    if flags.rehearse
        && let Some(handed) = handed
    {
        return Ok(Server::from(config).rehearse(handed)?);
    }
    let successor = Successor::of_this_process(Arc::clone(&signals));
    // The guard writes waiting lines at the end.
    let (writer, guard) = LogWriter::stderr();
    start_log(config.log, &config.log_level, writer.clone())?;
    (writer.say_what_is_dropped()).context("cannot start the log's thread")?;
    let manager = manager.unwrap_or_else(|error| {
        warn!(%error, "cannot speak to the service manager that NOTIFY_SOCKET names");
        None
    });
    if manager.is_some() && handed.is_none() {
        handed = Handover::kept();
        if let Some(handed) = &handed {
            config.go_on_from(handed);
        }
    }
    // A signal that comes early must drain, too. Nobody is served while names are loaded, which
    // takes long: a signal then stops at once.
    signals.set_loading(config.persist.is_some() && handed.is_none());
    say_capacity(&config);
    let server = Server::from(config.clone());
    let mut running = match handed {
        Some(handed) => server.take_over(handed)?,
        None => server.start()?,
    };
    signals.set_loading(false);
    if let Some(manager) = &manager
        && let Err(error) = manager.say_ready()
    {
        warn!(%error, "cannot tell the service manager that clients are served");
    }
    let signal = loop {
        match asked
            .recv()
            .context("the thread that takes signals has ended")?
        {
            SIGHUP if flags.config.is_none() => {
                warn!("SIGHUP: serving on, since there is no --config to read; SIGTERM drains");
            }
            SIGHUP if io::stderr().is_terminal() => {
                warn!(
                    "SIGHUP: serving on, as it may come from a terminal that closes; SIGUSR2 reads --config anew"
                );
            }
            signal @ (SIGUSR2 | SIGHUP) => {
                info!("restarting");
                let failed = running.restart(&successor);
                let name = if signal == SIGHUP {
                    "SIGHUP"
                } else {
                    "SIGUSR2"
                };
                warn!("{name}: {failed}");
            }
            signal => break signal,
        }
    };
    if let Some(manager) = manager.filter(ServiceManager::keeps_descriptors)
        && config.drain_timeout.is_zero()
    {
        match running.store(&manager) {
            Ok(()) => {
                drop(guard);
                process::exit(0)
            }
            Err(failed) => warn!("{failed}: clients lose what they have here"),
        }
    }
    match config.drain_timeout.is_zero() {
        true => info!(
            signal,
            "draining: no new clients, those that are there get {:?} to finish; a second signal stops at once",
            config.grace
        ),
        false => info!(
            signal,
            "draining: no new clients, those that are there get {:?} to move their memory to other servers; a second signal stops at once",
            config.drain_timeout
        ),
    }
    running.shutdown();
    info!("stopped");
    Ok(())
}

fn say_capacity(config: &Config) {
    let capacity = ByteSize::b(config.capacity_bytes);
    let available = ByteSize::b(available_bytes());
    if let (Some(memory_bytes), Some(directory)) = (config.memory_bytes, &config.spill) {
        info!(
            memory_bytes,
            spill = %directory.display(),
            "lending more than memory: what {} have no room for goes to a file in {}, which is gone with this server",
            ByteSize::b(memory_bytes),
            directory.display()
        );
    }
    let in_memory = ByteSize::b(config.memory_bytes.unwrap_or(config.capacity_bytes));
    if config.capacity_is_default {
        info!(
            capacity_bytes = capacity.as_u64(),
            "no --capacity was given: lending up to {capacity}, half of the {available} available now"
        );
    } else if in_memory > available {
        let setting = if config.memory_bytes.is_some() {
            "memory"
        } else {
            "capacity"
        };
        warn!(
            capacity_bytes = capacity.as_u64(),
            available_bytes = available.as_u64(),
            "--{setting} {in_memory} is more than the {available} available now: this machine may swap, or kill this server"
        );
    }
}

fn stat(flags: &StatArgs, log: &LogArgs) -> anyhow::Result<()> {
    let figures = visit(&flags.endpoint, log)?.stat()?;
    say(&match flags.json {
        true => serde_json::to_string(&figures)? + "\n",
        false => table(&figures),
    })
}

/// Writes to standard output. A reader that has seen enough (`| head`) is no failure.
fn say(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

fn names(flags: &NamesArgs, log: &LogArgs) -> anyhow::Result<()> {
    let mut visit = visit(&flags.ask.endpoint, log)?;
    let key = key(&flags.key)?;
    visit.identify(&key)?;
    let names = visit.names()?;
    say(&match (flags.ask.json, names.is_empty()) {
        (true, _) => serde_json::to_string(&names)? + "\n",
        (false, true) => format!("no named regions belong to your key {}\n", key.public()),
        (false, false) => names.iter().map(line).collect(),
    })
}

/// Formats a named region. The name, which varies in length, comes last.
fn line(named: &NamedRegion) -> String {
    let size = ByteSize::b(named.bytes).to_string();
    let state = if named.in_use { "in use" } else { "free" };
    let (readers, old) = (named.readers, named.old_versions);
    let readers = match old {
        0 => format!("{readers} readers"),
        _ => format!("{readers} readers, old versions: {old}"),
    };
    let durable = match &named.durability {
        Durability::Memory => "in memory".to_owned(),
        Durability::Disk => "on disk".to_owned(),
        Durability::Soon => "on disk soon".to_owned(),
        Durability::Damaged(reason) => format!("DAMAGED ({reason})"),
        Durability::Failed(reason) => format!("NOT ON DISK ({reason})"),
    };
    format!(
        "{}  {size:>10}  {state:<6}  {readers:<9}  {durable:<12}  {}\n",
        named.owner,
        named.name.escape_debug()
    )
}

fn remove(flags: &RemoveArgs, log: &LogArgs) -> anyhow::Result<()> {
    let mut visit = visit(&flags.endpoint, log)?;
    visit.identify(&key(&flags.key)?)?;
    Ok(visit.remove(&flags.name, flags.owner)?)
}

fn key(flags: &KeyArgs) -> anyhow::Result<Key> {
    let file = flags.key_file.clone().map_or_else(Key::default_file, Ok)?;
    Ok(Key::load_or_make(&file)?)
}

fn visit(endpoint: &Endpoint, log: &LogArgs) -> anyhow::Result<Visit> {
    start_log(
        log.log.unwrap_or_default(),
        log.log_level.as_deref().unwrap_or("warn"),
        io::stderr,
    )?;
    let options = SessionOptions {
        deadline: VISIT_DEADLINE,
        ..SessionOptions::default()
    };
    Ok(Visit::connect(endpoint, &options)?)
}

/// Deadline of a visit: a person or a monitor waits, and a slower server is not healthy.
const VISIT_DEADLINE: Duration = Duration::from_secs(5);

fn table(figures: &ServerStat) -> String {
    let size = |bytes| ByteSize::b(bytes).to_string();
    let rows = [
        ("version", figures.version.clone()),
        (
            "uptime",
            humantime::format_duration(Duration::from_secs(figures.uptime_ms / 1000)).to_string(),
        ),
        (
            "state",
            if figures.draining {
                "draining"
            } else {
                "serving"
            }
            .to_owned(),
        ),
        ("capacity", size(figures.capacity_bytes)),
        ("granted", size(figures.granted_bytes)),
        ("kept by clients", size(figures.retained_bytes)),
        ("resident", size(figures.resident_bytes)),
        (
            "pages of clients",
            match (figures.logical_bytes, figures.stored_bytes) {
                (0, 0) if figures.granted_bytes > 0 => {
                    "none reported yet (clients report with each renewal of their lease)".to_owned()
                }
                (logical, stored) => format!("{} stored in {}", size(logical), size(stored)),
            },
        ),
        ("long requests", size(figures.request_bytes)),
        ("tiers", tiers(&figures.tiers)),
        ("names on disk", on_disk(&figures.persist)),
        (
            "sessions",
            match figures.lost_sessions {
                0 => figures.sessions.to_string(),
                lost => format!(
                    "{}, and {lost} whose connection was lost and that may come back",
                    figures.sessions
                ),
            },
        ),
        ("extents", figures.extents.to_string()),
        ("named regions", figures.named_regions.to_string()),
        (
            "readers",
            format!(
                "{}; replaced versions that they read: {}",
                figures.readers, figures.old_versions
            ),
        ),
        (
            "read by clients",
            format!(
                "{} (shared memory and RDMA not counted)",
                size(figures.bytes_read)
            ),
        ),
        (
            "written by clients",
            format!(
                "{} (shared memory and RDMA not counted)",
                size(figures.bytes_written)
            ),
        ),
    ];
    let shares = figures
        .shares
        .iter()
        .map(|share| ("share of", share_of(share)));
    let clients = figures.clients.iter().map(|it| ("client", client(it)));
    (rows.into_iter().chain(shares).chain(clients))
        .map(|(name, value)| format!("{name:<20}{value}\n"))
        .collect()
}

fn client(client: &ClientStat) -> String {
    let ClientStat {
        name,
        address,
        connected,
        granted_bytes,
        extents,
    } = client;
    let granted = ByteSize::b(*granted_bytes);
    let lost = if *connected { "" } else { ", connection lost" };
    format!(
        "{} at {address}: {granted} in {extents} extents{lost}",
        name.escape_debug()
    )
}

fn share_of(share: &ShareStat) -> String {
    let ShareStat {
        of,
        weight,
        hot_bytes,
        sessions,
    } = share;
    let hot = ByteSize::b(*hot_bytes);
    format!("{of}, weight {weight}: {hot} in memory, by {sessions} sessions")
}

fn on_disk(persist: &PersistStat) -> String {
    let PersistStat {
        directory,
        disk_bytes,
        written_bytes,
        damaged_names,
        error,
    } = persist;
    if directory.is_empty() {
        return "none: a restart loses all names (see --persist)".to_owned();
    }
    let (disk, written) = (ByteSize::b(*disk_bytes), ByteSize::b(*written_bytes));
    let damaged = match damaged_names {
        0 => String::new(),
        names => format!(", {names} names DAMAGED (see `names`)"),
    };
    let failed = match error.is_empty() {
        true => String::new(),
        false => format!("; NOT WRITTEN any more: {error}"),
    };
    format!("{disk} in {directory}, {written} written since the start{damaged}{failed}")
}

fn tiers(tiers: &TierStat) -> String {
    let size = |bytes| ByteSize::b(bytes).to_string();
    if tiers.memory_bytes == 0 {
        return "none: all that is lent may be in memory (see --memory)".to_owned();
    }
    format!(
        "{} of {} held: {} hot, {} compressed in {}, {} spilled; {} evictions ({} forced), {} fetches, p50 {} us, p99 {} us; {} touched in vain; {} without room, {} spill errors",
        size(tiers.held_bytes),
        size(tiers.memory_bytes),
        size(tiers.hot_bytes),
        size(tiers.compressed_bytes),
        size(tiers.pool_bytes),
        size(tiers.spilled_bytes),
        tiers.evictions,
        tiers.forced_seals,
        tiers.fetches,
        tiers.fetch_p50_us,
        tiers.fetch_p99_us,
        size(tiers.stray_bytes),
        tiers.no_room,
        tiers.spill_errors,
    )
}

fn start_log(
    format: LogFormat,
    level: &str,
    writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static,
) -> anyhow::Result<()> {
    let filter = log_filter(level)?;
    // As the NO_COLOR convention asks.
    let colours = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colours && io::stderr().is_terminal())
        .with_writer(writer);
    match format {
        LogFormat::Human => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}
