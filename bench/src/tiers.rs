//! A server that lends more than its memory: what an access costs by where its bytes are, and what
//! less memory costs.
//!
//! The rule it keeps: each figure stands beside what bounds it, taken in the same run, and every
//! byte that a READ brings is compared. One client with one operation in flight, over tcp, without
//! paging.

use std::{
    fs::{File, OpenOptions},
    hint::black_box,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use farpage::ByteSize;
use farpage_bench_kit::{
    options::{Run, some_bytes},
    pick::mix,
    report::{self, median, new_histogram, right, table},
    server::MemoryServer,
};
use farpage_fabric::{Channel, Extent, Op, Session, SessionOptions, Verb};
use farpage_wire::TierStat;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use serde::Serialize;

/// What a server moves out and in at once, and what is read here at once.
const CHUNK: usize = 64 << 10;
/// What O_DIRECT wants addresses to be multiples of.
const BLOCK: usize = 4096;
/// Of a thousand accesses of the curve so many go anywhere, the others to a tenth.
const ANYWHERE: u64 = 2;

#[derive(Args, Debug)]
pub(crate) struct TiersOptions {
    #[command(flatten)]
    pub(crate) run: Run,
    /// What the server lends [default: 512MiB, with --smoke 80MiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    size: Option<ByteSize>,
    /// Where the spill file is: a directory on a disk
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    spill: PathBuf,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Medians in microseconds, of one READ of 64 KiB where nothing else is said.
#[derive(Debug, Serialize)]
struct Latency {
    /// One byte there and back.
    round_trip_us: f64,
    /// In memory, at a server without tiers.
    plain_us: f64,
    /// In memory, at one with tiers.
    hot_us: f64,
    /// In the compressed pool.
    pool_us: f64,
    /// In the spill file.
    disk_us: f64,
    /// LZ4 alone, of a chunk like those in the pool.
    decode_us: f64,
    /// A bare O_DIRECT read beside the spill file.
    bare_disk_us: f64,
    /// Hot over plain: the median of the pairs, and the interval that holds it with 95 %.
    hot_over_plain: [f64; 3],
    /// Over a hot READ, a round trip and the decoding together.
    pool_over_parts: f64,
    /// Over a hot READ, a round trip and the bare read together.
    disk_over_parts: f64,
}

/// One server with so much memory.
#[derive(Debug, Serialize)]
struct Point {
    memory_bytes: u64,
    /// Over what is lent.
    memory_share: f64,
    /// The most that the server held, as it says.
    held_bytes_max: u64,
    mean_us: f64,
    /// Mean access over that of the server without tiers.
    slowdown: f64,
    /// Accesses that had to be fetched.
    cold_share: f64,
}

#[derive(Debug, Serialize)]
struct Tiers {
    benchmark: &'static str,
    verified: bool,
    smoke: bool,
    lent_bytes: u64,
    latency: Latency,
    curve: Vec<Point>,
}

/// A client of one server, and what it has written there.
struct Client {
    session: Arc<Session>,
    channel: Box<dyn Channel<Vec<u8>>>,
    extent: Extent,
    content: fn(u64, &mut [u8]),
    spare: Option<Vec<u8>>,
    expected: Vec<u8>,
    wrong: u64,
}

/// Words that do not compress.
fn noise(chunk: u64, bytes: &mut [u8]) {
    for (i, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        word.copy_from_slice(&mix((chunk << 20) | i).to_le_bytes());
    }
}

/// Words that compress to a third or so.
fn smooth(chunk: u64, bytes: &mut [u8]) {
    for (i, word) in (0..).zip(bytes.chunks_exact_mut(8)) {
        let low = mix((chunk << 20) | (i / 4)) & 0xffff;
        word.copy_from_slice(&((chunk << 16) | low).to_le_bytes());
    }
}

impl Client {
    fn new(session: &Arc<Session>, bytes: u64, content: fn(u64, &mut [u8])) -> Result<Self> {
        let session = Arc::clone(session);
        let extent = session.grant(bytes)?;
        let channel = session.channel()?;
        let mut client = Self {
            session,
            channel,
            extent,
            content,
            spare: None,
            expected: vec![0; CHUNK],
            wrong: 0,
        };
        for chunk in 0..client.chunks() {
            let mut bytes = vec![0; CHUNK];
            content(chunk, &mut bytes);
            client.operate(Verb::Write, chunk, bytes)?;
        }
        Ok(client)
    }

    fn chunks(&self) -> u64 {
        self.extent.bytes / CHUNK as u64
    }

    fn operate(&mut self, verb: Verb, chunk: u64, buf: Vec<u8>) -> Result<Vec<u8>> {
        let op = Op {
            tag: 0,
            verb,
            extent: self.extent.id,
            offset: chunk * CHUNK as u64,
            len: buf.len() as u32,
            buf,
        };
        let posted = self.channel.post(op);
        posted.ok().context("an empty queue is full")?;
        let mut done = Vec::with_capacity(1);
        let until = Instant::now() + Duration::from_secs(10);
        // Looked for, since to be woken takes longer than a READ on some machines.
        while self.channel.poll(&mut done) == 0 {
            ensure!(Instant::now() < until, "the server does not answer");
            std::hint::spin_loop();
        }
        let done = done.pop().context("it has just ended")?;
        done.result?;
        Ok(done.buf)
    }

    /// Microseconds of one READ, whose bytes are compared when the clock has stopped.
    fn read(&mut self, chunk: u64) -> Result<f64> {
        let buf = self.spare.take().unwrap_or_else(|| vec![0; CHUNK]);
        let begin = Instant::now();
        let buf = self.operate(Verb::Read, chunk, buf)?;
        let took = begin.elapsed();
        (self.content)(chunk, &mut self.expected);
        self.wrong += u64::from(buf != self.expected);
        self.spare = Some(buf);
        Ok(took.as_secs_f64() * 1e6)
    }

    fn round_trip(&mut self) -> Result<f64> {
        let begin = Instant::now();
        self.operate(Verb::Read, 0, vec![0])?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    }

    fn tiers(&self) -> Result<TierStat> {
        Ok(self.session.stat()?.tiers)
    }
}

pub(crate) fn run(options: &TiersOptions) -> Result<()> {
    let default_bytes = if options.run.smoke {
        80 << 20
    } else {
        512 << 20
    };
    let lent_bytes = options.size.map_or(default_bytes, |size| size.as_u64());
    let mut wrong = 0;
    let latency = latency(options, &mut wrong)?;
    let curve = curve(options, lent_bytes, &mut wrong)?;
    let found = Tiers {
        benchmark: "tiers",
        verified: wrong == 0,
        smoke: options.run.smoke,
        lent_bytes,
        latency,
        curve,
    };
    report::conclude(&found, found.verified, options.run.printing.format, human)
}

fn connect(server: &MemoryServer) -> Result<Arc<Session>> {
    Ok(Session::connect(
        server.endpoint(),
        &SessionOptions::default(),
    )?)
}

/// One access at a time, by where its bytes are.
fn latency(options: &TiersOptions, wrong: &mut u64) -> Result<Latency> {
    let (pairs, samples, cold) = if options.run.smoke {
        (3, 20, 20)
    } else {
        (20, 500, 300)
    };
    let memory_bytes = 64 << 20;
    let hot_bytes = 4 << 20;
    let plain = MemoryServer::lending(hot_bytes, None)?;
    let lent_bytes = 6 * memory_bytes;
    let tiered = (memory_bytes, options.spill.as_path());
    let tiered = MemoryServer::lending(lent_bytes, Some(tiered))?;
    // 1. Hot, in turns.
    let mut there = Client::new(&connect(&plain)?, hot_bytes, noise)?;
    let mut hot = Client::new(&connect(&tiered)?, hot_bytes, noise)?;
    let medians = |client: &mut Client| -> Result<f64> {
        let times: Result<Vec<f64>> = (0..samples)
            .map(|i| client.read(mix(i) % client.chunks()))
            .collect();
        Ok(median(&times?))
    };
    let (mut plain_us, mut hot_us, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        let (first, second) = match pair % 2 {
            0 => (medians(&mut there)?, medians(&mut hot)?),
            _ => {
                let second = medians(&mut hot)?;
                (medians(&mut there)?, second)
            }
        };
        plain_us.push(first);
        hot_us.push(second);
        ratios.push(second / first);
    }
    let round_trips: Result<Vec<f64>> = (0..samples).map(|_| hot.round_trip()).collect();
    // 2. In the pool: a third of it or so, and more noise than there is memory pushes it there.
    let pool_bytes = memory_bytes / 4;
    // One session's share gives both up; what is hot is another's, and stays.
    let session = connect(&tiered)?;
    let mut pool = Client::new(&session, pool_bytes, smooth)?;
    let mut disk = Client::new(&session, 4 * memory_bytes, noise)?;
    let stat = pool.tiers()?;
    ensure!(
        stat.compressed_bytes > pool_bytes / 2 && stat.spilled_bytes > 2 * memory_bytes,
        "the server keeps its bytes elsewhere than is measured here: {stat:?}"
    );
    let pool_us = fetched(&mut pool, cold.min(pool_bytes / CHUNK as u64), options.seed)?;
    // 3. On the disk.
    let disk_us = fetched(&mut disk, cold, options.seed)?;
    let bare_disk_us = bare_disk(&options.spill, lent_bytes, cold, options.seed)?;
    let decode_us = decode(samples);
    *wrong += there.wrong + hot.wrong + pool.wrong + disk.wrong;
    let (round_trip_us, hot_us) = (median(&round_trips?), median(&hot_us));
    Ok(Latency {
        round_trip_us,
        plain_us: median(&plain_us),
        hot_us,
        pool_us,
        disk_us,
        decode_us,
        bare_disk_us,
        hot_over_plain: interval(&mut ratios),
        pool_over_parts: pool_us / (hot_us + round_trip_us + decode_us),
        disk_over_parts: disk_us / (hot_us + round_trip_us + bare_disk_us),
    })
}

/// The median of values, and the order statistics that hold it with 95 %.
fn interval(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let off = (0.98 * n.sqrt()).ceil();
    let at = |rank: f64| values[rank.clamp(0.0, n - 1.0) as usize];
    [median(values), at(n / 2.0 - off), at(n / 2.0 + off - 1.0)]
}

/// The median of READs of different chunks, those of them that the server had to fetch.
fn fetched(client: &mut Client, count: u64, seed: u64) -> Result<f64> {
    let chunks = client.chunks();
    let mut times = Vec::new();
    // An odd step goes to each of a power of two of chunks once.
    let (from, step) = (mix(seed), mix(seed ^ 1) | 1);
    for i in 0..2 * count {
        let chunk = from.wrapping_add(i.wrapping_mul(step)) % chunks;
        let before = client.tiers()?.fetches;
        let took = client.read(chunk)?;
        if client.tiers()?.fetches > before {
            times.push(took);
        }
        if times.len() as u64 == count {
            break;
        }
    }
    ensure!(
        times.len() as u64 > count / 4,
        "too few chunks had left memory"
    );
    Ok(median(&times))
}

/// Reads of a file like the server's.
fn bare_disk(directory: &Path, bytes: u64, count: u64, seed: u64) -> Result<f64> {
    let file: File = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlag::O_TMPFILE | OFlag::O_DIRECT).bits())
        .open(directory)
        .context("cannot make a file beside the spill file")?;
    fallocate(&file, FallocateFlags::empty(), 0, bytes as i64)?;
    let mut memory = vec![0; CHUNK + BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let buf = &mut memory[start..][..CHUNK];
    for chunk in 0..bytes / CHUNK as u64 {
        noise(chunk, buf);
        file.write_all_at(buf, chunk * CHUNK as u64)?;
    }
    let mut times = Vec::new();
    for i in 0..count {
        let chunk = mix(seed ^ i) % (bytes / CHUNK as u64);
        let begin = Instant::now();
        file.read_exact_at(buf, chunk * CHUNK as u64)?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&times))
}

/// Of different chunks in turns, as a server has them.
fn decode(count: u64) -> f64 {
    let mut plain = vec![0; CHUNK];
    let packed: Vec<Vec<u8>> = (0..count.min(64))
        .map(|chunk| {
            smooth(chunk, &mut plain);
            lz4_flex::block::compress(&plain)
        })
        .collect();
    let times: Vec<f64> = (0..count as usize)
        .map(|i| {
            let packed = &packed[i % packed.len()];
            let begin = Instant::now();
            let bytes = lz4_flex::block::decompress_into(black_box(packed), &mut plain);
            black_box((&bytes, &plain));
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    median(&times)
}

/// The mean access to a tenth, and rarely to all, as memory shrinks.
fn curve(options: &TiersOptions, lent_bytes: u64, wrong: &mut u64) -> Result<Vec<Point>> {
    let accesses = if options.run.smoke { 500 } else { 20_000 };
    let plain = MemoryServer::lending(lent_bytes, None)?;
    let mut client = Client::new(&connect(&plain)?, lent_bytes, noise)?;
    let base = walk(&mut client, accesses, options.seed)?.mean_us;
    *wrong += client.wrong;
    drop(client);
    drop(plain);
    let mut points = Vec::new();
    for percent in [50, 30, 20, 14] {
        let memory_bytes = (lent_bytes * percent / 100).max(16 << 20);
        let tiered = (memory_bytes, options.spill.as_path());
        let server = MemoryServer::lending(lent_bytes, Some(tiered))?;
        let mut client = Client::new(&connect(&server)?, lent_bytes, noise)?;
        let walked = walk(&mut client, accesses, options.seed)?;
        *wrong += client.wrong;
        points.push(Point {
            memory_bytes,
            memory_share: memory_bytes as f64 / lent_bytes as f64,
            held_bytes_max: walked.held_bytes_max,
            mean_us: walked.mean_us,
            slowdown: walked.mean_us / base,
            cold_share: walked.fetches as f64 / accesses as f64,
        });
    }
    Ok(points)
}

struct Walked {
    mean_us: f64,
    fetches: u64,
    held_bytes_max: u64,
}

fn walk(client: &mut Client, accesses: u64, seed: u64) -> Result<Walked> {
    let chunks = client.chunks();
    let hot = chunks / 10;
    // The tenth comes into memory first: what is measured is how it goes on.
    for chunk in (0..hot).chain(0..hot) {
        client.read(chunk)?;
    }
    let before = client.tiers()?;
    let mut held_bytes_max = before.held_bytes;
    let mut histogram = new_histogram();
    for i in 0..accesses {
        let pick = mix(seed ^ (i << 1));
        let end = if mix(pick) % 1000 < ANYWHERE {
            chunks
        } else {
            hot
        };
        histogram.saturating_record((client.read(pick % end)? * 1000.0) as u64);
        if i % 100 == 0 {
            held_bytes_max = held_bytes_max.max(client.tiers()?.held_bytes);
        }
    }
    Ok(Walked {
        mean_us: histogram.mean() / 1000.0,
        fetches: client.tiers()?.fetches - before.fetches,
        held_bytes_max,
    })
}

fn human(found: &Tiers) -> String {
    let us = |value: f64| format!("{value:.1}");
    let latency = &found.latency;
    let [ratio, low, high] = latency.hot_over_plain;
    let mut times = table(["READ of 64 KiB", "us", "over its parts"]);
    let rows = [
        (
            "one byte there and back",
            latency.round_trip_us,
            String::new(),
        ),
        (
            "in memory, server without tiers",
            latency.plain_us,
            String::new(),
        ),
        (
            "in memory",
            latency.hot_us,
            format!("{ratio:.3} ({low:.3} to {high:.3})"),
        ),
        ("LZ4 alone", latency.decode_us, String::new()),
        (
            "in the compressed pool",
            latency.pool_us,
            format!("{:.2}", latency.pool_over_parts),
        ),
        ("bare O_DIRECT read", latency.bare_disk_us, String::new()),
        (
            "in the spill file",
            latency.disk_us,
            format!("{:.2}", latency.disk_over_parts),
        ),
    ];
    for (name, value, over) in rows {
        times.add_row(right([name.to_owned(), us(value), over]));
    }
    let mut curve = table([
        "--memory",
        "of the lent",
        "most held",
        "mean us",
        "slowdown",
        "cold",
    ]);
    for point in &found.curve {
        curve.add_row(right([
            ByteSize(point.memory_bytes).to_string(),
            format!("{:.0} %", point.memory_share * 100.0),
            ByteSize(point.held_bytes_max).to_string(),
            us(point.mean_us),
            format!("{:.3}", point.slowdown),
            format!("{:.2} %", point.cold_share * 100.0),
        ]));
    }
    let rare = ANYWHERE;
    format!(
        "{times}\n{} lent; of 1000 accesses {rare} go anywhere, the others to a tenth:\n{curve}",
        ByteSize(found.lent_bytes)
    )
}
