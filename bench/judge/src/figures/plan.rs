//! Commands to measure, for a full run, a quick one and a smoke test.
//!
//! The rule it keeps: a command says everything, so that a point of a figure can be measured again
//! by typing the command.

use std::{fmt, path::PathBuf, thread};

use clap::{Args, ValueEnum};

use farpage_bench_kit::data::{Contents, Dtype};

/// Options for the extent of measuring and the place of results.
#[derive(Args, Clone, Debug)]
pub(crate) struct Extent {
    /// Directory for the results; what an earlier run measured there is not measured again
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Smaller arrays, fewer repetitions: `figures` takes two minutes on two cores, `codecs`
    /// several
    #[arg(long)]
    pub(crate) quick: bool,
    /// Tiny sizes, few points, afresh: checks that everything works; the figures mean nothing
    #[arg(long, conflicts_with = "quick")]
    pub(crate) smoke: bool,
}

/// Rate of a link in Gbit/s; none is as fast as the fabric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rate(pub(crate) Option<u16>);

impl Rate {
    /// Returns the rate as an option of a benchmark.
    fn argument(self) -> String {
        self.0
            .map_or(String::new(), |gbps| format!(" --link-gbps {gbps}"))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(gbps) => write!(f, "{gbps} Gbit/s"),
            None => f.write_str("unlimited"),
        }
    }
}

/// Sizes and lists of the commands.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) smoke: bool,
    pub(crate) repeat: u16,
    /// Least and most repetitions of a check that is repeated until decided.
    pub(crate) repetitions: [u16; 2],
    pub(crate) rates: Vec<Rate>,
    pub(crate) fields: Vec<Contents>,
    pub(crate) workers: Vec<usize>,
    /// Options for the size of STREAM's arrays (`stream`) and of a field whose traffic is measured
    /// (`field`); number of times that a figure goes over the field (`steps`).
    stream: &'static str,
    field: &'static str,
    steps: u16,
}

/// Data of STREAM where compression is of use: f32 of few different values, most of them zero.
pub(crate) const COMPRESSIBLE: Contents = Contents::Detector;
/// Codecs that every field is measured with, except those that cannot serve its elements.
pub(crate) const STATIC_CODECS: [&str; 4] = ["raw", "lz4", "shuffle", "zfp:reversible"];

impl Plan {
    pub(crate) fn new(extent: &Extent) -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let workers = |most: usize| {
            let powers = (0..).map(|n| 1 << n);
            powers.take_while(|n| *n <= most).collect()
        };
        let full = Self {
            smoke: false,
            repeat: 3,
            repetitions: [5, 7],
            rates: [Some(1), Some(10), Some(40), None].map(Rate).to_vec(),
            fields: Contents::value_variants().to_vec(),
            workers: workers((2 * cpus).clamp(4, 16)),
            stream: " --size 192MiB",
            field: " --size 64MiB",
            steps: 3,
        };
        match (extent.smoke, extent.quick) {
            (false, false) => full,
            (false, true) => Self {
                repeat: 1,
                repetitions: [3, 3],
                workers: workers(cpus.max(2)),
                stream: " --size 48MiB --iterations 3",
                field: " --size 12MiB",
                steps: 1,
                ..full
            },
            (true, _) => Self {
                smoke: true,
                repeat: 1,
                repetitions: [1, 1],
                rates: vec![Rate(Some(10)), Rate(None)],
                fields: vec![COMPRESSIBLE, Contents::Turbulence, Contents::Text],
                workers: vec![1],
                stream: "",
                field: "",
                steps: 1,
            },
        }
    }

    /// Returns STREAM's command with `fillers` and `evictors` over a network like the poster's: 106
    /// Gbit/s, a few microseconds.
    pub(crate) fn workers(&self, fillers: usize, evictors: usize) -> String {
        format!(
            "stream --fillers {fillers} --evictors {evictors} --link-gbps 106 --link-us 5{}",
            self.stream
        )
    }

    pub(crate) fn stream(&self, data: Contents, codec: &str, rate: Rate) -> String {
        let (data, link) = (data.name(), rate.argument());
        format!("stream --data {data} --codec {codec}{link}{}", self.stream)
    }

    pub(crate) fn traffic(&self, data: Contents, codec: &str, rate: Rate) -> String {
        self.traffic_of(data, codec, rate, self.steps)
    }

    /// Returns a traffic command of enough steps that a disturbed step counts little and a codec
    /// that learns has learnt: a step of 64 MiB takes a tenth of a second over a fast link, up to a
    /// second over a gigabit. ZFP takes ten times as long.
    pub(crate) fn steps(&self, data: Contents, codec: &str, rate: Rate) -> String {
        let steps = match rate {
            _ if self.smoke || codec.starts_with("zfp") => 1,
            Rate(Some(1)) => 3,
            _ => 8,
        };
        self.traffic_of(data, codec, rate, steps)
    }

    fn traffic_of(&self, data: Contents, codec: &str, rate: Rate, steps: u16) -> String {
        let (data, link, size) = (data.name(), rate.argument(), self.field);
        format!("traffic --data {data} --codec {codec}{link}{size} --steps {steps}")
    }

    /// Returns the command that encodes a field's pages with all codecs.
    pub(crate) fn pages(&self, data: Contents) -> String {
        let others = ["deflate1", "deflate6", "plain-lz4"].map(str::to_owned);
        let own = STATIC_CODECS
            .iter()
            .filter(|codec| fits(codec, data.dtype()));
        let own = own.map(|codec| (*codec).to_owned()).chain(lossy(data));
        let codecs: Vec<String> = others.into_iter().chain(own).collect();
        format!("pages --data {} --codecs {}", data.name(), codecs.join("+"))
    }
}

/// True if `codec` serves elements of `dtype`.
pub(crate) fn fits(codec: &str, dtype: Dtype) -> bool {
    match dtype {
        // Bytes have nothing to shuffle, and ZFP serves no bytes.
        Dtype::U8 => !codec.starts_with("shuffle") && !codec.starts_with("zfp"),
        _ => true,
    }
}

/// Returns ZFP with the field's error bound; of integers there is none.
pub(crate) fn lossy(data: Contents) -> Option<String> {
    data.dtype()
        .is_float()
        .then(|| format!("zfp:accuracy={:e}", data.error_bound()))
}
