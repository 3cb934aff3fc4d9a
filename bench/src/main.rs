//! `farpage-bench`: STREAM on remote arrays, and everything else that farpage says about its speed.
//!
//! The rule it keeps: a figure counts only if the data behind it was verified in the same run. Exit
//! status 0: done and verified; 1: a verification or something in the world failed; 2: wrong usage.

// `println!` panics when standard output is closed: results go through `out::say`.
#![deny(clippy::print_stdout)]

mod chaos;
mod cli;
mod doctor;
mod eviction;
mod floor;
mod hostile;
mod latency;
mod parameter_server;
mod random;
mod sparse;
mod stream;
mod tiers;
mod traffic;
mod train;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use farpage_bench_apps as apps;
use farpage_bench_judge::{
    codecs, compare, figures, targets, versus_numpy, versus_swap, versus_umap,
};
use farpage_bench_kit::{cpus, options::Common, report::Report, server};
use farpage_fabric_measure::{regmem, ring, verbs};
use farpage_store_measure::pages;
use farpage_wire::check_environment;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(error) = check_environment() {
        eprintln!("error: {error}");
        return ExitCode::from(2);
    }
    let result = match &cli.command {
        Command::Stream(options) => conclude(&options.paging.common, || stream::run(options)),
        Command::Random(options) => conclude(&options.paging.common, || random::run(options)),
        Command::Traffic(options) => conclude(&options.paging.common, || traffic::run(options)),
        Command::Latency(paging) => conclude(&paging.common, || latency::run(paging)),
        Command::Eviction(paging) => conclude(&paging.common, || eviction::run(paging)),
        Command::Sparse(options) => conclude(&options.paging.common, || sparse::run(options)),
        Command::Floor(options) => conclude(&options.common, || floor::run(options)),
        Command::Doctor => doctor::run(),
        Command::Regmem(options) => regmem::run(options),
        Command::Verbs(options) => verbs::run(options),
        Command::Ring(options) => ring::run(options),
        Command::Tiers(options) => tiers::run(options),
        Command::Train(options) => train::run(options),
        Command::ParameterServer(options) => parameter_server::run(options),
        Command::Apps(options) => apps::run(options),
        Command::Targets(options) => targets::run(options),
        Command::Pages(options) => pages::run(options),
        Command::Codecs(options) => codecs::run(options),
        Command::Figures(options) => figures::run(options),
        Command::Compare(options) => compare::run(options),
        Command::VersusSwap(options) => versus_swap::run(options),
        Command::VersusNumpy(options) => versus_numpy::run(options),
        Command::VersusUmap(options) => versus_umap::run(options),
        Command::Chaos(options) => chaos::run(options),
        Command::Hostile(options) => hostile::run(options),
        Command::Serve(options) => server::serve(options),
        Command::HostileAttack(options) => hostile::attack(options),
        Command::HostileBurn(options) => hostile::burn(options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error),
    }
}

/// Runs a benchmark, on one CPU if asked to, and prints its report.
fn conclude(common: &Common, run: impl FnOnce() -> Result<Report>) -> Result<()> {
    if common.one_cpu {
        cpus::stay_here().context("cannot stay on one CPU")?;
    }
    run()?.conclude(common.run.printing.format)
}

fn failure(error: &anyhow::Error) -> ExitCode {
    // farpage's errors name their cause themselves, so that each can be printed alone: a text that
    // the line already holds is not repeated.
    let mut said = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !said.contains(&cause) {
            said += if said.is_empty() { "" } else { ": " };
            said += &cause;
        }
    }
    eprintln!("error: {said}");
    ExitCode::FAILURE
}
