//! `farpage-bench`: STREAM on remote arrays, and everything else that farpage says about its speed.
//!
//! The rule it keeps: a figure counts only if the data behind it was verified in the same run. Exit status 0: done and
//! verified; 1: a verification or something in the world failed; 2: wrong usage.

mod bare;
mod data;
mod doctor;
mod floor;
mod latency;
mod options;
mod progress;
mod random;
mod raw;
mod remote;
mod report;
mod server;
mod stream;

use std::process::ExitCode;

use clap::Parser;

use crate::options::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let measured = match &cli.command {
        Command::Stream(options) => {
            stream::run(options).map(|report| (report, options.common.format))
        }
        Command::Random(options) => {
            random::run(options).map(|report| (report, options.common.format))
        }
        Command::Latency(options) => {
            latency::run(options).map(|report| (report, options.common.format))
        }
        Command::Floor(options) => {
            floor::run(options).map(|report| (report, options.common.format))
        }
        Command::Doctor => return doctor::run(),
        Command::Serve(options) => {
            return match server::serve(options) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => failure(&error),
            };
        }
    };
    match measured {
        Ok((report, format)) => {
            report.print(format);
            if report.verified {
                ExitCode::SUCCESS
            } else {
                eprintln!(
                    "error: verification FAILED: the figures above are worthless, and this is a bug to report"
                );
                ExitCode::FAILURE
            }
        }
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> ExitCode {
    // farpage's errors name their cause themselves, so that they can be printed alone: what has been said is not said again.
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
