//! The memory server that a benchmark starts for itself: this program once more, as `serve`, so
//! that there is no second program to find and the server is a process of its own, as in real use.
//!
//! The rule it keeps: the server ends with the benchmark, however that ends. It lives as long as
//! its standard input, whose other end only the benchmark holds; at its end the server removes its
//! socket and exits.

use std::{
    env,
    ffi::OsString,
    fs,
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
    held::Held,
    options::{Fabric, ServerOptions},
};

/// Whether a benchmark that takes so many bytes on this machine, in its own process and its
/// server's, may start.
///
/// # Errors
/// They are not there, and nobody forces it.
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

/// The server that a benchmark talks to.
pub struct MemoryServer {
    endpoint: Endpoint,
    own: Option<Child>,
}

impl MemoryServer {
    /// The server of `--server`, or one of our own that lends up to `capacity_bytes`.
    ///
    /// # Errors
    /// The own server does not start; it has said why on standard error.
    pub fn start(options: &ServerOptions, capacity_bytes: u64) -> Result<Self> {
        match &options.server {
            Some(endpoint) => Ok(Self::at(endpoint.clone())),
            None => Self::own(options.fabric, capacity_bytes),
        }
    }

    /// The server at an endpoint.
    pub fn at(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            own: None,
        }
    }

    /// One of our own that lends up to `capacity_bytes`.
    ///
    /// # Errors
    /// It does not start; it has said why on standard error.
    pub fn own(fabric: Fabric, capacity_bytes: u64) -> Result<Self> {
        let listen = own_endpoint(fabric, "server")?;
        Self::spawn(this_program()?, &listen, capacity_bytes, None)
    }

    /// One of our own that has less memory than it lends: so much, and `spill` is where the rest
    /// goes. Another of our own may be beside it. It may run in a cgroup, which has to live longer.
    ///
    /// # Errors
    /// It does not start; it has said why on standard error.
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
        let mut child = program
            .args([
                "serve",
                "--listen",
                &listen.to_string(),
                "--capacity-bytes",
                &capacity_bytes.to_string(),
            ])
            .args(tiers.iter().flat_map(|(memory_bytes, spill)| {
                let memory_bytes = memory_bytes.to_string().into();
                [
                    "--memory-bytes".into(),
                    memory_bytes,
                    "--spill".into(),
                    spill.into(),
                ] as [OsString; 4]
            }))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the benchmark; the server then notices its end and tidies up.
            .process_group(0)
            .spawn()
            .context("cannot start a memory server")?;
        let stdout = child
            .stdout
            .take()
            .expect("the standard output was set to a pipe above");
        let mut line = String::new();
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("cannot read from the memory server")?;
        match line.trim().parse() {
            Ok(endpoint) => Ok(Self {
                endpoint,
                own: Some(child),
            }),
            Err(_) => {
                let status = child.wait().context("cannot wait for the memory server")?;
                bail!("the memory server did not start ({status})")
            }
        }
    }

    /// Where it listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The process of our own server.
    ///
    /// # Errors
    /// It is not ours.
    pub fn pid(&self) -> Result<u32> {
        let own = self.own.as_ref().context("the server is not our own")?;
        Ok(own.id())
    }

    /// The CPU time that our own server has used, in seconds.
    ///
    /// # Errors
    /// It has died, or is not ours.
    pub fn cpu_s(&self) -> Result<f64> {
        cpu_s_of(self.pid()?)
    }

    /// The memory that our own server holds.
    ///
    /// # Errors
    /// It has died, or is not ours.
    pub fn held(&self) -> Result<Held> {
        Held::by(self.pid()?)
    }

    /// Whether our own server has neither ended nor died.
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

fn this_program() -> Result<Command> {
    let path = env::current_exe().context("cannot find this program's own file")?;
    Ok(Command::new(path))
}

/// CPU time of a process of this machine.
///
/// # Errors
/// It has ended.
fn cpu_s_of(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The name in parentheses may hold spaces; user and system time are the 12th and 13th fields
    // behind it.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let ticks = |field| fields.split(' ').nth(field)?.parse::<f64>().ok();
    let (user, system) = ticks(11)
        .zip(ticks(12))
        .context("the kernel's figures are cut off")?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .context("cannot ask for the length of a tick")?;
    Ok((user + system) / per_second.context("a tick has no length")? as f64)
}

/// Where a server of our own can be reached over RDMA.
fn own_rdma_address() -> Result<IpAddr> {
    let devices = farpage_fabric::rdma_devices().map_err(anyhow::Error::msg)?;
    let mut addresses = devices.iter().flat_map(|device| &device.addresses);
    addresses.next().copied().context(
        "no RDMA device of this machine has an IP address: give its network interface one, or name a server with --server rdma://host:port",
    )
}

/// Where a server of our own listens; `name` keeps several apart.
///
/// # Errors
/// There is no adapter for RDMA.
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

/// What the server's process is told.
#[derive(Args, Debug)]
pub struct ServeOptions {
    /// Where to listen.
    #[arg(long)]
    pub listen: Endpoint,
    /// The most bytes to lend.
    #[arg(long)]
    pub capacity_bytes: u64,
    /// The most memory to hold for it.
    #[arg(long, requires = "spill")]
    pub memory_bytes: Option<u64>,
    /// Where the rest goes.
    #[arg(long, requires = "memory_bytes")]
    pub spill: Option<PathBuf>,
}

/// The server process: prints where it listens, serves until standard input ends.
pub fn serve(options: &ServeOptions) -> Result<()> {
    let mut server = Server::builder()
        .listen(options.listen.clone())
        .capacity(options.capacity_bytes)
        // When the benchmark is gone there is nobody to wait for.
        .grace(Duration::ZERO);
    if let (Some(bytes), Some(directory)) = (options.memory_bytes, &options.spill) {
        server = server.memory(bytes).spill(directory.clone());
    }
    let running = server.start()?;
    let endpoint = running
        .endpoints()
        .first()
        .context("the server listens nowhere")?;
    let mut stdout = io::stdout();
    writeln!(stdout, "{endpoint}")
        .and_then(|()| stdout.flush())
        .context("cannot say where the server listens")?;
    // Nobody writes here: it ends when the other end is closed, by the benchmark's end at the
    // latest.
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("cannot wait on standard input")?;
    running.shutdown();
    Ok(())
}
