//! Helpers of the examples: a memory server to talk to, the one argument, and a line of figures. A
//! program of yours will not need them.
//!
//! The rule it keeps: everything about farpage that is worth copying is in the examples themselves.

use std::{env, fmt::Display, str::FromStr, time::Instant};

use anyhow::{Result, anyhow};
use farpage::{Builder, ByteSize, Runtime};
use farpage_memserver::{RunningServer, Server};
use tempfile::TempDir;

/// Capacity of the server: more than any example needs. Only written pages take memory.
const CAPACITY_BYTES: u64 = 64 << 30;

/// The memory servers that `FARPAGE_SERVER` names or, without it, one in this process.
///
/// Declare it before the runtime, so that it outlives the runtime.
pub struct Memory {
    /// The server, and the folder of its socket. The server ends before the folder is removed.
    own: Option<(RunningServer, TempDir)>,
}

impl Memory {
    /// Starts a server in this process unless `FARPAGE_SERVER` is set.
    ///
    /// # Errors
    /// If no server can be started.
    pub fn find() -> Result<Memory> {
        if env::var_os("FARPAGE_SERVER").is_some() {
            return Ok(Memory { own: None });
        }
        let folder = tempfile::tempdir()?;
        let endpoint = format!("shm://{}/farpage.sock", folder.path().display());
        let server = Server::builder()
            .listen(endpoint.parse()?)
            .capacity(CAPACITY_BYTES)
            .start()?;
        Ok(Memory {
            own: Some((server, folder)),
        })
    }

    /// Returns a builder of runtimes. A program of yours writes `Runtime::builder()` with
    /// `FARPAGE_SERVER` set, or `Runtime::builder().server("shm:///run/farpage.sock")`.
    pub fn runtime(&self) -> Builder {
        match &self.own {
            Some((server, _)) => Runtime::builder().server(server.endpoints()[0].to_string()),
            None => Runtime::builder(),
        }
    }
}

/// Returns the program's only argument, or `default` without one.
///
/// # Errors
/// The argument cannot be read.
pub fn argument<T>(what: &str, default: T) -> Result<T>
where
    T: FromStr<Err: Display>,
{
    match env::args().nth(1) {
        Some(text) => text
            .parse()
            .map_err(|e| anyhow!("`{text}` is no {what}: {e}")),
        None => Ok(default),
    }
}

/// Prints how long `what` took, and what the runtime has done so far.
pub fn report(what: &str, started: Instant, runtime: &Runtime) {
    let seconds = started.elapsed().as_secs_f64();
    let (pager, store) = (runtime.stats().pager, runtime.stats().store);
    println!("{what} in {seconds:.2} s");
    println!(
        "  {} faults, {} pages in, {} out; {} read, {} written; at most {} of {} local memory used",
        pager.faults,
        pager.fills,
        pager.evictions,
        ByteSize(store.bytes_read),
        ByteSize(store.bytes_written),
        ByteSize(pager.peak_resident_bytes),
        ByteSize(pager.budget_bytes),
    );
}
