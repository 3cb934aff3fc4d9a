//! Figures: the results that each needs, its picture, and its caption.
//!
//! The rule it keeps: a caption's words about this machine are computed from the results; its words
//! about the poster are what the authors publish.

use anyhow::{Context, Result};

use super::plan::{COMPRESSIBLE, Plan, Rate, fits, lossy};
use crate::points::Points;
use farpage_bench_kit::{
    data::Contents,
    plot::Bars,
    report::{geometric_mean, median},
};

type Draw = Box<dyn Fn(&Points) -> Result<Bars>>;

/// Figure to draw.
pub(super) struct Figure {
    /// Name of the figure's files.
    pub(super) name: &'static str,
    pub(super) commands: Vec<String>,
    pub(super) draw: Draw,
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

fn workers(plan: &Plan) -> Figure {
    let counts = plan.workers.clone();
    let rows: Vec<(usize, Vec<String>)> = counts
        .iter()
        .map(|&fillers| {
            let commands = counts
                .iter()
                .map(|&evictors| plan.workers(fillers, evictors));
            (fillers, commands.collect())
        })
        .collect();
    let of = |count: usize, what: &str| match count {
        1 => format!("1 {what}"),
        _ => format!("{count} {what}s"),
    };
    Figure {
        name: "workers",
        commands: rows
            .iter()
            .flat_map(|(_, commands)| commands.clone())
            .collect(),
        draw: Box::new(move |points| {
            let rows = rows
                .iter()
                .map(|(fillers, commands)| {
                    let values = commands
                        .iter()
                        .map(|command| figure(points, command, TRIAD).map(Some));
                    Ok((of(*fillers, "filler"), values.collect::<Result<Vec<_>>>()?))
                })
                .collect::<Result<Vec<_>>>()?;
            let speeds = || {
                rows.iter()
                    .flat_map(|(_, values)| values)
                    .flatten()
                    .copied()
            };
            let (least, most) = (
                speeds().fold(f64::MAX, f64::min),
                speeds().fold(0.0, f64::max),
            );
            Ok(Bars {
                title: "Fillers and evictors: throughput of STREAM triad".into(),
                caption: format!(
                    "The poster: the right numbers of fillers and evictors gain up to 70 %. Here, over a link of 106 Gbit/s and 5 us, the best \
                     combination is {:.0} % faster than the worst; one filler already fetches neighbouring pages together. {}",
                    100.0 * (most / least - 1.0),
                    here(points)
                ),
                row: "workers",
                value: "STREAM triad (MB/s)",
                series: counts.iter().map(|&count| of(count, "evictor")).collect(),
                rows,
                logarithmic: false,
                mark: None,
            })
        }),
    }
}

fn lz4_throughput(plan: &Plan) -> Figure {
    let mut rows = Vec::new();
    for data in [COMPRESSIBLE, Contents::Random] {
        for &rate in &plan.rates {
            let commands = ["raw", "lz4"].map(|codec| plan.stream(data, codec, rate));
            rows.push((data, rate, commands));
        }
    }
    Figure {
        name: "lz4-throughput",
        commands: rows
            .iter()
            .flat_map(|(_, _, commands)| commands.clone())
            .collect(),
        draw: Box::new(move |points| {
            let mut gains = [const { Vec::new() }; 2];
            let mut bars = Vec::new();
            for (data, rate, [raw, lz4]) in &rows {
                let (raw, lz4) = (figure(points, raw, TRIAD)?, figure(points, lz4, TRIAD)?);
                let gain = format!("{:+.0} % ({rate})", 100.0 * (lz4 / raw - 1.0));
                gains[usize::from(*data != COMPRESSIBLE)].push(gain);
                bars.push((
                    format!("{}, {rate}", data.name()),
                    vec![Some(raw), Some(lz4)],
                ));
            }
            Ok(Bars {
                title: "LZ4 on and off: throughput of STREAM triad".into(),
                caption: format!(
                    "The poster: LZ4 gains about 50 % where the traffic saved outweighs the CPU time. Here LZ4 changes triad on compressible data \
                     by {}; on random mantissas, where it can only cost, by {}. {}",
                    gains[0].join(", "),
                    gains[1].join(", "),
                    here(points)
                ),
                row: "data, link",
                value: "STREAM triad (MB/s)",
                series: vec!["raw".into(), "LZ4".into()],
                rows: bars,
                logarithmic: true,
                mark: None,
            })
        }),
    }
}

/// Returns the bytes that a traffic command sent and received, divided by the bytes of the field
/// that the command wrote and read.
fn network_share(points: &Points, command: &str) -> Result<f64> {
    let both = figure(points, command, "/kernels/2/mb_per_s")?
        * figure(points, command, "/kernels/2/min_s")?
        * 1e6;
    let steps = figure(points, command, "/config/iterations")?;
    let moved =
        figure(points, command, "/bytes_read")? + figure(points, command, "/bytes_written")?;
    Ok(moved / (both * steps))
}

fn lz4_traffic(plan: &Plan) -> Figure {
    let codecs = |_| {
        vec![
            ("raw".to_owned(), "raw".to_owned()),
            ("LZ4".to_owned(), "lz4".to_owned()),
        ]
    };
    traffic(
        plan,
        "lz4-traffic",
        "Network traffic with and without LZ4",
        codecs,
        |points, rows| {
            let saved: Vec<f64> = rows
                .iter()
                .filter_map(|(_, values)| {
                    Some(values.get(1).copied()?? / values.first().copied()??)
                })
                .filter(|share| share.is_finite() && *share > 0.0)
                .collect();
            format!(
                "The poster: compression reduces data movement. Here LZ4 moves {:.0} % of the raw bytes in the geometric mean of the fields that are moved at \
             all; pages of one repeated value are never sent, and a page that LZ4 does not shrink goes raw. Raw pages move 1.5 times: one that is \
             written is fetched before. {}",
                100.0 * geometric_mean(&saved),
                here(points)
            )
        },
    )
}

fn lossy_traffic(plan: &Plan) -> Figure {
    let codecs = |data: Contents| {
        let mut codecs = vec![
            ("LZ4".to_owned(), "lz4".to_owned()),
            ("shuffle + LZ4".to_owned(), "shuffle".to_owned()),
            ("ZFP reversible".to_owned(), "zfp:reversible".to_owned()),
        ];
        codecs.extend(
            lossy(data).map(|codec| ("ZFP with the field's error bound".to_owned(), codec)),
        );
        codecs
    };
    let mut floats = plan.clone();
    floats.fields.retain(|data| data.dtype().is_float());
    traffic(
        &floats,
        "lossy-traffic",
        "Network traffic without and with loss",
        codecs,
        |points, rows| {
            let fewer = rows
                .iter()
                .filter(|(_, values)| values.get(3) < values.first())
                .count();
            format!(
                "The poster: ZFP moves fewer bytes than LZ4 on some float data. Here ZFP with an error bound of about a ten-thousandth of the field's range \
             moves fewer bytes than LZ4 on {fewer} of {} fields; every page was decoded and compared with its bound before it was accepted. {}",
                rows.len(),
                here(points)
            )
        },
    )
}

type Rows = Vec<(String, Vec<Option<f64>>)>;

fn traffic(
    plan: &Plan,
    name: &'static str,
    title: &'static str,
    codecs: impl Fn(Contents) -> Vec<(String, String)>,
    caption: impl Fn(&Points, &Rows) -> String + 'static,
) -> Figure {
    let series: Vec<String> = codecs(Contents::Random)
        .into_iter()
        .map(|(shown, _)| shown)
        .collect();
    let rows: Vec<(Contents, Vec<Option<String>>)> = plan
        .fields
        .iter()
        .map(|&data| {
            let commands = codecs(data).into_iter().map(|(_, codec)| {
                fits(&codec, data.dtype()).then(|| plan.traffic(data, &codec, Rate(None)))
            });
            (data, commands.collect())
        })
        .collect();
    Figure {
        name,
        commands: rows
            .iter()
            .flat_map(|(_, commands)| commands)
            .flatten()
            .cloned()
            .collect(),
        draw: Box::new(move |points| {
            let rows: Rows = rows
                .iter()
                .map(|(data, commands)| {
                    let value = |command: &Option<String>| {
                        command
                            .as_ref()
                            .map(|command| network_share(points, command))
                            .transpose()
                    };
                    Ok((
                        data.name(),
                        commands.iter().map(value).collect::<Result<_>>()?,
                    ))
                })
                .collect::<Result<_>>()?;
            Ok(Bars {
                title: title.to_owned(),
                caption: caption(points, &rows),
                row: "field",
                value: "bytes on the network / bytes of the field written and read",
                series: series.clone(),
                rows,
                logarithmic: false,
                mark: None,
            })
        }),
    }
}

/// Returns the commands of `pages`, and the rows of a figure of them for `codecs`, found by prefix.
fn pages(
    plan: &Plan,
    codecs: &[(&str, &'static str)],
    path: &'static str,
) -> (Vec<String>, impl Fn(&Points) -> Result<Rows> + use<>) {
    let commands: Vec<(Contents, String)> = plan
        .fields
        .iter()
        .map(|&data| (data, plan.pages(data)))
        .collect();
    let codecs: Vec<&'static str> = codecs.iter().map(|(_, codec)| *codec).collect();
    let all = commands
        .iter()
        .map(|(_, command)| command.clone())
        .collect();
    let rows = move |points: &Points| {
        let value = |command: &str, codec: &str| -> Result<Option<f64>> {
            // Where the codec stands among the findings is the same in all repetitions.
            let list = command
                .rsplit(' ')
                .next()
                .context("a command has arguments")?;
            let at = list.split('+').position(|name| name.starts_with(codec));
            at.map(|at| figure(points, command, &format!("/findings/{at}/{path}")))
                .transpose()
        };
        commands
            .iter()
            .map(|(data, command)| {
                let values = codecs.iter().map(|codec| value(command, codec));
                Ok((data.name(), values.collect::<Result<Vec<_>>>()?))
            })
            .collect::<Result<Rows>>()
    };
    (all, rows)
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
    let (commands, rows) = pages(plan, &codecs, "ratio");
    Figure {
        name: "growth",
        commands,
        draw: Box::new(move |points| {
            let mut rows = rows(points)?;
            for (_, values) in &mut rows {
                for value in values.iter_mut().flatten() {
                    *value = 100.0 / *value;
                }
            }
            let grown: Vec<&str> = rows
                .iter()
                .filter(|(_, values)| values[0] > Some(100.0))
                .map(|(name, _)| name.as_str())
                .collect();
            Ok(Bars {
                title: "Fields that grow under plain LZ4".into(),
                caption: format!(
                    "The poster: some float data grows under LZ4. Here {} of {} fields do, by {:.1} % at most: {}. farpage stores a page \
                     that would grow as it is, so that none is ever longer than raw. {}",
                    grown.len(),
                    rows.len(),
                    rows.iter()
                        .filter_map(|(_, values)| values[0])
                        .fold(100.0, f64::max)
                        - 100.0,
                    if grown.is_empty() {
                        "none".to_owned()
                    } else {
                        grown.join(", ")
                    },
                    here(points)
                ),
                row: "field",
                value: "size after encoding (% of raw)",
                series: codecs.map(|(shown, _)| shown.to_owned()).to_vec(),
                rows,
                logarithmic: false,
                mark: Some((100.0, "raw size")),
            })
        }),
    }
}

fn ratio(plan: &Plan) -> Figure {
    let (commands, rows) = pages(plan, &CODECS, "ratio");
    Figure {
        name: "ratio",
        commands,
        draw: Box::new(move |points| {
            let mut rows = rows(points)?;
            // A field of one value needs no bytes: there is no ratio to show.
            rows.retain(|(name, _)| *name != Contents::Constant.name());
            let mean = |at: usize| {
                let values: Vec<f64> = rows.iter().filter_map(|(_, values)| values[at]).collect();
                geometric_mean(&values)
            };
            let caption = format!(
                "The poster compares DEFLATE and LZ4 on 12 scientific data sets. Here, over all fields, the geometric mean of the ratio is {:.2} with \
                 DEFLATE 6, {:.2} with DEFLATE 1, {:.2} with LZ4, {:.2} with shuffle and LZ4 (fields of numbers), and {:.1} with ZFP to the field's error \
                 bound (fields of floats). Pages of 64 KiB. {}",
                mean(1),
                mean(0),
                mean(2),
                mean(3),
                mean(5),
                here(points)
            );
            Ok(Bars {
                title: "Compression ratio".into(),
                caption,
                row: "field",
                value: "bytes of the field / bytes as encoded",
                series: CODECS.map(|(shown, _)| shown.to_owned()).to_vec(),
                rows,
                logarithmic: true,
                mark: Some((1.0, "raw size")),
            })
        }),
    }
}

fn time(plan: &Plan, name: &'static str, title: &'static str, path: &'static str) -> Figure {
    let (commands, rows) = pages(plan, &CODECS, path);
    Figure {
        name,
        commands,
        draw: Box::new(move |points| {
            let mut rows = rows(points)?;
            rows.retain(|(name, _)| *name != Contents::Constant.name());
            for (_, values) in &mut rows {
                for value in values.iter_mut().flatten() {
                    // Megabytes per second into milliseconds per megabyte.
                    *value = 1e3 / *value;
                }
            }
            let times = |at: usize| -> Vec<f64> {
                rows.iter()
                    .filter_map(|(_, values)| Some(values[at]? / values[2]?))
                    .collect()
            };
            Ok(Bars {
                title: format!("{title}: CPU time"),
                caption: format!(
                    "The poster: on 12 scientific data sets, a DPU that compresses instead of the CPU could speed compression up significantly. Here, in the geometric mean over all fields, \
                     DEFLATE 6 takes {:.1} times as long as LZ4 and DEFLATE 1 {:.1} times, one thread, pages of 64 KiB. ZFP's time to encode with an error \
                     bound includes decoding and comparing. {}",
                    geometric_mean(&times(1)),
                    geometric_mean(&times(0)),
                    here(points)
                ),
                row: "field",
                value: "CPU time (ms per MB of the field)",
                series: CODECS.map(|(shown, _)| shown.to_owned()).to_vec(),
                rows,
                logarithmic: true,
                mark: None,
            })
        }),
    }
}
