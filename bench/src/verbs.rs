//! What an RDMA adapter gains by what farpage lets it do: several READs (and atomics) in flight on one connection, and one ring of its doorbell for several
//! operations.
//!
//! The rule it keeps: both ways take turns over connections of the same kind, and the median of the rounds counts, so that their ratio holds on a
//! machine that does other things too. Every READ and every old value is checked.

use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result, anyhow, ensure};
use farpage_fabric::{
    Atomic, Channel, Endpoint, ExtentId, Op, RdmaOptions, Session, SessionOptions, Verb,
};
use serde::Serialize;

use crate::{
    options::{Fabric, Format, VerbsOptions},
    raw::sleep_on,
    report::{self, median, right, table},
    server::MemoryServer,
};

const ROUNDS: usize = 9;
/// Operations that are posted in one go and waited for: as many as one list holds.
const BATCH: usize = 16;
const AREA_BYTES: usize = 1 << 20;

/// What was found.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    benchmark: &'static str,
    pub(crate) verified: bool,
    config: Config,
    comparisons: Vec<Comparison>,
}

#[derive(Debug, Serialize)]
struct Config {
    smoke: bool,
    server: String,
    batch: usize,
    batches: usize,
    rounds: usize,
}

#[derive(Debug, Serialize)]
struct Comparison {
    /// What is 1 on one side and as many as possible on the other.
    of: &'static str,
    operation: &'static str,
    bytes: usize,
    one_us: f64,
    many_us: f64,
    one_over_many: f64,
}

/// READs in flight, or operations per doorbell.
const READS: &str = "READs in flight";
const DOORBELL: &str = "operations per doorbell";

pub(crate) fn run(options: &VerbsOptions) -> Result<Report> {
    let server = MemoryServer::connect_or_start(options.server.as_ref(), Fabric::Rdma, 64 << 20)?;
    ensure!(
        matches!(server.endpoint(), Endpoint::Rdma { .. }),
        "{} is no rdma:// endpoint",
        server.endpoint()
    );
    let batches = if options.smoke { 5 } else { 100 };
    let best = RdmaOptions::default();
    let one_read = RdmaOptions {
        reads_in_flight: 1,
        ..best
    };
    let one_per_doorbell = RdmaOptions {
        doorbell: 1,
        ..best
    };
    let line = |options| Line::open(server.endpoint(), options);
    let (mut best, mut one_read, mut one_per_doorbell) =
        (line(best)?, line(one_read)?, line(one_per_doorbell)?);

    let mut comparisons = Vec::new();
    for (of, verb, bytes) in [
        (READS, Verb::Read, 256),
        (READS, Verb::Read, 4096),
        (READS, Verb::Read, 16 << 10),
        (READS, Verb::Atomic(Atomic::FetchAdd(0)), 8),
        (DOORBELL, Verb::Read, 256),
        (DOORBELL, Verb::Write, 64),
        (DOORBELL, Verb::Write, 4096),
    ] {
        let one = match of {
            READS => &mut one_read,
            _ => &mut one_per_doorbell,
        };
        let mut us = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            us[0].push(one.us_per_operation(verb, bytes, batches)?);
            us[1].push(best.us_per_operation(verb, bytes, batches)?);
        }
        let [one_us, many_us] = us.map(|us| median(&us));
        comparisons.push(Comparison {
            of,
            operation: match verb {
                Verb::Read => "READ",
                Verb::Write => "WRITE",
                Verb::Atomic(_) => "fetch-and-add",
            },
            bytes,
            one_us,
            many_us,
            one_over_many: one_us / many_us,
        });
    }
    Ok(Report {
        benchmark: "verbs",
        verified: [best, one_read, one_per_doorbell]
            .iter()
            .all(|line| line.wrong == 0),
        config: Config {
            smoke: options.smoke,
            server: server.endpoint().to_string(),
            batch: BATCH,
            batches,
            rounds: ROUNDS,
        },
        comparisons,
    })
}

/// One connection, and memory at the server whose bytes are known.
struct Line {
    channel: Box<dyn Channel<Vec<u8>>>,
    extent: ExtentId,
    idle: Vec<Vec<u8>>,
    wrong: u64,
}

impl Line {
    fn open(endpoint: &Endpoint, rdma: RdmaOptions) -> Result<Self> {
        let options = SessionOptions {
            rdma,
            ..SessionOptions::default()
        };
        let session: Arc<Session> = Session::connect(endpoint, &options)?;
        let mut line = Self {
            extent: session.grant(AREA_BYTES as u64)?.id,
            channel: session.channel()?,
            idle: Vec::new(),
            wrong: 0,
        };
        let bytes = AREA_BYTES / BATCH;
        line.idle = (0..BATCH).map(|_| vec![0; bytes]).collect();
        line.batch(Verb::Write, bytes, 0)?;
        Ok(line)
    }

    fn us_per_operation(&mut self, verb: Verb, bytes: usize, batches: usize) -> Result<f64> {
        let begin = Instant::now();
        for number in 0..batches {
            self.batch(verb, bytes, number)?;
        }
        Ok(begin.elapsed().as_secs_f64() * 1e6 / (batches * BATCH) as f64)
    }

    /// Posts as many operations as a list holds and waits for all of them.
    fn batch(&mut self, verb: Verb, bytes: usize, number: usize) -> Result<()> {
        let stride = bytes.max(STAMPED);
        let slots = AREA_BYTES / stride;
        for at in 0..BATCH {
            let slot = (number * BATCH + at) % slots;
            let offset = (slot * stride) as u64;
            let mut buf = self.idle.pop().context("a buffer did not come back")?;
            match verb {
                Verb::Write => stamp(&mut buf[..bytes], offset),
                Verb::Read | Verb::Atomic(_) => buf[..bytes].fill(0),
            }
            let op = Op {
                tag: offset,
                verb,
                extent: self.extent,
                offset,
                len: bytes as u32,
                buf,
            };
            let posted = self.channel.post(op);
            posted.map_err(|_| anyhow!("a channel takes {BATCH} operations"))?;
        }
        let mut done = Vec::with_capacity(BATCH);
        while done.len() < BATCH {
            if self.channel.poll(&mut done) == 0 {
                sleep_on(&self.channel.wait())?;
            }
        }
        for completion in done {
            completion.result.context("an operation failed")?;
            if verb != Verb::Write {
                self.wrong += u64::from(!is_stamped(&completion.buf[..bytes], completion.tag));
            }
            self.idle.push(completion.buf);
        }
        Ok(())
    }
}

/// So many bytes begin with their place, whatever the size of the operation that wrote them.
const STAMPED: usize = 64;

fn stamp(buf: &mut [u8], offset: u64) {
    for (piece, at) in buf.chunks_mut(STAMPED).zip((offset..).step_by(STAMPED)) {
        piece[..8].copy_from_slice(&at.to_le_bytes());
    }
}

fn is_stamped(buf: &[u8], offset: u64) -> bool {
    let mut pieces = buf.chunks(STAMPED).zip((offset..).step_by(STAMPED));
    pieces.all(|(piece, at)| piece[..8] == at.to_le_bytes())
}

impl Report {
    /// Prints the report to standard output.
    pub(crate) fn print(&self, format: Format) {
        report::print(self, format, Self::human);
    }

    fn human(&self) -> String {
        let mut comparisons = table(["us per operation", "of bytes", "1", "many", "1 / many"]);
        for c in &self.comparisons {
            comparisons.add_row(right([
                format!("{}, {}", c.operation, c.of),
                c.bytes.to_string(),
                format!("{:.1}", c.one_us),
                format!("{:.1}", c.many_us),
                format!("{:.2}", c.one_over_many),
            ]));
        }
        let mut run = table(["run", self.benchmark]);
        let verified = if self.verified { "yes" } else { "NO: FAILED" };
        for (name, value) in [
            ("verified", verified.to_owned()),
            ("server", self.config.server.clone()),
            ("posted in one go", self.config.batch.to_string()),
        ] {
            run.add_row(right([name.to_owned(), value]));
        }
        format!("{comparisons}\n{run}")
    }
}
