//! `farpage-bench`: STREAM on remote arrays, and everything else that farpage says about its speed.
//!
//! The rule it keeps: a figure counts only if the data behind it was verified in the same run. Exit
//! status 0: done and verified; 1: a verification or something in the world failed; 2: wrong usage.

// `println!` panics when nobody reads any more: what is found goes through `out::say`.
#![deny(clippy::print_stdout)]

mod apps;
mod arena;
mod bare;
mod codecs;
mod compare;
mod cpus;
mod data;
mod doctor;
mod eviction;
mod figures;
mod floor;
mod hostile;
mod latency;
mod options;
mod out;
mod pages;
mod pick;
mod plot;
mod points;
mod progress;
mod random;
mod raw;
mod record;
mod regmem;
mod remote;
mod report;
mod ring;
mod server;
mod sitting;
mod sparse;
mod stream;
mod swap;
mod sweep;
mod targets;
mod traffic;
mod verbs;
mod versus_swap;
mod versus_umap;
mod work;

use std::process::ExitCode;

use clap::Parser;

use crate::{
    options::{Cli, Command},
    report::ensure_verified,
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.command.common().is_some_and(|common| common.one_cpu)
        && let Err(error) = cpus::stay_here()
    {
        return failure(&anyhow::Error::new(error).context("cannot stay on one CPU"));
    }
    let measured = match &cli.command {
        Command::Stream(options) => {
            stream::run(options).map(|report| (report, options.common.format))
        }
        Command::Random(options) => {
            random::run(options).map(|report| (report, options.common.format))
        }
        Command::Traffic(options) => {
            traffic::run(options).map(|report| (report, options.common.format))
        }
        Command::Latency(options) => {
            latency::run(options).map(|report| (report, options.common.format))
        }
        Command::Eviction(options) => {
            eviction::run(options).map(|report| (report, options.common.format))
        }
        Command::Sparse(options) => {
            sparse::run(options).map(|report| (report, options.common.format))
        }
        Command::Floor(options) => {
            floor::run(options).map(|report| (report, options.common.format))
        }
        Command::Regmem(options) => {
            return done(regmem::run(options).and_then(|report| {
                report.print(options.format)?;
                ensure_verified(report.verified)
            }));
        }
        Command::Verbs(options) => {
            return done(verbs::run(options).and_then(|report| {
                report.print(options.format)?;
                ensure_verified(report.verified)
            }));
        }
        Command::Ring(options) => {
            return done(ring::run(options).and_then(|report| {
                report.print(options.format)?;
                ensure_verified(report.verified)
            }));
        }
        Command::Doctor => return done(doctor::run()),
        Command::Apps(options) => return done(apps::run(options)),
        Command::Targets(options) => return done(targets::run(options)),
        Command::Pages(options) => return done(pages::run(options)),
        Command::Codecs(options) => return done(codecs::run(options)),
        Command::Figures(options) => return done(figures::run(options)),
        Command::Compare(options) => return done(compare::run(options)),
        Command::Sweep(options) => return done(sweep::run(options)),
        Command::VersusSwap(options) => return done(versus_swap::run(options)),
        Command::VersusUmap(options) => return done(versus_umap::run(options)),
        Command::Hostile(options) => {
            return done(hostile::run(options).and_then(|report| {
                report.print(options.format)?;
                ensure_verified(report.verified)
            }));
        }
        Command::Serve(options) => return done(server::serve(options)),
        Command::HostileAttack(options) => return done(hostile::attack(options)),
        Command::HostileBurn(options) => return done(hostile::burn(options)),
    };
    done(measured.and_then(|(report, format)| {
        report.print(format)?;
        ensure_verified(report.verified)
    }))
}

fn done(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> ExitCode {
    // farpage's errors name their cause themselves, so that they can be printed alone: what has
    // been said is not said again.
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
