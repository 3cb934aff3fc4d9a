//! Time from a lease of any size to its first page, at a server without tiers and at one with
//! tiers.
//!
//! The rule it keeps: both servers are asked in turns, and each lease is given back before the next
//! turn.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use farpage::ByteSize;
use farpage_bench_kit::{
    options::Fabric,
    report::{Pairs, filled_table, ranged},
    server::MemoryServer,
};
use farpage_fabric::{Channel, Session, SessionOptions, Verb};
use serde::Serialize;

use super::client::{CHUNK, transfer};

/// Upper bound of the bytes that Linux's software adapter can pin at once.
const LEASE_MOST: u64 = 1 << 30;

/// Deadline of a session: pinning GiB may take minutes where the processor is emulated.
const PATIENCE: Duration = Duration::from_secs(300);

/// Times from a lease to its first page: medians in milliseconds.
#[derive(Debug, Serialize)]
pub(super) struct First {
    lent_bytes: u64,
    /// Time at a server that has all that it lends in memory.
    plain_ms: f64,
    /// Time at a server that lends more than its memory.
    tiered_ms: f64,
    /// `plain_ms` over `tiered_ms`: median of the turns, and the interval that holds it with 95 %.
    plain_over_tiered: [f64; 3],
}

struct Asker {
    session: Arc<Session>,
    channel: Box<dyn Channel<Vec<u8>>>,
    _server: MemoryServer,
}

impl Asker {
    fn new(server: MemoryServer) -> Result<Self> {
        let options = SessionOptions {
            deadline: PATIENCE,
            ..SessionOptions::default()
        };
        let session = Session::connect(server.endpoint(), &options)?;
        Ok(Self {
            channel: session.channel()?,
            session,
            _server: server,
        })
    }

    /// Leases `bytes` and reads a chunk. Returns the milliseconds until the chunk is here.
    fn ask(&mut self, bytes: u64) -> Result<f64> {
        let begin = Instant::now();
        let mut extents = Vec::new();
        for at in (0..bytes).step_by(LEASE_MOST as usize) {
            extents.push(self.session.grant(LEASE_MOST.min(bytes - at))?);
        }
        let page = vec![1; CHUNK];
        let page = transfer(&mut *self.channel, Verb::Read, extents[0].id, 0, page)?;
        let took = begin.elapsed();
        let is_blank = page.iter().all(|byte| *byte == 0);
        ensure!(is_blank, "what is new is not zero");
        for extent in extents {
            self.session.release(extent.id)?;
        }
        Ok(took.as_secs_f64() * 1e3)
    }
}

pub(super) fn measure(fabric: Fabric, lent_bytes: u64, spill: &Path, smoke: bool) -> Result<First> {
    let turns = if smoke { 3 } else { 5 };
    let memory_bytes = (lent_bytes / 8).max(16 << 20);
    let mut plain = Asker::new(MemoryServer::own(fabric, lent_bytes)?)?;
    let tiered = MemoryServer::tiered(fabric, lent_bytes, memory_bytes, spill, None)?;
    let mut tiered = Asker::new(tiered)?;
    let mut pairs = Pairs::default();
    for _ in 0..turns {
        pairs.measure(|| tiered.ask(lent_bytes), || plain.ask(lent_bytes))?;
    }
    let [tiered_ms, plain_ms] = pairs.medians();
    Ok(First {
        lent_bytes,
        plain_ms,
        tiered_ms,
        plain_over_tiered: pairs.other_over_one(),
    })
}

pub(super) fn human(first: &First) -> String {
    let (plain, tiered) = (first.plain_ms, first.tiered_ms);
    let over = ranged(first.plain_over_tiered, 1);
    let rows = [
        format!("server without tiers | {plain:.2} | {over}"),
        format!("server with tiers | {tiered:.2} | "),
    ];
    let header = "from a lease to its first page | ms | over the other";
    let times = filled_table(header, rows);
    format!("{} leased at once\n{times}", ByteSize(first.lent_bytes))
}
