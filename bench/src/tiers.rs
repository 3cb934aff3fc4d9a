//! A server that lends more than its memory: the cost of an access by where its bytes are, and the
//! cost of less memory.
//!
//! The rule it keeps: each figure stands beside what bounds it, taken in the same run, and every
//! byte that a READ brings is compared. The client here has one operation in flight and no paging;
//! programs that page are in [`turns`].

mod client;
mod first;
mod picture;
mod turns;

use std::{
    fs::{File, OpenOptions},
    hint::black_box,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use farpage::ByteSize;
use farpage_bench_kit::{
    options::{Fabric, Run, some_bytes},
    pick::mix,
    report::{self, Pairs, filled_table, median, ranged},
    server::MemoryServer,
};
use farpage_fabric::{Session, SessionOptions};
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use serde::Serialize;

use self::{
    client::{CHUNK, Client, noise, smooth},
    first::First,
    turns::{ANYWHERE, Measurement, Row},
};

/// Alignment of addresses in bytes that O_DIRECT requires.
const BLOCK: usize = 4096;
#[derive(Args, Debug)]
pub(crate) struct TiersOptions {
    #[command(flatten)]
    pub(crate) run: Run,
    /// Memory that programs that page have at the server, and that is leased at once [default:
    /// 1GiB, with --smoke 80MiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    size: Option<ByteSize>,
    /// Fabric to the servers
    #[arg(long, value_enum, default_value_t = Fabric::Tcp)]
    fabric: Fabric,
    /// Directory of the spill file, on a disk
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    spill: PathBuf,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Parts to measure [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    only: Vec<Part>,
    /// File to draw to: latency by where bytes are, the server's memory over time, and the slowdown
    /// over --memory
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// One READ of 64 KiB, by where its bytes are
    Latency,
    /// Time from a lease to its first page, beside a server that has all in memory
    First,
    /// A program that uses a tenth, and less and less memory
    Curve,
    /// Five times as much lent as there is memory
    Capacity,
    /// Memory below that in use all the time, in a memory cgroup
    Starved,
}

/// Medians in microseconds, of one READ of 64 KiB where nothing else is said.
#[derive(Debug, Serialize)]
struct Latency {
    /// Round trip to the server's process.
    round_trip_us: f64,
    /// READ of bytes in memory, at a server without tiers.
    plain_us: f64,
    /// READ of bytes in memory, at a server with tiers.
    hot_us: f64,
    /// READ of bytes in the compressed pool.
    pool_us: f64,
    /// READ of bytes in the spill file.
    disk_us: f64,
    /// Decoding alone, by LZ4, of a chunk like those in the pool.
    decode_us: f64,
    /// A bare O_DIRECT read beside the spill file.
    bare_disk_us: f64,
    /// `hot_us` over `plain_us`: the median of the pairs, and the interval that holds it with 95 %.
    hot_over_plain: [f64; 3],
    /// `pool_us` over the sum of a hot READ, a round trip and the decoding.
    pool_over_parts: f64,
    /// `disk_us` over the sum of a hot READ, a round trip and the bare read.
    disk_over_parts: f64,
}

#[derive(Debug, Serialize)]
struct Tiers {
    benchmark: &'static str,
    verified: bool,
    smoke: bool,
    lent_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency: Option<Latency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<First>,
    curve: Vec<Row>,
    capacity: Vec<Row>,
    starved: Vec<Row>,
    /// Reason why there are no figures of a server in a memory cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    not_starved: Option<String>,
}

pub(crate) fn run(options: &TiersOptions) -> Result<()> {
    let smoke = options.run.smoke;
    let default_bytes = if smoke { 80 << 20 } else { 1 << 30 };
    let lent_bytes = options.size.map_or(default_bytes, |size| size.as_u64());
    let is_asked = |part| options.only.is_empty() || options.only.contains(&part);
    let mut wrong = 0;
    let mut turns = Measurement {
        fabric: options.fabric,
        lent_bytes,
        spill: &options.spill,
        smoke,
        seed: options.seed,
        wrong: 0,
    };
    let latency = is_asked(Part::Latency).then(|| latency(options, &mut wrong));
    let first = || first::measure(options.fabric, lent_bytes, &options.spill, smoke);
    let first = is_asked(Part::First).then(first);
    let curve = is_asked(Part::Curve).then(|| turns::curve(&mut turns));
    let capacity = is_asked(Part::Capacity).then(|| turns::capacity(&mut turns));
    let starved = is_asked(Part::Starved).then(|| turns::starved(&mut turns));
    let (starved, not_starved) = match starved.transpose()? {
        Some(Ok(rows)) => (rows, None),
        Some(Err(why)) => (Vec::new(), Some(why)),
        None => (Vec::new(), None),
    };
    let found = Tiers {
        benchmark: "tiers",
        verified: wrong + turns.wrong == 0,
        smoke,
        lent_bytes,
        latency: latency.transpose()?,
        first: first.transpose()?,
        curve: curve.transpose()?.unwrap_or_default(),
        capacity: capacity.transpose()?.unwrap_or_default(),
        starved,
        not_starved,
    };
    if let Some(path) = &options.svg {
        picture::draw(&found, path)?;
    }
    report::conclude(&found, found.verified, options.run.printing.format, human)
}

fn connect(server: &MemoryServer) -> Result<Arc<Session>> {
    let options = SessionOptions::default();
    Ok(Session::connect(server.endpoint(), &options)?)
}

/// Measures one access at a time, by where its bytes are.
fn latency(options: &TiersOptions, wrong: &mut u64) -> Result<Latency> {
    let (pairs, samples, cold) = match options.run.smoke {
        true => (3, 20, 20),
        false => (20, 500, 300),
    };
    let memory_bytes = 64 << 20;
    let hot_bytes = 4 << 20;
    let plain = MemoryServer::own(options.fabric, hot_bytes)?;
    let lent_bytes = 6 * memory_bytes;
    let spill = &options.spill;
    let tiered = MemoryServer::tiered(options.fabric, lent_bytes, memory_bytes, spill, None)?;
    // 1. Hot, in turns.
    let mut there = Client::new(&connect(&plain)?, hot_bytes, noise)?;
    let mut hot = Client::new(&connect(&tiered)?, hot_bytes, noise)?;
    let medians = |client: &mut Client| -> Result<f64> {
        let times = (0..samples).map(|i| client.read(mix(i) % client.chunks()));
        Ok(median(&times.collect::<Result<Vec<f64>>>()?))
    };
    let mut turns = Pairs::default();
    for _ in 0..pairs {
        turns.measure(|| medians(&mut there), || medians(&mut hot))?;
    }
    let round_trips = hot.round_trips(samples)?;
    // 2. In the pool: words that compress to a third, pushed there by more noise than memory holds.
    let pool_bytes = memory_bytes / 4;
    // One session's share gives both up; the hot bytes are another session's, and stay.
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
    let ([plain_us, hot_us], round_trip_us) = (turns.medians(), median(&round_trips));
    Ok(Latency {
        round_trip_us,
        plain_us,
        hot_us,
        pool_us,
        disk_us,
        decode_us,
        bare_disk_us,
        hot_over_plain: turns.other_over_one(),
        pool_over_parts: pool_us / (hot_us + round_trip_us + decode_us),
        disk_over_parts: disk_us / (hot_us + round_trip_us + bare_disk_us),
    })
}

/// Returns the median of READs of different chunks, of those that the server had to fetch.
fn fetched(client: &mut Client, count: u64, seed: u64) -> Result<f64> {
    let chunks = client.chunks();
    let mut times = Vec::new();
    // An odd step visits each chunk once, where the number of chunks is a power of two.
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
    let found = times.len() as u64;
    ensure!(found > count / 4, "too few chunks had left memory");
    Ok(median(&times))
}

/// Returns the median microseconds of reads of a file like the server's.
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

/// Returns the median microseconds of decoding different chunks in turns, as a server does.
fn decode(count: u64) -> f64 {
    let mut plain = vec![0; CHUNK];
    let mut pack = |chunk| {
        smooth(chunk, &mut plain);
        lz4_flex::block::compress(&plain)
    };
    let packed: Vec<Vec<u8>> = (0..count.min(64)).map(&mut pack).collect();
    let mut time = |i: usize| {
        let packed = &packed[i % packed.len()];
        let begin = Instant::now();
        let bytes = lz4_flex::block::decompress_into(black_box(packed), &mut plain);
        black_box((&bytes, &plain));
        begin.elapsed().as_secs_f64() * 1e6
    };
    median(&(0..count as usize).map(&mut time).collect::<Vec<f64>>())
}

fn human(found: &Tiers) -> String {
    let mut parts: Vec<String> = found.latency.iter().map(human_latency).collect();
    parts.extend(found.first.iter().map(first::human));
    let lent = ByteSize(found.lent_bytes);
    for (rows, what) in [
        (&found.curve, "less and less memory, a budget of 2 %"),
        (&found.capacity, "five times the memory, a budget of 1 %"),
        (
            &found.starved,
            "memory below the tenth, in a memory cgroup of it and 32 MiB, a budget of 2 %",
        ),
    ] {
        if !rows.is_empty() {
            let tenth = format!("\"a tenth\": all but {ANYWHERE} of 1000 accesses");
            parts.push(format!(
                "{lent} lent, {what}; {tenth}\n{}",
                turns::human(rows)
            ));
        }
    }
    if let Some(why) = &found.not_starved {
        parts.push(format!("not measured in a memory cgroup: {why}"));
    }
    parts.join("\n")
}

fn human_latency(latency: &Latency) -> String {
    let over = |ratio: f64| format!("{ratio:.2}");
    let hot = ranged(latency.hot_over_plain, 3);
    let (pool, disk) = (over(latency.pool_over_parts), over(latency.disk_over_parts));
    let rows = [
        ("to the server and back", latency.round_trip_us, ""),
        ("in memory, server without tiers", latency.plain_us, ""),
        ("in memory", latency.hot_us, &hot),
        ("LZ4 alone", latency.decode_us, ""),
        ("in the compressed pool", latency.pool_us, &pool),
        ("bare O_DIRECT read", latency.bare_disk_us, ""),
        ("in the spill file", latency.disk_us, &disk),
    ];
    let rows = rows.map(|(name, us, over)| format!("{name} | {us:.1} | {over}"));
    filled_table("READ of 64 KiB | us | over its parts", rows).to_string()
}
