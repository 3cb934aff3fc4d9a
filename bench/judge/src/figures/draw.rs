//! Figures: the results that each needs, its picture, and its caption.
//!
//! The rule it keeps: a caption's words about this machine are computed from the results; its words
//! about the poster are what the authors publish.

use anyhow::Result;

use super::plan::{COMPRESSIBLE, Plan, Rate, fits, lossy};
use crate::points::Points;
use farpage_bench_kit::{
    data::Contents,
    plot::{Bars, Rows},
    report::{geometric_mean, median},
};

type Draw = Box<dyn Fn(&Points) -> Result<Bars>>;

pub(super) struct Figure {
    /// Name of the figure's files.
    pub(super) name: &'static str,
    pub(super) commands: Vec<String>,
    pub(super) draw: Draw,
}

/// Rows of a figure to measure: a name, and for each bar a command and a path in its result.
type Cells = Vec<(String, Vec<Option<[String; 2]>>)>;

impl Figure {
    /// Makes a figure of `cells`, whose values `value` takes from the results, and that `bars`
    /// draws.
    fn new(
        name: &'static str,
        cells: Cells,
        value: fn(&Points, &str, &str) -> Result<f64>,
        bars: impl Fn(&Points, Rows) -> Bars + 'static,
    ) -> Self {
        let commands = cells.iter().flat_map(|(_, cells)| cells).flatten();
        let commands = commands.map(|[command, _]| command.clone()).collect();
        let draw: Draw = Box::new(move |points| {
            let row = |(name, cells): &(String, Vec<Option<[String; 2]>>)| {
                let values = cells.iter().map(|cell| {
                    let value = cell.as_ref().map(|[of, path]| value(points, of, path));
                    value.transpose()
                });
                Ok((name.clone(), values.collect::<Result<Vec<_>>>()?))
            };
            let rows = cells.iter().map(row).collect::<Result<Rows>>()?;
            Ok(bars(points, rows))
        });
        Self {
            name,
            commands,
            draw,
        }
    }
}

const TRIAD: &str = "/kernels/3/mb_per_s";

pub(super) fn all(plan: &Plan) -> Vec<Figure> {
    vec![
        workers(plan),
        lz4_throughput(plan),
        lz4_traffic(plan),
        lossy_traffic(plan),
        growth(plan),
        ratio(plan),
        time(plan, "encode-time", "Encoding", "encode_mb_per_s"),
        time(plan, "decode-time", "Decoding", "decode_mb_per_s"),
    ]
}

/// Returns the median of the figure at `path` of a command.
fn figure(points: &Points, command: &str, path: &str) -> Result<f64> {
    Ok(median(&points.figures(command, path)?))
}

/// Names the machine, the kernel and the day, for the end of a caption.
fn here(points: &Points) -> String {
    let at = &points.circumstances;
    let day = at.date.split('T').next().unwrap_or_default();
    format!("Measured on {}, Linux {}, {day}.", at.machine, at.kernel)
}

fn triad(command: String) -> Option<[String; 2]> {
    Some([command, TRIAD.to_owned()])
}

fn workers(plan: &Plan) -> Figure {
    let of = |count: usize, what: &str| match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    };
    let counts = plan.workers.iter().copied();
    let row = |fillers| {
        let evictors = plan.workers.iter();
        let cells = evictors.map(|&evictors| triad(plan.workers(fillers, evictors)));
        (of(fillers, "filler"), cells.collect())
    };
    let cells = counts.clone().map(row).collect();
    let series: Vec<String> = counts.map(|count| of(count, "evictor")).collect();
    Figure::new("workers", cells, figure, move |points, rows| {
        let speeds = || rows.iter().flat_map(|(_, values)| values).flatten();
        let least = speeds().copied().fold(f64::MAX, f64::min);
        let most = speeds().copied().fold(0.0, f64::max);
        Bars {
            title: "Fillers and evictors: throughput of STREAM triad".into(),
            caption: format!(
                "The poster: the right numbers of fillers and evictors gain up to 70 %. Here, over a link of 106 Gbit/s and 5 us, the best \
                 combination is {:.0} % faster than the worst; one filler already fetches neighbouring pages together. {}",
                100.0 * (most / least - 1.0),
                here(points)
            ),
            row: "workers",
            value: "STREAM triad (MB/s)",
            series: series.clone(),
            rows,
            ..Bars::default()
        }
    })
}

fn lz4_throughput(plan: &Plan) -> Figure {
    let rates = plan.rates.clone();
    let mut cells = Cells::new();
    for data in [COMPRESSIBLE, Contents::Random] {
        cells.extend(rates.iter().map(|&rate| {
            let commands = ["raw", "lz4"].map(|codec| triad(plan.stream(data, codec, rate)));
            (format!("{}, {rate}", data.name()), commands.into())
        }));
    }
    Figure::new("lz4-throughput", cells, figure, move |points, rows| {
        let gain = |((_, values), rate): (&(String, Vec<Option<f64>>), &Rate)| {
            let gain = values[1].zip(values[0]).map_or(0.0, |(lz4, raw)| lz4 / raw);
            format!("{:+.0} % ({rate})", 100.0 * (gain - 1.0))
        };
        let gains = rows.chunks(rates.len()).map(|rows| {
            let gains: Vec<String> = rows.iter().zip(&rates).map(gain).collect();
            gains.join(", ")
        });
        let gains: Vec<String> = gains.collect();
        Bars {
            title: "LZ4 on and off: throughput of STREAM triad".into(),
            caption: format!(
                "The poster: LZ4 gains about 50 % where the traffic saved outweighs the CPU time. Here LZ4 changes triad on compressible data \
                 by {}; on random mantissas, where it can only cost, by {}. {}",
                gains[0],
                gains[1],
                here(points)
            ),
            row: "data, link",
            value: "STREAM triad (MB/s)",
            series: vec!["raw".into(), "LZ4".into()],
            rows,
            logarithmic: true,
            mark: None,
        }
    })
}

/// Returns the bytes that a traffic command sent and received, divided by the bytes of the field
/// that the command wrote and read.
fn network_share(points: &Points, command: &str, _: &str) -> Result<f64> {
    let of = |path| figure(points, command, path);
    let both = of("/kernels/2/mb_per_s")? * of("/kernels/2/min_s")? * 1e6;
    let moved = of("/bytes_read")? + of("/bytes_written")?;
    Ok(moved / (both * of("/config/iterations")?))
}

/// A codec's name for people, and the codec for a field.
type Named = (&'static str, fn(Contents) -> Option<String>);

/// Makes a figure of the traffic of `fields` with `codecs`.
fn traffic<const N: usize>(
    (name, title): (&'static str, &'static str),
    plan: &Plan,
    fields: Vec<Contents>,
    codecs: [Named; N],
    caption: impl Fn(&Rows) -> String + 'static,
) -> Figure {
    let cells = fields.into_iter().map(|data| {
        let cells = codecs.iter().map(|(_, codec)| {
            let codec = codec(data).filter(|codec| fits(codec, data.dtype()))?;
            Some([plan.traffic(data, &codec, Rate(None)), String::new()])
        });
        (data.name(), cells.collect())
    });
    Figure::new(name, cells.collect(), network_share, move |points, rows| {
        Bars {
            title: title.to_owned(),
            caption: format!("{} {}", caption(&rows), here(points)),
            row: "field",
            value: "bytes on the network / bytes of the field written and read",
            series: codecs.map(|(shown, _)| shown.to_owned()).to_vec(),
            rows,
            ..Bars::default()
        }
    })
}

fn lz4_traffic(plan: &Plan) -> Figure {
    traffic(
        ("lz4-traffic", "Network traffic with and without LZ4"),
        plan,
        plan.fields.clone(),
        [
            ("raw", |_| Some("raw".to_owned())),
            ("LZ4", |_| Some("lz4".to_owned())),
        ],
        |rows| {
            let saved = rows
                .iter()
                .filter_map(|(_, values)| Some(values[1]? / values[0]?));
            let saved: Vec<f64> = saved
                .filter(|share| share.is_finite() && *share > 0.0)
                .collect();
            format!(
                "The poster: compression reduces data movement. Here LZ4 moves {:.0} % of the raw bytes in the geometric mean of the fields that are moved at \
                 all; pages of one repeated value are never sent, and a page that LZ4 does not shrink goes raw. Raw pages move 1.5 times: one that is \
                 written is fetched before.",
                100.0 * geometric_mean(&saved)
            )
        },
    )
}

fn lossy_traffic(plan: &Plan) -> Figure {
    let floats = plan.fields.iter().copied();
    traffic(
        ("lossy-traffic", "Network traffic without and with loss"),
        plan,
        floats.filter(|data| data.dtype().is_float()).collect(),
        [
            ("LZ4", |_| Some("lz4".to_owned())),
            ("shuffle + LZ4", |_| Some("shuffle".to_owned())),
            ("ZFP reversible", |_| Some("zfp:reversible".to_owned())),
            ("ZFP with the field's error bound", lossy),
        ],
        |rows| {
            let fewer = rows.iter().filter(|(_, values)| values[3] < values[0]);
            format!(
                "The poster: ZFP moves fewer bytes than LZ4 on some float data. Here ZFP with an error bound of about a ten-thousandth of the field's range \
                 moves fewer bytes than LZ4 on {} of {} fields; every page was decoded and compared with its bound before it was accepted.",
                fewer.count(),
                rows.len()
            )
        },
    )
}

/// Returns rows of `pages`, each with the figures at `path` of `codecs`, found by prefix.
fn pages(plan: &Plan, codecs: &[(&str, &str)], path: &str) -> Cells {
    let row = |&data: &Contents| {
        let command = plan.pages(data);
        let list = command.rsplit(' ').next().unwrap_or("");
        let list: Vec<&str> = list.split('+').collect();
        let cells = codecs.iter().map(|(_, codec)| {
            // Where the codec stands among the findings is the same in all repetitions.
            let at = list.iter().position(|name| name.starts_with(codec))?;
            Some([command.clone(), format!("/findings/{at}/{path}")])
        });
        (data.name(), cells.collect())
    };
    plan.fields.iter().map(row).collect()
}

/// Names of the codecs as shown, and the prefixes of their names in commands.
const CODECS: [(&str, &str); 6] = [
    ("DEFLATE 1", "deflate1"),
    ("DEFLATE 6", "deflate6"),
    ("LZ4", "lz4"),
    ("shuffle + LZ4", "shuffle"),
    ("ZFP reversible", "zfp:reversible"),
    ("ZFP with the field's error bound", "zfp:accuracy"),
];

fn growth(plan: &Plan) -> Figure {
    let codecs = [
        ("plain LZ4", "plain-lz4"),
        ("LZ4 in farpage", "lz4"),
        ("shuffle + LZ4", "shuffle"),
    ];
    let cells = pages(plan, &codecs, "ratio");
    Figure::new("growth", cells, figure, move |points, mut rows| {
        replace(&mut rows, |ratio| 100.0 / ratio);
        let grown = rows.iter().filter(|(_, values)| values[0] > Some(100.0));
        let grown: Vec<&str> = grown.map(|(name, _)| name.as_str()).collect();
        let names = if grown.is_empty() {
            "none"
        } else {
            &grown.join(", ")
        };
        let most = rows.iter().filter_map(|(_, values)| values[0]);
        Bars {
            title: "Fields that grow under plain LZ4".into(),
            caption: format!(
                "The poster: some float data grows under LZ4. Here {} of {} fields do, by {:.1} % at most: {}. farpage stores a page \
                 that would grow as it is, so that none is ever longer than raw. {}",
                grown.len(),
                rows.len(),
                most.fold(100.0, f64::max) - 100.0,
                names,
                here(points)
            ),
            row: "field",
            value: "size after encoding (% of raw)",
            series: codecs.map(|(shown, _)| shown.to_owned()).to_vec(),
            rows,
            logarithmic: false,
            mark: Some((100.0, "raw size")),
        }
    })
}

/// Replaces each value of `rows`.
fn replace(rows: &mut Rows, by: impl Fn(f64) -> f64) {
    let values = rows.iter_mut().flat_map(|(_, values)| values);
    values.flatten().for_each(|value| *value = by(*value));
}

/// Makes a figure of all codecs, without the field of one value, which needs no bytes.
fn of_codecs(
    name: &'static str,
    cells: Cells,
    bars: impl Fn(&Points, Rows) -> Bars + 'static,
) -> Figure {
    Figure::new(name, cells, figure, move |points, mut rows| {
        rows.retain(|(name, _)| *name != Contents::Constant.name());
        Bars {
            row: "field",
            series: CODECS.map(|(shown, _)| shown.to_owned()).to_vec(),
            logarithmic: true,
            ..bars(points, rows)
        }
    })
}

fn ratio(plan: &Plan) -> Figure {
    let cells = pages(plan, &CODECS, "ratio");
    of_codecs("ratio", cells, |points, rows| {
        let mean = |at: usize| {
            let values: Vec<f64> = rows.iter().filter_map(|(_, values)| values[at]).collect();
            geometric_mean(&values)
        };
        Bars {
            title: "Compression ratio".into(),
            caption: format!(
                "The poster compares DEFLATE and LZ4 on 12 scientific data sets. Here, over all fields, the geometric mean of the ratio is {:.2} with \
                 DEFLATE 6, {:.2} with DEFLATE 1, {:.2} with LZ4, {:.2} with shuffle and LZ4 (fields of numbers), and {:.1} with ZFP to the field's error \
                 bound (fields of floats). Pages of 64 KiB. {}",
                mean(1),
                mean(0),
                mean(2),
                mean(3),
                mean(5),
                here(points)
            ),
            value: "bytes of the field / bytes as encoded",
            rows,
            mark: Some((1.0, "raw size")),
            ..Bars::default()
        }
    })
}

fn time(plan: &Plan, name: &'static str, title: &'static str, path: &str) -> Figure {
    of_codecs(name, pages(plan, &CODECS, path), move |points, mut rows| {
        // Megabytes per second into milliseconds per megabyte.
        replace(&mut rows, |rate| 1e3 / rate);
        let times = |at: usize| {
            let times = rows.iter();
            let times = times.filter_map(|(_, values)| Some(values[at]? / values[2]?));
            geometric_mean(&times.collect::<Vec<_>>())
        };
        Bars {
            title: format!("{title}: CPU time"),
            caption: format!(
                "The poster: on 12 scientific data sets, a DPU that compresses instead of the CPU could speed compression up significantly. Here, in the geometric mean over all fields, \
                 DEFLATE 6 takes {:.1} times as long as LZ4 and DEFLATE 1 {:.1} times, one thread, pages of 64 KiB. ZFP's time to encode with an error \
                 bound includes decoding and comparing. {}",
                times(1),
                times(0),
                here(points)
            ),
            value: "CPU time (ms per MB of the field)",
            rows,
            ..Bars::default()
        }
    })
}
