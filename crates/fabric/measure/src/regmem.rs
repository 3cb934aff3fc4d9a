//! Cost of registered memory for a transfer: from the pool, by registering each transfer's memory,
//! and by a cache of registrations by address; and the effect on a READ.
//!
//! The rule it keeps: the ways take turns in one run and the median of the rounds counts, so that
//! their ratios hold on a machine that does other things too. The pool must not register anything
//! while it is measured, or the run counts as failed.

mod pinning;

use clap::Args;
use std::{
    hint::black_box,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use farpage_fabric::{
    Channel, ExtentId, Op, Session, SessionOptions, Verb,
    regmem::{RegBuf, RegPool, RegPoolOptions, Registrar},
};
use serde::Serialize;

use farpage_bench_kit::{
    options::{Run, ServerOptions},
    pick::mix,
    raw::sleep_on,
    report::{self, filled_table, median, run_table},
    server::MemoryServer,
};
use pinning::ByAddress;

const ROUNDS: usize = 7;
/// Bytes of each READ, and of the fixed pattern.
const READ_BYTES: usize = 16 << 10;
/// Bytes of memory on the server that READs go over.
const AREA_BYTES: usize = 4 << 20;

/// Results of the measurement.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    verified: bool,
    config: Config,
    /// Costs of an acquisition with its release.
    acquire_release: Vec<Acquire>,
    read: Read,
    /// Registrations of the pool before anything was measured.
    warm_up_registrations: u64,
    /// Registrations of the pool in all that was measured.
    steady_state_registrations: u64,
}

#[derive(Debug, Serialize)]
struct Config {
    smoke: bool,
    server: String,
    registrar: &'static str,
    acquisitions: usize,
    rounds: usize,
}

#[derive(Debug, Serialize)]
struct Acquire {
    pattern: &'static str,
    pool_ns: f64,
    register_ns: f64,
    by_address_ns: f64,
    register_over_pool: f64,
    by_address_over_pool: f64,
}

#[derive(Debug, Serialize)]
struct Read {
    bytes: usize,
    pool_us: f64,
    register_us: f64,
    register_over_pool: f64,
}

/// Options of `regmem`.
#[derive(Args, Debug)]
pub struct RegmemOptions {
    #[command(flatten)]
    at: ServerOptions,
    #[command(flatten)]
    run: Run,
}

/// Runs the subcommand `regmem` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &RegmemOptions) -> Result<()> {
    let report = measure(options)?;
    report::conclude(
        &report,
        report.verified,
        options.run.printing.format,
        Report::human,
    )
}

fn measure(options: &RegmemOptions) -> Result<Report> {
    // Acquisitions, and READs, per round.
    let acquisitions = if options.run.smoke { 50 } else { 2_000 };
    let server = MemoryServer::start(&options.at, 64 << 20)?;
    let session = Session::connect(server.endpoint(), &SessionOptions::default())?;
    let (registrar, name) = pinning::registrar(&session);
    let pool = RegPool::new([Arc::clone(&registrar)], RegPoolOptions::default());
    let mut reads = Reads::new(&session, &pool)?;

    // Once without measuring: then the pool has what it needs.
    for pattern in PATTERNS {
        acquire(&pool, &registrar, pattern, acquisitions.min(500))?;
    }
    reads.measure(acquisitions.min(100))?;
    let warm = pool.stats();
    let acquire_release = PATTERNS
        .iter()
        .map(|pattern| acquire(&pool, &registrar, *pattern, acquisitions))
        .collect::<Result<_>>()?;
    let slabs = pool.stats().slabs;
    let read = reads.measure(acquisitions)?;
    // Imports register, as they are meant to here; slabs would be the pool's own registrations.
    let steady = pool.stats().slabs - warm.slabs;
    ensure!(slabs > 0, "the pool was not used");
    Ok(Report {
        benchmark: "regmem",
        verified: reads.wrong == 0 && steady == 0,
        config: Config {
            smoke: options.run.smoke,
            server: server.endpoint().to_string(),
            registrar: name,
            acquisitions,
            rounds: ROUNDS,
        },
        acquire_release,
        read,
        warm_up_registrations: warm.slabs,
        steady_state_registrations: steady,
    })
}

/// Sizes of the acquisitions.
#[derive(Clone, Copy)]
enum Pattern {
    Fixed,
    Repeated,
    Random,
}

const PATTERNS: [Pattern; 3] = [Pattern::Fixed, Pattern::Repeated, Pattern::Random];

impl Pattern {
    fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed, 16 KiB",
            Self::Repeated => "repeated, 4 to 512 KiB",
            Self::Random => "random, 4 to 512 KiB",
        }
    }

    /// Returns the bytes of acquisition `number`.
    fn bytes(self, number: usize) -> usize {
        match self {
            Self::Fixed => READ_BYTES,
            Self::Repeated => 4096 << (number % 8),
            // As many of each doubling.
            Self::Random => {
                let random = mix(number as u64);
                let doubling = 4096 << (random % 7);
                doubling + (random >> 32) as usize % doubling
            }
        }
    }
}

/// Measures each `way` in turns. Returns the medians of their rounds, in nanoseconds per step.
fn in_turns<const N: usize>(
    steps: usize,
    mut way: impl FnMut(usize) -> Result<Duration>,
) -> Result<[f64; N]> {
    let mut rounds = [(); N].map(|()| Vec::new());
    for _ in 0..ROUNDS {
        for (number, rounds) in rounds.iter_mut().enumerate() {
            rounds.push(way(number)?.as_nanos() as f64 / steps as f64);
        }
    }
    Ok(rounds.map(|rounds| median(&rounds)))
}

fn acquire(
    pool: &RegPool,
    registrar: &Arc<dyn Registrar>,
    pattern: Pattern,
    count: usize,
) -> Result<Acquire> {
    let mut cache = ByAddress::new(Arc::clone(registrar));
    let [pool_ns, register_ns, by_address_ns] = in_turns(count, |way| {
        let begin = Instant::now();
        for number in 0..count {
            let bytes = pattern.bytes(number);
            match way {
                0 => {
                    let mut buf = pool.acquire(bytes)?;
                    buf.as_mut()[0] = 1;
                    black_box(&buf);
                }
                1 => {
                    let mut buf = touched(bytes);
                    pinning::register_once(&**registrar, &mut buf).context(LOCKED)?;
                }
                _ => {
                    let mut buf = touched(bytes);
                    black_box(cache.look_up(&mut buf).context(LOCKED)?);
                }
            }
        }
        Ok(begin.elapsed())
    })?;
    Ok(Acquire {
        pattern: pattern.name(),
        pool_ns,
        register_ns,
        by_address_ns,
        register_over_pool: register_ns / pool_ns,
        by_address_over_pool: by_address_ns / pool_ns,
    })
}

const LOCKED: &str = "cannot register memory (`ulimit -l` says how much may be locked)";

/// Makes a vector of memory from the C library, as a program's own buffers are; not cleared.
fn touched(bytes: usize) -> Vec<u8> {
    let mut buf = Vec::with_capacity(bytes);
    buf.push(1);
    buf
}

/// READs one after the other, to see what a registration adds to each.
struct Reads<'a> {
    pool: &'a RegPool,
    channel: Box<dyn Channel<RegBuf>>,
    extent: ExtentId,
    /// The program's own buffer, when it is not in an operation.
    own: Arc<Mutex<Option<Vec<u8>>>>,
    wrong: u64,
}

impl<'a> Reads<'a> {
    /// Makes the READs, and writes the bytes that they are going to read.
    fn new(session: &Arc<Session>, pool: &'a RegPool) -> Result<Self> {
        let mut reads = Self {
            pool,
            channel: session.channel()?,
            extent: session.grant(AREA_BYTES as u64)?.id,
            own: Arc::new(Mutex::new(Some(vec![1; READ_BYTES]))),
            wrong: 0,
        };
        for offset in (0..AREA_BYTES).step_by(READ_BYTES) {
            let mut buf = pool.acquire(READ_BYTES)?;
            buf.as_mut().fill(stamp(offset));
            reads.one(Verb::Write, offset, buf)?;
        }
        Ok(reads)
    }

    fn measure(&mut self, count: usize) -> Result<Read> {
        let [pool_ns, register_ns] = in_turns(count, |way| {
            let begin = Instant::now();
            for number in 0..count {
                let offset = mix(number as u64) as usize % (AREA_BYTES / READ_BYTES) * READ_BYTES;
                let buf = match way {
                    0 => self.pool.acquire(READ_BYTES)?,
                    _ => {
                        let own = self.own.lock().expect("nothing panics under it").take();
                        let own = own.ok_or_else(|| anyhow!("the buffer did not come back"))?;
                        let home = Arc::clone(&self.own);
                        self.pool.import(Lent { buf: own, home })?
                    }
                };
                let buf = self.one(Verb::Read, offset, buf)?;
                let bytes = buf.as_ref();
                let right = [bytes[0], bytes[READ_BYTES - 1]] == [stamp(offset); 2];
                self.wrong += u64::from(!right);
            }
            Ok(begin.elapsed())
        })?;
        Ok(Read {
            bytes: READ_BYTES,
            pool_us: pool_ns / 1000.0,
            register_us: register_ns / 1000.0,
            register_over_pool: register_ns / pool_ns,
        })
    }

    fn one(&mut self, verb: Verb, offset: usize, buf: RegBuf) -> Result<RegBuf> {
        let op = Op {
            tag: 0,
            verb,
            extent: self.extent,
            offset: offset as u64,
            len: READ_BYTES as u32,
            buf,
        };
        let posted = self.channel.post(op);
        posted.map_err(|_| anyhow!("a channel takes one operation"))?;
        let mut done = Vec::with_capacity(1);
        while self.channel.poll(&mut done) == 0 {
            sleep_on(&self.channel.wait())?;
        }
        let completion = done.pop().expect("poll returned one");
        completion.result.context("an operation failed")?;
        Ok(completion.buf)
    }
}

/// The program's own buffer in an operation: goes home when its registration has ended.
struct Lent {
    buf: Vec<u8>,
    home: Arc<Mutex<Option<Vec<u8>>>>,
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.buf
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let buf = std::mem::take(&mut self.buf);
        *self.home.lock().expect("nothing panics under it") = Some(buf);
    }
}

fn stamp(offset: usize) -> u8 {
    (offset / READ_BYTES) as u8
}

impl Report {
    fn human(&self) -> String {
        let acquire = filled_table(
            "acquire and release, ns | pool | registered each time | cache by address | registered / pool | cache / pool",
            self.acquire_release.iter().map(|a| {
                let [pool, each, cached] = [a.pool_ns, a.register_ns, a.by_address_ns];
                let [over, cached_over] = [a.register_over_pool, a.by_address_over_pool];
                let ratios = format!("{over:.1} | {cached_over:.1}");
                format!(
                    "{} | {pool:.0} | {each:.0} | {cached:.0} | {ratios}",
                    a.pattern
                )
            }),
        );
        let r = &self.read;
        let (kib, pool, each) = (r.bytes >> 10, r.pool_us, r.register_us);
        let ratio = r.register_over_pool;
        let row = format!("{kib} KiB | {pool:.2} | {each:.2} | {ratio:.2}");
        let header = "READ, us | pool | registered each time | ratio";
        let read = filled_table(header, [row]);
        let warm_up = self.warm_up_registrations.to_string();
        let steady = self.steady_state_registrations.to_string();
        let rows = [
            ("server", self.config.server.as_str()),
            ("a registration is", self.config.registrar),
            ("registrations of the pool, to warm up", &warm_up),
            ("... and while it was measured", &steady),
        ];
        let run = run_table(self.benchmark, self.verified, rows);
        [acquire, read, run]
            .map(|table| table.to_string())
            .join("\n")
    }
}
