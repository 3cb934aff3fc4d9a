//! A program that burns CPU and does nothing else.
//!
//! The rule it keeps: the CPU time is spread evenly over the seconds.

use clap::Args;
use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::neighbour::end_with_parent;
use farpage_bench_kit::{cpus::own_time, out::say, pick::mix};

/// Number of threads: as many as the attacker has, so that the kernel shares the CPUs alike.
const THREADS: usize = super::attack::THREADS;
/// Time that a thread burns before it looks whether to rest.
const SLICE: Duration = Duration::from_micros(200);

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Burnt {
    pub(super) cpu_s: f64,
}

#[derive(Args, Debug)]
pub(crate) struct BurnOptions {
    /// Seconds to burn for
    #[arg(long)]
    pub(crate) seconds: f64,
    /// CPU seconds to burn in all
    #[arg(long)]
    pub(crate) cpu_seconds: f64,
}

/// Runs the burner, as the process that the benchmark starts.
pub(crate) fn burn(options: &BurnOptions) -> Result<()> {
    end_with_parent();
    let begun = Instant::now();
    let share = (options.cpu_seconds / options.seconds.max(0.001)).max(0.0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while begun.elapsed().as_secs_f64() < options.seconds {
                    // The share bounds all threads together: the process's own CPU time is compared
                    // with it.
                    let burnt = own_time().as_secs_f64();
                    if burnt > share * begun.elapsed().as_secs_f64() {
                        thread::sleep(Duration::from_millis(1));
                        continue;
                    }
                    let slice = Instant::now();
                    let mut x = 1;
                    while slice.elapsed() < SLICE {
                        x = (0..100).fold(x, |x, _| mix(black_box(x)));
                    }
                }
            });
        }
    });
    let cpu_s = own_time().as_secs_f64();
    say(json!(Burnt { cpu_s }))
}
