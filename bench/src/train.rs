//! Training on many workers: synchronous, by divide and shuffle, in fixed groups, and alone.
//!
//! The rule it keeps: all modes start from the same parameters, see the same batches and have the
//! same learning rate, and their runs take turns. A run counts only if its workers moved the bytes
//! and took the serial steps that theory says. Workers are threads of this process that share its
//! processors, unless `--addresses` or `--aggregators-at` makes it one of several processes. So
//! times mean something only where a slow link or a slow worker dominates them: bytes and serial
//! steps are what carries over to other machines.

mod checkpoint;
mod measure;
mod options;
mod picture;
mod process;
mod report;

use anyhow::Result;
use farpage_bench_kit::report::conclude;
use farpage_train::data::Source;

pub(crate) use self::options::TrainOptions;
use self::report::Report;

/// Runs the subcommand `train` and prints the results.
pub(crate) fn run(options: &TrainOptions) -> Result<()> {
    let mut options = options.clone();
    if options.run.smoke {
        options.data = Source::Blobs;
        options.hidden = vec![64, 64];
        options.steps = 8;
    }
    if options.is_apart() {
        return process::run(options);
    }
    let report = measure::measure(options)?;
    if let Some(path) = &report.config.svg {
        picture::draw(&report, path)?;
    }
    let format = report.config.run.printing.format;
    conclude(&report, report.verified, format, Report::human)
}
