//! [`Servers`]: the memory servers of a run, each a process of its own, with a relay before it
//! where links are to fail.
//!
//! The rule it keeps: a server that was stopped goes on in the end, so that it notices the end of
//! the benchmark.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use farpage_bench_kit::{options::Fabric, pick::Random, server::MemoryServer};
use farpage_testkit::Relay;
use farpage_wire::Endpoint;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Settings of every server.
pub(super) struct Settings {
    pub(super) fabric: Fabric,
    pub(super) capacity_bytes: u64,
    /// Bytes to hold in memory, and the directory for all others.
    pub(super) tiers: Option<(u64, PathBuf)>,
    /// True if clients reach the server through a relay.
    pub(super) has_relay: bool,
}

/// The servers that run now.
pub(super) struct Servers {
    settings: Settings,
    running: Vec<Running>,
    /// Number of servers that were started.
    started: usize,
}

/// A server, and the way to it.
pub(super) struct Running {
    /// Dropped before the server, which would otherwise wait for clients that it cannot reach.
    pub(super) relay: Option<Relay>,
    server: MemoryServer,
    /// Address at which clients reach the server.
    pub(super) url: String,
}

impl Servers {
    pub(super) fn start(settings: Settings, count: usize) -> Result<Self> {
        let mut servers = Self {
            settings,
            running: Vec::new(),
            started: 0,
        };
        for _ in 0..count {
            servers.add()?;
        }
        Ok(servers)
    }

    /// Starts one more server. Returns its address.
    pub(super) fn add(&mut self) -> Result<String> {
        self.started += 1;
        let Settings {
            fabric,
            capacity_bytes,
            tiers,
            has_relay,
        } = &self.settings;
        let tiers = tiers.as_ref().map(|(bytes, spill)| (*bytes, &**spill));
        let server = MemoryServer::another(*fabric, *capacity_bytes, self.started, tiers)?;
        let own_url = server.endpoint().to_string();
        let relay = has_relay.then(|| Relay::to(&own_url));
        let url = relay.as_ref().map_or(own_url, |relay| relay.url.clone());
        self.running.push(Running {
            relay,
            server,
            url: url.clone(),
        });
        Ok(url)
    }

    pub(super) fn all(&self) -> &[Running] {
        &self.running
    }

    pub(super) fn urls(&self) -> Vec<String> {
        self.running.iter().map(|it| it.url.clone()).collect()
    }

    pub(super) fn any(&self, random: &mut Random) -> &Running {
        &self.running[random.below(self.running.len() as u64) as usize]
    }

    /// Returns the addresses of `count` servers, in a random order.
    pub(super) fn some(&self, count: usize, random: &mut Random) -> Vec<String> {
        let mut urls = self.urls();
        while urls.len() > count {
            urls.swap_remove(random.below(urls.len() as u64) as usize);
        }
        urls
    }

    /// Kills the servers at `urls` at once.
    pub(super) fn kill(&mut self, urls: &[String]) -> Result<()> {
        let is_hit = |it: &Running| urls.contains(&it.url);
        for server in self.running.iter().filter(|it| is_hit(it)) {
            kill(server.pid()?, Signal::SIGKILL).context("cannot kill a server")?;
        }
        for killed in self.running.extract_if(.., |it| is_hit(it)) {
            if let Endpoint::Shm(socket) = killed.server.endpoint() {
                // The killed server has left its socket behind.
                let _ = fs::remove_file(socket);
            }
        }
        Ok(())
    }

    /// Ends the server at `url`, which clients have left.
    pub(super) fn remove(&mut self, url: &str) {
        self.running.retain(|it| it.url != url);
    }
}

impl Running {
    pub(super) fn pid(&self) -> Result<Pid> {
        Ok(Pid::from_raw(self.server.pid()? as i32))
    }

    /// Stops the server's process, until the result is dropped.
    pub(super) fn stop(&self) -> Result<Stopped> {
        let pid = self.pid()?;
        kill(pid, Signal::SIGSTOP).context("cannot stop a server")?;
        Ok(Stopped(pid))
    }

    pub(super) fn relay(&self) -> &Relay {
        let relay = self.relay.as_ref();
        relay.expect("events of links happen only where there are relays")
    }
}

/// A process that stands still until this is dropped: a server that stays stopped would not notice
/// the end of the benchmark.
pub(super) struct Stopped(Pid);

impl Drop for Stopped {
    fn drop(&mut self) {
        // A server that has ended needs no signal.
        let _ = kill(self.0, Signal::SIGCONT);
    }
}
