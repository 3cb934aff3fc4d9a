//! The fabric without paging: how fast pages could come and go if nothing else had to be done.
//!
//! The rule it keeps: as many threads and as large operations as the pager uses, each thread with a
//! channel and memory of its own on the server, and every READ is checked against what was written
//! there.
//!
//! Each direction is measured twice. *Hot*: few buffers, used again at once, which stay in the
//! caches: as fast as the fabric gets. *Cold*: buffers take turns, [`LOCAL_BYTES`] of them, as
//! frames do: paging exists to fill local memory, which is as large as its budget, and no transfer
//! to or from so much memory can be faster. Paging is compared with the cold rates.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use farpage_fabric::{
    Busy, Channel, Completion, Extent, Op, PollInterest, Session, SessionOptions, Verb,
};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::{
    crew,
    options::{Common, threads},
    pick::mix,
    server::MemoryServer,
    yardsticks::FabricRates,
};

/// Operations that each thread keeps in flight: enough to hide a network's latency, as many as the
/// pager may have.
const QUEUE_DEPTH: usize = 16;
/// Server memory that all threads together go over, larger than caches are.
const AREA_BYTES: u64 = 256 << 20;
const SMOKE_AREA_BYTES: u64 = 8 << 20;

/// Server memory, and local memory, of a brief run: larger than caches are, and soon gone over.
const YARDSTICK_BYTES: u64 = 64 << 20;

/// Local memory that all threads together go over when buffers are cold: the budget of the STREAM
/// that is compared with it.
pub const LOCAL_BYTES: u64 = 96 << 20;
/// Local memory of a tiny run, like [`LOCAL_BYTES`].
pub const SMOKE_LOCAL_BYTES: u64 = 3 << 20;

/// Operations posted in a phase.
#[derive(Clone, Copy)]
enum Mix {
    /// WRITEs once over the area, however long they take: afterwards the whole area is physical
    /// memory with known bytes.
    Prepare,
    Read,
    Write,
    /// READ and WRITE in turns.
    Both,
}

/// Choice of the next buffer.
#[derive(Clone, Copy)]
enum Buffers {
    /// The one that came back last.
    Hot,
    /// The one that came back longest ago.
    Cold,
}

/// Measures each mix for `time`. Returns the rates by their names in reports, READ and WRITE in
/// turns with the bytes of both directions added up, and the number of pages that did not come back
/// as they were written.
pub fn rates(
    common: &Common,
    server: &MemoryServer,
    time: Duration,
) -> Result<([(&'static str, f64); 5], u64)> {
    let (area, local) = match common.run.smoke {
        true => (SMOKE_AREA_BYTES, SMOKE_LOCAL_BYTES),
        false => (AREA_BYTES, LOCAL_BYTES),
    };
    let mut team = Team::start(common, server, threads(common.fillers), area, local)?;
    let mut rate =
        |name, mix, buffers| -> Result<_> { Ok((name, team.phase(mix, buffers, time)?)) };
    let rates = [
        rate("raw_read_mb_per_s", Mix::Read, Buffers::Hot)?,
        rate("raw_write_mb_per_s", Mix::Write, Buffers::Hot)?,
        rate("raw_cold_read_mb_per_s", Mix::Read, Buffers::Cold)?,
        rate("raw_cold_write_mb_per_s", Mix::Write, Buffers::Cold)?,
        rate("raw_read_write_mb_per_s", Mix::Both, Buffers::Hot)?,
    ];
    let wrong = team.workers.iter().map(|worker| worker.wrong).sum();
    Ok((rates, wrong))
}

/// Measures the yardsticks of a benchmark, briefly: with cold buffers, for a fraction of a second.
pub fn yardstick(common: &Common, server: &MemoryServer) -> Result<FabricRates> {
    let (bytes, ms) = match common.run.smoke {
        true => (SMOKE_AREA_BYTES, 20),
        false => (YARDSTICK_BYTES, 100),
    };
    let time = Duration::from_millis(ms);
    let mut team = Team::start(common, server, threads(common.fillers), bytes, bytes)?;
    let mut rate = |mix| team.phase(mix, Buffers::Cold, time);
    Ok(FabricRates {
        raw_read_mb_per_s: rate(Mix::Read)?,
        raw_write_mb_per_s: rate(Mix::Write)?,
        raw_read_write_mb_per_s: rate(Mix::Both)?,
    })
}

/// Times a READ of one page with no other under way, in microseconds, briefly, with cold buffers.
///
/// # Errors
/// The server cannot be reached or has no room.
pub fn read_us(common: &Common, server: &MemoryServer) -> Result<f64> {
    let mut team = Team::start(common, server, 1, SMOKE_AREA_BYTES, SMOKE_LOCAL_BYTES)?;
    for worker in &mut team.workers {
        worker.depth = 1;
    }
    let time = Duration::from_millis(if common.run.smoke { 20 } else { 100 });
    let mb_per_s = team.phase(Mix::Read, Buffers::Cold, time)?;
    Ok(common.page_size.as_u64() as f64 / mb_per_s)
}

/// Threads with memory of their own on the server.
struct Team {
    workers: Vec<Worker>,
}

impl Team {
    /// Starts threads that together go over `area` bytes of the server and `local` bytes here, and
    /// have done so once.
    fn start(
        common: &Common,
        server: &MemoryServer,
        threads: usize,
        area: u64,
        local: u64,
    ) -> Result<Self> {
        let options = SessionOptions {
            link: common.link(),
            ..SessionOptions::default()
        };
        let session = Session::connect(server.endpoint(), &options)?;
        let page_bytes = common.page_size.as_u64();
        let buffers = (local / page_bytes) as usize / threads;
        let area_per_thread = (area / threads as u64).next_multiple_of(page_bytes);
        let area_per_thread = area_per_thread.max(QUEUE_DEPTH as u64 * page_bytes);
        let mut workers = Vec::new();
        for _ in 0..threads {
            let extent = session.grant(area_per_thread)?;
            let channel = session.channel::<Vec<u8>>()?;
            // Written once, so that the measurement meets no fresh local memory.
            let idle = vec![vec![1u8; page_bytes as usize]; buffers.max(QUEUE_DEPTH)].into();
            let (done, pages) = (Vec::new(), area_per_thread / page_bytes);
            workers.push(Worker {
                channel,
                extent,
                page_bytes,
                pages,
                depth: QUEUE_DEPTH,
                idle,
                done,
                next: 0,
                bytes: 0,
                wrong: 0,
            });
        }
        let mut team = Self { workers };
        team.phase(Mix::Prepare, Buffers::Cold, Duration::ZERO)?;
        Ok(team)
    }

    /// Runs all threads for `time` and returns their MB/s together.
    fn phase(&mut self, mix: Mix, buffers: Buffers, time: Duration) -> Result<f64> {
        let (bytes, took) =
            crew::together(&mut self.workers, |worker| worker.run(mix, buffers, time))?;
        Ok(bytes.iter().sum::<u64>() as f64 / took.as_secs_f64() / 1e6)
    }
}

struct Worker {
    channel: Box<dyn Channel<Vec<u8>>>,
    extent: Extent,
    page_bytes: u64,
    pages: u64,
    /// Number of operations kept in flight.
    depth: usize,
    /// Buffers that are in no operation, in the order in which they came back.
    idle: VecDeque<Vec<u8>>,
    done: Vec<Completion<Vec<u8>>>,
    /// Number of operations posted in this phase so far.
    next: u64,
    bytes: u64,
    wrong: u64,
}

impl Worker {
    /// Keeps the queue full until time is up, then waits for what is in flight; returns the bytes
    /// moved.
    fn run(&mut self, mix: Mix, buffers: Buffers, time: Duration) -> Result<u64> {
        (self.next, self.bytes) = (0, 0);
        let end = Instant::now() + time;
        loop {
            let more = match mix {
                Mix::Prepare => self.next < self.pages,
                _ => Instant::now() < end,
            };
            while more && self.channel.in_flight() < self.depth {
                let buf = match buffers {
                    Buffers::Hot => self.idle.pop_back(),
                    Buffers::Cold => self.idle.pop_front(),
                };
                let buf = buf.expect("no more are in flight than there are buffers");
                let op = self.op(mix, buf);
                if let Err(Busy(op)) = self.channel.post(op) {
                    self.idle.push_back(op.buf);
                    break;
                }
                self.next += 1;
                if matches!(mix, Mix::Prepare) && self.next == self.pages {
                    break;
                }
            }
            if !more && self.channel.in_flight() == 0 {
                return Ok(self.bytes);
            }
            if self.channel.poll(&mut self.done) == 0 {
                sleep_on(&self.channel.wait())?;
            }
            self.take_completions()?;
        }
    }

    fn op(&self, mix: Mix, mut buf: Vec<u8>) -> Op<Vec<u8>> {
        // In turns, each verb has one half of the area, so that no page is read and written at
        // once.
        let half = self.pages / 2;
        let (verb, page) = match mix {
            Mix::Read => (Verb::Read, self.next % self.pages),
            Mix::Prepare | Mix::Write => (Verb::Write, self.next % self.pages),
            Mix::Both if self.next.is_multiple_of(2) => (Verb::Read, self.next / 2 % half),
            Mix::Both => (Verb::Write, half + self.next / 2 % half),
        };
        if verb == Verb::Write {
            let stamp = self.stamp(page);
            buf[..8].copy_from_slice(&stamp);
            buf[self.page_bytes as usize - 8..].copy_from_slice(&stamp);
        }
        let (extent, len) = (self.extent.id, self.page_bytes as u32);
        Op {
            tag: page,
            verb,
            extent,
            offset: page * self.page_bytes,
            len,
            buf,
        }
    }

    fn take_completions(&mut self) -> Result<()> {
        for completion in std::mem::take(&mut self.done) {
            let failed = "an operation on the fabric failed";
            completion.result.context(failed)?;
            self.bytes += self.page_bytes;
            if completion.verb == Verb::Read {
                let stamp = self.stamp(completion.tag);
                let right = completion.buf.starts_with(&stamp) && completion.buf.ends_with(&stamp);
                self.wrong += u64::from(!right);
            }
            self.idle.push_back(completion.buf);
        }
        Ok(())
    }

    /// Returns the bytes that a page begins and ends with.
    fn stamp(&self, page: u64) -> [u8; 8] {
        mix(page ^ mix(self.extent.id.0)).to_le_bytes()
    }
}

/// Sleeps until a poll of the channel may have something to do.
pub fn sleep_on(wait: &PollInterest<'_>) -> Result<()> {
    let mut events = PollFlags::empty();
    events.set(PollFlags::POLLIN, wait.readable);
    events.set(PollFlags::POLLOUT, wait.writable);
    let mut fds: Vec<PollFd<'_>> = wait.fd.iter().map(|fd| PollFd::new(*fd, events)).collect();
    sleep_until(&mut fds, wait.until)
}

/// Sleeps until an event of one of `fds`, or until the time is `until`.
pub(crate) fn sleep_until(fds: &mut [PollFd<'_>], until: Option<Instant>) -> Result<()> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    match ppoll(fds, left.map(TimeSpec::from), None) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
        Err(error) => Err(error).context("cannot wait for the fabric"),
    }
}
