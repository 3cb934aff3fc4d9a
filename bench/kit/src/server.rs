//! The memory server that a benchmark starts for itself: this program once more, as `serve`, so
//! that there is no second program to find and the server is a process of its own, as in real use.
//!
//! The rule it keeps: the server ends with the benchmark, however the benchmark ends. The server
//! lives as long as its standard input, whose other end only the benchmark holds; at its end the
//! server removes its socket and exits.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    net::IpAddr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use farpage::{Allowance, ByteSize};
use farpage_memserver::Server;
use farpage_wire::Endpoint;

use crate::{
    cgroup::Cgroup,
    options::{Fabric, ServerOptions},
};

/// Checks that a benchmark may take `bytes` of this machine's memory, in its own process and its
/// server's.
///
/// # Errors
/// Fewer bytes are available, and `force` is false.
pub fn ensure_room(bytes: u64, force: bool) -> Result<()> {
    let available_bytes = Allowance::of_this_process().available_bytes;
    ensure!(
        force || bytes <= available_bytes,
        "this takes {} of this machine's memory, and {} are available: choose a smaller --size or --budget, use a memory server \
         elsewhere with --server, or start it all the same with --force",
        ByteSize(bytes),
        ByteSize(available_bytes),
    );
    Ok(())
}

/// Memory server that a benchmark talks to.
pub struct MemoryServer {
    endpoint: Endpoint,
    own: Option<Child>,
}

impl MemoryServer {
    /// Returns the server of `--server`, or starts our own, which lends up to `capacity_bytes`.
    ///
    /// # Errors
    /// Our own server does not start; it has said why on standard error.
    pub fn start(options: &ServerOptions, capacity_bytes: u64) -> Result<Self> {
        match &options.server {
            Some(endpoint) => Ok(Self::at(endpoint.clone())),
            None => Self::own(options.fabric, capacity_bytes),
        }
    }

    /// Returns the server at `endpoint`, which is not started here.
    pub fn at(endpoint: Endpoint) -> Self {
        let own = None;
        Self { endpoint, own }
    }

    /// Starts a server of our own that lends up to `capacity_bytes`.
    pub fn own(fabric: Fabric, capacity_bytes: u64) -> Result<Self> {
        let listen = own_endpoint(fabric, "server")?;
        Self::spawn(this_program()?, &listen, capacity_bytes, None)
    }

    /// Starts a server that has copies of the pages of one of [`Self::own`], as the `number`-th
    /// beside it. With `tiers` it holds only as many bytes in memory; the rest goes to a file in
    /// that directory.
    pub fn another(
        fabric: Fabric,
        capacity_bytes: u64,
        number: usize,
        tiers: Option<(u64, &Path)>,
    ) -> Result<Self> {
        let listen = own_endpoint(fabric, &format!("server-{number}"))?;
        Self::spawn(this_program()?, &listen, capacity_bytes, tiers)
    }

    /// Starts a server of our own that lends `capacity_bytes` but holds only `memory_bytes`; the
    /// rest goes to `spill`. A server of [`Self::own`] may run beside it. `cgroup` has to live
    /// longer.
    pub fn tiered(
        fabric: Fabric,
        capacity_bytes: u64,
        memory_bytes: u64,
        spill: &Path,
        cgroup: Option<&Cgroup>,
    ) -> Result<Self> {
        let listen = own_endpoint(fabric, "tiered")?;
        let program = cgroup.map_or_else(this_program, Cgroup::command)?;
        let tiers = Some((memory_bytes, spill));
        Self::spawn(program, &listen, capacity_bytes, tiers)
    }

    fn spawn(
        mut program: Command,
        listen: &Endpoint,
        capacity_bytes: u64,
        tiers: Option<(u64, &Path)>,
    ) -> Result<Self> {
        program
            .args(["serve", "--listen", &listen.to_string()])
            .args(["--capacity-bytes", &capacity_bytes.to_string()]);
        if let Some((memory_bytes, spill)) = tiers {
            program.args(["--memory-bytes", &memory_bytes.to_string(), "--spill"]);
            program.arg(spill);
        }
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the benchmark; the server then notices its end and tidies up.
            .process_group(0)
            .spawn()
            .context("cannot start a memory server")?;
        let stdout = child.stdout.take().expect("it was set to a pipe above");
        let mut line = String::new();
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("cannot read from the memory server")?;
        let Ok(endpoint) = line.trim().parse() else {
            let status = child.wait().context("cannot wait for the memory server")?;
            bail!("the memory server did not start ({status})")
        };
        let own = Some(child);
        Ok(Self { endpoint, own })
    }

    /// Returns the endpoint at which the server listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the process id of our own server.
    pub fn pid(&self) -> Result<u32> {
        let own = self.own.as_ref().context("the server is not our own")?;
        Ok(own.id())
    }

    /// Returns the CPU time that our own server has used, in seconds.
    ///
    /// # Errors
    /// The server has died, or is not our own.
    pub fn cpu_s(&self) -> Result<f64> {
        let path = format!("/proc/{}/stat", self.pid()?);
        let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        // The name in parentheses may hold spaces; user and system time are the 12th and 13th
        // fields behind it.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
        let ticks = |field| fields.split(' ').nth(field)?.parse::<f64>().ok();
        let times = ticks(11).zip(ticks(12));
        let (user, system) = times.context("the kernel's figures are cut off")?;
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
            .context("cannot ask for the length of a tick")?;
        Ok((user + system) / per_second.context("a tick has no length")? as f64)
    }

    /// True if our own server has neither ended nor died.
    pub fn is_running(&mut self) -> bool {
        let ended = self.own.as_mut().map(Child::try_wait);
        matches!(ended, Some(Ok(None)))
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.own {
            drop(child.stdin.take());
            // Nothing is left to do about a failure: the results are out.
            let _ = child.wait();
        }
    }
}

/// Returns the command of this program, without arguments.
pub fn this_program() -> Result<Command> {
    let path = env::current_exe().context("cannot find this program's own file")?;
    Ok(Command::new(path))
}

/// Returns the first address of this machine's RDMA devices.
fn own_rdma_address() -> Result<IpAddr> {
    let devices = farpage_fabric::rdma_devices().map_err(anyhow::Error::msg)?;
    let mut addresses = devices.iter().flat_map(|device| &device.addresses);
    addresses.next().copied().context(
        "no RDMA device of this machine has an IP address: give its network interface one, or name a server with --server rdma://host:port",
    )
}

/// Returns an endpoint for a server of our own; `name` keeps several apart.
///
/// # Errors
/// No RDMA device of this machine has an address.
pub fn own_endpoint(fabric: Fabric, name: &str) -> Result<Endpoint> {
    Ok(match fabric {
        Fabric::Shm => {
            let file = format!("farpage-bench-{}-{name}.sock", process::id());
            Endpoint::Shm(env::temp_dir().join(file))
        }
        Fabric::Tcp => Endpoint::Tcp {
            host: "127.0.0.1".into(),
            port: 0,
        },
        Fabric::Rdma => Endpoint::Rdma {
            host: own_rdma_address()?.to_string(),
            port: 0,
        },
    })
}

/// Options of the server's process.
#[derive(Args, Debug)]
pub struct ServeOptions {
    /// Endpoint to listen at.
    #[arg(long)]
    pub listen: Endpoint,
    /// Upper bound of the bytes to lend.
    #[arg(long)]
    pub capacity_bytes: u64,
    /// Upper bound of the memory for lent bytes.
    #[arg(long, requires = "spill")]
    pub memory_bytes: Option<u64>,
    /// Directory for the lent bytes beyond `memory_bytes`.
    #[arg(long, requires = "memory_bytes")]
    pub spill: Option<PathBuf>,
}

/// Runs the server process: prints its endpoint, and serves until standard input ends.
pub fn serve(options: &ServeOptions) -> Result<()> {
    let mut server = Server::builder()
        .listen(options.listen.clone())
        .capacity(options.capacity_bytes)
        // No client comes back when the benchmark is gone.
        .grace(Duration::ZERO);
    if let (Some(bytes), Some(directory)) = (options.memory_bytes, &options.spill) {
        server = server.memory(bytes).spill(directory.clone());
    }
    let running = server.start()?;
    let endpoint = running.endpoints().first();
    let endpoint = endpoint.context("the server listens nowhere")?;
    let mut stdout = io::stdout();
    writeln!(stdout, "{endpoint}")
        .and_then(|()| stdout.flush())
        .context("cannot say where the server listens")?;
    // Standard input carries no data: it ends when the benchmark closes the other end, or ends.
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("cannot wait on standard input")?;
    running.shutdown();
    Ok(())
}
