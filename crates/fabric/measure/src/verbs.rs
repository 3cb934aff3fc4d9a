//! Gain of an RDMA adapter from what farpage lets it do: several READs (and atomics) in flight on
//! one connection, and one ring of its doorbell for several operations. Gain of a thread that
//! serves several connections from one completion queue.
//!
//! The rule it keeps: both ways take turns over connections of the same kind, and the median of the
//! rounds counts, so that their ratio holds on a machine that does other things too. Every READ and
//! every old value is checked.

use clap::Args;
use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result, anyhow, ensure};
use farpage_fabric::{
    Atomic, Channel, Endpoint, ExtentId, Op, RdmaOptions, Session, SessionOptions, Verb,
    patterns::{CompletionEngine, WaitMode},
};
use serde::Serialize;

use farpage_bench_kit::{
    options::{Fabric, Run},
    raw::sleep_on,
    report::{self, filled_table, median, run_table},
    server::MemoryServer,
};

const ROUNDS: usize = 9;
/// Operations that are posted in one go and waited for: as many as one list holds.
const BATCH: usize = 16;
const AREA_BYTES: usize = 1 << 20;
/// Connections of one thread, with one completion queue or with one each.
const CONNECTIONS: usize = 8;
/// Bytes of a READ when several connections are compared.
const SHORT: usize = 256;

/// Results of the measurement.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    verified: bool,
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
    /// Number that is 1 on one side and as large as possible on the other.
    of: &'static str,
    operation: &'static str,
    bytes: usize,
    one_us: f64,
    many_us: f64,
    one_over_many: f64,
}

const READS: &str = "READs in flight";
const DOORBELL: &str = "operations per doorbell";
const QUEUES_POLLED: &str = "completion queues of 8 connections, polled";
const QUEUES_SLEPT_ON: &str = "completion queues of 8 connections, slept on";

/// Options of `verbs`.
#[derive(Args, Debug)]
pub struct VerbsOptions {
    /// Memory server to use, rdma://host:port [default: starts its own on this machine]
    #[arg(long, value_name = "URL")]
    server: Option<Endpoint>,
    #[command(flatten)]
    run: Run,
}

/// Runs the subcommand `verbs` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &VerbsOptions) -> Result<()> {
    let report = measure(options)?;
    report::conclude(
        &report,
        report.verified,
        options.run.printing.format,
        Report::human,
    )
}

fn measure(options: &VerbsOptions) -> Result<Report> {
    let server = match &options.server {
        Some(endpoint) => MemoryServer::at(endpoint.clone()),
        None => MemoryServer::own(Fabric::Rdma, 64 << 20)?,
    };
    ensure!(
        matches!(server.endpoint(), Endpoint::Rdma { .. }),
        "{} is no rdma:// endpoint",
        server.endpoint()
    );
    let batches = if options.run.smoke { 5 } else { 100 };
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
    let mut wrong = best.wrong + one_read.wrong + one_per_doorbell.wrong;
    for (of, waiting) in [
        (QUEUES_POLLED, WaitMode::Poll),
        (QUEUES_SLEPT_ON, WaitMode::Event),
    ] {
        let mut shared = Lines::open(&best, true, waiting)?;
        let mut separate = Lines::open(&best, false, waiting)?;
        let mut us = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            us[0].push(shared.us_per_read(batches * BATCH)?);
            us[1].push(separate.us_per_read(batches * BATCH)?);
        }
        let [one_us, many_us] = us.map(|us| median(&us));
        comparisons.push(Comparison {
            of,
            operation: "READ",
            bytes: SHORT,
            one_us,
            many_us,
            one_over_many: one_us / many_us,
        });
        wrong += shared.wrong + separate.wrong;
    }
    Ok(Report {
        benchmark: "verbs",
        verified: wrong == 0,
        config: Config {
            smoke: options.run.smoke,
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
    session: Arc<Session>,
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
            extent: session.grant_for_atomics(AREA_BYTES as u64)?.id,
            channel: session.channel()?,
            session,
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

/// Several connections that one thread serves, to the memory of a line.
struct Lines {
    engine: CompletionEngine<Vec<u8>>,
    extent: ExtentId,
    wrong: u64,
}

impl Lines {
    fn open(line: &Line, share_a_queue: bool, waiting: WaitMode) -> Result<Self> {
        let mut engine = CompletionEngine::new(waiting);
        if share_a_queue {
            engine.open(&vec![Arc::clone(&line.session); CONNECTIONS])?;
        } else {
            for _ in 0..CONNECTIONS {
                engine.add(line.session.channel()?);
            }
        }
        Ok(Self {
            engine,
            extent: line.extent,
            wrong: 0,
        })
    }

    /// Measures the microseconds per READ, with one in flight on each connection.
    fn us_per_read(&mut self, count: usize) -> Result<f64> {
        let mut idle: Vec<_> = (0..CONNECTIONS).map(|at| (at, vec![0; SHORT])).collect();
        let (mut posted, mut done) = (0, Vec::new());
        let begin = Instant::now();
        loop {
            while posted < count
                && let Some((connection, mut buf)) = idle.pop()
            {
                buf.fill(0);
                let offset = (posted % (AREA_BYTES / SHORT) * SHORT) as u64;
                let op = Op {
                    tag: offset,
                    verb: Verb::Read,
                    extent: self.extent,
                    offset,
                    len: SHORT as u32,
                    buf,
                };
                let posted_now = self.engine.post(connection, op);
                posted_now.map_err(|_| anyhow!("an idle channel takes an operation"))?;
                posted += 1;
            }
            if self.engine.in_flight() == 0 {
                return Ok(begin.elapsed().as_secs_f64() * 1e6 / count as f64);
            }
            self.engine.wait(&mut done, None)?;
            for (connection, completion) in done.drain(..) {
                completion.result.context("a READ failed")?;
                self.wrong += u64::from(!is_stamped(&completion.buf, completion.tag));
                idle.push((connection, completion.buf));
            }
        }
    }
}

/// Bytes of a piece that begins with its place, whatever the size of the operation that wrote it.
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
    fn human(&self) -> String {
        let comparisons = filled_table(
            "us per operation | of bytes | 1 | many | 1 / many",
            self.comparisons.iter().map(|c| {
                let [one, many] = [c.one_us, c.many_us].map(|us| format!("{us:.1}"));
                let (what, bytes, ratio) = (c.operation, c.bytes, c.one_over_many);
                format!("{what}, {} | {bytes} | {one} | {many} | {ratio:.2}", c.of)
            }),
        );
        let rows = [
            ("server", self.config.server.clone()),
            ("posted in one go", self.config.batch.to_string()),
        ];
        let run = run_table(self.benchmark, self.verified, rows);
        format!("{comparisons}\n{run}")
    }
}
