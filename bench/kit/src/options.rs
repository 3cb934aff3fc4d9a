//! Options that several benchmarks have, and the syntax of their values.
//!
//! The rule it keeps: every option says its unit and its default, and values that cannot work are
//! refused here, with status 2, before anything is started. A benchmark's own options are beside
//! its `run`.

use std::{fmt, str::FromStr, sync::Arc, thread};

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use farpage::{Codec, Link, Redundancy, ZfpMode};
use farpage_wire::Endpoint;
use serde::Serialize;

use crate::data::{DataOptions, Source};
pub use crate::names::name_of;

/// Option for the form of the results.
#[derive(Args, Clone, Copy, Debug)]
pub struct Printing {
    /// Human: a table; json: one object on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub format: Format,
}

/// Options of a benchmark that has a tiny form.
#[derive(Args, Clone, Copy, Debug)]
pub struct Run {
    /// Form of the results.
    #[command(flatten)]
    pub printing: Printing,
    /// Tiny sizes: checks in seconds that everything works; the figures mean nothing
    #[arg(long)]
    pub smoke: bool,
}

/// The memory server that is measured.
#[derive(Args, Clone, Debug)]
pub struct ServerOptions {
    /// Memory server to use, such as tcp://10.0.0.2:7400 [default: starts its own on this machine]
    #[arg(long, value_name = "URL", conflicts_with = "fabric")]
    pub server: Option<Endpoint>,
    /// Fabric to the benchmark's own memory server
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    pub fabric: Fabric,
}

/// Option of a benchmark whose work is divided among threads.
#[derive(Args, Clone, Copy, Debug)]
pub struct Threads {
    /// Threads that compute [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Threads {
    /// Returns the number of threads.
    pub fn count(self) -> usize {
        threads(self.threads)
    }
}

/// Options of all benchmarks.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Options for the memory server.
    #[command(flatten)]
    pub at: ServerOptions,
    /// Page size: a power of two, 4KiB to 2MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = page_size)]
    pub page_size: ByteSize,
    /// Shards that addresses are divided into to bring pages in [default: one per CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub fillers: Option<u16>,
    /// Makes the fabric behave like a link of GBPS gigabits per second in each direction
    #[arg(long, value_name = "GBPS", value_parser = positive)]
    pub link_gbps: Option<f64>,
    /// Adds US microseconds to every operation on the fabric
    #[arg(long, value_name = "US", value_parser = not_negative)]
    pub link_us: Option<f64>,
    /// Keeps all threads and its own memory server to one CPU. Otherwise the kernel puts threads
    /// that wait for each other on one CPU at times and on two at others, which can change the time
    /// of a fault several times over
    #[arg(long)]
    pub one_cpu: bool,
    /// Options for the size of the run and its results.
    #[command(flatten)]
    pub run: Run,
    /// Starts even if the arrays and its own memory server do not fit into memory: the kernel may
    /// then end programs to make room
    #[arg(long)]
    pub force: bool,
}

impl Common {
    /// Returns the link that the options ask for.
    pub fn link(&self) -> Option<Arc<Link>> {
        let shaped = self.link_gbps.is_some() || self.link_us.is_some();
        // A link without a rate is as fast as a link can be said to be.
        let (gbps, us) = (self.link_gbps.unwrap_or(1e6), self.link_us.unwrap_or(0.0));
        shaped.then(|| Arc::new(Link::new(gbps, us)))
    }
}

/// Options of the benchmarks that page.
#[derive(Args, Clone, Debug)]
pub struct Paging {
    /// Options of all benchmarks.
    #[command(flatten)]
    pub common: Common,
    /// Size of all remote arrays together [default: 768MiB, with --smoke a few pages]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    pub size: Option<ByteSize>,
    /// Local memory for the arrays' pages: a size or a share of --size
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "25%")]
    pub budget: Budget,
    /// Threads that send pages away [default: as many as keep up]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub evictors: Option<u16>,
    /// Longest run of neighbouring pages moved together, in bytes [default: what suits the link]
    #[arg(long, value_name = "SIZE", value_parser = some_bytes)]
    pub run_length: Option<ByteSize>,
    /// Pages to fetch ahead of a sequential reader; 0 turns it off [default: what suits the link]
    #[arg(long, value_name = "PAGES")]
    pub read_ahead: Option<u32>,
    /// Threads that serve page faults
    #[arg(long, value_enum, default_value_t = FaultMode::Filler)]
    pub fault_mode: FaultMode,
    /// Compression of pages on their way: raw, lz4, shuffle, zfp:accuracy=1e-6, ...
    #[arg(long, default_value_t = Codec::Raw)]
    pub codec: Codec,
    /// Protection against dying servers: none, copies=2, parity=4+1, ... As many servers are
    /// started
    #[arg(long, default_value_t = Redundancy::None, conflicts_with = "server")]
    pub redundancy: Redundancy,
    /// Initial contents of the arrays.
    #[command(flatten)]
    pub data: DataOptions,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

impl Paging {
    /// Makes the source of the arrays' initial contents.
    pub fn source(&self) -> anyhow::Result<Source> {
        Source::new(&self.data, self.seed)
    }

    /// Returns the bytes of all arrays together.
    pub fn size_bytes(&self) -> u64 {
        match (self.size, self.common.run.smoke) {
            (Some(size), _) => size.as_u64(),
            // A budget of a quarter then has dozens of pages, whatever their size.
            (None, true) => (12 << 20).max(192 * self.page_bytes()),
            (None, false) => 768 << 20,
        }
    }

    /// Returns the bytes of local memory for pages.
    pub fn budget_bytes(&self) -> u64 {
        self.budget.bytes(self.size_bytes())
    }

    /// Returns the bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        self.common.page_size.as_u64()
    }
}

/// Returns the largest difference that `codec` may make to a value.
pub fn error_bound(codec: Codec) -> f64 {
    match codec {
        Codec::Zfp {
            mode: ZfpMode::Accuracy(bound),
            ..
        }
        | Codec::Adaptive {
            accuracy: Some(bound),
            ..
        } => bound,
        // ZFP's other lossy modes promise no bound.
        Codec::Zfp {
            mode: ZfpMode::Rate(_) | ZfpMode::Precision(_),
            ..
        } => f64::INFINITY,
        _ => 0.0,
    }
}

/// Returns the threads of `option`: by default one per CPU, at most 4.
pub fn threads(option: Option<u16>) -> usize {
    let cpus = || thread::available_parallelism().map_or(1, |n| n.get().min(4));
    option.map_or_else(cpus, usize::from)
}

/// Local memory: a size, or a share of the arrays' size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A size.
    Bytes(ByteSize),
    /// A share of the arrays, in percent.
    Percent(f64),
}

impl Budget {
    /// Returns the budget in bytes, for arrays of `size_bytes`.
    pub fn bytes(self, size_bytes: u64) -> u64 {
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

/// Fabric to a memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Fabric {
    /// Shared memory on this machine
    Shm,
    /// TCP over the loopback
    Tcp,
    /// RDMA over this machine's first device (needs a build with `--features rdma`)
    Rdma,
}

/// Threads that serve page faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FaultMode {
    /// Threads of the runtime
    Filler,
    /// The thread that faults, in a signal handler
    InThread,
}

impl From<FaultMode> for farpage::FaultMode {
    fn from(mode: FaultMode) -> Self {
        match mode {
            FaultMode::Filler => Self::Filler,
            FaultMode::InThread => Self::InThread,
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

/// Form of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table
    Human,
    /// One JSON object
    Json,
}

/// Parses a size above 0.
///
/// # Errors
/// `text` is no such size. The error repeats it and shows how a size is written.
pub fn some_bytes(text: &str) -> Result<ByteSize, String> {
    match farpage_wire::parse_size(text) {
        Ok(size) if size.as_u64() > 0 => Ok(size),
        Ok(_) => Err(format!(
            "`{text}` is nothing: write more, like `64KiB` or `4GiB`"
        )),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a page size.
///
/// # Errors
/// `text` is no page size. The error repeats it and shows how a size is written.
pub fn page_size(text: &str) -> Result<ByteSize, String> {
    let size = some_bytes(text)?;
    if size.as_u64().is_power_of_two() && (4 << 10..=2 << 20).contains(&size.as_u64()) {
        Ok(size)
    } else {
        Err(format!(
            "`{text}` is no page size: write a power of two from 4KiB to 2MiB, like `64KiB`"
        ))
    }
}

/// Parses a number above 0.
pub fn positive(text: &str) -> Result<f64, String> {
    match not_negative(text) {
        Ok(number) if number > 0.0 => Ok(number),
        _ => Err("must be a number above 0".into()),
    }
}

/// Parses a number that is 0 or more.
pub fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("must be a number, 0 or above".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let size = |text: &str| some_bytes(text).unwrap_err();
        let page = |text: &str| page_size(text).unwrap_err();
        let budget = |text: &str| text.parse::<Budget>().unwrap_err();
        for given in [
            "nonsense", "", "-1", "0", "64 Kirby", "3KiB", "0%", "lots%", "%",
        ] {
            let (errors, example) = match given {
                "3KiB" => (vec![page(given)], "64KiB"),
                _ if given.ends_with('%') => (vec![budget(given)], "10%"),
                _ => (vec![size(given), page(given), budget(given)], "64KiB"),
            };
            for error in errors {
                assert!(error.contains(&format!("`{given}`")), "{error}");
                assert!(error.contains(&format!("like `{example}`")), "{error}");
            }
        }
        assert!(budget("nonsense").contains("`10%`"));
    }
}
