//! Codecs by themselves: a field is encoded and decoded page by page, in this process, without
//! paging or a network.
//!
//! The rule it keeps: every page is compared after it was decoded, and what is timed is the CPU
//! time of one thread, so that other programs on the machine count as little as can be. DEFLATE
//! (zlib-rs, the fastest that is well kept) is here for comparison only: farpage does not offer it.
//! `plain-lz4` is LZ4 as the published prototype uses it: whatever comes out is taken, larger or
//! not.

use bytesize::ByteSize;
use clap::Args;
use farpage_bench_kit::data::DataOptions;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytemuck::cast_slice;
use farpage::{Codec, Trial};
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress};
use lz4_flex::block;
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use farpage_bench_kit::{
    data::{Dtype, Element, Source},
    options::{Printing, error_bound, page_size},
    report,
};

/// Least time of a measurement, in which clocks and caches settle.
const TIME_MIN: Duration = Duration::from_millis(60);

/// Result of a codec on a field.
#[derive(Debug, Serialize)]
struct Finding {
    codec: String,
    /// Bytes of the field over bytes of its pages as encoded.
    ratio: f64,
    /// Share of the pages that became longer.
    grown_share: f64,
    encode_mb_per_s: f64,
    decode_mb_per_s: f64,
    /// The largest difference between a value and the value that came back.
    error_max: f64,
}

#[derive(Serialize)]
struct PagesReport {
    benchmark: &'static str,
    verified: bool,
    data: String,
    dtype: Dtype,
    page_size_bytes: u64,
    pages: usize,
    findings: Vec<Finding>,
}

/// Options of `pages`.
#[derive(Args, Debug)]
pub struct PagesOptions {
    #[command(flatten)]
    data: DataOptions,
    /// Codecs with plus signs between them: raw, lz4, shuffle, zfp:accuracy=1e-6, ..., and for
    /// comparison deflate1 to deflate9 and plain-lz4
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = '+',
        default_value = "deflate1+deflate6+plain-lz4+lz4"
    )]
    codecs: Vec<String>,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    page_size: ByteSize,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    printing: Printing,
    /// Four pages, once: checks that everything works; the times mean nothing
    #[arg(long)]
    smoke: bool,
}

/// Runs the subcommand `pages` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified.
pub fn run(options: &PagesOptions) -> Result<()> {
    let source = Source::new(&options.data, options.seed)?;
    let report = match source.dtype {
        Dtype::F32 => measure::<f32>(options, &source),
        Dtype::F64 => measure::<f64>(options, &source),
        Dtype::I32 => measure::<i32>(options, &source),
        Dtype::I64 => measure::<i64>(options, &source),
        Dtype::U8 => measure::<u8>(options, &source),
    }?;
    let format = options.printing.format;
    report::conclude(&report, report.verified, format, |report| {
        let row = |finding: &Finding| {
            let [ratio, grown] = [finding.ratio, 100.0 * finding.grown_share];
            let [encode, decode] = [finding.encode_mb_per_s, finding.decode_mb_per_s];
            let error = match finding.error_max {
                0.0 => "none".to_owned(),
                error => format!("{error:.1e}"),
            };
            let figures = format!("{ratio:.3} | {grown:.0} % | {encode:.0} | {decode:.0}");
            format!("{} | {figures} | {error}", finding.codec)
        };
        let table = report::filled_table(
            "codec | ratio | pages that grow | encode MB/s | decode MB/s | largest error",
            report.findings.iter().map(row),
        );
        format!(
            "{table}\n{} pages of {} KiB, {} data.",
            report.pages,
            report.page_size_bytes >> 10,
            report.data
        )
    })
}

fn measure<T: Element>(options: &PagesOptions, source: &Source) -> Result<PagesReport> {
    let page_bytes = options.page_size.as_u64() as usize;
    let field: Vec<T> = source.field();
    let pages: Vec<&[u8]> = cast_slice::<T, u8>(&field)
        .chunks_exact(page_bytes)
        .collect();
    ensure!(
        !pages.is_empty(),
        "the field has {} bytes, less than a page: give it as more elements, or choose a smaller --page-size",
        size_of_val(&field[..])
    );
    let pages = match options.smoke {
        true => &pages[..pages.len().min(4)],
        false => &pages[..],
    };
    let mut verified = true;
    let mut findings = Vec::new();
    for name in &options.codecs {
        let mut way = Way::new(name, farpage::Element::of::<T>(), source, page_bytes)?;
        let (encode, blocks) = timed(options.smoke, || {
            let blocks = (0..)
                .zip(pages)
                .map(|(number, page)| way.encode(number, page));
            blocks.collect::<Vec<Block>>()
        });
        let mut back = vec![0u8; page_bytes];
        let mut error_max = 0.0f64;
        // Once to verify, then against the clock.
        for ((number, page), block) in (0..).zip(pages).zip(&blocks) {
            way.decode(number, block, &mut back)
                .with_context(|| format!("{name} cannot decode page {number}"))?;
            if back != *page {
                let (is, was) = (
                    bytemuck::pod_collect_to_vec::<u8, T>(&back),
                    bytemuck::pod_collect_to_vec::<u8, T>(page),
                );
                for (is, was) in is.into_iter().zip(was) {
                    error_max = error_max.max(is.distance(was));
                }
                verified &= error_max <= way.error_bound();
            }
        }
        let (decode, ()) = timed(options.smoke, || {
            for (number, block) in (0..).zip(&blocks) {
                // The loop above has shown that the block can be decoded.
                let _ = std::hint::black_box(way.decode(number, block, &mut back));
            }
        });
        let plain = (pages.len() * page_bytes) as f64;
        let encoded: usize = blocks.iter().map(Block::len).sum();
        let grown = blocks
            .iter()
            .filter(|block| block.len() > page_bytes)
            .count();
        findings.push(Finding {
            codec: name.clone(),
            // A page that is one repeated value needs no bytes at all.
            ratio: plain / (encoded.max(1)) as f64,
            grown_share: grown as f64 / pages.len() as f64,
            encode_mb_per_s: plain / encode.as_secs_f64() / 1e6,
            decode_mb_per_s: plain / decode.as_secs_f64() / 1e6,
            error_max,
        });
    }
    Ok(PagesReport {
        benchmark: "pages",
        verified,
        data: options.data.name(),
        dtype: source.dtype,
        page_size_bytes: page_bytes as u64,
        pages: pages.len(),
        findings,
    })
}

/// Returns the CPU time of one of many runs, and what the last one made.
fn timed<T>(once: bool, mut run: impl FnMut() -> T) -> (Duration, T) {
    let begin = cpu_time();
    for runs in 1u32.. {
        let made = run();
        let time = cpu_time() - begin;
        if once || time >= TIME_MIN {
            return (time.max(Duration::from_nanos(1)) / runs, made);
        }
    }
    unreachable!("the loop has no end")
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .expect("every Linux has this clock")
        .into()
}

/// A way to encode pages.
enum Way {
    Deflate { level: u32 },
    PlainLz4,
    Farpage { trial: Box<Trial>, codec: Codec },
}

enum Block {
    Bytes(Vec<u8>),
    Farpage(farpage::Block),
}

impl Block {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Farpage(block) => block.len(),
        }
    }
}

impl Way {
    fn new(
        name: &str,
        element: farpage::Element,
        source: &Source,
        page_bytes: usize,
    ) -> Result<Self> {
        if let Some(level) = name.strip_prefix("deflate") {
            let level = level.parse().ok().filter(|level| (1..=9).contains(level));
            let level = level.with_context(|| format!("{name}: a level of DEFLATE is 1 to 9"))?;
            return Ok(Self::Deflate { level });
        }
        if name == "plain-lz4" {
            return Ok(Self::PlainLz4);
        }
        let codec: Codec = name.parse().map_err(|error| {
            anyhow::anyhow!("{error}, or for comparison deflate1 to deflate9 or plain-lz4")
        })?;
        let shape: Vec<u64> = source
            .shape
            .trimmed()
            .into_iter()
            .map(|n| n as u64)
            .collect();
        let trial = Box::new(Trial::new(codec, element, &shape, page_bytes)?);
        Ok(Self::Farpage { trial, codec })
    }

    fn error_bound(&self) -> f64 {
        match self {
            Self::Farpage { codec, .. } => error_bound(*codec),
            Self::Deflate { .. } | Self::PlainLz4 => 0.0,
        }
    }

    fn encode(&mut self, number: u64, page: &[u8]) -> Block {
        match self {
            Self::Deflate { level } => {
                // Raw DEFLATE: no header, no checksum, as the others.
                let mut deflate = Compress::new(Compression::new(*level), false);
                let mut block = Vec::with_capacity(page.len() + page.len() / 8 + 64);
                deflate
                    .compress_vec(page, &mut block, FlushCompress::Finish)
                    .expect("the block has room for what does not shrink");
                Block::Bytes(block)
            }
            Self::PlainLz4 => Block::Bytes(block::compress(page)),
            Self::Farpage { trial, .. } => Block::Farpage(trial.encode(number, page)),
        }
    }

    fn decode(&mut self, number: u64, block: &Block, page: &mut [u8]) -> Result<()> {
        match (self, block) {
            (Self::Deflate { .. }, Block::Bytes(block)) => {
                Decompress::new(false).decompress(block, page, FlushDecompress::Finish)?;
            }
            (Self::PlainLz4, Block::Bytes(block)) => {
                block::decompress_into(block, page)?;
            }
            (Self::Farpage { trial, .. }, Block::Farpage(block)) => {
                trial.decode(number, block, page)?;
            }
            _ => unreachable!("a block is decoded by what made it"),
        }
        Ok(())
    }
}
