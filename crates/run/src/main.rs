//! `farpage`: runs a program as it is, with its large allocations in remote memory.
//!
//! The rule it keeps: the exit status is the program's; 125 means that farpage could not start it,
//! 126 and 127 have a shell's meaning. The preloaded library (`preload.rs`) serves the program's
//! requests.

mod elf;
mod explain;
mod program;
mod relay;
mod report;
mod rlimits;
mod sanitizer;
mod scratch;
mod shares;
mod small;
mod starts;

use std::{
    env,
    ffi::{OsStr, OsString},
    fmt, io, mem,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, ExitCode, ExitStatus},
};

use anyhow::{Context, Result, bail};
use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand};
use farpage::{Allowance, FaultMode, Redundancy};
use farpage_memserver::{RunningServer, Server};
use farpage_wire::{Endpoint, check_environment};

use program::Program;
use relay::Relay;
use rlimits::Limits;
use shares::{LEAST_BYTES, Shares};
use small::Small;

/// Smallest capacity: a smaller number lacks its unit.
const LEAST_CAPACITY_BYTES: u64 = 1 << 20;

/// Largest `--min-bytes` with small objects remote by default: a larger one says that some memory
/// is to be local.
const MIN_BYTES_OF_SMALL: ByteSize = ByteSize::kib(128);

/// The library's file: beside this program, in `../lib`, or where cargo leaves it for tests.
const LIBRARY: &str = "libfarpage_preload.so";

#[derive(Parser)]
#[command(
    name = "farpage",
    version,
    about = "Runs programs with their large allocations in remote memory"
)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Runs a program: its large allocations live on a memory server, and a budget of them is in
    /// local memory.
    #[command(args_override_self = true)]
    Run(RunOptions),
}

#[derive(Args)]
struct RunOptions {
    /// Local memory for the program's large allocations [default: a quarter of what is available].
    #[arg(long, env = "FARPAGE_BUDGET")]
    budget: Option<ByteSize>,
    /// A memory server, such as tcp://10.0.0.2:7400; may be given several times [default: one of
    /// its own on this machine, which ends with the program].
    #[arg(long)]
    server: Vec<Endpoint>,
    /// Protection of pages. copies=2: each is on two servers, and outlives either; takes twice the
    /// memory. parity=4+1: pages are spread over five servers, and outlive any one of them; takes
    /// about 1.3 times the memory [default: none].
    #[arg(long, env = "FARPAGE_REDUNDANCY")]
    redundancy: Option<Redundancy>,
    /// The most that the program can have allocated there at once. With --server, all of it is
    /// reserved [default: what the server has, and nothing is reserved; without --server what this
    /// machine has beside the budget, within `ulimit -v`].
    #[arg(long)]
    capacity: Option<ByteSize>,
    /// Requests of this size and more go there from the beginning.
    #[arg(long, default_value = "128KiB")]
    min_bytes: ByteSize,
    /// Makes smaller requests remote, too. `auto`: once they take more than a quarter of the
    /// budget, later ones are remote, by jemalloc. `yes`: from the beginning. `no`: never
    /// [default: auto, and no with --min-bytes of more than 128KiB].
    #[arg(long, value_enum)]
    small: Option<Small>,
    /// Size of a page, which comes and goes as a whole. Small pages suit scattered access, large
    /// ones programs that go through memory in order.
    #[arg(long, env = "FARPAGE_PAGE_SIZE", default_value = "16KiB")]
    page_size: ByteSize,
    /// Says at the end on standard error how much memory was used, and what moved.
    #[arg(long)]
    stats: bool,
    /// Interposes the programs that the program starts, too. They share the budget.
    #[arg(long)]
    children: bool,
    /// The threads that touch absent memory fetch it themselves, without a hand-off to another
    /// thread [x86-64, where it is the default].
    #[arg(long, overrides_with = "fillers")]
    in_thread: bool,
    /// Threads of farpage fetch absent memory, for programs that do what --in-thread cannot serve.
    #[arg(long, overrides_with = "in_thread")]
    fillers: bool,
    /// Brings memory under paging at its first touch, instead of when more is allocated than the
    /// budget: the budget holds in whole pages from the beginning.
    #[arg(long)]
    at_once: bool,
    /// Says what would be interposed, and what would not and why, and runs nothing.
    #[arg(long)]
    explain: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let Verb::Run(options) = Cli::parse().verb;
    match run(&options) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("farpage: {error:#}");
            let refused = error.downcast_ref::<NotRun>();
            ExitCode::from(refused.map_or(125, |refused| refused.0))
        }
    }
}

/// The reason why the program cannot be run, with the status that a shell gives for it.
#[derive(Debug)]
struct NotRun(u8, String);

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.1)
    }
}

impl std::error::Error for NotRun {}

fn run(options: &RunOptions) -> Result<u8> {
    check_environment()?;
    let (name, arguments) = options.command.split_first().expect("clap requires one");
    let path = find(name)?;
    let program = Program::read(&path).map_err(|error| cannot_start(&path, error))?;
    let faults_by = FaultsBy::chosen(options)?;
    if options.explain {
        print!("{}", program.explain(&path, &sizes(options, faults_by)?));
        return Ok(if program.refusal().is_some() { 1 } else { 0 });
    }
    if let Some(why) = program.refusal() {
        bail!("{} cannot be interposed: {why}", path.display());
    }
    if let Some(capacity) = options
        .capacity
        .filter(|it| it.as_u64() < LEAST_CAPACITY_BYTES)
    {
        bail!(
            "--capacity {capacity} is too little: give it 1MiB or more, such as 2GiB (a plain number is bytes)"
        );
    }
    let redundancy = options.redundancy.unwrap_or_default();
    let copies = redundancy.copies();
    if copies > options.server.len().max(1) {
        let servers = redundancy.servers();
        bail!(
            "--redundancy {redundancy} needs {servers} memory servers, each on a machine of its own: give --server {servers} times, or leave it out"
        );
    }
    let sizes = sizes(options, faults_by)?;
    let relay = Relay::begin();
    let limits = Limits::raise();
    let folder = scratch::make()?;
    let library = scratch::preloadable(library()?, folder.path())?;
    let mut command = Command::new(&path);
    command.arg0(name).args(arguments);
    let page_bytes = sizes.page_size.as_u64();
    if env::var_os("FARPAGE_PAGE_SIZE").is_none() {
        command.env("FARPAGE_RUN_ADDS_PAGE_SIZE", "1");
    }
    command.env("FARPAGE_PAGE_SIZE", format!("{page_bytes}B"));
    let set = |command: &mut Command, name: &str, value: &str| {
        command.env(format!("FARPAGE_RUN_{name}"), value);
    };
    set(&mut command, "BUDGET", &sizes.budget.as_u64().to_string());
    if let Some(capacity) = sizes.capacity {
        set(&mut command, "CAPACITY", &capacity.as_u64().to_string());
    }
    set(
        &mut command,
        "MIN_BYTES",
        &options.min_bytes.as_u64().to_string(),
    );
    for (flag, name) in [
        (options.stats, "STATS"),
        (options.children, "CHILDREN"),
        (options.at_once, "AT_ONCE"),
        (options.server.is_empty(), "ON_DEMAND"),
    ] {
        if flag {
            set(&mut command, name, "1");
        }
    }
    sizes.small.pass(&mut command);
    match sizes.faults_by {
        FaultsBy::Fillers => {}
        FaultsBy::Thread => set(&mut command, "IN_THREAD", "1"),
        FaultsBy::ThreadIfPossible => set(&mut command, "IN_THREAD", "if possible"),
    }
    let before = env::var_os("LD_PRELOAD").unwrap_or_default();
    let mut preload = library;
    command.env("FARPAGE_RUN_LIBRARIES", &preload);
    command.env("FARPAGE_RUN_FOLDER", folder.path());
    if !before.is_empty() {
        preload.push(OsStr::new(":"));
        preload.push(&before);
    }
    command.env("LD_PRELOAD", preload);
    // A smaller budget is the program's alone: children that it forks allocate locally.
    let shares = match options.children || sizes.budget.as_u64() >= LEAST_BYTES {
        true => {
            let socket = folder.path().join("shares.sock");
            set(&mut command, "SHARES", &socket.to_string_lossy());
            Some(Shares::start(&socket, sizes.budget.as_u64())?)
        }
        false => None,
    };
    if let Some(redundancy) = options.redundancy {
        set(&mut command, "REDUNDANCY", &redundancy.to_string());
    }
    let own = match (&options.server[..], sizes.capacity) {
        ([_, ..], _) => {
            let servers: Vec<_> = options.server.iter().map(Endpoint::to_string).collect();
            set(&mut command, "SERVER", &servers.join(","));
            None
        }
        ([], capacity) => {
            let capacity = capacity.expect("a capacity without a server");
            let own = OwnServer::start(capacity, program.static_bytes(), folder.path())?;
            set(&mut command, "SERVER", &own.endpoint);
            Some(own)
        }
    };
    report::begin(folder.path(), &path, &mut command)?;
    limits.prepare(&mut command);
    relay.prepare(&mut command);
    let child = command
        .spawn()
        .map_err(|error| cannot_start(&path, error))?;
    let status = relay.wait(child)?;
    // Processes that the program has made may have their memory there.
    if own.is_some() && !relay.wait_until(|| shares.as_ref().is_none_or(Shares::are_over)) {
        eprintln!(
            "farpage: a signal ends this launcher: processes that the program has left behind lose their remote memory"
        );
    }
    drop(shares);
    // The server ends with this process: nobody is left to wait for.
    mem::forget(own);
    report::say(folder.path(), sizes.budget);
    if status.signal().is_some() {
        report::say_of_children(folder.path());
    }
    Ok(code(status))
}

/// Server of the program's page faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultsBy {
    /// Threads of the runtime.
    Fillers,
    /// The thread that touches the page.
    Thread,
    /// The thread that touches the page, or else threads of the runtime, with a line.
    ThreadIfPossible,
}

impl FaultsBy {
    /// Returns the choice of the options, or else of the library's own variable.
    fn chosen(options: &RunOptions) -> Result<FaultsBy> {
        let is_possible = cfg!(target_arch = "x86_64");
        let by_variable = match env::var("FARPAGE_FAULT_MODE") {
            Ok(mode) => match mode.parse::<FaultMode>() {
                Ok(mode) => Some(mode),
                Err(why) => bail!("FARPAGE_FAULT_MODE={mode}: {why}"),
            },
            Err(_) => None,
        };
        let asked = match (options.in_thread, options.fillers, by_variable) {
            (true, ..) | (_, false, Some(FaultMode::InThread)) => Some(FaultsBy::Thread),
            (_, true, _) | (.., Some(FaultMode::Filler)) => Some(FaultsBy::Fillers),
            (.., None) => None,
            (.., Some(mode)) => bail!("FARPAGE_FAULT_MODE: farpage run has no mode {mode:?}"),
        };
        match asked {
            Some(FaultsBy::Thread) if !is_possible => {
                bail!(
                    "--in-thread works on x86-64 alone: leave it out, and filler threads serve the faults"
                )
            }
            Some(asked) => Ok(asked),
            None if is_possible => Ok(FaultsBy::ThreadIfPossible),
            None => Ok(FaultsBy::Fillers),
        }
    }
}

/// Returns the exit code that a shell gives for `status`.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.unwrap_or(125) as u8
}

fn cannot_start(path: &Path, error: io::Error) -> NotRun {
    let status = if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    };
    NotRun(status, format!("cannot run {}: {error}", path.display()))
}

/// Sizes that follow from the options.
pub(crate) struct Sizes {
    pub(crate) budget: ByteSize,
    /// Bytes that can be allocated. `None`: as many as the server has.
    pub(crate) capacity: Option<ByteSize>,
    pub(crate) min_bytes: ByteSize,
    pub(crate) small: Small,
    pub(crate) page_size: ByteSize,
    pub(crate) faults_by: FaultsBy,
}

fn sizes(options: &RunOptions, faults_by: FaultsBy) -> Result<Sizes> {
    let available = Allowance::of_this_process().available_bytes;
    let budget = options.budget.unwrap_or(ByteSize(available / 4));
    let default = || {
        let rest = available.saturating_sub(budget.as_u64());
        let most = addressable(budget.as_u64());
        ByteSize(rest.max(budget.as_u64()).min(most))
    };
    let default_small = match options.min_bytes > MIN_BYTES_OF_SMALL {
        true => Small::No,
        false => Small::Auto,
    };
    Ok(Sizes {
        budget,
        capacity: (options.capacity).or_else(|| options.server.is_empty().then(default)),
        min_bytes: options.min_bytes,
        small: options.small.unwrap_or(default_small),
        page_size: options.page_size,
        faults_by,
    })
}

/// Returns the bytes that `ulimit -v` and `ulimit -d` leave for an arena. The program maps the
/// arena, extents of the server for it, its budget, and stacks and heaps of threads.
fn addressable(budget: u64) -> u64 {
    const THREADS_BYTES: u64 = 1 << 30;
    let limit = |resource| {
        let mut limit = libc::rlimit {
            rlim_cur: libc::RLIM_INFINITY,
            rlim_max: libc::RLIM_INFINITY,
        };
        // SAFETY: writes to the variable.
        unsafe { libc::getrlimit(resource, &raw mut limit) };
        limit.rlim_cur
    };
    let room = limit(libc::RLIMIT_AS).min(limit(libc::RLIMIT_DATA));
    if room == libc::RLIM_INFINITY {
        return u64::MAX;
    }
    let room = room.saturating_sub(budget);
    (room.saturating_sub(THREADS_BYTES) * 2 / 5).max(room / 8)
}

/// A memory server in this process.
struct OwnServer {
    _server: RunningServer,
    endpoint: String,
}

impl OwnServer {
    /// Starts a server, whose socket is in `folder`, for an arena of `capacity` and the program's
    /// static arrays.
    fn start(capacity: ByteSize, static_bytes: u64, folder: &Path) -> Result<OwnServer> {
        let socket = Endpoint::Shm(folder.join("server.sock"));
        // The arena is a little larger than its capacity, pages are written out of place, and
        // extents are whole.
        let lends = capacity.as_u64() + static_bytes;
        let lends = lends + lends / 4 + (96 << 20);
        let server = Server::of_one_program()
            .listen(socket)
            .capacity(lends)
            .start()
            .context("cannot start a memory server")?;
        let endpoint = server
            .endpoints()
            .first()
            .context("the server listens nowhere")?;
        Ok(OwnServer {
            endpoint: endpoint.to_string(),
            _server: server,
        })
    }
}

/// Finds the program's file as a shell does.
fn find(name: &OsStr) -> Result<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 || name.as_encoded_bytes().contains(&b'/') {
        return Ok(path.to_owned());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders)
        .map(|folder| folder.join(path))
        .find(|path| {
            use std::os::unix::fs::PermissionsExt;
            path.metadata()
                .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
        });
    found.ok_or_else(|| NotRun(127, format!("{}: command not found", name.display())).into())
}

fn library() -> Result<PathBuf> {
    let program = env::current_exe().context("cannot find this program's own file")?;
    let folder = program.parent().context("this program lies in no folder")?;
    let beside = ["deps", ".", "../lib"];
    let mut places = beside.iter().map(|place| folder.join(place).join(LIBRARY));
    let found = places.find(|place| place.is_file());
    found.with_context(|| {
        let folder = folder.display();
        format!("{LIBRARY} is missing: it belongs to {folder} or {folder}/../lib")
    })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixStream,
        time::Duration,
    };

    use farpage_wire::{
        Request, Response,
        control::{self, HELLO_BYTES, Hello, PREFIX_BYTES, Purpose},
    };

    use super::*;

    /// Begins a session as a program does, and returns the lease that the server grants.
    fn lease(server: &OwnServer) -> Duration {
        let path = server.endpoint.strip_prefix("shm://").expect("a socket");
        let mut stream = UnixStream::connect(path).expect("it listens");
        let hello = Hello::new(Purpose::Control).encode();
        stream.write_all(&hello).expect("sent");
        let begin = Request::Begin {
            client: "test".to_owned(),
            resume: None,
        };
        let begin = control::encode(&begin).expect("short");
        stream.write_all(&begin).expect("sent");
        stream.read_exact(&mut [0; HELLO_BYTES]).expect("a hello");
        let mut prefix = [0; PREFIX_BYTES];
        stream.read_exact(&mut prefix).expect("an answer");
        let bytes = control::frame_bytes(prefix, 1 << 10).expect("short");
        let mut answer = vec![0; bytes];
        stream.read_exact(&mut answer).expect("all of it");
        match control::decode(&answer).expect("an answer") {
            Response::Begun { lease_ms, .. } => Duration::from_millis(lease_ms),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_program_may_be_stopped_for_days_at_a_server_of_its_own() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let server = OwnServer::start(ByteSize::mib(16), 0, folder.path()).expect("it starts");
        assert!(lease(&server) > Duration::from_secs(30 * 24 * 3600));
    }
}
