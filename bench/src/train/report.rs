//! Results of `train`, as JSON and as tables.

use farpage_bench_kit::report::{filled_table, run_table};
use serde::Serialize;

use super::options::TrainOptions;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) benchmark: &'static str,
    pub(super) verified: bool,
    pub(super) parameters: usize,
    pub(super) parameter_bytes: usize,
    pub(super) config: TrainOptions,
    pub(super) modes: Vec<Figures>,
    /// Accuracy of the consensus, ds minus bsp, in points over the pairs of one seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ds_minus_bsp: Option<Paired>,
}

#[derive(Debug, Serialize)]
pub(super) struct Paired {
    pub(super) mean_points: f64,
    /// Bound that the true mean is above with 95 %; absent for a single seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) above_points: Option<f64>,
    pub(super) pairs: usize,
}

/// Figures of a mode: means over its runs unless something else is said.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    pub(super) mode: String,
    /// Accuracy of the workers' mean, on examples that no worker trained with.
    pub(super) accuracy: f64,
    /// Accuracy of the worst worker, after rounds without training.
    pub(super) worst_accuracy: f64,
    pub(super) loss: f64,
    /// Distance of the workers from their mean, over the length of the mean.
    pub(super) distance: f64,
    pub(super) bytes_per_step: f64,
    /// Bytes over theory's for a ring or aggregators, in the first seed's run; absent if none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes_over_theory: Option<f64>,
    pub(super) serial_steps_per_step: f64,
    /// Seconds of the slowest worker, the median of the runs.
    pub(super) seconds: f64,
    /// Share of a worker's time that exchanges take.
    pub(super) exchange_share: f64,
    /// Seconds until the consensus is as good as bsp's at its end, in the runs of the first seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seconds_to_bsp: Option<f64>,
    /// Hashes of all parameters of all workers at the end, by seed.
    pub(super) hashes: Vec<String>,
    /// Hashes of each worker's parameters, by rank, in the run of the first seed.
    pub(super) worker_hashes: Vec<String>,
    pub(super) accuracies: Vec<f64>,
    /// Curve of the run of the first seed.
    pub(super) curve: Vec<Point>,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    pub(super) step: u64,
    pub(super) seconds: f64,
    pub(super) loss: f64,
    pub(super) accuracy: f64,
    pub(super) distance: f64,
}

impl Report {
    pub(super) fn human(&self) -> String {
        let row = |mode: &Figures| {
            let or_none = |value: Option<f64>, digits: usize| {
                value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
            };
            let [best, worst] = [mode.accuracy, mode.worst_accuracy].map(|share| 100.0 * share);
            let (loss, distance) = (mode.loss, mode.distance);
            let learned = format!("{best:.2} | {worst:.2} | {loss:.3} | {distance:.1e}");
            let (mb, over) = (
                mode.bytes_per_step / 1e6,
                or_none(mode.bytes_over_theory, 4),
            );
            let (serial, seconds) = (mode.serial_steps_per_step, mode.seconds);
            let (shares, to_bsp) = (shares(mode.exchange_share), or_none(mode.seconds_to_bsp, 2));
            let moved = format!("{mb:.3} | {over} | {serial:.0} | {seconds:.2}");
            format!("{} | {learned} | {moved} | {shares} | {to_bsp}", mode.mode)
        };
        let results = filled_table(
            "mode | accuracy, % | worst worker, % | loss | distance | MB per step | over theory | serial steps | s | \
             computing / exchanging, % | s to bsp's accuracy",
            self.modes.iter().map(row),
        );
        let config = &self.config;
        let (parameters, mb) = (self.parameters, self.parameter_bytes as f64 / 1e6);
        let workers = format!("{} in groups of {}", config.workers, config.group);
        let mut rows = vec![
            ("workers", workers),
            ("parameters", format!("{parameters} ({mb:.2} MB)")),
            ("runs of each mode", config.seeds.to_string()),
        ];
        let aggregators = config.aggregators.map(|count| count.to_string());
        rows.extend(aggregators.map(|count| ("aggregators", count)));
        if let Some(paired) = &self.ds_minus_bsp {
            let (mean, pairs) = (paired.mean_points, paired.pairs);
            let bound = paired.above_points.map_or(String::new(), |above| {
                format!(", with 95 % above {above:+.2}")
            });
            let points = format!("{mean:+.2} points over {pairs} pairs{bound}");
            rows.push(("accuracy, ds - bsp", points));
        }
        let run = run_table(self.benchmark, self.verified, rows);
        [results, run].map(|table| table.to_string()).join("\n")
    }
}

/// Formats the shares of a worker's time in percent: computing, and exchanging.
pub(super) fn shares(exchanging: f64) -> String {
    let percent = 100.0 * exchanging;
    format!("{:.0} / {percent:.0}", 100.0 - percent)
}
