//! The command line.
//!
//! The rule it keeps: every option says its unit and its default, and what cannot work is refused
//! here, with status 2, before anything is started.

use std::{fmt, path::PathBuf, str::FromStr, thread};

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};
use farpage::{Codec, ZfpMode};
use farpage_wire::Endpoint;
use serde::Serialize;

use crate::{
    apps::AppsOptions,
    data::{Contents, DataOptions, Source},
    figures::plan::Extent,
    versus_umap::VersusUmapOptions,
};

/// Measures farpage: STREAM on remote arrays, random access, fault latency, and the floor under all
/// of them.
///
/// Each benchmark starts a memory server of its own, a separate process on this machine, unless
/// --server names one. Every run verifies its data. Exit status: 0 verified, 1 failed, 2 wrong
/// usage.
#[derive(Debug, Parser)]
#[command(name = "farpage-bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What the tables' words mean.
const WORDS: &str = "\
Words of the tables:
  page faults           accesses to a page that was not in local memory
  pages brought in      for a fault, or ahead of one because accesses were in order
  pages sent away       to make room; unchanged ones need no WRITE, and ones that were wanted again while they left came back without a READ
  waited for room       faults that found the budget full: pages had to leave first, which costs time
  peak resident         the most local memory that pages took; never more than the budget
  plain memory          the same loop on ordinary arrays that fit into memory: what paging cannot beat
  the raw fabric        READs and WRITEs of whole pages with nothing else to do: what paging can reach at most
  floor, best possible  in other benchmarks, a figure of the same work without a pager: nothing can be faster on this machine";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// McCalpin's STREAM on three remote arrays: copy, scale, add, triad
    #[command(after_help = WORDS)]
    Stream(StreamOptions),
    /// Random 8-byte reads and updates, uniform or Zipf
    #[command(after_help = WORDS)]
    Random(RandomOptions),
    /// Steps of a field that is written and read back whole: throughput and bytes on the network,
    /// by what the field holds and by codec
    #[command(after_help = WORDS)]
    Traffic(TrafficOptions),
    /// One page fault at a time: with room in the budget, and while dirty pages have to leave
    #[command(after_help = WORDS)]
    Latency(LatencyOptions),
    /// CPU time of the evictors for a page that did not change
    #[command(after_help = WORDS)]
    Eviction(EvictionOptions),
    /// A large region of which few pages are used: their cost, and the memory that the region takes
    /// beside them
    #[command(after_help = WORDS)]
    Sparse(SparseOptions),
    /// What this machine can do without paging: its own faults, a bare userfaultfd, memcpy, the raw
    /// fabric
    #[command(after_help = WORDS)]
    Floor(FloorOptions),
    /// What it costs to have registered memory for a transfer: from a pool, by registering each
    /// time, from a cache by address
    ///
    /// Registration is that of the fabric's adapter. Where there is none, memory is locked and
    /// unlocked, which is the pinning part of a registration alone, and the report says so.
    Regmem(RegmemOptions),
    /// Messages through a ring in the receiver's memory: against a buffer for one message, woken by
    /// events or looking for them
    ///
    /// Sender and receiver are threads of this program, and the fabric between them is the real
    /// one.
    Ring(RingOptions),
    /// A million hostile requests from another loopback address, beside a victim that works and
    /// checks each word
    ///
    /// Garbage, half frames, wrong secrets, floods of connections, requests for what belongs to
    /// others. Server, attacker and victim are processes of this machine; nothing leaves it. The
    /// victim is measured twice: beside the attacker, and beside a program that burns as much CPU.
    /// Exit status 1: somebody saw or changed bytes that are not his, or the server died. Whether
    /// the victim's faults met their target is reported. Takes some minutes.
    Hostile(HostileOptions),
    /// Codecs by themselves: ratio and CPU time, page by page, of farpage's codecs, DEFLATE and
    /// plain LZ4
    Pages(PagesOptions),
    /// Measures the figures of the poster that farpage realises: CSV, SVG and PNG
    ///
    /// Workers, LZ4 on and off over links of several rates, network traffic with and without loss,
    /// fields that grow under LZ4, and DEFLATE against the other codecs. Ctrl-C keeps what has been
    /// measured; the same command goes on from there.
    Figures(FiguresOptions),
    /// Every codec with every field over links of 1, 10 and 40 Gbit/s and without limit, and what
    /// compression is held to
    ///
    /// Each check is measured five times, or more until noise no longer decides it: an hour or more
    /// on two cores. Exit status 1: a check is missed; what is not decided is named in the last
    /// line. Ctrl-C keeps what has been measured; the same command goes on from there.
    Codecs(CodecsOptions),
    /// What an RDMA adapter gains by several READs in flight, by one doorbell for several
    /// operations, and by one completion queue for several connections
    Verbs(VerbsOptions),
    #[command(after_help = WORDS)]
    Apps(AppsOptions),
    /// Measures farpage beside what bounds it, and says which of its targets are met
    ///
    /// Each target is a ratio of two figures that are measured one right after the other. A
    /// repetition goes through all of them; what is printed is the median of the repetitions. Takes
    /// some minutes per repetition.
    Targets(TargetsOptions),
    /// Compares earlier results figure by figure: B / A
    ///
    /// A and B are what `--format json` printed or `targets --record` wrote: a file, or a directory
    /// of such files. A file may hold several results, one after the other: those of the same
    /// command and parameters count as repetitions of each other.
    ///
    /// What is noise: where both sides have three repetitions or more, a figure has changed when
    /// their ranges do not overlap; with fewer, when the medians differ by more than 10 %.
    Compare(CompareOptions),
    /// Tries counts of workers and read-ahead lengths: the best point for STREAM triad and random
    /// access, and how close the defaults come
    Sweep(SweepOptions),
    /// Compares with the kernel's own swap to compressed memory (zram, lz4) in a memory cgroup;
    /// needs root
    ///
    /// Runs `stream` and `random` with ordinary arrays in a cgroup whose memory.max is the budget,
    /// swapping to a zram device, and the same with remote arrays. Sets cgroup and device up, and
    /// takes them down again however it ends; what a killed run left behind is removed by the next
    /// one.
    VersusSwap(VersusSwapOptions),
    /// Compares with LLNL's Umap, through Umap's own interface
    ///
    /// Builds one C++ driver, which needs a C++ compiler, against an installed Umap and against
    /// farpage's libumap, and runs both in turns: single faults, random reads and updates, nine
    /// accesses of ten in a tenth of the pages, everything in order, STREAM, and unmapping. Every
    /// word is verified.
    ///
    /// A whole run takes an hour or so; --page-sizes, --stores, --parts and --repeat take a part.
    VersusUmap(VersusUmapOptions),
    /// Says what this machine lacks for farpage, and how to mend it
    Doctor,
    /// The memory server that the benchmarks start
    #[command(hide = true)]
    Serve(ServeOptions),
    /// The attacker that `hostile` starts
    #[command(hide = true)]
    HostileAttack(AttackOptions),
    /// What `hostile` compares the attacker with
    #[command(hide = true)]
    HostileBurn(BurnOptions),
}

impl Command {
    /// Of a benchmark that has them.
    pub(crate) fn common(&self) -> Option<&Common> {
        match self {
            Self::Stream(options) => Some(&options.common),
            Self::Random(options) => Some(&options.common),
            Self::Traffic(options) => Some(&options.common),
            Self::Latency(options) => Some(&options.common),
            Self::Eviction(options) => Some(&options.common),
            Self::Sparse(options) => Some(&options.common),
            Self::Floor(options) => Some(&options.common),
            _ => None,
        }
    }
}

/// What all benchmarks understand.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// Memory server to use, such as tcp://10.0.0.2:7400 [default: starts its own on this machine]
    #[arg(long, value_name = "URL", conflicts_with = "fabric")]
    pub(crate) server: Option<Endpoint>,
    /// How its own memory server is reached
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub(crate) fabric: Fabric,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    pub(crate) page_size: ByteSize,
    /// Threads that bring pages in [default: as many as the load asks for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) fillers: Option<u16>,
    /// Makes the fabric behave like a link of so many gigabits per second in each direction
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    pub(crate) link_gbps: Option<f64>,
    /// Adds so many microseconds to every operation on the fabric
    #[arg(long, value_name = "US", value_parser = not_negative)]
    pub(crate) link_us: Option<f64>,
    /// Keeps all threads and its own memory server to one CPU. Otherwise the kernel puts threads
    /// that wait for each other on one CPU at times and on two at others, which can change the time
    /// of a fault several times over
    #[arg(long)]
    pub(crate) one_cpu: bool,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
    /// Starts even if the arrays and its own memory server do not fit into memory: the kernel may
    /// then end programs to make room
    #[arg(long)]
    pub(crate) force: bool,
}

/// What the benchmarks understand that page.
#[derive(Args, Clone, Debug)]
pub(crate) struct Paging {
    /// Size of all remote arrays together [default: 768MiB, with --smoke a few pages]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    pub(crate) size: Option<ByteSize>,
    /// Local memory for their pages: a size or a share of --size
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "25%")]
    pub(crate) budget: Budget,
    /// Threads that send pages away [default: as many as keep up]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) evictors: Option<u16>,
    /// Neighbouring pages that move together at most, in bytes [default: what suits the link]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    pub(crate) run_length: Option<ByteSize>,
    /// Pages to fetch ahead of a sequential reader; 0 turns it off [default: what suits the link]
    #[arg(long, value_name = "PAGES")]
    pub(crate) read_ahead: Option<u32>,
    /// Who serves page faults
    #[arg(long, value_enum, default_value_t = FaultMode::Filler)]
    pub(crate) fault_mode: FaultMode,
    /// How pages are compressed on their way: raw, lz4, shuffle, zfp:accuracy=1e-6, ...
    #[arg(long, default_value_t = Codec::Raw)]
    pub(crate) codec: Codec,
    #[command(flatten)]
    pub(crate) data: DataOptions,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Args, Debug)]
pub(crate) struct StreamOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Threads that compute [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Arrays in ordinary memory that is never paged: what paging is compared with
    #[arg(long, conflicts_with = "server")]
    pub(crate) plain: bool,
    /// How often each kernel runs; the first time does not count
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=100))]
    pub(crate) iterations: u16,
}

#[derive(Args, Debug)]
pub(crate) struct RandomOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Threads that compute [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// The array in ordinary memory that is never paged: what paging is compared with
    #[arg(long, conflicts_with = "server")]
    pub(crate) plain: bool,
    /// Does not tell farpage that accesses are random: it has to find out that reading ahead is of
    /// no use
    #[arg(long)]
    pub(crate) no_advice: bool,
    /// Zipf exponent below 1, such as 0.99: few elements get most accesses [default: uniform]
    #[arg(long, value_name = "THETA", value_parser = zipf_theta)]
    pub(crate) zipf: Option<f64>,
    /// Reads, and as many updates, by all threads together [default: 200000, fewer of
    /// pages above 64KiB; with --smoke 2000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) accesses: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct TrafficOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Threads that compute [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// How often the field is written and read, after a first time that does not count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) steps: u16,
}

#[derive(Args, Debug)]
pub(crate) struct LatencyOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Faults to time in each state, as far as there are pages [default: 20000, with --smoke 200]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) samples: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct EvictionOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
}

#[derive(Args, Debug)]
pub(crate) struct SparseOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) paging: Paging,
    /// Pages to use, evenly spread over the region, as far as there are so many [default: 16384,
    /// with --smoke 256]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 40))]
    pub(crate) touches: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct VerbsOptions {
    /// Memory server to use, rdma://host:port [default: starts its own on this machine]
    #[arg(long, value_name = "URL")]
    pub(crate) server: Option<Endpoint>,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct PagesOptions {
    #[command(flatten)]
    pub(crate) data: DataOptions,
    /// Codecs with plus signs between them: raw, lz4, shuffle, zfp:accuracy=1e-6, ..., and for
    /// comparison deflate1 to deflate9 and plain-lz4
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = '+',
        default_value = "deflate1+deflate6+plain-lz4+lz4"
    )]
    pub(crate) codecs: Vec<String>,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    pub(crate) page_size: ByteSize,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Four pages, once: checks that everything works; the times mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct FiguresOptions {
    #[command(flatten)]
    pub(crate) extent: Extent,
}

#[derive(Args, Debug)]
pub(crate) struct CodecsOptions {
    #[command(flatten)]
    pub(crate) extent: Extent,
    /// How often what noise could decide is measured at most; more than before goes on from there
    /// [default: 7, with --quick 3]
    #[arg(long, value_name = "N", conflicts_with = "smoke", value_parser = clap::value_parser!(u16).range(3..=99))]
    pub(crate) repetitions: Option<u16>,
    /// Human: tables; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct TargetsOptions {
    /// How often everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) repeat: u16,
    /// The same as --repeat 1
    #[arg(long, conflicts_with = "repeat")]
    pub(crate) quick: bool,
    /// Measures only targets whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) only: String,
    /// Also writes the results, with date, machine, kernel and commit, to a JSON file in this
    /// directory, and the table beside it
    #[arg(long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes, once: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with_all = ["repeat", "record"])]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CompareOptions {
    /// Results from before
    pub(crate) a: PathBuf,
    /// Results from after
    pub(crate) b: PathBuf,
}

#[derive(Args, Debug)]
pub(crate) struct SweepOptions {
    /// How its own memory servers are reached
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub(crate) fabric: Fabric,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    pub(crate) page_size: ByteSize,
    /// Size of all remote arrays together, of which a quarter fits into the budget [default:
    /// 256MiB]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    pub(crate) size: Option<ByteSize>,
    /// Makes the fabric behave like a link of so many gigabits per second in each direction
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    pub(crate) link_gbps: Option<f64>,
    /// How often each point is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) repeat: u16,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes, few points, once: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with_all = ["repeat", "size"])]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct VersusSwapOptions {
    /// How farpage's memory server is reached
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub(crate) fabric: Fabric,
    /// farpage's page size for STREAM; random access uses 4KiB, as swap does
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    pub(crate) page_size: ByteSize,
    /// Size of all arrays together
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = some_bytes)]
    pub(crate) size: ByteSize,
    /// Memory for them: a size or a share of --size
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "25%")]
    pub(crate) budget: Budget,
    /// How farpage compresses pages on their way (raw, lz4, shuffle, ...); zram always does
    #[arg(long, default_value_t = Codec::Raw)]
    pub(crate) codec: Codec,
    /// What the arrays hold at first
    #[arg(long, value_enum, default_value_t = Contents::Random)]
    pub(crate) data: Contents,
    /// How often everything is measured; medians count
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) repeat: u16,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
}

#[derive(Args, Debug)]
pub(crate) struct FloorOptions {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Only the faults: neither memory nor the fabric, and no memory server
    #[arg(long, conflicts_with = "server")]
    pub(crate) faults: bool,
}

#[derive(Args, Debug)]
pub(crate) struct RegmemOptions {
    /// Memory server to use, such as tcp://10.0.0.2:7400 [default: starts its own on this machine]
    #[arg(long, value_name = "URL", conflicts_with = "fabric")]
    pub(crate) server: Option<Endpoint>,
    /// How its own memory server is reached
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub(crate) fabric: Fabric,
    /// Acquisitions, and READs, per round [default: 2000, with --smoke 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) acquisitions: Option<u32>,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct RingOptions {
    /// What lies between the two
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub(crate) fabric: Fabric,
    /// Messages per round and direction [default: 2000, with --smoke 40]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) messages: Option<u32>,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
}

#[derive(Args, Debug)]
pub(crate) struct HostileOptions {
    /// Hostile requests [default: 1000000, with --smoke 3000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(crate) requests: Option<u64>,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub(crate) format: Format,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub(crate) smoke: bool,
}

impl HostileOptions {
    pub(crate) fn requests(&self) -> u64 {
        let default = if self.smoke { 3_000 } else { 1_000_000 };
        self.requests.unwrap_or(default)
    }
}

#[derive(Args, Debug)]
pub(crate) struct AttackOptions {
    /// Whom.
    #[arg(long)]
    pub(crate) endpoint: Endpoint,
    /// How many requests.
    #[arg(long)]
    pub(crate) requests: u64,
    /// Of everything random.
    #[arg(long)]
    pub(crate) seed: u64,
    /// It ends then, whatever has been sent.
    #[arg(long)]
    pub(crate) seconds_max: u64,
}

#[derive(Args, Debug)]
pub(crate) struct BurnOptions {
    /// How long.
    #[arg(long)]
    pub(crate) seconds: f64,
    /// How much CPU time in all.
    #[arg(long)]
    pub(crate) cpu_seconds: f64,
}

#[derive(Args, Debug)]
pub(crate) struct ServeOptions {
    /// Where to listen.
    #[arg(long)]
    pub(crate) listen: Endpoint,
    /// The most bytes to lend.
    #[arg(long)]
    pub(crate) capacity_bytes: u64,
}

impl Paging {
    /// What the arrays hold at first.
    pub(crate) fn source(&self) -> anyhow::Result<Source> {
        Source::new(&self.data, self.seed)
    }

    /// Size of all arrays.
    pub(crate) fn size_bytes(&self, common: &Common) -> u64 {
        match (self.size, common.smoke) {
            (Some(size), _) => size.as_u64(),
            // A budget of a quarter then has dozens of pages, whatever their size.
            (None, true) => (12 << 20).max(192 * common.page_size.as_u64()),
            (None, false) => 768 << 20,
        }
    }

    /// Local memory for pages.
    pub(crate) fn budget_bytes(&self, common: &Common) -> u64 {
        self.budget.bytes(self.size_bytes(common))
    }
}

impl RandomOptions {
    /// Reads, and as many updates.
    pub(crate) fn accesses(&self) -> u64 {
        let default = match self.common.smoke {
            true => 2_000,
            // A run should take less than a minute, and the time of a miss grows with its page.
            false => (200_000 * (64 << 10) / self.common.page_size.as_u64()).min(200_000),
        };
        self.accesses.unwrap_or(default)
    }
}

/// How far a value may be from what it was, with this codec.
pub(crate) fn error_bound(codec: Codec) -> f64 {
    match codec {
        Codec::Zfp {
            mode: ZfpMode::Accuracy(bound),
            ..
        }
        | Codec::Adaptive {
            accuracy: Some(bound),
            ..
        } => bound,
        // They promise none.
        Codec::Zfp {
            mode: ZfpMode::Rate(_) | ZfpMode::Precision(_),
            ..
        } => f64::INFINITY,
        _ => 0.0,
    }
}

/// Threads that compute, of an option `--threads`.
pub(crate) fn threads(option: Option<u16>) -> usize {
    option.map_or_else(cpus, usize::from)
}

fn cpus() -> usize {
    thread::available_parallelism().map_or(1, |n| n.get().min(4))
}

/// A size, or a share of the arrays' size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Budget {
    Bytes(ByteSize),
    Percent(f64),
}

impl Budget {
    /// As a size, for arrays of `size_bytes`.
    pub(crate) fn bytes(self, size_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.as_u64(),
            Self::Percent(percent) => (size_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_suffix('%') {
            Some(percent) => match percent.trim().parse() {
                Ok(percent) if percent > 0.0 && percent <= 1000.0 => Ok(Self::Percent(percent)),
                _ => Err(format!(
                    "`{text}` is no share: write a number above 0 and up to 1000 before the %, like `10%`"
                )),
            },
            None if farpage_wire::parse_size(text).is_err() => Err(format!(
                "`{text}` is no size and no share: write it like `64KiB`, `4GiB` or `10%`"
            )),
            None => some_bytes(text).map(Self::Bytes),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fabric {
    /// Shared memory on this machine
    Shm,
    /// TCP over the loopback
    Tcp,
    /// RDMA over this machine's first device (needs a build with `--features rdma`)
    Rdma,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FaultMode {
    /// Threads of the runtime
    Filler,
    /// The thread that faults, in a signal handler
    InThread,
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table
    Human,
    /// One JSON object
    Json,
}

pub(crate) fn some_bytes(text: &str) -> Result<ByteSize, String> {
    match farpage_wire::parse_size(text) {
        Ok(size) if size.as_u64() > 0 => Ok(size),
        Ok(_) => Err(format!(
            "`{text}` is nothing: write more, like `64KiB` or `4GiB`"
        )),
        Err(error) => Err(error.to_string()),
    }
}

pub(crate) fn page_size(text: &str) -> Result<ByteSize, String> {
    let size = some_bytes(text)?;
    if size.as_u64().is_power_of_two() && (4 << 10..=2 << 20).contains(&size.as_u64()) {
        Ok(size)
    } else {
        Err(format!(
            "`{text}` is no page size: write a power of two from 4KiB to 2MiB, like `64KiB`"
        ))
    }
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && *x > 0.0)
        .ok_or("must be a number above 0".into())
}

fn not_negative(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && *x >= 0.0)
        .ok_or("must be a number, 0 or above".into())
}

fn zipf_theta(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| *x > 0.0 && *x < 1.0)
        .ok_or("must be a number between 0 and 1".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_budget_is_a_size_or_a_share() {
        assert_eq!("512MiB".parse(), Ok(Budget::Bytes(ByteSize::mib(512))));
        assert_eq!("12.5%".parse(), Ok(Budget::Percent(12.5)));
        for wrong in ["", "%", "0%", "-1%", "many", "0"] {
            assert!(wrong.parse::<Budget>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_is_no_size_is_repeated_beside_an_example() {
        fn repeats(given: &str, example: &str, error: &str) {
            assert!(error.contains(&format!("`{given}`")), "{error}");
            assert!(error.contains(&format!("like `{example}`")), "{error}");
        }
        for given in ["nonsense", "", "-1", "0", "64 Kirby"] {
            repeats(given, "64KiB", &some_bytes(given).unwrap_err());
            repeats(given, "64KiB", &page_size(given).unwrap_err());
            repeats(given, "64KiB", &given.parse::<Budget>().unwrap_err());
        }
        repeats("3KiB", "64KiB", &page_size("3KiB").unwrap_err());
        let error = "nonsense".parse::<Budget>().unwrap_err();
        assert!(error.contains("`10%`"), "{error}");
        for given in ["0%", "lots%", "%"] {
            repeats(given, "10%", &given.parse::<Budget>().unwrap_err());
        }
    }
}
