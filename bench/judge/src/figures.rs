//! The evaluation of the poster "Exploring Userspace Memory Mapping for RDMA-Enabled
//! Network-Attached Memory" (Wahlgren, Faj, Green, Gokhale and Peng, SC23), measured again with
//! farpage on this machine: figures as tables (CSV) and pictures (SVG, PNG).
//!
//! The rule it keeps: a picture shows what was measured on the machine that it names, beside what
//! the poster found on its own machine; nothing is scaled, left out or taken from elsewhere.
//! Results stay in the directory, so that an interrupted run goes on.

mod draw;
pub(crate) mod plan;

use crate::figures::plan::Extent;
use anyhow::{Context, Result};
use clap::Args;

use self::plan::Plan;
use crate::points::Points;
use farpage_bench_kit::{out::say, progress::Progress, sitting::Sitting};

/// Options of `figures`.
#[derive(Args, Debug)]
pub struct FiguresOptions {
    #[command(flatten)]
    extent: Extent,
}

/// Runs the subcommand `figures` and prints what it found.
///
/// # Errors
/// Something could not be measured or verified, or Ctrl-C: results of benchmarks that have ended
/// are kept.
pub fn run(options: &FiguresOptions) -> Result<()> {
    let plan = Plan::new(&options.extent);
    let figures = draw::all(&plan);
    let mut commands: Vec<&String> = Vec::new();
    for command in figures.iter().flat_map(|figure| &figure.commands) {
        // Figures share some commands.
        if !commands.contains(&command) {
            commands.push(command);
        }
    }
    let sitting = Sitting::new(plan.smoke)?;
    let mut points = Points::open(&options.extent.out, plan.smoke)?;
    // All of them once, then all of them again, so that figures to be compared are measured side by
    // side.
    let progress = Progress::new(commands.len() as u64 * u64::from(plan.repeat));
    for repetition in 0..plan.repeat {
        for command in &commands {
            progress.phase((*command).clone());
            points.measure(&sitting, command, repetition)?;
        }
    }
    drop(progress);
    for figure in &figures {
        let bars = (figure.draw)(&points)
            .with_context(|| format!("cannot draw the figure {}", figure.name))?;
        let stem = options.extent.out.join(figure.name);
        bars.write(&stem)?;
        say(format_args!("{}.png", stem.display()))?;
    }
    Ok(())
}
